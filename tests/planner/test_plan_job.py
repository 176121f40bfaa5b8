"""What `mode=plan` shows and writes: verdict, floor, search, and changes, each planned."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardlab.errors import ConfigError
from tests.ranks import one_process
from tests.training import ROOT

TINY = ("model=llama_tiny", "model.layers=1", "data=random_tokens", "data.seq_len=64", "train.micro_batch=4")
MLP = ("model=mlp", "data=random_classes", "plan.changes=0")


def planned(folder: Path, *overrides: str) -> dict:
    """Plans as `train.py mode=plan` does: `plan.json`, with what the screen said."""
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from shardlab.planner import job
    from shardlab.run_folder import RunFolder

    job.CHANGES_SECONDS = (0.0, 40.0, 40.0)  # so that all are planned, on a busy machine too
    folder.mkdir()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides), return_hydra_config=True)
        with open_dict(cfg):
            cfg.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(cfg)
        choices = {group: str(choice) for group, choice in cfg.hydra.runtime.choices.items()}
        del cfg.hydra
        with contextlib.redirect_stdout(io.StringIO()) as screen:
            job.plan(cfg, folder=RunFolder(folder), choices=choices)
    return json.loads((folder / "plan.json").read_text()) | {
        "screen": screen.getvalue(),
        "folder": folder,
    }


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Plans in a process of its own."""
    with one_process() as pool:
        folders = iter(tmp_path_factory.mktemp("plans") / str(n) for n in range(1000))
        yield lambda *overrides: pool.submit(planned, next(folders), *overrides).result()


@pytest.fixture(scope="module")
def tiny(plan):
    return plan(*TINY, "cluster.memory_gib=0.008")


# ---- verdict and floor


def test_the_verdict_comes_first_then_the_floor(tiny):
    peak, floor = tiny["peak"], tiny["states"]
    _, verdict, states = (line.split(maxsplit=1) for line in tiny["screen"].splitlines()[:3])
    assert verdict[0] == "plan"
    assert verdict[1].startswith("does not fit: ") and not tiny["fits"]
    assert states[0] == "model" and "(the floor)" in states[1]
    assert floor["parameters_bytes"] == peak["breakdown"]["parameters"]
    assert floor["optimizer_bytes"] == peak["breakdown"]["optimizer"]
    assert floor["gradients_bytes"] == floor["parameters_bytes"]
    assert sum(floor.values()) < peak["allocated_bytes"]


def test_the_table_holds_each_part_of_the_peak_with_its_share(tiny):
    shares = [line.split()[-1] for line in tiny["screen"].splitlines() if line.startswith("    ") and "%" in line]
    assert len(shares) == sum(1 for nbytes in tiny["peak"]["breakdown"].values() if nbytes)
    assert sum(int(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=len(shares) / 2)


def test_no_floor_is_shown_for_an_optimizer_that_is_not_known(plan):
    made = plan(*MLP, "optimizer=sgd", "optimizer._target_=torch.optim.RMSprop")
    assert made["states"] is None
    assert "model states" not in made["screen"]


def test_the_modules_with_most_activations_and_the_unsharded_units_are_named(tiny):
    peak = tiny["peak"]
    assert sum(peak["activations"].values()) == peak["breakdown"]["activations"]
    parts = ("unsharded_parameters", "unsharded_gradients")
    assert sum(peak["unsharded"].values()) == sum(peak["breakdown"][part] for part in parts)
    assert set(peak["unsharded"]) <= {"tok_embeddings", "layers.0", "norm, output", "the root"}
    most = next(iter(peak["activations"]))
    assert peak["activations"][most] == max(peak["activations"].values())
    assert f"activations of          {most or 'outside of modules'} " in tiny["screen"]


def test_a_page_with_the_timeline_is_written(tiny):
    page = tiny["folder"] / "memory_timeline.html"
    assert "Planned: model=llama_tiny sharding=full_shard" in page.read_text()


# ---- changes


def test_three_changes_are_shown_with_what_their_own_plans_say(plan, tiny):
    changes, needed = tiny["changes"], tiny["peak"]["allocated_bytes"]
    assert len(changes) == 3
    assert [change["saves_bytes"] for change in changes] == sorted((c["saves_bytes"] for c in changes), reverse=True)
    for change in changes:
        alone = plan(*TINY, "cluster.memory_gib=0.008", *change["overrides"], "plan.changes=0")
        assert change["allocated_bytes"] == alone["peak"]["allocated_bytes"] == needed - change["saves_bytes"]
        assert change["fits"] == alone["fits"]
        line = next(line for line in tiny["screen"].splitlines() if line.strip().startswith(change["overrides"][0]))
        assert "saves" in line and ("does not fit" in line) != change["fits"]
    assert {change["fits"] for change in changes} == {True, False}
    assert "(5 changes planned)" in tiny["screen"]


def test_no_changes_are_planned_where_none_are_to_be_shown(plan):
    made = plan(*MLP)
    assert made["changes"] == []
    assert "save" not in made["screen"]


def test_changes_are_not_planned_for_a_run_that_takes_little_unless_they_are_asked_for(plan):
    run = ("model=mlp", "data=random_classes", "cluster.memory_gib=1")
    assert plan(*run)["changes"] == []
    assert plan(*run, "plan.changes=1")["changes"]


# ---- plan.fit


def test_the_largest_micro_batch_fits_and_the_next_one_does_not(plan):
    run = ("model=mlp", "data=random_classes", "cluster.memory_gib=0.001")
    made = plan(*run, "plan.fit=micro_batch", "plan.changes=1")
    fit, value = made["fit"], made["fit"]["value"]
    assert fit["key"] == "train.micro_batch"
    alone = [
        plan(*run, "plan.changes=0", f"train.micro_batch={v}")["peak"]["allocated_bytes"] for v in (value, value + 1)
    ]
    assert alone[0] <= made["capacity_bytes"] < alone[1]
    assert made["peak"]["allocated_bytes"] == alone[0]
    assert [fit["tried"][str(v)] for v in (value, value + 1)] == alone
    assert len(fit["tried"]) <= 5
    assert all(f"train.micro_batch={v} " in made["screen"] for v in fit["tried"])
    assert f"train.micro_batch={value} is the largest that fits" in made["screen"]
    [change] = made["changes"]  # of the run with that micro-batch
    assert change["saves_bytes"] == alone[0] - change["allocated_bytes"]


def test_a_global_batch_limits_the_micro_batch(plan):
    made = plan(*MLP, "cluster.memory_gib=0.1", "plan.fit=micro_batch", "train.global_batch=12")
    assert made["fit"]["value"] == 6
    assert "train.micro_batch=6: all that train.global_batch=12 allows" in made["screen"]


def test_the_longest_sequence_is_a_multiple_of_128_or_the_models_limit(plan):
    run = (*TINY, "train.micro_batch=2", "plan.fit=seq_len", "plan.changes=0")
    short, long = (plan(*run, f"cluster.memory_gib={gib}") for gib in (0.02, 4))
    value = short["fit"]["value"]
    assert value % 128 == 0
    assert short["fit"]["tried"][str(value)] <= short["capacity_bytes"] < short["fit"]["tried"][str(value + 128)]
    assert long["fit"]["value"] == 1024
    assert "data.seq_len=1024: all that model.max_seq_len allows" in long["screen"]


def test_where_not_even_one_sample_fits_the_plan_says_by_how_much(plan):
    made = plan(*MLP, "cluster.memory_gib=0.000003", "plan.fit=micro_batch")
    assert (made["fit"]["value"], made["fits"]) == (None, False)
    assert "not even train.micro_batch=1 fits" in made["screen"]
    assert "does not fit: " in made["screen"]


# ---- mistakes


@pytest.mark.parametrize(("overrides", "message"), [
    ("model=mlp data=random_classes plan.fit=micro_batch", "needs a capacity, which cluster=CPU lacks"),
    ("plan.fit=seq_len cluster=h200 model=mlp data=random_classes", "the data has no data.seq_len"),
    ("model=mlp data=text", "do model and data go together?"),
    ("data=random_tokens model.vocab_size=100", "model.vocab_size=100 is smaller than the 256 token ids of the data"),
    ("model.layers=1 data.seq_len=2048", "data.seq_len=2048 is longer than model.max_seq_len=1024"),
    ("sharding.units=[blocks.*]", "the pattern 'blocks.*' matches no module"),
    ("sharding=hybrid_shard sharding.replicas=3", "sharding.replicas=3 does not divide the 2 ranks"),
])  # fmt: skip
def test_mistakes_are_told_in_one_line(plan, overrides, message):
    with pytest.raises(ConfigError) as caught:
        plan("plan.changes=0", *overrides.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class Branching(torch.nn.Module):
    """What it does depends on values, in a module of its own."""

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x if x.sum() > 0 else x

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(10, 5)
        self.gate = Branching.Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.linear(x))


def test_a_model_that_cannot_be_planned_is_told_the_operator_and_the_module_that_stop_it(plan):
    with pytest.raises(
        ConfigError,
        match=r"aten._local_scalar_dense in gate \(test_plan_job.py:\d+\) cannot be planned: .* torch.where",
    ):
        plan("model=custom", f"model._target_={__name__}.Branching", "data=random_classes")


class Broken(Branching):
    """Its own code fails, in no operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {}["missing"]  # type: ignore


class Reading(Branching):
    """Leaves PyTorch for NumPy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(x.detach().cpu().numpy().sum())


@pytest.mark.parametrize(("model", "message"), [
    (Broken, r"its Python code in the model itself \(test_plan_job.py:\d+\) .*KeyError: 'missing'.* train.log has the"),
    (Reading, r"\(test_plan_job.py:\d+\) cannot be planned: what it returns depends on values"),
])  # fmt: skip
def test_a_model_that_fails_in_its_own_code_is_told_the_line(plan, model, message):
    with pytest.raises(ConfigError, match=message):
        plan("model=custom", f"model._target_={__name__}.{model.__name__}", "data=random_classes")


# ---- the command


def test_the_command_plans_changes_of_its_own_command_line(tmp_path):
    overrides = [
        *TINY,
        "cluster=h200",
        "plan.changes=3",
        "activation=selective",
        "precision=bf16",
        f"hydra.run.dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "mode=plan", *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    changes = json.loads((tmp_path / "plan.json").read_text())["changes"]
    assert changes
    assert all(change["saves_bytes"] > 0 and change["fits"] for change in changes)
    assert done.stdout.index("peak reserved") < done.stdout.index("what would save most")
