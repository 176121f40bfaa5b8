"""SIGINT and SIGTERM: a request that the loop looks for, and a way out where the loop is stuck."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardlab.errors import Interrupted

# A rank that waits in a collective for one that is gone runs no Python, and so no signal handler. It is ended after so
# many seconds, well before torchrun sends SIGKILL (30 s).
GRACE_SECONDS = 8.0


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
def watch_signals(when_stuck: Callable[[], None]) -> Iterator[Interrupt]:
    """Turns SIGINT and SIGTERM into a flag while it is entered (in the main thread).

    Args:
        when_stuck: called in another thread, `GRACE_SECONDS` after a signal, if the block has not been left by then;
            the process then exits.
    """
    interrupt, left = Interrupt(), threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def handle(signum: int, frame: object) -> None:
        interrupt.signal = interrupt.signal or signum

    def wait() -> None:
        received = os.read(read_end, 1)  # written by the interpreter's C handler, whatever the main thread does
        if not received or left.wait(GRACE_SECONDS):
            return
        interrupt.signal = interrupt.signal or received[0]
        try:
            when_stuck()
        finally:
            os._exit(interrupt.exit_code)

    previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    previous_fd = signal.set_wakeup_fd(write_end)
    watcher = threading.Thread(target=wait, name="signal watch", daemon=True)
    watcher.start()
    try:
        yield interrupt
    finally:
        left.set()
        signal.set_wakeup_fd(previous_fd)
        os.close(write_end)  # ends the watcher's read
        watcher.join()
        os.close(read_end)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
