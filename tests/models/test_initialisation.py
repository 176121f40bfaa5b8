"""Initial weights and buffers: after `to_empty`, sharded, and in distribution."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardlab.models import MLP, Transformer

SIZES = dict(vocab_size=600, dim=96, layers=4, heads=6, kv_heads=2, ffn_dim=256, max_seq_len=40)


def build(**changes) -> Transformer:
    return Transformer(**SIZES | changes)


@pytest.mark.parametrize("make", [MLP, build], ids=["mlp", "transformer"])
def test_every_module_with_tensors_of_its_own_can_reset_them(make):
    for name, module in make().named_modules():
        owns = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert not owns or callable(getattr(module, "reset_parameters", None)), name


@pytest.mark.parametrize("tied", [False, True])
def test_after_to_empty_the_model_is_initialised_as_a_new_one(tied, tools):
    torch.manual_seed(0)
    new, moved = build(tie_embeddings=tied), tools.through_meta(lambda: build(tie_embeddings=tied))
    assert (moved.output.weight is moved.tok_embeddings.weight) == tied
    torch.testing.assert_close(moved.rope, new.rope, rtol=0, atol=0)
    expected = dict(new.named_parameters())
    assert [n for n, _ in moved.named_parameters()] == list(expected)
    for name, p in moved.named_parameters():
        assert p.std().item() == pytest.approx(expected[name].std().item(), rel=0.05), name
        assert p.mean().item() == pytest.approx(expected[name].mean().item(), abs=0.1 * p.std().item()), name


def test_standard_deviations_are_those_documented():
    torch.manual_seed(0)
    for name, p in build().named_parameters():
        if "norm" in name:
            assert bool((p == 1).all()), name
            continue
        std = 0.02
        if name.endswith(("wo.weight", "w2.weight")):
            std = 0.02 / (2 * 4) ** 0.5  # two additions to the residual stream in each of four layers
        elif name == "tok_embeddings.weight":
            std = 1.0
        elif name == "output.weight":
            std = 96**-0.5
        assert p.std().item() == pytest.approx(std, rel=0.05), name


def test_a_model_in_bf16_has_its_rotary_table_in_fp32_once_initialised(tools):
    with torch.device("meta"):
        model = build().to(torch.bfloat16)
    model.to_empty(device="cpu")
    tools.initialise(model)
    torch.testing.assert_close(model.rope, build().rope, rtol=0, atol=0)


@pytest.mark.parametrize("make", [MLP, build], ids=["mlp", "transformer"])
def test_random_values_are_filled_in_place_and_nothing_is_read_back(make, tools):
    model = make()
    with tools.OperatorLog() as log:
        tools.initialise(model)
    assert {n for n in log.names if n in {"rand", "randn", "bernoulli_", "normal_", "uniform_"}} <= {
        "normal_",
        "uniform_",
    }
    assert "_local_scalar_dense" not in log.names


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # the trainer fills DTensors itself
@pytest.mark.parametrize("unit", [("tok_embeddings", "norm", "output"), ("output", "norm", "tok_embeddings"), ()])
def test_tied_embeddings_stay_one_parameter_when_sharded(unit, tools, sharded_rank):
    mesh = sharded_rank(rank=1, world_size=2)
    with torch.device("meta"):
        model = build(tie_embeddings=True)
    if unit:
        fully_shard([model.get_submodule(name) for name in unit], mesh=mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    tools.initialise(model)
    assert model.output.weight is model.tok_embeddings.weight
    assert isinstance(model.output.weight, DTensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    assert model.output.weight is model.tok_embeddings.weight
    assert all(p.grad is not None for group in optimizer.param_groups for p in group["params"])
