"""One optimizer step: micro-batches, loss scaling, reduction, clipping, update. The same code trains and plans.

So there is no `.item()`, no waiting for the device and no branch on what device it is; what the trainer logs it returns
as device tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardlab.accumulation import set_gradient_sync
from shardlab.config import Config
from shardlab.data import IGNORE_INDEX
from shardlab.errors import ConfigError
from shardlab.optimizer import SlicedParameters
from shardlab.precision import autocast


class StepOutput(NamedTuple):
    """What a step says of itself: 0-d tensors on the device, not yet read."""

    loss_sum: Tensor  # float32, sum of this rank's losses over its valid labels
    valid: Tensor  # int64, number of this rank's valid labels
    correct: Tensor  # int64, how many of them the model ranks first
    grad_norm: Tensor  # float32, L2 norm of the whole gradient, equal on all ranks; not finite where fp16 overflowed


def loss_and_correct(model: torch.nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and cross-entropy.

    Args:
        model: maps `inputs` to logits (..., classes).
        inputs: what the model takes, (batch, ...).
        labels: int64 (...); `IGNORE_INDEX` where nothing is to be predicted.

    Returns:
        Sum of the losses over the valid labels, float32 (); number of correct predictions, int64 ().

    Raises:
        ConfigError: where the labels do not go with the logits.
    """
    logits = model(inputs)  # (..., classes), in the compute dtype
    if not isinstance(logits, Tensor):
        raise ConfigError(f"model: forward returns a {type(logits).__name__}: it must return logits, one tensor")
    if labels.dtype != torch.int64 or labels.shape != logits.shape[:-1]:
        raise ConfigError(
            f"data: labels are {labels.dtype} of shape {tuple(labels.shape)}, but logits of shape {tuple(logits.shape)}"
            f" need int64 of shape {tuple(logits.shape[:-1])}: change the data set or the model"
        )
    correct = (logits.detach().argmax(-1) == labels).sum()
    loss = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, correct


class Step:
    """Runs optimizer steps on a built model.

    The loss that is differentiated is the mean over all valid labels of all micro-batches and ranks of the step: each
    rank's sum is divided by the global count, and multiplied by the world size since FSDP averages gradients over
    ranks. A mean of the ranks' means would be off where they hold different numbers of valid labels.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: FSDPModule,
        parameters: SlicedParameters,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler,
        device: torch.device,
    ):
        self.config = config
        self.model = model
        self.parameters = parameters
        self.optimizers = optimizers
        self.scaler = scaler
        self.device = device

    def __call__(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> StepOutput:
        """Trains on one global batch.

        Args:
            micro_batches: this rank's share as (inputs, labels) on the host, one pair a forward pass.
        """
        batches = [
            (inputs.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))
            for inputs, labels in micro_batches
        ]
        valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum()
        valid_everywhere = valid.clone()
        dist.all_reduce(valid_everywhere)
        weight = dist.get_world_size() / valid_everywhere.clamp(min=1)
        loss_sum = torch.zeros((), device=self.device)
        correct_sum = torch.zeros_like(valid)
        for index, (inputs, labels) in enumerate(batches):
            self.micro_batch(inputs, labels, weight, loss_sum, correct_sum, is_last=index == len(batches) - 1)
        return StepOutput(loss_sum, valid, correct_sum, self._update())

    def micro_batch(
        self, inputs: Tensor, labels: Tensor, weight: Tensor, loss_sum: Tensor, correct_sum: Tensor, *, is_last: bool
    ) -> None:
        """Forward and backward of one micro-batch, whose gradients are added to those that are there.

        Args:
            inputs: on the device.
            labels: on the device.
            weight: float32 (), by which the sum of the losses is multiplied before it is differentiated.
            loss_sum: float32 (), to which this micro-batch's is added in place.
            correct_sum: int64 (), likewise.
            is_last: whether it is the step's last one.
        """
        config = self.config
        set_gradient_sync(
            self.model, is_last=is_last, reduce=config.accumulation.reduce, strategy=config.sharding.strategy
        )
        with autocast(config.precision, self.device.type):
            loss, correct = loss_and_correct(self.model, inputs, labels)  # type: ignore[arg-type]
        self.scaler.scale(loss * weight).backward()
        loss_sum += loss.detach()
        correct_sum += correct

    def _update(self) -> Tensor:
        """Unscales, clips, updates. Returns the norm of the whole gradient before clipping."""
        self.parameters.take_gradients()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        gradients = self.parameters.gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.config.train.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.named.values(), self.config.train.clip_norm, norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.parameters.share_updates()
        self.parameters.drop_gradients()
        return norm
