"""What a sweep's launcher asks of whatever starts its jobs: torchruns on this machine, or jobs of Slurm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardlab.errors import ConfigError
from shardlab.run_folder import Status
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task

CPU_RANKS = 2  # where there are no GPUs: the fewest that shard anything


@dataclass(frozen=True)
class Ended:
    """How the processes of a job ended.

    Attributes:
        code: of torchrun.
        seconds: from start to end.
        exit_codes: by rank, of those that failed; negative for signals.
        timed_out: whether `timeout_s` ended it.
        said: status and reason, where only the runner can know them, as those of Slurm.
    """

    code: int
    seconds: float
    exit_codes: Mapping[int, int]
    timed_out: bool = False
    said: tuple[Status, str] | None = None


class Runner(Protocol):
    """The settings of a launcher, and how its jobs run."""

    @property
    def nnodes(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def timeout_s(self) -> float | None: ...

    @property
    def writes(self) -> bool:
        """Whether this process keeps the records of the sweep; on other nodes it only lends their devices."""

    def by_hand(self, program: str, arguments: Sequence[str]) -> list[str]:
        """The command that runs one job without a sweep."""

    def check(self, tasks: Sequence[Task]) -> None:
        """Raises ConfigError where a sweep of these tasks cannot be run so; called before anything is written."""

    def run(
        self,
        tasks: Sequence[Task],
        *,
        command: Callable[[Task], Sequence[str]],
        environment: Mapping[str, str],
        started: Callable[[Task], None],
        ended: Callable[[Task, Ended], None],
        stop: Stop,
    ) -> None:
        """Runs each task to its end, as many at a time as the settings say.

        Args:
            tasks: in the order in which they are to begin.
            command: program and arguments of each rank of a task.
            environment: added to that of this process.
            started: called where a task begins.
            ended: called where all its processes have ended; not for one that has never begun.
            stop: whether a signal has asked the sweep to end. What runs then is ended too, and nothing is begun.
        """


def check_least(settings: object, least: Mapping[str, int]) -> None:
    """Raises ConfigError where one of these keys of `hydra.launcher` is set, and below its least value."""
    for key, bound in least.items():
        value = getattr(settings, key)
        if value is not None and value < bound:
            raise ConfigError(f"hydra.launcher.{key}={value} must be at least {bound}")


def check_nproc(nproc_per_node: int | str, *, auto: str) -> None:
    """Raises ConfigError where `hydra.launcher.nproc_per_node` is neither a number of ranks nor auto."""
    if nproc_per_node != "auto" and (not isinstance(nproc_per_node, int) or nproc_per_node < 1):
        raise ConfigError(f"hydra.launcher.nproc_per_node={nproc_per_node} must be a number of ranks, or auto: {auto}")
