"""Model states in closed form: the bytes of parameters, gradients and optimizer state that a rank keeps.

They are the floor of a plan: activations, units and batches add to them. There are two ways of counting mixed
precision, which give the same 16 bytes per parameter for Adam:

- ZeRO (arXiv 1910.02054, section 3.1): 2 for fp16 parameters, 2 for fp16 gradients, 12 for what the optimizer keeps in
  fp32: a copy of the parameters, momentum and variance. `zero_states` counts so.
- FSDP2: the fp32 copy *is* the parameter, and `param_dtype` copies come and go unit by unit. 4 for parameters, 4 for
  gradients (reduced in `reduce_dtype`, then stored in the parameter's dtype), 8 for Adam. `model_states` counts so, in
  `precision.storage_dtype`.

Not counted, since they come and go: unsharded parameters and gradients. They are all of the parameters in `param_dtype`
from forward to backward for shard_grad_op and hybrid_shard_zero2. On an (N, 1) mesh (no_shard, shard_optimizer) FSDP2
computes on a copy too, where DDP has none; resharding keeps it to one unit at a time (see `sharding.shard`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.nn as nn

from shardlab.config import Config, Strategy
from shardlab.sharding import find_blocks

COUNTER_BYTES = 4  # torch.optim's `step` is an fp32 scalar; on CUDA its block takes 512 bytes of the allocator


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank; `telemetry.memory.ModelStates` is the same, measured."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps for one parameter."""

    values: int  # tensors of the parameter's shape and dtype
    counters: int = 0  # scalars of COUNTER_BYTES, never sharded


ADAM = OptimizerState(values=2, counters=1)  # exp_avg, exp_avg_sq; step


def optimizer_states(
    config: Mapping[str, Any], names_and_dims: Mapping[str, int], blocks: Iterable[str] = ()
) -> dict[str, OptimizerState] | None:
    """What the configured optimizer keeps for each parameter, shared out as `optimizer.make_optimizers` does.

    Args:
        config: as in `conf/optimizer`.
        names_and_dims: number of dimensions of each trained parameter.
        blocks: names of the model's repeated blocks; with `rest`, their 2-D weights are the first optimizer's.

    Returns:
        By parameter name; None for an optimizer whose state is not known here.
    """
    rest = config.get("rest")
    prefixes = tuple(f"{block}." for block in blocks)
    first, others = _state_of(config), _state_of(rest) if rest else None
    if first is None or (rest and others is None):
        return None
    return {
        name: first if others is None or (dims == 2 and name.startswith(prefixes)) else others
        for name, dims in names_and_dims.items()
    }


def model_states(
    shapes: Mapping[str, Sequence[int]],
    optimizer: OptimizerState | Mapping[str, OptimizerState],
    *,
    strategy: Strategy,
    ranks: int,
    replicas: int = 1,
    value_bytes: int = 4,
    frozen: Collection[str] = (),
) -> ModelStates:
    """Bytes that rank 0 keeps, which no rank exceeds.

    FSDP2 cuts dim 0 of each parameter into ceil(rows / N) rows a rank and pads the last ones (FSDPParam in
    `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`): a parameter with fewer rows than ranks takes a row on each.
    Gradients are views of one buffer per unit, padded alike. Optimizer state follows the parameters; for
    shard_optimizer the ceil(rows / N) rows that the rank updates.

    Args:
        shapes: of all parameters, unsharded, by name; a tied one once.
        optimizer: what it keeps for each parameter, or for those that are trained by name.
        strategy: `sharding.strategy`.
        ranks: number of all ranks.
        replicas: replica groups of the hybrid strategies; others ignore it.
        value_bytes: bytes of `precision.storage_dtype`: 4 for float32, 2 for bfloat16.
        frozen: names of parameters that are not trained: they have neither gradient nor state.
    """
    shards = 1 if strategy.replicates else ranks // replicas if strategy.is_hybrid else ranks
    state_shards = ranks if strategy is Strategy.shard_optimizer else shards
    trained = {name: shape for name, shape in shapes.items() if name not in frozen}
    state_bytes = 0
    for name, shape in trained.items():
        state = optimizer if isinstance(optimizer, OptimizerState) else optimizer[name]
        state_bytes += state.values * value_bytes * _largest_share(shape, state_shards)
        state_bytes += state.counters * COUNTER_BYTES
    return ModelStates(
        parameters=value_bytes * sum(_largest_share(shape, shards) for shape in shapes.values()),
        gradients=value_bytes * sum(_largest_share(shape, shards) for shape in trained.values()),
        optimizer=state_bytes,
    )


def states_of(config: Config, model: nn.Module, *, world_size: int) -> ModelStates | None:
    """Bytes that rank 0 of a run keeps; None for an optimizer whose state is not known here.

    Args:
        config: as `config.parse` returned it.
        model: as `build.make_model` made it.
        world_size: number of ranks.
    """
    parameters = dict(model.named_parameters())
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    dims = {name: parameter.dim() for name, parameter in parameters.items() if name not in frozen}
    blocks = [name for name, _ in find_blocks(model, config.model.get("units"))]
    optimizer = optimizer_states(config.optimizer, dims, blocks)
    if optimizer is None:
        return None
    sharding = config.sharding
    return model_states(
        {name: parameter.shape for name, parameter in parameters.items()},
        optimizer,
        strategy=sharding.strategy,
        ranks=world_size,
        replicas=int(sharding.replicas) if sharding.strategy.is_hybrid else 1,
        value_bytes=config.precision.storage_dtype.torch.itemsize,
        frozen=frozen,
    )


def zero_states(
    parameters: int,
    *,
    stage: int,
    ranks: int,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> ModelStates:
    """Model states by the size of a model alone, as in Table 1 of the ZeRO paper (arXiv 1910.02054).

    Args:
        parameters: their number.
        stage: 0 = nothing sharded (no_shard), 1 = optimizer state (shard_optimizer), 2 = gradients too, 3 = parameters
            too (full_shard). FSDP2's shard_grad_op is stage 2 during a step, and stage 3 between steps.
        ranks: that share what is sharded.
        parameter_bytes: per parameter.
        gradient_bytes: per parameter.
        optimizer_bytes: per parameter, with an fp32 copy of it where there is one.
    """
    share = -(-parameters // ranks)
    return ModelStates(
        parameters=parameter_bytes * (share if stage >= 3 else parameters),
        gradients=gradient_bytes * (share if stage >= 2 else parameters),
        optimizer=optimizer_bytes * (share if stage >= 1 else parameters),
    )


def _largest_share(shape: Sequence[int], shards: int) -> int:
    """Values of a parameter on rank 0 when dim 0 is cut into `shards` parts of equal size."""
    return -(-shape[0] // shards) * prod(shape[1:])


def _state_of(config: Mapping[str, Any]) -> OptimizerState | None:
    """From `torch/optim` (torch 2.13): which tensors each optimizer puts into its `state`."""
    match config.get("_target_"):
        case "torch.optim.Adam" | "torch.optim.AdamW":
            return OptimizerState(ADAM.values + bool(config.get("amsgrad")), ADAM.counters)  # max_exp_avg_sq
        case "torch.optim.SGD":
            return OptimizerState(1 if config.get("momentum") else 0)  # momentum_buffer
        case "torch.optim.Muon":
            return OptimizerState(1)  # momentum_buffer
    return None
