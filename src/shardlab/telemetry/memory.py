"""Memory of one rank: model states from the tensors themselves, peaks from the device's allocator."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardlab.device import Device, host_rss_bytes, host_rss_peak_bytes
from shardlab.telemetry.events import Peak
from shardlab.telemetry.ledger import WINDOW_STEPS, Ledger

GIB = 1 << 30


def storage_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors on this rank, FSDP2's padding included; a shared storage counts once."""
    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@dataclass
class ModelStates:
    """Bytes that a rank keeps from step to step, and of its reduced gradients while they exist."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


class MemoryMeter:
    """Reads one rank's memory.

    Keys it reports, in bytes: `parameters`, `gradients`, `optimizer`, `host_rss`; after the memory window (the first
    `WINDOW_STEPS` steps, and `build`) `activations`; `allocated_peak`, on CUDA since the last reset, on a CPU in the
    window; on CUDA `active_peak` and `reserved_peak`, and as counts `alloc_retries` and `ooms`.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], device: Device, ledger: Ledger):
        """
        Args:
            model: built.
            optimizers: of the model.
            device: that it runs on.
            ledger: that was entered around `build`.
        """
        self._model = model
        self._optimizers = optimizers
        self._device = device
        self._ledger = ledger
        self._gradients = 0
        self._run_peak: dict[str, int] = {}
        self._window_peak: dict[str, int] = {}
        self._window: Peak | None = None
        ledger.watch(model, optimizers)
        # Gradients are gone after the step, so they are measured where an optimizer finds them, once: they do not
        # change.
        self._hook = optimizers[0].register_step_pre_hook(self._measure_gradients)
        self._note_peaks(self._window_peak)  # of `build`

    @contextmanager
    def step(self, number: int, micro_batches: Iterable[Iterable[torch.Tensor]]) -> Iterator[None]:
        """To be entered around each step: keeps account of those in the window."""
        if number > WINDOW_STEPS:
            yield
            return
        self._note_peaks(self._run_peak)
        self.reset_peak()
        with self._ledger:
            self._ledger.begin_step(micro_batches)
            try:
                yield
            except BaseException:  # out of memory, as a rule in the first step: then its peak is all there is
                self._ledger.learn(self._model)
                raise
            finally:
                self._note_peaks(self._window_peak)
                self._window = self._ledger.peak()
        if number == WINDOW_STEPS:
            self._ledger.close()

    def states(self) -> ModelStates:
        state = (
            value
            for optimizer in self._optimizers
            for entry in optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )
        return ModelStates(storage_nbytes(self._model.parameters()), self._gradients, storage_nbytes(state))

    def read(self) -> dict[str, int]:
        """Now, and the peaks since the last `reset_peak`. Does not wait for the device."""
        readings = {**vars(self.states()), "host_rss": host_rss_bytes()}
        if self._window is not None:
            readings |= {"activations": self._window.breakdown["activations"], "allocated_peak": self._window.bytes}
        return readings | self._note_peaks(self._run_peak)

    def reset_peak(self) -> None:
        self._device.reset_peak_memory()

    def summary(self) -> dict[str, Any]:
        """Sizes in bytes: the peaks of the memory window and what they are made of, those of the whole run, states.

        Peaks are the allocator's on CUDA and the ledger's on a CPU, which reserves nothing; null where not measured.
        """
        self._note_peaks(self._run_peak)
        window = self._window
        return {
            "allocated_peak_bytes": self._window_peak.get("allocated_peak", window and window.bytes),
            "reserved_peak_bytes": self._window_peak.get("reserved_peak"),
            "breakdown": window and window.breakdown,
            "phase": window and window.phase.value,
            "module": window and window.module,
            "run_allocated_peak_bytes": self._run_peak.get("allocated_peak"),
            "run_reserved_peak_bytes": self._run_peak.get("reserved_peak"),
            **{f"{name}_bytes": nbytes for name, nbytes in vars(self.states()).items()},
            "host_rss_peak_bytes": host_rss_peak_bytes(),
        }

    def _note_peaks(self, peaks: dict[str, int]) -> dict[str, int]:
        """Raises `peaks` to the allocator's, and those of the whole run with them. Returns the allocator's figures."""
        figures = self._device.memory_bytes()
        for highest in (peaks, self._run_peak):
            for key in ("allocated_peak", "reserved_peak"):
                if key in figures:
                    highest[key] = max(highest.get(key, 0), figures[key])
        return figures

    def _measure_gradients(self, optimizer: Optimizer, args, kwargs) -> None:
        self._gradients = storage_nbytes(p.grad for p in self._model.parameters() if p.grad is not None)
        self._hook.remove()


def reduce_over_ranks(ranks: Sequence[dict[str, int]]) -> dict[str, float | int]:
    """Metrics of all ranks' readings: the largest under the plain name, `_min` and `_max` besides where ranks differ.

    Args:
        ranks: what `MemoryMeter.read` returned on each rank.

    Returns:
        `memory/<key>_gib` in GiB; `memory/alloc_retries` and `memory/ooms` as counts.
    """
    row: dict[str, float | int] = {}
    for key in ranks[0]:
        values: list[float | int] = [rank[key] for rank in ranks]
        name = f"memory/{key}"
        if key not in ("alloc_retries", "ooms"):
            name, values = f"{name}_gib", [value / GIB for value in values]
        row[name] = max(values)
        if min(values) != max(values):
            row |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    return row
