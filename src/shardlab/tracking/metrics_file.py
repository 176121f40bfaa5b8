"""metrics.jsonl: every row of metrics, on disk as soon as it is known."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class MetricsFile:
    """One JSON object a line: `step`, `time` (unix seconds) and the row's metrics; null for what is not finite.

    A row is in the kernel's hands when `log` returns, so that a killed process loses none. Where the disk is full, rows
    wait in memory and are written, in order, as soon as that works again. A row is written whole or not at all.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, notice: Callable[[str], None]):
        """
        Args:
            path: of the file; rows are appended.
            notice: tells the user.
        """
        self.path = path
        self._notice = notice
        self._waiting: deque[bytes] = deque()
        self._file: Any = None  # io.FileIO, None while it is not open

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Appends a row."""
        record = {"step": step, "time": round(time.time(), 3)} | {key: _as_json(value) for key, value in row.items()}
        self._waiting.append((json.dumps(record) + "\n").encode())
        try:
            self._write()
        except OSError as error:
            self._close()  # opened anew for the next row: a new handle outlives a remounted disk
            self._notice(f"metrics.jsonl cannot be written ({error.strerror}): rows wait in memory until it can")

    def finish(self) -> None:
        """Writes what waits; says how much was lost if that fails."""
        try:
            self._write()
        except OSError as error:
            self._notice(f"metrics.jsonl lacks its last {len(self._waiting)} rows ({error.strerror})")
        finally:
            self._close()

    def _write(self) -> None:
        while self._waiting:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            self._append(self._waiting[0])
            self._waiting.popleft()

    def _append(self, row: bytes) -> None:
        end, written = os.fstat(self._file.fileno()).st_size, 0
        try:
            while written < len(row):  # a disk that fills up takes a part first, and raises for the rest
                written += self._file.write(row[written:])
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    number = float(value)  # numpy's and torch's scalars too
    return number if math.isfinite(number) else None
