"""Repeating the record of equal blocks, micro-batches and steps: the same, event by event, as simulating all."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from shardlab.build import make_model
from shardlab.config import Config
from shardlab.planner import simulation
from shardlab.planner.blocks import KEPT, shorten
from shardlab.planner.cluster import ClusterConfig, ClusterDevice
from shardlab.planner.plan import plan_with_record
from shardlab.planner.steps import RepeatedMicroBatches
from tests.ranks import one_process
from tests.training import config_of

RUN = (
    "model=llama_tiny", "model.layers=7", "data=random_tokens", "data.seq_len=32", "train.micro_batch=2",
    "train.steps=3",
)  # fmt: skip


def record_of(config: Config, cluster: ClusterConfig) -> tuple[dict, list, list[int]]:
    plan, ledger = plan_with_record(config, cluster)
    number: dict[int, int] = {}
    events = [
        (
            number.setdefault(id(event.entry), len(number)), event.entry.device, event.entry.category, event.before,
            event.after, event.phase, event.module,
        )
        for event in ledger.events
    ]  # fmt: skip
    return {**plan.to_dict(), "wall_s": 0}, events, ledger.step_starts


def repeated_and_simulated(overrides: tuple[str, ...], on_cpu: bool) -> tuple[dict[str, int], tuple, tuple]:
    """How often what was repeated; and the records with that left out, and with all simulated."""
    done: Counter[str] = Counter()

    def noting(function):
        def noted(*args):
            result = function(*args)
            done[function.__name__] += bool(result)
            return result

        return noted

    cluster = ClusterConfig(
        device=ClusterDevice.cpu if on_cpu else ClusterDevice.cuda, gpus_per_node=8, nodes=1, capability=[9, 0]
    )
    config = config_of(*overrides, world_size=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "lengthen", noting(simulation.lengthen))
        patch.setattr(simulation, "repeat_step", noting(simulation.repeat_step))
        patch.setattr(RepeatedMicroBatches, "repeat", noting(RepeatedMicroBatches.repeat))
        some = record_of(config, cluster)
        every = record_of(replace(config, plan=replace(config.plan, repeat=False)), cluster)
    return dict(done), some, every


@pytest.fixture(scope="module")
def planner():
    with one_process() as pool:
        yield lambda *args: pool.submit(*args).result()


# bench/plan_exact.py --repeats compares the whole matrix.
@pytest.mark.parametrize(("overrides", "on_cpu"), [
    ("activation=selective precision=bf16", False),
    ('sharding.units=["layers.*","layers.*.attention"] sharding.reshard_last_unit=false precision=bf16', False),
    (
        "sharding=hybrid_shard sharding.replicas=2 precision=fp16 activation=full accumulation=reduce_last "
        "accumulation.steps=2",
        False,
    ),
])  # fmt: skip
def test_repeating_inner_blocks_and_the_second_step_gives_the_record_of_all(planner, overrides, on_cpu):
    repeated, some, every = planner(repeated_and_simulated, (*RUN, *overrides.split()), on_cpu)
    assert repeated == {"lengthen": 1, "repeat_step": 1}
    assert some == every


@pytest.mark.parametrize(("overrides", "on_cpu"), [
    ("accumulation=reduce_last precision=bf16", False),
    ("accumulation=reduce_every sharding=shard_grad_op activation=full model.layers=2", True),
    ("accumulation=reduce_every sharding=hybrid_shard sharding.replicas=2 precision=fp16 model.layers=2", False),
])  # fmt: skip
def test_repeating_inner_micro_batches_gives_the_record_of_all(planner, overrides, on_cpu):
    run = (*RUN, *overrides.split(), "accumulation.steps=5")
    repeated, some, every = planner(repeated_and_simulated, run, on_cpu)
    assert repeated["repeat"] == 2 * 2  # the third and the fourth of five, in two steps
    assert some == every


def test_offloaded_blocks_are_repeated_in_host_memory_too(planner):
    overrides = (*RUN, "sharding.cpu_offload=true", "precision=bf16")
    repeated, some, every = planner(repeated_and_simulated, overrides, False)
    assert repeated == {"lengthen": 1, "repeat_step": 1}
    assert some == every
    assert some[0]["host_peak_bytes"] > 0


# --- which models are shortened


class Block(nn.Module):
    def __init__(self, width: int = 4, number: int = 0):
        super().__init__()
        self.linear = nn.Linear(width, 4)
        self.number = number


class Net(nn.Module):
    def __init__(self, *blocks: Block):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 2)


def config_for(units: list, activation_blocks: list[str] | None = None) -> Config:
    config = config_of("model=mlp", "data=random_classes", world_size=1)
    config.model["units"] = units
    return replace(config, activation=replace(config.activation, blocks=activation_blocks))


def net(**last: int) -> Net:
    with torch.device("meta"):
        return Net(*(Block() for _ in range(KEPT + 2)), Block(**last))


def test_equal_blocks_are_left_out():
    model = net()
    blocks = shorten(model, config_for(["blocks.*"]))
    assert (blocks.prefix, blocks.count, len(model.blocks)) == ("blocks", KEPT + 3, KEPT)


@pytest.mark.parametrize("last", [{"width": 8}, {"number": 1}])
def test_blocks_that_differ_in_shape_or_in_a_setting_are_all_simulated(last):
    model = net(**last)
    assert shorten(model, config_for(["blocks.*"])) is None
    assert len(model.blocks) == KEPT + 3


@pytest.mark.parametrize("units", [
    [], ["head"], [["blocks.0", "blocks.1"], "blocks.[2-8]"], ["blocks.*", "blocks.3.linear"], ["blocks.*.linear"],
])  # fmt: skip
def test_blocks_that_are_not_alike_as_units_are_all_simulated(units):
    assert shorten(net(), config_for(units)) is None


def test_blocks_of_which_some_are_recomputed_are_all_simulated():
    assert shorten(net(), config_for(["blocks.*"], ["blocks.[0-3]"])) is None
    assert shorten(net(), config_for(["blocks.*"], ["blocks.*.linear"]))


def test_blocks_that_share_a_parameter_are_all_simulated():
    model = net()
    model.head.weight = model.blocks[3].linear.weight
    assert shorten(model, config_for(["blocks.*"])) is None
    model = net()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    assert shorten(model, config_for(["blocks.*"])) is None


def test_the_blocks_of_our_transformers_are_equal():
    with torch.device("meta"):
        model = make_model(config_of("model=llama3_70b", world_size=1).model)
    assert shorten(model, config_of("model=llama3_70b", world_size=1)).count == 80
