"""What Slurm says of jobs: asked for all at once and not too often, and never for ever."""

import getpass
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

LOST = "LOST"  # not Slurm's word: it does not know the job

# States in which nothing runs and nothing will; those of `squeue --helpstate`.
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT", LOST,
}  # fmt: skip

_ASK_SECONDS = 10.0  # between questions: Slurm answers them for the whole cluster
_HURRY_SECONDS = 1.0
_LOST_SECONDS = 120.0  # until a job that Slurm does not know is lost
_SILENCE_SECONDS = 1800.0  # until jobs are lost where Slurm does not answer: its controller may be restarted meanwhile


class Watch:
    """What Slurm says of jobs, asked for all at once and not too often.

    Not submitit's: that asks `sacct` alone, which clusters without accounting do not answer.
    """

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._looked = float("-inf")
        self._answered = time.monotonic()
        self._unknown_since: dict[str, float] = {}
        self._every = _ASK_SECONDS

    def hurry(self) -> None:
        """Lets the next look come sooner."""
        self._every = _HURRY_SECONDS

    def look(self, jobs: Sequence[str]) -> None:
        """Asks Slurm for the states of jobs, unless it has been asked just now."""
        now = time.monotonic()
        if now - self._looked < self._every:
            return
        self._looked, self._every = now, _ASK_SECONDS
        user = ["--user", getpass.getuser()]
        lines = ask(["squeue", "--noheader", "--states", "all", "--format", "%i|%T", *user])
        states = _states(lines or ())
        missing = [job for job in jobs if job not in states]
        if missing:  # forgotten some minutes after their end, but for the accounting
            found = ask(["sacct", "--noheader", "--allocations", "--parsable2", "--format", "JobID,State", "--jobs",
                          ",".join(missing)])  # fmt: skip
            states |= _states(found or ())
        self._states |= states
        if lines is not None:
            self._answered = now
            for job in missing:
                if job not in states:
                    self._unknown_since.setdefault(job, now)
        for job in states:
            self._unknown_since.pop(job, None)

    def state_of(self, job: str, age: float) -> str | None:
        """The state of a job in Slurm's words, `LOST`, or None where there was no answer yet.

        Args:
            job: its id.
            age: seconds since it was submitted.
        """
        now = time.monotonic()
        unknown_for = now - self._unknown_since.get(job, now)
        if unknown_for > _LOST_SECONDS or min(now - self._answered, age) > _SILENCE_SECONDS:
            return LOST
        return self._states.get(job)


def _states(lines: Iterable[str]) -> dict[str, str]:
    """States by job of lines such as `12|CANCELLED by 1000`."""
    return {job: state.split()[0] for job, _, state in (line.strip().partition("|") for line in lines) if state}


def ask(command: Sequence[str]) -> list[str] | None:
    """The lines that a command of Slurm answers; None where it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
        if answer.returncode == 0:
            return answer.stdout.splitlines()
    return None
