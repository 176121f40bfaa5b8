"""Fixtures that tests of several folders share."""

import os
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; several ranks share few cores

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[[int], RankPool]]:
    """`on_ranks(n)(function, *args)` calls a module-level function on n ranks and returns their results."""
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()
