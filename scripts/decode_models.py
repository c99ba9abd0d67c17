"""Decode steps of a Qwen2-0.5B with random weights, for scripts/gpu_decode.py: untouched, patched, fused, captured."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from decode_cases import DEVICE, MODELS, RUN, TINY, error, gpu_us, host_us_synchronised

import voxfuse
from voxfuse.fusions.decode_graph import DecodeRunner


def build(dtype: torch.dtype) -> Any:
    """Qwen2ForCausalLM at the sizes of CosyVoice's language model, with random weights. Raises ImportError."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layers, sizes = (1, (48, 40, 4, 2)) if TINY else (24, MODELS["Qwen2-0.5B"][:4])
    config = Qwen2Config(
        hidden_size=sizes[0], intermediate_size=sizes[1], num_attention_heads=sizes[2], num_key_value_heads=sizes[3],
        num_hidden_layers=layers, vocab_size=6761, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device(DEVICE):
        return Qwen2ForCausalLM(config).eval().to(dtype)


def fused_step() -> None:
    """Wall ms and kernels of a token: HF eager with its own cache, the fused step, the fused step in a graph."""
    try:
        import transformers
    except ImportError as absent:
        print(f"\nfused decode step: not run, {absent}")
        return
    print(f"\nfused decode step, Qwen2-0.5B shapes, behind 64 tokens, transformers {transformers.__version__}")
    for dtype in (torch.float32,) if TINY else (torch.bfloat16, torch.float32):
        model = build(dtype)
        exact = copy.deepcopy(model).double()
        for rows in (1,) if TINY else (1, 16):
            torch.manual_seed(3)
            prompt = torch.randint(0, 6761, (rows, 4 if TINY else 64), device=DEVICE)
            token = torch.randint(0, 6761, (rows, 1), device=DEVICE)
            past = exact(prompt, use_cache=True).past_key_values
            oracle = exact(token, past_key_values=past, use_cache=True).logits
            for name, step in _arms(model, prompt, token):
                try:
                    logits = step()
                    faults = f"error {error(logits, oracle):.2e}"
                    print(f"  {str(dtype).removeprefix('torch.'):8} {rows:2} rows {name:12} {faults}  {_walls(step)}")
                except Exception as fault:  # the other arms have figures all the same
                    print(f"  {dtype} {rows} rows {name}: {type(fault).__name__}: {str(fault).splitlines()[0]}")
        del exact


def _arms(model: Any, prompt: torch.Tensor, token: torch.Tensor) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Each arm's step behind a prefill of its own."""

    def prefilled() -> Any:
        return model(prompt, use_cache=True).past_key_values

    past = prefilled()
    yield "HF eager", lambda: model(token, past_key_values=past, use_cache=True).logits
    rows, length = prompt.shape
    for name in ("fused",) if TINY else ("fused", "fused, graph"):
        runner = DecodeRunner(model.model, model.lm_head, RUN)
        if name == "fused, graph":
            runner.warm([(rows, length + 1)])
        session = runner.session(prefilled(), [length] * rows)
        if isinstance(session, str):
            raise RuntimeError(session)
        yield name, functools.partial(session.step, token)
        print(f"      {runner.statistics}")
        session.close()


def _walls(step: Callable[[], torch.Tensor]) -> str:
    """Wall ms of a step that is waited for, of one among 40 that are not, and its kernels."""
    if TINY:
        return "not timed"
    host_us_synchronised(step, 3)
    alone = host_us_synchronised(step, 20) / 1e3
    begin = time.perf_counter()
    for _ in range(40):
        step()
    torch.cuda.synchronize()
    together = (time.perf_counter() - begin) / 40 * 1e3
    return f"{alone:7.3f} ms waited for, {together:7.3f} ms in a row, {kernels(step)} kernels"


def kernels(step: Callable[[], Any]) -> int:
    """Kernels and copies that the GPU runs for a call."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in trace.events())


def model_step() -> None:
    """One decode step of Qwen2-0.5B shapes over a static cache: eager and in a CUDA graph, untouched and patched."""
    try:
        from transformers import StaticCache
    except ImportError as absent:
        print(f"\ndecode step of a model: not run, {absent}")
        return
    dtype = torch.float32 if TINY else torch.bfloat16
    model = build(dtype)
    for rows in (1,) if TINY else (1, 16):
        print(f"\ndecode step, Qwen2-0.5B shapes, {rows} rows, cache of 512: eager wall ms, graph ms, kernels, logits")
        logits: dict[str, torch.Tensor] = {}
        for arm in ("untouched", "patched"):
            torch.manual_seed(3)
            prompt = torch.randint(0, 6761, (rows, 8), device=DEVICE)
            token = torch.randint(0, 6761, (rows, 1), device=DEVICE)
            patches = voxfuse.apply_patches(model, policy="all", backend=RUN.backend) if arm == "patched" else None
            try:
                cache = StaticCache(config=model.config, max_cache_len=16 if TINY else 512)
                step = _stepper(model, cache, prompt, token)
                logits[arm] = step().float()
                print(f"  {arm:10} {_step_times(step)}", flush=True)
                if patches is not None:
                    for receipt in patches.receipts:
                        if receipt.status == "applied":
                            print(f"    {receipt.fusion}: {receipt.calls} calls, fallbacks {receipt.fallbacks}")
            except Exception as fault:  # one arm may fail to be captured: say so and go on
                print(f"  {arm:10} {type(fault).__name__}: {str(fault).splitlines()[0]}")
            finally:
                if patches is not None:
                    patches.revert()
        if len(logits) == 2:
            print(f"  patched against untouched logits: {error(logits['patched'], logits['untouched'].double()):.2e}")


def _stepper(model: Any, cache: Any, prompt: torch.Tensor, token: torch.Tensor) -> Callable[[], torch.Tensor]:
    cached = {"past_key_values": cache, "use_cache": True}
    model(prompt, **cached)
    position = torch.full((1, 1), prompt.shape[1], device=DEVICE)

    def step() -> torch.Tensor:
        return model(token, position_ids=position, **cached).logits

    return step


def _step_times(step: Callable[[], torch.Tensor]) -> str:
    if TINY:
        return "not timed"
    wall = host_us_synchronised(step, 10)
    count = kernels(step)
    try:
        return f"{wall / 1e3:7.2f} ms, graph {gpu_us(step, 1) / 1e3:6.3f} ms, {count} kernels"
    except Exception as fault:  # a step that cannot be captured has its eager figures all the same
        return f"{wall / 1e3:7.2f} ms, no graph ({type(fault).__name__}: {str(fault)[:80]}), {count} kernels"
