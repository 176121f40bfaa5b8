"""Sweeps whose jobs run on several nodes, the same command on each; here these are processes that share a folder."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from shardlab.errors import ConfigError
from shardlab.sweep.records import Job, read_sweep
from shardlab.sweep.torchrun import Torchrun
from tests.commands import QUICK, USERS_MODULE, Command, Ended

CUSTOM = ("data=custom", "data._target_=users.Data", "model=custom", "model._target_=users.Net")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Job], list[Ended]]:
    """The jobs of a sweep on two nodes of one rank each, and how its two commands ended."""
    folder = tmp_path_factory.mktemp("nodes")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    commands = []
    for node in range(2):
        own = folder / f"node{node}"
        own.mkdir()
        (own / "users.py").write_text(USERS_MODULE)
        commands.append(
            Command(
                own, "-m", *QUICK, *CUSTOM, "+data.does=raise,nothing", "train.steps=4",
                f"hydra.sweep.dir={folder}/sweep", "hydra.launcher.nnodes=2", "hydra.launcher.nproc_per_node=1",
                f"hydra.launcher.node_rank={node}", f"hydra.launcher.rdzv_endpoint={endpoint}",
            )
        )  # fmt: skip
    ended = [command.wait() for command in commands]  # asserts that no process is left
    return read_sweep(folder / "sweep")[1], ended


def test_nodes_run_each_job_together_and_go_on_after_one_that_fails(nodes: tuple[list[Job], list[Ended]]) -> None:
    jobs, _ = nodes
    assert [job.status for job in jobs] == ["failed", "completed"]  # neither node has killed the other's ranks
    assert jobs[0].summary["error"] == "rank 1: KeyError: 'no such sample'"
    assert [job.summary["world_size"] for job in jobs] == [2, 2]
    assert jobs[1].summary["steps"] == 4


def test_the_first_node_tells_what_became_of_the_jobs_and_the_other_of_its_ranks(
    nodes: tuple[list[Job], list[Ended]],
) -> None:
    first, other = nodes[1]
    assert (first.code, other.code) == (1, 0), (first.err, other.err)
    assert first.err == other.err == ""
    assert "1 completed" in first.out and "completed" not in other.out
    assert [line.split(",")[0].strip() for line in other.out.splitlines() if "on this node" in line] == [
        "its ranks on this node have ended (exit code 1)",
        "its ranks on this node have ended (exit code 0)",
    ]


def test_each_node_has_a_log_of_its_own(nodes: tuple[list[Job], list[Ended]]) -> None:
    failed, completed = (job.folder for job in nodes[0])
    assert "exitcode: 1" in (failed / "launch.node1.log").read_text()  # of torchrun there
    assert "steps" in (completed / "launch.log").read_text()  # of rank 0, which shows the run
    assert (completed / "launch.node1.log").read_text() == ""


# ---- what cannot be run on several nodes


def task(number: int = 0, resume: str | None = None, sweeper: str = "basic") -> Any:
    hydra = {"runtime": {"choices": {"hydra/sweeper": sweeper}}}
    cfg = {"sweep": {"resume": resume}}
    return SimpleNamespace(number=number, composed=OmegaConf.create({"hydra": hydra}), cfg=OmegaConf.create(cfg))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resume": "sweep"}, "sweep.resume=sweep cannot be used with hydra.launcher.nnodes=2"),
        ({"sweeper": "optuna"}, "hydra/sweeper=optuna cannot be used with hydra.launcher.nnodes=2"),
    ],
)
@pytest.mark.parametrize("node", [0, 1])
def test_what_needs_the_results_is_refused_on_all_nodes(node: int, settings: dict[str, str], words: str) -> None:
    two = Torchrun(nnodes=2, node_rank=node, rdzv_endpoint="first:29500")
    two.check([task()])
    with pytest.raises(ConfigError, match=words):
        two.check([task(**settings)])
    Torchrun().check([task(**settings)])


@pytest.mark.parametrize("endpoint", [None, "first", "first:abc", "first:0", ":29500"])
def test_nodes_must_know_where_to_meet(endpoint: str | None) -> None:
    with pytest.raises(ConfigError, match=f"hydra.launcher.rdzv_endpoint={endpoint} must be host:port"):
        Torchrun(nnodes=2, rdzv_endpoint=endpoint)


def test_each_job_must_have_a_port() -> None:
    two = Torchrun(nnodes=2, rdzv_endpoint="first:65534")
    two.check([task(0), task(1)])
    with pytest.raises(ConfigError, match=r"rdzv_endpoint=first:65534 .* the port must be at most 65533"):
        two.check([task(0), task(1), task(2)])
