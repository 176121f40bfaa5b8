"""Causal language models of transformers: built on meta, initialised, and run without a mask. No network."""

import sys

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

pytest.importorskip("transformers")

from shardlab.errors import ConfigError
from shardlab.models import CausalLM
from shardlab.models.hf import zero_row

LLAMA = dict(
    model_type="llama",
    vocab_size=130,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
ARCHITECTURES = {
    "llama": LLAMA,
    "llama3_rope": LLAMA | {"rope_parameters": LLAMA3_ROPE},
    "llama_tied_padded": LLAMA | {"tie_word_embeddings": True, "pad_token_id": 3},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8},
    "gemma": LLAMA | {"model_type": "gemma", "head_dim": 8},
    "gemma3": LLAMA | {"model_type": "gemma3_text", "head_dim": 8},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4},
    "gpt2": dict(model_type="gpt2", vocab_size=130, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    | {"bos_token_id": 0, "eos_token_id": 0},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_after_to_empty_weights_and_buffers_are_those_of_a_new_model(name, tools):
    torch.manual_seed(0)
    new, moved = CausalLM(config=ARCHITECTURES[name]), tools.through_meta(lambda: CausalLM(config=ARCHITECTURES[name]))
    buffers = dict(new.named_buffers())
    assert [n for n, _ in moved.named_buffers()] == list(buffers)
    for buffer, value in moved.named_buffers():
        torch.testing.assert_close(value, buffers[buffer], rtol=0, atol=0)
    expected = dict(new.named_parameters())
    assert [n for n, _ in moved.named_parameters()] == list(expected)  # tied weights appear once
    for parameter, value in moved.named_parameters():
        assert value.std().item() == pytest.approx(expected[parameter].std().item(), rel=0.2, abs=1e-7), parameter
    moved.load_state_dict(new.state_dict())
    tokens = torch.randint(0, 130, (2, 16))
    torch.testing.assert_close(moved.eval()(tokens), new.eval()(tokens), rtol=0, atol=0)


def test_initialising_twice_draws_new_weights(tools):
    model = CausalLM(config=LLAMA)
    before = {n: p.clone() for n, p in model.named_parameters()}
    tools.initialise(model)
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if "norm" not in n)


def test_padding_row_is_zero_and_the_others_are_not(tools):
    embedding = tools.through_meta(lambda: CausalLM(config=LLAMA | {"pad_token_id": 3})).model.get_input_embeddings()
    assert embedding.weight.count_nonzero(dim=1).eq(0).nonzero().tolist() == [[3]]


@pytest.mark.parametrize(("rank", "expected"), [(0, [[3]]), (1, [])])
def test_padding_row_is_zero_on_the_rank_that_holds_it(rank, expected, sharded_rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = sharded_rank(rank=rank, world_size=2)
    weight = distribute_tensor(torch.ones(9, 4), mesh, [Shard(0)], src_data_rank=None)
    zero_row(weight, 3)
    assert weight.to_local().eq(0).all(dim=1).nonzero().tolist() == expected


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_no_mask_is_made_and_nothing_is_read_back(name, fake, tools):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = CausalLM(config=ARCHITECTURES[name])
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        model.to_empty(device="cpu")
        tools.initialise(model)
        tokens = torch.zeros(2, 37, dtype=torch.int64)
        with tools.OperatorLog() as log:
            model(tokens).square().mean().backward()
    assert (37, 37) not in log.matrices
    assert "_local_scalar_dense" not in log.names


def test_a_later_token_changes_no_earlier_logits():
    model = CausalLM(config=LLAMA)
    tokens = torch.randint(0, 130, (2, 16))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 130
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_a_local_folder_is_found_and_weights_are_fp32_whatever_its_dtype(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, dtype="bfloat16").save_pretrained(tmp_path)
    model = CausalLM(name_or_path=str(tmp_path))
    assert model.vocab_size == 130
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_preset_takes_an_inline_config():
    from pathlib import Path

    config = OmegaConf.load(Path(__file__).parents[2] / "conf" / "model" / "hf.yaml")
    units = config.pop("units")
    config.config = LLAMA | {"rope_parameters": LLAMA3_ROPE}
    with torch.device("meta"):
        model = instantiate(config)
    assert units == ["model.model.layers.*"]
    assert len(model.get_submodule("model.model.layers")) == 2
    assert model.model.config.rope_parameters["factor"] == 8.0


def test_code_from_the_hub_never_runs(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}'
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match=r"model\.name_or_path"):
        CausalLM(name_or_path=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"model_type": "nonesuch"}}, r"model\.config .* nonesuch"),
        ({"config": {"hidden_size": 32}}, r"model\.config "),
        ({"config": LLAMA | {"hidden_size": 30}}, r"model\.config .* not a multiple"),
        ({"config": {"model_type": "vit"}}, "model_type=vit has no causal language model"),
        ({"name_or_path": "./not/a/folder"}, r"model\.name_or_path=\./not/a/folder"),
        ({}, "neither model.name_or_path nor model.config"),
        ({"name_or_path": "x", "config": LLAMA}, "both model.name_or_path=x and model.config"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        CausalLM(**arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_missing_transformers_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        CausalLM(config=LLAMA)


def test_a_sequence_longer_than_the_models_positions_is_refused():
    with pytest.raises(ConfigError, match=r"data\.seq_len=65 .* max_position_embeddings=64"):
        CausalLM(config=LLAMA)(torch.zeros(1, 65, dtype=torch.int64))
