"""Lines for GQA_WINS and STATIC_GQA_WINS (voxfuse/kernels/_measured.py) from records of the micro judge.

    voxfuse bench gqa_attention decode_graph --out RECORDS
    python scripts/gqa_wins.py RECORDS

A point is a win where the judge calls it one against torch's SDPA. It stands for the keys (a static cache's capacity)
that are nearer to it, by their logarithm, than to the next point, and for the rows down to the next smaller number that
was judged.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from voxfuse.evidence import ledger
from voxfuse.kernels._measured import Heads, Limits
from voxfuse.records import MicroVerdict

PEER = "torch"
TYPES = {"float32": "fp32", "float16": "half", "bfloat16": "half"}


def limits(points: dict[tuple[int, int], bool]) -> Limits:
    """Ranges of rows and keys from wins by (rows, keys)."""
    found = []
    fewest = 1
    for rows in sorted({rows for rows, _ in points}):
        keys = sorted(keys for judged, keys in points if judged == rows)
        edges = [1, *(math.isqrt(a * b) for a, b in itertools.pairwise(keys)), keys[-1]]
        runs: list[list[int]] = []
        for index, count in enumerate(keys):
            if points[rows, count]:
                if runs and runs[-1][1] == edges[index]:
                    runs[-1][1] = edges[index + 1]
                else:
                    runs.append([edges[index], edges[index + 1]])
        found += [(fewest, rows, low, high) for low, high in runs]
        fewest = rows + 1
    return tuple(found)


def wins(verdicts: Iterable[MicroVerdict], static: bool) -> dict[Heads, Limits]:
    """The table of one kind of cache. Verdicts of other operations and without SDPA's arm are passed over."""
    points: dict[Heads, dict[tuple[int, int], bool]] = defaultdict(dict)
    for verdict in verdicts:
        tensors = verdict.case.tensors
        against = {ratio.baseline: ratio.verdict for ratio in verdict.ratios}.get(PEER)
        if against is None or "k" not in tensors or ("mask" in tensors) != static:
            continue
        q, k = tensors["q"], tensors["k"]
        heads = verdict.environment.compute_capability, TYPES[q.dtype], q.shape[1], k.shape[1], k.shape[3]
        count = tensors["mask"].shape[3] if static else k.shape[2]
        points[heads][k.shape[0], count] = points[heads].get((k.shape[0], count), True) and against == "win"
    return {heads: limits(judged) for heads, judged in sorted(points.items(), key=str)}


def main(folder: str) -> None:
    verdicts = [entry.verdict for entry in ledger.load([Path(folder)]) if isinstance(entry.verdict, MicroVerdict)]
    for name, static in (("GQA_WINS", False), ("STATIC_GQA_WINS", True)):
        print(f"{name}:")
        for heads, found in wins(verdicts, static).items():
            print(f"    {heads}: {found},".replace("'", '"'))


if __name__ == "__main__":
    main(sys.argv[1])
