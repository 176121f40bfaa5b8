"""The config: what follows from what, what contradicts what, and the files that it is composed of."""

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from shardlab.config import ActivationPolicy, Config, Dtype, Reduce, Strategy, parse, to_dict
from shardlab.errors import ConfigError
from shardlab.run_folder import RunFolder
from tests.training import ROOT, config_of

CONF = ROOT / "conf"
GROUPS = ("accumulation", "activation", "data", "model", "optimizer", "precision", "sharding", "tracking")
CHOICES = [(group, file.stem) for group in (*GROUPS, "experiment") for file in sorted((CONF / group).glob("*.yaml"))]
EXPERIMENTS = [choice for group, choice in CHOICES if group == "experiment"]


@functools.cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def parsed(keys: dict[str, Any], *overrides: str, world_size: int = 1, nodes: int = 1) -> Config:
    """The config that `overrides` give, with `keys` set."""
    cfg = composed(*overrides).copy()
    for key, setting in keys.items():
        OmegaConf.update(cfg, key, setting)
    return parse(cfg, world_size=world_size, nodes=nodes)


# --- batch sizes ---


@pytest.mark.parametrize("preset", ["none", "reduce_every", "reduce_last"])
@pytest.mark.parametrize(("global_batch", "world_size", "steps"), [(12, 1, 6), (12, 2, 3), (2, 1, 1), (24, 4, 3)])
def test_the_global_batch_decides_the_accumulation(preset, global_batch, world_size, steps):
    keys = {"train.micro_batch": 2, "train.global_batch": global_batch}
    config = parsed(keys, f"accumulation={preset}", world_size=world_size)
    assert config.accumulation.steps == steps
    assert config.train.global_batch == global_batch


@pytest.mark.parametrize(("preset", "steps", "reduce"), [
    ("none", 1, Reduce.every), ("reduce_every", 4, Reduce.every), ("reduce_last", 4, Reduce.last),
])  # fmt: skip
def test_a_preset_accumulates_where_no_global_batch_is_given(preset, steps, reduce):
    config = parsed({"train.micro_batch": 3}, f"accumulation={preset}", world_size=2)
    assert (config.accumulation.steps, config.accumulation.reduce) == (steps, reduce)
    assert config.train.global_batch == 3 * steps * 2


def test_given_steps_win_over_the_presets():
    keys = {"accumulation.steps": 5, "accumulation.default_steps": 4, "train.micro_batch": 2}
    config = parsed(keys, world_size=3)
    assert (config.accumulation.steps, config.train.global_batch) == (5, 30)
    agreeing = parsed({**keys, "train.global_batch": 30}, world_size=3)
    assert agreeing.accumulation.steps == 5


# --- mistakes: (keys, what the message must say: key=value, and the way out) ---


def refused(keys: dict[str, Any], *says: str, **ranks: int) -> None:
    with pytest.raises(ConfigError) as refusal:
        parsed(keys, **ranks)
    message = str(refusal.value)
    assert "\n" not in message
    for text in says:
        assert text in message


def test_a_global_batch_that_is_no_multiple_is_refused():
    keys = {"train.global_batch": 10, "train.micro_batch": 2}
    refused(keys, "train.global_batch=10", "train.micro_batch=2", "4 ranks", "8", "change", world_size=4)


def test_accumulation_that_contradicts_the_global_batch_is_refused():
    keys = {"train.global_batch": 16, "train.micro_batch": 2, "accumulation.steps": 3}
    refused(keys, "accumulation.steps=3", "train.global_batch=16", "needs 2", "leave one of them null", world_size=4)


@pytest.mark.parametrize(("key", "setting", "way_out"), [
    ("train.steps", 0, "at least 1"),
    ("train.micro_batch", 0, "at least 1"),
    ("train.global_batch", 0, "at least 1"),
    ("train.eval_samples", 0, "at least 1"),
    ("accumulation.steps", 0, "at least 1"),
    ("accumulation.default_steps", 0, "at least 1"),
    ("precision.growth_interval", 0, "at least 1"),
    ("train.log_every", -1, "0 or null for never"),
    ("train.eval_every", -5, "0 or null for never"),
    ("train.clip_norm", -1.0, "0 or null for no clipping"),
    ("precision.init_scale", 0.0, "positive"),
    ("plan.changes", -1, "0 for none"),
])  # fmt: skip
def test_what_is_out_of_range_is_refused(key, setting, way_out):
    refused({key: setting}, f"{key}={setting}", way_out)


@pytest.mark.parametrize("key", ["train.log_every", "train.eval_every", "train.clip_norm"])
@pytest.mark.parametrize("off", [0, None])
def test_zero_and_null_are_off(key, off):
    section, name = key.split(".")
    assert getattr(getattr(parsed({key: off}), section), name) == off


SCALED = {"precision.grad_scaler": True, "precision.param_dtype": "float16"}


@pytest.mark.parametrize(("keys", "says"), [
    ({"precision.autocast": "bfloat16", "precision.param_dtype": "bfloat16"},
     ["precision.autocast=bfloat16", "precision.param_dtype=bfloat16", "set one of them to null"]),
    ({"precision.autocast": "float32"}, ["precision.autocast=float32", "bfloat16, float16 or null"]),
    ({"precision.storage_dtype": "float16"}, ["precision.storage_dtype=float16", "float32 or bfloat16"]),
    ({"precision.grad_scaler": True}, ["precision.grad_scaler=true", "precision=fp16"]),
    ({"precision.grad_scaler": True, "precision.param_dtype": "bfloat16"},
     ["precision.grad_scaler=true", "precision=fp16"]),
    ({**SCALED, "optimizer.fused": False}, ["torch.optim.AdamW", "optimizer.fused=true", "precision=bf16"]),
    ({**SCALED, "sharding.cpu_offload": True},
     ["precision.grad_scaler=true", "sharding.cpu_offload=true", "precision=bf16"]),
])  # fmt: skip
def test_precisions_that_contradict_are_refused(keys, says):
    refused(keys, *says)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_fp16_needs_an_optimizer_that_can_skip(optimizer):
    with pytest.raises(ConfigError, match="optimizer=adamw"):
        config_of("precision=fp16", f"optimizer={optimizer}", world_size=1)


@pytest.mark.parametrize("keys", [SCALED, {"precision.grad_scaler": True, "precision.autocast": "float16"}])
def test_a_scaler_goes_with_fp16(keys):
    assert parsed(keys).precision.grad_scaler


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
@pytest.mark.parametrize(("replicas", "nodes", "expected"), [("auto", 1, 1), ("auto", 2, 2), (4, 2, 4), (8, 1, 8)])
def test_replicas_are_the_nodes_unless_given(strategy, replicas, nodes, expected):
    keys = {"sharding.strategy": strategy, "sharding.replicas": replicas}
    assert parsed(keys, world_size=8, nodes=nodes).sharding.replicas == expected


@pytest.mark.parametrize("replicas", [3, 0, -2, 16])
def test_replicas_that_do_not_divide_the_ranks_are_refused(replicas):
    keys = {"sharding.strategy": "hybrid_shard", "sharding.replicas": replicas}
    refused(keys, f"sharding.replicas={replicas}", "8 ranks", "[1, 2, 4, 8]", world_size=8)


def test_replicas_are_a_number_or_auto():
    keys = {"sharding.strategy": "hybrid_shard", "sharding.replicas": "many"}
    refused(keys, "sharding.replicas=many", "number", "auto")


@pytest.mark.parametrize("strategy", [s.name for s in Strategy if not s.is_hybrid])
def test_replicas_are_for_hybrid_strategies_alone(strategy):
    keys = {"sharding.strategy": strategy, "sharding.replicas": 2}
    says = ("sharding.replicas=2", f"sharding.strategy={strategy}", "auto", "hybrid_shard")
    refused(keys, *says, world_size=4)
    assert parsed({"sharding.strategy": strategy}, world_size=4).sharding.replicas == "auto"


@pytest.mark.parametrize(("strategy", "partial", "allowed"), [
    ("full_shard", 3, "[1, 2, 4, 8]"),
    ("full_shard", 0, "[1, 2, 4, 8]"),
    ("hybrid_shard", 8, "[1, 2, 4]"),  # two nodes: groups of four
    ("no_shard", 2, "[1]"),
])  # fmt: skip
def test_a_partial_reshard_must_divide_the_ranks_that_share_a_copy(strategy, partial, allowed):
    keys = {"sharding.strategy": strategy, "sharding.reshard_after_forward": partial}
    says = (f"sharding.reshard_after_forward={partial}", allowed, "true, false")
    refused(keys, *says, world_size=8, nodes=2)


@pytest.mark.parametrize(("strategy", "setting"), [
    ("full_shard", 4), ("hybrid_shard", 2), ("full_shard", True), ("no_shard", False),
])  # fmt: skip
def test_reshard_after_forward_keeps_its_type(strategy, setting):
    keys = {"sharding.strategy": strategy, "sharding.reshard_after_forward": setting}
    assert parsed(keys, world_size=8, nodes=2).sharding.reshard_after_forward is setting


# --- the files in conf/ ---


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group, choice):
    target = [f"{group}._target_=mine.Own"] if choice == "custom" else []
    config = config_of(f"{group}={choice}", *target, world_size=4)
    if group == "sharding":
        assert config.sharding.strategy.name == choice
    if group == "activation":
        assert config.activation.policy.name == choice
    if group in ("model", "data", "optimizer"):
        assert getattr(config, group)["_target_"]


LECTURE = {  # what each of the lecture's programs changes
    "lecture_full_shard": (Strategy.full_shard, 1, None),
    "lecture_shard_grad_op": (Strategy.shard_grad_op, 1, None),
    "lecture_accumulation": (Strategy.full_shard, 4, None),
    "lecture_optimizer_state": (Strategy.full_shard, 1, None),
    "lecture_amp": (Strategy.full_shard, 1, Dtype.float16),
    "lecture_complete": (Strategy.full_shard, 1, Dtype.float16),
}


def test_there_is_an_experiment_for_each_of_the_lectures_programs():
    assert {name for name in EXPERIMENTS if name.startswith("lecture_")} == set(LECTURE)


@pytest.mark.parametrize("experiment", LECTURE)
def test_experiments_have_the_lectures_settings(experiment):
    strategy, micro_batches, autocast = LECTURE[experiment]
    config = config_of(f"experiment={experiment}", world_size=2)
    model, data, optimizer = config.model, config.data, config.optimizer
    assert model["_target_"] == "shardlab.models.mlp.MLP"
    assert (model["input_size"], model["hidden_size"], model["output_size"]) == (10, 20, 5)
    assert (data["features"], data["classes"]) == (10, 5)
    assert (optimizer["_target_"], optimizer["lr"], optimizer["betas"]) == ("torch.optim.Adam", 1e-3, [0.9, 0.999])
    assert (optimizer["warmup_steps"], optimizer["decay"]) == (0, "constant")
    assert (config.train.steps, config.train.micro_batch) == (10, 32)
    assert config.train.global_batch == 32 * micro_batches * 2
    assert not config.train.clip_norm
    assert config.sharding.strategy is strategy
    assert (config.accumulation.steps, config.accumulation.reduce) == (micro_batches, Reduce.every)
    assert config.activation.policy is ActivationPolicy.none
    assert (config.precision.autocast, config.precision.grad_scaler) == (autocast, autocast is Dtype.float16)
    assert (config.precision.param_dtype, config.precision.storage_dtype) == (None, Dtype.float32)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_opens_with_its_command(experiment):
    package, command = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert command.startswith("# torchrun ")
    assert command.endswith(f" train.py experiment={experiment}")


def test_overrides_win_over_an_experiment_and_that_over_the_groups():
    config = config_of("experiment=lecture_amp", "train.steps=3", "sharding=no_shard", world_size=2)
    assert config.train.steps == 3
    assert config.sharding.strategy is Strategy.no_shard
    assert config.train.micro_batch == 32  # not the 8 of config.yaml


@pytest.mark.parametrize("overrides", [
    ("model=mlp", "data=random_classes"),
    ("sharding=hybrid_shard", "sharding.replicas=2", "accumulation=reduce_last", "precision=fp16"),
    ("activation=selective", "optimizer=muon", "sharding.reshard_after_forward=2"),
    ("sharding.units=['layers.*',['norm','output']]", "train.clip_norm=null"),
])  # fmt: skip
def test_the_written_config_gives_the_same_config_again(overrides, tmp_path):
    config = config_of(*overrides, world_size=4)
    RunFolder(tmp_path).write_config(config)
    written = OmegaConf.load(tmp_path / "config.yaml")
    assert OmegaConf.to_container(written) == to_dict(config)
    again = parse(OmegaConf.merge(OmegaConf.structured(Config), written), world_size=4, nodes=1)
    assert again == config


def test_the_config_as_plain_data():
    plain = to_dict(config_of("precision=bf16", "sharding=hybrid_shard", "sharding.replicas=2", world_size=4))
    assert plain["precision"]["param_dtype"] == "bfloat16"
    assert plain["sharding"]["strategy"] == "hybrid_shard"
    assert plain["sharding"]["replicas"] == 2
    assert plain["train"]["global_batch"] == 32
    assert plain["model"]["units"] == ["tok_embeddings", "layers.*", ["norm", "output"]]
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain  # nothing but plain types


def uncommented_keys(file: Path) -> list[str]:
    """Keys with a comment neither on their line nor on the one above."""
    lines = file.read_text().splitlines()

    def keys(node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            return [key for item in node.value for key in keys(item)]
        if isinstance(node, yaml.MappingNode):
            return [found for key, value in node.value for found in (key, *keys(value))]
        return []

    def is_commented(line: int) -> bool:
        return " #" in lines[line] or (line > 0 and lines[line - 1].lstrip().startswith("#"))

    root = yaml.compose(file.read_text())
    return [key.value for key in keys(root) if not is_commented(key.start_mark.line)]


@pytest.mark.parametrize("file", [file for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))],
                         ids=lambda file: f"{file.parent.name}/{file.stem}")  # fmt: skip
def test_a_preset_says_when_to_choose_it_and_comments_each_key(file):
    assert file.read_text().startswith("# ")
    assert uncommented_keys(file) == []
