"""A model and data of the user's own, by `_target_`."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from shardlab.models.mlp import MLP
from tests.training import config_of, measured_memory, train_steps


class Net(nn.Module):
    """Repeated blocks, and a frozen layer."""

    def __init__(self, depth: int, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.blocks[0].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


class Points(Dataset):
    def __init__(self, split: str, size: int = 64):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        return torch.full((8,), index / self.size), torch.tensor(index % 3)


CUSTOM = (
    "model=custom", "model._target_=tests.test_custom.Net", "+model.depth=3", "model.units=[blocks.*]",
    "data=custom", "data._target_=tests.test_custom.Points", "+data.size=48",
    "train.steps=3", "train.global_batch=8", "train.eval_every=0",
)  # fmt: skip


@pytest.mark.parametrize("activation", ["none", "full"])
def test_a_model_and_data_of_ones_own_train_on_any_number_of_ranks(on_ranks, activation):
    one = on_ranks(1)(train_steps, *CUSTOM, f"activation={activation}", "train.micro_batch=8")[0]
    two = on_ranks(2)(train_steps, *CUSTOM, f"activation={activation}", "train.micro_batch=4")[0]
    torch.testing.assert_close(two.losses, one.losses, rtol=1e-5, atol=0)
    assert torch.equal(two.weights["blocks.0.weight"], one.weights["blocks.0.weight"])  # frozen


def test_frozen_parameters_have_no_gradients_and_no_state(on_ranks):
    memory = on_ranks(1)(measured_memory, *CUSTOM)[0]
    trained = 2 * (8 * 8 + 8) + 8 * 3 + 3
    assert memory["parameters_bytes"] == 4 * (trained + 8 * 8 + 8)
    assert memory["gradients_bytes"] == 4 * trained
    assert memory["optimizer_bytes"] == 8 * trained + 4 * 6  # one step counter for each of 6 tensors


def test_a_target_that_is_missing_is_named():
    with pytest.raises(Exception, match="model._target_"):
        config_of("model=custom", world_size=1)
    assert config_of("model=custom", f"model._target_={MLP.__module__}.MLP", world_size=1).model["units"] == []
