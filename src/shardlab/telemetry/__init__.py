"""What a run costs and how well it does: memory, throughput, communication, quality."""

from shardlab.telemetry.counter import StepCost, StepCounter
from shardlab.telemetry.ledger import WINDOW_STEPS, Ledger
from shardlab.telemetry.memory import MemoryMeter, reduce_over_ranks
from shardlab.telemetry.quality import Quality
from shardlab.telemetry.throughput import Throughput

__all__ = [
    "WINDOW_STEPS",
    "Ledger",
    "MemoryMeter",
    "Quality",
    "StepCost",
    "StepCounter",
    "Throughput",
    "reduce_over_ranks",
]
