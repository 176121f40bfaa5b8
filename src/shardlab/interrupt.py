"""SIGINT, SIGTERM and SIGHUP: a request that the loop looks for, and a way out where the loop is stuck."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from shardlab.errors import Interrupted

# A rank that waits in a collective for one that is gone runs no Python, and so no signal handler. It is ended after so
# many seconds, well before torchrun sends SIGKILL (30 s).
GRACE_SECONDS = 8.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEFT = 0  # no signal has this number
_previous: dict[signal.Signals, Any] = {}  # the handlers that a watch has replaced


class Interrupt:
    """Whether a signal has come."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self.signal is not None:
            raise Interrupted(signal.Signals(self.signal).name)

    @property
    def exit_code(self) -> int:
        """As shells have it: 128 + the number of the signal."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def watch_signals(when_stuck: Callable[[], int]) -> Iterator[Interrupt]:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag while it is entered (in the main thread).

    One that is ignored, as `nohup` has it, stays so.

    Args:
        when_stuck: called in another thread, `GRACE_SECONDS` after a signal, if the block has not been left by then;
            the process then exits with the code that it returns.
    """
    interrupt, left = Interrupt(), threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def handle(signum: int, frame: object) -> None:
        interrupt.signal = interrupt.signal or signum
        # torchrun signals a DataLoader's workers too. The error that PyTorch raises in this thread for a worker that
        # has died could interrupt the writing of the summary.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wait() -> None:
        # The interpreter's C handler writes each signal's number, whatever the main thread does; those of other
        # handlers too, such as the SIGCHLD of a DataLoader.
        while (received := os.read(read_end, 1)[0]) not in (_LEFT, *_SIGNALS):
            pass
        if received == _LEFT or left.wait(GRACE_SECONDS):
            return
        interrupt.signal = interrupt.signal or received
        code = 1
        try:
            code = when_stuck()
        finally:
            leave(code)

    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            _previous[signum] = signal.signal(signum, handle)
    previous_fd = signal.set_wakeup_fd(write_end)
    watcher = threading.Thread(target=wait, name="signal watch", daemon=True)
    watcher.start()
    try:
        yield interrupt
    finally:
        left.set()
        signal.set_wakeup_fd(previous_fd)
        os.write(write_end, bytes([_LEFT]))  # closing it would not do: forked processes have it open too
        watcher.join()
        os.close(write_end)
        os.close(read_end)
        _restore()


def end_with_parent(signum: int = signal.SIGTERM) -> None:
    """Has Linux send this process a signal when its parent is gone: a torchrun that is killed cannot end its ranks."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signum)


def when_input_closes(action: Callable[[], None]) -> None:
    """Calls a function, in another thread, where nobody holds the other end of the standard input any more.

    For a process that whoever started it is to outlive: a parent that is killed leaves no word, but its pipe closes.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        action()

    threading.Thread(target=wait, daemon=True).start()


def exists(process: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def leave(code: int) -> NoReturn:
    """Exits without the interpreter's tear-down, in which a process group whose peers are gone can abort or hang."""
    for child in multiprocessing.active_children():  # the workers of a DataLoader
        child.kill()
    os._exit(code)


def _restore() -> None:
    while _previous:
        signal.signal(*_previous.popitem())


def _leave_to_parent() -> None:
    """A forked process dies of its signals as ever, and wakes no watcher in its parent (`Pool` ends workers so)."""
    if _previous:
        signal.set_wakeup_fd(-1)
        _restore()


os.register_at_fork(after_in_child=_leave_to_parent)
