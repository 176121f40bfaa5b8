"""`hydra/sweeper=optuna`: Optuna chooses the combinations, and is told what came of them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hydra_plugins.shardlab_launchers.optuna_sweeper import OptunaSweeper
from shardlab.errors import ConfigError
from shardlab.sweep.objectives import objectives
from shardlab.sweep.records import read_sweep
from tests.commands import QUICK, Command


def test_optuna_finds_the_plan_that_takes_least_whatever_becomes_of_others(tmp_path: Path) -> None:
    ended = Command(
        tmp_path, "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", *QUICK, "mode=plan",
        "hydra.sweeper.params={train.micro_batch: 'choice(64,-1,16)'}", f"hydra.sweep.dir={tmp_path}/sweep",
        "sweep.objectives=[plan.allocated_peak_bytes]", "hydra.sweeper.direction=minimize",
    ).wait()  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.err == ""
    jobs = {job.record.overrides[0]: job for job in read_sweep(tmp_path / "sweep")[1]}
    assert {key: job.status for key, job in jobs.items()} == {
        "train.micro_batch=64": "completed",
        "train.micro_batch=-1": "skipped",
        "train.micro_batch=16": "completed",
    }
    best = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    assert best["best_params"] == {"train.micro_batch": 16}
    assert best["best_value"] == jobs["train.micro_batch=16"].summary["plan"]["allocated_peak_bytes"]
    assert (tmp_path / "sweep/report.html").exists()


def test_a_run_that_did_not_come_to_all_objectives_has_none() -> None:
    summary = {"status": "completed", "perf": {"tokens_per_s": 5}, "memory": {"reserved_peak_bytes": None}}
    assert objectives(summary, ["perf.tokens_per_s"]) == 5.0
    assert objectives(summary, ["perf.tokens_per_s", "perf.tokens_per_s"]) == (5.0, 5.0)
    assert objectives(summary, ["perf.tokens_per_s", "memory.reserved_peak_bytes"]) is None
    assert objectives(summary | {"status": "oom"}, ["perf.tokens_per_s"]) is None
    assert objectives(summary, []) is None


def set_up(direction: Any, names: list[str]) -> None:
    config: Any = SimpleNamespace(sweep=SimpleNamespace(objectives=names))
    context: Any = None
    OptunaSweeper(sampler=None, direction=direction).setup(hydra_context=context, task_function=context, config=config)


@pytest.mark.parametrize(
    ("direction", "names"),
    [("maximize", ["perf.step_ms", "loss.last"]), ("max", ["perf.step_ms"]), ("maximize", [])],
)
def test_each_objective_has_a_direction(direction: Any, names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.direction=\[max.*one for each of sweep\.objectives="):
        set_up(direction, names)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardlab\[optuna\]'"):
        set_up("maximize", ["perf.step_ms"])
