"""Presets of published runs: each has its figure and source, and can be planned in the publisher's operators."""

import re
import sys

import pytest
import torch

from shardlab.models.transformer import Transformer
from tests.training import ROOT, config_of

PRESETS = {file.stem: file for file in (ROOT / "conf" / "experiment" / "published").glob("*.yaml")}
SIZES = {
    "vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_seq_len": 16,
}  # fmt: skip


@pytest.fixture
def published(monkeypatch):
    """`bench/published.py` as a module, which is a script and imports its neighbours as one."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    sys.modules.pop("published", None)
    import published

    return published


def test_each_preset_has_a_figure_and_each_figure_a_preset(published):
    assert set(published.FIGURES) == set(PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_begins_with_its_command_and_its_figure(published, name):
    lines = PRESETS[name].read_text().splitlines()
    header = " ".join(line for line in lines if line.startswith("#"))
    assert lines[1] == f"# python train.py mode=plan experiment=published/{name}"
    figure = published.FIGURES[name]
    quoted = [float(number) for number in re.findall(r"(\d+\.\d+)(?= GiB|\))", header)]
    for gib in filter(None, (figure.reserved_gib, figure.allocated_gib)):
        assert any(abs(number - gib) <= 0.005 for number in quoted), f"{gib} is not among {quoted}"
    assert figure.source.startswith("https://github.com/pytorch/torchtitan/")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_composes_for_the_gpus_in_its_name_and_in_the_publishers_operators(published, name):
    ranks = int(re.search(r"_(\d+)x[ah]100", name)[1])
    preset = f"experiment=published/{name}"
    config = config_of(preset, *published.FIGURES[name].operators, world_size=ranks, nodes=max(1, ranks // 8))
    assert config.model["_target_"] == "bench.torchtitan_llama.Transformer"
    assert config.train.global_batch == config.train.micro_batch * ranks
    assert config.sharding.reshard_last_unit is False


@pytest.mark.parametrize("keep_logits", [False, True])
def test_torchtitans_operators_compute_the_same_model(keep_logits):
    from bench.torchtitan_llama import Transformer as Titan

    torch.manual_seed(0)
    ours, theirs = Transformer(**SIZES), Titan(**SIZES, keep_logits=keep_logits)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(SIZES["vocab_size"], (3, 16))
    for model in (ours, theirs):
        model(tokens).logsumexp(-1).sum().backward()
    torch.testing.assert_close(theirs(tokens), ours(tokens))
    for (name, expected), actual in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=name)
    assert (theirs.logits is not None) == keep_logits


def test_errors_are_of_the_plan_against_the_published_figure(published, monkeypatch):
    planned = iter([{"reserved_gib": 84.048, "allocated_gib": 70.0}, {"reserved_gib": 82.4, "allocated_gib": 70.0}])
    overrides = []
    monkeypatch.setattr(published, "plan", lambda preset, *given: overrides.append(given) or next(planned))
    row = published.compare("torchtitan_llama3_8b_8xh100")
    expected = {"reserved_gib": 84.048, "allocated_gib": 70.0, "reserved_error_pct": pytest.approx(2.0)}
    assert row["planned"] == expected
    assert row["same_operators"]["reserved_error_pct"] == 0.0
    assert overrides == [(), ("model._target_=bench.torchtitan_llama.Transformer",)]
