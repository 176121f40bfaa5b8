"""How a process becomes a rank of a job, and how the job's end becomes a line on screen and an exit code."""

import difflib
import logging
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from shardlab.config import Mode, parse, typed
from shardlab.distributed import launched, ranks
from shardlab.errors import ConfigError, RunEnded, describe
from shardlab.interrupt import end_with_parent, leave
from shardlab.run_folder import RunFolder
from shardlab.sweep.objectives import check_objectives, objectives

# A rank above 0 that finds a mistake in the config leaves the word to rank 0, which finds it too, and waits for
# torchrun to end it: torchrun ends all ranks as soon as the first one exits.
_YIELD_SECONDS = 10.0

# Hydra gives each process a run folder of its own; only rank 0 must have one.
_ABOVE_RANK_0 = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
_MULTIRUN = "hydra.mode=MULTIRUN"  # what `-m` stands for
_GROUP_OVERRIDE = re.compile(r"\+?[a-z_/]*=(null|true|false|[-+.\d]+)?$")  # of no group where its value is no name


def main(hydra_main: Callable[[], Any]) -> NoReturn:
    """Runs a Hydra main function as one rank.

    Exits with 0 for a completed run, 1 for one that failed or ran out of memory, 2 for a mistake in the config, and
    128 + the signal's number for one that was interrupted.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing several lines and exiting
    sys.path.append(os.getcwd())  # so that `_target_` finds the user's modules, as `python -m` would
    mistakes = (ConfigError, HydraException, OmegaConfBaseException, ValueError, OSError)
    try:
        if launched():
            end_with_parent()
        prepare_arguments(sys.argv)
        hydra_main()
    except mistakes as error:  # none of a job's: `run` keeps those
        _endings.insert(0, (2, one_line(error, sys.argv[1:])))
    except KeyboardInterrupt:
        end_with(130)
    _leave(_endings[0][0] if _endings else 0, [mistake for _, mistake in _endings if mistake])


# How jobs ended that did not complete: exit code, and what is yet to be said. Raised within a Hydra job, an error would
# be printed by Hydra in its own way, and a multirun would not go on to the next job.
_endings: list[tuple[int, str | None]] = []


def end_with(code: int, mistake: str | None = None) -> None:
    """Lets the process end with an exit code once Hydra is through; the first that is given wins."""
    _endings.append((code, mistake))


def run(cfg: DictConfig) -> float | tuple[float, ...] | None:
    """Runs the job that a composed config describes; to be called within a Hydra job, and `main` around that.

    Returns:
        What `sweep.objectives` names, for a sweeper; None where the run did not complete, which `main` tells.
    """
    check_objectives(cfg.sweep.objectives)
    summary = _run(cfg)
    return None if summary is None else objectives(summary, cfg.sweep.objectives)


def _run(cfg: DictConfig) -> dict[str, Any] | None:
    try:
        place, hydra = ranks(), HydraConfig.get()
        folder = RunFolder(Path(hydra.runtime.output_dir))
        choices = {group: str(choice) for group, choice in hydra.runtime.choices.items()}
        if cfg.sweep.resume is not None and hydra.mode is not RunMode.MULTIRUN:
            raise ConfigError(f"sweep.resume={cfg.sweep.resume} is of a multirun: add -m")
        # What is imported below imports FSDP, which takes seconds: a mistake found before is told without it.
        if typed(cfg).mode is Mode.plan:
            from shardlab.planner.job import plan

            return plan(cfg, folder=folder, choices=choices) if place.is_first else None
        config = parse(cfg, world_size=place.world_size, nodes=place.nodes)
        from shardlab.job import train

        return train(config, place=place, folder=folder, choices=choices)
    except (ConfigError, HydraException, OmegaConfBaseException) as mistake:
        end_with(2, one_line(mistake))
    except RunEnded as ended:
        end_with(ended.exit_code)
        if ended.interrupted:
            raise KeyboardInterrupt from None  # the jobs of a multirun that follow are not wanted either
    except Exception:
        traceback.print_exc()
        end_with(1)
    return None


def one_line(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """A mistake in the config as one line: ours as they are, Hydra's and OmegaConf's with what they do not say.

    Args:
        error: what was raised.
        arguments: the command line, where the error may come from it.
    """
    if isinstance(error, OverrideParseException):
        *_, problem = _lines(error.message.split("See https")[0])
        return (
            f"{error.override} cannot be read ({problem}): write key=value, and quote it where it holds special "
            "characters; see https://hydra.cc/docs/1.3/advanced/override_grammar/basic"
        )
    if isinstance(error, OSError) and error.filename and not isinstance(error, HydraException):
        key = "hydra.sweep.dir" if any(map(_asks_for_multirun, arguments)) else "hydra.run.dir"
        return f"{key}={error.filename} cannot be made ({error.strerror}): name another folder"
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):
        groups = [argument for argument in arguments if _GROUP_OVERRIDE.match(argument)]
        return f"{', '.join(groups)}: a config group takes the name of one of its choices; --help lists them"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = _joined(str(error).split("Config search path")[0]).removeprefix("Error merging override ")
    if not isinstance(cause, OmegaConfBaseException):
        return describe(error) if isinstance(error, ConfigError) else text
    parent, full_key = getattr(cause, "parent_node", None), str(cause.full_key or cause.key)
    if isinstance(cause, MissingMandatoryValue):
        return f"{full_key} is missing: set {full_key}=..."
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(parent, DictConfig):
        return no_such_key(full_key, [str(name) for name in parent])
    reason = _joined(str(cause.msg or cause).split("full_key")[0])
    return f"{text.rstrip('.')}: {reason}" if cause is not error else f"{full_key}: {reason}"


def no_such_key(full_key: str, known: Sequence[str]) -> str:
    """What to say of a key that is not among the known ones beside it."""
    parent, _, key = full_key.rpartition(".")
    if near := difflib.get_close_matches(key, known, n=1):
        way_out = f"did you mean {f'{parent}.' if parent else ''}{near[0]}?"
    else:
        way_out = f"there are {', '.join(known)}" if known else f"add it: +{full_key}=..."
    return f"{full_key}: there is no such key; {way_out}"


def _asks_for_multirun(argument: str) -> bool:
    return argument in ("-m", _MULTIRUN) or argument.startswith("--mu")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _joined(text: str) -> str:
    """Hydra's lists of choices, one a line, as one line."""
    joined = ""
    for line in _lines(text):
        joined += ("" if not joined else " " if joined.endswith((":", ".", ",")) else ", ") + line
    return joined.strip(" ,").replace("\\'", "'")


def prepare_arguments(argv: list[str]) -> None:
    """Turns the command line into what Hydra takes on this rank.

    Options may stand between overrides. Ranks above 0 make no folders and print nothing.

    Raises:
        ConfigError: for what Hydra's parser refuses, and for what makes no sense under torchrun.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help and --hydra-help list what there is")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    arguments = parser.parse_intermixed_args(argv[1:])
    overrides = list(arguments.overrides)
    options = [argument for argument in argv[1:] if argument not in overrides]
    if launched() and any(map(_asks_for_multirun, argv[1:])):
        others = [argument for argument in (*options, *overrides) if not _asks_for_multirun(argument)]
        raise ConfigError(
            "a multirun under torchrun would run the whole sweep on each rank: run "
            f"`python {shlex.join([argv[0], '-m', *others])}`"
        )
    if launched() and not ranks().is_first:
        if arguments.help or arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion:
            sys.exit(0)
        ours = tuple(override.split("=")[0] + "=" for override in _ABOVE_RANK_0)
        overrides = [override for override in overrides if not override.startswith(ours)] + _ABOVE_RANK_0
    argv[1:] = options + overrides


def _leave(code: int, mistakes: Sequence[str]) -> NoReturn:
    """Ends this process.

    Args:
        code: for the exit.
        mistakes: in the config, one in each job of a multirun at most; said once, by rank 0.
    """
    if code == 2 and launched() and not ranks().is_first:
        time.sleep(_YIELD_SECONDS)  # ended by torchrun before; else this rank alone has found the mistake
    with suppress(OSError):  # of a pipe or a terminal that is gone
        for mistake in mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    leave(code)
