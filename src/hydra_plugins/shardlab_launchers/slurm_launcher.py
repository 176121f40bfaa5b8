"""`hydra/launcher=slurm`: each job of a multirun as a job of Slurm, with a torchrun on each of its nodes.

Hydra imports this file at every start, so whatever takes time is imported where a sweep begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


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


class SlurmLauncher(Launcher):
    """Submits jobs to Slurm, and waits for them."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from shardlab.sweep.launcher import launch
        from shardlab.sweep.slurm import Slurm

        plain = {
            key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for key, value in self.settings.items()
        }
        return launch(
            Slurm(**plain),  # type: ignore[arg-type]
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=self.config,
            job_overrides=job_overrides,
            first_number=initial_job_idx,
        )


ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmConfig, provider="shardlab")
