"""What a job returns to the sweeper: the figures of its summary that `sweep.objectives` names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.errors import ConfigError

# The figures of summary.json that a job can be judged by.
OBJECTIVES = (
    "perf.tokens_per_s",
    "perf.step_ms",
    "loss.last",
    "eval.loss",
    "memory.allocated_peak_bytes",
    "memory.reserved_peak_bytes",
    "plan.allocated_peak_bytes",
    "plan.reserved_peak_bytes",
)


def check_objectives(names: Sequence[str]) -> None:
    """Raises ConfigError where `sweep.objectives` names what no summary has."""
    for name in names:
        if name not in OBJECTIVES:
            raise ConfigError(f"sweep.objectives={name} is no figure of a run: choose among {', '.join(OBJECTIVES)}")


def objectives(summary: Mapping[str, Any], names: Sequence[str]) -> float | tuple[float, ...] | None:
    """The figures of one job.

    Args:
        summary: as in `summary.json`.
        names: of `OBJECTIVES`.

    Returns:
        One number for one name, a tuple for several, None for none; NaN for what the run did not come to.
    """
    values = tuple(_value(summary, name) for name in names)
    return values[0] if len(values) == 1 else values or None


def _value(summary: Mapping[str, Any], name: str) -> float:
    group, key = name.split(".")
    value = (summary.get(group) or {}).get(key) if summary["status"] == "completed" else None
    return math.nan if value is None else float(value)
