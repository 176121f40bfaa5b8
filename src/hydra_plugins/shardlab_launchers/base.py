"""What Hydra's launchers of this project share. Imports nothing that takes time, as the files of the launchers."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from shardlab.sweep.runner import Runner


class SweepLauncher(Launcher):
    """Hands the jobs of a multirun to `shardlab.sweep`."""

    def __init__(self, **settings: Any) -> None:
        self.settings: dict[str, Any] = {
            key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for key, value in settings.items()
        }

    @abstractmethod
    def runner(self) -> "Runner":
        """What starts the jobs, of these settings; ConfigError where they cannot be."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from shardlab.sweep.tasks import keep_compositions

        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        keep_compositions(hydra_context)  # the sweeper composes after this

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from shardlab.sweep.launcher import launch

        return launch(
            self.runner(),
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=self.config,
            job_overrides=job_overrides,
            first_number=initial_job_idx,
        )
