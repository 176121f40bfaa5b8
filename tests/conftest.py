"""Fixtures that tests of several folders share."""

import os
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; several ranks share few cores

from tests import commands
from tests.ranks import RankPool


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Files that run commands come first, then those that use ranks, so that no worker is left with one at the end."""
    with_commands = {item.module for item in items if {commands.run, commands.Command} & _functions(item.module)}
    with_ranks = {item.module for item in items if "on_ranks" in item.fixturenames}
    items.sort(key=lambda item: (item.module not in with_commands, item.module not in with_ranks))


def _functions(module: ModuleType) -> set[Callable]:
    return {value for value in vars(module).values() if isinstance(value, (type, FunctionType))}


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[[int], RankPool]]:
    """`on_ranks(n)(function, *args)` calls a module-level function on n ranks and returns their results."""
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()
