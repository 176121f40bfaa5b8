"""FSDP2: which mesh, which modules are one unit, and when each unit is resharded."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardlab.config import ShardingConfig
from shardlab.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered, freed and reduced together."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    repeated: bool  # whether it is one of the blocks that a `*` pattern matched


def mesh_shape(sharding: ShardingConfig, world_size: int) -> tuple[int, ...]:
    """(N,) for the sharding strategies, (R, N/R) for the hybrid ones, (N, 1) for those that shard no parameters."""
    if sharding.strategy.replicates:
        return (world_size, 1)
    if sharding.strategy.is_hybrid:
        replicas = int(sharding.replicas)
        return (replicas, world_size // replicas)
    return (world_size,)


def make_mesh(sharding: ShardingConfig, *, device_type: str, world_size: int) -> DeviceMesh:
    """The device mesh of a strategy, with the dimensions `replicate` (where there is one) and `shard`."""
    shape = mesh_shape(sharding, world_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def degenerate_mesh(sharding: ShardingConfig, world_size: int) -> str | None:
    """A sentence where a hybrid mesh is in truth another strategy, else None."""
    if not sharding.strategy.is_hybrid:
        return None
    replicas, shards = mesh_shape(sharding, world_size)
    if replicas == 1:
        same = "full_shard" if sharding.strategy.reshards else "shard_grad_op"
        return (
            f"{sharding.strategy.name} with one replica group on {world_size} ranks is {same}: set "
            "sharding.replicas to have more"
        )
    if shards == 1:
        return (
            f"{sharding.strategy.name} with {replicas} replica groups on {world_size} ranks is no_shard: "
            "each group is one rank"
        )
    return None


def rows_of(rows: int, parts: int, index: int) -> slice:
    """The rows that the part `index` of `parts` holds, as `torch.chunk` and so FSDP2 and DTensor cut dim 0."""
    per_part = -(-rows // parts)
    first = min(index * per_part, rows)
    return slice(first, min(first + per_part, rows))


def match_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Modules whose dotted name matches `pattern`, in the model's order; `*` stays within one name component."""
    parts = pattern.split(".")
    return [
        (name, module)
        for name, module in model.named_modules()
        if name
        and len(name.split(".")) == len(parts)
        and all(fnmatch.fnmatchcase(n, p) for n, p in zip(name.split("."), parts, strict=True))
    ]


def find_units(model: nn.Module, patterns: Sequence[Any], *, key: str) -> list[Unit]:
    """Finds the units that patterns name; what they leave over belongs to the root unit.

    Args:
        model: the model before sharding.
        patterns: module-name patterns; a nested list makes one unit of all that it matches.
        key: the config key they come from, for messages.

    Raises:
        ConfigError: for a pattern that matches nothing, a module matched twice, or parameters shared between units.
    """
    units = []
    for pattern in patterns:
        if isinstance(pattern, str):
            matches = _match_or_raise(model, pattern, key)
            units += [Unit((name,), (module,), repeated="*" in pattern) for name, module in matches]
        else:
            parts = pattern if isinstance(pattern, (list, tuple)) else [pattern]
            group = [match for part in parts for match in _match_or_raise(model, part, key)]
            units.append(Unit(tuple(n for n, _ in group), tuple(m for _, m in group), repeated=False))
    owner: dict[nn.Module, str] = {}
    for unit in units:
        for name, module in zip(unit.names, unit.modules, strict=True):
            if module in owner:
                raise ConfigError(f"{key}={list(patterns)} matches the module {name} twice: let one pattern name it")
            owner[module] = name
    _check_shared_parameters(model, units, key)
    return units


def find_blocks(model: nn.Module, patterns: Sequence[Any] | None) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks: what those of `model.units` match that have a `*`."""
    return [
        match
        for pattern in patterns or []
        if isinstance(pattern, str) and "*" in pattern
        for match in match_modules(model, pattern)
    ]


def shard(
    model: nn.Module,
    *,
    units: Sequence[Unit],
    mesh: DeviceMesh,
    sharding: ShardingConfig,
    precision: MixedPrecisionPolicy,
) -> FSDPModule:
    """Applies `fully_shard` to each unit and to the root, in place.

    Args:
        model: on the meta device; its parameters become DTensors sharded on dim 0.
        units: as `find_units` found them.
        mesh: as `make_mesh` made it.
        sharding: strategy and overrides.
        precision: dtypes that each unit gathers, computes and reduces in.

    Returns:
        The same model, which is now also an `FSDPModule`.
    """
    offload = CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy()
    reshard: bool | int = sharding.strategy.reshards
    if sharding.reshard_after_forward is not None:
        reshard = sharding.reshard_after_forward
    last_block = next((unit for unit in reversed(units) if unit.repeated), None)
    # Inner units first: fully_shard leaves to an outer unit what no inner one has taken.
    for unit in sorted(units, key=lambda unit: max(name.count(".") for name in unit.names), reverse=True):
        keep_last = unit is last_block and sharding.reshard_last_unit is not None
        fully_shard(
            list(unit.modules),
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=sharding.reshard_last_unit if keep_last else reshard,
        )
    reshard_root = sharding.reshard_root
    if reshard_root is None:
        # FSDP2 never reshards the root after forward, since backward begins with it. Where each rank holds all
        # parameters its unsharded copy would then stay through the whole step, for nothing.
        reshard_root = sharding.strategy.replicates and reshard is True
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard_root)
    assert isinstance(model, FSDPModule)
    return model


def _match_or_raise(model: nn.Module, pattern: Any, key: str) -> list[tuple[str, nn.Module]]:
    if not isinstance(pattern, str):
        raise ConfigError(f"{key} holds {pattern!r}: units are module-name patterns, or lists of them one level deep")
    matches = match_modules(model, pattern)
    if not matches:
        raise ConfigError(f"{key}: the pattern {pattern!r} matches no module; the model has {_outline(model)}")
    return matches


def _check_shared_parameters(model: nn.Module, units: Sequence[Unit], key: str) -> None:
    """Refuses what FSDP2 cannot do: a parameter that two units share, such as a tied embedding."""
    unit_of: dict[nn.Module, int] = {}
    for index, unit in sorted(enumerate(units), key=lambda pair: min(name.count(".") for name in pair[1].names)):
        for module in unit.modules:
            unit_of |= dict.fromkeys(module.modules(), index)  # an inner unit overrides the outer one
    seen: dict[nn.Parameter, tuple[str, int]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            first, unit_index = seen.setdefault(parameter, (name, unit_of.get(module, -1)))
            if unit_index != unit_of.get(module, -1):
                raise ConfigError(
                    f"{key}: {first} and {name} are one tied parameter in two units: put both modules in one unit (a "
                    "nested "
                    "list), or name neither, which leaves them to the root unit"
                )


def _outline(model: nn.Module) -> str:
    """The names of the model's children two levels deep, numbers as `*`: what a pattern could have meant."""

    def names() -> Iterator[str]:
        for name, _ in model.named_modules():
            if name and name.count(".") < 2:
                yield ".".join("*" if part.isdigit() else part for part in name.split("."))

    return ", ".join(dict.fromkeys(names())) or "no submodules"
