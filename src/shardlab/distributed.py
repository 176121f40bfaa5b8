"""Ranks: where this process stands among them, the process group, and what only one of them may do."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from shardlab.device import Cuda, Device
from shardlab.errors import ConfigError

T = TypeVar("T")

_OF_A_LAUNCHER = re.compile(r"(GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|(LOCAL|MASTER|TORCHELASTIC)_.*")


@dataclass(frozen=True)
class Ranks:
    """This process among the others, as torchrun's environment variables say it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0  # by torchrun, since a rank failed

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def environment_of_no_rank() -> dict[str, str]:
    """The environment without what torchrun tells its ranks: for a process that is none of them."""
    return {name: value for name, value in os.environ.items() if not _OF_A_LAUNCHER.fullmatch(name)}


def ranks() -> Ranks:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK and what else torchrun sets; one lone process without them."""
    if not launched():
        return Ranks()

    def read(name: str, default: int | None = None) -> int:
        text = os.environ.get(name, default)
        try:
            return int(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(f"{name}={text} in the environment is no number: start with torchrun") from None

    rank, world_size = read("RANK"), read("WORLD_SIZE")
    return Ranks(
        rank,
        world_size,
        read("LOCAL_RANK", rank),
        read("LOCAL_WORLD_SIZE", world_size),
        read("TORCHELASTIC_RESTART_COUNT", 0),
    )


@contextmanager
def process_group(place: Ranks, device: Device) -> Iterator[None]:
    """Keeps the default process group up; leaves it in step with the other ranks where all went well.

    After an exception the group is not torn down: the others may be in a collective that will never end, and the
    process is about to exit.
    """
    bound = device.torch_device if isinstance(device, Cuda) else None
    if launched():
        dist.init_process_group(device.backend, device_id=bound, timeout=timedelta(minutes=30))
    else:
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    try:
        yield
    except BaseException:
        if not launched():  # alone: nothing to wait for, and the next job of this process needs a group too
            dist.destroy_process_group()
        raise
    # gloo processes that leave while others still talk to them sometimes abort ("terminate called without an active
    # exception"); in step, they do not. A rank that has died meanwhile takes nothing away from what this one did.
    with suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


def from_first_rank(value: T) -> T:
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def over_ranks(value: T) -> list[T]:
    """Each rank's value, in the order of ranks, on all ranks."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
