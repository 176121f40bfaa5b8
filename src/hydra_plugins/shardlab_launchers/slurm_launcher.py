"""`hydra/launcher=slurm`: each job of a multirun as a job of Slurm, with a torchrun on each of its nodes.

Hydra imports this file at every start, so whatever takes time is imported where a sweep begins.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore

from hydra_plugins.shardlab_launchers.base import SweepLauncher

if TYPE_CHECKING:
    from shardlab.sweep.slurm import Slurm


@dataclass
class SlurmConfig:
    """Keys of `hydra.launcher`; null leaves the choice to the cluster."""

    _target_: str = "hydra_plugins.shardlab_launchers.slurm_launcher.SlurmLauncher"
    cluster: str | None = None  # null: Slurm; local: the same on this machine, one job after another, to try it out
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int = 1  # of each job
    gpus_per_node: int | None = None
    nproc_per_node: int | str = "auto"  # ranks on each node; auto: gpus_per_node, 2 without it
    cpus_per_task: int | None = None  # on each node, for all its ranks
    mem_gb: float | None = None  # host memory on each node
    timeout_min: int = 60  # time limit of a job, in minutes; at its end a job has failed
    constraint: str | None = None
    setup: list[str] = field(default_factory=list)  # lines of shell before each job, e.g. "module load cuda"
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # of sbatch, e.g. {exclusive: true}
    array_parallelism: int = 64  # jobs in the queue at a time
    max_requeues: int = 3  # how often a job that was preempted begins again
    env: dict[str, str] = field(default_factory=dict)  # added to the environment of each job


class SlurmLauncher(SweepLauncher):
    """Submits jobs to Slurm, and waits for them."""

    def runner(self) -> "Slurm":
        from shardlab.sweep.slurm import Slurm

        return Slurm(**self.settings)


ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmConfig, provider="shardlab")
