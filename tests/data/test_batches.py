"""Which samples a rank gets, whatever the data set."""

from itertools import chain, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from shardlab.data import IGNORE_INDEX, batches, eval_batches
from shardlab.errors import ConfigError

# From Python 3.12 on, a fork of a process with threads warns; DataLoader workers are such forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Numbers(Dataset):
    """Sample i is (i, i % 7), and remembers which were asked for."""

    def __init__(self, size):
        self.size = size
        self.seen = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.seen.append(index)
        return torch.tensor([index, index]), torch.tensor(index % 7)


class Endless(Dataset):
    def __getitem__(self, index):
        return torch.tensor([index]), torch.tensor([index])


def rank_samples(dataset, *, seed=0, **kwargs):
    """Sample numbers of one rank: a list per step, micro-batches joined."""
    return [[int(x) for batch in step for x in batch.inputs[:, 0]] for step in batches(dataset, seed=seed, **kwargs)]


def global_samples(dataset, *, world_size, **kwargs):
    """Sample numbers of the global batches, from what each rank holds."""
    ranks = [rank_samples(dataset, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)]
    return [list(chain(*shares)) for shares in zip(*ranks, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    micro_batch=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    world_size=st.integers(1, 4),
    size=st.none() | st.integers(1, 50),
    seed=st.integers(0, 3),
    start_step=st.integers(0, 5),
)
def test_global_batch_is_the_same_however_it_is_divided(micro_batch, micro_batches, world_size, size, seed, start_step):
    dataset = Endless() if size is None else Numbers(size)
    common = {"seed": seed, "start_step": start_step, "steps": 3}
    divided = global_samples(
        dataset, micro_batch=micro_batch, micro_batches=micro_batches, world_size=world_size, **common
    )
    whole = micro_batch * micro_batches * world_size
    assert divided == global_samples(dataset, micro_batch=whole, micro_batches=1, world_size=1, **common)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40), global_batch=st.integers(1, 12), seed=st.integers(0, 3))
def test_each_epoch_visits_each_sample_once(size, global_batch, seed):
    steps = -(-3 * size // global_batch)
    shape = {"micro_batch": global_batch, "micro_batches": 1, "rank": 0, "world_size": 1}
    order = list(chain(*rank_samples(Numbers(size), seed=seed, steps=steps, **shape)))
    for epoch in range(3):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_order_changes_with_epoch_and_seed():
    first, second = rank_samples(Numbers(64), micro_batch=64, micro_batches=1, rank=0, world_size=1, steps=2)
    (other,) = rank_samples(Numbers(64), seed=1, micro_batch=64, micro_batches=1, rank=0, world_size=1, steps=1)
    assert first != second
    assert first != other
    assert first != sorted(first)


def test_data_without_length_is_read_at_the_position_itself():
    samples = rank_samples(Endless(), micro_batch=2, micro_batches=2, rank=1, world_size=3, start_step=10, steps=2)
    assert samples == [[124, 125, 126, 127], [136, 137, 138, 139]]


def test_late_start_reads_no_earlier_sample():
    dataset = Numbers(1000)
    shape = {"micro_batch": 2, "micro_batches": 2, "rank": 0, "world_size": 2}
    late = rank_samples(dataset, start_step=10**9, steps=2, **shape)
    assert sorted(dataset.seen) == sorted(chain(*late))

    everything = rank_samples(dataset, steps=8, **shape)
    assert rank_samples(dataset, start_step=5, steps=3, **shape) == everything[5:]
    endless = batches(dataset, seed=0, start_step=5, **shape)
    assert [int(x) for batch in next(endless) for x in batch.inputs[:, 0]] == everything[5]


def test_small_data_goes_round_within_a_global_batch():
    (samples,) = rank_samples(Numbers(3), micro_batch=9, micro_batches=1, rank=0, world_size=1, steps=1)
    assert sorted(samples) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_without_steps_there_is_no_end():
    endless = batches(Numbers(4), seed=0, micro_batch=2, micro_batches=3, rank=0, world_size=1)
    shapes = [[batch.inputs.shape for batch in step] for step in islice(endless, 10)]
    assert shapes == [[(2, 2)] * 3] * 10


def test_workers_change_nothing():
    shape = {"micro_batch": 2, "micro_batches": 2, "rank": 1, "world_size": 2, "steps": 6}
    assert rank_samples(Numbers(30), num_workers=2, **shape) == rank_samples(Numbers(30), **shape)


def test_loading_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(batches(Numbers(9), seed=0, micro_batch=2, micro_batches=1, rank=0, world_size=1, steps=3))
    list(eval_batches(Numbers(9), micro_batch=2, rank=0, world_size=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_empty_data_is_a_config_error_before_the_first_batch():
    with pytest.raises(ConfigError, match=r"Numbers holds no samples"):
        batches(Numbers(0), seed=0, micro_batch=1, micro_batches=1, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"Numbers holds no samples"):
        eval_batches(Numbers(0), micro_batch=1, rank=0, world_size=1)


def test_negative_workers_are_a_config_error():
    with pytest.raises(ConfigError, match=r"data\.num_workers=-1"):
        batches(Numbers(4), seed=0, micro_batch=1, micro_batches=1, rank=0, world_size=1, num_workers=-1)


def test_sample_that_is_no_pair_is_a_config_error():
    class Single(Numbers):
        def __getitem__(self, index):
            return {"inputs": torch.zeros(1)}

    with pytest.raises(ConfigError, match=r"Single must be a pair \(inputs, labels\)"):
        next(batches(Single(4), seed=0, micro_batch=1, micro_batches=1, rank=0, world_size=1))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40), micro_batch=st.integers(1, 5), world_size=st.integers(1, 4))
def test_evaluation_sees_each_sample_once_in_order_on_equal_batches(size, micro_batch, world_size):
    ranks = [
        list(eval_batches(Numbers(size), micro_batch=micro_batch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    counts = {len(rank) for rank in ranks}
    assert counts == {-(-size // (micro_batch * world_size))}
    seen = []
    for row in zip(*ranks, strict=True):
        for batch in row:
            assert batch.inputs.shape == (micro_batch, 2)
            valid = batch.labels != IGNORE_INDEX
            assert torch.equal(batch.labels[valid], batch.inputs[valid, 0] % 7)
            seen += batch.inputs[valid, 0].tolist()
    assert seen == list(range(size))


def test_evaluation_of_endless_data_needs_a_limit():
    with pytest.raises(ConfigError, match=r"has no end"):
        eval_batches(Endless(), micro_batch=2, rank=0, world_size=2)
    (batch,) = eval_batches(Subset(Endless(), range(4)), micro_batch=2, rank=1, world_size=2)
    assert batch.inputs.tolist() == [[2], [3]]
