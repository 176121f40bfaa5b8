"""What a sweep leaves on disk, beside what its runs leave: written by the launcher, read by tables and reports.

A sweep folder (`hydra.sweep.dir`) holds `sweep.json` and one folder a job. A job's folder is a run folder with
`job.json` and `launch.log`, what the job printed; its `summary.json` has the status, which the launcher fills in where
no rank could (`killed`, `skipped`, ...).
"""

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from shardlab.errors import ConfigError
from shardlab.files import write_json
from shardlab.run_folder import RunFolder
from shardlab.sweep.processes import LOG_FILE

# What torchrun says of ranks that ended tells nothing that their own lines do not.
_TORCHRUNS_OWN = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ .*torch/distributed/")
_TRACEBACK = "Traceback (most recent call last)"
_LOGGED = re.compile(r"\[?\d{4}-\d\d-\d\d |rank \d+ failed:$")  # how what follows a traceback in `train.log` begins


@dataclass(frozen=True)
class JobRecord:
    """`job.json`: one combination, as it was started."""

    number: int  # as in Hydra's `hydra.job.num`
    overrides: list[str]  # `key=value` as on the command line; Hydra's own are left out
    digest: str  # of all that decides what the job does: where it is equal, so are the jobs
    world_size: int
    command: list[str]  # that ran; runs the same by hand
    began: float | None = None  # unix seconds; None where the job was not started
    seconds: float | None = None  # from start to end of the command


@dataclass(frozen=True)
class SweepRecord:
    """`sweep.json`: what was run, and on what."""

    command: str  # as it was typed
    began: float  # unix seconds
    machine: str  # e.g. "2 x CPU (AMD EPYC)", "8 x NVIDIA H100 80GB HBM3"
    torch: str  # version
    mode: str  # train, plan
    jobs: list[str]  # folders of its jobs, relative to its own; a resume puts those first that it leaves as they are
    ended: float | None = None  # None while it runs, or where it was killed
    interrupted: bool = False


@dataclass(frozen=True)
class Job:
    """A job as it is found on disk.

    Attributes:
        record: as it was started.
        folder: of the run.
        summary: `summary.json`; at least `status` and `error`.
        plan: `plan.json`; None where there is none.
    """

    record: JobRecord
    folder: Path
    summary: Mapping[str, Any]
    plan: Mapping[str, Any] | None

    @property
    def status(self) -> str:
        return self.summary["status"]


def claim(folder: Path) -> None:
    """Makes a sweep's folder this process's own until it ends.

    Raises:
        ConfigError: where another sweep is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)  # stays open: the kernel lets go of it with the process
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"hydra.sweep.dir={folder}: a sweep is still at work there; wait for its end, or name another folder"
        ) from None
    except OSError:  # a file system without locks
        pass


def write_job(folder: Path, record: JobRecord) -> None:
    write_json(folder / "job.json", asdict(record))


def write_sweep(folder: Path, record: SweepRecord) -> None:
    write_json(folder / "sweep.json", asdict(record))


def read_sweep(folder: Path) -> tuple[SweepRecord, list[Job]]:
    """Reads a sweep, whether it has ended or not.

    Args:
        folder: of the sweep.

    Returns:
        What it is, and its jobs in the order of their numbers; those that left nothing yet are left out.

    Raises:
        ConfigError: where the folder holds no sweep.
    """
    file = folder / "sweep.json"
    if not file.exists():
        raise ConfigError(f"{folder} holds no sweep (no sweep.json): name the folder that a sweep wrote")
    record = SweepRecord(**json.loads(file.read_text()))
    jobs = [job for name in record.jobs if (job := read_job(folder / name)) is not None]
    return record, sorted(jobs, key=lambda job: job.record.number)


def read_job(folder: Path) -> Job | None:
    """Reads a job; None where the folder holds none."""
    record, summary = _read(folder / "job.json"), _read(folder / "summary.json")
    if record is None:
        return None
    if summary is None:  # it is about to write one, or was never started
        summary = {"status": "running" if record["began"] else "interrupted", "error": None}
    return Job(JobRecord(**record), folder, summary, _read(folder / "plan.json"))


def printed(folder: Path) -> list[str]:
    """The last lines that a job printed, without empty ones and torchrun's own."""
    return [line for line in _last_lines(folder / LOG_FILE) if not _TORCHRUNS_OWN.match(line)]


def last_traceback(folder: Path) -> list[str]:
    """The last traceback in a job's `train.log`."""
    lines = _last_lines(RunFolder(folder).log_file)
    begins = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    return list(takewhile(lambda line: not _LOGGED.match(line), lines[begins[-1] :])) if begins else []


def _last_lines(file: Path) -> list[str]:
    """Without empty ones."""
    if not file.exists():
        return []
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - (1 << 16)))
        text = log.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except json.JSONDecodeError:  # a run that was killed has left half of it
        return None
