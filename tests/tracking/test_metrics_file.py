import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from shardlab.tracking.metrics_file import MetricsFile
from tests.tracking.conftest import rows_of


class Said(list[str]):
    """Collects notices."""

    def __call__(self, text: str) -> None:
        self.append(text)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writes beyond this size fail, as on a full disk: a part of the row fits, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_row_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", Said())
    metrics.log({"train/loss": 2.5, "progress/tokens": 4096}, 7)
    (row,) = rows_of(tmp_path)
    assert abs(row.pop("time") - time.time()) < 5
    assert row == {"step": 7, "train/loss": 2.5, "progress/tokens": 4096}
    metrics.finish()


def test_a_killed_process_loses_no_row(tmp_path: Path) -> None:
    program = f"""if True:
        import os, pathlib, signal
        from shardlab.tracking.metrics_file import MetricsFile
        metrics = MetricsFile(pathlib.Path({str(tmp_path)!r}) / "metrics.jsonl", print)
        for step in range(100):
            metrics.log({{"train/loss": 1.0}}, step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(100))


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", Said())
    metrics.log({"a": math.nan, "b": math.inf, "c": np.float32("nan"), "d": torch.tensor(-math.inf), "e": None}, 1)
    metrics.finish()
    (row,) = rows_of(tmp_path)
    assert [row[key] for key in "abcde"] == [None] * 5


def test_scalars_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", Said())
    metrics.log({"a": np.float32(0.5), "b": torch.tensor(0.25), "c": 2**53}, 1)
    metrics.finish()
    (row,) = rows_of(tmp_path)
    assert (row["a"], row["b"], row["c"]) == (0.5, 0.25, 2**53)


def test_rows_are_appended_to_those_of_an_earlier_run(tmp_path: Path) -> None:
    for step in (1, 2):
        metrics = MetricsFile(tmp_path / "metrics.jsonl", Said())
        metrics.log({}, step)
        metrics.finish()
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_rows_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", Said()
    path.symlink_to("/dev/full")
    metrics = MetricsFile(path, said)
    for step in (1, 2, 3):
        metrics.log({"train/loss": 1.0}, step)
    assert len(set(said)) == 1
    assert "No space left on device" in said[0]
    path.unlink()
    metrics.log({"train/loss": 1.0}, 4)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    metrics.finish()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_finish_writes_what_waits_or_says_how_much_is_lost(tmp_path: Path) -> None:
    for still_full in (False, True):
        folder, said = tmp_path / str(still_full), Said()
        folder.mkdir()
        path = folder / "metrics.jsonl"
        path.symlink_to("/dev/full")
        metrics = MetricsFile(path, said)
        metrics.log({}, 1)
        metrics.log({}, 2)
        if still_full:
            metrics.finish()
            assert "lacks its last 2 rows" in said[-1]
        else:
            path.unlink()
            metrics.finish()
            assert [row["step"] for row in rows_of(folder)] == [1, 2]


def test_a_row_that_fits_in_part_leaves_no_half_line(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", Said()
    metrics = MetricsFile(path, said)
    metrics.log({"train/loss": 1.0}, 1)
    with file_size_limit(path.stat().st_size + 10):
        metrics.log({"train/loss": 2.0}, 2)
        metrics.log({"train/loss": 3.0}, 3)
        assert [row["step"] for row in rows_of(tmp_path)] == [1]
        assert len(set(said)) == 1
    metrics.log({"train/loss": 4.0}, 4)
    assert [row["train/loss"] for row in rows_of(tmp_path)] == [1.0, 2.0, 3.0, 4.0]
    metrics.finish()


def test_rows_wait_until_the_folder_can_be_written(tmp_path: Path) -> None:
    folder, said = tmp_path / "later", Said()
    metrics = MetricsFile(folder / "metrics.jsonl", said)
    metrics.log({"train/loss": 1.0}, 1)
    assert len(said) == 1
    folder.mkdir()
    metrics.log({"train/loss": 2.0}, 2)
    metrics.finish()
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
