"""The folder of one run: its config, its summary, and which rank failed first."""

import json
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardlab.config import Config
from shardlab.errors import ConfigError
from shardlab.files import write_json


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

    @property
    def timeline_file(self) -> Path:
        return self.path / "memory_timeline.html"

    def check_unused(self) -> None:
        """Raises ConfigError where the folder holds a run already: it would be overwritten."""
        if (self.path / "summary.json").exists():
            raise ConfigError(f"hydra.run.dir={self.path} already holds a run: name another folder, or remove it")

    def clear(self) -> None:
        """Takes out what an earlier attempt wrote of its end, and its metrics; `train.log` is kept."""
        for name in ("summary.json", "metrics.jsonl", "error.rank*.json"):
            for file in self.path.glob(name):
                file.unlink()

    def write_config(self, config: Config) -> None:
        (self.path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def write_error(self, note: Mapping[str, Any]) -> None:
        """Notes why a rank ends, before any other rank can notice: the earliest note is the run's reason.

        Args:
            note: `time` (unix seconds), `rank`, `status`, `error` (one line that names the rank, or null), `memory`.
        """
        write_json(self.path / f"error.rank{note['rank']}.json", note)

    def first_error(self) -> dict[str, Any] | None:
        """The earliest note that a rank left, None where there is none."""
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
