"""`hydra/launcher=torchrun`: which GPUs its jobs have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from shardlab.errors import ConfigError
from shardlab.sweep.runner import Ended
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task
from shardlab.sweep.torchrun import Torchrun

# A rank that leaves its GPUs in its job's folder, and waits until the other job has left its own.
RANK = """
import os, pathlib, sys, time

own, other = map(pathlib.Path, sys.argv[1:])
own.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
while not other.exists():
    time.sleep(0.02)
"""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def are(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return are


def devices(launcher: Torchrun) -> list[str | None]:
    """Of the jobs that run side by side."""
    return [added.get("CUDA_VISIBLE_DEVICES") for added in launcher._slots()]


def test_jobs_side_by_side_have_disjoint_gpus(gpus: Any) -> None:
    gpus(4)
    assert devices(Torchrun(parallel_jobs=2)) == ["0,1", "2,3"]
    assert devices(Torchrun(parallel_jobs=4)) == ["0", "1", "2", "3"]
    assert devices(Torchrun(parallel_jobs=2, nproc_per_node=1)) == ["0", "1"]
    assert Torchrun(parallel_jobs=2).world_size == 2
    gpus(4, visible="7,5,GPU-3f,1")
    assert devices(Torchrun(parallel_jobs=2)) == ["7,5", "GPU-3f,1"]


def test_one_job_at_a_time_has_all_gpus_and_so_on_cpus(gpus: Any) -> None:
    gpus(4)
    assert devices(Torchrun()) == [None] and Torchrun().world_size == 4
    gpus(0)
    assert devices(Torchrun(parallel_jobs=2)) == [None]


@pytest.mark.parametrize("settings", [{"parallel_jobs": 8}, {"parallel_jobs": 2, "nproc_per_node": 3}])
def test_more_jobs_than_gpus_are_refused(gpus: Any, settings: dict[str, int]) -> None:
    gpus(4)
    jobs, ranks = settings["parallel_jobs"], settings.get("nproc_per_node", 1)
    with pytest.raises(ConfigError, match=f"parallel_jobs={jobs} .*nproc_per_node={ranks} need more than the 4 GPUs"):
        Torchrun(**settings)


def test_jobs_run_side_by_side_and_see_their_own_gpus(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    (tmp_path / "rank.py").write_text(RANK)
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    nothing = OmegaConf.create({})
    endings: dict[int, Ended] = {}
    Torchrun(parallel_jobs=2, timeout_s=100.0).run(
        [Task(number, (), nothing, nothing, "", folder) for number, folder in enumerate(folders)],
        command=lambda task: [
            str(tmp_path / "rank.py"), *(str(folders[job] / "gpus") for job in (task.number, 1 - task.number))
        ],
        environment={},
        started=lambda task: None,
        ended=lambda task, ended: endings.update({task.number: ended}),
        stop=Stop(),
    )  # fmt: skip
    assert [endings[job].code for job in (0, 1)] == [0, 0]
    assert [(folder / "gpus").read_text() for folder in folders] == ["0", "1"]
