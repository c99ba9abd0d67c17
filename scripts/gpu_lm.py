"""CosyVoice2's own loop over its language model (upstream's code) on a GPU, untouched against patched, in under 120 s.

    PYTHONPATH=SITE:. python scripts/gpu_lm.py         # needs a CUDA GPU; exits with 1 where a patched arm fell back
    PYTHONPATH=SITE:. python scripts/gpu_lm.py --t3    # Chatterbox's T3 alone
    PYTHONPATH=SITE:. python scripts/gpu_lm.py --tiny   # small shapes on the CPU, to check the script

SITE holds ``cosyvoice-minicpmo`` (installed with --no-deps) and best transformers 4.51.3, for which upstream was
written; with 4.53 or newer its attention mask is mended first, for all arms alike (tests/cosyvoice_lm.py). Qwen2-0.5B
shapes, random weights, 250 tokens of one request, fp32 (as shipped) and bf16, ras_sampling with a seed and greedy.
Then Chatterbox's T3 where ``chatterbox-tts`` is there too.
Prints for each arm the ms of a token, of the first 25 tokens and of the whole, and how many tokens are upstream's
before the first that differs; there, what fp64 says of the two candidates. Nothing is written; no verdict follows.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import chatterbox_t3  # noqa: E402
import cosyvoice_lm  # noqa: E402 - the checkout need not be installed
import transformers  # noqa: E402

import voxfuse  # noqa: E402
from voxfuse.e2e.stacks import _chatterbox_t3  # noqa: E402
from voxfuse.e2e.stacks._cosyvoice_lm import SIZES, SPEECH_TOKENS  # noqa: E402

TINY = "--tiny" in sys.argv[1:]
DEVICE = "cpu" if TINY else "cuda"
TOKENS, FIRST = (40, 25) if TINY else (250, 25)
TEXT, PROMPT_SPEECH = range(3, 13), (11, 12, 13)
BUDGET_S = 100.0  # from the start, after which no further arm begins
BEGIN = time.monotonic()
FUSIONS = {
    "fused": ["decode_graph"],
    "fused, graph": ["decode_graph"],
    "graph, sampler": ["decode_graph", "ras_sampling"],
}
SAMPLINGS = {"ras_sampling": None, "greedy": cosyvoice_lm.greedy}


class Spoken(NamedTuple):
    """Tokens, and ms from the call to each of them."""

    tokens: list[int]
    after_ms: list[float]

    def figures(self) -> str:
        """ms of a token (median of the gaps), to the first 25, and of all."""
        gaps = [b - a for a, b in zip(self.after_ms, self.after_ms[1:], strict=False)]
        first = self.after_ms[min(FIRST, len(self.after_ms)) - 1]
        return f"{statistics.median(gaps):7.3f} ms/token {first:8.1f} ms to 25 {self.after_ms[-1]:9.1f} ms in all"


def speak(model: Any, tokens: int = TOKENS) -> Spoken:
    """One request of upstream's ``inference``, its length forced by the ratios of text to speech."""
    generator = cosyvoice_lm.speak(model, text=TEXT, speech=PROMPT_SPEECH, ratios=(tokens // 10, tokens // 10))
    begin, spoken = time.perf_counter(), Spoken([], [])
    for token in generator:
        spoken.tokens.append(token)
        spoken.after_ms.append((time.perf_counter() - begin) * 1e3)
    return spoken


def agreement(model: Any, mine: list[int], theirs: list[int]) -> str:
    """How many tokens agree, and at the first that do not, what fp64 says."""
    differing = (index for index, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
    at = next(differing, None)
    if at is None:
        return f"all {len(mine)} tokens are upstream's" if len(mine) == len(theirs) else "tokens agree, lengths do not"
    exact = copy.deepcopy(model).double()
    scores: list[torch.Tensor] = []

    def kept(logp: torch.Tensor, decoded: list[int], sampling: int) -> torch.Tensor:
        scores.append(logp)
        return torch.tensor([0])

    exact.sampling = kept
    next(cosyvoice_lm.speak(exact, text=TEXT, speech=(*PROMPT_SPEECH, *theirs[:at]), ratios=(1, 1)))
    gap = float(scores[0][mine[at]] - scores[0][theirs[at]])
    return f"{at} of {len(theirs)} tokens agree; fp64's log-probability of ours less upstream's there: {gap:+.2e}"


def arms(model: Any, name: str) -> bool:
    """Print the arms of one model and sampling; whether every patched one was served throughout."""
    print(f"\n{name}", flush=True)
    speak(model, 20)
    upstream = speak(model)
    print(f"  {'untouched':15} {upstream.figures()}", flush=True)
    served = True
    for arm, fusions in FUSIONS.items():
        if time.monotonic() - BEGIN > BUDGET_S:
            print(f"  {arm:15} not run: the time is up")
            continue
        if arm in ("fused", "graph, sampler") and "greedy" in name:
            continue
        with voxfuse.apply_patches(model, include=fusions, backend="reference" if TINY else None) as patches:
            with voxfuse.capturing() if "graph" in arm and not TINY else nullcontext():
                speak(model, 20 if arm == "fused" else TOKENS)
            spoken = speak(model)
            receipts = [each for each in patches.receipts if each.stack == "cosyvoice2" and each.fusion in fusions]
        print(f"  {arm:15} {spoken.figures()}  {agreement(model, spoken.tokens, upstream.tokens)}", flush=True)
        for receipt in receipts:
            if receipt.status != "applied" or (receipt.fallbacks and arm != "fused"):
                served = served and TINY
                print(f"      {receipt.fusion} {receipt.status}: {receipt.reason or dict(receipt.fallbacks)}")
    return served


def t3(patch: pytest.MonkeyPatch) -> bool:
    """Chatterbox's T3 at its released shapes, fp32: whole seconds and tokens; whether the patched arm was served."""
    if chatterbox_t3.importable() is None or time.monotonic() - BEGIN > BUDGET_S:
        print("\nT3: not run, chatterbox-tts is absent or the time is up")
        return True
    sizes = chatterbox_t3.SMALL if TINY else _chatterbox_t3.SIZES
    with torch.device(DEVICE):
        model = chatterbox_t3.text_to_speech_tokens(patch, **sizes, spread=0.2 if TINY else 0.005)
    print(f"\nChatterbox's T3, two rows, float32, {TOKENS} tokens", flush=True)
    found, served = {}, True
    for arm in ("untouched", "graph"):
        fusions = [] if arm == "untouched" else ["decode_graph"]
        with voxfuse.apply_patches("chatterbox", include=fusions, backend="reference" if TINY else None) as patches:
            with nullcontext() if TINY else voxfuse.capturing():
                chatterbox_t3.speak(model, TOKENS if fusions else 10)
            begin = time.perf_counter()
            found[arm] = chatterbox_t3.speak(model, TOKENS)
            wall_ms = (time.perf_counter() - begin) * 1e3
            for receipt in patches.receipts:
                idle = receipt.fallbacks or not receipt.calls
                if receipt.stack == "chatterbox" and receipt.fusion in fusions and idle:
                    served = TINY
                    print(f"      {receipt.fusion} {receipt.status}: {receipt.reason or dict(receipt.fallbacks)}")
        print(f"  {arm:15} {wall_ms / len(found[arm]):7.3f} ms/token {wall_ms:9.1f} ms in all", flush=True)
    agree = next((i for i, (a, b) in enumerate(zip(*found.values(), strict=False)) if a != b), len(found["graph"]))
    print(f"  {agree} of {len(found['untouched'])} tokens agree")
    return served


def language_models(patch: pytest.MonkeyPatch) -> bool:
    """CosyVoice2's in both types; whether the patched arms were served."""
    cosyvoice_lm.whole_masks(patch)
    count = cosyvoice_lm.SPEECH_TOKENS if TINY else SPEECH_TOKENS
    sizes = {} if TINY else SIZES
    model = cosyvoice_lm.language_model(count, spread=0.2 if TINY else 0.02, device=DEVICE, **sizes)
    with torch.no_grad():
        model.llm_decoder.weight.mul_(1 if TINY else 4)  # about as sharp as a trained model's
    served = True
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        for name, sampling in SAMPLINGS.items():
            if time.monotonic() - BEGIN > BUDGET_S:
                print(f"\n{dtype} {name}: not run, the time is up")
                continue
            spoken_by = copy.copy(model)
            if sampling is not None:
                spoken_by.sampling = sampling
            served = arms(spoken_by, f"{str(dtype).removeprefix('torch.')}, {name}, {TOKENS} tokens") and served
    return served


def main() -> None:
    """Measure and print."""
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {DEVICE}")
    with pytest.MonkeyPatch.context() as patch:
        served = "--t3" in sys.argv[1:] or language_models(patch)
        served = t3(patch) and served
    print(f"\n{time.monotonic() - BEGIN:.0f} s")
    sys.exit(not served)


if __name__ == "__main__":
    main()
