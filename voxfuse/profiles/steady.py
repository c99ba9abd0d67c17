"""Whether a trace shows steady work: no compilation and no capture of a CUDA graph."""

from __future__ import annotations

import numpy as np

from voxfuse.profiles.operations import is_unsteady
from voxfuse.profiles.trace import Trace, TraceError

SHOWN = 4


def require_steady(trace: Trace) -> None:
    """Raise TraceError, naming what was found and when, where a trace contains compilation or capture."""
    bad = np.array([is_unsteady(name) for name in trace.names], dtype=bool)
    found: dict[str, list[float]] = {}
    begins = [part.begin.min() for part in (trace.device, trace.ops, trace.calls, trace.marks) if len(part)]
    for part in (trace.calls, trace.marks, trace.ops):
        for row in np.nonzero(bad[part["name"]])[0].tolist() if len(part) else ():
            found.setdefault(trace.names[part["name"][row]], []).append(float(part.begin[row] - min(begins)))
    if found:
        listed = [f"{name} {len(at)}×, first after {min(at) / 1e6:.3f} s" for name, at in found.items()]
        more = "" if len(listed) <= SHOWN else f", and {len(listed) - SHOWN} more"
        raise TraceError(
            f"{trace.label} is not steady: it contains compilation or graph capture "
            f"({'; '.join(listed[:SHOWN])}{more}); warm up with every shape that the profiled work has, then profile"
        )
