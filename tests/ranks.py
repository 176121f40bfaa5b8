"""Runs a function on several ranks, in processes that stay alive between tests: a start costs seconds, a test less."""

import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

SECONDS = 120.0  # for one call; a collective that never ends must not hold up the suite
IMPORTED = ("torch.distributed.fsdp", "torch._dynamo", "torchmetrics", "shardlab.trainer")


def forking() -> BaseContext:
    """Makes processes by forking one that has no threads, and has imported what takes seconds and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def one_process() -> ProcessPoolExecutor:
    """A process in which nothing has run yet, to call functions in."""
    return ProcessPoolExecutor(1, mp_context=forking())


class RankPool:
    """`world_size` processes with a gloo process group; call it as `pool(function, *args)`."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a module-level function on each rank. Returns each rank's result; raises what a rank raised."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, args)))
        results: dict[int, Any] = {}
        until = time.monotonic() + SECONDS
        while len(results) < self.world_size:
            ready = wait([c for i, c in enumerate(self._connections) if i not in results], until - time.monotonic())
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    error, results[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    error = RuntimeError(f"rank {rank} died")
                if error is not None:
                    self.close()  # the others may be in a collective that this rank has left
                    raise error
            if not ready:
                self.close()
                raise TimeoutError(
                    f"ranks {set(range(self.world_size)) - set(results)} still run after {SECONDS:.0f} s"
                )
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes = [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # The last rank is started anew, and hashes text with a seed of its own, as all of torchrun's ranks do: so what
        # depends on the order of a set shows.
        anew = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            context = anew if 0 < rank == self.world_size - 1 else forking()
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, port, list(sys.path)), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)


def _serve(connection: Connection, rank: int, world_size: int, port: int, path: list[str]) -> None:
    sys.path[:] = path
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what imports made is no garbage: the ledger's collections need not look through it
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        error, result = None, None
        try:
            result = function(*args)
        except BaseException as raised:
            error = raised
            error.add_note(f"on rank {rank} of {world_size}:\n{traceback.format_exc()}")
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                error = RuntimeError(traceback.format_exc())
        connection.send_bytes(pickle.dumps((error, result)))
