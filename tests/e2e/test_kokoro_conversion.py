"""Kokoro's weights dequantised, held against onnxruntime, which dequantises and runs the export by itself."""

import warnings

import numpy as np
import pytest
import torch

from voxfuse.e2e.weights import kokoro_onnx

PHONEMES = "ˈæpᵊlz ænd pˈɛɹz."


def test_weight_norm_is_restored_and_zero_rows_are_finite():
    weight = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    weight[2] = 0
    g, v = (torch.from_numpy(array) for array in kokoro_onnx.restore_weight_norm(weight))
    conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 4, 5))
    conv.parametrizations.weight.original0.data, conv.parametrizations.weight.original1.data = g, v
    np.testing.assert_allclose(conv.weight.detach().numpy(), weight, rtol=1e-6, atol=1e-7)
    assert (g[2] == 0).all() and (v[2] == 1).all()


@pytest.mark.parametrize(
    ("node", "module"),
    [
        ("/encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant", "text_encoder.cnn.0.0"),
        ("/encoder/F0.1/conv1x1/Conv_quant", "predictor.F0.1.conv1x1"),
        ("/encoder/shared/LSTM_quant", "predictor.shared"),
        ("/encoder/predictor/text_encoder/lstms.3/fc/Gemm_MatMul_quant", "predictor.text_encoder.lstms.3.fc"),
        ("/encoder/bert_encoder/MatMul_quant", "bert_encoder"),
        ("/decoder/decoder/asr_res/asr_res.0/Conv_quant", "decoder.asr_res.0"),
        ("/decoder/decoder/generator/resblocks.1/convs2.0/Conv_quant", "decoder.generator.resblocks.1.convs2.0"),
    ],
)
def test_module_of_a_node(node, module):
    assert kokoro_onnx.module_name(node) == module


@pytest.fixture(scope="module")
def export():
    return kokoro_onnx.read_export()


@pytest.fixture(scope="module")
def converted(export):
    """Tensors by KModel's names."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = kokoro_onnx.state_dicts(export)
    assert all(name.startswith("module.") for tensors in result.values() for name in tensors)
    return {f"{part}.{name[7:]}": tensor for part, tensors in result.items() for name, tensor in tensors.items()}


@pytest.mark.slow
@pytest.mark.weights
def test_conversion_is_complete_and_finite(converted):
    assert len(converted) == 688
    assert sum(tensor.numel() for tensor in converted.values()) == 81_810_022
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in converted.values())
    gains = [tensor for name, tensor in converted.items() if name.endswith(".weight_g")]
    assert len(gains) == 89
    assert sum(int((gain == 0).sum()) for gain in gains) == 94


# The export in float, run by onnxruntime: integer nodes replaced, dequantisation left to DequantizeLinear


def float_graph(export: bytes, outputs: list[str]):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    from onnx import helper

    model = onnx.load_from_string(export)
    graph = model.graph
    by_output = {output: node for node in graph.node for output in node.output}
    by_name = {node.name: node for node in graph.node}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    consumers: dict[str, list] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    nodes, replaced = [], set()

    def dequantized(weight, scale, zero_point, axis, transpose=None):
        name = f"float:{weight}:{scale}"
        if name not in replaced:
            replaced.add(name)
            nodes.append(helper.make_node("DequantizeLinear", [weight, scale, zero_point], [name], axis=axis))
            if transpose:
                nodes.append(helper.make_node("Transpose", [name], [name + ":t"], perm=transpose))
        return name + (":t" if transpose else "")

    def bias_of(node):
        """The float bias, if any, that was quantised and added to an integer convolution's output."""
        (add,) = consumers[node.output[0]]
        if add.op_type != "Add":
            return []
        name = next(name for name in add.input if name != node.output[0])
        while name not in constants:
            name = by_output[name].input[0]
        return [name]

    for node in graph.node:
        if node.op_type in ("ConvInteger", "MatMulInteger"):
            end = by_name[f"{node.name}_output_scale_mul"]
            activation = by_output[node.input[0]].input[0]
            scale = by_output[end.input[1]].input[1]
            column = node.op_type == "MatMulInteger"
            weight = dequantized(node.input[1], scale, node.input[3], axis=int(column))
            inputs = [activation, weight] if column else [activation, weight, *bias_of(node)]
            nodes.append(
                helper.make_node("MatMul" if column else "Conv", inputs, list(end.output), name="f" + node.name)
            )
            nodes[-1].attribute.extend(node.attribute)
            replaced.add(end.output[0])
        elif node.op_type == "DynamicQuantizeLSTM":
            names = list(node.input)
            w = dequantized(names[1], names[8], names[9], 0, [0, 2, 1])
            r = dequantized(names[2], names[10], names[11], 0, [0, 2, 1])
            nodes.append(
                helper.make_node("LSTM", [names[0], w, r, *names[3:8]], list(node.output), name="f" + node.name)
            )
            nodes[-1].attribute.extend(node.attribute)
        elif node.output[0] not in replaced:
            nodes.append(node)
    live, wanted = [], set(outputs)
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            live.append(node)
    assert not {node.op_type for node in live} & {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"}
    del graph.node[:], graph.output[:]
    graph.node.extend(reversed(live))
    graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    # optimised, onnxruntime turns DequantizeLinear + MatMul back into an integer product
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def initializer_values(export, *names):
    onnx = pytest.importorskip("onnx")
    constants = {tensor.name: tensor for tensor in onnx.load_from_string(export).graph.initializer}
    return [onnx.numpy_helper.to_array(constants[name]) for name in names]


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(
    ("module", "initializer", "zero_point"),
    [
        (
            "text_encoder.cnn.0.0",
            "/encoder/text_encoder/cnn.0/Mul_output_0",
            "/encoder/text_encoder/cnn.0/Mul_output_0",
        ),
        (
            "decoder.generator.resblocks.1.convs1.1",
            "/decoder/decoder/generator/resblocks.1/Mul_8_output_0",
            "/decoder/decoder/generator/resblocks.1/Mul_8_output_0",
        ),
        # a zero point shared with an unrelated node
        (
            "decoder.generator.noise_res.0.convs1.0",
            "/decoder/decoder/generator/noise_res.0/Mul_2_output_0",
            "/encoder/text_encoder/cnn.1/Mul_output_0",
        ),
    ],
)
def test_convolution_weights_are_what_onnxruntime_dequantizes(export, converted, module, initializer, zero_point):
    onnxruntime = pytest.importorskip("onnxruntime")
    from onnx import helper

    names = [f"{initializer}_quantized", f"{initializer}_scale", f"{zero_point}_zero_point"]
    values = initializer_values(export, *names)
    types = [helper.np_dtype_to_tensor_dtype(value.dtype) for value in values]
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"])],
        "dequantize",
        [
            helper.make_tensor_value_info(name, kind, value.shape)
            for name, kind, value in zip("qsz", types, values, strict=True)
        ],
        [helper.make_tensor_value_info("w", helper.np_dtype_to_tensor_dtype(np.dtype(np.float32)), None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, dict(zip("qsz", values, strict=True)))

    g, v = converted[f"{module}.weight_g"].double(), converted[f"{module}.weight_v"].double()
    folded = g * v / v.norm(dim=(1, 2), keepdim=True)
    np.testing.assert_allclose(folded.numpy(), expected, rtol=0, atol=2e-7 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.weights
def test_model_equals_the_export_in_float(export, monkeypatch):
    """Durations, F0 and energy to 1e-5 of their size; the generator, given the export's own source, likewise."""
    from voxfuse.e2e.stacks.kokoro import KokoroStack

    stack = KokoroStack()
    stack.load("cpu")
    model, style = stack.model, stack._styles[len(PHONEMES) - 1]
    generator = "/decoder/decoder/generator"
    names = {
        "duration": "/encoder/predictor/ReduceSum_output_0",
        "F0": "/encoder/F0_proj/Conv_output_0",
        "N": "/encoder/N_proj/Conv_output_0",
        "text": "/encoder/text_encoder/Transpose_2_output_0",
        "source": f"{generator}/Concat_3_output_0",
        "conv_post": f"{generator}/conv_post/Conv_output_0",
    }
    session = float_graph(export, list(names.values()))
    tokens = np.array([[0, *(model.vocab[symbol] for symbol in PHONEMES), 0]], dtype=np.int64)
    feeds = {"tokens": tokens, "style": style.numpy(), "speed": np.ones(1, np.float32)}
    expected = dict(zip(names, session.run(None, feeds), strict=True))

    found = {}

    def keep(name):
        return lambda module, inputs, output: found.update({name: output.detach()})

    for name, module in (
        ("duration", model.predictor.duration_proj),
        ("F0", model.predictor.F0_proj),
        ("N", model.predictor.N_proj),
        ("text", model.text_encoder),
        ("conv_post", model.decoder.generator.conv_post),
    ):
        module.register_forward_hook(keep(name))
    magnitude, phase = torch.from_numpy(expected["source"]).chunk(2, dim=1)
    monkeypatch.setattr(model.decoder.generator.stft, "transform", lambda signal: (magnitude, phase))
    model(PHONEMES, style)
    found["duration"] = found["duration"].sigmoid().sum(-1)

    for name in ("duration", "F0", "N", "text", "conv_post"):
        error = np.abs(found[name].numpy() - expected[name]).max() / np.abs(expected[name]).max()
        print(f"{name}: {error:.1e}")
        assert found[name].shape == expected[name].shape
        assert error < 1e-5, name
    np.testing.assert_array_equal(found["duration"].round().numpy(), expected["duration"].round())
