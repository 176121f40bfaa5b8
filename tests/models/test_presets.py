"""Every file in conf/model builds on meta, with the published number of parameters."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf" / "model"

PUBLISHED = {  # of the weights on the Hugging Face hub
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


def load(name: str):
    config = OmegaConf.load(CONF / f"{name}.yaml")
    units = config.pop("units")
    with torch.device("meta"):
        return config, units, instantiate(config)


@pytest.mark.parametrize("name", [*PUBLISHED, "llama_tiny", "llama_125m"])
def test_preset_has_its_number_of_parameters(name):
    c, _, model = load(name)
    count = sum(p.numel() for p in model.parameters())
    attention = 2 * c.dim**2 * (1 + c.kv_heads / c.heads)
    block = attention + 3 * c.dim * c.ffn_dim + 2 * c.dim
    assert count == c.layers * block + c.dim + c.vocab_size * c.dim * (1 if c.tie_embeddings else 2)
    assert count == PUBLISHED.get(name, count)


def test_small_presets_have_the_sizes_they_claim():
    assert sum(p.numel() for p in load("llama_tiny")[2].parameters()) == pytest.approx(1.7e6, rel=0.02)
    assert sum(p.numel() for p in load("llama_125m")[2].parameters()) == pytest.approx(124e6, rel=0.01)


def test_mlp_preset_is_the_lectures_model():
    _, units, model = load("mlp")
    assert units == ["fc1", "fc2"]
    assert sum(p.numel() for p in model.parameters()) == 325


@pytest.mark.parametrize("name", sorted(p.stem for p in CONF.glob("*.yaml") if p.stem not in ("hf", "custom")))
def test_units_name_modules_and_cover_tied_weights_together(name):
    config, units, model = load(name)
    modules = dict(model.named_modules())
    for unit in units:
        for pattern in [unit] if isinstance(unit, str) else unit:
            assert pattern in modules or pattern.removesuffix(".*") in modules, pattern
    if config.get("tie_embeddings"):
        assert units == ["layers.*"]


@pytest.mark.parametrize("name", sorted(p.stem for p in CONF.glob("*.yaml")))
def test_every_key_is_commented_and_the_file_says_when_to_choose_it(name):
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ") and "Choose it" in lines[1]
    for above, line in pairwise(lines):
        if not line.startswith(("#", "_target_")):
            assert "#" in line or above.startswith("#"), line


def test_llama_tiny_starts_near_the_loss_of_guessing():
    torch.manual_seed(0)
    config = OmegaConf.load(CONF / "llama_tiny.yaml")
    config.pop("units")
    tokens = torch.randint(0, 256, (2, 64))
    logits = instantiate(config)(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1).flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=1.2)
