"""The loop: data in, steps, metrics out, evaluation."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset, Subset

from shardlab.build import Built
from shardlab.config import Config
from shardlab.data import IGNORE_INDEX, Batch, batches, eval_batches
from shardlab.device import Device
from shardlab.distributed import Ranks, over_ranks
from shardlab.errors import TrainingError
from shardlab.interrupt import Interrupt
from shardlab.models.checks import check_data
from shardlab.optimizer import make_schedulers
from shardlab.precision import autocast, compute_dtype
from shardlab.step import StepOutput, loss_and_correct
from shardlab.targets import make
from shardlab.telemetry import (
    WINDOW_STEPS,
    Ledger,
    MemoryMeter,
    StepCounter,
    Throughput,
    reduce_over_ranks,
)
from shardlab.telemetry.prediction import Prediction
from shardlab.telemetry.quality import Quality
from shardlab.tracking import Tracker

MIN_LOSS_SCALE = 2.0**-14  # the smallest normal fp16 number; a scale below it says that the loss itself is the problem


class Datasets:
    """The training and, where it is evaluated, the held-out part of what `data._target_` names."""

    def __init__(self, config: Config):
        """Raises:
        ConfigError: where a part cannot be made.
        """
        without = ["num_workers"]
        self.num_workers: int = config.data.get("num_workers") or 0
        self.train = make("data", config.data, without=without, split="train")
        self.eval: Dataset | None = None
        if config.train.eval_every:
            self.eval = make("data", config.data, without=without, split="eval")
            if limit := config.train.eval_samples:  # the first ones, so that world sizes can be compared
                length = len(self.eval) if hasattr(self.eval, "__len__") else limit
                self.eval = Subset(self.eval, range(min(limit, length)))
        self.tokens_per_sample: int | None = getattr(self.train, "tokens_per_sample", None)

    def check_model(self, model: torch.nn.Module) -> None:
        """Raises ConfigError where the data has token ids, or positions, that the model does not know."""
        vocab_size = getattr(self.train, "vocab_size", None)
        check_data(model, tokens_per_sample=self.tokens_per_sample, vocab_size=vocab_size)


class Trainer:
    """Trains a built model for `train.steps` steps.

    The step hands over device tensors; they are read at log steps only, so that the host can run ahead of the device
    between them. All ranks run this alike; only rank 0's tracker writes.
    """

    def __init__(
        self,
        config: Config,
        *,
        built: Built,
        ledger: Ledger,
        datasets: Datasets,
        device: Device,
        place: Ranks,
        tracker: Tracker,
        interrupt: Interrupt,
        prediction: Prediction | None = None,
    ):
        self.config = config
        self.built = built
        self.datasets = datasets
        self.device = device
        self.place = place
        self.tracker = tracker
        self.interrupt = interrupt
        self.prediction = prediction  # on rank 0, where there is a plan
        self.schedulers = make_schedulers(config.optimizer, built.optimizers, steps=config.train.steps)
        self.memory = MemoryMeter(built.model, built.optimizers, device, ledger)
        self.counter = StepCounter()
        self.throughput = Throughput(total_steps=config.train.steps, synchronize=device.synchronize)
        self.quality = Quality(device.torch_device)
        self.steps_done = 0
        self.first_row: dict[str, float] = {}
        self.last_row: dict[str, float] = {}  # the latest value of each metric
        self._compares_plan = config.plan.before_train  # on all ranks, since it is collective; until it is done
        self._skipped = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        self._not_finite_since = torch.zeros((), dtype=torch.int64, device=device.torch_device)  # a step, 0 = never
        self._grad_norm = torch.zeros((), device=device.torch_device)

    def fit(self) -> None:
        """Runs all steps.

        Raises:
            TrainingError: where the loss is no longer finite.
            Interrupted: after a signal.
        """
        config, source = self.config.train, self._batches()
        self.built.model.train()
        self.throughput.resume()
        for step in range(1, config.steps + 1):
            self.interrupt.check()
            waiting = time.perf_counter()
            micro_batches = next(source)
            data_seconds = time.perf_counter() - waiting
            # One step is counted: the first, which is slow anyway.
            counter = self.counter if step == 1 else contextlib.nullcontext()
            with self.memory.step(step, micro_batches), counter:
                output = self.built.step(micro_batches)
            lr = float(self.schedulers[0].get_last_lr()[0])
            for scheduler in self.schedulers:
                scheduler.step()
            self._accumulate(output, step)
            del output  # or it would live through the next step, and count in its memory
            self.steps_done = step
            self.throughput.step(data_seconds)
            self.tracker.advance(step)
            if _is_due(step, config.log_every, first=True, last=config.steps):
                self._log(step, lr)
            if _is_due(step, config.eval_every, last=config.steps):
                self._evaluate(step)

    def figures(self) -> dict[str, Any]:
        """What `summary.json` says of the steps so far; null for what was not measured."""
        total, cost = self.throughput.total(), self.counter.cost
        return {
            "steps": self.steps_done,
            "loss": {"first": self.first_row.get("train/loss"), "last": self.last_row.get("train/loss")},
            "eval": {"loss": self.last_row.get("eval/loss")},
            "perf": {
                "step_ms": total and total["step_ms"],
                "tokens_per_s": total and total["steps_per_s"] * self._progress_per_step(),
                "unit": "tokens" if self.datasets.tokens_per_sample else "samples",  # of both figures
                "flops_per_token": cost.model_flops / self._progress_per_step() * self.place.world_size,
            },
            "comm": {f"{name}_bytes": count for name, count in cost.comm_bytes.items()},
            "memory": self.memory.summary(),
        }

    @property
    def window_is_over(self) -> bool:
        """Whether all of the memory window has been measured."""
        return self.steps_done >= min(WINDOW_STEPS, self.config.train.steps)

    def _batches(self) -> Iterator[list[Batch]]:
        return batches(
            self.datasets.train,
            seed=self.config.seed,
            micro_batch=self.config.train.micro_batch,
            micro_batches=self.config.accumulation.steps or 1,
            rank=self.place.rank,
            world_size=self.place.world_size,
            steps=self.config.train.steps,
            num_workers=self.datasets.num_workers,
            pin_memory=self.device.pin_memory,
        )

    def _accumulate(self, output: StepOutput, step: int) -> None:
        """Keeps a step's tensors until the next log step, on the device."""
        self.quality.update(output.loss_sum, output.correct, output.valid)
        self._grad_norm.copy_(output.grad_norm)
        overflowed = ~torch.isfinite(output.grad_norm)
        if self.built.scaler.is_enabled():  # that step was skipped, and did no harm
            self._skipped += overflowed
        else:
            failed = overflowed | ~torch.isfinite(output.loss_sum)
            self._not_finite_since = torch.where((self._not_finite_since == 0) & failed, step, self._not_finite_since)

    def _progress_per_step(self) -> int:
        """Tokens (or samples, where there are no tokens) that all ranks process in a step."""
        return (self.config.train.global_batch or 0) * (self.datasets.tokens_per_sample or 1)

    def _log(self, step: int, lr: float) -> None:
        self.throughput.pause()
        quality = self.quality.compute()
        row: dict[str, float] = {f"train/{name}": value for name, value in quality.items()}
        row |= {"train/grad_norm": self._grad_norm.item(), "train/lr": lr}
        scaler = self.built.scaler
        if scaler.is_enabled():
            row |= {"train/loss_scale": scaler.get_scale(), "train/skipped_steps": self._skipped.item()}
        row |= self._performance()
        row |= reduce_over_ranks(over_ranks(self.memory.read()))
        row |= {f"comm/{name}_gib": nbytes / 2**30 for name, nbytes in self.counter.cost.comm_bytes.items()}
        row |= self._plan()
        self._write(row, step)
        self._check_finite(lr)
        self.memory.reset_peak()
        self.throughput.resume()

    def _performance(self) -> dict[str, float]:
        """`perf/*` since the last log step; nothing while the first steps are left out."""
        interval = self.throughput.take()
        if interval is None:
            return {}
        per_s = interval["steps_per_s"] * self._progress_per_step()
        cost = self.counter.cost
        row = {
            "perf/step_ms": interval["step_ms"],
            "perf/data_ms": interval["data_ms"],
            "perf/tokens_per_s": per_s,
            "perf/tokens_per_s_per_rank": per_s / self.place.world_size,
            "perf/tflops_per_rank": cost.flops * interval["steps_per_s"] / 1e12,
        }
        if peak := self.device.peak_flops(compute_dtype(self.config.precision)):
            row["perf/mfu"] = cost.model_flops * interval["steps_per_s"] / peak
        return row

    def _plan(self) -> dict[str, float]:
        """`plan/*`: the sizes with the first row, their error with the first one after the memory window."""
        row: dict[str, float] = {}
        if self.prediction and not self.first_row:
            row |= self.prediction.metrics()
        if self.window_is_over and self._compares_plan:
            self._compares_plan = False
            memory = largest_over_ranks(self.memory.summary())
            error_pct = self.prediction.error_pct(memory) if self.prediction else None
            if error_pct is not None:
                row["plan/error_pct"] = error_pct
        return row

    def _evaluate(self, step: int) -> None:
        """Loss over the held-out part, exact over all of its labels; left out of the throughput."""
        if self.datasets.eval is None:
            return
        self.throughput.pause()
        model, quality, device = self.built.model, Quality(self.device.torch_device), self.device.torch_device
        model.eval()
        with torch.no_grad(), autocast(self.config.precision, device.type):
            for batch in eval_batches(
                self.datasets.eval,
                micro_batch=self.config.train.micro_batch,
                rank=self.place.rank,
                world_size=self.place.world_size,
            ):
                inputs, labels = batch.inputs.to(device), batch.labels.to(device)
                loss, correct = loss_and_correct(model, inputs, labels)
                quality.update(loss, correct, (labels != IGNORE_INDEX).sum())
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # backward would have done it
        model.train()
        self._write({f"eval/{name}": value for name, value in quality.compute().items()}, step)
        self.throughput.resume()

    def _write(self, row: dict[str, float], step: int) -> None:
        samples = step * (self.config.train.global_batch or 0)
        progress = {"progress/step": step, "progress/samples": samples}
        if self.datasets.tokens_per_sample:
            progress["progress/tokens"] = samples * self.datasets.tokens_per_sample
        self.first_row = self.first_row or row
        self.last_row |= row
        self.tracker.log({**row, **progress}, step)

    def _check_finite(self, lr: float) -> None:
        """Raises TrainingError on all ranks alike: what it looks at is equal on all."""
        if since := max(over_ranks(int(self._not_finite_since.item()))):
            raise TrainingError(
                f"the loss or its gradient is not finite since step {since}: try a lower optimizer.lr (now {lr:g}), a "
                "longer optimizer.warmup_steps, a smaller train.clip_norm, or precision=fp32, to see if it is the dtype"
            )
        scale = self.built.scaler.get_scale()
        if scale < MIN_LOSS_SCALE:
            raise TrainingError(
                f"the loss scale fell to {scale:g} after {int(self._skipped.item())} skipped steps: gradients "
                "overflow however "
                f"small they are scaled; try a lower optimizer.lr (now {lr:g}) or precision=bf16"
            )


def largest_over_ranks(memory: dict[str, Any]) -> dict[str, Any]:
    """Each size of memory as the largest over ranks, with the fullest rank's breakdown. Collective.

    Args:
        memory: of this rank, as `MemoryMeter.summary` returned it.
    """
    memories = over_ranks(memory)
    fullest = max(memories, key=lambda memory: memory["allocated_peak_bytes"])
    return {
        key: max(memory[key] for memory in memories) if isinstance(value, int) else value
        for key, value in fullest.items()
    }


def _is_due(step: int, every: int | None, *, last: int, first: bool = False) -> bool:
    """Whether something is due after a step: each `every` steps and after the last; `first` = always at both ends."""
    if not every:
        return first and step in (1, last)
    return step % every == 0 or step == last or (first and step == 1)
