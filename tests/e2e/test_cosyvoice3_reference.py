"""Our reference of CosyVoice3's vocoder against upstream's classes, where COSYVOICE_HOME names a checkout."""

import sys

import hift_classes
import pytest
import torch

from voxfuse.e2e.stacks import _cosyvoice3_reference as reference
from voxfuse.patches import _cosyvoice_import

needs_checkout = pytest.mark.skipif(not hift_classes.CHECKOUT, reason="COSYVOICE_HOME names no checkout")
RELEASED = hift_classes.RELEASED | {"in_channels": 80, "base_channels": 512}


@pytest.fixture(scope="module")
def pair():
    """Upstream's generator at the released shapes and ours with its weights."""
    module = hift_classes.upstream("cosyvoice3")
    predictor = sys.modules[_cosyvoice_import.F0_PREDICTOR].CausalConvRNNF0Predictor
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(reference, "NOISE_SAMPLES", 300 * 24_000)  # others shorten it
        torch.manual_seed(3)
        upstream = module.CausalHiFTGenerator(**RELEASED, f0_predictor=predictor())
        torch.manual_seed(3)
        ours = reference.CausalHiFTGenerator(**RELEASED, f0_predictor=reference.CausalConvRNNF0Predictor())
        torch.manual_seed(4)
        with torch.no_grad():
            for name, parameter in upstream.named_parameters():
                if name.endswith("alpha"):
                    parameter.uniform_(0.3, 3)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.2)
            upstream.f0_predictor.classifier.bias.fill_(150.0)
    return upstream.eval(), ours.eval()


@needs_checkout
def test_names_attributes_and_shapes_are_upstreams(pair):
    upstream, ours = pair
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in upstream.state_dict().items()}
    parts, mine = dict(upstream.named_modules()), dict(ours.named_modules())
    assert [(name, type(part).__name__) for name, part in parts.items()] == [
        (name, type(part).__name__) for name, part in mine.items()
    ]
    for name, part in parts.items():
        public = {key for key in vars(part) if not key.startswith("_")}
        assert public == {key for key in vars(mine[name]) if not key.startswith("_")}, name
    assert torch.equal(upstream.stft_window, ours.stft_window)


@needs_checkout
def test_the_noise_of_one_seed_is_upstreams(pair):
    upstream, ours = pair
    for name in ("rand_ini", "sine_waves"):
        assert torch.equal(getattr(upstream.m_source.l_sin_gen, name), getattr(ours.m_source.l_sin_gen, name))
    assert torch.equal(upstream.m_source.uv, ours.m_source.uv)


@needs_checkout
@pytest.mark.parametrize("finalize", [True, False])
def test_the_results_are_upstreams_to_the_bit(pair, finalize):
    upstream, ours = pair
    ours.load_state_dict(upstream.state_dict())
    mel = torch.randn(2, 80, 12)
    (audio, source), (mine, my_source) = (hift.inference(mel, finalize=finalize) for hift in pair)
    assert torch.equal(source, my_source) and torch.equal(audio, mine)
    with torch.no_grad():
        f0 = 80 + 200 * torch.rand(2, 960, 1)
        assert all(torch.equal(*both) for both in zip(upstream.m_source(f0), ours.m_source(f0), strict=True))


def test_a_causal_vocoder_hears_nothing_of_what_comes_later():
    """Independent of upstream: sample t depends on mel frames up to its own, the look-ahead and the transform's."""
    hift = hift_classes.generator("cosyvoice3")
    mel = torch.randn(1, hift_classes.BINS, 20)
    later = mel.clone()
    later[:, :, 12:] += 1
    (audio, source), (other, other_source) = hift.inference(mel), hift.inference(later)
    per_frame, ahead = 48, hift.conv_pre_look_right
    assert torch.equal(source[:, :, : 9 * per_frame], other_source[:, :, : 9 * per_frame])
    assert not torch.equal(source[:, :, 9 * per_frame :], other_source[:, :, 9 * per_frame :])
    heard = (12 - ahead - 1) * per_frame
    assert torch.allclose(audio[:, :heard], other[:, :heard], atol=1e-6)
    assert (audio - other).abs()[:, heard + 2 * per_frame :].max() > 1e-3
