"""Records of a profile: hotspots with their ceilings, and the fusions that they are matched with.

Times are microseconds of one process unless a name says otherwise; shares are fractions of 1.
"""

from __future__ import annotations

from voxfuse.records.base import Contract, Document, Environment, Record, TensorSignature


class Hotspot(Document, frozen=True, kw_only=True, tag="hotspot"):
    """A chain of operations of one module in a profile, with what fusing it could give end to end.

    ``module`` is the module's path with ``*`` for numbers, ``module_class`` its class. ``operations`` is the chain as
    it was dispatched, without views, and ``operation`` the same as one text. ``signature`` holds the tensors of the
    chain's first operation at its most expensive shape, one of ``signatures``. ``calls``, ``gpu_us`` (the sum of its
    kernels, or of its operations where the trace has no GPU), ``host_us`` and ``launches`` are of the whole window.
    ``critical_path_share`` is all of its time on the critical path, ``host_critical_share`` the part of it in which the
    host dispatches and launches while the GPU has nothing to do. ``amdahl_ceiling`` = 1 / (1 − critical_path_share) is
    what removing it altogether would give end to end, ``stage_ceiling`` the same within its stage. ``fusions`` names
    those that match; ``reason`` says why none, and ``advice`` what would help instead of a faster kernel.
    """

    stack: str
    stage: str
    module: str
    operation: str
    signature: tuple[TensorSignature, ...]
    calls: int
    gpu_us: float
    host_us: float
    launches: int
    busy_share: float
    wall_share: float
    critical_path_share: float
    amdahl_ceiling: float
    fusions: tuple[str, ...] = ()
    reason: str | None = None
    operations: tuple[str, ...] = ()
    module_class: str = ""
    signatures: int = 0
    host_critical_share: float = 0.0
    stage_ceiling: float = 1.0
    advice: str | None = None

    @property
    def kernel_ceiling(self) -> float:
        """What kernels that take no time at all would give end to end, with launches and dispatch as they are."""
        return ceiling(self.critical_path_share - self.host_critical_share)


class FusionPattern(Record, frozen=True, kw_only=True):
    """How a hotspot that a fusion replaces looks in a profile of the untouched stack.

    ``operations`` must occur in this order, one right after the other, in the hotspot's chain; empty: everything in
    the modules. ``modules`` are upstream's classes, outermost first, that the hotspot's module must be inside of, or be
    itself; empty: any. ``ranks`` and ``dtypes`` bound the first tensor (its shape class); empty: any. What a trace does
    not tell, such as shapes, refutes nothing.
    """

    operations: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()


class Fusion(Document, frozen=True, kw_only=True, tag="fusion"):
    """A registered fusion. ``name`` is stack-free; ``operations`` are the upstream operations that it replaces.

    ``patterns`` find it in a profile: each describes a part of what it replaces. ``graph``: it replays captured graphs.
    What it saves is the host's, which no kernel timing shows: the gate's leave-one-out blocks are its verdict of speed.
    """

    name: str
    stacks: tuple[str, ...]
    operations: tuple[str, ...]
    contract: Contract
    envelope: str
    kernels: tuple[str, ...]
    patterns: tuple[FusionPattern, ...] = ()
    graph: bool = False


class StageTime(Record, frozen=True, kw_only=True):
    """One stage of a process. ``component`` is the branch of the runtime tree that it belongs to.

    ``gpu_us`` is its share of the union of GPU-busy time without copies, ``copy_us`` that of copies and fills,
    ``idle_us`` the time in which the GPU waits for this stage's host code, by cause.
    """

    name: str
    component: str
    gpu_us: float
    copy_us: float
    idle_us: dict[str, float]
    launches: int
    critical_path_share: float
    amdahl_ceiling: float


class DeviceTime(Record, frozen=True, kw_only=True):
    """One device of a process: ``busy_us`` is the union of its intervals, ``sum_us`` their sum."""

    device: str
    busy_us: float
    sum_us: float
    kernels: int
    streams: int


class ProcessProfile(Record, frozen=True, kw_only=True):
    """One trace: its runtime tree, stages and hotspots, most promising first.

    ``tree`` adds up to ``wall_us``: the GPU-busy time of each component, ``copy``, ``bubbles`` (the GPU idles) and
    ``queue`` (no request is under way). ``bubbles`` splits those by what the host did, ``path`` the critical path by
    what it consists of. ``launches`` counts the calls that put work on a device. ``events`` says how many events were
    read and how they were joined. ``steps`` are requests, or None where none are marked. ``timeline`` has, per
    component and for copies, the busy share of each of so many equal parts of the window.
    """

    trace: str
    device: str
    wall_us: float
    steps: int | None
    tree: dict[str, float]
    bubbles: dict[str, float]
    path: dict[str, float]
    devices: tuple[DeviceTime, ...]
    stages: tuple[StageTime, ...]
    launches: dict[str, int]
    events: dict[str, int]
    hotspots: tuple[Hotspot, ...]
    notes: tuple[str, ...] = ()
    timeline: dict[str, tuple[float, ...]] = {}


class HotspotReport(Document, frozen=True, kw_only=True, tag="hotspot-report"):
    """What ``voxfuse profile`` and ``voxfuse hotspots`` found; processes run beside each other and are not added up.

    ``noise`` is the share below which a gain cannot be told from noise. ``overhead`` compares the same work with and
    without the profiler (wall seconds, or module calls a second of a command, and their ratio). ``samples`` are NVML
    means while it ran, ``throttled`` the share of samples at which each reason lowered the clocks, ``series`` the
    samples themselves (``at_s`` counts from the first request). All are empty for traces of others.
    """

    stack: str
    workload: dict[str, int | float | str | bool | None]
    noise: float
    environment: Environment | None
    processes: tuple[ProcessProfile, ...]
    overhead: dict[str, float] = {}
    samples: dict[str, float] = {}
    throttled: dict[str, float] = {}
    series: dict[str, tuple[float, ...]] = {}


def ceiling(share: float) -> float:
    """Amdahl: the speed-up if a share of the time were gone. Capped, since a share of 1 leaves nothing to divide by."""
    return 1 / max(1 - share, 1e-3)
