"""The saved workspace, as it is before W&B gets it."""

import json
import sys
import warnings
from typing import Any

import pytest

from shardlab.device import Cpu
from shardlab.telemetry.prediction import Prediction
from shardlab.tracking import Tracker
from shardlab.tracking.dashboard import SECTIONS, main, make_workspace, specification
from shardlab.tracking.wandb_run import KEPT, KEPT_OF
from tests.training import CPU, trainer_of

with warnings.catch_warnings(action="ignore"):  # it imports what pydantic is about to drop
    import wandb_workspaces.reports.v2
    import wandb_workspaces.workspaces  # noqa: F401

DESIGN = ["train", "eval", "perf", "memory", "comm", "plan", "progress"]


class Gpu(Cpu):
    """Counts as a GPU's allocator does, and has a peak: so that the trainer logs all that it ever logs."""

    def memory_bytes(self) -> dict[str, int]:
        return {"allocated_peak": 1, "active_peak": 1, "reserved_peak": 1, "alloc_retries": 0, "ooms": 0}

    def peak_flops(self, dtype: Any) -> float:
        return 1e12


class Names(Tracker):
    """Keeps the names of what is logged."""

    def log(self, row: Any, step: int) -> None:
        self._said |= set(row)

    @property
    def names(self) -> set[str]:
        return self._said


def logged_names() -> set[str]:
    """What the trainer logs in a run that has everything: tokens, fp16 with a scaler, evaluation, a plan."""
    tracker = Names(None)  # type: ignore[arg-type]
    trainer = trainer_of(
        *("model=llama_tiny", "model.layers=1", "data=random_tokens", "data.seq_len=16", "train.micro_batch=1"),
        *("train.steps=4", "train.log_every=1", "train.eval_every=4", "precision=fp16"),
        device=Gpu(CPU),
        tracker=tracker,
        prediction=Prediction(allocated_bytes=1, reserved_bytes=1, capacity_bytes=None, fits=None),
    )
    trainer.fit()
    return tracker.names


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return specification(make_workspace(entity="team", project="shardlab"))["section"]


def panels_of(spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {section["name"]: section["panels"] for section in spec["panelBankConfig"]["sections"]}


def test_its_sections_show_what_the_trainer_logs_and_nothing_else(on_ranks, spec):
    (logged,) = on_ranks(1)(logged_names)
    _, *sections = panels_of(spec).items()
    assert [name for name, _ in sections] == DESIGN
    shown = [name for _, panels in sections for panel in panels for name in panel["config"]["metrics"]]
    assert sorted(shown) == sorted(logged)  # one rank has no `_min` and `_max`
    for section, panels in sections:
        assert {name.split("/")[0] for panel in panels for name in panel["config"]["metrics"]} == {section}


def test_curves_are_over_tokens(spec):
    panels = panels_of(spec)
    axes = {panel["config"]["xAxis"] for name in DESIGN[:-1] for panel in panels[name]}
    assert axes == {"progress/tokens"} == {spec["settings"]["xAxis"]}


def test_the_headline_is_memory_against_throughput_by_strategy(spec):
    name, panels = next(iter(panels_of(spec).items()))
    assert name == "memory against throughput, by strategy"
    scatter, *bars = panels
    assert scatter["viewType"] == "Scatter Plot"
    axes = [scatter["config"][axis].removeprefix("summary:") for axis in ("xAxis", "yAxis")]
    assert [axis.rsplit(".", 1)[0] for axis in axes] == ["memory/allocated_peak_gib", "perf/tokens_per_s"]
    assert [bar["config"]["metrics"] for bar in bars] == [[axis] for axis in axes]
    assert {bar["config"]["groupBy"] for bar in bars} == {"sharding.value.strategy"}
    (runs,) = spec["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "sharding.value.strategy"}]


def test_what_it_takes_from_summaries_is_kept_there(spec):
    (runs,) = spec["runSets"]
    columns = [key for key in runs["runFeed"]["columnPinned"] if key.startswith("summary:")]
    scatter = next(iter(panels_of(spec).values()))[0]["config"]
    names = {name for section in SECTIONS.values() for panel in section for name in panel.metrics}
    for key in [*columns, scatter["xAxis"], scatter["yAxis"]]:
        name, kind = key.removeprefix("summary:").rsplit(".", 1)
        assert name in names
        assert kind in KEPT_OF.get(name, KEPT).split(",")


def test_the_command_writes_the_workspace_without_an_account(tmp_path, capsys):
    file = tmp_path / "workspace.json"
    assert main(["--json", str(file)]) == 0
    assert list(panels_of(json.loads(file.read_text())["section"]))[1:] == DESIGN
    assert capsys.readouterr().out == f"{file}\n"


def test_without_an_account_it_says_so_in_one_line(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "not logged in: run `wandb login`" in err


def test_without_the_package_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert main([]) == 2
    assert capsys.readouterr().err == 'error: the dashboard needs wandb-workspaces: pip install -e ".[dashboard]"\n'


def test_it_is_saved_as_a_view_of_the_project(wandb_server, monkeypatch, capsys):
    saved = {}

    def answer(path: str, body: bytes) -> dict[str, Any]:
        if b"upsertView" not in body:
            return {"data": {"viewer": {"id": "u", "username": "me", "entity": "team"}}}  # whose key it is
        saved.update(json.loads(body)["variables"])
        return {"data": {"upsertView": {"view": {"id": "v", "name": saved["name"]}}}}

    monkeypatch.setattr(wandb_server, "answer", answer)
    assert main(["--project", "mine"]) == 0
    assert (saved["entityName"], saved["projectName"], saved["displayName"]) == ("team", "mine", "shardlab")
    assert list(panels_of(json.loads(saved["spec"])["section"]))[1:] == DESIGN
    out, err = capsys.readouterr()
    assert out.startswith(f"{wandb_server.url}/team/mine?nw=")
    assert err == ""


def test_a_server_that_does_not_take_it_is_one_line(wandb_server, capsys):
    assert main(["--entity", "team"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: W&B does not take the dashboard: ")
