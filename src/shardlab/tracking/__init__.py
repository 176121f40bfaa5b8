"""Where metrics go: the screen, metrics.jsonl, Weights & Biases."""

from shardlab.tracking.formats import format_batch, format_count, format_gib, format_seconds
from shardlab.tracking.tracker import RunHeader, Tracker, make_tracker

__all__ = ["RunHeader", "Tracker", "format_batch", "format_count", "format_gib", "format_seconds", "make_tracker"]
