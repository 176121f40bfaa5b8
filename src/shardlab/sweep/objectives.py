"""What a job returns to the sweeper: the figures of its summary that `sweep.objectives` names."""

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


def check_directions(directions: Sequence[str], names: Sequence[str]) -> None:
    """Raises ConfigError where `hydra.sweeper.direction` does not say of each objective which way is better."""
    if len(directions) != len(names) or not set(directions) <= {"maximize", "minimize"}:
        raise ConfigError(
            f"hydra.sweeper.direction=[{','.join(directions)}] must be maximize or minimize, one for each of "
            f"sweep.objectives=[{','.join(names)}]"
        )


def objectives(summary: Mapping[str, Any], names: Sequence[str]) -> float | tuple[float, ...] | None:
    """The figures of one job.

    Args:
        summary: as in `summary.json`.
        names: of `OBJECTIVES`.

    Returns:
        One number for one name, a tuple for several; None where the run did not come to all of them. Optuna counts
        that as a trial that failed; NaN it would not take.
    """
    values = [_value(summary, name) for name in names]
    figures = tuple(value for value in values if value is not None)
    if not figures or len(figures) < len(values):
        return None
    return figures[0] if len(figures) == 1 else figures


def _value(summary: Mapping[str, Any], name: str) -> float | None:
    group, key = name.split(".")
    value = (summary.get(group) or {}).get(key) if summary["status"] == "completed" else None
    return None if value is None else float(value)
