"""The plan ahead of a training run: beside what is measured, and never in the run's way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardlab.data.random_classes import RandomClasses
from shardlab.distributed import Ranks
from shardlab.errors import Interrupted
from shardlab.planner import ahead
from shardlab.planner.ahead import Ahead, NoPlan
from shardlab.telemetry.prediction import Prediction
from tests.commands import Command, read_json, rows_of, run
from tests.tracking.conftest import wandb_summary
from tests.training import config_of

# A user's own models and data.
USERS_MODULE = """
import sys
import time
from pathlib import Path

import torch

import shardlab.planner.ahead
from shardlab.data.random_classes import RandomClasses
from shardlab.data.random_tokens import RandomTokens

shardlab.planner.ahead.LIMIT_SECONDS = 200.0  # this machine may be busy


class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 5)

    def forward(self, features):
        return self.layer(features if features.sum() > 0 else -features)


class Sleeping(RandomClasses):
    def __getitem__(self, index):
        if sys.argv[0].endswith("ahead.py"):
            Path("planning").touch()
            time.sleep(600)
        return super().__getitem__(index)
"""

QUICK = ("data=random_classes", "tracking=none", "train.eval_every=null", "train.steps=1")
MLP = ("model=mlp", "data=random_classes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    return tmp_path


def test_a_run_shows_what_was_planned_beside_the_same_measured_to_the_byte(folder: Path) -> None:
    model = ("model=llama_tiny", "model.layers=1")
    data = ("data=random_tokens", "data._target_=mine.RandomTokens", "data.seq_len=64", "train.micro_batch=2")
    ended = run(folder, *model, *data, "train.steps=4", "train.eval_every=null", "hydra.run.dir=run", ranks=2)
    assert (ended.code, ended.errors, ended.tracebacks) == (0, [], 0), ended.err
    run_folder = folder / "run"
    peak, summary = read_json(run_folder / "plan.json")["peak"], read_json(run_folder / "summary.json")
    nbytes = peak["allocated_bytes"]
    assert summary["memory"]["allocated_peak_bytes"] == nbytes
    assert summary["memory"]["breakdown"] == peak["breakdown"]
    assert summary["plan"] == {"allocated_peak_bytes": nbytes, "reserved_peak_bytes": None, "error_pct": 0.0}

    rows = rows_of(run_folder)
    assert [row["step"] for row in rows] == [1, 4]
    plan_metrics = [{key: value for key, value in row.items() if key.startswith("plan/")} for row in rows]
    assert plan_metrics == [{"plan/allocated_peak_gib": nbytes / 2**30}, {"plan/error_pct": 0.0}]
    on_wandb = wandb_summary(run_folder)["summary"]
    assert on_wandb["plan/allocated_peak_gib"]["last"] == nbytes / 2**30
    assert (on_wandb["plan/error_pct"]["last"], on_wandb["plan.error_pct"]) == (0.0, 0.0)

    size = f"{nbytes / 2**20:.1f} MiB"
    lines = ended.out.splitlines()
    header = lines[: lines.index("")]
    assert header[-1] == f"  plan        {size} allocated per rank"
    assert f"  peak allocated     {size} per rank (planned {size}, error 0.0 %)" in lines


def test_a_model_that_cannot_be_planned_trains_with_a_notice(folder: Path) -> None:
    ended = run(folder, *QUICK, "model=custom", "model._target_=mine.Branching", "hydra.run.dir=run")
    assert (ended.code, ended.err) == (0, "")
    summary = read_json(folder / "run" / "summary.json")
    assert summary["status"] == "completed"
    assert summary["plan"] == {"allocated_peak_bytes": None, "reserved_peak_bytes": None, "error_pct": None}
    (notice,) = (line for line in ended.out.splitlines() if line.startswith("note: "))
    assert notice.startswith("note: no plan ahead of the run: model: aten._local_scalar_dense in the model itself ")
    assert "features if features.sum() > 0" in (folder / "run" / "train.log").read_text()  # where it failed
    assert not (folder / "run" / "plan.json").exists()


@pytest.mark.parametrize("how", ["ctrl-c", "sigkill"])
def test_nothing_of_the_plan_outlives_a_run_that_is_ended_while_it_waits(folder: Path, how: str) -> None:
    command = Command(folder, *QUICK, "model=mlp", "data._target_=mine.Sleeping", "hydra.run.dir=run")
    command.wait_until((folder / "planning").exists)
    command.wait_until(lambda: "device: 1 x " in (folder / "run" / "train.log").read_text())  # the header is shown
    command.interrupt() if how == "ctrl-c" else command.process.kill()
    ended = command.wait()  # which finds all processes of the command
    assert ended.code == (130 if how == "ctrl-c" else -signal.SIGKILL)
    assert read_json(folder / "run" / "summary.json")["status"] == ("interrupted" if how == "ctrl-c" else "running")
    assert ended.err == ""


def test_a_plan_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LIMIT_SECONDS", 0.2)
    with (
        Ahead(config_of(*MLP, world_size=1), place=Ranks(), on_cpu=True, file=tmp_path / "plan.json") as plan,
        pytest.raises(NoPlan, match="not finished within 0.2 s"),
    ):
        plan.result(lambda: None)
    assert process_of(plan).returncode == -signal.SIGKILL
    assert not (tmp_path / "plan.json").exists()


def test_a_signal_ends_the_wait_and_the_plan(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise Interrupted

    with (
        pytest.raises(Interrupted),
        Ahead(config_of(*MLP, world_size=1), place=Ranks(), on_cpu=True, file=tmp_path / "plan.json") as plan,
    ):
        plan.result(interrupted)
    assert process_of(plan).returncode == -signal.SIGKILL


def test_what_cannot_even_be_started_is_told_where_the_plan_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with (
        Ahead(config_of(*MLP, world_size=1), place=Ranks(), on_cpu=True, file=tmp_path / "plan.json") as plan,
        pytest.raises(NoPlan, match="FileNotFoundError"),
    ):
        plan.result(lambda: None)


class Environment(RandomClasses):
    """Notes in which environment it is made."""

    def __init__(self, note: str, **arguments: Any):
        super().__init__(**arguments)
        Path(note).write_text(json.dumps(dict(os.environ)))


def test_a_run_on_gpus_is_planned_for_them_by_a_process_that_sees_none_and_is_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
    launcher += ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
    for name in launcher:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(ahead, "LIMIT_SECONDS", 200.0)  # this machine may be busy
    target = "data._target_=tests.planner.test_ahead.Environment"
    config = config_of(*MLP, target, f"+data.note={tmp_path / 'environment'}", world_size=4, nodes=2)
    place = Ranks(rank=0, world_size=4, local_rank=0, local_world_size=2)
    with Ahead(config, place=place, on_cpu=False, file=tmp_path / "plan.json") as plan:
        prediction = plan.result(lambda: None)
    assert prediction.capacity_bytes == (140 << 30) - 3 * (1 << 29)  # without what is set aside
    assert prediction.reserved_bytes is not None
    assert 0 < prediction.allocated_bytes <= prediction.reserved_bytes
    assert prediction.fits
    assert read_json(tmp_path / "plan.json")["world_size"] == 4
    environment = read_json(tmp_path / "environment")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not environment.keys() & {*launcher}
    assert process_of(plan).returncode == 0


@pytest.mark.parametrize(
    ("planned", "measured", "error_pct"),
    [
        ((105, None), (100, None), 5.0),
        ((95, 220), (100, 200), 10.0),  # of what is reserved
        ((95, None), (100, 200), -5.0),
        ((100, 200), (None, None), None),
        ((100, None), (0, None), None),
    ],
)
def test_the_error_is_of_reserved_memory_where_some_is(
    planned: tuple[int, int | None], measured: tuple[int | None, int | None], error_pct: float | None
) -> None:
    memory = dict(zip(("allocated_peak_bytes", "reserved_peak_bytes"), measured, strict=True))
    assert Prediction(*planned, capacity_bytes=None, fits=None).error_pct(memory) == error_pct


def process_of(plan: Ahead) -> "subprocess.Popen[bytes]":
    assert plan._process is not None
    return plan._process
