"""The plan of a run: what rank 0 holds at its peak, whether that fits, and what it communicates."""

import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from shardlab.config import Config
from shardlab.planner.allocator import CachingAllocator, CublasWorkspaces, OutOfMemory
from shardlab.planner.cluster import ClusterConfig, ClusterDevice
from shardlab.planner.simulation import simulate
from shardlab.telemetry.events import Category, Entry, Event, Phase, peak_of
from shardlab.telemetry.ledger import ROOT_UNIT, Ledger


@dataclass(frozen=True)
class PlannedPeak:
    """The most that rank 0 has allocated at a time."""

    allocated_bytes: int
    reserved_bytes: int | None  # by the caching allocator, at its own peak; None on a CPU, which has none
    fragmentation_bytes: int | None  # by which that is above what is allocated at the peak
    alloc_retries: int | None  # how often all that was cached was released, because the device was full
    phase: str
    module: str  # inside whose forward or backward
    breakdown: dict[str, int]  # bytes by category; they add up to `allocated_bytes`
    activations: dict[str, int]  # bytes by the module that made them, blocks' numbers as `*`; the largest first
    unsharded: dict[str, int]  # bytes of unsharded parameters and gradients by unit; the largest first

    @property
    def needed_bytes(self) -> int:
        """What must be there: all that is reserved, where something is."""
        return self.allocated_bytes if self.reserved_bytes is None else self.reserved_bytes


@dataclass(frozen=True)
class Plan:
    """What `plan.json` holds; all sizes in bytes."""

    world_size: int
    peak: PlannedPeak
    capacity_bytes: int | None  # None where it is not known
    fits: bool | None
    headroom_bytes: int | None
    comm: dict[str, int]  # unsharded bytes of each kind of collective, per rank and step
    host_peak_bytes: int  # of what is offloaded to the host
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: Config, cluster: ClusterConfig) -> Plan:
    """Plans a run on a cluster.

    Args:
        config: as `config.parse` returned it for the cluster's world size.
        cluster: resolved.

    Raises:
        ConfigError: where the run cannot be built as configured, or the model cannot be planned.
    """
    return plan_with_record(config, cluster)[0]


def plan_with_record(config: Config, cluster: ClusterConfig) -> tuple[Plan, Ledger]:
    """As `make_plan`, with the record that the plan was worked out from."""
    began = time.perf_counter()
    on_cpu = cluster.device is ClusterDevice.cpu
    simulation = simulate(config, world_size=cluster.world_size, on_cpu=on_cpu)
    ledger = simulation.ledger
    peak = _on_cpu(ledger) if on_cpu else _on_gpu(ledger, cluster)
    capacity = cluster.usable_bytes
    plan = Plan(
        world_size=cluster.world_size,
        peak=peak,
        capacity_bytes=capacity,
        fits=None if capacity is None else peak.needed_bytes <= capacity,
        headroom_bytes=None if capacity is None else capacity - peak.needed_bytes,
        comm={f"{name}_bytes": nbytes for name, nbytes in simulation.cost.comm_bytes.items()},
        host_peak_bytes=0 if on_cpu else ledger.peak("cpu").bytes,
        wall_s=time.perf_counter() - began,
    )
    return plan, ledger


def _on_cpu(ledger: Ledger) -> PlannedPeak:
    events = [event for event in ledger.events if event.entry.device == ledger.device]
    return _peak(events, [event.after for event in events], None)


def _on_gpu(ledger: Ledger, cluster: ClusterConfig) -> PlannedPeak:
    """The peak in blocks of the caching allocator.

    That of an allocator that can have whatever it asks for, which says how much there would have to be; of one on a
    full device, which releases what it has cached, where the first would take too much and the second does not fail.
    """
    events, sizes, allocator = _replayed(ledger, cluster, None)
    usable, collects = cluster.usable_bytes, cluster.allocator_settings.garbage_collection_threshold
    if usable is not None and (collects or allocator.reserved_peak_bytes > usable):
        with suppress(OutOfMemory):
            events, sizes, allocator = _replayed(ledger, cluster, cluster.device_bytes)
    return _peak(events, sizes, allocator)


def _replayed(
    ledger: Ledger, cluster: ClusterConfig, capacity_bytes: int | None
) -> tuple[Sequence[Event], Sequence[int], CachingAllocator]:
    """Feeds the ledger's events to the caching allocator of a device.

    Returns:
        The events of the device, its libraries' workspaces among them; bytes of each one's storage after it, as a block
        of the allocator; the allocator.

    Raises:
        OutOfMemory: where the capacity does not suffice.
    """
    allocator = CachingAllocator(capacity_bytes, cluster.allocator_settings)
    major, minor = cluster.capability or (0, 0)
    workspaces = CublasWorkspaces(allocator, (major, minor))
    events: list[Event] = []
    sizes: list[int] = []
    recorded = [event for event in ledger.events if event.entry.device == ledger.device]
    compute_stream = next((event.stream for event in recorded if event.phase is Phase.forward), None)
    blocks: dict[Entry, Any] = {}
    for event in recorded:
        if event.phase in (Phase.forward, Phase.backward):
            # The first matrix product of each thread takes a workspace; autograd runs backward in a thread of its own.
            before = allocator.allocated_bytes
            workspaces.use(event.phase, compute_stream)
            if taken := allocator.allocated_bytes - before:
                workspace = Entry(ledger.device, compute_stream, Category.other)
                events.append(Event(workspace, compute_stream, 0, taken, event.phase, ""))
                sizes.append(taken)
        if event.before:
            allocator.free(blocks.pop(event.entry))
        block = allocator.malloc(event.after, event.stream)
        if block is not None:
            blocks[event.entry] = block
        events.append(event)
        sizes.append(block.size if block else 0)
    return events, sizes, allocator


def _peak(events: Sequence[Event], sizes: Sequence[int], allocator: CachingAllocator | None) -> PlannedPeak:
    """The most that was allocated at a time, and who held it.

    Args:
        events: of one device.
        sizes: bytes that the event's storage takes after it.
        allocator: that served them; None on a CPU.
    """
    peak = peak_of(events, sizes)
    births: dict[Entry, Event] = {}
    for event in events:
        births.setdefault(event.entry, event)
    units = {entry.name for entry in births if entry.category is Category.unsharded_parameters}
    activations: Counter[str] = Counter()
    unsharded: Counter[str] = Counter()
    for entry, size in peak.alive.items():
        if entry.category is Category.activations:
            activations[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", births[entry].module)] += size
        elif entry.category in (Category.unsharded_parameters, Category.unsharded_gradients):
            unsharded[entry.name or _unit_of(births[entry].module, units)] += size
    return PlannedPeak(
        allocated_bytes=peak.bytes,
        reserved_bytes=allocator.reserved_peak_bytes if allocator else None,
        fragmentation_bytes=allocator.reserved_peak_bytes - peak.bytes if allocator else None,
        alloc_retries=allocator.retries if allocator else None,
        phase=peak.phase.value,
        module=peak.module,
        breakdown=peak.breakdown,
        activations={name: nbytes for name, nbytes in activations.most_common() if nbytes},
        unsharded={name: nbytes for name, nbytes in unsharded.most_common() if nbytes},
    )


def _unit_of(module: str, units: Collection[str]) -> str:
    """The unit that a module lies in: the innermost one; several modules of one unit are named with commas between."""
    parts = {part: unit for unit in units for part in unit.split(", ")}
    inside = [part for part in parts if module == part or module.startswith(f"{part}.")]
    return parts[max(inside, key=len)] if inside else ROOT_UNIT
