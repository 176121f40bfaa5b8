import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.tracking import Tracker
from shardlab.tracking.config import WandbMode
from tests.tracking.conftest import FAKE_KEY, HEADER, WandbServer, rows_of, wandb_records, wandb_summary

CLOSED_PORT = "http://127.0.0.1:9"


def train(tracker: Tracker, steps: int = 3, **finish: object) -> None:
    """A short run whose loss falls and rises again."""
    tracker.start(HEADER)
    log_rows(tracker, range(1, steps + 1))
    tracker.finish({"status": "completed", **finish}, table=[])


def log_rows(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.advance(step)
        row = {"train/loss": 2.0 + abs(step - 2), "perf/tokens_per_s": 100.0 * step, "train/grad_norm": 1.0 / step}
        tracker.log({**row, "progress/step": step, "progress/tokens": 10 * step}, step)


def test_an_offline_run_holds_rows_config_and_tags(track: Callable[..., Tracker], capfd: pytest.CaptureFixture) -> None:
    tracker = track(WandbMode.offline, group="sweep-1", tags=["mine", "precision=bf16"], name="first")
    train(tracker, loss={"first": 3.0, "last": 3.0}, memory={"reserved_peak_bytes": None}, world_size=2)
    records = wandb_records(tracker.run_dir)
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["train/loss"] for item in history] == [3.0, 2.0, 3.0]
    assert [item["_step"] for item in history] == [1, 2, 3]
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("sweep-1", "train", "first")
    assert run["tags"] == ["precision=bf16", "mine"]
    told = wandb_summary(tracker.run_dir)
    assert (told["project"], told["exit_code"], told["config"]["train"]["steps"]) == ("shardlab", 0, 3)
    assert told["summary"]["loss.last"] == 3.0
    assert (told["summary"]["status"], told["summary"]["world_size"]) == ("completed", 2)
    out, err = capfd.readouterr()
    assert "wandb:" not in out + err
    assert "wandb leet run " in out
    assert f"{tracker.run_dir.name}/wandb/latest-run\n" in out
    assert "wandb sync" not in out


def test_the_summary_keeps_last_and_best(track: Callable[..., Tracker]) -> None:
    tracker = track(WandbMode.offline)
    train(tracker)
    summary = wandb_summary(tracker.run_dir)["summary"]
    assert summary["train/loss"] == {"min": 2.0, "max": 3.0, "last": 3.0}
    assert summary["train/grad_norm"] == {"max": 1.0, "last": pytest.approx(1 / 3)}


@pytest.mark.parametrize("axis", ["progress/tokens", "progress/samples"])
def test_tokens_are_the_x_axis_and_samples_where_there_are_none(track: Callable[..., Tracker], axis: str) -> None:
    tracker = track(WandbMode.offline)
    tracker.start(HEADER)
    tracker.log({"train/loss": 1.0, "progress/step": 1, "progress/samples": 8, axis: 16}, 1)
    tracker.log({"eval/loss": 1.0, "progress/step": 1, "progress/samples": 8, axis: 16}, 1)
    tracker.finish({"status": "completed"}, table=[])
    records = wandb_records(tracker.run_dir)
    axes = {record["metric"]["step_metric"] for record in records if record.get("metric", {}).get("step_metric")}
    assert axes == {axis}
    (item,) = (record["history"]["item"] for record in records if record["type"] == "history")
    assert (item["train/loss"], item["eval/loss"], item[axis]) == (1.0, 1.0, 16)


def test_what_is_not_finite_does_not_spoil_the_extremes(track: Callable[..., Tracker]) -> None:
    tracker = track(WandbMode.offline)
    tracker.start(HEADER)
    for step, norm in enumerate([1.0, math.inf, math.nan, 0.5], start=1):
        tracker.log({"train/grad_norm": norm, "progress/tokens": step}, step)
    tracker.finish({"status": "completed"}, table=[])
    assert wandb_summary(tracker.run_dir)["summary"]["train/grad_norm"] == {"max": 1.0, "last": 0.5}


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_did_not_complete_fails_in_wandb_too(track: Callable[..., Tracker], status: str) -> None:
    tracker = track(WandbMode.offline)
    tracker.start(HEADER)
    tracker.finish({"status": status, "error": "rank 1: boom"}, table=[])
    told = wandb_summary(tracker.run_dir)
    assert (told["exit_code"], told["summary"]["status"], told["summary"]["error"]) == (1, status, "rank 1: boom")


def test_auto_is_offline_without_an_account(track: Callable[..., Tracker], capfd: pytest.CaptureFixture) -> None:
    tracker = track(WandbMode.auto)
    train(tracker)
    assert list(tracker.run_dir.glob("wandb/offline-run-*"))
    assert "note:" not in capfd.readouterr().out


@pytest.mark.parametrize(("variable", "folders"), [("offline", ["offline-run-*"]), ("disabled", [])])
def test_auto_follows_wandb_mode(
    track: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch, variable: str, folders: list[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    tracker = track(WandbMode.auto)
    train(tracker)
    assert len(list(tracker.run_dir.glob("wandb/*run-*-*"))) == len(folders)
    assert all(list(tracker.run_dir.glob(f"wandb/{pattern}")) for pattern in folders)


def test_online_without_an_account_says_so_and_is_offline(
    track: Callable[..., Tracker], capfd: pytest.CaptureFixture
) -> None:
    tracker = track(WandbMode.online)
    train(tracker)
    assert "not logged in (wandb login)" in capfd.readouterr().out
    assert list(tracker.run_dir.glob("wandb/offline-run-*"))


def test_a_key_that_is_none_says_so_and_is_offline(
    track: Callable[..., Tracker], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    tracker = track(WandbMode.auto)
    train(tracker)
    assert capfd.readouterr().out.count("W&B goes on offline: WANDB_API_KEY invalid") == 1
    assert list(tracker.run_dir.glob("wandb/offline-run-*"))


@pytest.mark.parametrize("mode", [WandbMode.auto, WandbMode.online])
def test_a_server_that_cannot_be_reached_is_said_once_and_the_run_is_offline(
    track: Callable[..., Tracker], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, mode: WandbMode
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", CLOSED_PORT)
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    began = time.monotonic()
    tracker = track(mode, init_timeout_s=2)
    tracker.start(HEADER)
    assert time.monotonic() - began < 15  # else it is 20 s
    log_rows(tracker, range(1, 4))
    tracker.finish({"status": "completed"}, table=[])
    out, err = capfd.readouterr()
    assert out.count("W&B goes on offline: Timed out") == 1
    assert "wandb sync " in out
    assert "wandb:" not in out + err
    assert wandb_summary(tracker.run_dir)["summary"]["train/loss"]["last"] == 3.0
    assert len(rows_of(tracker.run_dir)) == 3


def test_a_run_that_wandb_refuses_goes_on_without_wandb(
    track: Callable[..., Tracker], capfd: pytest.CaptureFixture
) -> None:
    tracker = track(WandbMode.offline, project="a/b")  # no name for a project
    train(tracker)
    assert capfd.readouterr().out.count("W&B is off: ") == 1
    assert len(rows_of(tracker.run_dir)) == 3


def test_an_online_run_uploads_its_rows_and_shows_its_url(
    track: Callable[..., Tracker], wandb_server: WandbServer, capfd: pytest.CaptureFixture
) -> None:
    tracker = track(WandbMode.auto)
    train(tracker)
    out = capfd.readouterr().out
    assert out.count(f"{wandb_server.url}/team/shardlab/runs/") == 2  # as it starts, to look on, and as it ends
    assert [row["train/loss"] for row in wandb_server.history] == [3.0, 2.0, 3.0]
    assert wandb_server.exit_code == 0


def test_a_network_that_goes_away_ends_neither_run_nor_patience(
    track: Callable[..., Tracker], wandb_server: WandbServer, capfd: pytest.CaptureFixture
) -> None:
    tracker = track(WandbMode.online, finish_timeout_s=1)
    tracker.start(HEADER)
    log_rows(tracker, range(1, 3))
    wandb_server.go_away()
    log_rows(tracker, range(3, 4))
    began = time.monotonic()
    tracker.finish({"status": "completed"}, table=[])
    assert time.monotonic() - began < 12  # else it is 15 s
    out, err = capfd.readouterr()
    assert out.count("note: W&B has not got all rows after 1 s") == 1
    assert "wandb sync " in out
    assert "wandb:" not in out + err
    assert wandb_summary(tracker.run_dir)["summary"]["perf/tokens_per_s"]["last"] == 300.0
    assert len(rows_of(tracker.run_dir)) == 3


def test_a_wandb_process_that_dies_is_said_once(tmp_path: Path) -> None:
    program = """if True:
        import os, pathlib, subprocess, time
        from shardlab.tracking import RunHeader, make_tracker
        from shardlab.tracking.config import TrackingConfig, WandbConfig, WandbMode
        cfg = TrackingConfig(wandb=WandbConfig(mode=WandbMode.offline))
        tracker = make_tracker(cfg, pathlib.Path("."), config={}, tags=[], rank=0)
        tracker.start(RunHeader(rows=[], total_steps=3))
        tracker.log({"train/loss": 1.0}, 1)
        pid = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, check=True).stdout
        os.kill(int(pid), 9)
        time.sleep(0.2)
        for step in (2, 3):
            tracker.log({"train/loss": 1.0}, step)
        tracker.finish({"status": "completed"}, table=[])
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("W&B fails") == 1
    assert "completed" in done.stdout
    assert len(rows_of(tmp_path)) == 3


def test_wandb_keeps_the_commit_but_uploads_no_code(
    track: Callable[..., Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "train.py").write_text("pass\n")
    for command in (["init", "-q"], ["add", "train.py"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text("secret = 1\n")
    monkeypatch.chdir(tmp_path)
    tracker = track(WandbMode.offline)
    train(tracker)
    folder = (tracker.run_dir / "wandb" / "latest-run").resolve()
    assert {path.name for path in folder.rglob("*") if path.is_file()}.isdisjoint({"diff.patch", "train.py"})
    environments = [
        record["environment"] for record in wandb_records(tracker.run_dir) if record["type"] == "environment"
    ]
    assert any(len(environment.get("git", {}).get("commit", "")) == 40 for environment in environments)
