"""A sweep in W&B: its group, and the run that sums it up, read back by W&B's own reader."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from shardlab.sweep.results import read_results
from shardlab.sweep.wandb_summary import group_of, log_summary
from shardlab.tracking.config import TrackingConfig, WandbConfig, WandbMode
from tests.sweep.folders import write_finished_sweep
from tests.tracking.conftest import no_wandb_account, wandb_records, wandb_summary

__all__ = ["no_wandb_account"]  # a fixture that is used for all tests here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_finished_sweep(tmp_path / "2026-01-31" / "12-00-00")


def give_configs(folder: Path, mode: WandbMode = WandbMode.offline, *, to: str = "0", **keys: Any) -> None:
    """Writes the part of a job's config.yaml that is about W&B, as a run does."""
    tracking = TrackingConfig(wandb=WandbConfig(mode=mode, **keys))
    (folder / to / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured({"tracking": tracking})))


def test_a_sweep_is_one_run_beside_its_jobs(folder):
    give_configs(folder, project="mine", tags=["nightly"])
    told = log_summary(folder)
    assert told is not None
    assert told.startswith("browse the W&B run of the sweep: ") and "wandb leet run" in told and "\n" not in told
    records = wandb_records(folder)
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["run_group"], run["job_type"], run["project"]) == ("sweep 2026-01-31/12-00-00", "sweep", "mine")
    assert (run["display_name"], run["tags"]) == ("sweep 2026-01-31/12-00-00", ["nightly"])
    read = wandb_summary(folder)
    assert read["exit_code"] == 1  # as the command's: a job failed
    assert read["config"]["command"].startswith("python train.py -m sharding=full_shard,no_shard")
    summary = read["summary"]
    assert {key.removeprefix("jobs."): count for key, count in summary.items() if key.startswith("jobs.")} == {
        "total": 8,
        **{"completed": 4, "oom": 1, "killed": 1, "failed": 1, "skipped": 1},
    }
    assert (summary["status"], summary["best.job"], summary["best.tokens_per_s"]) == ("failed", 2, 5900.0)
    assert summary["best.overrides"] == "sharding=no_shard precision=fp32 accumulation=none"
    assert summary["best.peak_bytes"] == 80 * 2**20
    assert summary["advice.text"] and summary["advice.command"].startswith("torchrun ")


def test_it_holds_the_table_and_the_plots(folder):
    give_configs(folder)
    log_summary(folder)
    files = (folder / "wandb" / "latest-run" / "files" / "media").resolve()
    (table,) = (json.loads(file.read_text()) for file in files.rglob("*.table.json"))
    results = read_results(folder)
    assert table["columns"] == results.columns
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == list(results.rows)
    plots = [json.loads(file.read_text()) for file in files.rglob("*.plotly.json")]
    traces = [{trace.get("name"): trace for trace in plot["data"]} for plot in plots]
    (scatter,) = (named for named in traces if "jobs" in named)
    assert sorted(scatter["jobs"]["y"]) == [4800.0, 5100.0, 5200.0, 5900.0]
    assert scatter["Pareto front"]["y"] == [5200.0, 5900.0]
    (memory,) = (named for named in traces if "activations" in named)
    of_job_0 = [trace["y"][trace["x"][1].index("measured")] for trace in memory.values()]  # the first bar
    assert sum(of_job_0) == pytest.approx(50 / 1024)
    (curves,) = (named for named in traces if scatter is not named is not memory)
    assert len(curves) == 4


def test_a_group_of_the_jobs_own_is_the_summarys_too(folder):
    give_configs(folder, group="ablation")
    log_summary(folder)
    (run,) = (record["run"] for record in wandb_records(folder) if record["type"] == "run")
    assert run["run_group"] == "ablation"


def test_a_job_that_has_wandb_is_followed_where_another_has_not(folder):
    give_configs(folder, WandbMode.disabled, to="0")
    give_configs(folder, WandbMode.offline, to="1")
    assert log_summary(folder) is not None
    assert list(folder.glob("wandb/offline-run-*"))


@pytest.mark.parametrize("mode", [None, WandbMode.disabled])
def test_nothing_is_logged_where_no_job_has_wandb(folder, mode):
    if mode:
        give_configs(folder, mode)
    assert log_summary(folder) is None
    assert not (folder / "wandb").exists()


def test_a_run_that_wandb_refuses_is_one_line(folder):
    give_configs(folder, project="a/b")  # no name for a project
    told = log_summary(folder)
    assert told is not None
    assert told.startswith("W&B is off: ") and "\n" not in told


def test_whatever_fails_is_one_line(folder, monkeypatch):
    give_configs(folder)
    monkeypatch.setattr("wandb.Table", lambda **_: 1 / 0)
    assert log_summary(folder) == "W&B has no summary of the sweep: ZeroDivisionError: division by zero"


def test_a_group_is_named_after_the_folder_at_no_cost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert group_of(Path("day/time")) == group_of(tmp_path / "day" / "time") == "sweep day/time"
    program = "import sys, shardlab.sweep.wandb_summary; print({'torch', 'wandb', 'plotly'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
