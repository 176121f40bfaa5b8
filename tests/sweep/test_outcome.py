"""What a launcher makes of the way in which a job's processes ended."""

import signal
from pathlib import Path

import pytest

from shardlab.sweep.outcome import settle
from shardlab.sweep.runner import Ended

KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "exit_codes", "words"),
    [(KILLED, {}, "torchrun was killed (SIGKILL)"), (1, {1: KILLED}, "rank 1 was killed (SIGKILL)")],
)
def test_what_is_killed_after_ctrl_c_was_interrupted(
    tmp_path: Path, code: int, exit_codes: dict[int, int], words: str
) -> None:
    ended = Ended(code, 1.0, exit_codes)
    asked = settle(tmp_path, ended, timeout_s=None, interrupted=True)
    assert (asked["status"], asked["error"]) == ("interrupted", None)
    (tmp_path / "summary.json").unlink()
    unasked = settle(tmp_path, ended, timeout_s=None, interrupted=False)
    assert unasked["status"] == "killed" and unasked["error"].startswith(words)
