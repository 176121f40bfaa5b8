"""What became of a job: what its ranks wrote, and what only their launcher can know."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlab.run_folder import RunFolder, Status
from shardlab.sweep.records import printed
from shardlab.sweep.runner import Ended
from shardlab.tracking import format_gib

_MISTAKE = 2  # exit code of a rank that found a mistake in the config


def settle(folder: Path, ended: Ended, *, timeout_s: float | None, interrupted: bool) -> Mapping[str, Any]:
    """Completes `summary.json` where no rank could.

    Args:
        folder: of the job.
        ended: how its processes did.
        timeout_s: how long they were allowed to take.
        interrupted: whether the sweep was asked to end meanwhile.

    Returns:
        The summary.
    """
    file = folder / "summary.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"status": Status.running.value}
    status, error = _verdict(Status(found["status"]), found.get("error"), folder, ended, timeout_s, interrupted)
    summary = found | {"status": status.value, "error": error}
    if summary != found:
        RunFolder(folder).write_summary(summary)
    return summary


def _verdict(
    status: Status, error: str | None, folder: Path, ended: Ended, timeout_s: float | None, interrupted: bool
) -> tuple[Status, str | None]:
    if status in (Status.completed, Status.oom):
        return status, error
    if ended.said is not None:
        return ended.said
    if ended.timed_out:
        return Status.failed, f"not finished after hydra.launcher.timeout_s={timeout_s:g}"
    # Before what was killed: a second signal kills what has not ended, and torchrun ranks that are stuck.
    if interrupted:
        return Status.interrupted, None
    killed = [rank for rank, code in ended.exit_codes.items() if code == -signal.SIGKILL]
    if killed or ended.code == -signal.SIGKILL:
        who = f"rank {killed[0]}" if killed else "torchrun"
        return Status.killed, f"{who} was killed (SIGKILL), perhaps by the kernel for its memory (see dmesg)"
    if status is Status.running:
        error = last_error(folder)
    # Not a failure: the combination is one that cannot be run.
    refused = _MISTAKE in ended.exit_codes.values()
    return (Status.skipped if refused else Status.failed if status is Status.running else status), error


def last_error(folder: Path) -> str | None:
    """The last line of a job's log that tells an error, else the last line."""
    lines = [line.strip() for line in printed(folder)]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines or [None])[-1]  # type: ignore[list-item]


def result_line(summary: Mapping[str, Any], seconds: float | None) -> str:
    """What became of a job, in one line."""
    perf, memory, plan = (summary.get(key) or {} for key in ("perf", "memory", "plan"))
    parts = [str(summary["status"])]
    if summary.get("error"):
        parts[0] += f": {summary['error']}"
    if perf.get("tokens_per_s"):
        parts.append(f"{perf['tokens_per_s']:,.0f} {perf['unit']}/s")
    for sizes, how in ((memory, ""), (plan, " planned")) if summary["status"] != Status.skipped.value else ():
        if peak := sizes.get("reserved_peak_bytes") or sizes.get("allocated_peak_bytes"):
            parts.append(f"{format_gib(peak)}{how}")
            break
    if seconds is not None:
        parts.append(f"{seconds:.1f} s")
    return ", ".join(parts)
