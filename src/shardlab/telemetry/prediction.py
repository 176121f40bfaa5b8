"""What was predicted of a run's memory, to be held against what is measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardlab.telemetry.memory import GIB


@dataclass(frozen=True)
class Prediction:
    """What a plan says of the peak of the memory window, in bytes."""

    allocated_bytes: int
    reserved_bytes: int | None  # None on a CPU
    capacity_bytes: int | None  # None where it is not known
    fits: bool | None
    device: str | None = None  # whose capacity that is

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any], device: str | None = None) -> "Prediction":
        """What `plan.json` says.

        Args:
            plan: as `Plan.to_dict` has it.
            device: a name.
        """
        peak = plan["peak"]
        return cls(peak["allocated_bytes"], peak["reserved_bytes"], plan["capacity_bytes"], plan["fits"], device)

    @property
    def needed_bytes(self) -> int:
        """What must be there: all that is reserved, where something is."""
        return self.allocated_bytes if self.reserved_bytes is None else self.reserved_bytes

    def to_summary(self) -> dict[str, Any]:
        """What `summary.json` says of it, as `plan`."""
        return {
            "allocated_peak_bytes": self.allocated_bytes,
            "reserved_peak_bytes": self.reserved_bytes,
            "fits": self.fits,
            "capacity_bytes": self.capacity_bytes,
        }

    def metrics(self) -> dict[str, float]:
        """`plan/allocated_peak_gib`, and where memory is reserved `plan/reserved_peak_gib`."""
        sizes = {"allocated": self.allocated_bytes, "reserved": self.reserved_bytes}
        return {f"plan/{kind}_peak_gib": size / GIB for kind, size in sizes.items() if size is not None}

    def error_pct(self, memory: Mapping[str, Any]) -> float | None:
        """By how much the plan is above what was measured, in percent of that; below, where it is negative.

        Of reserved memory where something is reserved, else of allocated memory.

        Args:
            memory: `memory` of the summary, after the whole window.
        """
        planned, measured = self.reserved_bytes, memory.get("reserved_peak_bytes")
        if planned is None or not measured:
            planned, measured = self.allocated_bytes, memory.get("allocated_peak_bytes")
        return error_pct(planned, measured) if measured else None


def error_pct(planned: int, measured: int) -> float:
    """By how much what was planned is above what was measured, in percent of that."""
    return (planned - measured) / measured * 100
