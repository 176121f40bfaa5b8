"""Activation checkpointing: what each block keeps for backward, and what it computes again."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardlab.config import ActivationConfig, ActivationPolicy
from shardlab.errors import ConfigError
from shardlab.sharding import find_blocks, match_modules

# Marks for a profiler, which compute nothing. Where a unit lies inside a block, FSDP2 on a GPU sets more of them when
# the block is recomputed than in forward, and PyTorch 2.13 fails for want of an operator to repeat (pytorch#185178).
_MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def checkpoint_activations(model: nn.Module, activation: ActivationConfig, units: Sequence[Any] | None) -> None:
    """Wraps the forward of each block, in place; the modules' names stay as they are.

    Args:
        model: before sharding: FSDP's hooks must lie outside, so that recomputing gathers nothing twice.
        activation: the policy, and the operators that `selective` saves.
        units: `model.units`, whose `*` patterns name the blocks where `activation.blocks` does not.

    Raises:
        ConfigError: where there are no blocks, or an operator is unknown.
    """
    if activation.policy is ActivationPolicy.none:
        return
    contexts: dict[str, Any] = {}
    if activation.policy is ActivationPolicy.selective:
        contexts["context_fn"] = _selective_contexts(activation)
    for block in _blocks(model, activation, units):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def _blocks(model: nn.Module, activation: ActivationConfig, units: Sequence[Any] | None) -> list[nn.Module]:
    if activation.blocks is None:
        found = find_blocks(model, units)
        if not found:
            raise ConfigError(
                f"activation.policy={activation.policy.name}, but no pattern of model.units has a `*` that names the "
                "model's repeated blocks: set activation.blocks to module-name patterns, or use activation=none"
            )
    else:
        found = []
        for pattern in activation.blocks:
            matches = match_modules(model, pattern)
            if not matches:
                raise ConfigError(f"activation.blocks: the pattern {pattern!r} matches no module")
            found += matches
    inside = [outer for outer, _ in found for inner, _ in found if inner.startswith(f"{outer}.")]
    if inside:
        raise ConfigError(f"activation.blocks: {inside[0]} contains other blocks, which would be recomputed twice")
    return list(dict.fromkeys(module for _, module in found))


def _selective_contexts(activation: ActivationConfig) -> Callable:
    """A `context_fn` for `checkpoint` that saves by operator, as torchtitan does.

    Saved: each output of `save`, and every second of `save_every_second`, counted together from the block's first:
    matrix products are dear to recompute, yet saving all of them would save most of the memory's worth again.
    """
    SAC_IGNORED_OPS.update(_MARKS)
    save = {_operator(name, "activation.save") for name in activation.save}
    alternate = {_operator(name, "activation.save_every_second") for name in activation.save_every_second}

    def context_fn():
        seen: Counter[bool] = Counter()  # operators of `alternate` so far: in forward, and in the recomputation

        def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
            packet = getattr(operator, "overloadpacket", operator)
            saved = packet in save
            if packet in alternate:
                seen[context.is_recompute] += 1
                saved = seen[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return context_fn


def _operator(name: str, key: str) -> Any:
    namespace, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None) if operator else None
    if packet is None:
        raise ConfigError(f"{key} names {name}, which is no PyTorch operator: write e.g. aten.mm")
    return packet
