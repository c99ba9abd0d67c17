"""``apply_patches``: decide for every fusion on every target, then install all of it or nothing."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Sequence
from types import FunctionType

from torch import nn

from voxfuse.kernels._op import Run
from voxfuse.patches import registry, switches
from voxfuse.patches.errors import PatchError, PatchWarning
from voxfuse.patches.layers import LOCK, Replacement, Site, site
from voxfuse.patches.patchset import PatchSet
from voxfuse.patches.plan import Planner, Step, method_name
from voxfuse.patches.policy import Selection, compute_capability, selection
from voxfuse.patches.receipts import Entry, ReceiptFile, Why
from voxfuse.patches.spec import Patch
from voxfuse.records import Backend

_run_numbers = itertools.count(1)


def apply_patches(
    *targets: str | nn.Module,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    policy: str = "proven",
    backend: str | None = None,
    strict: bool = False,
    dry_run: bool = False,
) -> PatchSet:
    """Replace upstream methods by fused ones, and return what became of each, with the way back.

    ``targets``: stack names (their classes change, for every instance), models (only these instances and their
    submodules change), or nothing: every speech stack that can be imported now. ``include`` restricts to fusions of
    these names and applies them whatever the policy; ``exclude`` leaves fusions out. ``policy``: ``"proven"`` (the
    ledger accepts the fusion for this GPU and stack release), ``"bitwise"`` (that contract, proven or not), ``"all"``.
    ``backend``: ``"triton"`` (default; needs a GPU), ``"interpreter"`` or ``"reference"``; VOXFUSE_BACKEND where not
    given. ``dry_run`` changes nothing.

    A patched model pickles as upstream's, and a deep copy stays patched; a shallow copy (``copy.copy``, the replicas of
    ``nn.DataParallel``) would run its original: there, patch the stack by name.

    What cannot be applied is skipped with a reason in its receipt. ``strict`` (or VOXFUSE_STRICT=1) raises PatchError
    instead, with nothing changed, where a fusion asked for by name (``include``, VOXFUSE_FUSIONS=+name) is applied
    nowhere or fails somewhere, or where any wanted fusion of a target given explicitly fails. Being left out by
    policy, ``exclude`` or VOXFUSE=0 is no failure.

    Raises ValueError for an unknown stack, policy, backend or environment value, KeyError for an unknown fusion,
    TypeError for a target that is neither a name nor a module.
    """
    environment = switches.read()
    wishes = selection(policy, include, exclude, environment)
    chosen = switches.backend(backend) if backend is not None else environment.backend or "triton"
    names = [target for target in targets if isinstance(target, str)]
    models = [target for target in targets if isinstance(target, nn.Module)]
    if odd := [target for target in targets if not isinstance(target, str | nn.Module)]:
        raise TypeError(
            f"expected stack names or torch.nn.Module instances, got {type(odd[0]).__name__}; "
            "of a pipeline, pass the model that it holds"
        )
    stacks = registry.expand(names) if targets else registry.default_stacks()
    with LOCK:
        planner = Planner(wishes, chosen, environment.off)
        steps = [step for name in stacks for step in planner.stack(name, explicit=bool(targets))]
        steps += [step for model in models for step in planner.model(model)]
        _give_each_method_to_one_fusion(steps)
        _warn_unproven(steps)
        if strict or environment.strict:
            _refuse_failures(steps, wishes)
        token = object()
        applied = _dry(steps) if dry_run else _install(steps, token, chosen)
        file = ReceiptFile(environment.receipts) if environment.receipts is not None else None
        return PatchSet(token, applied, models, file)


def _give_each_method_to_one_fusion(steps: Sequence[Step]) -> None:
    """Where two fusions of one call want the same method, the one that its stack declares first has it."""
    taken: dict[tuple[int, str], str] = {}
    for step in steps:
        if step.patch is None:
            continue
        fusion, name = step.entry.fusion, method_name(step.patch)
        holders = [taken.setdefault((id(owner), name), fusion) for owner in step.owners]
        if other := next((holder for holder in holders if holder != fusion), None):
            step.owners = [owner for owner, holder in zip(step.owners, holders, strict=True) if holder == fusion]
            step.entry.count = len(step.owners)
            step.entry.reason = f"already replaced by fusion {other}"
            if not step.owners:
                step.entry.status, step.entry.why, step.patch = "skipped", Why.FAILED, None


def _warn_unproven(steps: Sequence[Step]) -> None:
    for stack in dict.fromkeys(step.entry.stack for step in steps):
        own = [step for step in steps if step.entry.stack == stack]
        settled = any(step.entry.why in (Why.APPLIED, Why.FAILED) for step in own)
        if any(step.unproven for step in own) and not settled:
            remedy = (
                "policy='all' applies them, as nothing is proven on a CPU"
                if compute_capability() is None
                else f"`voxfuse judge --stack {stack}` judges them on this GPU, and `voxfuse ledger why FUSION` says "
                "what is missing"
            )
            message = f"nothing is patched: no fusion of {stack} is proven here; {remedy}"
            warnings.warn(message, PatchWarning, stacklevel=3)


def _refuse_failures(steps: Sequence[Step], wishes: Selection) -> None:
    """Raise PatchError for what ``strict`` does not forgive."""
    failures = [
        f"{step.entry.fusion} on {step.entry.target}: {step.entry.reason}"
        for step in steps
        if step.entry.why is Why.FAILED and (step.entry.explicit or step.entry.fusion in wishes.named)
    ]
    applied = {step.entry.fusion for step in steps if step.entry.why is Why.APPLIED}
    off = any(step.entry.reason == "VOXFUSE=0" for step in steps)
    if not failures and not off:
        for name in sorted(wishes.named - applied):
            reasons = {step.entry.reason for step in steps if step.entry.fusion == name} or {"no target has it"}
            failures.append(f"{name}: {'; '.join(sorted(map(str, reasons)))}")
    if failures:
        raise PatchError("strict: " + "; ".join(failures))


def _dry(steps: Sequence[Step]) -> list[tuple[Entry, Sequence[Site]]]:
    for step in steps:
        if step.entry.why is Why.APPLIED:
            step.entry.status = "skipped"
            step.entry.reason = "; ".join(filter(None, ("dry run: would apply", step.entry.reason)))
    return [(step.entry, ()) for step in steps]


def _install(steps: Sequence[Step], token: object, backend: Backend) -> list[tuple[Entry, Sequence[Site]]]:
    touched: list[Site] = []
    applied: list[tuple[Entry, Sequence[Site]]] = []
    own: set[str] = set()  # keys of this set's replacements
    try:
        for step in steps:
            sites = [] if step.patch is None else _install_step(step, step.patch, token, backend, touched, own)
            applied.append((step.entry, sites))
    except BaseException:
        for place in touched:
            place.remove(token)
        raise
    return applied


def _install_step(
    step: Step, patch: Patch, token: object, backend: Backend, touched: list[Site], own: set[str]
) -> list[Site]:
    entry = step.entry
    key = f"{entry.stack}/{entry.fusion}/{entry.target}#{next(_run_numbers)}"
    sites, shared, built = [], [], None
    for owner in step.owners:
        place = site(owner, method_name(patch))
        touched.append(place)
        sites.append(place)
        top = place.join(token, entry.fusion, entry.target, backend)
        if top is not None:
            shared.append(top.key)
            continue
        built = built or _build(patch, place.untouched(), Run(backend, key))
        place.push(token, Replacement(entry.fusion, entry.target, backend, key, built))
    if shared:
        relative = next((key.partition("/")[0] for key in shared if key in own), None)
        said = "already applied by an earlier patch set" if relative is None else f"shared with stack {relative}"
        said = said if built is None else f"{len(shared)} of {len(sites)} modules {said}"
        entry.reason = "; ".join(filter(None, (said, entry.reason)))
    entry.backend = backend
    own.add(key)
    entry.keys = tuple(dict.fromkeys((*shared, *(() if built is None else (key,)))))
    return sites


def _build(patch: Patch, original: FunctionType, run: Run) -> FunctionType:
    """The replacement, under upstream's name, qualified name and signature: so it pickles and prints as upstream's."""
    replacement = patch.build(original, run)
    if not isinstance(replacement, FunctionType) or replacement is original:
        raise TypeError(f"{patch.target}: build must return a new function, got {replacement!r}")
    functools.update_wrapper(replacement, original)
    return replacement
