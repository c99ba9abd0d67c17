"""Patterns: what they match, and that every fusion has some."""

import importlib
from pathlib import Path

import pytest

from voxfuse import kernels
from voxfuse.fusions.registry import FUSIONS
from voxfuse.kernels._op import OPS
from voxfuse.profiles import matching
from voxfuse.profiles.components import component_of
from voxfuse.profiles.operations import is_library_kernel, is_library_op, is_unsteady, is_view, short
from voxfuse.records import Fusion, FusionPattern, TensorSignature


def fusion(*patterns, stacks=("kokoro",)):
    return [
        Fusion(name="f", stacks=stacks, operations=(), contract="bitwise", envelope="", kernels=(), patterns=patterns)
    ]


def tensor(*shape, dtype="float32"):
    return (TensorSignature(shape=shape, dtype=dtype, strides=()),)


@pytest.mark.parametrize(
    ("pattern", "operations", "classes", "signature", "stack", "expected"),
    [
        ({"operations": ("mul", "sin")}, ("add", "mul", "sin", "pow"), (), (), "", True),
        ({"operations": ("mul", "sin")}, ("mul", "pow", "sin"), (), (), "", False),
        ({"operations": ("mul",), "modules": ("A",)}, ("mul",), ("Root", "A", "B"), (), "", True),
        ({"operations": ("mul",), "modules": ("A", "B")}, ("mul",), ("A", "X", "B"), (), "", True),
        ({"operations": ("mul",), "modules": ("B", "A")}, ("mul",), ("A", "B"), (), "", False),
        ({"operations": ("mul",), "modules": ("A",)}, ("mul",), (), (), "", True),  # not told: refutes nothing
        ({"modules": ("A",)}, ("anything", "at all"), ("A",), (), "", True),
        ({"modules": ("A",)}, ("anything",), (), (), "", False),  # but proves nothing either
        ({"operations": ("mul",), "ranks": (3,)}, ("mul",), (), tensor(1, 2, 3), "", True),
        ({"operations": ("mul",), "ranks": (3,)}, ("mul",), (), tensor(1, 2), "", False),
        ({"operations": ("mul",), "dtypes": ("bfloat16",)}, ("mul",), (), tensor(2), "", False),
        ({"operations": ("mul",)}, ("mul",), (), (), "chatterbox", False),
    ],
)
def test_patterns(pattern, operations, classes, signature, stack, expected):
    found = matching.matches(operations, classes, signature, stack, fusion(FusionPattern(**pattern)))
    assert found == (("f",) if expected else ())


def test_every_registered_fusion_declares_how_it_looks_in_a_profile():
    assert [name for name, item in FUSIONS.items() if not item.patterns] == []


def test_own_kernels_are_known_by_the_names_in_their_sources():
    assert matching.own_kernels(("triton:_streaming_kernel", "mul")) == ("adain",)
    assert "adain_snake" in matching.running(("triton:_streaming_kernel",), "kokoro")
    assert {"adain_snake", "adain_leaky_relu"} <= {*matching.running(("voxfuse::adain_act",), "kokoro")}
    assert matching.running(("mul",), "") == ()
    assert matching.foreign_kernels(("triton:_streaming_kernel", "triton:snake_fwd")) == ("snake_fwd",)
    assert matching.foreign_kernels(("vllm::rms_norm", "c10d::allreduce_", "mul")) == ("vllm::rms_norm",)


def test_names():
    assert is_library_op("aten::conv1d") and is_library_op("aten::addmm") and not is_library_op("aten::mul")
    assert is_library_kernel("sm90_xmma_gemm_f32") and is_library_kernel("void cudnn::conv")
    assert not is_library_kernel("void at::native::convert_kernel")
    assert is_view("aten::transpose") and not is_view("aten::add")
    assert is_unsteady("cudaStreamBeginCapture") and not is_unsteady("cudaStreamIsCapturing")
    assert not is_unsteady("cudaThreadExchangeStreamCaptureMode")  # torch's allocator, in every eager trace
    assert not is_unsteady("cudaGraphLaunch") and not is_unsteady("Torch-Compiled Region: 0/0")
    elementwise = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, char*>(int)"
    assert short("aten::mul") == "mul" and short(elementwise).startswith("vectorized_elementwise_kernel")
    assert short("_adain_kernel") == "_adain_kernel"


@pytest.mark.parametrize(
    ("stage", "component"),
    [("generator", "vocoder"), ("flow", "DiT"), ("talker", "AR"), ("text", "tokenizer"), ("hm", "other")],
)
def test_stages_without_a_declared_component_go_by_their_names(stage, component):
    assert component_of(stage, {}) == component and component_of(stage, {stage: "AR"}) == "AR"


def test_the_names_read_from_the_sources_are_those_of_the_registered_operations() -> None:
    """However a kernel file spells its operation's name: a profile of any stack reads all of them."""
    pytest.importorskip("triton")
    for file in Path(kernels.__file__).parent.glob("[a-z]*.py"):
        importlib.import_module(f"voxfuse.kernels.{file.stem}")
    named = {name for names in matching._own_names().values() for name in names if "::" in name}
    assert named == {f"voxfuse::{name}" for name in OPS if OPS[name].launch.__module__.startswith("voxfuse.")}


RMS = ("to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul")
ROTARY = ("mul", "neg", "cat", "mul", "add", "mul", "neg", "cat", "mul", "add", "cat", "cat")


@pytest.mark.parametrize(
    ("operations", "classes", "expected"),
    [
        (RMS, ("DecoderLayer", "RMSNorm"), ("rms_norm",)),
        (RMS, ("DecoderLayer", "Attention", "RMSNorm"), ("rms_norm", "gqa_attention")),
        (ROTARY, ("DecoderLayer", "Attention"), ("gqa_attention",)),
        (("scaled_dot_product_attention",), ("DecoderLayer", "Attention"), ("gqa_attention",)),
        (("silu",), ("DecoderLayer", "MLP", "*SiLUActivation"), ("swiglu",)),
        (("mul",), ("DecoderLayer", "MLP"), ("swiglu",)),
        (("linear",), ("DecoderLayer", "MLP", "*Linear"), ("skinny_gemm",)),
        (("linear",), ("DecoderLayer", "Attention", "*Linear"), ("skinny_gemm",)),
        (("add",), ("DecoderLayer",), ()),
    ],
)
def test_the_chains_of_a_qwen3_decoder_find_their_fusions(operations, classes, expected):
    """As torch 2.13 and transformers 5.24 dispatch them, in a profile of ``Qwen3ForCausalLM``."""
    path = tuple(name[1:] if name.startswith("*") else f"Qwen3{name}" for name in classes)
    assert matching.matches(operations, path, (), "transformers") == ("decode_graph", *expected)
    assert matching.matches(operations, path, (), "kokoro") == ()


@pytest.mark.parametrize("stack", ["cosyvoice2", "cosyvoice3", "chatterbox"])
def test_the_blocks_of_a_hift_ask_for_its_graph_too(stack: str) -> None:
    """``decode`` is a plain method: no mark of the generator itself is in a profile."""
    assert {"hift_graph", "snake_conv_block"} <= {
        *matching.matches(("aten::sin",), ("ModuleList", "ResBlock", "Snake"), (), stack)
    }
