"""`hydra/launcher=slurm`: through submitit on this machine, and what Slurm may say of jobs. bench/slurm_check.sh has a
real Slurm."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.distributed.run import config_from_args, parse_args

from shardlab.errors import ConfigError
from shardlab.sweep import slurm, slurm_node, slurm_states
from shardlab.sweep.outcome import settle
from shardlab.sweep.records import read_sweep
from shardlab.sweep.slurm import Slurm
from shardlab.sweep.slurm_node import NodeTask, Place, port_of, set_aside, torchrun_arguments
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task
from shardlab.sweep.torchrun import Ended
from tests.commands import QUICK, USERS_MODULE, Command, rows_of


def test_a_sweep_through_submitit_and_ctrl_c_in_its_last_job(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS_MODULE)
    command = Command(
        tmp_path, "-m", "hydra/launcher=slurm", "hydra.launcher.cluster=local", f"hydra.sweep.dir={tmp_path}/sweep",
        *QUICK, "train.steps=4", "train.log_every=1", "data=custom", "data._target_=users.Data",
        "model=custom", "model._target_=users.Net", "+data.does=nothing,raise,sleep",
    )  # fmt: skip
    command.wait_until((tmp_path / "asleep").exists)
    os.kill(command.process.pid, signal.SIGINT)
    ended = command.wait()  # asserts that no process is left
    assert ended.code == 130, ended.err
    assert ended.tracebacks == 0, ended.err
    record, jobs = read_sweep(tmp_path / "sweep")
    assert record.interrupted
    assert [job.status for job in jobs] == ["completed", "failed", "interrupted"]
    assert jobs[1].summary["error"] == "rank 1: KeyError: 'no such sample'"
    assert [job.summary["world_size"] for job in jobs] == [2, 2, 2]
    assert [row["step"] for row in rows_of(jobs[0].folder)] == [1, 2, 3, 4]
    assert jobs[0].record.command[:3] == ["torchrun", "--nproc-per-node", "2"]
    assert all(job.record.seconds and job.record.seconds < 60.0 for job in jobs)
    assert not list(tmp_path.glob("sweep/*/.node*")) and not list(tmp_path.glob("sweep/*/.cancel"))


# ---- the rendezvous


def test_nodes_of_a_job_meet_at_its_first_node() -> None:
    for node in (0, 1):
        arguments = torchrun_arguments(Place("123456", node, 2, "first"), ranks=4)
        config, _, _ = config_from_args(parse_args([*arguments, "train.py"]))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
        assert (config.rdzv_backend, config.rdzv_configs["rank"]) == ("static", node)
        assert (config.run_id, config.rdzv_endpoint) == ("123456", "first:23456")


def test_a_job_of_one_node_needs_no_port_of_others() -> None:
    assert torchrun_arguments(Place("123456", 0, 1, "only"), ranks=4) == ["--nproc-per-node", "4", "--standalone"]


def test_jobs_that_follow_each_other_meet_at_ports_of_their_own() -> None:
    ports = [port_of(str(job)) for job in range(4_000_000, 4_005_000)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 1024 and max(ports) < 32768  # where Linux begins with those that it gives to clients


def test_the_first_node_is_named_by_its_address_where_only_slurm_knows_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.1.2.3")
    assert slurm_node._address("localhost") == "localhost"
    assert slurm_node._address("no-such-host.invalid") == "10.1.2.3"


# ---- preemption


def test_what_a_preempted_attempt_left_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "slurm").mkdir()
    assert set_aside(tmp_path) == 0
    for attempt in (0, 1):
        for name in ("launch.log", "summary.json", ".node0.json"):
            (tmp_path / name).write_text(f"attempt {attempt}")
        assert set_aside(tmp_path) == attempt + 1
        assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("attempt-")} == {
            "job.json", "slurm"
        }  # fmt: skip
        assert (tmp_path / f"attempt-{attempt}/summary.json").read_text() == f"attempt {attempt}"


@pytest.fixture
def node_task(tmp_path: Path) -> Iterator[NodeTask]:
    """One whose ranks run."""
    task = NodeTask(str(tmp_path), ["train.py"], nodes=1, ranks=2, max_requeues=1, time_limit_s=3600.0)
    task._began, task._start, task._place = time.time(), time.monotonic(), Place("7", 0, 1, "only")
    task._process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
    yield task
    task._process.kill()
    task._process.wait()
    assert task._process.stdin is not None
    task._process.stdin.close()


def ended_by(folder: Path) -> Any:
    return json.loads((folder / ".node0.json").read_text())["ended_by"]


def test_a_preempted_job_begins_again_once_its_ranks_have_ended(tmp_path: Path, node_task: NodeTask) -> None:
    again = node_task.checkpoint().function
    assert node_task._process.returncode == -signal.SIGTERM
    assert again == node_task and not hasattr(again, "_process")  # which could not be pickled
    assert not (tmp_path / ".node0.json").exists()


def test_a_job_does_not_begin_again_more_often_than_it_may(tmp_path: Path, node_task: NodeTask) -> None:
    (tmp_path / "attempt-0").mkdir()
    assert node_task.checkpoint() is None
    assert ended_by(tmp_path) == "preempted"


def test_a_job_does_not_begin_again_at_the_end_of_its_time(tmp_path: Path, node_task: NodeTask) -> None:
    node_task._start -= 3600.0 - 40.0
    assert node_task.checkpoint() is None
    assert ended_by(tmp_path) == "time limit"


# ---- what Slurm says


class Cluster:
    """A Slurm that answers as told, and a job that it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        self.folder = folder
        self.answers: dict[str, list[str] | None] = {"squeue": [], "sacct": None, "scancel": []}
        self.asked: list[str] = []
        self.submissions = 0
        for module in (slurm, slurm_states):
            monkeypatch.setattr(module, "ask", self.ask)
        monkeypatch.setattr(slurm, "_POLL_SECONDS", 0.001)
        monkeypatch.setattr(slurm, "_SETTLE_SECONDS", 0.0)
        monkeypatch.setattr(slurm_states, "_ASK_SECONDS", 0.0)
        monkeypatch.setattr(slurm_states, "_HURRY_SECONDS", 0.0)
        monkeypatch.setattr(slurm_states, "_LOST_SECONDS", 0.05)
        monkeypatch.setattr(Slurm, "submit", self.submit)

    def ask(self, command: list[str]) -> list[str] | None:
        self.asked.append(" ".join(command))
        return self.answers[command[0]]

    def submit(self, node_task: NodeTask) -> Any:
        self.submissions += 1
        log = SimpleNamespace(paths=SimpleNamespace(stderr="log.err"))
        return SimpleNamespace(job_id="7", task=lambda _: log, cancel=lambda check: None)

    def runs(self) -> None:
        (self.folder / "launch.log").touch()

    def reports(self, code: int, exit_codes: dict[int, int] | None = None, ended_by: str | None = None) -> None:
        report = {"code": code, "exit_codes": exit_codes or {}, "began": 1.0, "seconds": 2.0, "ended_by": ended_by}
        (self.folder / ".node0.json").write_text(json.dumps(report))

    def ending(self, stop: Stop | None = None, **settings: Any) -> Ended | None:
        """How the launcher finds that the job has ended."""
        nothing = OmegaConf.create({})
        task = Task(0, (), nothing, nothing, "", self.folder)
        calls: list[Any] = []
        Slurm(**settings).run(
            [task],
            command=lambda task: ["train.py"],
            environment={},
            started=calls.append,
            ended=lambda task, ended: calls.append(ended),
            stop=stop or Stop(),
        )
        assert calls[:1] in ([], [task])  # what ends has begun
        return calls[1] if calls else None

    def verdict(self, **settings: Any) -> tuple[str, str | None]:
        ended = self.ending(**settings)
        assert ended is not None
        summary = settle(self.folder, ended, timeout_s=None, interrupted=False)
        return summary["status"], summary["error"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    return Cluster(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        ("TIMEOUT", "failed", "not finished within its time limit, hydra.launcher.timeout_min=60"),
        ("OUT_OF_MEMORY", "killed", "Slurm ended job 7: OUT_OF_MEMORY"),
        ("CANCELLED", "killed", "Slurm ended job 7: CANCELLED"),
        ("NODE_FAIL", "killed", "Slurm ended job 7: NODE_FAIL"),
        ("FAILED", "failed", "job 7 ended before its ranks began (FAILED): see log.err"),
    ],
)
def test_states_of_slurm_are_what_became_of_a_job_that_left_no_word(
    cluster: Cluster, state: str, status: str, words: str
) -> None:
    cluster.answers["squeue"] = ["6|RUNNING", f"7|{state}"]
    assert cluster.verdict(max_requeues=0) == (status, words)


def test_a_killed_rank_is_known_by_its_exit_code(cluster: Cluster) -> None:
    cluster.runs()
    cluster.reports(1, {1: -9})
    status, error = cluster.verdict()
    assert status == "killed" and error is not None and error.startswith("rank 1 was killed (SIGKILL)")


def test_a_job_that_failed_with_its_node_is_submitted_again(cluster: Cluster) -> None:
    cluster.answers["squeue"] = ["7|NODE_FAIL"]
    assert cluster.verdict(max_requeues=2)[0] == "killed"
    assert cluster.submissions == 3


def test_a_job_that_was_requeued_is_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.runs()
    cluster.reports(143)  # its ranks were sent SIGTERM
    states = iter(["COMPLETING", "PENDING", "PENDING", "RUNNING"])

    def ask(command: list[str]) -> list[str]:
        state = next(states, None)
        if state is None:
            cluster.reports(0)
        return [f"7|{state or 'RUNNING'}"]

    monkeypatch.setattr(slurm_states, "ask", ask)
    ended = cluster.ending()
    assert ended is not None and (ended.code, ended.said) == (0, None)


def test_preempted_too_often_is_killed(cluster: Cluster) -> None:
    cluster.runs()
    cluster.reports(1, ended_by="preempted")
    (cluster.folder / "attempt-0").mkdir()
    status, error = cluster.verdict(max_requeues=1)
    assert status == "killed" and error is not None and "hydra.launcher.max_requeues=1" in error


def test_a_job_that_slurm_loses_is_not_waited_for_for_ever(cluster: Cluster) -> None:
    assert cluster.verdict() == ("failed", "Slurm no longer knows job 7, which left no result")


def test_the_accounting_is_asked_for_what_the_queue_has_forgotten(cluster: Cluster) -> None:
    cluster.answers["sacct"] = ["7|CANCELLED by 1000"]
    assert cluster.verdict() == ("killed", "Slurm ended job 7: CANCELLED")


def test_a_slurm_that_does_not_answer_is_waited_for_but_not_for_ever(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_states, "_SILENCE_SECONDS", 0.2)
    cluster.answers["squeue"] = None
    began = time.monotonic()
    assert cluster.verdict()[0] == "failed"
    assert time.monotonic() - began > 0.2


def test_ctrl_c_cancels_what_waits_in_the_queue(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()

    def ask(command: list[str]) -> list[str]:
        cluster.asked.append(" ".join(command))
        stop.note(signal.SIGINT)
        stop.at_once = False
        return ["7|CANCELLED" if "scancel 7" in cluster.asked else "7|PENDING"]

    for module in (slurm, slurm_states):
        monkeypatch.setattr(module, "ask", ask)
    assert cluster.ending(stop) is None  # it has never begun
    assert cluster.asked.count("scancel 7") == 1


# ---- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": 0}, "hydra.launcher.nodes=0 must be at least 1"),
        ({"nproc_per_node": "all"}, "hydra.launcher.nproc_per_node=all"),
        ({"cluster": "lsf"}, "hydra.launcher.cluster=lsf must be null"),
        ({"cluster": "local", "nodes": 2}, "hydra.launcher.nodes=2 must be 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Slurm(**settings)


def test_ranks_are_the_gpus_that_are_asked_for() -> None:
    assert Slurm(nodes=2, gpus_per_node=8).world_size == 16
    assert Slurm(nodes=2, gpus_per_node=8, nproc_per_node=4).world_size == 8
    assert Slurm().world_size == 2


def test_without_submitit_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardlab\[slurm\]'"):
        Slurm()


def test_without_slurm_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.cluster=local"):
        Slurm().submit(NodeTask(str(tmp_path / "0"), [], nodes=1, ranks=1))


def test_what_slurm_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, script in {
        "srun": "",
        "sbatch": "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # as where the sweep itself is a job
    with pytest.raises(ConfigError, match=r"sbatch: error: invalid partition specified: x; hydra\.launcher\.cluster="):
        Slurm(partition="x").submit(NodeTask(str(tmp_path / "0"), [], nodes=1, ranks=1))
    assert os.environ["SLURM_JOB_ID"] == "1"
    assert capsys.readouterr().err == ""  # what it says is said once


def test_a_submission_says_all_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").write_text('#!/bin/sh\nenv | grep ^SLURM_JOB_ID && exit 1\necho "Submitted batch job 7"\n')
    for name in ("srun", "sbatch"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    settings = Slurm(
        partition="gpu", account="lab", qos="long", constraint="h100", nodes=2, gpus_per_node=8, cpus_per_task=96,
        mem_gb=500.0, timeout_min=90, setup=["module load cuda"], additional_parameters={"exclusive": True},
    )  # fmt: skip
    job = settings.submit(NodeTask(str(tmp_path / "0"), [], nodes=2, ranks=8))
    lines = job.paths.submission_file.read_text().splitlines()
    assert {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")} >= {
        "partition=gpu", "account=lab", "qos=long", "constraint=h100", "nodes=2", "ntasks-per-node=1",
        "gpus-per-node=8", "cpus-per-task=96", "mem=500GB", "time=90", "exclusive", "requeue", "signal=USR2@30",
    }  # fmt: skip
    assert "module load cuda" in lines
