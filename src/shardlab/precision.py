"""Dtypes: what parameters are stored in, gathered and computed in, and what gradients are reduced in."""

import contextlib

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardlab.config import PrecisionConfig
from shardlab.errors import ConfigError


def mixed_precision_policy(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """FSDP2's policy: each unit is gathered and computed in `param_dtype`, its gradients reduced in `reduce_dtype`."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype.torch if precision.param_dtype else None,
        reduce_dtype=precision.reduce_dtype.torch if precision.reduce_dtype else None,
    )


def autocast(precision: PrecisionConfig, device_type: str) -> contextlib.AbstractContextManager:
    """The context that forward and loss run in: autocast where `precision.autocast` names a dtype."""
    if precision.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=precision.autocast.torch)


def grad_scaler(precision: PrecisionConfig, device_type: str) -> torch.amp.GradScaler:
    """The dynamic loss scale for fp16; a scaler that does nothing where `precision.grad_scaler` is false."""
    return torch.amp.GradScaler(
        device_type,
        init_scale=precision.init_scale,
        growth_interval=precision.growth_interval,
        enabled=precision.grad_scaler,
    )


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The dtype of matrix products."""
    return (precision.param_dtype or precision.autocast or precision.storage_dtype).torch


def store_parameters(model: nn.Module, precision: PrecisionConfig) -> None:
    """Converts a meta-device model's floating-point parameters to `storage_dtype`; buffers keep theirs.

    Master weights are what is stored, and an optimizer's state follows them: fp32 unless another dtype was chosen.

    Raises:
        ConfigError: where the model itself stores parameters in another dtype than fp32, and not the chosen one.
    """
    wanted = precision.storage_dtype.torch
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dtype not in (torch.float32, wanted):
            raise ConfigError(
                f"precision.storage_dtype={precision.storage_dtype.name}, but the model makes {name} in "
                f"{parameter.dtype}: "
                "make the model in float32, or choose precision=bf16_pure"
            )
        parameter.data = parameter.data.to(wanted)
