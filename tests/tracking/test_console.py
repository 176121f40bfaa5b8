import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.tracking import Tracker
from shardlab.tracking.config import Display
from tests.tracking.conftest import HEADER, rows_of

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
ROW = {"train/loss": 2.3456, "perf/tokens_per_s": 12_345.0, "progress/tokens": 10, "memory/allocated_peak_gib": 0.05}

# A training that says what it does; what follows START depends on the test.
PROGRAM = """if True:
    import os, pathlib, signal, sys, time
    from shardlab.tracking import RunHeader, make_tracker
    from shardlab.tracking.config import TrackingConfig, WandbConfig, WandbMode
    cfg = TrackingConfig(wandb=WandbConfig(mode=WandbMode.disabled))
    tracker = make_tracker(cfg, pathlib.Path("."), config={}, tags=[], rank=0)
    tracker.start(RunHeader(rows=[("model", "tiny " * 30)], total_steps=1000, notices=["one node"]))
    for step in range(1, 4):
        tracker.log({"train/loss": 1.0, "perf/tokens_per_s": 1e5, "progress/tokens": 1}, step)
        tracker.advance(step)
        time.sleep(0.01)
    print("from elsewhere", flush=True)
"""
FINISH = """
    tracker.finish({"status": "completed"}, table=[("status", "completed"), ("loss", "2.0 -> 1.0")])
"""


def run_on_terminal(
    program: str, cwd: Path, *, columns: int = 80, env: dict[str, str] | None = None
) -> tuple[str, int]:
    """Runs a program on a terminal of its own; returns all that was written there, and the exit code."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    others = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    env = {**others, "TERM": "xterm-256color", **(env or {})}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=cwd, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(ours, 4096):
                written.extend(chunk)
        except OSError:  # Linux ends a terminal that nobody holds with EIO
            pass

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(timeout=30)
    reader.join()
    os.close(ours)
    return written.decode(), code


def without_controls(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_gets_header_bar_and_closing_table(tmp_path: Path) -> None:
    raw, code = run_on_terminal(PROGRAM + FINISH, tmp_path)
    text = without_controls(raw)
    assert code == 0
    assert text.index("model") < text.index("note: one node") < text.index("from elsewhere") < text.index("completed")
    assert re.search(r"step +3/1000 .+ loss 1\.0000  100 k tokens/s", text)
    assert "loss    2.0 -> 1.0" in text
    assert raw.rfind(SHOW_CURSOR) > raw.rfind(HIDE_CURSOR)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    raw, _ = run_on_terminal(PROGRAM + FINISH, tmp_path, columns=columns)
    assert max(len(line) for line in re.split(r"[\r\n]+", without_controls(raw))) <= columns


def test_no_color_is_respected(tmp_path: Path) -> None:
    colored, _ = run_on_terminal(PROGRAM + FINISH, tmp_path)
    plain, _ = run_on_terminal(PROGRAM + FINISH, tmp_path, env={"NO_COLOR": "1"})
    color = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
    assert color.search(colored)
    assert not color.search(plain)


@pytest.mark.parametrize(
    "death",
    [
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        "    os.kill(os.getpid(), signal.SIGTERM)\n",
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\n",
        "    raise RuntimeError('boom')\n",
        "    os._exit(3)\n",
    ],
)
def test_the_cursor_is_visible_however_a_run_dies(tmp_path: Path, death: str) -> None:
    raw, code = run_on_terminal(PROGRAM + death, tmp_path)
    assert code != 0
    assert "step " in raw
    assert raw.rfind(SHOW_CURSOR) > raw.rfind(HIDE_CURSOR)


def test_a_dumb_terminal_gets_lines(tmp_path: Path) -> None:
    raw, _ = run_on_terminal(PROGRAM + FINISH, tmp_path, env={"TERM": "dumb"})
    assert "\x1b" not in raw
    assert "step    3/1000  loss 1.0000" in raw


def test_a_file_gets_a_line_per_row_and_no_control_characters(
    track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = track()
    tracker.start(HEADER)
    for step in (1, 2, 3):
        tracker.advance(step)
        tracker.log(ROW | {"memory/allocated_peak_gib_max": 1.5}, step)
    tracker.log({"eval/loss": 3.25, "eval/perplexity": 25.79, "progress/tokens": 30}, 3)
    tracker.finish({"status": "completed", "error": None}, table=[("status", "completed"), ("steps", "3")])
    out = capsys.readouterr().out
    assert not re.search(r"[^\n -~]", out)
    lines = out.splitlines()
    assert "  sharding  full_shard, mesh 2" in lines
    assert "step 1/3  loss 2.3456  12.3 k tokens/s  peak 1.50 GiB" in lines
    assert any(re.fullmatch(r"step 2/3  .*peak 1.50 GiB  1.0 s left", line) for line in lines)
    assert "step 3/3  held-out: loss 3.2500  perplexity 25.79" in lines
    assert lines.index("  status  completed") < lines.index("  steps   3")
    assert f"  files  {tracker.run_dir}" in lines


def test_rows_without_tokens_count_samples(track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]) -> None:
    tracker = track()
    tracker.start(HEADER)
    tracker.log({"train/loss": 1.0, "perf/tokens_per_s": 950.0, "progress/samples": 32}, 1)
    tracker.finish({"status": "completed"}, table=[])
    assert "950 samples/s" in capsys.readouterr().out


def test_a_failure_shows_its_error_below_the_status(
    track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = track()
    tracker.start(HEADER)
    tracker.finish({"status": "oom", "error": "rank 1: out of memory"}, table=[("status", "oom"), ("steps", "2")])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  status  oom")
    assert lines[at + 1 : at + 3] == ["  error   rank 1: out of memory", "  steps   2"]


def test_display_none_prints_nothing(track: Callable[..., Tracker], capsys: pytest.CaptureFixture[str]) -> None:
    tracker = track(display=Display.none)
    tracker.start(HEADER)
    tracker.log(ROW, 1)
    tracker.notice("hybrid_shard on one node is full_shard")
    tracker.finish({"status": "completed"}, table=[])
    assert capsys.readouterr().out == ""
    assert len(rows_of(tracker.run_dir)) == 1


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + FINISH], cwd=tmp_path, stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(rows_of(tmp_path)) == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_screen_on_a_full_disk_does_not_end_the_run(
    track: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(sys, "stdout", os.fdopen(full, "w", closefd=False))
    tracker = track()
    tracker.start(HEADER)
    for step in (1, 2, 3):
        tracker.log(ROW, step)
    tracker.finish({"status": "completed"}, table=[])
    monkeypatch.undo()
    assert len(rows_of(tracker.run_dir)) == 3
    assert [record.message for record in caplog.records if "No space left" in record.message] == [
        "the display fails (OSError: [Errno 28] No space left on device); the run goes on without"
    ]
    os.close(full)
