"""A batch of a sweep's combinations: what of it is to run, in which order, and what came of each."""

import itertools
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from shardlab import launch as command_line
from shardlab.config import Mode, Order, parse
from shardlab.errors import ConfigError
from shardlab.launch import one_line
from shardlab.run_folder import RunFolder, Status
from shardlab.sweep.objectives import check_objectives, objectives
from shardlab.sweep.outcome import result_line, settle
from shardlab.sweep.records import Job, JobRecord, SweepRecord, claim, read_sweep, write_job, write_sweep
from shardlab.sweep.runner import Ended, Runner
from shardlab.sweep.stop import Stop, stop_on_signals
from shardlab.sweep.tasks import Task, arguments, compose, in_folder, program_of, renumbered
from shardlab.sweep.wandb_summary import group_of

# Ran to its end: not run again where a sweep is resumed. To run out of memory is a result too.
KEPT = (Status.completed.value, Status.oom.value)


def launch(
    runner: Runner,
    *,
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
) -> list[JobReturn]:
    """Runs a batch of combinations; what becomes of one stops no other.

    Args:
        runner: starts the processes.
        hydra_context: as Hydra gave it to the launcher.
        task_function: Hydra's main function.
        config: of the sweep.
        job_overrides: of each combination.
        first_number: of the first one.

    Returns:
        For each combination what `sweep.objectives` names; None for a job that did not complete, and where another
        node keeps the records.

    Raises:
        ConfigError: where the sweep cannot begin.
        KeyboardInterrupt: after a signal; all that was done is kept, and the report written.
    """
    setup_globals()
    check_objectives(config.sweep.objectives)
    tasks = compose(
        job_overrides,
        hydra_context=hydra_context,
        config=config,
        first_number=first_number,
        ranks=f"{runner.nnodes} x {runner.ranks_per_node}",
        environment=runner.env,
    )
    runner.check(tasks)
    with stop_on_signals() as stop:
        batch = _Batch(runner, tasks, program=program_of(task_function), config=config, stop=stop)
        batch.run()
    if stop.signal is not None:
        if runner.writes:
            from shardlab.sweep.report import finish  # what takes time to import comes where it is needed

            finish(batch.folder)
        command_line.end_with(128 + stop.signal)
        raise KeyboardInterrupt
    return [
        JobReturn(
            overrides=list(overrides),
            cfg=task.cfg,
            hydra_cfg=task.composed,
            working_dir=str(task.folder),
            task_name=config.hydra.job.name,
            status=JobStatus.COMPLETED,
            _return_value=objectives(batch.summaries[task.number], config.sweep.objectives) if runner.writes else None,
        )
        for overrides, task in zip(job_overrides, batch.tasks, strict=True)
    ]


@dataclass
class _Sweep:
    """What this process has done of a sweep: a sweeper such as Optuna launches one batch after another."""

    record: SweepRecord | None = None  # None where another node keeps it
    jobs: int = 0
    failed: bool = False  # whether one of them has
    refused: list[str] = field(default_factory=list)  # what was wrong with combinations that cannot be run


_sweeps: defaultdict[Path, _Sweep] = defaultdict(_Sweep)


class _Batch:
    """A batch in progress."""

    def __init__(self, runner: Runner, tasks: Sequence[Task], *, program: str, config: DictConfig, stop: Stop):
        self.runner = runner
        self.config = config
        self.settings = tasks[0].cfg.sweep
        self.program = program
        self.stop = stop
        self.folder = Path(config.hydra.sweep.dir).absolute()
        self.summaries: dict[int, Mapping[str, Any]] = {}  # of jobs that have ended, by their numbers
        self._sweep = _sweeps[self.folder]
        self._sweep.jobs += len(tasks)
        self._records: dict[int, JobRecord] = {}
        self._named: int | None = None  # the job whose name was the last line on the screen
        earlier = self._begin(tasks)
        same = set.intersection(*(set(task.overrides) for task in tasks)) if len(tasks) > 1 else set()
        self._swept = {t.overrides: [o for o in t.overrides if o not in same] or list(t.overrides) for t in tasks}
        self.tasks = self._numbered(tasks, earlier)
        if runner.writes:
            self._write_records(earlier)

    def run(self) -> None:
        """Runs what is not done yet."""
        tasks = [task for task in self.tasks if task.number not in self.summaries]
        kept = f", {len(self.tasks) - len(tasks)} of them done already" if len(tasks) < len(self.tasks) else ""
        count = f"{len(self.tasks)} job{'s' if len(self.tasks) != 1 else ''}"
        trains = any(task.cfg.mode is Mode.train for task in self.tasks)  # plans are for the ranks of their cluster
        ranks = f", {self.runner.world_size} ranks each" if trains else ""
        print(f"\n  {count}{kept}{ranks}, in {self.folder}\n", flush=True)
        for task in list(tasks):
            if problem := self._contradiction(task):
                tasks.remove(task)
                self._refuse(task, problem)
        planned = [task for task in tasks if task.cfg.mode is Mode.plan]
        trained = [task for task in tasks if task.cfg.mode is Mode.train]
        if planned and self.runner.writes:
            from shardlab.sweep import plans

            plans.plan_tasks(planned, stop=self.stop, started=self._begun, ended=self._ended)
        if self.settings.skip_predicted_oom or self.settings.order is Order.predicted:
            trained = self._by_prediction(trained)
        self.runner.run(
            trained,
            command=self._command,
            environment={"WANDB_RUN_GROUP": group_of(self.folder)},
            started=self._started,
            ended=self._processes_ended,
            stop=self.stop,
        )
        self._update(ended=time.time(), interrupted=self.stop.signal is not None)

    # ---- before

    def _begin(self, tasks: Sequence[Task]) -> list[Job]:
        """Returns the jobs that the folder holds already."""
        if not self.runner.writes:
            return []
        if self._sweep.record is None:
            claim(self.folder)
            holds_one = (self.folder / "sweep.json").exists()
            resume = self.settings.resume
            if holds_one and resume is None:
                raise ConfigError(
                    f"hydra.sweep.dir={self.folder} already holds a sweep: go on with it by "
                    f"sweep.resume={self.folder}, or name another folder"
                )
            if resume is not None and not holds_one:
                raise ConfigError(f"sweep.resume={resume} holds no sweep: name the folder that a sweep wrote")
            self._sweep.record = SweepRecord(
                command=shlex.join(["python", *sys.argv]),
                began=time.time(),
                machine=_machine(self.runner),
                torch=torch.__version__,
                mode=tasks[0].cfg.mode.value,
                jobs=[],
            )
            if not holds_one:
                return []
        return read_sweep(self.folder)[1]

    def _numbered(self, tasks: Sequence[Task], earlier: Sequence[Job]) -> list[Task]:
        """Gives tasks that were there before their folders, and others such as are free."""
        by_digest = {job.record.digest: job for job in earlier}
        taken = {job.folder for job in earlier}
        free = max((job.record.number for job in earlier), default=-1) + 1
        numbered = []
        for task in tasks:
            before = by_digest.get(task.digest)
            if before is not None:
                task = replace(task, number=before.record.number, folder=before.folder)
                if before.status in KEPT:
                    self.summaries[task.number] = before.summary
                    self._records[task.number] = before.record
                else:
                    _set_aside(task.folder, self.folder)
            elif task.folder in taken:
                task, free = renumbered(task, free), free + 1
            numbered.append(task)
        return numbered

    def _write_records(self, earlier: Sequence[Job]) -> None:
        for task in self.tasks:
            if task.number in self._records:
                continue
            task.folder.mkdir(parents=True, exist_ok=True)
            by_hand = arguments(task, self.config)
            planned = task.cfg.mode is Mode.plan
            command = ["python", self.program, *by_hand] if planned else self.runner.by_hand(self.program, by_hand)
            self._records[task.number] = JobRecord(
                number=task.number,
                overrides=list(task.overrides),
                digest=task.digest,
                world_size=self.runner.world_size,
                command=command,
            )
            write_job(task.folder, self._records[task.number])
        now = {task.overrides for task in self.tasks}
        others = [job.folder for job in earlier if tuple(job.record.overrides) not in now]
        folders = dict.fromkeys([*others, *(task.folder for task in self.tasks)])
        self._update(jobs=[str(folder.relative_to(self.folder)) for folder in folders])

    def _update(self, **changed: Any) -> None:
        """Writes down what is new of the sweep, where this node keeps its records."""
        if self._sweep.record is not None:
            self._sweep.record = replace(self._sweep.record, **changed)
            write_sweep(self.folder, self._sweep.record)

    def _contradiction(self, task: Task) -> str | None:
        """Why a combination cannot be run at all; a plan finds that by itself."""
        if task.cfg.mode is Mode.plan:
            return None
        try:
            parse(task.cfg, world_size=self.runner.world_size, nodes=self.runner.nnodes)
        except (ConfigError, OmegaConfBaseException) as mistake:
            return one_line(mistake)
        return None

    def _by_prediction(self, tasks: Sequence[Task]) -> list[Task]:
        """Plans all; leaves out what cannot fit, or begins with what takes least, as `sweep` says."""
        from shardlab.sweep import plans

        predicted = plans.predict(tasks, world_size=self.runner.world_size, nodes=self.runner.nnodes, stop=self.stop)
        left = []
        for task in tasks:
            prediction = predicted.get(task.number)
            if self.settings.skip_predicted_oom and prediction is not None and prediction.fits is False:
                self._skip(task, plans.does_not_fit(prediction), prediction)
            else:
                left.append(task)
        if self.settings.order is Order.predicted:  # those without a prediction come last
            needed = {number: prediction.needed_bytes for number, prediction in predicted.items()}
            left.sort(key=lambda task: needed.get(task.number, sys.maxsize))
        return left

    # ---- each job

    def _command(self, task: Task) -> list[str]:
        return [self.program, *arguments(task, self.config), in_folder(task.folder)]

    def _started(self, task: Task) -> None:
        self._begun(task)
        self._name(task)

    def _begun(self, task: Task) -> None:
        task.folder.mkdir(parents=True, exist_ok=True)
        if self.runner.writes:
            record = self._records[task.number] = replace(self._records[task.number], began=time.time())
            write_job(task.folder, record)

    def _processes_ended(self, task: Task, ended: Ended) -> None:
        if not self.runner.writes:  # the node that does knows what became of the job
            self._show(task, f"its ranks on this node have ended (exit code {ended.code}), {ended.seconds:.1f} s")
            return
        summary = settle(task.folder, ended, timeout_s=self.runner.timeout_s, interrupted=self.stop.signal is not None)
        self._ended(task, summary, ended.seconds)

    def _ended(self, task: Task, summary: Mapping[str, Any], seconds: float) -> None:
        record = self._records[task.number] = replace(self._records[task.number], seconds=seconds)
        write_job(task.folder, record)
        if summary["status"] == Status.skipped.value and summary["error"]:
            self._sweep.refused.append(summary["error"])
        self._tell(task, summary, seconds)

    def _refuse(self, task: Task, reason: str) -> None:
        self._sweep.refused.append(reason)
        self._skip(task, reason)

    def _skip(self, task: Task, reason: str, prediction: Any = None) -> None:
        summary: dict[str, Any] = {
            "status": Status.skipped.value,
            "error": reason,
            "world_size": self.runner.world_size,
        }
        if prediction is not None:
            summary["plan"] = prediction.to_summary()
        if self.runner.writes:
            RunFolder(task.folder).write_summary(summary)
        self._tell(task, summary, None)

    def _tell(self, task: Task, summary: Mapping[str, Any], seconds: float | None) -> None:
        self.summaries[task.number] = summary
        self._sweep.failed |= summary["status"] == Status.failed.value
        self._show(task, result_line(summary, seconds))

    def _show(self, task: Task, ending: str) -> None:
        """Shows what became of a job, below its name where that was shown at its start; of a plan all in one line."""
        if task.cfg.mode is Mode.plan:
            print(f"{self._label(task)}  {ending}", flush=True)
            return
        if task.number != self._named:
            self._name(task)
        self._named = None
        print(f"       {ending}", flush=True)

    def _name(self, task: Task) -> None:
        self._named = task.number
        print(self._label(task), flush=True)

    def _label(self, task: Task) -> str:
        return f"  {task.number:>3}  {' '.join(self._swept[task.overrides])}"


def _set_aside(folder: Path, sweep: Path) -> None:
    """Moves what a job left that is to run again out of the way."""
    for number in itertools.count():
        aside = sweep / "superseded" / f"{folder.name}-{number}"
        if not aside.exists():
            aside.parent.mkdir(exist_ok=True)
            folder.rename(aside)
            return


def _machine(runner: Runner) -> str:
    """What the jobs run on. Reading a device's name makes no CUDA context."""
    name = torch.cuda.get_device_name(0) if torch.cuda.device_count() else "CPU"
    return f"{runner.world_size} x {name}"


def tell_command_line(folder: Path) -> None:
    """Lets the exit code say what came of the sweep: 1 where a job failed, 2 where no combination can be run at all."""
    sweep = _sweeps[folder.absolute()]
    if sweep.failed:
        command_line.end_with(1)
    elif sweep.refused and len(sweep.refused) == sweep.jobs:
        command_line.end_with(2, sweep.refused[0])
