"""What the decoder computes, against transformers' LlamaForCausalLM, closed formulas and itself in other precisions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.errors import ConfigError
from shardlab.models import Transformer
from shardlab.models.transformer import rope_table

SIZES = dict(vocab_size=97, dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=80, max_seq_len=40)


def tokens(seq_len: int = 32, batch: int = 2) -> Tensor:
    return torch.randint(0, 97, (batch, seq_len), generator=torch.Generator().manual_seed(1))


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder a projection's rows from neighbouring pairs (ours, and Meta's) to two halves (transformers')."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def as_transformers(name: str, value: Tensor, head_dim: int = 8) -> tuple[str, Tensor]:
    """Translate a parameter (or its gradient) and its name to those of LlamaForCausalLM."""
    if name.endswith(("wq.weight", "wk.weight")):
        value = halves(value, head_dim)
    for ours, theirs in {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "tok_embeddings": "embed_tokens",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }.items():
        name = name.replace(ours, theirs)
    return ("lm_head.weight" if name == "output.weight" else f"model.{name}"), value


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_logits_and_gradients_equal_those_of_transformers_llama(kv_heads):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = Transformer(**SIZES | {"kv_heads": kv_heads, "rope_theta": 5000.0, "norm_eps": 1e-4})
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        intermediate_size=80,
        max_position_embeddings=40,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(dict(as_transformers(n, p) for n, p in ours.named_parameters()))
    inputs = tokens()
    logits, expected = ours(inputs), theirs(inputs).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for output in (logits, expected):
        F.cross_entropy(output.flatten(0, 1), inputs.flatten()).backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        theirs_name, gradient = as_transformers(name, p.grad)
        torch.testing.assert_close(gradient, gradients[theirs_name], rtol=1e-4, atol=1e-6)


def test_a_later_token_changes_no_earlier_logits():
    model = Transformer(**SIZES)
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 97
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=0)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_rotary_table_is_the_closed_formula():
    table = rope_table(max_seq_len=50, head_dim=8, theta=10000.0)
    for position, i in [(0, 0), (1, 0), (7, 2), (49, 3)]:
        angle = torch.tensor(position * 10000.0 ** (-2 * i / 8), dtype=torch.float64)
        torch.testing.assert_close(table[position, i], torch.stack((angle.cos(), angle.sin())).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_agree_with_fp32(dtype):
    torch.manual_seed(0)
    model = Transformer(**SIZES)
    expected = model(tokens())
    logits = model.to(dtype)(tokens())
    assert logits.dtype == dtype
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 1e-5}[dtype]  # of logits with variance one
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=tolerance)


def test_autocast_agrees_with_fp32():
    torch.manual_seed(0)
    model = Transformer(**SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens()), rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_fused_and_makes_no_matrix_of_scores(dtype, tools):
    model = Transformer(**SIZES).to(dtype)
    with tools.OperatorLog() as log:
        model(tokens(37)).float().square().mean().backward()
    assert "_scaled_dot_product_flash_attention_for_cpu" in log.names
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in log.names
    assert (37, 37) not in log.matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_pass_forward_and_backward(dtype, tools):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = Transformer(**SIZES).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tools.initialise(model)
        logits = model(torch.empty(2, 32, dtype=torch.int64))
        logits.float().square().mean().backward()
    assert logits.shape == (2, 32, 97) and logits.dtype == dtype


def test_tied_embeddings_are_one_parameter_and_start_with_logits_of_variance_one():
    torch.manual_seed(0)
    model = Transformer(**SIZES | {"dim": 96, "vocab_size": 1000, "tie_embeddings": True})
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(n.endswith(("output.weight", "tok_embeddings.weight")) for n, _ in model.named_parameters()) == 1
    assert 0.8 < model(tokens()).std() < 1.2


def test_a_sequence_longer_than_the_rotary_table_is_refused():
    with pytest.raises(ConfigError, match=r"data\.seq_len=41 .* model\.max_seq_len=40"):
        Transformer(**SIZES)(tokens(41))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"model\.dim=48 .* model\.heads=5"),
        ({"dim": 42}, r"model\.dim=42 .* model\.heads=6"),  # heads of 7 features: odd
        ({"kv_heads": 4}, r"model\.kv_heads=4 must divide model\.heads=6"),
        ({"kv_heads": 12}, r"model\.kv_heads=12 must divide model\.heads=6"),
        ({"layers": 0}, r"model\.layers=0"),
        ({"vocab_size": -1}, r"model\.vocab_size=-1"),
        ({"max_seq_len": 0}, r"model\.max_seq_len=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_key(change, message):
    with pytest.raises(ConfigError, match=message):
        Transformer(**SIZES | change)
