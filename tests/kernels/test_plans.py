"""Remembered launches on the CPU: a stand-in for a compiled kernel reads and writes memory by its addresses, and
refuses arguments that it was not specialised for."""

import ctypes
import functools
from types import SimpleNamespace

import pytest
import torch

from voxfuse.kernels import _launch, _op, _plans
from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import TALLIES, Run, fused_op
from voxfuse.kernels._triton import triton

SCALE = 0.5


def specialised(addresses, integers):
    """What Triton compiles a kernel for: addresses and sizes that 16 divides, sizes of one."""
    pointers = tuple(None if address is None else address % 16 == 0 for address in addresses)
    return pointers, tuple((value == 1, value % 16 == 0) for value in integers)


class Kernel:
    """y[i] = x[i · step] · factor + bias[i · bias_step] for n elements of fp32, a launch for each of two halves."""

    def __init__(self):
        self.compiled = 0

    def __getitem__(self, grid):
        return functools.partial(self._first, *grid)

    def _first(self, programs, x, bias, y, n, step, bias_step, factor, BLOCK, **options):
        self.compiled += 1
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in (x, bias, y)]
        compiled = Compiled(specialised(addresses, (n, step, bias_step)))
        compiled.run(
            programs, 1, 1, None, "function", "packed", None, None, None, *addresses, n, step, bias_step, factor, BLOCK
        )
        return compiled


class Compiled:
    function, packed_metadata = "function", "packed"

    def __init__(self, made_for):
        self.made_for, self.hooked = made_for, 0

    def __getitem__(self, grid):
        def run(*args):
            self.hooked += 1
            self.run(*grid, None, "function", "packed", None, None, None, *args)

        return run

    def run(
        self, a, b, c, stream, function, packed, metadata, enter, leave, x, bias, y, n, step, bias_step, factor, BLOCK
    ):
        assert (function, packed, metadata, enter, leave) == ("function", "packed", None, None, None)
        assert specialised((x, bias, y), (n, step, bias_step)) == self.made_for
        assert a == -(-n // BLOCK) and (b, c) == (1, 1)

        def at(address, index):
            return ctypes.c_float.from_address(address + 4 * index)

        for i in range(n):
            more = 0.0 if bias is None else at(bias, i * bias_step).value
            at(y, i).value = at(x, i * step).value * factor + more


def op_of(body, schema="(Tensor x, Tensor? bias, float factor) -> Tensor"):
    """A fused operation with a launcher that counts its calls."""

    def launcher(*args):
        launcher.calls += 1
        return body(*args)

    launcher.calls = 0
    name = f"test_plan_{len(_op.OPS)}"
    return fused_op(name, schema, reference=None, unsupported=lambda *_: None, fake=None)(launcher), launcher


def run_kernel(kernel, x, bias, y, factor):
    n = y.numel()
    strides = x.stride(-1), 0 if bias is None else bias.stride(-1)
    launch(kernel, -(-n // 8), (x, bias, y), (n, *strides), (factor,), (8,), ())


@pytest.fixture
def gpu(monkeypatch):
    """Lets CPU tensors pass for a GPU's."""
    monkeypatch.setattr(_op, "_placement", lambda args, backend: (args[0].device, None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(_launch, "_stream", lambda device: None)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    with torch.no_grad():
        yield Run("triton", "plans")


def expected(x, bias, factor):
    return x * factor + (0.0 if bias is None else bias)


def test_sizes_strides_and_alignment_through_remembered_launches(gpu):
    kernel = Kernel()

    def body(x, bias, factor):
        y = torch.empty(x.shape)
        run_kernel(kernel, x, bias, y, factor)
        return y

    op, launcher = op_of(body)
    calls = 0
    for _ in range(4):
        for n in (1, 8, 15, 16, 17, 32):
            for step in (1, 2, 16):
                for offset in (0, 1, 4):  # the address of the second is not divisible by 16
                    for with_bias in (False, True):
                        x = torch.randn(40 * step)[offset:][: n * step : step]
                        bias = torch.randn(n) if with_bias else None
                        torch.testing.assert_close(op(x, bias, SCALE, run=gpu), expected(x, bias, SCALE))
                        calls += 1
    of_aligned = 6 * 3 * 2  # offsets 0 and 4 share shapes and strides
    unaligned = calls // 3
    assert launcher.calls - unaligned <= 2 * of_aligned < calls - unaligned


def test_every_call_has_an_output_of_its_own_and_reads_its_own_tensors(gpu):
    kernel = Kernel()

    def body(x, bias, factor):
        first, second = torch.empty(x.shape), x.new_empty(x.shape)
        scratch = torch.empty_like(x)
        run_kernel(kernel, x, None, scratch, factor)
        run_kernel(kernel, scratch, bias, first, factor)
        run_kernel(kernel, bias, None, second, 2 * factor)
        return second, first

    op, launcher = op_of(body, "(Tensor x, Tensor bias, float factor) -> (Tensor, Tensor)")
    results = []
    for _ in range(5):
        x, bias = torch.randn(16), torch.nn.Parameter(torch.randn(16))
        results.append((op(x, bias, SCALE, run=gpu), 2 * SCALE * bias, expected(x * SCALE, bias, SCALE)))
    before = TALLIES.of("plans").calls
    x = torch.randn(16)
    results.append((op(x, x, SCALE, run=gpu), 2 * SCALE * x, expected(x * SCALE, x, SCALE)))
    assert TALLIES.of("plans").calls == before + 1 and launcher.calls == 2
    for (second, first), *wanted in results:
        torch.testing.assert_close([second, first], wanted)
    op(x, x, 0.25, run=gpu)
    assert launcher.calls == 3, "another factor is another plan"


def _copies(kernel, x, bias, factor):
    y = torch.empty(x.shape)
    run_kernel(kernel, x * 1, bias, y, factor)
    return y


TABLE = torch.arange(16.0)


def _keeps_a_table(kernel, x, bias, factor):
    y = torch.empty(x.shape)
    run_kernel(kernel, x, TABLE, y, factor)
    return y.view(16) if y.numel() != 16 else y


def _gives_a_view(kernel, x, bias, factor):
    y = torch.empty((2, *x.shape))
    run_kernel(kernel, x, bias, y[1], factor)
    return y[1]


def _gives_another_shape(kernel, x, bias, factor):
    y = torch.empty(24)
    run_kernel(kernel, x, bias, y[:16], factor)
    return y[:16]


def _reads_behind_the_start(kernel, x, bias, factor):
    y = torch.empty(8)
    run_kernel(kernel, x[8:], bias, y, factor)
    return y


@pytest.mark.parametrize(
    "body, wanted",
    [
        (_copies, lambda x, bias: x * SCALE + bias),
        (_keeps_a_table, lambda x, bias: x * SCALE + TABLE),
        (_gives_a_view, lambda x, bias: x * SCALE + bias),
        (_gives_another_shape, lambda x, bias: x * SCALE + bias),
        (_reads_behind_the_start, lambda x, bias: x[8:] * SCALE + bias[:8]),
    ],
)
def test_a_launcher_that_does_more_runs_as_it_is(gpu, body, wanted):
    op, launcher = op_of(functools.partial(body, Kernel()))
    for _ in range(4):
        x, bias = torch.randn(16), torch.randn(16)
        torch.testing.assert_close(op(x, bias, SCALE, run=gpu), wanted(x, bias))
    assert launcher.calls == 4


@pytest.mark.parametrize("shared", ["the same tensor", "one memory"])
def test_what_cannot_be_told_apart_at_recording_is_not_planned_wrongly(gpu, shared):
    """Seen first with arguments that overlap, called then with others."""
    kernel = Kernel()

    def body(x, bias, factor):
        y = torch.empty(8)
        run_kernel(kernel, x[8:] if shared == "one memory" else x, bias, y, factor)
        return y

    op, _ = op_of(body)
    for _ in range(3):
        x = torch.randn(16 if shared == "one memory" else 8)
        bias = x[8:] if shared == "one memory" else x
        torch.testing.assert_close(op(x, bias, SCALE, run=gpu), expected(bias, bias, SCALE))
    for _ in range(3):
        x, bias = torch.randn_like(x), torch.randn(8)
        torch.testing.assert_close(op(x, bias, SCALE, run=gpu), expected(x[-8:], bias, SCALE))


def test_arguments_cut_from_one_memory_are_planned(gpu):
    """Queries and keys of one projection, for example."""
    kernel = Kernel()

    def body(x, bias, factor):
        y = torch.empty(x.shape)
        run_kernel(kernel, x, bias, y, factor)
        return y

    op, launcher = op_of(body)
    for _ in range(4):
        x, bias = torch.randn(32).split(16)
        torch.testing.assert_close(op(x, bias, SCALE, run=gpu), expected(x, bias, SCALE))
    x, bias = torch.randn(16), torch.randn(16)
    torch.testing.assert_close(op(x, bias, SCALE, run=gpu), expected(x, bias, SCALE))
    assert launcher.calls == 2


def test_plans_are_forgotten_when_launch_options_change(gpu):
    kernel = Kernel()
    op, launcher = op_of(lambda x, bias, factor: _gives(kernel, x, bias, factor))
    for _ in range(3):
        op(torch.randn(16), None, SCALE, run=gpu)
    assert launcher.calls == 2
    _plans.forget()
    op(torch.randn(16), None, SCALE, run=gpu)
    assert launcher.calls == 3


def _gives(kernel, x, bias, factor):
    y = torch.empty(x.shape)
    run_kernel(kernel, x, bias, y, factor)
    return y


def test_launch_hooks_of_a_profiler_are_called(gpu, monkeypatch):
    pytest.importorskip("triton")
    x, y = torch.randn(16), torch.empty(16)
    kernel = Kernel()
    run_kernel(kernel, x, None, y, SCALE)
    (compiled,) = _launch._compiled.values()
    hooks = SimpleNamespace(launch_enter_hook=triton.knobs.HookChain(), launch_exit_hook=triton.knobs.HookChain())
    monkeypatch.setattr(triton.knobs, "runtime", hooks)
    run_kernel(kernel, x, None, y, SCALE)
    assert compiled.hooked == 0
    hooks.launch_exit_hook.add(print)
    y.zero_()
    run_kernel(kernel, x, None, y, SCALE)
    assert compiled.hooked == 1 and kernel.compiled == 1
    torch.testing.assert_close(y, x * SCALE)


def test_a_number_without_a_fraction_compiles_for_those_with_one(gpu):
    """Triton makes an integer's kernel of it, and of 1 a constant."""
    kernel, given = Kernel(), []
    first = kernel._first
    kernel._first = lambda *args, **options: given.append(args[7]) or first(*args, **options)
    x, y = torch.randn(16), torch.empty(16)
    run_kernel(kernel, x, None, y, 1)
    assert [type(factor) for factor in given] == [float]
    run_kernel(kernel, x, None, y, SCALE)
    torch.testing.assert_close(y, x * SCALE)
    assert kernel.compiled == 1


def test_a_plan_does_not_outlive_the_envelope_that_tf32_opened(monkeypatch):
    """The envelope is not asked again once there is a plan."""
    x = torch.zeros(4)
    allowed, _ = _plans.signature((x,))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert allowed is not None and _plans.signature((x,))[0] != allowed
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert _plans.signature((x,))[0] == allowed
