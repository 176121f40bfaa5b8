"""Plans of a sweep: in warm processes, and equal to those that are made one by one."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from shardlab.errors import ConfigError
from shardlab.run_folder import RunFolder
from shardlab.sweep import plans
from shardlab.sweep.plans import does_not_fit, predict
from shardlab.sweep.records import Job, read_sweep
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task
from shardlab.telemetry.prediction import Prediction
from tests.commands import QUICK, USERS_MODULE, Command, Ended, read_json
from tests.ranks import one_process
from tests.training import ROOT

SMALL = ("model=llama_tiny", "model.layers=2", "data=random_tokens", "data.seq_len=32", "train.micro_batch=1")
CLUSTERS = ("h100_80gb", "cpu")
STRATEGIES = ("full_shard", "no_shard", "hybrid_shard")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended, list[Job]]:
    """GPUs and CPUs in turn; three replicas contradict each of their numbers of ranks."""
    folder = tmp_path_factory.mktemp("plans")
    sweep = (f"cluster={','.join(CLUSTERS)}", f"sharding={','.join(STRATEGIES)}", "sharding.replicas=auto,3")
    command = Command(folder, "-m", "mode=plan", *SMALL, *sweep, "tracking=none", "hydra.sweep.dir=sweep")
    ended = command.wait(280.0)
    return folder, ended, read_sweep(folder / "sweep")[1]


def test_contradictions_are_skipped_and_the_rest_is_planned(planned: tuple[Path, Ended, list[Job]]) -> None:
    folder, ended, jobs = planned
    assert ended.code == 0, ended.err
    for job in jobs:
        contradicts = "sharding.replicas=3" in job.record.overrides
        assert job.status == ("skipped" if contradicts else "completed"), job
        assert ("sharding.replicas=3" in (job.summary["error"] or "")) == contradicts
    assert "fit" in ended.out  # the advice
    begins, lines = ended.out.split("  12 jobs: ")[0].strip().split("\n\n")
    assert begins == f"12 jobs, in {folder / 'sweep'}"  # the clusters say how many ranks
    assert len(lines.splitlines()) == 12  # one for each
    assert "cluster=h100_80gb sharding=full_shard sharding.replicas=auto  completed, " in lines


def test_a_plan_in_a_sweep_is_the_plan_by_itself(planned: tuple[Path, Ended, list[Job]], tmp_path: Path) -> None:
    _, _, jobs = planned
    for cluster in CLUSTERS:
        job = next(j for j in jobs if {f"cluster={cluster}", "sharding=no_shard"} <= set(j.record.overrides))
        assert job.record.command[0] == "python"
        alone = Command(tmp_path, *job.record.command[2:], "plan.changes=0", f"hydra.run.dir={cluster}").wait()
        assert alone.code == 0, alone.err
        ours, theirs = (read_json(folder / "plan.json") for folder in (job.folder, tmp_path / cluster))
        assert ours.pop("wall_s") and theirs.pop("wall_s")
        assert ours == theirs
        assert read_json(job.folder / "summary.json") == read_json(tmp_path / cluster / "summary.json")
        assert not (job.folder / "memory_timeline.html").exists()  # 5 MB for each would be much
        assert (tmp_path / cluster / "memory_timeline.html").exists()


def test_what_each_plan_has_room_for_is_in_the_table_and_decides_the_advice(tmp_path: Path) -> None:
    sweep = ("model=mlp", "data=random_classes", "tracking=none", "cluster=rtx4090,h100_80gb", "hydra.sweep.dir=sweep")
    ended = Command(tmp_path, "-m", "mode=plan", "plan.fit=micro_batch", *sweep).wait(280.0)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "sweep/results.jsonl").read_text().splitlines()]
    found = [row["plan.fit.value"] for row in rows]
    assert found == [read_json(tmp_path / f"sweep/{job}/plan.json")["fit"]["value"] for job in (0, 1)]
    assert found[1] > found[0] > 0
    assert "largest micro_batch" in ended.out
    assert f"Use job 1 (cluster=h100_80gb): it has room for train.micro_batch={found[1]}," in ended.out


# ---- what becomes of plans that do not complete, with something that misbehaves in the place of the planner


def plan_as_asked(cfg: DictConfig, *, folder: RunFolder, choices: Any, in_sweep: bool) -> dict[str, Any]:
    if cfg.does == "contradict":
        raise ConfigError("sharding.replicas=3 does not divide the 2 ranks")
    if cfg.does == "raise":
        raise KeyError("no such layer")
    if cfg.does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.does == "sleep":
        time.sleep(60)
    summary = {"status": "completed", "error": None}
    folder.write_summary(summary)
    if cfg.does == "complete and sleep":
        time.sleep(60)
    if cfg.does == "wait for the first":
        while not (folder.path.parent / "0/summary.json").exists():
            time.sleep(0.01)
    return summary


def ended_with(folder: Path, *does: str, workers: int, stops: bool = False) -> dict[int, tuple[str, str | None]]:
    """Status and error of each plan that was ended, by its number.

    Args:
        folder: of the sweep.
        *does: what each plan does.
        workers: how many plan.
        stops: whether a signal comes as soon as one plan has ended.
    """
    plans.plan, plans.cores = plan_as_asked, lambda: workers  # type: ignore[assignment]
    found, stop = {}, Stop()

    def ended(task: Task, summary: Mapping[str, Any], seconds: float) -> None:
        assert summary == read_json(task.folder / "summary.json")
        found[task.number] = (summary["status"], summary["error"])
        if stops:
            stop.note(signal.SIGINT)

    tasks = [
        Task(
            number,
            (),
            OmegaConf.create({"hydra": HydraConf}),
            OmegaConf.create({"does": way}),
            "",
            folder / f"{number}",
        )
        for number, way in enumerate(does)
    ]
    plans.plan_tasks(tasks, stop=stop, started=lambda task: task.folder.mkdir(), ended=ended)
    return found


def test_a_plan_that_fails_or_is_killed_stops_no_other(tmp_path: Path) -> None:
    with one_process() as process:
        does = ("complete", "raise", "die", "contradict", "complete", "complete")
        found = process.submit(ended_with, tmp_path, *does, workers=2).result()
    assert [found[number][0] for number in range(6)] == [
        "completed", "failed", "killed", "skipped", "completed", "completed",
    ]  # fmt: skip
    assert found[1][1] == "KeyError: 'no such layer'"
    assert 'raise KeyError("no such layer")' in (tmp_path / "1/launch.log").read_text()
    assert "SIGKILL" in (found[2][1] or "")


def test_plans_that_a_signal_ends_are_interrupted_but_for_what_is_written(tmp_path: Path) -> None:
    with one_process() as process:
        does = ("complete and sleep", "sleep", "wait for the first", "complete")
        found = process.submit(ended_with, tmp_path, *does, workers=3, stops=True).result()
    assert found == {0: ("completed", None), 1: ("interrupted", None), 2: ("completed", None)}
    assert not (tmp_path / "3").exists()  # had not begun


USERS = (*QUICK, "data=custom", "data._target_=users.Data", "+data.on_rank=0", "+data.at_step=1", "model=custom",
         "model._target_=users.Net", "hydra.sweep.dir=sweep", "mode=plan")  # fmt: skip


def test_a_sweep_with_a_plan_that_failed_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS_MODULE)
    ended = Command(tmp_path, "-m", *USERS, "+data.does=raise,die,nothing").wait(280.0)
    assert ended.code == 1, ended.err
    assert [job.status for job in read_sweep(tmp_path / "sweep")[1]] == ["failed", "killed", "completed"]
    assert 'raise KeyError("no such sample")' in ended.out  # the end of its traceback


def test_ctrl_c_ends_the_plans_that_have_begun(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS_MODULE)
    command = Command(tmp_path, "-m", *USERS, "+data.does=sleep")
    command.wait_until((tmp_path / "asleep").exists)
    command.interrupt()
    ended = command.wait(280.0)
    assert ended.code == 130
    assert read_json(tmp_path / "sweep/0/summary.json") == {"status": "interrupted", "error": None}
    assert "1 job: 1 interrupted" in ended.out
    assert ended.tracebacks == 0, ended.err


def test_plans_end_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS_MODULE)
    command = Command(tmp_path, "-m", *USERS, "+data.does=sleep", "seed=0,1")
    command.wait_until((tmp_path / "asleep").exists)
    assert len(command.processes()) > 1
    command.process.kill()
    command.wait()  # asserts that no process is left
    assert read_sweep(tmp_path / "sweep")[1][0].status == "running"  # for sweep.resume


def predicted_with(*clusters: str) -> list[Prediction]:
    """What is predicted of equal runs, on 2 ranks."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        tasks = [
            Task(number, (), OmegaConf.create({}), compose("config", overrides=[*SMALL, cluster]), "", Path("nowhere"))
            for number, cluster in enumerate(clusters)
        ]
    predictions = predict(tasks, world_size=2, nodes=1, stop=Stop())
    return [predictions[task.number] for task in tasks]


def test_what_is_predicted_not_to_fit_says_by_how_much() -> None:
    with one_process() as process:  # a plan changes what devices PyTorch knows
        clusters = ("cluster=auto", "cluster.memory_gib=0.001", "cluster.memory_gib=10")
        predictions = process.submit(predicted_with, *clusters).result()
    assert [prediction.fits for prediction in predictions] == [None, False, True]
    assert len({prediction.needed_bytes for prediction in predictions}) == 1
    assert does_not_fit(predictions[1]).endswith("is more than the 1.0 MiB of CPU")


def test_what_does_not_fit_is_skipped_and_the_smallest_runs_first(tmp_path: Path) -> None:
    quick = ("model=mlp", "data=random_classes", "tracking=none", "train.eval_every=null", "train.steps=1",
             "plan.before_train=false", "plan.timeline=false")  # fmt: skip
    sweep = ("train.micro_batch=64,8,100000", "cluster.memory_gib=0.01", "sweep.skip_predicted_oom=true")
    ended = Command(tmp_path, "-m", *quick, *sweep, "sweep.order=predicted", "hydra.sweep.dir=sweep").wait(280.0)
    assert ended.code == 0, ended.err
    jobs = read_sweep(tmp_path / "sweep")[1]
    assert [job.status for job in jobs] == ["completed", "completed", "skipped"]
    assert jobs[2].summary["error"].startswith("predicted peak ")
    assert jobs[2].summary["plan"]["fits"] is False
    assert (jobs[1].record.began or 0) < (jobs[0].record.began or 0)
    rows = [json.loads(line) for line in (tmp_path / "sweep/results.jsonl").read_text().splitlines()]
    assert rows[2]["plan.allocated_peak_bytes"] > rows[2]["plan.capacity_bytes"] == int(0.01 * 2**30)
    assert "3 jobs, 2 ranks each" in ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("       skipped: ")]
    assert line.endswith(" is more than the 10.2 MiB of CPU")
