"""Accumulation: what each micro-batch communicates, and what a rank holds meanwhile."""

import pytest
import torch

from shardlab.telemetry import StepCounter
from tests.training import batches_of, built_from, config_of

RUN = (
    "model=mlp",
    "model.hidden_size=32",
    "data=random_classes",
    "train.micro_batch=2",
    "train.steps=2",
    "accumulation.steps=3",
)
PARAMETERS = 10 * 32 + 32 + 32 * 5 + 5
PADDED = 10 * 32 + 32 + 32 * 8 + 8  # the 5 rows of fc2 are padded to 8 for 4 ranks, as FSDP2 does
SCALARS = 2 * 8  # at most: the count of valid labels (int64) and the norm


def communicated(*overrides: str) -> dict[str, int]:
    """Elements per rank in the second step, in units of 4 bytes."""
    config = config_of(*RUN, *overrides)
    built, batches = built_from(config), batches_of(config)
    built.step(batches[0])
    with StepCounter() as counter:
        built.step(batches[1])
    return counter.cost.comm_bytes


@pytest.mark.parametrize(("strategy", "reduce", "gathers", "scatters", "reduces"), [
    # Each micro-batch gathers for forward and for backward.
    ("full_shard", "every", 6 * PADDED, 3 * PADDED, 0),
    ("full_shard", "last", 6 * PADDED, PADDED, 0),
    ("shard_grad_op", "every", 3 * PADDED, 3 * PADDED, 0),
    ("no_shard", "every", 0, 0, 3 * PARAMETERS),
    ("no_shard", "last", 0, 0, PARAMETERS),
])  # fmt: skip
def test_what_a_step_communicates(on_ranks, strategy, reduce, gathers, scatters, reduces):
    comm = on_ranks(4)(communicated, f"sharding={strategy}", f"accumulation.reduce={reduce}")[0]
    assert comm["all_gather"] == 4 * gathers
    assert comm["reduce_scatter"] == 4 * scatters
    assert 4 * reduces <= comm["all_reduce"] <= 4 * reduces + 64  # besides: counts and norms, a few bytes each


@pytest.mark.parametrize("reduce", ["every", "last"])
def test_a_hybrid_mesh_reduces_across_replicas_once_a_step(on_ranks, reduce):
    comm = on_ranks(4)(communicated, "sharding=hybrid_shard", "sharding.replicas=2", f"accumulation.reduce={reduce}")[0]
    shard = 4 * (10 * 32 + 32 + 32 * 6 + 6) // 2  # of the reduced gradient, on each of 2 ranks
    assert shard <= comm["all_reduce"] <= shard + 64


def test_zero_1_gathers_the_updated_slices(on_ranks):
    comm = on_ranks(4)(communicated, "sharding=shard_optimizer", "accumulation.reduce=last")[0]
    assert comm["all_gather"] == 4 * PADDED
    assert 4 * PARAMETERS <= comm["all_reduce"] <= 4 * PARAMETERS + 64


def unsharded_gradients_between_micro_batches(reduce: str) -> list[int]:
    """Elements of the unsharded gradients that this rank holds as each forward of a step begins."""
    config = config_of(*RUN, f"accumulation.reduce={reduce}")
    built = built_from(config)
    seen = []

    def look(module, args):
        groups = [g for unit in (module.fc1, module.fc2) for g in unit._get_fsdp_state()._fsdp_param_groups]
        grads = [p.unsharded_accumulated_grad for g in groups for p in g.fsdp_params if hasattr(p, "_unsharded_param")]
        grads += [p._unsharded_param.grad for g in groups for p in g.fsdp_params if hasattr(p, "_unsharded_param")]
        seen.append(sum(grad.numel() for grad in grads if isinstance(grad, torch.Tensor)))

    built.model.register_forward_pre_hook(look)
    built.step(batches_of(config)[0])
    return seen


def test_no_sync_keeps_full_gradients(on_ranks):
    assert on_ranks(4)(unsharded_gradients_between_micro_batches, "every")[0] == [0, 0, 0]
    assert on_ranks(4)(unsharded_gradients_between_micro_batches, "last")[0] == [0, PARAMETERS, PARAMETERS]
