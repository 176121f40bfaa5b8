"""Activation checkpointing: the same numbers to the bit, and what is computed again."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.errors import ConfigError
from tests.training import batches_of, built_from, config_of, train_steps

LLAMA = (
    "model=llama_tiny",
    "model.layers=2",
    "data=random_tokens",
    "data.seq_len=32",
    "train.steps=2",
    "train.micro_batch=2",
)
POLICIES = ("none", "full", "selective")


@pytest.fixture(scope="module")
def trained(on_ranks):
    return {
        policy: on_ranks(2)(train_steps, *LLAMA, "sharding=full_shard", "optimizer=sgd", f"activation={policy}")[0]
        for policy in POLICIES
    }


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_losses_and_gradients_equal_those_without_checkpointing_bit_for_bit(trained, policy):
    assert trained[policy].losses == trained["none"].losses
    assert trained[policy].grad_norms == trained["none"].grad_norms
    for name, weight in trained["none"].weights.items():
        assert torch.equal(trained[policy].weights[name], weight), name


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.forward, self.backward = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        in_backward = torch._C._current_graph_task_id() != -1
        (self.backward if in_backward else self.forward)[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_calls(policy: str) -> tuple[Counter, Counter]:
    config = config_of(*LLAMA, f"activation={policy}")
    built, batches = built_from(config), batches_of(config)
    built.step(batches[0])
    with Calls() as calls:
        built.step(batches[1])
    return calls.forward, calls.backward


def test_full_runs_each_block_again_and_selective_half_of_its_products_but_no_attention(on_ranks):
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = zip(*(on_ranks(1)(count_calls, policy)[0] for policy in POLICIES), strict=True)
    none, full, selective = backward
    assert forward[0]["mm"] == forward[1]["mm"] == forward[2]["mm"] == 2 * 7 + 1  # 7 products a block, and the head
    # Backward of y = x W has two products. Recomputing stops once all that backward needs is there: before w2's
    # product.
    assert none["mm"] == 2 * forward[0]["mm"]
    assert full["mm"] - none["mm"] == 2 * 6
    # In order wq wk wv wo w1 w3 w2, the second, fourth and sixth are computed again.
    assert selective["mm"] - none["mm"] == 2 * 3
    assert (none[attention], full[attention], selective[attention]) == (0, 2, 0)


def test_blocks_are_what_the_config_names(on_ranks):
    with pytest.raises(ConfigError, match="activation.blocks"):
        on_ranks(1)(train_steps, "model=mlp", "data=random_classes", "activation=full")
    with pytest.raises(ConfigError, match=r"activation.blocks: the pattern 'layer.\*' matches no module"):
        on_ranks(1)(train_steps, *LLAMA, "activation=full", "activation.blocks=[layer.*]")
    with pytest.raises(ConfigError, match="contains other blocks"):
        on_ranks(1)(train_steps, *LLAMA, "activation=full", "activation.blocks=[layers.*,layers.*.attention]")
    on_ranks(1)(
        train_steps, "model=mlp", "data=random_classes", "train.steps=1", "activation=full", "activation.blocks=[fc1]"
    )


def test_an_unknown_operator_is_refused(on_ranks):
    with pytest.raises(ConfigError, match=r"activation.save names aten.mmm, which is no PyTorch operator"):
        on_ranks(1)(train_steps, *LLAMA, "activation=selective", "activation.save=[aten.mmm]")
