import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardlab.tracking import Tracker, make_tracker
from shardlab.tracking.config import TrackingConfig, WandbMode
from tests.tracking.conftest import HEADER, rows_of, wandb_summary

CONF = Path(__file__).parents[2] / "conf" / "tracking"


class Broken:
    """What fails whatever it is asked, and counts how often."""

    name = "W&B"

    def __init__(self) -> None:
        self.calls = 0

    def _fail(self, *args: object) -> None:
        self.calls += 1
        raise RuntimeError(f"failure {self.calls}")

    start = log = finish = _fail

    def where(self) -> list[tuple[str, str]]:
        return []


def test_ranks_above_zero_write_and_say_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = make_tracker(TrackingConfig(), tmp_path, config={}, tags=[], rank=1)
    before = set(tmp_path.iterdir())
    tracker.start(HEADER)
    tracker.advance(1)
    tracker.log({"train/loss": 1.0}, 1)
    tracker.notice("something")
    tracker.finish({"status": "completed"}, table=[("status", "completed")])
    assert set(tmp_path.iterdir()) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("rank", "mode", "imported"), [(1, "auto", set()), (0, "disabled", {"rich"}), (0, "offline", {"rich", "wandb"})]
)
def test_rich_and_wandb_are_imported_only_where_they_are_used(
    tmp_path: Path, rank: int, mode: str, imported: set[str]
) -> None:
    program = f"""if True:
        import pathlib, sys
        from shardlab.tracking import RunHeader, make_tracker
        from shardlab.tracking.config import TrackingConfig, WandbConfig, WandbMode
        cfg = TrackingConfig(wandb=WandbConfig(mode=WandbMode.{mode}))
        tracker = make_tracker(cfg, pathlib.Path({str(tmp_path)!r}), config={{}}, tags=[], rank={rank})
        tracker.start(RunHeader(rows=[], total_steps=1))
        tracker.finish({{"status": "completed"}}, table=[])
        print("imported:", *({{"rich", "wandb", "torch"}} & set(sys.modules)))
    """
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(out.splitlines()[-1].split()[1:]) == imported


def test_a_notice_is_said_once_on_screen_and_in_the_log(
    track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tracker = track()
    tracker.start(HEADER)
    tracker.notice("hybrid_shard on one node is full_shard")
    tracker.notice("hybrid_shard on one node is full_shard")
    tracker.finish({"status": "completed"}, table=[])
    assert capsys.readouterr().out.count("hybrid_shard on one node") == 1
    said = [record.message for record in caplog.records]
    assert said.count("hybrid_shard on one node is full_shard") == 1


def test_what_runs_and_what_came_of_it_is_in_the_log_too(
    track: Callable[..., Tracker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tracker = track()
    tracker.start(HEADER)
    tracker.finish({"status": "completed"}, table=[("tokens/s", "8,000")])
    said = [record.message for record in caplog.records]
    assert said[: len(HEADER.rows)] == [f"{label}: {value}" for label, value in HEADER.rows]
    assert said[-2:] == ["status: completed", "tokens/s: 8,000"]


def test_what_fails_again_and_again_is_said_once_and_costs_no_row(
    track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker, broken = track(), Broken()
    tracker.wandb = broken  # type: ignore[assignment]
    tracker.start(HEADER)
    for step in (1, 2, 3):
        tracker.log({"train/loss": 1.0}, step)
    tracker.finish({"status": "completed"}, table=[("status", "completed")])
    out = capsys.readouterr().out
    assert broken.calls == 5
    assert out.count("W&B fails (RuntimeError: failure 1); the run goes on without") == out.count("W&B fails") == 1
    assert "completed" in out
    assert [row["step"] for row in rows_of(tracker.run_dir)] == [1, 2, 3]


def test_finishing_twice_is_finishing_once(track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]) -> None:
    tracker = track()
    tracker.start(HEADER)
    tracker.finish({"status": "interrupted"}, table=[])
    first = capsys.readouterr().out
    tracker.finish({"status": "failed"}, table=[])
    tracker.log({"train/loss": 1.0}, 1)
    tracker.advance(1)
    assert "interrupted" in first
    assert capsys.readouterr().out == ""


def test_finishing_before_starting_is_harmless(
    track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]
) -> None:
    track(WandbMode.offline).finish({"status": "failed", "error": "no data"}, table=[])
    assert "no data" in capsys.readouterr().out


def test_an_impatient_user_still_gets_rows_and_closing_table(
    track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    tracker, sink = track(), Broken()
    monkeypatch.setattr(sink, "finish", interrupted)
    tracker.wandb = sink  # type: ignore[assignment]
    tracker.start(HEADER)
    tracker.log({"train/loss": 1.0}, 1)
    with pytest.raises(KeyboardInterrupt):
        tracker.finish({"status": "completed"}, table=[])
    assert "completed" in capsys.readouterr().out
    assert len(rows_of(tracker.run_dir)) == 1


def test_another_thread_can_finish(track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]) -> None:
    """As where the main thread waits for a rank that is gone."""
    tracker = track(WandbMode.offline)
    tracker.start(HEADER)
    tracker.log({"train/loss": 1.0, "progress/tokens": 1}, 1)
    other = threading.Thread(target=tracker.finish, args=({"status": "interrupted"},), kwargs={"table": []})
    other.start()
    other.join(timeout=20)
    assert not other.is_alive()
    assert wandb_summary(tracker.run_dir)["summary"]["status"] == "interrupted"
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("choice", ["wandb", "none"])
def test_each_choice_of_the_config_group_fits_the_schema(choice: str) -> None:
    cfg = OmegaConf.merge(OmegaConf.structured(TrackingConfig), OmegaConf.load(CONF / f"{choice}.yaml"))
    assert cfg.wandb.mode is {"wandb": WandbMode.auto, "none": WandbMode.disabled}[choice]
    assert cfg.wandb.project == "shardlab"
    assert OmegaConf.to_object(cfg) == TrackingConfig(wandb=OmegaConf.to_object(cfg.wandb))  # type: ignore[arg-type]


def test_the_default_choice_repeats_the_defaults_of_the_schema() -> None:
    cfg = OmegaConf.merge(OmegaConf.structured(TrackingConfig), OmegaConf.load(CONF / "wandb.yaml"))
    assert OmegaConf.to_object(cfg) == TrackingConfig()


def test_a_config_node_of_hydra_serves_as_well_as_a_dataclass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = OmegaConf.load(CONF / "none.yaml")  # no schema: modes are strings
    tracker = make_tracker(cfg, tmp_path, config={}, tags=[], rank=0)  # type: ignore[arg-type]
    tracker.start(HEADER)
    tracker.finish({"status": "completed"}, table=[])
    assert "completed" in capsys.readouterr().out
