"""Sweeps from the command line: `python train.py -m`, real torchruns, and all that can go wrong in one."""

import json
import signal
import time
from pathlib import Path

import pytest

from shardlab.sweep.records import Job, read_sweep
from tests.commands import QUICK, USERS_MODULE, Command, Ended, read_json, rows_of

SECONDS = 280.0  # for a sweep; those here take less than a minute on an idle machine
STEPS = ("train.steps=4", "train.log_every=1")
CUSTOM = ("data=custom", "data._target_=users.Data", "model=custom", "model._target_=users.Net")


def sweep(folder: Path, *arguments: str) -> Command:
    return Command(folder, "-m", *QUICK, *STEPS, f"hydra.sweep.dir={folder}/sweep", *arguments)


def jobs_of(folder: Path) -> list[Job]:
    return read_sweep(folder / "sweep")[1]


# ---- a sweep of 2 x 2 jobs whose parent is killed half-way, and which is then resumed

GRID = ("sharding=full_shard,no_shard", "precision=fp32,bf16")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    command = sweep(folder, *GRID)
    command.wait_until(lambda: (folder / "sweep/1/launch.log").exists())  # the second job has begun
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    patience = time.monotonic() + 20.0
    while command.processes() and time.monotonic() < patience:
        time.sleep(0.1)
    command.wait()  # asserts that no process is left
    return folder


@pytest.fixture(scope="module")
def resumed(killed: Path) -> tuple[Path, list[str], Ended]:
    """The folder, the statuses before, and how the second command ended."""
    before = [job.status for job in jobs_of(killed)]
    mark = (killed / "sweep/0/summary.json").stat().st_mtime_ns
    ended = Command(killed, "-m", *QUICK, *STEPS, *GRID, "sweep.resume=sweep").wait(SECONDS)
    assert (killed / "sweep/0/summary.json").stat().st_mtime_ns == mark, "the completed job ran again"
    return killed, before, ended


def test_a_sweep_whose_parent_is_killed_ends_its_job_and_is_completed_by_resume(
    resumed: tuple[Path, list[str], Ended],
) -> None:
    folder, before, ended = resumed
    assert ended.code == 0, ended.err
    assert before[0] == "completed" and "completed" not in before[1:]
    jobs = jobs_of(folder)
    assert [job.status for job in jobs] == ["completed"] * 4
    assert [[o for o in job.record.overrides if o.startswith(("sharding", "precision"))] for job in jobs] == [
        [f"sharding={sharding}", f"precision={precision}"]
        for sharding in ("full_shard", "no_shard")
        for precision in ("fp32", "bf16")
    ]
    assert all(job.summary["world_size"] == 2 and job.summary["steps"] == 4 for job in jobs)
    assert "1 of them done already" in ended.out


def test_jobs_of_a_sweep_train_what_they_would_alone(resumed: tuple[Path, list[str], Ended], tmp_path: Path) -> None:
    folder, _, _ = resumed
    job = jobs_of(folder)[2]
    assert job.record.command[:3] == ["torchrun", "--nproc-per-node", "2"]
    alone = Command(tmp_path, *job.record.command[4:], "hydra.run.dir=run", ranks=2).wait()
    assert alone.code == 0
    losses = [[row["train/loss"] for row in rows_of(run)] for run in (job.folder, tmp_path / "run")]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_a_sweep_ends_with_a_table_a_report_and_advice(resumed: tuple[Path, list[str], Ended]) -> None:
    folder, _, ended = resumed
    rows = [json.loads(line) for line in (folder / "sweep/results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["completed"] * 4
    assert [row["perf.tokens_per_s"] for row in rows] == [
        job.summary["perf"]["tokens_per_s"] for job in jobs_of(folder)
    ]
    assert (folder / "sweep/report.html").exists()
    assert "torchrun --nproc-per-node 2" in ended.out


def test_a_job_runs_again_where_its_environment_has_changed(tmp_path: Path) -> None:
    def done_before(environment: str) -> bool:
        resume = ["sweep.resume=sweep"] if (tmp_path / "sweep").exists() else []
        ended = sweep(tmp_path, "mode=plan", f"+hydra.launcher.env={environment}", *resume).wait()
        assert ended.code == 0, ended.err
        return "1 of them done already" in ended.out

    assert [done_before(environment) for environment in ("{A: b, C: d}", "{C: d, A: b}", "{A: c, C: d}")] == [
        False, True, False
    ]  # fmt: skip
    (job,) = jobs_of(tmp_path)
    assert (job.record.number, job.status) == (1, "completed")


# ---- jobs that end in every other way

WAYS = ("nothing", "exceed", "die", "raise", "sleep", "allocate")


@pytest.fixture(scope="module")
def misbehaved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("ways")
    (folder / "users.py").write_text(USERS_MODULE)
    ended = sweep(folder, *CUSTOM, f"+data.does={','.join(WAYS)}", "hydra.launcher.timeout_s=30").wait(SECONDS)
    return folder, ended


def test_what_becomes_of_one_job_stops_no_other(misbehaved: tuple[Path, Ended]) -> None:
    folder, ended = misbehaved
    assert ended.code == 1, ended.err  # since jobs failed
    statuses = {way: job.status for way, job in zip(WAYS, jobs_of(folder), strict=True)}
    assert statuses == {
        "nothing": "completed",
        "exceed": "oom",
        "die": "killed",
        "raise": "failed",
        "sleep": "failed",
        "allocate": "oom",
    }
    assert ended.tracebacks == 0, ended.err


def test_each_ending_has_its_reason_within_seconds(misbehaved: tuple[Path, Ended]) -> None:
    jobs = dict(zip(WAYS, jobs_of(misbehaved[0]), strict=True))
    errors = {way: job.summary["error"] for way, job in jobs.items()}
    assert errors["nothing"] is None
    assert errors["exceed"].startswith("rank 1: RuntimeError: ") and "allocate memory" in errors["exceed"]
    assert errors["die"].startswith("rank 1 was killed (SIGKILL)")
    assert errors["raise"] == "rank 1: KeyError: 'no such sample'"
    assert errors["sleep"] == "not finished after hydra.launcher.timeout_s=30"
    assert jobs["exceed"].summary["memory"]["breakdown"]["parameters"] > 0
    usual = jobs["nothing"].record.seconds
    for way in ("exceed", "die", "raise", "allocate"):
        assert jobs[way].record.seconds < usual + 20.0, way  # torchrun alone would wait 30 s for the other rank
    table = misbehaved[1].out.split("  6 jobs: ")[-1]
    shown = {way: table.split(f"  job {number} ")[1].split("  job ")[0] for number, way in enumerate(WAYS) if number}
    assert 'raise KeyError("no such sample")' in shown["raise"]  # the end of its traceback
    assert "step 2/4" in shown["sleep"] and "all-gather" not in shown["sleep"]  # the end of its log
    assert "measured peak" in shown["exceed"] and "parameters" in shown["exceed"]


# ---- Ctrl-C, and sweeps that cannot begin


@pytest.mark.parametrize("times", [1, 2])  # the second one does not wait for the ranks
def test_ctrl_c_ends_the_running_job_and_keeps_what_is_done(tmp_path: Path, times: int) -> None:
    (tmp_path / "users.py").write_text(USERS_MODULE)
    command = sweep(tmp_path, *CUSTOM, "+data.does=sleep,nothing")
    command.wait_until(lambda: (tmp_path / "asleep").exists())
    for _ in range(times):
        command.interrupt()
        time.sleep(0.3)
    ended = command.wait()
    assert ended.code == 130
    record, jobs = read_sweep(tmp_path / "sweep")
    assert record.interrupted
    assert [job.status for job in jobs] == ["interrupted", "interrupted"]
    assert jobs[1].record.began is None
    assert (tmp_path / "sweep/report.html").exists()
    assert ended.tracebacks == 0, ended.err


def test_a_sweep_that_still_runs_is_not_resumed(tmp_path: Path) -> None:
    running, other = tmp_path / "running", tmp_path / "other"
    for folder in (running, other):
        folder.mkdir()
        (folder / "users.py").write_text(USERS_MODULE)
    command = sweep(running, *CUSTOM, "+data.does=sleep")
    command.wait_until(lambda: (running / "asleep").exists())
    refused = Command(other, "-m", *QUICK, *STEPS, *CUSTOM, "+data.does=sleep", f"sweep.resume={running}/sweep").wait()
    command.interrupt()
    command.wait()
    assert refused.code == 2
    assert refused.errors == [
        f"error: hydra.sweep.dir={running}/sweep: a sweep is still at work there; wait for its end, or name another "
        "folder"
    ]
    assert [job.status for job in jobs_of(running)] == ["interrupted"] and not (running / "sweep/superseded").exists()


def test_a_sweep_of_nothing_but_contradictions_is_a_mistake(tmp_path: Path) -> None:
    ended = sweep(tmp_path, "sharding=hybrid_shard", "sharding.replicas=3,5").wait()
    assert ended.code == 2
    assert ended.errors == ["error: sharding.replicas=3 does not divide the 2 ranks: use one of [1, 2]"]
    assert [job.status for job in jobs_of(tmp_path)] == ["skipped", "skipped"]
    again = sweep(tmp_path, "sharding=hybrid_shard", "sharding.replicas=3,5").wait()
    assert again.code == 2
    assert "already holds a sweep" in again.errors[0] and "sweep.resume=" in again.errors[0]


def test_a_rank_that_fails_is_started_again_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS_MODULE)
    once = sweep(tmp_path, *CUSTOM, "+data.does=raise_once", "hydra.launcher.max_restarts=1").wait()
    assert once.code == 0, once.err
    assert read_json(tmp_path / "sweep/0/summary.json")["status"] == "completed"
    assert [row["step"] for row in rows_of(tmp_path / "sweep/0")] == [1, 2, 3, 4]
