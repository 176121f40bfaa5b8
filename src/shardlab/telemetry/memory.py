"""Memory of one rank: model states from the tensors themselves, peaks from the device's allocator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardlab.device import Device, host_rss_bytes, host_rss_peak_bytes

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

    Keys it reports, in bytes: `parameters`, `gradients`, `optimizer`, `host_rss`, and on CUDA `allocated_peak`,
    `active_peak`, `reserved_peak`; as counts on CUDA: `alloc_retries`, `ooms`.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], device: Device):
        self._model = model
        self._optimizers = optimizers
        self._device = device
        self._gradients = 0
        self._run_peak: dict[str, int] = {}
        # Gradients are gone after the step, so they are measured where an optimizer finds them, once: they do not
        # change.
        self._hook = optimizers[0].register_step_pre_hook(self._measure_gradients)

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
        states = self.states()
        device = self._device.memory_bytes()
        for key in ("allocated_peak", "reserved_peak"):
            if key in device:
                self._run_peak[key] = max(self._run_peak.get(key, 0), device[key])
        return {**vars(states), "host_rss": host_rss_bytes(), **device}

    def reset_peak(self) -> None:
        self._device.reset_peak_memory()

    def run_peaks(self) -> dict[str, int | None]:
        """Peaks of the whole run so far; None where no allocator counts (on a CPU)."""
        self.read()
        return {
            "allocated_peak_bytes": self._run_peak.get("allocated_peak"),
            "reserved_peak_bytes": self._run_peak.get("reserved_peak"),
            "host_rss_peak_bytes": host_rss_peak_bytes(),
        }

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
