"""How a process becomes a rank of a job, and how the job's end becomes a line on screen and an exit code."""

import difflib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from shardlab.config import parse
from shardlab.distributed import launched, ranks
from shardlab.errors import ConfigError, RunEnded
from shardlab.run_folder import RunFolder

# A rank above 0 that finds a mistake in the config leaves the word to rank 0, which finds it too, and waits for
# torchrun to end it: torchrun ends all ranks as soon as the first one exits.
_YIELD_SECONDS = 20.0

# Hydra gives each process a run folder of its own; only rank 0 must have one.
_ABOVE_RANK_0 = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
_MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
_PRINTS_ONLY = ("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")


def main(hydra_main: Callable[[], Any]) -> None:
    """Runs a Hydra main function as one rank.

    Exits with 0 for a completed run, 1 for one that failed or ran out of memory, 2 for a mistake in the config, and
    128 + the signal's number for one that was interrupted.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing several lines and exiting
    sys.path.append(os.getcwd())  # so that `_target_` finds the user's modules, as `python -m` would
    try:
        if launched():
            _prepare_arguments(sys.argv)
        hydra_main()
        if _endings:
            raise _endings[0]
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        _refuse(one_line(error))
    except RunEnded as end:
        _leave(end.exit_code)
    except KeyboardInterrupt:
        _leave(130)


# How jobs ended that did not complete. Raised within a Hydra job, Hydra would print them in its own way.
_endings: list[ConfigError | RunEnded] = []


def run(cfg: DictConfig) -> dict[str, Any] | None:
    """Runs the job that a composed config describes; to be called within a Hydra job, and `main` around that.

    Returns:
        The summary, as in `summary.json`; None where the run did not complete, which `main` tells.
    """
    try:
        place, hydra = ranks(), HydraConfig.get()
        config = parse(cfg, world_size=place.world_size, nodes=place.nodes)
        from shardlab.job import (
            train,
        )  # imports FSDP, and all else; a mistake in the config is told without waiting for it

        return train(
            config,
            place=place,
            folder=RunFolder(Path(hydra.runtime.output_dir)),
            choices={group: str(choice) for group, choice in hydra.runtime.choices.items()},
        )
    except (ConfigError, RunEnded) as ending:
        _endings.append(ending)
        return None


def one_line(error: BaseException) -> str:
    """A mistake in the config as one line: ours as they are, Hydra's and OmegaConf's with what they do not say."""
    if isinstance(error, ConfigError):
        return str(error)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = _joined(str(error).split("Config search path")[0]).removeprefix("Error merging override ")
    if isinstance(cause, OmegaConfBaseException):
        parent, key = getattr(cause, "parent_node", None), str(getattr(cause, "key", ""))
        if isinstance(parent, DictConfig) and key not in parent:
            known = [str(name) for name in parent]
            near = difflib.get_close_matches(key, known, n=1)
            way_out = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            return f"{cause.full_key or key}: there is no such key; {way_out}"
        if cause is not error:
            text = f"{text.rstrip('.')}: {_joined((cause.msg or str(cause)).split('full_key')[0])}"
    return text


def _joined(text: str) -> str:
    """Hydra's lists of choices, one a line, as one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    joined = ""
    for line in lines:
        joined += ("" if not joined else " " if joined.endswith((":", ".", ",")) else ", ") + line
    return joined.strip(" ,")


def _prepare_arguments(argv: list[str]) -> None:
    """Refuses what makes no sense under torchrun, and keeps ranks above 0 from making folders or printing."""
    flags = [argument for argument in argv[1:] if argument in _MULTIRUN]
    if flags:
        overrides = " ".join(argument for argument in argv[1:] if argument not in _MULTIRUN)
        raise ConfigError(
            f"{flags[0]} under torchrun would run the whole sweep on each rank: run `python {argv[0]} -m {overrides}`"
        )
    if ranks().is_first:
        return
    if any(argument.split("=")[0] in _PRINTS_ONLY for argument in argv[1:]):
        sys.exit(0)
    ours = tuple(override.split("=")[0] + "=" for override in _ABOVE_RANK_0)
    argv[1:] = [argument for argument in argv[1:] if not argument.startswith(ours)] + _ABOVE_RANK_0


def _refuse(message: str) -> NoReturn:
    """Says a mistake in the config once, on rank 0, and exits with 2."""
    if launched() and not ranks().is_first:
        time.sleep(_YIELD_SECONDS)  # ended by torchrun before; else this rank alone has found the mistake
    print(f"error: {message}", file=sys.stderr)
    _leave(2)


def _leave(code: int) -> NoReturn:
    """Exits without the interpreter's tear-down, in which a process group whose peers are gone can abort or hang."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
