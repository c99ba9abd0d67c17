"""What the analysis knows about names: of operations, of runtime calls and of kernels."""

from __future__ import annotations

import functools
import re

# Operations that a fused chain does not reach across: they belong to a library, and chains end before and behind them.
_LIBRARY_OP = re.compile(
    r"^(aten::)?(_?conv|_?convolution|cudnn_convolution|thnn_conv|linear$|matmul$|mm$|addmm|bmm$|baddbmm|einsum$|"
    r"scaled_dot_product|_scaled_dot_product|_flash_attention|_efficient_attention|multi_head_attention|"
    r"lstm|gru|rnn|_cudnn_rnn|fft_|_fft_)"
)
_LIBRARY_KERNEL = re.compile(
    r"gemm|gemv|conv(?!ert)|cudnn|cutlass|xmma|nvjet|fmha|flash_|_attn|attention|splitKreduce|rnn|lstm|fft", re.I
)
# Operations that move no data by themselves.
_VIEW = re.compile(
    r"^aten::(view|_unsafe_view|_reshape_alias|reshape|transpose|permute|t|slice|select|unsqueeze|squeeze|expand|"
    r"expand_as|as_strided|narrow|split|split_with_sizes|chunk|unbind|unfold|flatten|unflatten|alias|detach|"
    r"detach_|view_as|movedim|mT|swapaxes|diagonal|real|imag|view_as_real|view_as_complex|lift_fresh|contiguous|to|"
    r"_to_copy|type_as|empty|empty_like|empty_strided|new_empty|new_empty_strided|resize_|set_|item|"
    r"_local_scalar_dense|is_nonzero|result_type|can_cast|size|numel|stride|is_.*|resolve_conj|resolve_neg|"
    r"_conj|_nnpack_available|dropout)$|^(detach|inductor::_reinterpret_tensor)$"
)
_MOVES = frozenset({"aten::copy_", "aten::clone"})
_SYNC = re.compile(r"^(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize$|^(cuda|hip)Memcpy$")
_LAUNCH = re.compile(r"Launch|Memcpy|Memset")
GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")
_CAPTURE = re.compile(r"^(cuda|cu|hip)(Stream(Begin|End)Capture|GraphInstantiate|ModuleLoad|LibraryLoad)")
_COMPILES = re.compile(
    r"\(dynamo_timed\)|^_compile\b|^(entire_frame_compile|backend_compile|compile_fx|compile_inner|"
    r"async_compile|CachingAutotuner\.|triton_autotune)|cudagraph(ify|_capture)"
)


@functools.cache
def is_library_op(name: str) -> bool:
    """Whether chains of operations end here: a convolution, matrix product, attention, recurrent net or FFT."""
    return _LIBRARY_OP.match(name) is not None


@functools.cache
def is_library_kernel(name: str) -> bool:
    """The same by a kernel's name."""
    return _LIBRARY_KERNEL.search(name) is not None


@functools.cache
def is_view(name: str) -> bool:
    """Whether an operation computes nothing, unless it copies (see ``moves_data``)."""
    return _VIEW.match(name) is not None


def moves_data(name: str) -> bool:
    return name in _MOVES


@functools.cache
def is_sync(name: str) -> bool:
    """Whether a runtime call does nothing but wait."""
    return _SYNC.match(name) is not None


@functools.cache
def is_launch(name: str) -> bool:
    """Whether a runtime call puts work on a device."""
    return _LAUNCH.search(name) is not None


@functools.cache
def is_unsteady(name: str) -> bool:
    """Whether a call or annotation belongs to compilation or to the capture of a CUDA graph."""
    return _CAPTURE.match(name) is not None or _COMPILES.search(name) is not None


@functools.cache
def short(name: str) -> str:
    """An operation as patterns name it; a C++ kernel without return type, namespaces, template and arguments."""
    if name.startswith("aten::"):
        return name[len("aten::") :]
    if "(" in name or "<" in name:
        plain = re.sub(r"\(anonymous namespace\)|\{lambda[^}]*\}", "", name)
        while (inner := re.sub(r"<[^<>]*>", "", plain)) != plain:
            plain = inner
        functor = re.search(r"(\w+)(?:Functor|_kernel_cuda|_kernel_impl)\b", name)
        base = plain.partition("(")[0].split("::")[-1].split(" ")[-1] or name[:60]
        generic = base.startswith(("vectorized_elementwise", "elementwise_kernel", "unrolled_elementwise", "reduce"))
        return f"{base}[{functor[1]}]" if generic and functor else base
    return name
