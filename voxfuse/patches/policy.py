"""Which fusions the caller and the ledger want: policy, include and exclude, and the environment's additions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch

from voxfuse.fusions.registry import fusion as registered
from voxfuse.patches.switches import Switches
from voxfuse.records import Fusion

Policy = Literal["proven", "bitwise", "all"]


class Choice(NamedTuple):
    """``wanted``: apply it. ``reason`` says why not, or what to say of it; ``unproven``: the ledger refused it."""

    wanted: bool
    reason: str | None = None
    unproven: bool = False


class Selection(NamedTuple):
    """What the caller and the environment asked for.

    ``include`` (argument) restricts to its names; ``plus`` (VOXFUSE_FUSIONS) adds to whatever else is chosen; both are
    applied whatever the policy. ``exclude`` holds the argument's and the environment's names, and wins.
    """

    policy: Policy
    include: frozenset[str] | None
    plus: frozenset[str]
    exclude: frozenset[str]

    @property
    def named(self) -> frozenset[str]:
        """The fusions asked for by name."""
        return ((self.include or frozenset()) | self.plus) - self.exclude

    def choose(self, fusion: Fusion, stack: str, stack_version: str) -> Choice:
        """Whether a fusion is wanted on a stack's release."""
        if fusion.name in self.exclude:
            return Choice(False, "excluded")
        if fusion.name in self.named:
            return Choice(True)
        if self.include is not None:
            return Choice(False, "not in include")
        if self.policy == "bitwise":
            wanted = fusion.contract == "bitwise"
            return Choice(wanted, None if wanted else f"policy 'bitwise': its contract is {fusion.contract}")
        if self.policy == "all":
            return Choice(True)
        from voxfuse.evidence.acceptance import accepted  # late: other policies must not need a readable ledger

        acceptance = accepted(fusion, stack, stack_version, compute_capability())
        if not acceptance.accepted:
            return Choice(False, f"not proven: {acceptance.reason}", unproven=True)
        return Choice(True, "accepted: fidelity-only" if acceptance.fidelity_only else None)


def selection(
    policy: str, include: Iterable[str] | None, exclude: Iterable[str] | None, switches: Switches
) -> Selection:
    """Check the caller's wishes.

    Raises ValueError for an unknown policy or a fusion both included and excluded, KeyError for an unknown fusion.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy: expected one of {', '.join(get_args(Policy))}, got {policy!r}")
    included = None if include is None else _names(include)
    excluded = _names(exclude or ())
    if both := (included or frozenset()) & excluded:
        raise ValueError(f"{', '.join(sorted(both))} both in include and in exclude")
    return Selection(policy, included, switches.plus, excluded | switches.minus)  # type: ignore[arg-type]


def compute_capability() -> str | None:
    """Of the current CUDA device, as "9.0"; None without one."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(registered(name).name for name in ((names,) if isinstance(names, str) else names))
