"""The plan of a run: what rank 0 holds at its peak, whether that fits, and what it communicates."""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from shardlab.config import Config
from shardlab.planner.allocator import CachingAllocator, CublasWorkspaces
from shardlab.planner.cluster import ClusterConfig, ClusterDevice
from shardlab.planner.simulation import simulate
from shardlab.telemetry.ledger import Category, Ledger, Phase


@dataclass(frozen=True)
class PlannedPeak:
    """The most that rank 0 has allocated at a time."""

    allocated_bytes: int
    reserved_bytes: int | None  # by the caching allocator, at its own peak; None on a CPU, which has none
    phase: str
    module: str  # inside whose forward or backward
    breakdown: dict[str, int]  # bytes by category; they add up to `allocated_bytes`

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
        ConfigError: where the run cannot be built as configured.
    """
    began = time.perf_counter()
    on_cpu = cluster.device is ClusterDevice.cpu
    simulation = simulate(config, world_size=cluster.world_size, on_cpu=on_cpu)
    peak = _on_cpu(simulation.ledger) if on_cpu else _on_gpu(simulation.ledger, cluster)
    capacity = cluster.usable_bytes
    return Plan(
        world_size=cluster.world_size,
        peak=peak,
        capacity_bytes=capacity,
        fits=None if capacity is None else peak.needed_bytes <= capacity,
        headroom_bytes=None if capacity is None else capacity - peak.needed_bytes,
        comm={f"{name}_bytes": nbytes for name, nbytes in simulation.cost.comm_bytes.items()},
        host_peak_bytes=0 if on_cpu else simulation.ledger.peak("cpu").bytes,
        wall_s=time.perf_counter() - began,
    )


def _on_cpu(ledger: Ledger) -> PlannedPeak:
    peak = ledger.peak()
    return PlannedPeak(peak.bytes, None, peak.phase.value, peak.module, peak.breakdown)


def _on_gpu(ledger: Ledger, cluster: ClusterConfig) -> PlannedPeak:
    """Feeds the ledger's events to the caching allocator, in blocks of whose sizes the device's memory is used."""
    # Without a capacity: how much a run would take is the question, and whether that is there, the answer's use.
    allocator = CachingAllocator(settings=cluster.allocator_settings)
    major, minor = cluster.capability or (0, 0)
    workspaces = CublasWorkspaces(allocator, (major, minor))
    events = [event for event in ledger.events if event.entry.device == ledger.device]
    compute_stream = next((event.stream for event in events if event.phase is Phase.forward), None)
    blocks: dict[int, Any] = {}
    live: Counter[Category] = Counter()
    highest, phase, module, breakdown = 0, Phase.init, "", live
    for event in events:
        if event.phase in (Phase.forward, Phase.backward):
            # The first matrix product of each thread takes a workspace; autograd runs backward in a thread of its own.
            before = allocator.allocated_bytes
            workspaces.use(event.phase, compute_stream)
            live[Category.other] += allocator.allocated_bytes - before
        key, category = id(event.entry), event.entry.category
        if event.before:
            block = blocks.pop(key)
            live[category] -= block.size
            allocator.free(block)
        if block := allocator.malloc(event.after, event.stream):
            blocks[key] = block
            live[category] += block.size
        if allocator.allocated_bytes > highest:
            highest, phase, module, breakdown = allocator.allocated_bytes, event.phase, event.module, live.copy()
    return PlannedPeak(
        allocated_bytes=highest,
        reserved_bytes=allocator.reserved_peak_bytes,
        phase=phase.value,
        module=module,
        breakdown={category.value: breakdown[category] for category in Category},
    )
