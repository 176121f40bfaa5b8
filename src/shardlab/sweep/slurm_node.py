"""What a Slurm job of a sweep runs on each of its nodes: a torchrun, from the beginning again after a preemption.

Imported on the nodes before torchrun is, and so without PyTorch.
"""

import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardlab.files import write_json
from shardlab.interrupt import exists
from shardlab.sweep import processes
from shardlab.sweep.processes import log_name, start_torchrun, take_exit_codes

CANCEL_FILE = ".cancel"  # asks a job on this machine to end; one of Slurm's is sent a signal
SUBMISSION = "slurm"  # folder of what submitit writes
TIME_LIMIT, PREEMPTED = "time limit", "preempted"  # what ended the ranks, where it was not they

# Slurm sends SIGUSR2 so long before the time limit: a rank that is stuck leaves 8 s after it was asked to.
SIGNAL_DELAY_SECONDS = 30
_SLURM_IS_EARLY_SECONDS = 65.0  # "up to 60 seconds earlier than specified" (sbatch, --signal)
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 20.0  # between SIGTERM and SIGKILL
_HOLD_SECONDS = 600.0  # the longest grace time of a preemption that is waited for
_PORTS = range(20_000, 30_000)  # below those that Linux gives to clients


@dataclass(frozen=True)
class Place:
    """A node among those of a job.

    Attributes:
        job_id: of Slurm.
        node: from 0.
        nodes: how many there are.
        first_host: name or address of the first node.
    """

    job_id: str
    node: int
    nodes: int
    first_host: str


@dataclass
class NodeTask:
    """Runs torchrun on one node; submitit pickles it, calls it there, and asks it what to do at a preemption.

    Attributes:
        folder: of the run, on a file system that all nodes and the launcher share.
        command: program and arguments of each rank.
        nodes: of the job.
        ranks: on each node.
        environment: added to that of the job.
        time_limit_s: of the job.
        max_requeues: how often the job may begin again after a preemption.
        launcher: process id of the sweep, where it is on this machine and the job ends with it.
    """

    folder: str
    command: Sequence[str]
    nodes: int
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    time_limit_s: float = 3600.0
    max_requeues: int = 0
    launcher: int | None = None

    def __call__(self) -> None:
        from submitit import JobEnvironment

        job = JobEnvironment()
        place = Place(job.raw_job_id, job.node, self.nodes, _address(job.hostnames[0]))
        folder = Path(self.folder)
        self._start, self._place = time.monotonic(), place
        if place.node == 0 and set_aside(folder) > self.max_requeues:
            self._report(1, ended_by=PREEMPTED)
            return
        arguments = [*torchrun_arguments(place, self.ranks), *self.command]
        with (folder / log_name(place.node)).open("ab") as log:
            self._process = start_torchrun(
                arguments,
                folder=folder,
                node=place.node,
                log=log,
                environment={**os.environ, **self.environment},
                # Slurm sends it to all processes of the job; it is for this one.
                preexec_fn=partial(signal.signal, signal.Signals[f"SIG{job.USR_SIG}"], signal.SIG_IGN),
            )
        self._wait()
        code = self._process.returncode
        if code >= 128 and self.launcher is None:
            _hold(place.job_id)
        self._report(code, take_exit_codes(folder, place.node))

    def checkpoint(self) -> Any:
        """Ends the ranks before the job is re-queued, or at the end of its time.

        Called by submitit on the first node, where Slurm has sent the signal for it.

        Returns:
            What submitit is to run after the re-queue; None where the job is over.
        """
        from submitit.helpers import DelayedSubmission

        elapsed = time.monotonic() - self._start
        self._end_ranks()
        if elapsed > self.time_limit_s - SIGNAL_DELAY_SECONDS - _SLURM_IS_EARLY_SECONDS:
            self._report(1, ended_by=TIME_LIMIT)
        elif len(earlier_attempts(Path(self.folder))) >= self.max_requeues:
            self._report(1, ended_by=PREEMPTED)
        else:
            return DelayedSubmission(replace(self))
        return None

    def _wait(self) -> None:
        # Not `Popen.wait`: it holds a lock, which `checkpoint` would need in the midst of it.
        while self._process.poll() is None:
            time.sleep(_POLL_SECONDS)
            if self.launcher is not None and (not exists(self.launcher) or (Path(self.folder) / CANCEL_FILE).exists()):
                self._end_ranks()

    def _end_ranks(self) -> None:
        """Asks torchrun to end its ranks, and waits for that."""
        for ask, patience in ((self._process.terminate, _PATIENCE_SECONDS), (self._process.kill, 1.0)):
            if self._process.poll() is None:
                ask()
            deadline = time.monotonic() + patience
            while self._process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _report(self, code: int, exit_codes: Mapping[str, int] | None = None, ended_by: str | None = None) -> None:
        content = {
            "code": code,
            "exit_codes": exit_codes or {},
            "seconds": time.monotonic() - self._start,
            "ended_by": ended_by,
        }
        write_json(report_file(Path(self.folder), self._place.node), content)


def torchrun_arguments(place: Place, ranks: int) -> list[str]:
    """How torchrun on this node finds the others; `ranks` are on each."""
    endpoint = f"{place.first_host}:{port_of(place.job_id)}"
    return processes.torchrun_arguments(
        ranks, nodes=place.nodes, node=place.node, endpoint=endpoint, job_id=place.job_id
    )


def port_of(job_id: str) -> int:
    """The port of a job's rendezvous: the same on all its nodes, and another for each job that may share one."""
    return _PORTS[int(job_id) % len(_PORTS)]


def set_aside(folder: Path) -> int:
    """Moves what an attempt left that was preempted into a folder `attempt-N`.

    Args:
        folder: of the run.

    Returns:
        How many attempts there were.
    """
    if (folder / log_name(0)).exists():
        earlier = earlier_attempts(folder)
        aside = folder / f"attempt-{len(earlier)}"
        aside.mkdir()
        for path in folder.iterdir():
            if path.name not in ("job.json", SUBMISSION) and path != aside and path not in earlier:
                path.rename(aside / path.name)
    return len(earlier_attempts(folder))


def earlier_attempts(folder: Path) -> list[Path]:
    """What was set aside of a run, oldest first."""
    names = (folder / f"attempt-{number}" for number in itertools.count())
    return list(itertools.takewhile(Path.is_dir, names))


def report_file(folder: Path, node: int) -> Path:
    """Where a node tells how its ranks ended."""
    return folder / f".node{node}.json"


def _address(host: str) -> str:
    """The name of the first node, or its address where the name is one that only Slurm knows."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR", host)
    return host


def _hold(job_id: str) -> None:
    """Waits in the grace time of a preemption, after which Slurm re-queues a job, but not one that has ended by itself.

    Slurm sends SIGTERM at its beginning; but also after `scancel`, and before a re-queue without grace.
    """
    deadline = time.monotonic() + _HOLD_SECONDS
    with suppress(OSError, subprocess.SubprocessError):
        while time.monotonic() < deadline:
            command = ["scontrol", "show", "job", job_id]
            job = subprocess.run(command, capture_output=True, text=True, timeout=60.0).stdout
            if "JobState=RUNNING" not in job or " PreemptTime=None" in job:
                return
            time.sleep(2.0)
