"""The optimizer step: whose loss it differentiates, what it clips, what it skips."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardlab.models.mlp import MLP
from tests.training import HostReads, built_from, config_of, full_weights, train_steps

# Plain gradient descent with rate 1 and no clipping: the change of a weight is its gradient.
PLAIN = (
    "model=mlp",
    "data=random_classes",
    "optimizer=sgd",
    "optimizer.lr=1.0",
    "optimizer.momentum=0",
    "train.clip_norm=null",
)


def uneven_batch(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """16 samples of which the second half has few valid labels, and the last quarter none."""
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(16, 10, generator=generator), torch.randint(0, 5, (16,), generator=generator)
    labels[9:] = -100
    return inputs, labels


def share_of_batch(micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, labels = uneven_batch(dist.get_world_size())
    pieces = dist.get_world_size() * micro_batches
    pairs = list(zip(inputs.chunk(pieces), labels.chunk(pieces), strict=True))
    return pairs[dist.get_rank() * micro_batches : (dist.get_rank() + 1) * micro_batches]


def one_step_on_uneven_labels(strategy: str, reduce: str, micro_batches: int):
    built = built_from(config_of(*PLAIN, f"sharding={strategy}", f"accumulation.reduce={reduce}"))
    before = full_weights(built.model)
    output = built.step(share_of_batch(micro_batches))
    sums = torch.stack([output.loss_sum, output.valid, output.correct])
    dist.all_reduce(sums)
    after = full_weights(built.model)
    return sums.tolist(), output.grad_norm.item(), before, {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize(("strategy", "reduce", "micro_batches"), [
    ("full_shard", "every", 1), ("full_shard", "every", 2), ("full_shard", "last", 2),
    ("hybrid_shard", "every", 2), ("no_shard", "last", 2), ("shard_optimizer", "every", 1),
])  # fmt: skip
def test_loss_is_the_mean_over_all_valid_labels_of_all_ranks(on_ranks, strategy, reduce, micro_batches):
    (loss, valid, correct), norm, weights, change = on_ranks(4)(
        one_step_on_uneven_labels, strategy, reduce, micro_batches
    )[0]
    # Independently: plain autograd on the whole batch.
    model = MLP()
    model.load_state_dict(weights)
    inputs, labels = uneven_batch(1)
    logits = model(inputs)
    expected = F.cross_entropy(logits, labels)
    expected.backward()
    assert valid == 9
    assert correct == (logits.argmax(-1) == labels).sum().item()
    assert loss / valid == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(change[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert norm == pytest.approx(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item(), rel=1e-5)


def clipped_step(clip_norm: float):
    built = built_from(config_of(*PLAIN, f"train.clip_norm={clip_norm}"))
    before = full_weights(built.model)
    norm = built.step(share_of_batch(1)).grad_norm.item()
    after = full_weights(built.model)
    return norm, torch.cat([(before[name] - after[name]).flatten() for name in before]).norm().item()


@pytest.mark.parametrize("world_size", [1, 4])
def test_clipping_bounds_the_norm_of_the_whole_gradient(on_ranks, world_size):
    norm, change = on_ranks(world_size)(clipped_step, 1e-3)[0]
    assert norm > 1e-2
    assert change == pytest.approx(1e-3, rel=1e-3)
    _, unclipped = on_ranks(world_size)(clipped_step, 1e3)[0]
    assert unclipped == pytest.approx(norm, rel=1e-5)


def overflow_on_one_rank(precision: str, strategy: str):
    config = config_of(
        "model=mlp", "data=random_classes", "optimizer=adam", f"precision={precision}", f"sharding={strategy}"
    )
    built = built_from(config)
    good = share_of_batch(1)
    seen = []
    for step in range(4):
        inputs, labels = good[0]
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            inputs, labels = torch.full_like(inputs, torch.inf), torch.zeros_like(labels)
        before = full_weights(built.model)
        norm = built.step([(inputs, labels)]).grad_norm.item()
        after = full_weights(built.model)
        seen.append((norm, built.scaler.get_scale(), all(torch.equal(before[name], after[name]) for name in before)))
    return seen, all(p.isfinite().all().item() for p in full_weights(built.model).values())


@pytest.mark.parametrize("precision", ["fp16", "fp16_autocast"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_optimizer"])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_and_the_run_recovers(on_ranks, precision, strategy):
    results = on_ranks(2)(overflow_on_one_rank, precision, strategy)
    for seen, finite in results:
        norms, scales, unchanged = zip(*seen, strict=True)
        assert unchanged == (False, True, False, False)
        assert scales == (65536.0, 32768.0, 32768.0, 32768.0)
        assert not torch.tensor(norms[1]).isfinite()
        assert torch.tensor([norms[0], *norms[2:]]).isfinite().all()
        assert finite


@pytest.mark.parametrize("sharding", ["full_shard", "no_shard"])
def test_the_same_seed_gives_the_same_losses_bit_for_bit(on_ranks, sharding):
    run = (
        "model=llama_tiny",
        "model.layers=2",
        "data=random_tokens",
        "data.seq_len=32",
        "train.steps=3",
        f"sharding={sharding}",
    )
    first, second = (on_ranks(2)(train_steps, *run)[0] for _ in range(2))
    assert first.losses == second.losses
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    other = on_ranks(2)(train_steps, *run, "seed=1")[0]
    assert other.losses[0] != first.losses[0]


def step_that_reads_nothing():
    """Any read of a tensor's value on the host would wait for the device."""
    for precision in ("fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast"):
        built = built_from(config_of("model=mlp", "data=random_classes", f"precision={precision}"))
        built.step(share_of_batch(2))
        with HostReads() as host:
            built.step(share_of_batch(2))
        assert host.reads == [], f"precision={precision} reads a tensor on the host"


def test_a_step_never_waits_for_the_device(on_ranks):
    on_ranks(2)(step_that_reads_nothing)
