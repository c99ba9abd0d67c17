"""The committed cases are real shapes, and every case can be made into a contest."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch

from voxfuse.fusions.registry import FUSIONS
from voxfuse.kernels._op import Run
from voxfuse.microbench.arms import contest, operation_of, smooth
from voxfuse.microbench.cases import load_cases, stacks_with_cases
from voxfuse.microbench.judge import error_fp64
from voxfuse.microbench.peers import LIBRARIES
from voxfuse.microbench.timer import HostClock
from voxfuse.records import TensorSignature

CPU = torch.device("cpu")
needs_kokoro = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="needs the package kokoro")


def test_every_case_names_a_fusion_of_its_stack_that_has_arms():
    for stack in stacks_with_cases():
        cases = load_cases(stack)
        assert len({case.case.name for case in cases}) == len(cases)
        for case in cases:
            assert stack == case.case.stack and stack in FUSIONS[case.fusion].stacks
            assert operation_of(case.fusion, case.case).inputs is not None


def test_an_unknown_stack_is_named_with_the_known_ones():
    with pytest.raises(
        KeyError,
        match="no micro cases for stack 'nobody'; there are some for: chatterbox, cosyvoice2, cosyvoice3, kokoro",
    ):
        load_cases("nobody")


@needs_kokoro
def test_kokoro_cases_are_what_the_real_decoder_calls():
    from gpu_decoder import decoder_inputs, random_decoder

    decoder = random_decoder(CPU)
    from kokoro.istftnet import AdaIN1d  # importable now, also without kokoro's text front end

    seen: Counter[tuple[int, int]] = Counter()
    for module in decoder.modules():
        if isinstance(module, AdaIN1d):
            module.register_forward_hook(lambda module, inputs, output: seen.update([tuple(inputs[0].shape[1:])]))
    with torch.no_grad():
        decoder(*decoder_inputs(rows=1, seconds=1.0, device=CPU))
    one_second = [case for case in load_cases("kokoro") if case.case.name.endswith("1 row, 1 s")]
    one_second = [case for case in one_second if case.fusion in ("adain_snake", "adain_leaky_relu")]
    assert len(one_second) == 4
    for case in one_second:
        assert seen[case.case.tensors["x"].shape[1:]] == case.calls


@pytest.mark.parametrize("fusion_name", ["adain_leaky_relu", "adain_snake"])
def test_a_contest_has_the_declared_signatures_and_agreeing_arms(fusion_name):
    case = next(case.case for case in load_cases("kokoro") if case.fusion == fusion_name and "1 s" in case.case.name)
    run = Run("reference", "test")
    made = contest(fusion_name, case, CPU, HostClock(), run, {"launch_floor_us": 1.0}, compile_backend="eager")
    assert len(made.sets) == 2
    x = made.sets[0][0]
    if fusion_name == "istft_polar":  # its x holds two inputs
        x = torch.cat(made.sets[0][:2], dim=1)
    assert tuple(x.shape) == case.tensors["x"].shape
    if "style" in case.tensors:
        assert tuple(made.sets[0][1].shape) == case.tensors["style"].shape
    assert not torch.equal(made.sets[0][0], made.sets[1][0])
    oracle = made.seen(made.eager(*(v.double() if isinstance(v, torch.Tensor) else v for v in made.sets[0])))
    assert error_fp64(made.seen(made.voxfuse(*made.sets[0])), oracle) < 1e-5
    assert error_fp64(made.seen(made.baselines["compile"](*made.sets[0])), oracle) < 1e-5
    assert made.baselines.keys() == {"compile", *LIBRARIES}
    assert all(isinstance(made.baselines[name], str) for name in LIBRARIES)
    assert made.ceilings.keys() == {"launch_floor_us", "copy_bytes_per_s"}


def test_smooth_data_look_like_a_convolution_output():
    signature = TensorSignature(shape=(2, 64, 4000), dtype="float32", strides=(64 * 4100, 4100, 1))
    x = smooth(signature, torch.Generator().manual_seed(0))
    assert x.stride() == signature.strides
    centred = x - x.mean(-1, keepdim=True)
    correlation = (centred[..., 1:] * centred[..., :-1]).mean(-1) / centred.square().mean(-1)
    assert correlation.mean() > 0.7  # neighbouring frames agree
    assert x.mean(-1).std() > 0.5 and x.std(-1).std() > 0.2  # channels differ in level and scale


def test_a_fusion_without_arms_is_refused_with_what_to_do():
    case = load_cases("kokoro")[0].case
    with pytest.raises(KeyError, match="OPERATIONS"):
        contest("nothing", case, CPU, HostClock(), Run("reference", "test"), {})
