"""Runs the jobs of a sweep on this machine, each in a torchrun of its own."""

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardlab.distributed import environment_of_no_rank
from shardlab.errors import ConfigError
from shardlab.sweep.processes import MARK, log_name, mark_of, start_torchrun, take_exit_codes, torchrun_arguments
from shardlab.sweep.runner import CPU_RANKS, Ended, check_least, check_nproc
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task

_ENDPOINT = re.compile(r"(.+):([1-9]\d*)")  # host:port
_LAST_PORT = 65_535
_POLL_SECONDS = 0.05
# A rank that is stuck leaves 8 s after it was asked to; torchrun itself sends SIGKILL after 30 s.
_PATIENCE_SECONDS = 45.0


@dataclass(frozen=True)
class Torchrun:
    """The settings of `hydra/launcher=torchrun`, checked.

    Raises:
        ConfigError: for settings out of range.
    """

    nproc_per_node: int | str = "auto"
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    timeout_s: float | None = None
    parallel_jobs: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_least(self, {"nnodes": 1, "node_rank": 0, "max_restarts": 0, "parallel_jobs": 1})
        check_nproc(self.nproc_per_node, auto=f"one for each GPU, {CPU_RANKS} where there are none")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ConfigError(f"hydra.launcher.timeout_s={self.timeout_s} must be positive, or null for no limit")
        if self.nnodes > 1 and not _ENDPOINT.fullmatch(self.rdzv_endpoint or ""):
            raise ConfigError(
                f"hydra.launcher.rdzv_endpoint={self.rdzv_endpoint} must be host:port of the first node where "
                f"hydra.launcher.nnodes={self.nnodes}: start the same sweep on each node, with its own "
                "hydra.launcher.node_rank"
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"hydra.launcher.node_rank={self.node_rank} must be below hydra.launcher.nnodes={self.nnodes}"
            )
        if self.parallel_jobs > 1 and self._gpus and self.ranks_per_node * self.parallel_jobs > len(self._gpus):
            raise ConfigError(
                f"hydra.launcher.parallel_jobs={self.parallel_jobs} x hydra.launcher.nproc_per_node="
                f"{self.ranks_per_node} need more than the {len(self._gpus)} GPUs of this machine"
            )

    @property
    def _gpus(self) -> list[str]:
        """As CUDA_VISIBLE_DEVICES names them. Counting them makes no CUDA context."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return names[: torch.cuda.device_count()]

    @property
    def ranks_per_node(self) -> int:
        if isinstance(self.nproc_per_node, int):
            return self.nproc_per_node
        return max(1, len(self._gpus) // self.parallel_jobs) if self._gpus else CPU_RANKS

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * self.nnodes

    @property
    def writes(self) -> bool:
        return self.node_rank == 0

    def by_hand(self, program: str, arguments: Sequence[str]) -> list[str]:
        return ["torchrun", *self._torchrun_arguments(None), program, *arguments]

    def check(self, tasks: Sequence[Task]) -> None:
        if self.nnodes == 1:
            return
        resume, sweeper = tasks[0].cfg.sweep.resume, tasks[0].composed.hydra.runtime.choices["hydra/sweeper"]
        with_nodes = f"hydra.launcher.nnodes={self.nnodes}: only node 0 has results"
        if resume is not None:
            raise ConfigError(
                f"sweep.resume={resume} cannot be used with {with_nodes}; start a new sweep of what is left to do"
            )
        if sweeper != "basic":
            raise ConfigError(f"hydra/sweeper={sweeper} cannot be used with {with_nodes}; use hydra/sweeper=basic")
        if self._endpoint(tasks[-1].number)[1] > _LAST_PORT:
            raise ConfigError(
                f"hydra.launcher.rdzv_endpoint={self.rdzv_endpoint} leaves no port to the last of {len(tasks)} jobs, "
                f"each of which takes the next one: the port must be at most {_LAST_PORT - tasks[-1].number}"
            )

    def run(
        self,
        tasks: Sequence[Task],
        *,
        command: Callable[[Task], Sequence[str]],
        environment: Mapping[str, str],
        started: Callable[[Task], None],
        ended: Callable[[Task, Ended], None],
        stop: Stop,
    ) -> None:
        """Runs each task to its end, `parallel_jobs` at a time; what runs is sent the signal that stops the sweep."""
        waiting, slots = list(tasks), self._slots()
        running: dict[int, _Running] = {}  # by slot
        while running or (waiting and stop.signal is None):
            for slot, own in enumerate(slots):
                if slot not in running and waiting and stop.signal is None:
                    task = waiting.pop(0)
                    started(task)
                    arguments = [*self._torchrun_arguments(task), *command(task)]
                    running[slot] = _Running(task, self.node_rank, arguments, {**environment, **self.env, **own})
            time.sleep(_POLL_SECONDS)
            for slot, job in list(running.items()):
                if job.is_over(self.timeout_s, stop):
                    del running[slot]
                    ended(job.task, job.result())

    def _slots(self) -> list[dict[str, str]]:
        """What the environment of jobs that run side by side adds; on CPUs they would only share the cores."""
        gpus, each = self._gpus, self.ranks_per_node
        if not gpus or self.parallel_jobs == 1:
            return [{}]
        starts = range(0, each * self.parallel_jobs, each)
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[start : start + each])} for start in starts]

    def _endpoint(self, number: int) -> tuple[str, int]:
        """Host and port where the nodes of a job meet: a port for each job, and the same on all nodes."""
        found = _ENDPOINT.fullmatch(self.rdzv_endpoint or "")
        assert found is not None
        return found[1], int(found[2]) + number

    def _torchrun_arguments(self, task: Task | None) -> list[str]:
        number = task.number if task else 0
        endpoint = "{}:{}".format(*self._endpoint(number)) if self.nnodes > 1 else ""
        arguments = torchrun_arguments(
            self.ranks_per_node, nodes=self.nnodes, node=self.node_rank, endpoint=endpoint, job_id=str(number)
        )
        if task is None and self.nnodes == 1:
            arguments.remove("--standalone")  # by hand nothing else is in its way
        if self.max_restarts:
            arguments += ["--max-restarts", str(self.max_restarts)]
        return arguments


class _Running:
    """A job whose processes run on this node. Others may share its folder."""

    def __init__(self, task: Task, node: int, arguments: Sequence[str], environment: dict[str, str]):
        self.task = task
        self._node = node
        take_exit_codes(task.folder, node)  # those of an earlier start
        self._start = time.monotonic()
        self._asked: float | None = None  # when it was asked to end
        self._timed_out = False
        with (task.folder / log_name(node)).open("wb") as log:
            self._process = start_torchrun(
                arguments,
                folder=task.folder,
                node=node,
                log=log,
                environment=environment_of_no_rank() | environment,
                start_new_session=True,  # a terminal's Ctrl-C does not reach it: it would be told twice
            )

    def is_over(self, timeout_s: float | None, stop: Stop) -> bool:
        """Whether all has ended; sees to it where it should."""
        if self._process.poll() is not None:
            return True
        now = time.monotonic()
        if self._asked is not None:
            if stop.at_once or now - self._asked > _PATIENCE_SECONDS:
                self._kill()
        elif stop.signal is not None:
            self._ask(stop.signal)
        elif timeout_s is not None and now - self._start > timeout_s:
            self._timed_out = True
            self._ask(signal.SIGTERM)
        return False

    def result(self) -> Ended:
        seconds = time.monotonic() - self._start
        self._kill()  # what torchrun may have left behind
        assert self._process.stdin is not None
        self._process.stdin.close()
        codes = take_exit_codes(self.task.folder, self._node)
        return Ended(self._process.wait(), seconds, {int(rank): code for rank, code in codes.items()}, self._timed_out)

    def _ask(self, signum: int) -> None:
        self._asked = time.monotonic()
        self._process.send_signal(signum)

    def _kill(self) -> None:
        """Ranks have sessions of their own: only the environment tells whose they are."""
        if self._process.poll() is None:
            self._process.kill()
        mark = f"{MARK}={mark_of(self.task.folder, self._node)}".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # gone meanwhile, or another user's
                if mark in file.read_bytes().split(b"\0"):
                    os.kill(int(file.parent.name), signal.SIGKILL)
