"""What ``apply_patches`` returns: receipts, exact revert, pause, report, verification."""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import nn

from voxfuse.patches.errors import PatchError, PatchWarning
from voxfuse.patches.layers import LOCK, ClassSite, Site
from voxfuse.patches.receipts import Entry, ReceiptFile, table
from voxfuse.patches.seals import Seals, origin
from voxfuse.patches.verify import Verification, verify
from voxfuse.records import Receipt


class PatchSet:
    """The patches of one ``apply_patches`` call. A context manager: leaving it reverts.

    Losing the object does not revert. Sets may overlap and be reverted in any order: what two sets share stays until
    the last of them reverts.
    """

    def __init__(
        self,
        token: object,
        applied: Sequence[tuple[Entry, Sequence[Site]]],
        models: Sequence[nn.Module],
        file: ReceiptFile | None,
    ) -> None:
        self._token = token
        self._entries = [entry for entry, _ in applied]
        self._sites = {id(entry): list(sites) for entry, sites in applied}
        self._models = [weakref.ref(model) for model in models]
        self._file = file
        self._paused_before = False
        if file is not None:
            file.write(self.receipts)
            atexit.register(lambda: file.write(self.receipts))

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """One receipt per fusion, stack and target, with the calls counted so far."""
        return tuple(entry.receipt() for entry in self._entries)

    def report(self) -> str:
        """The receipts as a table for people."""
        return table(self.receipts)

    def revert(self) -> None:
        """Restore every attribute that this set touched to the identical object; repeating it does nothing.

        Where somebody else has replaced an attribute since, it is left alone, a PatchWarning says so, and a later
        ``revert`` tries again.
        """
        with LOCK:
            self._warn_of_compiled()
            for entry in self._entries:
                self._revert(entry)

    def _revert(self, entry: Entry) -> None:
        kept = []
        for site in self._sites[id(entry)]:
            intruder = site.intruder()
            if intruder is not None:
                kept.append(site)
                entry.reason = f"not reverted: {site.name} has been replaced by {origin(intruder)} since"
            else:
                site.remove(self._token)
        self._sites[id(entry)] = kept
        if kept:
            warnings.warn(
                f"{entry.target}: {entry.reason}; undo that first, then revert again", PatchWarning, stacklevel=3
            )
        elif entry.status == "applied":
            entry.status = "reverted"

    def _warn_of_compiled(self) -> None:
        """Say so where taking a patch off cannot reach compiled code: Dynamo guards instances, but not classes."""
        owners = {site.owner for sites in self._sites.values() for site in sites if isinstance(site, ClassSite)}
        seals = Seals() if owners else None
        for owner in owners:
            if seals is not None and seals.of_class(owner) is not None:
                warnings.warn(
                    f"a compiled model with {owner.__module__}.{owner.__name__} in it still runs what it was compiled "
                    "with: call torch._dynamo.reset(), or compile it again",
                    PatchWarning,
                    stacklevel=4,
                )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run upstream's own code at every target of this set, in the whole process, keeping packed weights.

        Other sets on the same targets pause with it. Raises PatchError where somebody else has replaced a target since.
        Compiled models, which a pause cannot reach, are looked for at a set's first pause only: the search takes up to
        0.4 s, and a gate pauses at every utterance.
        """
        with LOCK:
            sites = list(dict.fromkeys(site for sites in self._sites.values() for site in sites))
            for site in sites:
                intruder = site.intruder()
                if intruder is not None:
                    raise PatchError(f"cannot pause: {site.name} has been replaced by {origin(intruder)} since")
            if not self._paused_before:
                self._warn_of_compiled()
                self._paused_before = True
            for site in sites:
                site.pause()
        try:
            yield
        finally:
            with LOCK:
                for site in sites:
                    site.resume()

    def verify(self, *inputs: Any, **kwargs: Any) -> Verification:
        """Run the model untouched and patched with the same random state and compare.

        For a set made from one model instance, ``inputs`` are the model's; otherwise the first one is the model. Every
        patched method that runs is compared, untouched and patched, with a float64 copy of its module on the inputs
        that it got in the untouched run; the outputs of the whole model are compared with one another. Runs without
        gradients; the calls count on the receipts. Raises TypeError where no model is given.
        """
        models = [model for model in (reference() for reference in self._models) if model is not None]
        model, arguments = (models[0], inputs) if len(models) == 1 else (inputs[0] if inputs else None, inputs[1:])
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify: expected the model as first argument, got {type(model).__name__}")
        targets = [(entry, site) for entry in self._entries for site in self._sites[id(entry)]]
        replacements = [
            (entry, site, held) for entry, site in targets if (held := site.held_by(self._token)) is not None
        ]
        with LOCK:
            return verify(model, arguments, kwargs, replacements, self.paused)

    def __enter__(self) -> PatchSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()

    def __repr__(self) -> str:
        counts = Counter(entry.status for entry in self._entries)
        return f"<PatchSet: {', '.join(f'{count} {status}' for status, count in counts.items()) or 'empty'}>"
