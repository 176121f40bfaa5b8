"""Optimizers: where their state lies, which parameters they take, and the learning rate."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardlab.errors import ConfigError
from shardlab.optimizer import make_optimizers, make_schedulers
from tests.training import batches_of, built_from, config_of, train_steps

RUN = ("model=mlp", "model.hidden_size=64", "data=random_classes", "train.steps=1", "train.micro_batch=4")
LLAMA = (
    "model=llama_tiny",
    "model.layers=2",
    "data=random_tokens",
    "data.seq_len=16",
    "train.micro_batch=1",
    "train.steps=2",
)


def state_numel(*overrides: str) -> tuple[int, int, set[torch.dtype]]:
    """Elements of Adam's first moments on this rank, of all parameters, and the state's dtypes."""
    config = config_of(*RUN, *overrides)
    built = built_from(config)
    built.step(batches_of(config)[0])
    moments = [state["exp_avg"] for optimizer in built.optimizers for state in optimizer.state.values()]
    numel = sum((m.to_local() if isinstance(m, DTensor) else m).numel() for m in moments)
    return numel, sum(p.numel() for p in built.model.parameters()), {m.dtype for m in moments}


@pytest.mark.parametrize(("strategy", "share"), [
    ("full_shard", 4), ("shard_grad_op", 4), ("shard_optimizer", 4), ("no_shard", 1), ("hybrid_shard", 2),
])  # fmt: skip
def test_each_rank_holds_its_share_of_the_optimizer_state(on_ranks, strategy, share):
    replicas = ("sharding.replicas=2",) if strategy == "hybrid_shard" else ()
    results = on_ranks(4)(state_numel, f"sharding={strategy}", *replicas)
    total = results[0][1]
    assert sum(numel for numel, _, _ in results) == total * 4 // share
    # 64 rows divide by 4, the 5 classes do not: the first ranks hold at most one row of fc2 more.
    assert max(numel for numel, _, _ in results) <= total / share + 65


@pytest.mark.parametrize(("precision", "dtype"), [
    ("fp32", torch.float32), ("bf16", torch.float32), ("fp16", torch.float32), ("bf16_autocast", torch.float32),
    ("bf16_pure", torch.bfloat16),
])  # fmt: skip
def test_optimizer_state_is_fp32_unless_bf16_pure_was_chosen(on_ranks, precision, dtype):
    assert on_ranks(2)(state_numel, f"precision={precision}")[0][2] == {dtype}


def muon_groups() -> tuple[set[str], set[str]]:
    built = built_from(config_of(*LLAMA, "optimizer=muon"))
    names = {id(p): name for name, p in built.model.named_parameters()}
    return tuple({names[id(p)] for g in optimizer.param_groups for p in g["params"]} for optimizer in built.optimizers)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(on_ranks):
    hidden, rest = on_ranks(2)(muon_groups)[0]
    attention, feed_forward = ("wq", "wk", "wv", "wo"), ("w1", "w2", "w3")
    assert {name.removeprefix("layers.")[2:] for name in hidden} == {
        *(f"attention.{name}.weight" for name in attention),
        *(f"feed_forward.{name}.weight" for name in feed_forward),
    }
    assert {"tok_embeddings.weight", "output.weight", "norm.weight", "layers.0.ffn_norm.weight"} <= rest


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_muon_trains_as_in_one_process(on_ranks, strategy):
    run = (*LLAMA, "optimizer=muon", "train.global_batch=2")
    reference = on_ranks(1)(train_steps, *run, "train.micro_batch=2")[0]
    trained = on_ranks(2)(train_steps, *run, f"sharding={strategy}")[0]
    torch.testing.assert_close(trained.losses, reference.losses, rtol=1e-4, atol=0)
    for name, weight in reference.weights.items():  # Newton-Schulz runs in bf16, with 8 bits
        torch.testing.assert_close(trained.weights[name], weight, rtol=0, atol=2**-7 * weight.abs().max().item())


def parameters() -> dict[str, torch.nn.Parameter]:
    return {"weight": torch.nn.Parameter(torch.ones(2, 2))}


@pytest.mark.parametrize(("config", "message"), [
    ({"_target_": "torch.optim.AdamX", "lr": 1.0}, "optimizer._target_=torch.optim.AdamX could not be made"),
    ({"_target_": "torch.optim.Adam", "lrr": 1.0}, "lrr"),
    ({"_target_": "torch.optim.Adam", "lr": -1.0}, "Invalid learning rate"),
    ({"lr": 1.0}, "optimizer._target_ is missing"),
    ({"_target_": "torch.optim.SGD", "fused": True}, "optimizer.fused=true: PyTorch's fused SGD takes no sharded"),
    ({"_target_": "torch.optim.Adam", "decay": "cosin"}, "optimizer.decay=cosin is none of constant, linear, cosine"),
    ({"_target_": "torch.optim.Adam", "warmup_steps": -1}, "optimizer.warmup_steps=-1"),
    ({"_target_": "torch.optim.Adam", "min_lr_ratio": 2}, "optimizer.min_lr_ratio=2"),
    ({"_target_": "torch.optim.Muon", "rest": {"_target_": "torch.optim.AdamW"}}, "repeated blocks"),
])  # fmt: skip
def test_optimizers_that_cannot_be_made_are_refused_in_one_line(config, message):
    with pytest.raises(ConfigError, match=message) as refused:
        make_optimizers(config, parameters(), [])
    assert "\n" not in str(refused.value)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        make_optimizers({"_target_": "torch.optim.Adam"}, {}, [])


def learning_rates(steps: int, **schedule) -> list[float]:
    optimizers = make_optimizers({"_target_": "torch.optim.SGD", "lr": 2.0}, parameters(), [])
    (scheduler,) = make_schedulers(schedule, optimizers, steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizers[0].step()
        scheduler.step()
    return rates


def test_the_learning_rate_warms_up_linearly_and_decays_to_its_floor():
    assert learning_rates(4, decay="constant") == [2.0] * 4
    assert learning_rates(6, warmup_steps=3, decay="constant") == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert learning_rates(5, decay="linear", min_lr_ratio=0.2) == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])
    cosine = learning_rates(5, decay="cosine", min_lr_ratio=0.0)
    assert cosine == pytest.approx([1 + math.cos(math.pi * i / 4) for i in range(5)], abs=1e-12)
    assert learning_rates(1, decay="cosine") == [2.0]
