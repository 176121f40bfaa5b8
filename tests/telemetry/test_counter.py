"""FLOPs and communicated bytes of one step, against closed formulas and PyTorch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardlab.telemetry import StepCost, StepCounter
from tests.training import batches_of, built_from, config_of

BATCH, SEQ, DIM, HEADS, KV_HEADS, LAYERS, FFN, VOCAB = 3, 40, 48, 4, 2, 3, 80, 33
RUN = (
    "model=llama_tiny",
    f"model.vocab_size={VOCAB}",
    f"model.dim={DIM}",
    f"model.layers={LAYERS}",
    f"model.heads={HEADS}",
    f"model.kv_heads={KV_HEADS}",
    f"model.ffn_dim={FFN}",
    "data=random_tokens",
    f"data.vocab_size={VOCAB}",
    f"data.seq_len={SEQ}",
    f"train.micro_batch={BATCH}",
)
KV_DIM = DIM // HEADS * KV_HEADS
BLOCK_MATRICES = [(DIM, DIM), (KV_DIM, DIM), (KV_DIM, DIM), (DIM, DIM), (FFN, DIM), (DIM, FFN), (FFN, DIM)]


def cost_of_a_step(*overrides: str, math_attention: bool = False, reference: bool = False) -> tuple[StepCost, int]:
    """Our count of one step, and that of PyTorch's counter where `reference`."""
    config = config_of(*RUN, *overrides)
    step, micro_batches = built_from(config).step, batches_of(config)[0]
    kernel = [SDPBackend.MATH] if math_attention else [SDPBackend.FLASH_ATTENTION]
    theirs, ours = FlopCounterMode(display=False), StepCounter()
    with sdpa_kernel(kernel):
        if reference:
            with theirs:
                step(micro_batches)
        with ours:
            step(micro_batches)
    return ours.cost, theirs.get_total_flops() if reference else 0


def closed_formula(attention_products: int) -> int:
    """FLOPs of a step on one rank: 6 per weight of a matrix product and token, and attention.

    PaLM (arXiv 2204.02311, appendix B): 6 N + 12 L H Q T per token for N weights, L layers, H heads of Q features and T
    positions; the 12 are 2 operations in each of 6 products with (T, T) matrices: 2 in forward, 4 in backward. Fused
    attention makes one more, the scores again (Dao et al., arXiv 2205.14135, algorithm 4).
    """
    weights = LAYERS * sum(rows * columns for rows, columns in BLOCK_MATRICES) + VOCAB * DIM
    return BATCH * SEQ * (6 * weights + 2 * attention_products * LAYERS * DIM * SEQ)


def counted_flops(math_attention: bool):
    return cost_of_a_step(math_attention=math_attention, reference=True)


def test_flops_of_a_transformer_are_those_of_the_closed_formula(on_ranks):
    cost, reference = on_ranks(2)(counted_flops, True)[0]
    assert cost.flops == cost.model_flops == closed_formula(attention_products=2 + 4) == reference


def test_fused_attention_counts_on_a_cpu_too(on_ranks):
    cost, reference = on_ranks(2)(counted_flops, False)[0]
    assert cost.flops == cost.model_flops == closed_formula(attention_products=2 + 5)
    # PyTorch's counter has no formula for it; all else is as it counts.
    assert reference == closed_formula(attention_products=0)


@pytest.mark.parametrize("overrides", [("precision=bf16",), ("sharding=no_shard",), ("sharding=shard_optimizer",)])
def test_flops_depend_on_neither_strategy_nor_precision(on_ranks, overrides):
    cost, _ = on_ranks(2)(cost_of_a_step, *overrides)[0]
    assert cost.flops == cost.model_flops == closed_formula(attention_products=2 + 5)


def test_recomputation_is_no_work_of_the_model(on_ranks):
    full, _ = on_ranks(2)(cost_of_a_step, "activation=full")[0]
    selective, _ = on_ranks(2)(cost_of_a_step, "activation=selective")[0]
    assert full.model_flops == selective.model_flops == closed_formula(attention_products=2 + 5)
    products = [2 * BATCH * SEQ * rows * columns for rows, columns in BLOCK_MATRICES]  # of one block's forward
    attention = 2 * 2 * BATCH * SEQ * SEQ * DIM
    # Backward needs no output of a block's last product, so recomputation stops short of it.
    w2, w3 = products[5:]
    assert full.recomputed_flops == LAYERS * (sum(products) + attention - w2)
    # Saved are attention and the first, third, fifth (and seventh) product: wq, wv, w1, w2 as they are called.
    assert selective.recomputed_flops == LAYERS * (products[1] + products[3] + w3)


def test_muon_spends_flops_that_are_not_the_models(on_ranks):
    cost, _ = on_ranks(1)(cost_of_a_step, "optimizer=muon")[0]
    assert cost.model_flops == closed_formula(attention_products=2 + 5)
    # Newton-Schulz on each whole matrix, 5 times, with m rows and n >= m columns (Keller Jordan, "Muon"): X X^T, its
    # square, and their sum times X.
    iterations = [
        5 * (2 * m * m * n + 2 * m * m * m + 2 * m * m * n)
        for m, n in (sorted(shape) for shape in LAYERS * BLOCK_MATRICES)
    ]
    assert cost.optimizer_flops == sum(iterations)


UNITS = [VOCAB * DIM, *LAYERS * [sum(r * c for r, c in BLOCK_MATRICES) + 2 * DIM], DIM + VOCAB * DIM]
PADDED = sum(UNITS) + 2 * DIM  # on two ranks: embedding and head have 33 rows each, and so one of padding
SCALARS = 8 + 4 * (LAYERS * 9 + 3)  # all-reduced: the number of valid labels, the norm of each parameter's gradient


def comm_of_a_step(*overrides: str) -> dict[str, int]:
    return cost_of_a_step(*overrides)[0].comm_bytes


@pytest.mark.parametrize(("overrides", "expected"), [
    # Each unit is gathered for forward and for backward; gradients are reduced in fp32.
    (["sharding=full_shard"], (2 * 4 * PADDED, 4 * PADDED, SCALARS)),
    (["sharding=full_shard", "precision=bf16"], (2 * 2 * PADDED, 4 * PADDED, SCALARS)),
    (["sharding=full_shard", "precision=bf16_autocast"], (2 * 4 * PADDED, 4 * PADDED, SCALARS)),
    (["sharding=shard_grad_op"], (4 * PADDED, 4 * PADDED, SCALARS)),
    # Three micro-batches, each gathered anew.
    (["accumulation=reduce_every", "accumulation.steps=3"], (3 * 2 * 4 * PADDED, 3 * 4 * PADDED, SCALARS)),
    (["accumulation=reduce_last", "accumulation.steps=3"], (3 * 2 * 4 * PADDED, 4 * PADDED, SCALARS)),
    # All-reduced whole, without padding, and gathered by no one.
    (["sharding=no_shard", "precision=bf16"], (0, 0, 4 * sum(UNITS) + 8)),
])  # fmt: skip
def test_communicated_bytes_follow_from_strategy_and_dtypes(on_ranks, overrides, expected):
    for comm in on_ranks(2)(comm_of_a_step, *overrides):
        assert comm == dict(zip(("all_gather", "reduce_scatter", "all_reduce"), expected, strict=True))


def test_nothing_counts_outside_the_counter():
    counter = StepCounter()
    a = torch.ones(4, 4)
    with counter:
        a @ a
    a @ a
    assert counter.cost.flops == 2 * 4**3


def communicated_by_one_rank(strategy: str) -> dict[str, int]:
    config = config_of("model=mlp", "data=random_classes", "train.steps=1", f"sharding={strategy}")
    built = built_from(config)
    with StepCounter() as counter:
        built.step(batches_of(config)[0])
    return counter.cost.comm_bytes


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard", "shard_optimizer"])
def test_a_rank_alone_communicates_nothing(on_ranks, strategy):
    assert set(on_ranks(1)(communicated_by_one_rank, strategy)[0].values()) == {0}
