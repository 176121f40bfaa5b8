"""One job on one rank, from a parsed config to a summary; and what is said of it however it ends."""

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch

from shardlab.build import build
from shardlab.config import Config, check_offload, to_dict
from shardlab.device import Cuda, Device, choose_device
from shardlab.display import closing_rows, header, planned_row
from shardlab.distributed import Ranks, from_first_rank, over_ranks, process_group
from shardlab.errors import ConfigError, Interrupted, RunEnded, TrainingError, describe
from shardlab.interrupt import Interrupt, exists, watch_signals
from shardlab.planner.ahead import Ahead, NoPlan
from shardlab.run_folder import RunFolder, Status
from shardlab.sharding import degenerate_mesh, make_mesh
from shardlab.telemetry import Ledger
from shardlab.telemetry.prediction import Prediction
from shardlab.telemetry.timeline import write_timeline
from shardlab.tracking import Tracker, make_tracker
from shardlab.trainer import Datasets, Trainer, largest_over_ranks

log = logging.getLogger(__name__)


def train(config: Config, *, place: Ranks, folder: RunFolder, choices: Mapping[str, str]) -> dict[str, Any]:
    """Trains as configured.

    Args:
        config: as `config.parse` returned it.
        place: this rank among the others.
        folder: of the run; rank 0's counts.
        choices: the name of the choice for each config group, for the display and for tags.

    Returns:
        The summary, as in `summary.json`.

    Raises:
        ConfigError: for a mistake in the config that shows before the run has a folder.
        RunEnded: where the run did not complete; all has been said and written.
    """
    device = choose_device(config.device, local_rank=place.local_rank, local_world_size=place.local_world_size)
    check_offload(config, on_cpu=not isinstance(device, Cuda))
    torch.manual_seed(config.seed + place.rank)  # dropout and the like; initial weights have seeds of their own
    torch.set_float32_matmul_precision(config.precision.float32_matmul.value)
    with process_group(place, device):
        if place.restarts and place.is_first:
            folder.clear()  # of the attempt that failed
        folder = RunFolder(from_first_rank(folder.path))
        folder.check_unused()
        job = _Job(config, place=place, folder=folder, choices=choices)
        with watch_signals(job.end_from_outside) as job.interrupt:
            try:
                return job.run(device)
            except TrainingError as error:  # on all ranks alike, so they leave together
                ended = job.end(Status.failed, str(error))
            except BaseException as error:
                raise job.fail(error) from error
    raise ended


class _Job:
    """A run in progress: what is known of it when it ends, in whatever way."""

    def __init__(self, config: Config, *, place: Ranks, folder: RunFolder, choices: Mapping[str, str]):
        self.config = config
        self.place = place
        self.folder = folder
        self.choices = choices
        self.interrupt = Interrupt()
        self.tracker: Tracker | None = None
        self.trainer: Trainer | None = None
        self.prediction: Prediction | None = None
        self._processes: list[int] = []  # of all ranks
        self._speaks = place.is_first
        self._ended = False
        self._ending = threading.Lock()

    def run(self, device: Device) -> dict[str, Any]:
        config, place, folder = self.config, self.place, self.folder
        self._processes = over_ranks(os.getpid())  # all have looked into the folder now
        if place.is_first:
            folder.write_config(config)
            folder.write_summary({"status": Status.running.value, "world_size": place.world_size})
        else:
            folder.log_here(place.rank)
        ahead = None
        if config.plan.before_train and place.is_first:
            on_cpu = not isinstance(device, Cuda)
            ahead = Ahead(config, place=place, on_cpu=on_cpu, file=folder.path / "plan.json")
        with ahead or nullcontext():  # so that whatever happens, no plan outlives the run
            return self._train(device, ahead)

    def _train(self, device: Device, ahead: Ahead | None) -> dict[str, Any]:
        config, place = self.config, self.place
        mesh = make_mesh(config.sharding, device_type=device.torch_device.type, world_size=place.world_size)
        datasets = Datasets(config)
        ledger = Ledger(device.torch_device)
        with ledger:
            built = build(config, device=device.torch_device, mesh=mesh)
        datasets.check_model(built.model)
        self.tracker = make_tracker(
            config.tracking, self.folder.path, config=to_dict(config), tags=self._tags(), rank=place.rank
        )
        degenerate = degenerate_mesh(config.sharding, place.world_size) if place.world_size > 1 else None
        notices = [degenerate] if degenerate else []
        self.tracker.start(
            header(config, built, datasets, device=device, mesh=mesh, choices=self.choices, notices=notices),
            late_rows=lambda: self._planned_rows(ahead),
        )
        self.trainer = Trainer(
            config,
            built=built,
            ledger=ledger,
            datasets=datasets,
            device=device,
            place=place,
            tracker=self.tracker,
            interrupt=self.interrupt,
            prediction=self.prediction,
        )
        self.trainer.fit()
        if config.plan.timeline is not False and place.is_first:
            ledger.close()  # of a run that is shorter than the window
            write_timeline(self.folder.timeline_file, ledger, title=f"Measured: {' '.join(self._tags())}")
        memory = largest_over_ranks(self.trainer.memory.summary())
        figures = {**self.trainer.figures(), "memory": memory, "plan": self._plan(memory)}
        self.end(Status.completed, None, figures)
        return {"status": Status.completed.value, **figures}

    def _planned_rows(self, ahead: Ahead | None) -> list[tuple[str, str]]:
        """Waits for the plan ahead of the run. Returns what the header says of it."""
        if ahead is None or self.tracker is None:
            return []
        try:
            self.prediction = ahead.result(self.interrupt.check)
        except NoPlan as reason:
            self.tracker.notice(f"no plan ahead of the run: {reason} (plan.before_train=false leaves it out)")
            return []
        if self.prediction.fits is False:
            self.tracker.notice("the plan says that this run does not fit: it may run out of memory")
        return [planned_row(self.prediction)]

    def fail(self, error: BaseException) -> RunEnded:
        """Writes and tells why this rank cannot go on."""
        if isinstance(error, ConfigError):
            return self._refuse(error)
        try:
            note = self._reason(error)
        except OSError as problem:  # the disk is full, or the folder is not shared by all machines
            note = self._note(Status.failed, f"{describe(error)}; nor can the run folder be used: {problem}")
            if not self.place.is_first:  # nobody else will know
                _say(note["error"])
        figures = {"memory": note["memory"]} if note["memory"] else {}
        return self.end(Status(note["status"]), note["error"], figures, has_traceback=True)

    def end_from_outside(self) -> int:
        """Ends the run from another thread, where the main one is stuck. Returns the process's exit code."""
        if self._ended:  # the main thread is telling it, and waits for W&B perhaps
            with self._ending:
                return self.interrupt.exit_code
        return self.fail(Interrupted()).exit_code

    def end(
        self,
        status: Status,
        error: str | None,
        figures: Mapping[str, Any] | None = None,
        *,
        has_traceback: bool = False,
        exit_code: int | None = None,
    ) -> RunEnded:
        """Writes the summary and says what came of the run: once, and on rank 0 alone, unless that was killed.

        Args:
            status: of the run.
            error: one line.
            figures: what the summary says otherwise than this rank measured.
            has_traceback: whether `train.log` shows where the error was.
            exit_code: None = what goes with the status.
        """
        if exit_code is None:
            exit_code = {Status.completed: 0, Status.interrupted: self.interrupt.exit_code}.get(status, 1)
        with self._ending:  # a second thread waits until the first one is through, since it ends the process
            if self._speaks and not self._ended:
                self._ended = True
                summary = {"status": status.value, "error": error, "world_size": self.place.world_size}
                self._tell({**summary, **self._figures(), **(figures or {})}, has_traceback and error is not None)
        return RunEnded(status.value, exit_code)

    def _tell(self, summary: Mapping[str, Any], has_traceback: bool) -> None:
        try:
            self.folder.write_summary(summary)
        except OSError as problem:
            log.error("summary.json could not be written: %s", problem)
        where = str(self.folder.log_file)
        if self.tracker is not None:
            rows = [("traceback", where)] if has_traceback else []
            self.tracker.finish(summary, table=rows + closing_rows(summary))
        if summary["error"] and (self.tracker is None or self.tracker.console is None):
            _say(summary["error"] + (f"; traceback in {where}" if has_traceback else ""))

    def _refuse(self, error: ConfigError) -> RunEnded:
        """Ends for a mistake that all ranks find, as a rule; where it is not so, rank 0 finds the note of it."""
        with suppress(OSError):
            self._reason(error)
        if self.place.is_first or self.interrupt.signal is None:
            return self.end(Status.failed, describe(error), exit_code=2)
        return RunEnded(Status.failed.value, self.interrupt.exit_code)  # rank 0 has told it, torchrun ends this one

    def _reason(self, error: BaseException) -> dict[str, Any]:
        """What a rank noted first; else what has happened to this one, which it notes now."""
        lost = _lost_a_rank(error)
        note = self.folder.first_error()
        if note is None and lost:
            time.sleep(1.0)  # a rank notes before it leaves, yet its file may be slow to be seen here
            note = self.folder.first_error()
        if note is not None:
            return note
        interrupted = isinstance(error, Interrupted) or self.interrupt.signal is not None
        if lost or (interrupted and self._gone()):  # torchrun sends SIGTERM when a rank has died
            gone = self._gone()
            who = ", ".join(f"rank {rank}" for rank in gone) or "another rank"
            if 0 in gone:  # who then is first speaks for it
                self._speaks = self.place.rank == min(set(range(self.place.world_size)).difference(gone))
            note = self._note(Status.failed, None)
            note["error"] = f"{who} ended without a word, perhaps killed for its memory (see dmesg)"
        elif interrupted:
            note = self._note(Status.interrupted, None)
        else:
            oom = is_out_of_memory(error)
            hint = "" if oom or self.trainer is None or self.trainer.steps_done else "; do model and data go together?"
            note = self._note(Status.oom if oom else Status.failed, describe(error) + hint)
            note["memory"] = self._figures().get("memory")
        self.folder.write_error(note)
        if note["error"]:
            self.folder.log_traceback(self.place.rank, error)
        return note

    def _note(self, status: Status, error: str | None) -> dict[str, Any]:
        """Why this rank ends, as `error.rank<N>.json` has it."""
        rank = self.place.rank
        text = error and f"rank {rank}: {error}"
        return {"time": time.time(), "rank": rank, "status": status.value, "error": text, "memory": None}

    def _gone(self) -> list[int]:
        """Ranks on this machine whose process is no more."""
        place = self.place
        return [
            rank
            for rank, process in enumerate(self._processes)
            if rank // place.local_world_size == place.rank // place.local_world_size and not exists(process)
        ]

    def _figures(self) -> dict[str, Any]:
        """What is known of the run so far, whatever state it is in."""
        try:
            figures = self.trainer.figures() if self.trainer else {}
            return {**figures, "plan": self._plan(figures.get("memory"))}
        except Exception:
            log.exception("the figures of the run could not be read")
            return {}

    def _plan(self, memory: Mapping[str, Any] | None) -> dict[str, Any]:
        """What `summary.json` says of the plan, beside what was measured of memory."""
        planned, trainer = self.prediction, self.trainer
        measured = memory if trainer and trainer.window_is_over else None
        return {
            "allocated_peak_bytes": planned and planned.allocated_bytes,
            "reserved_peak_bytes": planned and planned.reserved_bytes,
            "error_pct": planned and measured and planned.error_pct(measured),
        }

    def _tags(self) -> list[str]:
        groups = ("model", "sharding", "precision", "optimizer", "accumulation", "activation")
        return [f"{group}={self.choices[group]}" for group in groups if self.choices.get(group)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: CUDA's allocator, the CPU's, or a library's own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        part in text for part in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    )


def _lost_a_rank(error: BaseException) -> bool:
    """Whether an error of gloo or NCCL says that another rank has closed its connections."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        part in text
        for part in (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "Socket closed",
            "remote process exited",
            "communicator was aborted",
        )
    )


def _say(error: str) -> None:
    with suppress(OSError):  # a terminal that is gone
        print(f"error: {error}", file=sys.stderr)
