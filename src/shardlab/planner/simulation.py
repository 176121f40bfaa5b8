"""Runs the trainer's own `build` and `step` on fake tensors, a fake process group and a simulated device."""

import gc
import logging
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardlab import telemetry
from shardlab.build import build, make_model
from shardlab.config import Config
from shardlab.errors import ConfigError, describe
from shardlab.planner.blocks import Count, lengthen, shorten
from shardlab.planner.device import error_in_backward, install
from shardlab.planner.fake_mode import QuickFakeMode
from shardlab.planner.steps import RepeatedMicroBatches, repeat_step
from shardlab.sharding import make_mesh
from shardlab.targets import make
from shardlab.telemetry import WINDOW_STEPS, Ledger, StepCost, communicated

log = logging.getLogger(__name__)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what it raises, too


@dataclass(frozen=True)
class Simulation:
    """What rank 0 would have done in the memory window."""

    ledger: Ledger
    cost: StepCost  # of one step


def simulate(config: Config, *, world_size: int, on_cpu: bool) -> Simulation:
    """Simulates rank 0 of a run from before `build` to the end of its window.

    Starts the fake process group of this process, which must have none, and leaves it.

    Args:
        config: as `config.parse` returned it for this world size.
        world_size: ranks of the run.
        on_cpu: whether it is to run on CPUs; else on simulated GPUs.
    """
    accelerator = install()  # always: autograd cannot be told of a device after its first backward
    device = torch.device("cpu") if on_cpu else accelerator
    gc.freeze()  # what imports made is no garbage: the ledger's collections need not look through it
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        mesh = make_mesh(config.sharding, device_type=device.type, world_size=world_size)
        # Real tensors may meet fake ones: FSDP2 and DTensor keep a few small ones of their own.
        with QuickFakeMode(allow_non_fake_inputs=True) as fake_mode:
            model = make_model(config.model)
            record = None
            if config.plan.repeat and (blocks := shorten(model, config)):
                with suppress(Exception):  # of a model that does not run without all of its blocks
                    record = lengthen(*_simulate(config, model, device, mesh, fake_mode), blocks)
                model = model if record else make_model(config.model)
            ledger, counts = record or _simulate(config, model, device, mesh, fake_mode)
    finally:
        gc.unfreeze()
        dist.destroy_process_group()
    cost = StepCost()
    for count in counts:
        cost.add(count.key, count.amount)
    return Simulation(ledger, cost)


def _simulate(
    config: Config, model: nn.Module, device: torch.device, mesh: DeviceMesh, fake_mode: FakeTensorMode
) -> tuple[Ledger, Sequence[Count]]:
    """Trains a model for the steps of the window. Returns the record, and what the first step's work was."""
    sample = _sample(config)
    ledger = Ledger(device, fake_mode=fake_mode)
    counter = _Counter(ledger)
    try:
        with ledger:
            built = build(config, model=model, device=device, mesh=mesh)
        ledger.watch(built.model, built.optimizers)
        built.model.train()
        if config.plan.repeat:
            quick = RepeatedMicroBatches(built.step.micro_batch, ledger, counter.repeat)
            built.step.micro_batch = quick  # type: ignore[assignment, method-assign]
        for step in range(min(WINDOW_STEPS, config.train.steps)):
            if step > 1 and config.plan.repeat and repeat_step(ledger):
                continue
            batches = [_batch(sample, config.train.micro_batch) for _ in range(config.accumulation.steps or 1)]
            with ledger:
                ledger.begin_step(batches)
                ledger.on_collective = counter.count if step == 0 else None
                built.step(batches)
            del batches
    except ConfigError:
        raise
    except Exception as error:
        cause = error_in_backward() or error
        log.info("the simulation failed", exc_info=cause)
        raise ConfigError(_problem(cause, ledger)) from cause
    finally:
        ledger.close()
    return ledger, counter.counts


def _problem(error: BaseException, ledger: Ledger) -> str:
    """Why a model cannot be planned, with the operator and the module that stopped it, and the line that called it."""
    operator, module = ledger.failed_at or ("its Python code", "")
    where = f"model: {operator} in {module or 'the model itself'}{_line_of(error)} cannot be planned"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)) or ".numpy()" in str(error):
        return (
            f"{where}: what it returns depends on values, as .item() and a branch on a tensor do, and a plan has only "
            "shapes; write it without, such as with torch.where"
        )
    advice = "do model and data go together?" if ledger.failed_at else "train.log has the traceback"
    return f"{where} ({describe(error)}): {advice}"


def _line_of(error: BaseException) -> str:
    """The innermost line of code that led to an error and is neither PyTorch's nor what watches the operators."""
    others = [Path(torch.__file__).parent, *(Path(file).parent for file in (telemetry.__file__, __file__))]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in others)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


class _Counter:
    """What the collectives of a step communicate, and when."""

    def __init__(self, ledger: Ledger):
        self.counts: list[Count] = []
        self._ledger = ledger

    def count(self, func: OpOverload, args: Sequence[Any], out: Any) -> None:
        if sent := communicated(func, args, out):
            collective, tensor = sent
            entry = self._ledger.entry_of(tensor)
            self.counts.append(Count(len(self._ledger.events), collective, tensor.nbytes, entry))

    def repeat(self, start: int, end: int) -> None:
        """Counts once more what was counted between two events, which have been recorded again behind them."""
        inside = [count for count in self.counts if start <= count.position < end]
        self.counts += [replace(count, position=count.position + end - start) for count in inside]


def _sample(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one sample, for their shapes; data that has a `seq_len` need not be read for that."""
    if seq_len := config.data.get("seq_len"):
        tokens = torch.zeros(seq_len, dtype=torch.int64)
        return tokens, tokens
    inputs, labels = make("data", config.data, without=["num_workers"], split="train")[0]
    return torch.as_tensor(inputs), torch.as_tensor(labels)


def _batch(sample: tuple[torch.Tensor, torch.Tensor], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = (torch.empty((size, *part.shape), dtype=part.dtype) for part in sample)
    return inputs, labels
