"""The op layer: eager bypass, custom op under tracing and modes, fallbacks with reasons, counters."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from voxfuse.kernels import _op
from voxfuse.kernels._op import TALLIES, Run, backend_unavailable, fused_op


def scale_unsupported(x, factor):
    return "x must not be empty" if x.numel() == 0 else None


@fused_op(
    "test_scale",
    "(Tensor x, float factor) -> Tensor",
    reference=lambda x, factor: x * factor,
    unsupported=scale_unsupported,
    fake=lambda x, factor: torch.empty_like(x),
)
def scale(x, factor):
    """A launcher that marks its work, so that tests can tell it from the reference."""
    return x * factor + 1000


@pytest.fixture
def run(request):
    return Run("interpreter", request.node.nodeid)


def test_eager_runs_the_launcher_directly_and_counts(run, monkeypatch):
    monkeypatch.setattr(scale, "_custom_op", None)  # reached only by a detour
    assert scale(torch.ones(2), 3.0, run=run).tolist() == [1003, 1003]
    assert TALLIES.of(run.receipt).calls == 1


def test_reference_backend(run):
    assert scale(torch.ones(2), 3.0, run=Run("reference", run.receipt)).tolist() == [3, 3]
    assert TALLIES.of(run.receipt).calls == 1


def test_outside_the_envelope_falls_back_with_the_reason(run):
    assert scale(torch.ones(0), 3.0, run=run).shape == (0,)
    assert dict(TALLIES.of(run.receipt).fallbacks) == {"x must not be empty": 1}
    assert TALLIES.of(run.receipt).calls == 0


def test_cpu_tensors_on_the_triton_backend_fall_back(run):
    assert scale(torch.ones(1), 3.0, run=Run("triton", run.receipt)).tolist() == [3]
    assert list(TALLIES.of(run.receipt).fallbacks) == ["a tensor is not on the GPU"]


def test_inputs_that_need_a_gradient_fall_back_and_keep_it(run):
    x = torch.ones(2, requires_grad=True)
    scale(x, 3.0, run=run).sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert "gradient" in next(iter(TALLIES.of(run.receipt).fallbacks))
    with torch.no_grad():
        assert scale(x, 3.0, run=run).tolist() == [1003, 1003]


def test_inference_mode(run):
    with torch.inference_mode():
        assert scale(torch.ones(1), 3.0, run=run).item() == 1003


def test_compiled_without_a_graph_break_and_counted_at_run_time(run):
    compiled = torch.compile(lambda x: scale(x * 2, 3.0, run=run) + 1, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(3):
            assert compiled(torch.ones(2)).tolist() == [1007, 1007]
    assert TALLIES.of(run.receipt).calls == 3


def test_fake_tensors_reach_the_fake_implementation(run):
    with FakeTensorMode():
        assert scale(torch.ones(5), 3.0, run=run).shape == (5,)
    assert TALLIES.of(run.receipt).calls == 0


def test_a_dispatch_mode_sees_the_custom_op(run):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        scale(torch.ones(1), 3.0, run=run)
    assert "voxfuse.test_scale.default" in seen


def test_registration_is_sound():
    arguments = (torch.ones(3), 2.0, "interpreter", "opcheck")
    torch.library.opcheck(
        torch.ops.voxfuse.test_scale.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_counters_lose_nothing_between_threads(run):
    def work():
        for _ in range(500):
            TALLIES.add(run.receipt)
            TALLIES.add(run.receipt, fallback="r")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (TALLIES.of(run.receipt).calls, TALLIES.of(run.receipt).fallbacks["r"]) == (2000, 2000)


def test_unavailable_backends_say_what_to_do(monkeypatch):
    assert backend_unavailable("reference") is None
    monkeypatch.setattr(_op, "TRITON_VERSION", None)
    assert "pip install triton" in backend_unavailable("triton")
    monkeypatch.setattr(_op, "TRITON_VERSION", "3.7.1")
    monkeypatch.setattr(_op, "INTERPRETED", False)
    assert "VOXFUSE_BACKEND=interpreter" in backend_unavailable("interpreter")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend_unavailable("triton").startswith("no GPU")


def test_diverted_counts_go_nowhere_until_they_are_added(run):
    others = []
    with TALLIES.diverted() as counts:
        scale(torch.ones(2), 3.0, run=run)
        scale(torch.ones(0), 3.0, run=run)
        thread = threading.Thread(target=lambda: others.append(scale(torch.ones(2), 3.0, run=run)))
        thread.start()
        thread.join()
    assert TALLIES.of(run.receipt).calls == 1, "another thread counts as ever"
    assert dict(counts) == {(run.receipt, None): 1, (run.receipt, "x must not be empty"): 1}
    for _ in range(2):
        TALLIES.add_all(counts)
    assert TALLIES.of(run.receipt).calls == 3
    assert dict(TALLIES.of(run.receipt).fallbacks) == {"x must not be empty": 2}
