"""Forked processes that work beside this one, with all that it had imported and composed."""

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(Generic[Task, Result]):
    """Processes that call one function with one task after another; they end with the `with` block.

    A process that has threads cannot be forked safely, and autograd starts some in the first backward for a GPU, real
    or simulated. There, and on other systems than Linux, the tasks are done in this process.
    """

    def __init__(self, function: Callable[[Task], Result], count: int):
        """
        Args:
            function: takes a task and returns what can be pickled; it must not raise.
            count: of processes.
        """
        self._function = function
        self._given: dict[Connection, deque[Task]] = {}  # what each worker has yet to answer, its current task first
        self._processes: list[BaseProcess] = []
        with suppress(OSError):  # no memory, or too many processes: fewer will do
            for _ in range(count if sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1 else 0):
                self._fork()

    def __enter__(self) -> "Workers[Task, Result]":
        return self

    def __exit__(self, *exception: Any) -> None:
        for connection in self._given:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def start(self, tasks: Sequence[Task]) -> list[Task]:
        """Gives the first tasks to the workers, two each, while this process does something else.

        Returns:
            The tasks that are left.
        """
        busy = list(self._given)
        for index, task in enumerate(tasks[: 2 * len(busy)]):
            self._give(busy[index % len(busy)], task)
        return list(tasks[2 * len(busy) :])

    def run(self, tasks: Iterable[Task], *, start_until: float, wait_until: float) -> Iterator[tuple[Task, Result]]:
        """Yields tasks with their results as they are done: those that were started, then these in their order.

        This process does its share, so that there should be one worker less than there are cores.

        Args:
            tasks: to do, the most important first.
            start_until: `time.monotonic()` after which none is begun.
            wait_until: when to leave those that are not done.
        """
        waiting = deque(tasks)
        while True:
            for connection, given in self._given.items():
                if not given and waiting and time.monotonic() < start_until:
                    self._give(connection, waiting.popleft())
            own = waiting.popleft() if waiting and time.monotonic() < start_until else None
            if own is not None:
                yield own, self._function(own)
            busy = [connection for connection, given in self._given.items() if given]
            seconds = 0.0 if own is not None else max(0.0, wait_until - time.monotonic())
            ready = wait(busy, timeout=seconds) if busy else []
            if not ready and own is None:
                return
            for connection in (connection for connection in busy if connection in ready):
                try:
                    result = connection.recv()
                except (EOFError, OSError):  # the worker was killed, perhaps for its memory
                    del self._given[connection]
                else:
                    yield self._given[connection].popleft(), result

    def _give(self, connection: Connection, task: Task) -> None:
        with suppress(OSError):  # of a worker that is gone, which `run` sees
            connection.send(task)
        self._given[connection].append(task)

    def _fork(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._serve, args=(theirs, [*self._given, ours]), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._given[ours] = deque()

    def _serve(self, connection: Connection, inherited: Sequence[Connection]) -> None:
        for other in inherited:
            other.close()  # or it would not be noticed that the parent is gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
        logging.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        with suppress(EOFError, OSError):
            while True:
                connection.send(self._function(connection.recv()))
