"""Ctrl-C and its like, while a sweep runs: what is running ends first, and what is done is kept."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether a signal has asked the sweep to end, and whether a second one is impatient."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at_once = False

    def note(self, signum: int, frame: Any = None) -> None:
        self.at_once = self.signal is not None
        self.signal = self.signal or signum


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered; one that is ignored, as `nohup` has it, stays so."""
    stop = Stop()
    previous = {s: signal.getsignal(s) for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    for signum in previous:
        signal.signal(signum, stop.note)
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
