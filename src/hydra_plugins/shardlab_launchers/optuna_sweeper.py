"""`hydra/sweeper=optuna`: hydra-optuna-sweeper, told of mistakes before the first job runs.

Hydra imports this file at every start, so whatever takes time is imported where a sweep begins.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

with suppress(ImportError):
    import hydra_plugins.hydra_optuna_sweeper.config  # noqa: F401 - stores a config of the same name: ours comes after


@dataclass
class OptunaConfig:
    """Keys of `hydra.sweeper`; `hydra/sweeper/sampler` is one of tpe, random, cmaes, nsgaii, grid."""

    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"optional sampler": "tpe"}])
    _target_: str = "hydra_plugins.shardlab_launchers.optuna_sweeper.OptunaSweeper"
    _recursive_: bool = False
    sampler: Any = None
    direction: Any = "maximize"  # or minimize; a list of them where `sweep.objectives` names several
    n_trials: int = 20  # jobs in all
    n_jobs: int = 1  # chosen at a time: above 1 where the launcher runs several side by side
    params: Any = None  # {key: values}, what is varied, where it is not on the command line
    custom_search_space: str | None = None  # a function of (config, trial), by its path, that suggests more
    storage: str | None = None  # where trials are kept, e.g. sqlite:///study.db, for a later sweep of that study_name
    study_name: str | None = None
    max_failure_rate: float = 1.0  # of the jobs chosen at a time; what becomes of one stops no other


class OptunaSweeper(Sweeper):
    """Lets Optuna choose the combinations, by what `sweep.objectives` says of those that have run."""

    def __init__(self, sampler: DictConfig | None, direction: Any, **settings: Any) -> None:
        self.sampler = sampler
        self.directions = list(direction) if OmegaConf.is_list(direction) else [direction]
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from shardlab.errors import ConfigError
        from shardlab.sweep.objectives import check_directions, check_objectives

        check_objectives(config.sweep.objectives)
        check_directions(self.directions, config.sweep.objectives)
        # SQLAlchemy 1.4 would say at each start that Optuna 2 will not do with version 2: the extra asks for below 2.
        os.environ.setdefault("SQLALCHEMY_SILENCE_UBER_WARNING", "1")
        try:
            logging.getLogger("alembic").setLevel(logging.WARNING)
            import optuna
            from hydra_plugins.hydra_optuna_sweeper._impl import OptunaSweeperImpl
        except ImportError:
            raise ConfigError("hydra/sweeper=optuna needs Optuna: pip install 'shardlab[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # At the end of its grid it stops the study, which only `optimize` can: an error where the last job has failed.
        optuna.samplers.GridSampler.after_trial = optuna.samplers.BaseSampler.after_trial  # type: ignore[method-assign]
        # The launcher has told more of a job that came to nothing.
        logging.getLogger(OptunaSweeperImpl.__module__).addFilter(lambda record: record.levelno != logging.WARNING)
        self.optuna = OptunaSweeperImpl(
            sampler=instantiate(self.sampler), direction=self.directions, search_space=None, **self.settings
        )
        self.optuna.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: Sequence[str]) -> None:
        try:
            self.optuna.sweep(list(arguments))
        except ValueError as error:
            if "No trials are completed" not in str(error):  # else the launcher has told what became of each
                raise


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConfig, provider="shardlab")
