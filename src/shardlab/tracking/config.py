"""Schema of `conf/tracking`."""

from dataclasses import dataclass, field
from enum import Enum


class Display(Enum):
    auto = "auto"  # a progress bar on a terminal, else lines
    lines = "lines"  # one line per log step
    none = "none"  # nothing on the screen


class WandbMode(Enum):
    auto = "auto"  # WANDB_MODE where it is set; else online when logged in, offline when not
    online = "online"
    offline = "offline"
    disabled = "disabled"  # wandb is not even imported


@dataclass
class WandbConfig:
    """Weights & Biases; the keys are those of `wandb.init`."""

    mode: WandbMode = WandbMode.auto
    project: str = "shardlab"
    entity: str | None = None
    group: str | None = None
    job_type: str = "train"
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    init_timeout_s: float = 20.0
    finish_timeout_s: float = 15.0


@dataclass
class TrackingConfig:
    """Where metrics go. metrics.jsonl is always written and needs no key."""

    display: Display = Display.auto
    wandb: WandbConfig = field(default_factory=WandbConfig)
