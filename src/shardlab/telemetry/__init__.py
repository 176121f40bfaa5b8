"""What a run costs and how well it does: memory, throughput, communication, quality.

`telemetry.quality` is imported by itself: torchmetrics takes a second, which a plan has no use for.
"""

from shardlab.telemetry.counter import StepCost, StepCounter, communicated
from shardlab.telemetry.ledger import WINDOW_STEPS, Ledger
from shardlab.telemetry.memory import MemoryMeter, reduce_over_ranks
from shardlab.telemetry.throughput import Throughput

__all__ = [
    "WINDOW_STEPS",
    "Ledger",
    "MemoryMeter",
    "StepCost",
    "StepCounter",
    "Throughput",
    "communicated",
    "reduce_over_ranks",
]
