"""Runs the jobs of a sweep as jobs of Slurm, each a torchrun on each of its nodes, through submitit."""

import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardlab.errors import ConfigError
from shardlab.run_folder import Status
from shardlab.sweep.processes import log_name
from shardlab.sweep.runner import CPU_RANKS, Ended, check_least, check_nproc
from shardlab.sweep.slurm_node import (
    CANCEL_FILE,
    PREEMPTED,
    SIGNAL_DELAY_SECONDS,
    SUBMISSION,
    TIME_LIMIT,
    NodeTask,
    earlier_attempts,
    report_file,
)
from shardlab.sweep.slurm_states import LOST, OVER, Watch, ask
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task

LOCAL = "local"  # submitit's own processes on this machine, in the place of Slurm
_POLL_SECONDS = 0.5
_SETTLE_SECONDS = 15.0  # until a job that is over, by Slurm, is: its files may come later, or its re-queue
_CANCEL_SECONDS = 90.0  # until a job that was cancelled is left to Slurm

_TRY_AGAIN = {"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"}  # through no fault of the job, where Slurm did not re-queue it
_OF_A_JOB = re.compile(r"(SLURM|SUBMITIT)_(?!CONF$)")  # SLURM_CONF says where Slurm is


@dataclass(frozen=True)
class Slurm:
    """The settings of `hydra/launcher=slurm`, checked.

    Raises:
        ConfigError: for settings out of range, and where submitit is not installed.
    """

    cluster: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int = 1
    gpus_per_node: int | None = None
    nproc_per_node: int | str = "auto"
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    timeout_min: int = 60
    constraint: str | None = None
    setup: Sequence[str] = ()
    additional_parameters: Mapping[str, Any] = field(default_factory=dict)
    array_parallelism: int = 64
    max_requeues: int = 3
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"nodes": 1, "gpus_per_node": 0, "cpus_per_task": 1, "timeout_min": 1}
        check_least(self, {**least, "array_parallelism": 1, "max_requeues": 0})
        check_nproc(self.nproc_per_node, auto=f"gpus_per_node, {CPU_RANKS} without it")
        if self.cluster not in (None, LOCAL):
            raise ConfigError(f"hydra.launcher.cluster={self.cluster} must be null for Slurm, or {LOCAL}")
        if self.cluster == LOCAL and self.nodes > 1:
            raise ConfigError(f"hydra.launcher.nodes={self.nodes} must be 1 where hydra.launcher.cluster={LOCAL}")
        try:
            import submitit  # noqa: F401
        except ImportError:
            raise ConfigError("hydra/launcher=slurm needs submitit: pip install 'shardlab[slurm]'") from None

    @property
    def nnodes(self) -> int:
        return self.nodes

    @property
    def ranks_per_node(self) -> int:
        if isinstance(self.nproc_per_node, int):
            return self.nproc_per_node
        return self.gpus_per_node or CPU_RANKS

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * self.nodes

    @property
    def writes(self) -> bool:
        return True

    @property
    def timeout_s(self) -> float:
        return 60.0 * self.timeout_min

    def by_hand(self, program: str, arguments: Sequence[str]) -> list[str]:
        """Within an allocation, where the job has several nodes."""
        torchrun = ["torchrun", "--nproc-per-node", str(self.ranks_per_node)]
        if self.nodes > 1:
            on_each = ["srun", "--nodes", str(self.nodes), "--ntasks-per-node", "1"]
            meet = ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_NODE:29500"]
            torchrun = [*on_each, *torchrun, *meet]
        return [*torchrun, program, *arguments]

    def check(self, tasks: Sequence[Task]) -> None:
        """Nothing here depends on them."""

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
        """Runs each task to its end, at most `array_parallelism` in Slurm's queue at a time; what is stopped there is
        cancelled, whether it runs or waits."""
        limit = 1 if self.cluster == LOCAL else self.array_parallelism  # this machine's devices are there once
        waiting = list(tasks)
        jobs: list[_Job] = []
        watch = Watch()
        try:
            while jobs or (waiting and stop.signal is None):
                while waiting and stop.signal is None and len(jobs) < limit:
                    try:
                        jobs.append(_Job(self, waiting[0], self._node_task(waiting[0], command, environment)))
                    except ConfigError:
                        if not jobs:
                            raise
                        limit = len(jobs)  # as many as Slurm lets the user have
                        break
                    del waiting[0]
                time.sleep(_POLL_SECONDS)
                if self.cluster != LOCAL:
                    watch.look([job.id for job in jobs])
                for job in list(jobs):
                    if stop.signal is not None:
                        job.cancel(at_once=stop.at_once)
                    over = job.is_over(watch)
                    if job.takes_notice_of_start(over):
                        started(job.task)
                    if over:
                        jobs.remove(job)
                        if job.began:
                            ended(job.task, job.result())
        finally:
            for job in jobs:  # left only by an error
                job.cancel(at_once=True)

    def _node_task(
        self, task: Task, command: Callable[[Task], Sequence[str]], environment: Mapping[str, str]
    ) -> NodeTask:
        return NodeTask(
            str(task.folder),
            list(command(task)),
            nodes=self.nodes,
            ranks=self.ranks_per_node,
            environment={**environment, **self.env},
            time_limit_s=self.timeout_s,
            max_requeues=self.max_requeues,
            launcher=os.getpid() if self.cluster == LOCAL else None,
        )

    def submit(self, node_task: NodeTask) -> Any:
        """Gives a job to Slurm, or starts it on this machine. Returns submitit's job.

        Raises:
            ConfigError: where Slurm does not take it.
        """
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        folder = Path(node_task.folder)
        requeue = "requeue" if self.max_requeues else "no-requeue"
        settings = {
            "name": f"shardlab-{folder.name}",
            "nodes": self.nodes,
            "tasks_per_node": 1,
            "gpus_per_node": self.gpus_per_node,
            "cpus_per_task": self.cpus_per_task,
            "mem_gb": self.mem_gb,
            "timeout_min": self.timeout_min,
            "local_setup": list(self.setup) or None,
            "slurm_setup": list(self.setup) or None,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_qos": self.qos,
            "slurm_constraint": self.constraint,
            "slurm_signal_delay_s": SIGNAL_DELAY_SECONDS,
            "slurm_srun_args": [f"--wait={SIGNAL_DELAY_SECONDS}"],  # for the other nodes, once one has ended
            "slurm_additional_parameters": {requeue: True, **self.additional_parameters},
        }
        try:
            with _outside_of_jobs(), redirect_stderr(io.StringIO()):  # to which submitit prints what it raises, too
                executor = submitit.AutoExecutor(
                    folder / SUBMISSION, cluster=self.cluster or "slurm", slurm_max_num_timeout=self.max_requeues
                )
                executor.update_parameters(**settings)
                return executor.submit(node_task)
        except (FailedJobError, FailedSubmissionError) as refused:
            raise ConfigError(
                f"hydra/launcher=slurm: {_last_line(str(refused))}; hydra.launcher.cluster={LOCAL} runs the jobs on "
                "this machine"
            ) from None
        except RuntimeError:  # submitit has not found `srun`
            raise ConfigError(
                "hydra/launcher=slurm finds no Slurm here (no srun): run it where jobs are submitted from; "
                f"hydra.launcher.cluster={LOCAL} runs them on this machine"
            ) from None


class _Job:
    """A job in the queue, or running."""

    def __init__(self, slurm: Slurm, task: Task, node_task: NodeTask):
        self.task = task
        self.began = False
        self._slurm = slurm
        self._node_task = node_task
        self._folder = task.folder
        self._submission = 1
        self._cancelled: float | None = None
        self._over_since: float | None = None
        self._state: str | None = None  # in which it is over
        (self._folder / CANCEL_FILE).unlink(missing_ok=True)
        self._submitted, self._submitted_at = slurm.submit(node_task), time.monotonic()

    @property
    def id(self) -> str:
        return self._submitted.job_id

    @property
    def age(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self._submitted_at

    def takes_notice_of_start(self, over: bool) -> bool:
        """Whether it has begun to run, told once; or has ended without, but for one that was cancelled."""
        told = self.began
        self.began |= (self._folder / log_name(0)).exists() or (over and self._cancelled is None)
        return self.began and not told

    def cancel(self, *, at_once: bool) -> None:
        """Asks it to end."""
        if self._cancelled is None:
            self._cancelled = time.monotonic()
            if self._slurm.cluster == LOCAL:
                (self._folder / CANCEL_FILE).touch()
            else:
                ask(["scancel", self.id])
        elif at_once:
            self._cancelled = float("-inf")

    def is_over(self, watch: Watch) -> bool:
        """Whether nothing of it runs, and nothing will."""
        now = time.monotonic()
        if self._cancelled is not None and now - self._cancelled > _CANCEL_SECONDS:
            self._submitted.cancel(check=False)
            return True
        if self._slurm.cluster == LOCAL:
            return self._submitted.done()
        state = watch.state_of(self.id, self.age)
        self._state = state if state in OVER else None
        codes = [report["code"] for report in self._reports()]
        complete, by_signal = len(codes) == self._slurm.nodes, max(codes, default=0) >= 128
        if complete and not by_signal:
            return True
        if by_signal or self._state:  # else what follows is none of the user's time
            watch.hurry()
        if self._state is None:
            self._over_since = None
            return False
        self._over_since = self._over_since or now
        if self._cancelled is not None and (complete or not self.began):
            return True
        if now - self._over_since < _SETTLE_SECONDS:
            return False
        if self._state in _TRY_AGAIN and self._cancelled is None and self._submission <= self._slurm.max_requeues:
            with suppress(ConfigError):  # Slurm refuses it now
                self._submit_again()
                return False
        return True

    def _submit_again(self) -> None:
        self._submitted, self._submitted_at = self._slurm.submit(self._node_task), time.monotonic()
        self._submission += 1
        self._over_since = None

    def result(self) -> Ended:
        reports = self._reports()
        ended = Ended(
            code=next((report["code"] for report in reports if report["code"]), 0 if reports else 1),
            seconds=max((report["seconds"] for report in reports), default=0.0),
            exit_codes={int(rank): code for report in reports for rank, code in report["exit_codes"].items()},
            said=None if self._cancelled is not None else self._verdict(reports),
        )
        for node in range(self._slurm.nodes):
            report_file(self._folder, node).unlink(missing_ok=True)
        (self._folder / CANCEL_FILE).unlink(missing_ok=True)
        return ended

    def _verdict(self, reports: Sequence[Mapping[str, Any]]) -> tuple[Status, str] | None:
        """What only Slurm can say of the end; None where the ranks' own words count."""
        reasons = {report["ended_by"] for report in reports}
        limit = f"hydra.launcher.timeout_min={self._slurm.timeout_min}"
        if self._state == "TIMEOUT" or TIME_LIMIT in reasons:
            return Status.failed, f"not finished within its time limit, {limit}"
        if not reports and self._slurm.cluster == LOCAL and self.age > self._slurm.timeout_s:
            return Status.failed, f"not finished within its time limit, {limit}"
        if PREEMPTED in reasons:
            attempts = len(earlier_attempts(self._folder))
            return Status.killed, (
                f"job {self.id} was preempted {attempts} times and not re-queued again, since "
                f"hydra.launcher.max_requeues={self._slurm.max_requeues}"
            )
        if reports and all(report["code"] < 128 for report in reports):
            return None
        if self._state == LOST:
            return Status.failed, f"Slurm no longer knows job {self.id}, which left no result"
        if self._state in ("CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"):
            return Status.killed, f"Slurm ended job {self.id}: {self._state}"
        if not reports:
            log = self._submitted.task(0).paths.stderr
            return Status.failed, f"job {self.id} ended before its ranks began ({self._state}): see {log}"
        return None

    def _reports(self) -> list[dict[str, Any]]:
        """What the nodes have told so far."""
        files = (report_file(self._folder, node) for node in range(self._slurm.nodes))
        found = []
        for file in files:
            with suppress(FileNotFoundError):
                found.append(json.loads(file.read_text()))
        return found


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hides what Slurm tells a job, where the sweep itself runs in one: the jobs it submits would inherit it."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if _OF_A_JOB.match(name)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["Slurm has refused the job"])[-1]
