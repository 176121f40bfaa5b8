"""Runs the trainer's own `build` and `step` on fake tensors, a fake process group and a simulated device."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardlab.build import build
from shardlab.config import Config
from shardlab.planner.device import install
from shardlab.sharding import make_mesh
from shardlab.targets import make
from shardlab.telemetry import WINDOW_STEPS, Ledger, StepCost, StepCounter


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
    device = torch.device("cpu") if on_cpu else install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        mesh = make_mesh(config.sharding, device_type=device.type, world_size=world_size)
        sample = _sample(config)
        # Real tensors may meet fake ones: FSDP2 and DTensor keep a few small ones of their own.
        with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
            ledger, counter = Ledger(device, fake_mode=fake_mode), StepCounter()
            with ledger:
                built = build(config, device=device, mesh=mesh)
            ledger.watch(built.model, built.optimizers)
            built.model.train()
            for step in range(min(WINDOW_STEPS, config.train.steps)):
                batches = [_batch(sample, config.train.micro_batch) for _ in range(config.accumulation.steps or 1)]
                with ledger:
                    ledger.begin_step([tensor for batch in batches for tensor in batch])
                    if step == 0:
                        with counter:
                            built.step(batches)
                    else:
                        built.step(batches)
                del batches
        return Simulation(ledger, counter.cost)
    finally:
        dist.destroy_process_group()


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
