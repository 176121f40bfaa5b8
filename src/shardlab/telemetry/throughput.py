"""Step time and throughput between log steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardlab.telemetry.ledger import WINDOW_STEPS

# Left out of all figures: lazy initialisation, first allocations, and the steps that are counted and kept account of.
WARMUP_STEPS = WINDOW_STEPS


@dataclass
class _Span:
    seconds: float = 0.0
    data_seconds: float = 0.0
    steps: int = 0

    def __iadd__(self, other: "_Span") -> "_Span":
        self.seconds += other.seconds
        self.data_seconds += other.data_seconds
        self.steps += other.steps
        return self


class Throughput:
    """Times steps without waiting for the device at each: only where an interval begins or ends.

    Evaluation, logging and the first steps are left out.
    """

    def __init__(self, *, total_steps: int, synchronize: Callable[[], None]):
        """Args:
        total_steps: of the run; a run shorter than the warm-up measures its last step all the same.
        synchronize: waits for the device.
        """
        self._warmup = min(WARMUP_STEPS, total_steps - 1)
        self._synchronize = synchronize
        self._done = 0
        self._interval, self._total = _Span(), _Span()
        self._began: float | None = None
        self._resume()

    def step(self, data_seconds: float) -> None:
        """Counts a step that was just issued, and the time that it waited for data."""
        self._done += 1
        if self._done == self._warmup:
            self._synchronize()
        if self._done <= self._warmup:
            self._interval = _Span()
            self._resume()
        else:
            self._interval.steps += 1
            self._interval.data_seconds += data_seconds

    def pause(self) -> None:
        """Ends the clock's run, with the device at rest; what follows counts for nothing until `resume`."""
        self._synchronize()
        if self._began is not None:
            self._interval.seconds += time.perf_counter() - self._began
        self._began = None

    def resume(self) -> None:
        self._synchronize()
        self._resume()

    def take(self) -> dict[str, float] | None:
        """Figures since the last call, while paused: `step_ms`, `data_ms`, `steps_per_s`. None if no step counted."""
        interval, self._interval = self._interval, _Span()
        if interval.steps:  # else its seconds are those of steps that are left out
            self._total += interval
        return _figures(interval)

    def total(self) -> dict[str, float] | None:
        """The same over all intervals that were taken."""
        return _figures(self._total)

    def _resume(self) -> None:
        self._began = time.perf_counter()


def _figures(span: _Span) -> dict[str, float] | None:
    if not span.steps or not span.seconds:
        return None
    return {
        "step_ms": 1000 * span.seconds / span.steps,
        "data_ms": 1000 * span.data_seconds / span.steps,
        "steps_per_s": span.steps / span.seconds,
    }
