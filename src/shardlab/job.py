"""One job on one rank, from a parsed config to a summary; and what is said of it however it ends."""

import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from shardlab.build import build
from shardlab.config import Config, to_dict
from shardlab.device import Cuda, Device, choose_device
from shardlab.display import closing_rows, header
from shardlab.distributed import Ranks, from_first_rank, over_ranks, process_group
from shardlab.errors import ConfigError, Interrupted, RunEnded, TrainingError
from shardlab.interrupt import Interrupt, watch_signals
from shardlab.run_folder import RunFolder, Status, describe
from shardlab.sharding import degenerate_mesh, make_mesh
from shardlab.tracking import Tracker, make_tracker
from shardlab.trainer import Datasets, Trainer

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
        ConfigError: for a mistake in the config that shows only once the model or the data are made.
        RunEnded: where the run did not complete; all has been said and written.
    """
    device = choose_device(config.device, local_rank=place.local_rank, local_world_size=place.local_world_size)
    if config.sharding.cpu_offload and not isinstance(device, Cuda):
        raise ConfigError(
            "sharding.cpu_offload=true on a CPU run offloads nothing: set it to false, or train on CUDA devices"
        )
    torch.manual_seed(config.seed + place.rank)  # dropout and the like; initial weights have seeds of their own
    torch.set_float32_matmul_precision(config.precision.float32_matmul.value)
    with process_group(place, device):
        if place.is_first:
            folder.check_unused()
        job = _Job(config, place=place, folder=RunFolder(from_first_rank(folder.path)), choices=choices)
        with watch_signals(job.end_from_outside) as job.interrupt:
            try:
                return job.run(device)
            except ConfigError as error:
                mistake = error
                job.refuse(error)
            except Exception as error:
                raise RunEnded(*job.fail(error)) from error
        if job.interrupt.signal and not place.is_first:  # rank 0 has told it, and torchrun ends this rank
            raise RunEnded(Status.interrupted.value, job.interrupt.exit_code)
        raise mistake


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
        self._ended = threading.Lock()  # taken once, by whoever writes the end

    def run(self, device: Device) -> dict[str, Any]:
        config, place, folder = self.config, self.place, self.folder
        if place.is_first:
            folder.write_config(config)
            folder.write_summary({"status": Status.running.value, "world_size": place.world_size})
        else:
            folder.log_here(place.rank)
        mesh = make_mesh(config.sharding, device_type=device.torch_device.type, world_size=place.world_size)
        datasets = Datasets(config)
        built = build(config, device=device.torch_device, mesh=mesh)
        datasets.check_vocabulary(built.model)
        self.tracker = make_tracker(
            config.tracking, folder.path, config=to_dict(config), tags=self._tags(), rank=place.rank
        )
        notices = [text for text in [degenerate_mesh(config.sharding, place.world_size)] if text]
        self.tracker.start(
            header(config, built, datasets, device=device, mesh=mesh, choices=self.choices, notices=notices)
        )
        self.trainer = Trainer(
            config,
            built=built,
            datasets=datasets,
            device=device,
            place=place,
            tracker=self.tracker,
            interrupt=self.interrupt,
        )
        self.trainer.fit()
        figures = _over_ranks(self.trainer.figures())
        self._end(Status.completed, None, figures)
        return {"status": Status.completed.value, **figures}

    def refuse(self, error: ConfigError) -> None:
        """Notes a mistake in the config in the summary."""
        if self.place.is_first:
            self._end(Status.failed, str(error), {})

    def fail(self, error: Exception) -> tuple[str, int]:
        """Tells why this rank fails. Returns the run's status and this process's exit code."""
        status, reason, more = self._reason(error)
        if self.place.is_first:
            self._end(status, reason, more)
        return status.value, self.interrupt.exit_code if status is Status.interrupted else 1

    def end_from_outside(self) -> None:
        """Writes the end from another thread: the main one waits for a rank that is gone."""
        if not self.place.is_first:
            return
        note = self.folder.first_error()
        if note is None:
            self._end(Status.interrupted, None, {})
        else:
            self._end(*_from_note(note))

    def _reason(self, error: Exception) -> tuple[Status, str | None, dict[str, Any]]:
        """Status, text and figures of a failure: another rank's if that failed first, else this one's, now noted."""
        if isinstance(error, TrainingError):  # on all ranks alike
            return Status.failed, str(error), {}
        note = self.folder.first_error()
        if note is None and _lost_a_rank(error):
            time.sleep(1.0)  # a rank that fails writes before it leaves, yet its file may be slow to be seen here
            note = self.folder.first_error()
        if note is not None:
            return _from_note(note)
        if isinstance(error, Interrupted) or self.interrupt.signal is not None:
            return Status.interrupted, None, {}
        status = Status.oom if is_out_of_memory(error) else Status.failed
        memory = {"memory": self.trainer.figures()["memory"]} if self.trainer else {}
        self.folder.write_error(self.place.rank, status, error, **memory)
        self.folder.log_traceback(self.place.rank, error)
        text = describe(error)
        if _lost_a_rank(error):
            text = "another rank ended without a word, perhaps killed for its memory (see dmesg)"
        print(f"rank {self.place.rank} failed: {text}; traceback in {self.folder.log_file}", file=sys.stderr)
        return status, f"rank {self.place.rank}: {text}", memory

    def _end(self, status: Status, error: str | None, more: Mapping[str, Any]) -> None:
        """Writes summary and display, once. On rank 0 only (elsewhere the tracker is silent)."""
        if not self._ended.acquire(blocking=False):
            return
        figures = {**(self.trainer.figures() if self.trainer else {}), **more}
        summary = {"status": status.value, "error": error, "world_size": self.place.world_size, **figures}
        if self.place.is_first:
            try:
                self.folder.write_summary(summary)
            except OSError as problem:
                log.error("summary.json could not be written: %s", problem)
        if self.tracker is not None:
            self.tracker.finish(summary, table=closing_rows(summary))

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
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        part in text
        for part in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    )


def _from_note(note: Mapping[str, Any]) -> tuple[Status, str, dict[str, Any]]:
    more = {"memory": note["memory"]} if "memory" in note else {}
    return Status(note["status"]), f"rank {note['rank']}: {note['error']}", more


def _over_ranks(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with each size of memory as the largest over ranks. Collective."""
    memories = over_ranks(figures["memory"])
    largest = {
        key: value if value is None else max(memory[key] for memory in memories)
        for key, value in figures["memory"].items()
    }
    return {**figures, "memory": largest}
