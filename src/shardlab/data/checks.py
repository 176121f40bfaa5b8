"""Checks of single settings under `data`; each ends in one line that names the key, the value and the way out."""

from typing import Any

from shardlab.errors import ConfigError


def check_int(key: str, value: Any, *, minimum: int) -> None:
    """Raises ConfigError unless `data.<key>` is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"data.{key}={value} is not possible; give an integer of at least {minimum}")


def check_fraction(key: str, value: Any) -> None:
    """Raises ConfigError unless `data.<key>` is a number in [0, 1)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ConfigError(f"data.{key}={value} is not possible; give a fraction of at least 0 and below 1")


def check_split(split: str) -> None:
    """Raises ValueError for a part of the data that does not exist."""
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r} is unknown; a data set has the parts 'train' and 'eval'")
