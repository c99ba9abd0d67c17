"""Where KModel.forward spends its time, untouched and patched, at the released shapes with random weights:

    python scripts/gpu_kmodel.py --out runs/kmodel.json

For each stage and for the whole call: wall time with a synchronisation per call, GPU busy time and device activities
(kernels, copies, fills). Patched means policy "all" on that model, warmed up at this length. The patched stages are the
graphs that stand for the untouched ones. ``--device cpu`` is a dry run of the untouched stages.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # where kmodels lies
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from gpu_decoder import _profiled, _wall_ms
from kmodels import RELEASED, random_kmodel

import voxfuse
from voxfuse.fusions.graph_runner import capturing, runners

TOKENS = 130
FRAMES_PER_S = 40
Call = Callable[[], Any]


def released_kmodel(device: torch.device) -> Any:
    """Random weights that speak about three frames a token: 130 tokens are 10 s."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_kmodel(Path(folder), RELEASED, spread=1)
    with torch.no_grad():
        model.predictor.duration_proj.linear_layer.bias.fill_(-2.75)
    return model.to(device)


class Inputs:
    """What upstream's stages hand to each other for one utterance of ``TOKENS`` tokens."""

    def __init__(self, model: Any, device: torch.device) -> None:
        random = torch.Generator().manual_seed(1)
        symbols = torch.randint(1, RELEASED["n_token"], (TOKENS - 2,), generator=random).tolist()
        self.phonemes = "".join(chr(33 + symbol) for symbol in symbols)
        self.ids = torch.tensor([[0, *symbols, 0]], device=device)
        self.ref_s = (0.3 * torch.randn(1, 256, generator=random)).to(device)
        self.style = self.ref_s[:, 128:]
        self.lengths = torch.full((1,), TOKENS, device=device)
        self.mask = torch.zeros_like(self.ids, dtype=torch.bool)
        self.d_en = model.bert_encoder(model.bert(self.ids, attention_mask=(~self.mask).int())).transpose(-1, -2)
        self.d = model.predictor.text_encoder(self.d_en, self.style, self.lengths, self.mask)
        self.durations = model.forward_with_tokens(self.ids, self.ref_s)[1]
        index = torch.repeat_interleave(torch.arange(TOKENS, device=device), self.durations)
        self.en = self.d.transpose(-1, -2)[:, :, index].contiguous()
        self.asr = model.text_encoder(self.ids, self.lengths, self.mask)[:, :, index].contiguous()
        self.curves = model.predictor.F0Ntrain(self.en, self.style)


def untouched_stages(model: Any, given: Inputs) -> dict[str, Call]:
    predictor = model.predictor
    return {
        "bert": lambda: model.bert(given.ids, attention_mask=(~given.mask).int()),
        "DurationEncoder": lambda: predictor.text_encoder(given.d_en, given.style, given.lengths, given.mask),
        "predictor.lstm": lambda: predictor.lstm(given.d),
        "TextEncoder": lambda: model.text_encoder(given.ids, given.lengths, given.mask),
        "F0Ntrain": lambda: predictor.F0Ntrain(given.en, given.style),
        **common_stages(model, given),
    }


def patched_stages(model: Any, given: Inputs) -> dict[str, Call]:
    with capturing():
        model(given.phonemes, given.ref_s)
    by_owner = {runner.owner: runner for runner in runners(model)}
    return {
        "token graph": lambda: by_owner[model](given.ids.float(), given.style),
        "frame graph": lambda: by_owner[model.predictor](given.en, given.style),
        **common_stages(model, given),
    }


def common_stages(model: Any, given: Inputs) -> dict[str, Call]:
    return {
        "decoder": lambda: model.decoder(given.asr, *given.curves, given.ref_s[:, :128]),
        "whole": lambda: model(given.phonemes, given.ref_s),
    }


def measured(how: SimpleNamespace, stages: dict[str, Call]) -> dict[str, dict[str, Any]]:
    return {name: {**_wall_ms(how, call), **_profiled(how, call)} for name, call in stages.items()}


def show(arm: str, stages: dict[str, dict[str, Any]]) -> None:
    print(f"{arm:<18}{'wall ms':>10}{'GPU busy ms':>13}{'launches':>10}")
    for name, figures in stages.items():
        print(f"  {name:<16}{figures['median_ms']:>10.2f}{figures['busy_ms']:>13.2f}{figures['launches']:>10}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--device", default="cuda", type=torch.device)
    arguments = parser.parse_args()
    how = SimpleNamespace(dry=arguments.device.type == "cpu")
    model = released_kmodel(arguments.device)
    given = Inputs(model, arguments.device)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "cpu" if how.dry else torch.cuda.get_device_name(),
        "tokens": TOKENS,
        "audio_s": int(given.durations.sum()) / FRAMES_PER_S,
        "untouched": measured(how, untouched_stages(model, given)),
    }
    print(f"{result['device']}, {TOKENS} tokens, {result['audio_s']:.1f} s of speech")
    show("untouched", result["untouched"])
    if not how.dry:
        with voxfuse.apply_patches(model, policy="all", strict=True) as patches:
            result["patched"] = measured(how, patched_stages(model, given))
            spoken = model.forward_with_tokens(given.ids, given.ref_s)[1]
            result["durations_identical"] = bool(torch.equal(spoken, given.durations))
            result["receipts"] = [
                {"fusion": r.fusion, "status": r.status, "calls": r.calls, "fallbacks": r.fallbacks, "reason": r.reason}
                for r in patches.receipts
            ]
        show("patched", result["patched"])
        print(f"durations identical: {result['durations_identical']}")
        for receipt in result["receipts"]:
            print(receipt)
    text = json.dumps(result, indent=1)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
