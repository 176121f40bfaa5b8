"""The loop around the step."""

import pytest
import torch

from shardlab.data import batches
from shardlab.errors import ConfigError
from tests.training import checked_model, measured_memory

RUN = (
    "model=llama_tiny",
    "model.layers=2",
    "data=random_tokens",
    "data.seq_len=16",
    "train.micro_batch=1",
    "train.steps=4",
)


@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_an_evaluation_leaves_no_parameters_gathered(on_ranks, strategy):
    without, with_evaluation = (
        on_ranks(2)(measured_memory, *RUN, f"sharding={strategy}", f"train.eval_every={every}")[0] for every in (0, 2)
    )
    assert with_evaluation["parameters_bytes"] == without["parameters_bytes"]
    assert with_evaluation["breakdown"] == without["breakdown"]


def test_a_sequence_longer_than_the_model_is_refused_before_it_runs(on_ranks):
    with pytest.raises(ConfigError, match="data.seq_len=2000 is longer than model.max_seq_len=1024"):
        on_ranks(1)(checked_model, "model=llama_tiny", "data=random_tokens", "data.seq_len=2000")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(1), torch.zeros((), dtype=torch.int64)


def test_an_iterable_dataset_is_refused():
    with pytest.raises(ConfigError, match="Stream is an IterableDataset: make it map-style"):
        batches(Stream(), seed=0, micro_batch=1, micro_batches=1, rank=0, world_size=1)
