"""Units and meshes: what patterns mean, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardlab.config import ShardingConfig, Strategy
from shardlab.errors import ConfigError
from shardlab.sharding import degenerate_mesh, find_units, match_modules, mesh_shape
from tests.training import batches_of, built_from, config_of, full, train_steps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def names(patterns, model=None):
    return [unit.names for unit in find_units(model or Model(), patterns, key="model.units")]


def test_a_star_stays_within_one_name_component():
    assert [name for name, _ in match_modules(Model(), "layers.*")] == ["layers.0", "layers.1", "layers.2"]
    assert [name for name, _ in match_modules(Model(), "layers.*.m*")] == [f"layers.{i}.mlp" for i in range(3)]
    assert match_modules(Model(), "*.mlp") == []


def test_a_nested_list_is_one_unit():
    assert names(["embed", "layers.*", ["norm", "head"]]) == [
        ("embed",), ("layers.0",), ("layers.1",), ("layers.2",), ("norm", "head"),
    ]  # fmt: skip
    assert names([["layers.*"]]) == [("layers.0", "layers.1", "layers.2")]


@pytest.mark.parametrize(("patterns", "message"), [
    (["layer.*"],
    r"model.units: the pattern 'layer.\*' matches no module; the model has embed, layers, layers.\*, norm, head"),
    (["layers.*", "layers.1"], "matches the module layers.1 twice"), ([["norm", "head"], "norm"],
    "matches the module norm twice"), ([["norm", ["head"]]], "one level deep"),
    ([3], "one level deep"),
])  # fmt: skip
def test_patterns_that_make_no_sense_are_refused(patterns, message):
    with pytest.raises(ConfigError, match=message):
        names(patterns)


def test_a_tied_parameter_must_lie_in_one_unit():
    tied = Model(tied=True)
    with pytest.raises(ConfigError, match=r"embed.weight and head.weight are one tied parameter in two units"):
        names(["embed", "layers.*", "head"], tied)
    with pytest.raises(ConfigError, match="tied"):
        names(["layers.*", "head"], tied)
    names(["layers.*", ["embed", "norm", "head"]], tied)
    names(["layers.*"], tied)


@pytest.mark.parametrize(("strategy", "replicas", "shape"), [
    ("full_shard", "auto", (8,)), ("shard_grad_op", "auto", (8,)), ("hybrid_shard", 2, (2, 4)),
    ("hybrid_shard_zero2", 8, (8, 1)), ("no_shard", "auto", (8, 1)), ("shard_optimizer", "auto", (8, 1)),
])  # fmt: skip
def test_meshes(strategy, replicas, shape):
    assert mesh_shape(ShardingConfig(strategy=Strategy[strategy], replicas=replicas), 8) == shape


def test_a_degenerate_mesh_is_told():
    def told(replicas, name="hybrid_shard"):
        return degenerate_mesh(ShardingConfig(strategy=Strategy[name], replicas=replicas), 4)

    assert told(2) is None
    assert "is full_shard" in told(1)
    assert "is shard_grad_op" in told(1, "hybrid_shard_zero2")
    assert "is no_shard" in told(4)


LLAMA = (
    "model=llama_tiny",
    "model.layers=3",
    "data=random_tokens",
    "data.seq_len=16",
    "train.micro_batch=1",
    "train.steps=1",
)


def unsharded_after_forward(*overrides: str) -> set[str]:
    """Names of the FSDP modules whose parameters are still gathered when forward has ended."""
    config = config_of(*LLAMA, *overrides)
    built = built_from(config)
    inputs, _ = batches_of(config)[0][0]
    built.model(inputs)
    states = {
        name: module._get_fsdp_state() for name, module in built.model.named_modules() if isinstance(module, FSDPModule)
    }
    return {name for name, s in states.items() if any(g.is_unsharded for g in s._fsdp_param_groups)}


LAYERS = {"layers.0", "layers.1", "layers.2"}
ALL = LAYERS | {"tok_embeddings", "norm", "output"}


@pytest.mark.parametrize(("overrides", "gathered"), [
    (["sharding=full_shard"], set()),
    (["sharding=shard_grad_op"], ALL),
    (["sharding=full_shard", "sharding.reshard_last_unit=false"], {"layers.2"}),
    (["sharding=shard_grad_op", "sharding.reshard_last_unit=true"], ALL - {"layers.2"}),
    (["sharding=full_shard", "sharding.reshard_after_forward=false"], ALL),
    (["sharding=no_shard"], set()),
    (["sharding=no_shard", "sharding.reshard_after_forward=false"], ALL),
    (["sharding=full_shard", "sharding.units=[layers.*]"], {""}),
    (["sharding=full_shard", "sharding.units=[layers.*]", "sharding.reshard_root=true"], set()),
])  # fmt: skip
def test_what_stays_gathered_after_forward(on_ranks, overrides, gathered):
    assert on_ranks(2)(unsharded_after_forward, *overrides)[0] == gathered


def test_partial_resharding_trains_as_full_resharding_does(on_ranks):
    whole, part = (
        on_ranks(4)(train_steps, *LLAMA, f"sharding.reshard_after_forward={value}")[0] for value in ("true", "2")
    )
    torch.testing.assert_close(part.losses, whole.losses, rtol=1e-6, atol=0)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(part.weights[name], weight)


def tied_training(*overrides: str):
    config = config_of(*LLAMA, "train.steps=3", "model.tie_embeddings=true", "model.units=[layers.*]", *overrides)
    built = built_from(config)
    assert built.model.output.weight is built.model.tok_embeddings.weight
    for micro_batches in batches_of(config):
        built.step(micro_batches)
    assert built.model.output.weight is built.model.tok_embeddings.weight
    return full(built.model.output.weight).detach().clone(), len(list(built.model.parameters()))


@pytest.mark.parametrize("strategy", [s.name for s in Strategy])
def test_tied_embeddings_train_as_in_one_process(on_ranks, strategy):
    reference, count = on_ranks(1)(tied_training, "train.global_batch=4", "train.micro_batch=4")[0]
    replicas = ("sharding.replicas=2",) if strategy.startswith("hybrid") else ()
    for weight, same_count in on_ranks(4)(tied_training, "train.global_batch=4", f"sharding={strategy}", *replicas):
        assert same_count == count
        torch.testing.assert_close(weight, reference, rtol=1e-4, atol=1e-5)
