"""Optimizers over sharded parameters, ZeRO-1's slices of replicated ones, and the learning rate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardlab.errors import ConfigError
from shardlab.sharding import rows_of
from shardlab.targets import make

_DECAYS = ("constant", "linear", "cosine")
_NOT_FOR_CONSTRUCTOR = ("rest", "warmup_steps", "decay", "min_lr_ratio")


class SlicedParameters:
    """What the optimizer updates.

    For most strategies that is the model's own sharded parameters. For `shard_optimizer` (ZeRO-1) each rank holds all
    of each parameter and gradient, but updates, and keeps optimizer state for, only its slice: rows that are a view of
    the full parameter, as a DTensor sharded on dim 0, so that any optimizer that works on FSDP2's parameters works
    here. `torch.distributed.optim.ZeroRedundancyOptimizer` cannot be used: it fails on DTensors.
    """

    def __init__(self, model: nn.Module, *, mesh: DeviceMesh, sliced: bool):
        """Args:
        model: sharded and initialised.
        mesh: its device mesh; (N, 1) where `sliced`.
        sliced: whether the strategy is `shard_optimizer`.
        """
        self._full = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._mesh = mesh["replicate"] if sliced else None
        self.named = {name: self._slice(p) for name, p in self._full.items()} if sliced else self._full

    def take_gradients(self) -> None:
        """Gives each slice its rows of the reduced gradient. Nothing to do where nothing is sliced."""
        if self._mesh is None:
            return
        for name, parameter in self._full.items():
            if parameter.grad is not None:
                self.named[name].grad = self._rows(parameter.grad, parameter)

    def share_updates(self) -> None:
        """Gathers all ranks' updated slices into each rank's parameters. Nothing to do where nothing is sliced."""
        if self._mesh is None:
            return
        with torch.no_grad():
            for name, parameter in self._full.items():
                if self.named[name].grad is not None:
                    _local(parameter).copy_(self.named[name].full_tensor())  # type: ignore[attr-defined]

    def drop_gradients(self) -> None:
        for parameter in (*self._full.values(), *self.named.values()):
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.named.values() if p.grad is not None]

    def _slice(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._rows(parameter, parameter))

    def _rows(self, tensor: torch.Tensor, parameter: nn.Parameter) -> DTensor:
        assert self._mesh is not None
        rows = _local(tensor).detach()[rows_of(parameter.shape[0], self._mesh.size(), self._mesh.get_local_rank())]
        return DTensor.from_local(
            rows, self._mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def make_optimizers(
    config: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], blocks: Iterable[str]
) -> list[Optimizer]:
    """Builds the optimizer that `optimizer._target_` names, or two where `optimizer.rest` names one for what is left.

    Args:
        config: `_target_`, its arguments, and the keys of the learning rate's schedule.
        parameters: what is trained, by the name in the model.
        blocks: names of the model's repeated blocks. With `rest`, their 2-D weights are the first optimizer's, all else
            (embeddings, head, norms, biases) is the second's, as Muon is meant to be used.

    Raises:
        ConfigError: for an unknown optimizer or argument, a model without such weights, or a schedule out of range.
    """
    if not parameters:
        raise ConfigError("model: no parameter requires a gradient: there is nothing to train")
    _check_schedule(config)
    rest = config.get("rest")
    if rest is None:
        optimizer = make("optimizer", config, list(parameters.values()), without=_NOT_FOR_CONSTRUCTOR)
        if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)) and optimizer.defaults.get("fused"):
            raise ConfigError(
                f"optimizer.fused=true: PyTorch's fused {type(optimizer).__name__} takes no sharded parameters "
                "(DTensors): set it "
                "to false, or use optimizer=adamw"
            )
        return [optimizer]
    prefixes = tuple(f"{block}." for block in blocks)
    hidden = [p for name, p in parameters.items() if p.ndim == 2 and name.startswith(prefixes)]
    others = [p for name, p in parameters.items() if not (p.ndim == 2 and name.startswith(prefixes))]
    if not hidden:
        raise ConfigError(
            f"optimizer._target_={config['_target_']} is for 2-D weights inside the model's repeated blocks, but no "
            "pattern "
            "of model.units with a `*` names any: use optimizer=adamw, or name the blocks in model.units"
        )
    first = make("optimizer", config, hidden, without=_NOT_FOR_CONSTRUCTOR)
    return [first, make("optimizer.rest", rest, others)] if others else [first]


def make_schedulers(config: Mapping[str, Any], optimizers: Sequence[Optimizer], *, steps: int) -> list[LambdaLR]:
    """Learning-rate schedules: a linear warm-up to `lr`, then a decay to `lr * min_lr_ratio` at the last step.

    Args:
        config: `warmup_steps`, `decay` (constant, linear or cosine), `min_lr_ratio`.
        optimizers: as `make_optimizers` made them; each keeps its own `lr` as the peak.
        steps: optimizer steps of the run.
    """
    warmup, floor, decay = config.get("warmup_steps") or 0, config.get("min_lr_ratio") or 0.0, config.get("decay")

    def factor(step: int) -> float:
        """The factor on `lr` at a step, counted from 0."""
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        if decay == "linear":
            return floor + (1 - floor) * (1 - progress)
        if decay == "cosine":
            return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
        return 1.0

    return [LambdaLR(optimizer, factor) for optimizer in optimizers]


def _check_schedule(config: Mapping[str, Any]) -> None:
    decay, warmup, floor = config.get("decay"), config.get("warmup_steps") or 0, config.get("min_lr_ratio") or 0.0
    if decay not in (None, *_DECAYS):
        raise ConfigError(f"optimizer.decay={decay} is none of {', '.join(_DECAYS)}")
    if not isinstance(warmup, int) or warmup < 0:
        raise ConfigError(f"optimizer.warmup_steps={warmup} must be a number of steps, 0 for none")
    if not 0 <= floor <= 1:
        raise ConfigError(f"optimizer.min_lr_ratio={floor} must be between 0 and 1")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
