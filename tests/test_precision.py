"""Precision: what is stored, gathered, computed and reduced in which dtype."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardlab.config import PrecisionConfig
from shardlab.errors import ConfigError
from shardlab.precision import store_parameters
from tests.training import batches_of, built_from, config_of, train_steps

RUN = (
    "model=llama_tiny",
    "model.layers=2",
    "data=random_tokens",
    "data.seq_len=32",
    "train.micro_batch=2",
    "train.steps=3",
)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16_autocast", "fp16_autocast", "bf16_pure")


@pytest.fixture(scope="module")
def trained(on_ranks):
    return {p: on_ranks(2)(train_steps, *RUN, f"precision={p}")[0] for p in PRECISIONS}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_close_to_fp32(trained, precision):
    tolerance = {"fp32": 0, "tf32": 0, "fp16": 2e-3, "fp16_autocast": 2e-3}.get(precision, 2e-2)  # tf32: CPUs have none
    torch.testing.assert_close(trained[precision].losses, trained["fp32"].losses, rtol=tolerance, atol=0)
    if tolerance:
        assert trained[precision].losses != trained["fp32"].losses


def dtypes_seen(precision: str) -> dict[str, torch.dtype]:
    """Dtypes of a block's weight and input in forward, of stored parameters and gradients, and of the logits."""
    seen: dict[str, torch.dtype] = {}
    config = config_of(*RUN, f"precision={precision}")
    built = built_from(config)

    def look(module, args, output):
        seen.update(weight=module.weight.dtype, output=output.dtype)

    def look_at_gradient(optimizer, args, kwargs):
        seen.update(gradient=next(built.model.parameters()).grad.dtype)

    built.model.layers[0].feed_forward.w1.register_forward_hook(look)
    built.optimizers[0].register_step_pre_hook(look_at_gradient)
    built.step(batches_of(config)[0])
    return seen | {"stored": next(built.model.parameters()).dtype}


@pytest.mark.parametrize(("precision", "weight", "output", "gradient", "stored"), [
    ("fp32", "float32", "float32", "float32", "float32"),
    ("bf16", "bfloat16", "bfloat16", "float32", "float32"),
    ("fp16", "float16", "float16", "float32", "float32"),
    ("bf16_autocast", "float32", "bfloat16", "float32", "float32"),
    ("fp16_autocast", "float32", "float16", "float32", "float32"),
    ("bf16_pure", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
])  # fmt: skip
def test_dtypes(on_ranks, precision, weight, output, gradient, stored):
    expected = dict(weight=weight, output=output, gradient=gradient, stored=stored)
    seen = on_ranks(2)(dtypes_seen, precision)[0]
    assert {key: str(dtype).removeprefix("torch.") for key, dtype in seen.items()} == expected


def reduced_dtypes(*overrides: str) -> set[torch.dtype]:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class ReduceScatters(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(t, DTensor) for t in types):
                return NotImplemented
            if "_reduce_scatter_base_" in func.name():
                seen.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    config = config_of(*RUN, *overrides)
    built = built_from(config)
    with ReduceScatters():
        built.step(batches_of(config)[0])
    return seen


def test_gradients_are_reduced_in_reduce_dtype(on_ranks):
    assert on_ranks(2)(reduced_dtypes, "precision=bf16")[0] == {torch.float32}
    assert on_ranks(2)(reduced_dtypes, "precision=bf16", "precision.reduce_dtype=bfloat16")[0] == {torch.bfloat16}


def test_a_model_that_stores_another_dtype_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"precision.storage_dtype=float32, but the model makes weight in torch.bfloat16"
    ):
        store_parameters(model, PrecisionConfig())


def test_buffers_keep_their_dtype(on_ranks):
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    store_parameters(
        model,
        PrecisionConfig(storage_dtype=config_of(*RUN, "precision=bf16_pure", world_size=1).precision.storage_dtype),
    )
    assert (model.weight.dtype, model.running_mean.dtype) == (torch.bfloat16, torch.float32)
