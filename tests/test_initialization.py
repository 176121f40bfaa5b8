"""Initial weights: from the seed, the name and the rows alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.errors import ConfigError
from shardlab.initialization import initialize
from tests.training import CPU, built_from, config_of, full_weights

LLAMA = (
    "model=llama_tiny",
    "model.layers=2",
    "model.dim=48",
    "model.ffn_dim=70",
    "model.vocab_size=101",
    "data=random_tokens",
)


def initial_weights(*overrides: str):
    return full_weights(built_from(config_of(*overrides)).model)


def test_weights_are_equal_at_any_world_size_and_strategy(on_ranks):
    reference = on_ranks(1)(initial_weights, *LLAMA)[0]
    for world_size, strategy in [
        (2, "full_shard"),
        (4, "full_shard"),
        (4, "hybrid_shard"),
        (2, "no_shard"),
        (4, "shard_optimizer"),
    ]:
        replicas = ("sharding.replicas=2",) if strategy == "hybrid_shard" else ()
        for weights in on_ranks(world_size)(initial_weights, *LLAMA, f"sharding={strategy}", *replicas):
            assert weights.keys() == reference.keys()
            for name, weight in reference.items():
                assert torch.equal(weights[name], weight), (world_size, strategy, name)


def test_weights_differ_by_seed_by_name_and_by_row(on_ranks):
    weights, others = (on_ranks(2)(initial_weights, *LLAMA, f"seed={seed}")[0] for seed in (0, 1))
    wq = weights["layers.0.attention.wq.weight"]
    assert not torch.equal(wq, others["layers.0.attention.wq.weight"])
    assert not torch.equal(wq, weights["layers.1.attention.wq.weight"])
    assert len(wq.unique(dim=0)) == len(wq)


def test_weights_have_the_distribution_that_reset_parameters_asks_for(on_ranks):
    weight = on_ranks(4)(initial_weights, "model=mlp", "model.hidden_size=4000", "data=random_classes")[0]["fc1.weight"]
    bound = 10**-0.5  # nn.Linear: uniform within 1 / sqrt(in_features)
    assert weight.abs().max() <= bound
    assert weight.mean().abs() < 0.01 * bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, torch.distributed.tensor.DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            # DTensor works out its layouts on fake tensors of the global shape, which are no memory.
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def largest_tensor_while_building() -> int:
    config = config_of("model=mlp", "model.hidden_size=4000", "model.input_size=64", "data=random_classes")
    with LargestTensor() as largest:
        built_from(config)
    return largest.numel


def test_no_rank_ever_makes_a_full_tensor(on_ranks):
    # A rank holds 1/4 of the largest parameter; what else it makes is smaller than that.
    assert on_ranks(4)(largest_tensor_while_building) == [4000 * 64 // 4] * 4


class PaddedEmbedding(nn.Module):
    """Its embedding zeroes one row, and it computes a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=7)
        self.register_buffer("table", torch.empty(5), persistent=False)

    def reset_parameters(self):
        self.table.copy_(torch.arange(5.0))


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6))

    def reset_parameters(self):
        nn.init.normal_(self.weight.view(2, 2, 6))


def initialized(cls: type[nn.Module]):
    with torch.device("meta"):
        model = cls()
    fully_shard(
        model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    )
    initialize(model, device=CPU, parameter_device=CPU, seed=0)
    return full_weights(model), dict(model.named_buffers())


@pytest.mark.parametrize("world_size", [1, 4])
def test_rows_that_a_module_sets_one_by_one_and_buffers_are_set(on_ranks, world_size):
    for weights, buffers in on_ranks(world_size)(initialized, PaddedEmbedding):
        assert weights["embed.weight"][7].tolist() == [0.0] * 4
        assert weights["embed.weight"].abs().sum(1).count_nonzero() == 9
        assert buffers["table"].tolist() == [0, 1, 2, 3, 4]


def test_a_parameter_that_nothing_initializes_is_refused(on_ranks):
    with pytest.raises(ConfigError, match=r"no reset_parameters\(\) sets scale"):
        on_ranks(2)(initialized, Forgetful)


def test_random_numbers_for_a_part_of_a_parameter_are_refused(on_ranks):
    with pytest.raises(ConfigError, match="weight is initialised in parts"):
        on_ranks(1)(initialized, Partly)
