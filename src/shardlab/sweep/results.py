"""The results of a sweep: a row a job, in `results.csv` and `results.jsonl`."""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from shardlab.run_folder import RunFolder, Status
from shardlab.sweep.processes import LOG_FILE
from shardlab.sweep.records import Job, SweepRecord, last_traceback, printed, read_sweep

Row = Mapping[str, Any]

COMMUNICATION = ("comm.all_gather_bytes", "comm.reduce_scatter_bytes", "comm.all_reduce_bytes")
# Columns after `job`, `status` and those of the overrides; those with a dot are named as in summary.json.
FIGURES = (
    "loss.first",
    "loss.last",
    "eval.loss",
    "perf.tokens_per_s",  # samples where there are no tokens
    "perf.step_ms",
    "memory.allocated_peak_bytes",
    "memory.reserved_peak_bytes",
    "plan.allocated_peak_bytes",
    "plan.reserved_peak_bytes",
    "plan.error_pct",
    "plan.fits",
    "plan.alloc_retries",  # how often a plan on a full device must release what is cached
    "plan.capacity_bytes",
    "plan.fit.value",  # that plan.fit has found; `fit` in plan.json
    *COMMUNICATION,
    "world_size",
    "steps",
    "seconds",  # that the whole job took
    "error",
    "folder",  # of the run, relative to the sweep's
)
_CLOSING_TABLE = re.compile(rf"  status +({'|'.join(status.value for status in Status)})$")  # its first line
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Results:
    """A sweep and what came of its jobs.

    Attributes:
        folder: of the sweep.
        record: of the sweep.
        jobs: in the order of their numbers.
        keys: that the jobs override, each a column.
        rows: of each job, by column; None for what is not known.
    """

    folder: Path
    record: SweepRecord
    jobs: Sequence[Job]
    keys: Sequence[str]
    rows: Sequence[Row]

    @property
    def columns(self) -> list[str]:
        return ["job", "status", *self.keys, *FIGURES]

    @property
    def is_plan(self) -> bool:
        """Whether the jobs were planned, not run: then peaks are those predicted, and there is no throughput."""
        return self.record.mode == "plan"

    @property
    def varied(self) -> list[str]:
        """The keys that differ between jobs."""
        return [key for key in self.keys if len({row[key] for row in self.rows}) > 1]

    @property
    def completed(self) -> list[Row]:
        """The fastest first; of plans that `plan.fit` has searched the largest value, of others the smallest peak."""

        def order(row: Row) -> tuple[float, ...]:
            fitted = row["plan.fit.value"] if self.fit_key else None
            return -(row["perf.tokens_per_s"] or 0), -(fitted or 0), self.peak_bytes(row) or float("inf")

        return sorted((row for row in self.rows if row["status"] == Status.completed.value), key=order)

    @property
    def others(self) -> list[Row]:
        """Those that did not complete."""
        return [row for row in self.rows if row["status"] != Status.completed.value]

    @property
    def unit(self) -> str:
        """What throughput counts: tokens or samples."""
        units = {_at(job.summary, "perf.unit") for job in self.jobs} - {None}
        return str(units.pop()) if len(units) == 1 else "tokens"

    @property
    def fit_key(self) -> str | None:
        """The key of which `plan.fit` has found the largest values; None where it found none, or of several keys."""
        keys = {_at(job.plan or {}, "fit.key") for job in self.jobs} - {None}
        return str(keys.pop()) if len(keys) == 1 else None

    @property
    def fit_name(self) -> str:
        """The header of those values."""
        return f"largest {(self.fit_key or 'value').rpartition('.')[2]}"

    def job(self, number: int) -> Job:
        return next(job for job in self.jobs if job.record.number == number)

    def peak_bytes(self, row: Row) -> int | None:
        """The peak by which jobs are compared: of reserved memory where there is any, else of allocated memory."""
        kind = "plan" if self.is_plan else "memory"
        return row[f"{kind}.reserved_peak_bytes"] or row[f"{kind}.allocated_peak_bytes"]

    def fits(self, row: Row) -> str:
        """Whether a planned run fits, in a word; `just` where it must release cached memory. Empty if not known."""
        if row["plan.fits"] and row["plan.alloc_retries"]:
            return "just"
        return {True: "yes", False: "no", None: ""}[row["plan.fits"]]

    def describe(self, row: Row) -> str:
        """What tells a job from the others, as overrides."""
        return " ".join(f"{key}={row[key]}" for key in self.varied if row[key] is not None)

    def label(self, row: Row) -> str:
        """The same in short: names say by themselves what they are, numbers need the last part of their key."""
        values = [(key.rsplit(".", 1)[-1], row[key]) for key in self.varied if row[key] is not None]
        return " ".join(value if isinstance(value, str) else f"{key}={value}" for key, value in values)

    def counts(self) -> str:
        """How many jobs there are, and what became of them."""
        statuses = Counter(row["status"] for row in self.rows)
        parts = [f"{statuses[status.value]} {status.value}" for status in Status if statuses[status.value]]
        missing = len(self.record.jobs) - len(self.rows)
        parts += [f"{missing} left nothing"] if missing else []
        total = len(self.record.jobs)
        return f"{total} job{'s' if total != 1 else ''}: {', '.join(parts) or 'none'}"


def read_results(folder: Path) -> Results:
    """Reads what the jobs of a sweep left, whatever state they are in.

    Args:
        folder: of the sweep.

    Raises:
        ConfigError: where the folder holds no sweep.
    """
    record, jobs = read_sweep(folder)
    overrides = [_by_key(job.record.overrides) for job in jobs]
    keys = list(dict.fromkeys(key for each in overrides for key in each))
    rows = [
        {"job": job.record.number, "status": job.status}
        | {key: values.get(key) for key in keys}
        | _figures(job, is_plan=record.mode == "plan")
        | {"folder": Path(os.path.relpath(job.folder, folder)).as_posix()}
        for job, values in zip(jobs, overrides, strict=True)
    ]
    return Results(folder, record, jobs, keys, rows)


def write_results(results: Results) -> None:
    """Writes `results.csv`, where what is not known is empty, and `results.jsonl`, where it is null."""
    with (results.folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, results.columns)
        writer.writeheader()
        writer.writerows(results.rows)
    lines = [json.dumps({name: row[name] for name in results.columns}) + "\n" for row in results.rows]
    (results.folder / "results.jsonl").write_text("".join(lines), encoding="utf-8")


def log_tail(job: Job, lines: int) -> tuple[str, list[str]]:
    """What a job said last.

    Returns:
        The file that says it, and the last lines of the traceback there; where there is none, of what the job printed
        before its closing table.
    """
    if traceback := last_traceback(job.folder):
        return RunFolder(job.folder).log_file.name, traceback[-lines:]
    said = printed(job.folder)
    ends = [index for index, line in enumerate(said) if _CLOSING_TABLE.match(line)]
    if ends:
        said[ends[-1] :] = dropwhile(lambda line: line.startswith("  "), said[ends[-1] :])
    return LOG_FILE, said[-lines:]


def _by_key(overrides: Sequence[str]) -> dict[str, int | float | str]:
    """Values as they were given, numbers as such. `+` and `~` are no part of a key; what is deleted is `removed`."""
    found: dict[str, int | float | str] = {}
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        found[key] = "removed" if override.startswith("~") else _value(value)
    return found


def _value(text: str) -> int | float | str:
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    return int(text) if text.lstrip("+-").isdigit() else number


def _figures(job: Job, *, is_plan: bool) -> dict[str, Any]:
    """The columns from `loss.first` on; of what the summary does not say, `plan.json` says what was predicted."""
    plan = job.plan or {}
    peak = plan.get("peak") or {}
    elsewhere = {
        "plan.allocated_peak_bytes": peak.get("allocated_bytes"),
        "plan.reserved_peak_bytes": peak.get("reserved_bytes"),
        "plan.fits": plan.get("fits"),
        "plan.alloc_retries": peak.get("alloc_retries"),
        "plan.capacity_bytes": plan.get("capacity_bytes"),
        "plan.fit.value": _at(plan, "fit.value"),
        "world_size": job.record.world_size,
        "seconds": job.record.seconds,
    }
    if is_plan:
        elsewhere |= {name: _at(plan, name) for name in COMMUNICATION}
    row = {name: _at(job.summary, name) for name in FIGURES}
    return {name: elsewhere.get(name) if value is None else value for name, value in row.items()}


def _at(content: Mapping[str, Any], name: str) -> Any:
    """What lies at a dotted name; None where nothing does."""
    value: Any = content
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
