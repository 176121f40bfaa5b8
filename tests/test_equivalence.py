"""One seed and one global batch: every strategy trains the same model, at any world size."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy as FSDP1Strategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardlab.config import Strategy
from shardlab.models.mlp import MLP
from tests.training import (
    Trained,
    assert_all_equal,
    assert_same_training,
    batches_of,
    built_from,
    config_of,
    full_weights,
    train_steps,
)

# 19 hidden units: no dimension divides by 2 or 4, so every shard is uneven.
MLP_RUN = (
    "model=mlp",
    "model.hidden_size=19",
    "data=random_classes",
    "data.samples=256",
    "optimizer=adamw",
    "optimizer.warmup_steps=0",
    "train.steps=3",
    "train.global_batch=16",
)
LLAMA_RUN = (
    "model=llama_tiny",
    "model.dim=32",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=44",
    "data=random_tokens",
    "data.vocab_size=97",
    "model.vocab_size=97",
    "data.seq_len=16",
    "data.samples=64",
    "data.ignore_fraction=0.3",
    "optimizer=sgd",
    "train.steps=3",
    "train.global_batch=8",
)
STRATEGIES = [strategy.name for strategy in Strategy]
ACCUMULATIONS = {"none": 1, "reduce_every": 2, "reduce_last": 2}  # micro-batches per step


def overrides(run: tuple[str, ...], strategy: str, accumulation: str, world_size: int) -> tuple[str, ...]:
    batch = int(run[-1].split("=")[1])
    hybrid = ("sharding.replicas=2",) if strategy.startswith("hybrid") else ()
    micro_batch = batch // world_size // ACCUMULATIONS[accumulation]
    return (*run, f"sharding={strategy}", f"accumulation={accumulation}", f"train.micro_batch={micro_batch}", *hybrid)


@pytest.fixture(scope="module")
def single_process(on_ranks) -> dict[tuple[str, ...], Trained]:
    return {run: on_ranks(1)(train_steps, *overrides(run, "no_shard", "none", 1))[0] for run in (MLP_RUN, LLAMA_RUN)}


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("run", [MLP_RUN, LLAMA_RUN], ids=["mlp", "llama"])
def test_strategies_train_as_one_process_does(on_ranks, single_process, run, strategy, accumulation, world_size):
    results = on_ranks(world_size)(train_steps, *overrides(run, strategy, accumulation, world_size))
    assert_all_equal(results)
    assert_same_training(results[0], single_process[run])


FSDP1_NAMES = {
    "full_shard": FSDP1Strategy.FULL_SHARD,
    "shard_grad_op": FSDP1Strategy.SHARD_GRAD_OP,
    "no_shard": FSDP1Strategy.NO_SHARD,
    "hybrid_shard": FSDP1Strategy.HYBRID_SHARD,
    "hybrid_shard_zero2": FSDP1Strategy._HYBRID_SHARD_ZERO2,
}


def train_with_fsdp1(strategy: str, *run: str) -> Trained:
    """The same run by PyTorch's FSDP1, written by hand, from the weights that `build` gives."""
    config = config_of(*run)
    model = MLP(hidden_size=19)
    model.load_state_dict(full_weights(built_from(config).model))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if strategy.startswith("hybrid") else None
    wrapped = FSDP1(
        model,
        sharding_strategy=FSDP1_NAMES[strategy],
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        use_orig_params=True,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
    )
    arguments = {key: config.optimizer[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(wrapped.parameters(), **arguments)
    losses, norms = [], []
    for micro_batches in batches_of(config):
        total = torch.zeros(())
        for inputs, labels in micro_batches:
            loss = F.cross_entropy(wrapped(inputs), labels)  # equal numbers of labels: the mean of means is exact
            (loss / len(micro_batches)).backward()
            total += loss.detach() / len(micro_batches)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
        norms.append(wrapped.clip_grad_norm_(config.train.clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    with FSDP1.summon_full_params(wrapped):
        weights = {
            name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in wrapped.named_parameters()
        }
    return Trained(losses, norms, weights)


@pytest.mark.parametrize("strategy", FSDP1_NAMES)
def test_strategies_train_as_fsdp1_does(on_ranks, strategy):
    run = overrides(MLP_RUN, strategy, "reduce_every", 4)
    ours, theirs = on_ranks(4)(train_steps, *run)[0], on_ranks(4)(train_with_fsdp1, strategy, *run)[0]
    assert_same_training(ours, theirs)
