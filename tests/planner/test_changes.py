"""Changes that may save memory: which are proposed, and how they are put on a command line."""

import shlex

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from shardlab.config import ActivationPolicy, Config, Strategy, parse
from shardlab.errors import ConfigError
from shardlab.planner.changes import Candidate, apply, candidates, composed_with
from shardlab.planner.cluster import ClusterConfig, resolve
from tests.training import ROOT


@pytest.fixture
def job():
    """Composes a config as `train.py` does for its job, which can then be composed anew."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def composed(*overrides: str):
            cfg = compose("config", overrides=list(overrides), return_hydra_config=True)
            with open_dict(cfg):
                cfg.hydra.runtime.output_dir = ""
            HydraConfig.instance().set_config(cfg)
            del cfg.hydra
            return cfg

        yield composed
    HydraConfig.instance().cfg = None


def read(cfg) -> tuple[Config, ClusterConfig]:
    cluster = resolve(ClusterConfig(**{**cfg.cluster}), environ={}, allow_cuda=False)
    return parse(cfg, world_size=cluster.world_size, nodes=cluster.nodes or 1), cluster


def proposed(cfg) -> list[Candidate]:
    config, cluster = read(cfg)
    return candidates(config, cluster, composed=cfg, groups=HydraConfig.get().runtime.choices)


def texts(cfg) -> set[str]:
    return {" ".join(candidate.overrides) for candidate in proposed(cfg)}


# ---- which are proposed


@pytest.mark.parametrize(("overrides", "expected"), [
    ("", {
        "activation=full", "activation=selective", "train.micro_batch=4 train.global_batch=16", "precision=bf16",
        "cluster.nodes=2",
    }),
    ("cluster=h100_80gb activation=selective precision=bf16 train.micro_batch=1", {
        "activation=full", "precision=bf16_pure", "cluster.nodes=2", "sharding.cpu_offload=true",
        "cluster.alloc_conf=expandable_segments:True",
    }),
    ("cluster=h100_80gb activation=full precision=bf16_pure train.micro_batch=9 accumulation.steps=2 "
     "sharding.cpu_offload=true cluster.alloc_conf=expandable_segments:True", {
        "train.micro_batch=3 train.global_batch=144 accumulation.steps=null", "cluster.nodes=2",
    }),
    ("cluster=h100_80gb activation=full precision=bf16_pure train.micro_batch=1 sharding=hybrid_shard_zero2 "
     "sharding.replicas=4 cluster.alloc_conf=max_split_size_mb:64", {
        "sharding=full_shard sharding.replicas=auto", "sharding=hybrid_shard", "sharding.cpu_offload=true",
        "cluster.alloc_conf='max_split_size_mb:64,expandable_segments:True'",
    }),
    ("activation=full precision=bf16_pure train.micro_batch=1 sharding=no_shard accumulation=reduce_last", {
        "sharding=full_shard", "sharding=shard_grad_op", "sharding=shard_optimizer", "accumulation.reduce=every",
    }),
    ("activation=full precision=bf16_pure train.micro_batch=1 train.global_batch=2", set()),
    ("activation=full precision=bf16_pure train.micro_batch=1 sharding.reshard_after_forward=false "
     "sharding.units=[layers.*]", {
        "sharding.reshard_after_forward=true", "sharding.units=null", "cluster.nodes=2",
    }),
])  # fmt: skip
def test_what_applies_is_proposed_and_nothing_else(job, overrides, expected):
    assert texts(job(*shlex.split(overrides))) == expected


def test_one_rank_has_nobody_to_shard_with(job):
    assert not any("sharding" in text for text in texts(job("sharding=no_shard", "cluster.gpus_per_node=1")))


def test_without_groups_to_choose_from_single_keys_are_left(job):
    cfg = job()
    config, cluster = read(cfg)
    found = candidates(config, cluster, composed=cfg, groups={})
    assert found
    assert all("." in override for candidate in found for override in candidate.overrides)


@pytest.mark.parametrize("overrides", [
    "", "cluster=h200 sharding=hybrid_shard_zero2 sharding.replicas=4 accumulation=reduce_last",
    "cluster=h200 sharding=no_shard accumulation.steps=3 cluster.alloc_conf=max_split_size_mb:64",
    "cluster=h200 train.global_batch=128 sharding.units=[layers.*] precision=bf16",
])  # fmt: skip
def test_all_that_is_proposed_composes_and_changes_the_run(job, overrides):
    cfg = job(*overrides.split())
    before = read(cfg)
    for candidate in proposed(cfg):
        after = read(composed_with(candidate.overrides))
        assert after != before, candidate.overrides
        ranks = after[1].world_size // before[1].world_size
        if cfg.train.global_batch is None:
            assert after[0].train.global_batch == ranks * before[0].train.global_batch, candidate.overrides
        else:
            assert after[0].train.global_batch == before[0].train.global_batch, candidate.overrides


def test_what_may_save_most_of_the_peak_comes_first():
    breakdown = {"activations": 90, "optimizer": 10}
    assert Candidate((), {"activations": 0.5, "inputs": 1.0}).expected_bytes(breakdown, 50) == 45
    assert Candidate((), {"optimizer": 0.5, "fragmentation": 1.0}).expected_bytes(breakdown, 50) == 55


# ---- on the command line


def test_a_change_replaces_what_contradicts_it():
    line = ["mode=plan", "activation=selective", "activation.policy=none", "activation.blocks=[layers.*]", "+a.b=1"]
    assert apply(line, ["activation=full"]) == [
        "mode=plan",
        "activation.blocks=[layers.*]",
        "+a.b=1",
        "activation=full",
    ]
    assert apply(line, ["a.b=2"]) == [*line[:-1], "a.b=2"]
    assert apply(["precision.param_dtype=float16", "seed=1"], ["precision=bf16"]) == ["seed=1", "precision=bf16"]


@pytest.mark.parametrize("given", [
    "activation=selective", "activation.policy=none", "experiment=published/torchtitan_llama3_8b_8xh100",
])  # fmt: skip
def test_a_change_holds_against_the_command_line_and_the_experiment(job, given):
    job(given, "train.steps=7")
    changed = composed_with(["activation=full"])
    assert changed.activation.policy is ActivationPolicy.full
    assert changed.train.steps == 7


def test_a_change_of_strategy_keeps_the_other_keys_of_the_group(job):
    job("sharding=hybrid_shard", "sharding.replicas=2", "sharding.units=[layers.*]")
    changed = composed_with(["train.micro_batch=3"], ["sharding=full_shard", "sharding.replicas=auto"])
    assert (changed.sharding.strategy, list(changed.sharding.units)) == (Strategy.full_shard, ["layers.*"])
    assert changed.train.micro_batch == 3
    with pytest.raises(ConfigError, match="sharding.replicas=2 means nothing"):
        read(composed_with(["sharding=full_shard"]))
