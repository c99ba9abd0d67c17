"""Stale verdicts: measured with another torch, another Triton or other kernels than run here now.

A stale verdict still decides what is on: taking a fusion away because a library was updated would punish those who
update. ``voxfuse doctor`` and ``voxfuse ledger stale`` name them, and ``voxfuse judge`` settles them anew.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from voxfuse.evidence.ledger import Entry, Verdict, case, moment, subject
from voxfuse.records import Environment, MicroVerdict

CHECKOUT = Path(__file__).resolve().parents[2]
JUDGED_SOURCES = ("voxfuse/kernels", "voxfuse/fusions", "voxfuse/patches")
DIRTY = "-dirty"
GIT_TIMEOUT_S = 20

SameSources = Callable[[str, str], bool | None]  # two commits -> whether what is judged is the same (None: unknown)


class Stale(NamedTuple):
    """A verdict that is the newest of its kind, and what has changed since."""

    entry: Entry
    changes: tuple[str, ...]


def changes(verdict: Verdict, here: Environment, same_sources: SameSources | None = None) -> tuple[str, ...]:
    """What differs between where a verdict was measured and here: torch, Triton, the code that was judged.

    Commits are compared by the files of ``JUDGED_SOURCES`` where git knows both, and by name where it does not; where
    one of them is unknown, voxfuse's version stands for them.
    """
    then = verdict.environment
    found = [
        f"{name} {before} then, {now} now"
        for name, before, now in (("torch", then.torch, here.torch), ("Triton", then.triton, here.triton))
        if before != now
    ]
    if then.commit is None or here.commit is None:
        if then.voxfuse != here.voxfuse:
            found.append(f"voxfuse {then.voxfuse} then, {here.voxfuse} now")
    elif not _same_commit(then.commit, here.commit):
        same = (same_sources or git_same_sources)(then.commit, here.commit)
        if same is not True:
            how = "its kernels, fusions or patches changed" if same is False else "git cannot tell what changed"
            found.append(f"commit {_short(then.commit)} then, {_short(here.commit)} now: {how}")
    return tuple(found)


def stale(
    entries: Iterable[Entry],
    here: Environment,
    compute_capability: str | None,
    same_sources: SameSources | None = None,
) -> list[Stale]:
    """The newest verdicts of every case and gate on one compute capability that have changes; oldest first."""
    newest: dict[tuple[object, ...], Entry] = {}
    for entry in sorted(entries, key=lambda entry: moment(entry.verdict)):
        if entry.verdict.environment.compute_capability == compute_capability:
            newest[_kind(entry.verdict)] = entry
    found = [Stale(entry, changes(entry.verdict, here, same_sources)) for entry in newest.values()]
    return [item for item in found if item.changes]


def git_same_sources(then: str, now: str) -> bool | None:
    """Whether two commits hold the same judged sources; None where git, or what was judged then, is missing.

    An edited checkout stands for itself: its files are compared, not its commit's.
    """
    return _git_same(then, None if now.endswith(DIRTY) else now)


@lru_cache(maxsize=256)
def _git_same(then: str, now: str | None) -> bool | None:
    commits = [then] if now is None else [then, now]
    command = ["git", "-C", str(CHECKOUT), "diff", "--quiet", *commits, "--", *JUDGED_SOURCES]
    if not all(_is_hash(commit) for commit in commits):  # a record is data: nothing of it becomes an option
        return None
    try:
        status = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, check=False).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return {0: True, 1: False}.get(status)


def _is_hash(commit: str) -> bool:
    return 4 <= len(commit) <= 64 and all(character in "0123456789abcdef" for character in commit)


def _same_commit(then: str, now: str) -> bool:
    """Equal, or one a shortened form of the other; edited files are never the same as anything."""
    if DIRTY in then + now:
        return False
    return then.startswith(now) or now.startswith(then)


def _short(commit: str) -> str:
    return commit[:7] + (DIRTY if commit.endswith(DIRTY) else "")


def _kind(verdict: Verdict) -> tuple[object, ...]:
    stack = verdict.case.stack if isinstance(verdict, MicroVerdict) else ", ".join(verdict.fusions)
    return type(verdict), subject(verdict), case(verdict), stack, verdict.environment.gpu
