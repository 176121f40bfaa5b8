"""Plans of a sweep: in warm processes, and equal to those that are made one by one."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from shardlab.sweep.plans import does_not_fit, predict
from shardlab.sweep.records import Job, read_sweep
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task
from shardlab.telemetry.prediction import Prediction
from tests.commands import Command, Ended, read_json
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
    _, ended, jobs = planned
    assert ended.code == 0, ended.err
    for job in jobs:
        contradicts = "sharding.replicas=3" in job.record.overrides
        assert job.status == ("skipped" if contradicts else "completed"), job
        assert ("sharding.replicas=3" in (job.summary["error"] or "")) == contradicts
    assert "fit" in ended.out  # the advice


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
    assert rows[2]["plan.allocated_peak_bytes"] > 0.01 * 2**30
