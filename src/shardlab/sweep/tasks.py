"""The combinations of a sweep before they run: composed, numbered, and with a folder each."""

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.utils import filter_overrides
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from shardlab.config import typed

_CONFIG_OPTIONS = ("config_path", "config_name", "config_dir")  # of Hydra; a job finds its config as the sweep does

# Of Hydra's own overrides those that say how the sweep is run are not its jobs'.
_OF_THE_SWEEP = re.compile(r"[+~]*hydra[./](mode|run|sweep|launcher|sweeper|callbacks)\b")


@dataclass(frozen=True)
class Task:
    """One combination.

    Attributes:
        number: as in Hydra's `hydra.job.num`.
        overrides: as on the command line, without Hydra's own and the sweep's.
        composed: what Hydra composes of them, its own node `hydra` included.
        cfg: the same without that node, as a Hydra main function gets it.
        digest: of all that decides what the job does.
        folder: of the run.
    """

    number: int
    overrides: tuple[str, ...]
    composed: DictConfig
    cfg: DictConfig
    digest: str
    folder: Path


_kept: dict[tuple[str, ...], DictConfig] = {}  # compositions by overrides, until `compose` takes them


def keep_compositions(hydra_context: HydraContext) -> None:
    """Keeps what a sweeper composes to check the combinations, for `compose`: a tenth of a second each."""
    loader: Any = hydra_context.config_loader
    load = loader.load_sweep_config

    def load_and_keep(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        composed = _kept[tuple(sweep_overrides)] = load(master_config, sweep_overrides)
        return composed

    loader.load_sweep_config = load_and_keep


def compose(
    job_overrides: Sequence[Sequence[str]],
    *,
    hydra_context: HydraContext,
    config: DictConfig,
    first_number: int,
    ranks: str,
    environment: Mapping[str, str],
) -> list[Task]:
    """Composes each combination, as Hydra's own launchers do.

    Args:
        job_overrides: of each combination.
        hydra_context: as the launcher was given it.
        config: of the sweep.
        first_number: of the first combination.
        ranks: how many there are, in words.
        environment: that is added to theirs.
    """
    tasks = []
    for number, overrides in enumerate(job_overrides, first_number):
        # The sweeper may have checked nothing, or the same combination comes twice.
        kept = _kept.get(tuple(overrides))
        composed = kept or hydra_context.config_loader.load_sweep_config(config, list(overrides))
        _kept.pop(tuple(overrides), None)
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        cfg = typed(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
        own = tuple(o for o in filter_overrides(overrides) if not o.lstrip("+~").startswith(("hydra/", "sweep.")))
        tasks.append(Task(number, own, composed, cfg, digest_of(cfg, ranks, environment), _folder(composed)))
    return tasks


def renumbered(task: Task, number: int) -> Task:
    """The same combination under another number, and in the folder that goes with it."""
    with open_dict(task.composed):
        task.composed.hydra.job.id = task.composed.hydra.job.num = number
    return replace(task, number=number, folder=_folder(task.composed))


def program_of(task_function: TaskFunction) -> str:
    """The file of Hydra's main function, as it can be called from here."""
    file = inspect.getfile(inspect.unwrap(task_function))
    return min(file, os.path.relpath(file), key=len)


def digest_of(cfg: DictConfig, ranks: str, environment: Mapping[str, str]) -> str:
    """A short hash of what decides what a job does: ranks, environment, config; but for what is only tracking."""
    plain: dict[Any, Any] = {
        key: OmegaConf.to_container(cfg[key], resolve=True, enum_to_str=True)
        if OmegaConf.is_config(cfg[key])
        else str(cfg[key])
        for key in cfg
        if key not in ("sweep", "tracking")
    }
    # Without an environment as of sweeps that were made before it counted.
    decides = [plain, ranks, dict(environment)] if environment else [plain, ranks]
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]


def arguments(task: Task, config: DictConfig) -> list[str]:
    """The command line of train.py for one job by hand: the user's options and overrides."""
    given = get_args_parser().parse_intermixed_args(sys.argv[1:])
    options = [
        part
        for name in _CONFIG_OPTIONS
        if (value := getattr(given, name)) is not None
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    hydras = [override for override in config.hydra.overrides.hydra if not _OF_THE_SWEEP.match(override)]
    return [*options, *task.overrides, *hydras]


def in_folder(folder: Path) -> str:
    """The override that gives a run its folder."""
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.run.dir='{escaped}'"


def _folder(composed: DictConfig) -> Path:
    return (Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir)).absolute()
