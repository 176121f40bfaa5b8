"""The lecture's SimpleModel."""

import pytest
import torch

from shardlab.errors import ConfigError
from shardlab.models import MLP


def test_mlp_is_the_lectures_formula():
    model = MLP()
    x = torch.randn(32, 10)
    weights = dict(model.named_parameters())
    assert sorted(weights) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    hidden = (x @ weights["fc1.weight"].T + weights["fc1.bias"]).clamp(min=0)  # (32, 20)
    torch.testing.assert_close(model(x), hidden @ weights["fc2.weight"].T + weights["fc2.bias"])


def test_mlp_has_the_lectures_325_parameters():
    assert sum(p.numel() for p in MLP().parameters()) == 10 * 20 + 20 + 20 * 5 + 5


def test_mlp_after_to_empty_is_initialised_as_a_new_one(tools):
    torch.manual_seed(0)
    expected = MLP().state_dict()
    torch.manual_seed(0)
    for name, value in tools.through_meta(MLP).state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_mlp_refuses_a_size_below_one():
    with pytest.raises(ConfigError, match=r"model\.hidden_size=0"):
        MLP(hidden_size=0)
