"""Forked processes that work beside this one, with all that it had imported and composed."""

import logging
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from shardlab.interrupt import end_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Lost:
    """What came of a task whose worker ended within it.

    Attributes:
        code: of its exit; negative for signals.
    """

    code: int


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
        self._processes: dict[Connection, BaseProcess] = {}
        with suppress(OSError):  # no memory, or too many processes: fewer will do
            for _ in range(count if count and _can_fork() else 0):
                self._fork()

    def __enter__(self) -> "Workers[Task, Result]":
        return self

    def __exit__(self, *exception: Any) -> None:
        for connection in list(self._processes):
            self._end(connection)

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
            start_until: `time.monotonic()` after which none is begun; infinite = all are.
            wait_until: when to leave those that are not done; infinite = never.
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
            ready = wait(busy, timeout=None if math.isinf(seconds) else seconds) if busy else []
            if not ready and own is None:
                return
            for connection in (connection for connection in busy if connection in ready):
                try:
                    result = connection.recv()
                except (EOFError, OSError):  # the worker was killed, perhaps for its memory
                    self._end(connection)
                else:
                    yield self._given[connection].popleft(), result

    def run_all(
        self, tasks: Iterable[Task], *, begun: Callable[[Task], None], stopped: Callable[[], bool]
    ) -> Iterator[tuple[Task, Result | Lost, float]]:
        """Yields all tasks as they are done, each with its result and the seconds that it took.

        A worker is given one task at a time. Where it ends within one, the result is `Lost`, and a fresh worker takes
        its place. This process does nothing but wait, so that there can be as many workers as cores.

        Args:
            tasks: in the order in which they are to begin.
            begun: called where a task begins.
            stopped: asked while waiting; where it is so, nothing more is begun or waited for.
        """
        waiting, since = deque(tasks), dict[Connection, float]()
        while not stopped():
            for connection, given in self._given.items():
                if not given and waiting:
                    begun(waiting[0])
                    since[connection] = time.monotonic()
                    self._give(connection, waiting.popleft())
            busy = [connection for connection, given in self._given.items() if given]
            if not busy and not waiting:
                return
            if not busy:  # there are no workers
                task, began = waiting.popleft(), time.monotonic()
                begun(task)
                yield task, self._function(task), time.monotonic() - began
                continue
            ready = wait(busy, timeout=_POLL_SECONDS)
            for connection in (connection for connection in busy if connection in ready):
                task, result = self._given[connection].popleft(), self._receive(connection)
                if isinstance(result, Lost) and stopped():  # by what has ended the worker, perhaps
                    return
                yield task, result, time.monotonic() - since[connection]

    def _receive(self, connection: Connection) -> Result | Lost:
        """The result of the task that a worker was given; after its end, there is another worker."""
        try:
            return connection.recv()
        except (EOFError, OSError):
            self._processes[connection].join(_PATIENCE_SECONDS)  # it may be on its way out
            code = self._end(connection)
            with suppress(OSError):
                self._fork()
            return Lost(code)

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
        self._processes[ours] = process
        self._given[ours] = deque()

    def _end(self, connection: Connection) -> int:
        """Ends a worker, whatever it does. Returns its exit code."""
        self._given.pop(connection, None)
        connection.close()
        process = self._processes.pop(connection)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def _serve(self, connection: Connection, inherited: Sequence[Connection]) -> None:
        for other in inherited:
            other.close()  # or it would not be noticed that the parent is gone
        end_with_parent(signal.SIGKILL)  # within a task, too
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # go to all, perhaps; the parent ends its workers
            signal.signal(signum, signal.SIG_IGN)
        logging.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        with suppress(EOFError, OSError):
            while True:
                connection.send(self._function(connection.recv()))


def _can_fork() -> bool:
    """Whether this process can be forked: on Linux, and without threads.

    OpenBLAS, which comes with NumPy, has threads from the start. It ends them where the process is forked (its handler
    in `pthread_atfork`) and starts them anew when it needs them; so the first fork is one that does nothing.
    """
    if sys.platform != "linux":
        return False
    if _has_threads():
        with warnings.catch_warnings(action="ignore"):  # Python's own about threads, where they are still there
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return not _has_threads()


def _has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1
