"""Which fusions ``voxfuse judge`` gates, and which of them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from voxfuse.evidence import acceptance
from voxfuse.fusions.registry import FUSIONS
from voxfuse.microbench.bench import Judged
from voxfuse.patches.spec import Patch
from voxfuse.records import Backend


def worth_gating(fusions: Sequence[str], judged: Sequence[Judged], dry: bool) -> tuple[str, ...]:
    """The fusions that the micro judge lets through: by the ledger's rule, and on a CPU all that are not wrong.

    It cannot ask graphs, which the gate's own blocks judge: they pass.
    """
    passed = []
    for name in fusions:
        verdicts = [item.verdict for item in judged if item.case.fusion == name and item.verdict is not None]
        wrong = any(verdict.wrong is not None for verdict in verdicts)
        if FUSIONS[name].graph or (not wrong and (dry or acceptance.micro_finding(verdicts).passed)):
            passed.append(name)
    return tuple(passed)


def gate_sets(fusions: Sequence[str], patches: Sequence[Patch], backend: Backend) -> list[tuple[str, ...]]:
    """The sets to gate, each sorted by name; ``patches`` are the stack's.

    Fusions that keep the precision class are gated together where all of them are called: one whose targets another
    absorbs or serves first (``keeps_from_running``) goes into a later set. Each of contract ``reduced`` is gated by
    itself. What has no patch that runs with the backend is in no set.
    """
    runnable = dict.fromkeys(patch.fusion.name for patch in patches if backend in patch.backends)
    wanted = [name for name in runnable if name in fusions]
    together: list[list[str]] = []
    for name in (name for name in wanted if FUSIONS[name].contract != "reduced"):
        free = (members for members in together if not _conflict(name, members, patches))
        members = next(free, None)
        if members is None:
            together.append([name])
        else:
            members.append(name)
    alone = [(name,) for name in sorted(wanted) if FUSIONS[name].contract == "reduced"]
    return [tuple(sorted(members)) for members in together] + alone


def keeps_from_running(first: str, second: str, patches: Sequence[Patch]) -> bool:
    """Whether ``second`` is never called while ``first`` is on: each of its targets is absorbed by one of the patches
    of ``first``, or is its target too and declared before (the engine gives a target to the first that wants it)."""
    ours = [(order, patch) for order, patch in enumerate(patches) if patch.fusion.name == first]
    theirs = [(order, patch) for order, patch in enumerate(patches) if patch.fusion.name == second]
    return bool(theirs) and all(
        any(
            before < after if patch.target == target.target else target.target in patch.absorbs
            for before, patch in ours
        )
        for after, target in theirs
    )


def _conflict(name: str, members: Iterable[str], patches: Sequence[Patch]) -> bool:
    return any(
        keeps_from_running(name, other, patches) or keeps_from_running(other, name, patches) for other in members
    )
