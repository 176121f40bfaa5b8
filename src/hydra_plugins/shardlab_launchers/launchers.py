"""`hydra/launcher=torchrun`: each job of a multirun in a `torchrun` of its own.

Hydra imports this file at every start, so whatever takes time is imported where a sweep begins.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore

from hydra_plugins.shardlab_launchers.base import SweepLauncher

if TYPE_CHECKING:
    from shardlab.sweep.torchrun import Torchrun


@dataclass
class TorchrunConfig:
    """Keys of `hydra.launcher`."""

    _target_: str = "hydra_plugins.shardlab_launchers.launchers.TorchrunLauncher"
    nproc_per_node: int | str = "auto"  # ranks on each node; auto: one for each GPU, 2 where there are none
    nnodes: int = 1  # above 1: start the same sweep on each node, with its own node_rank and the same rdzv_endpoint
    node_rank: int = 0  # only the sweep on node 0 keeps records: none of several nodes is resumed (sweep.resume)
    rdzv_endpoint: str | None = None  # host:port of node 0; job k takes port + k. One node: a free port for each job
    max_restarts: int = 0  # of a job whose rank failed, from its beginning
    timeout_s: float | None = None  # after which a job is ended, and has failed; null = never
    parallel_jobs: int = 1  # side by side, on disjoint GPUs; on CPUs one at a time
    env: dict[str, str] = field(default_factory=dict)  # added to the environment of each job


class TorchrunLauncher(SweepLauncher):
    """Runs jobs on this machine, one after another or side by side on disjoint GPUs."""

    def runner(self) -> "Torchrun":
        from shardlab.sweep.torchrun import Torchrun

        return Torchrun(**self.settings)


ConfigStore.instance().store(group="hydra/launcher", name="torchrun", node=TorchrunConfig, provider="shardlab")
