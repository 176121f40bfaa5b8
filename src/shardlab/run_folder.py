"""The folder of one run: its config, its summary, and which rank failed first."""

import json
import logging
import os
import time
import traceback
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardlab.config import Config
from shardlab.errors import ConfigError


class Status(Enum):
    """What became of a run (`summary.json`)."""

    running = "running"
    completed = "completed"
    oom = "oom"
    failed = "failed"
    killed = "killed"
    interrupted = "interrupted"
    skipped = "skipped"


@dataclass(frozen=True)
class RunFolder:
    """Paths and files of a run; the same folder on all ranks."""

    path: Path

    @property
    def log_file(self) -> Path:
        return self.path / "train.log"

    def check_unused(self) -> None:
        """Raises ConfigError where the folder holds a run already: it would be overwritten."""
        if (self.path / "summary.json").exists():
            raise ConfigError(f"hydra.run.dir={self.path} already holds a run: name another folder, or remove this one")

    def write_config(self, config: Config) -> None:
        (self.path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces `summary.json` in one move, so that a reader never finds half of one."""
        draft = self.path / ".summary.json"
        draft.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(draft, self.path / "summary.json")

    def write_error(self, rank: int, status: Status, error: BaseException, **more: Any) -> None:
        """Notes why this rank fails, before any other rank can notice: the earliest note is the run's reason."""
        note = {"time": time.time(), "rank": rank, "status": status.value, "error": describe(error), **more}
        draft = self.path / f".error.rank{rank}.json"
        draft.write_text(json.dumps(note))
        os.replace(draft, self.path / f"error.rank{rank}.json")

    def first_error(self) -> dict[str, Any] | None:
        """The earliest note that a rank left, None where no rank failed."""
        notes = [json.loads(file.read_text()) for file in self.path.glob("error.rank*.json")]
        return min(notes, key=lambda note: note["time"], default=None)

    def log_traceback(self, rank: int, error: BaseException) -> None:
        """Appends this rank's traceback to `train.log`."""
        with self.log_file.open("a") as log:
            log.write(f"rank {rank} failed:\n" + "".join(traceback.format_exception(error)))

    def log_here(self, rank: int) -> None:
        """Lets this rank's warnings go to `train.log` too; rank 0's logging is set up by Hydra."""
        handler = logging.FileHandler(self.log_file)
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)


def describe(error: BaseException) -> str:
    """An exception as one line: its class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
