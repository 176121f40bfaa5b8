"""Builds and trains from overrides, as `train.py` does, without its display: what tests of correctness share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.build import Built, build, make_model
from shardlab.config import Config, parse
from shardlab.data import Batch, batches
from shardlab.device import Cpu, Device
from shardlab.distributed import Ranks, from_first_rank
from shardlab.interrupt import Interrupt
from shardlab.sharding import make_mesh
from shardlab.telemetry import Ledger
from shardlab.telemetry.prediction import Prediction
from shardlab.tracking import Tracker
from shardlab.trainer import Datasets, Trainer

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def config_of(*overrides: str, world_size: int | None = None, nodes: int = 1) -> Config:
    """The config that these command-line overrides give. Without a world size to be called by all ranks."""
    if world_size is None and dist.get_world_size() > 1:
        # Hydra takes longer to compose it than most tests do for a step: one rank does it for all.
        config = from_first_rank(_config_or_error(overrides, nodes) if dist.get_rank() == 0 else None)
        if isinstance(config, Exception):
            raise config
        assert config is not None
        return config
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides))
    return parse(cfg, world_size=world_size or dist.get_world_size(), nodes=nodes)


def _config_or_error(overrides: Sequence[str], nodes: int) -> Config | Exception:
    try:
        return config_of(*overrides, world_size=dist.get_world_size(), nodes=nodes)
    except Exception as error:
        return error


def built_from(config: Config) -> Built:
    mesh = make_mesh(config.sharding, device_type="cpu", world_size=dist.get_world_size())
    return build(config, device=CPU, mesh=mesh)


def batches_of(config: Config) -> list[list[Batch]]:
    """This rank's micro-batches, step by step."""
    source = batches(
        Datasets(config).train,
        seed=config.seed,
        micro_batch=config.train.micro_batch,
        micro_batches=config.accumulation.steps or 1,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        steps=config.train.steps,
    )
    return list(source)


class HostReads(TorchDispatchMode):
    """Notes each read of a tensor's value on the host, which on a GPU would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads.append(func)
        return func(*args, **(kwargs or {}))


@dataclass
class Trained:
    """What a short run came to; equal on all ranks."""

    losses: list[float]  # mean over all valid labels, before each update
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]  # full tensors, at the end


def train_steps(*overrides: str) -> Trained:
    """Trains as configured on the ranks that run this."""
    config = config_of(*overrides)
    built = built_from(config)
    losses, norms = [], []
    for micro_batches in batches_of(config):
        output = built.step(micro_batches)
        sums = torch.stack([output.loss_sum, output.valid.float()]).double()
        dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
        norms.append(output.grad_norm.item())
    return Trained(losses, norms, full_weights(built.model))


def checked_model(*overrides: str) -> None:
    """Makes model and data, and checks that they go together."""
    config = config_of(*overrides)
    Datasets(config).check_model(make_model(config.model))


def recorded_run(*overrides: str) -> Ledger:
    """The ledger of a whole run, kept as the trainer keeps it in the memory window."""
    config = config_of(*overrides)
    ledger = Ledger(CPU)
    with ledger:
        built = built_from(config)
    ledger.watch(built.model, built.optimizers)
    for micro_batches in batches_of(config):
        with ledger:
            ledger.begin_step(micro_batches)
            built.step(micro_batches)
    ledger.close()  # before the model goes
    return ledger


def trainer_of(
    *overrides: str, device: Device | None = None, tracker: Tracker | None = None, prediction: Prediction | None = None
) -> Trainer:
    """The trainer itself, on the ranks that run this; without a tracker it tells nobody."""
    config = config_of(*overrides)
    mesh = make_mesh(config.sharding, device_type="cpu", world_size=dist.get_world_size())
    ledger = Ledger(CPU)
    with ledger:  # after the mesh, which is none of the run's memory
        built = build(config, device=CPU, mesh=mesh)
    return Trainer(
        config,
        built=built,
        ledger=ledger,
        datasets=Datasets(config),
        device=device or Cpu(CPU),
        place=Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size()),
        tracker=tracker or Tracker(Path()),
        interrupt=Interrupt(),
        prediction=prediction,
    )


def measured_memory(*overrides: str) -> dict[str, Any]:
    """What the trainer itself measures on this rank in the memory window: the `memory` of its summary."""
    trainer = trainer_of(*overrides)
    trainer.fit()
    return trainer.figures()["memory"]


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_training(got: Trained, expected: Trained, *, rtol: float = 1e-5) -> None:
    """Losses, norms and weights agree to rounding: relative to the largest entry of each tensor."""
    torch.testing.assert_close(got.losses, expected.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(got.grad_norms, expected.grad_norms, rtol=rtol, atol=0)
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=rtol * weight.abs().max().item(), msg=name)


def assert_all_equal(results: Sequence[Trained]) -> None:
    """All ranks agree, to the bit."""
    for other in results[1:]:
        assert other.losses == results[0].losses
        assert all(torch.equal(other.weights[name], weight) for name, weight in results[0].weights.items())
