"""From a config to a sharded model, its optimizer and its step, on a real or a simulated device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from shardlab.activation import checkpoint_activations
from shardlab.config import Config, Strategy
from shardlab.errors import ConfigError
from shardlab.initialization import WithoutDraws, initialize
from shardlab.optimizer import SlicedParameters, make_optimizers
from shardlab.precision import grad_scaler, mixed_precision_policy, store_parameters
from shardlab.sharding import Unit, find_blocks, find_units, shard
from shardlab.step import Step
from shardlab.targets import make


@dataclass(frozen=True)
class Built:
    """All that trains."""

    model: nn.Module
    units: Sequence[Unit]
    optimizers: Sequence[Optimizer]
    scaler: torch.amp.GradScaler
    step: Step


def build(config: Config, *, device: torch.device, mesh: DeviceMesh, model: nn.Module | None = None) -> Built:
    """Builds the model on the meta device, shards it, gives it weights, and makes the optimizer and the step.

    The order is fixed: checkpointing wraps the blocks' own forward, so FSDP's hooks lie outside; parameters are sharded
    before they have memory, so no rank ever holds all of them.

    Args:
        config: as `config.parse` returned it.
        device: where the model runs.
        mesh: as `sharding.make_mesh` made it.
        model: what `make_model` returned; None = it is made here.

    Raises:
        ConfigError: where the model cannot be made as configured.
    """
    sharding, precision = config.sharding, config.precision
    model = model or make_model(config.model)
    unit_key = "sharding.units" if sharding.units is not None else "model.units"
    patterns = sharding.units if sharding.units is not None else config.model.get("units")
    blocks = [name for name, _ in find_blocks(model, config.model.get("units"))]
    units = find_units(model, patterns or [], key=unit_key)
    store_parameters(model, precision)
    checkpoint_activations(model, config.activation, config.model.get("units"))
    sharded: FSDPModule = shard(
        model, units=units, mesh=mesh, sharding=sharding, precision=mixed_precision_policy(precision)
    )
    initialize(
        model,
        device=device,
        parameter_device=torch.device("cpu") if sharding.cpu_offload else device,
        seed=config.seed,
    )
    parameters = SlicedParameters(model, mesh=mesh, sliced=sharding.strategy is Strategy.shard_optimizer)
    optimizers = make_optimizers(config.optimizer, parameters.named, blocks)
    scaler = grad_scaler(precision, device.type)
    step = Step(config, model=sharded, parameters=parameters, optimizers=optimizers, scaler=scaler, device=device)
    return Built(model, units, optimizers, scaler, step)


def make_model(config: dict[str, Any]) -> nn.Module:
    """Makes the model that `model._target_` names, on the meta device.

    Raises:
        ConfigError: where the target is missing, or its constructor refuses its arguments.
    """
    with torch.device("meta"), WithoutDraws():
        model = make("model", config, without=["units"])
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={config.get('_target_')} makes a {type(model).__name__}, not an nn.Module")
    return model
