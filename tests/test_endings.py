"""How runs end: completed, interrupted, failed, out of memory; each a real command, with real processes."""

import multiprocessing
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from shardlab import interrupt
from shardlab.config import parse, to_dict
from shardlab.errors import Interrupted
from shardlab.interrupt import watch_signals
from tests.commands import QUICK, USERS_MODULE, Command, Ended, read_json, rows_of
from tests.tracking.conftest import wandb_summary

ENDLESS = (*QUICK, "tracking=wandb", "train.steps=1000000", "train.log_every=5")
USERS_DATA = ("--config-dir=conf", *QUICK, "data=mine", "model=mine")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with a module and choices for the config groups of their own."""
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    for group, target in [("model", "Net"), ("data", "Data")]:
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(f"_target_: mine.{target}\n")
    return tmp_path


def train(folder: Path, *arguments: str, ranks: int | None = None) -> Command:
    """Starts a run whose run folder is `folder / "run"`."""
    return Command(folder, *arguments, "hydra.run.dir=run", ranks=ranks)


def summary_of(folder: Path) -> dict:
    return read_json(folder / "run" / "summary.json")


def assert_interrupted(folder: Path, ended: Ended) -> None:
    summary = summary_of(folder)
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert summary["steps"] >= 10
    wandb = wandb_summary(folder / "run")
    assert (wandb["exit_code"], wandb["summary"]["status"]) == (1, "interrupted")
    assert ended.out.count("interrupted") == 1
    assert (ended.errors, ended.tracebacks) == ([], 0)


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_ranks_that_are_interrupted_end_in_order(folder: Path, how: str) -> None:
    command = train(folder, *ENDLESS, "data.num_workers=1", ranks=2)
    command.wait_until(lambda: len(rows_of(folder / "run")) > 2)
    if how == "ctrl-c":
        command.interrupt()
    else:
        command.process.send_signal(signal.SIGTERM)
    before = command.elapsed()
    ended = command.wait()
    assert ended.seconds - before < interrupt.GRACE_SECONDS
    assert ended.code != 0
    assert_interrupted(folder, ended)


def test_one_process_exits_as_shells_have_it(folder: Path) -> None:
    command = train(folder, *ENDLESS)
    command.wait_until(lambda: len(rows_of(folder / "run")) > 2)
    command.process.send_signal(signal.SIGTERM)
    command.process.send_signal(signal.SIGTERM)  # a second one changes nothing
    ended = command.wait()
    assert ended.code == 143
    assert_interrupted(folder, ended)


def test_an_interrupted_multirun_in_one_process_begins_no_further_job(folder: Path) -> None:
    jobs = ("-m", "hydra/launcher=basic", "seed=0,1", "hydra.sweep.dir=.", "hydra.sweep.subdir=run${hydra.job.num}")
    command = Command(folder, *ENDLESS, *jobs)
    command.wait_until(lambda: len(rows_of(folder / "run0")) > 2)
    command.interrupt()
    ended = command.wait()
    assert ended.code == 130
    assert read_json(folder / "run0" / "summary.json")["status"] == "interrupted"
    assert not (folder / "run1").exists()
    assert ended.err == ""


def test_an_exception_on_one_rank_ends_all(folder: Path) -> None:
    ended = train(folder, *USERS_DATA, "+data.does=raise", ranks=2).wait()
    assert ended.code == 1
    error = "rank 1: KeyError: 'no such sample'"
    summary = summary_of(folder)
    assert (summary["status"], summary["error"], summary["steps"]) == ("failed", error, 2)
    note = read_json(folder / "run" / "error.rank1.json")
    assert (note["rank"], note["status"], note["error"]) == (1, "failed", error)
    assert [file.name for file in (folder / "run").glob("error.*")] == ["error.rank1.json"]
    log = (folder / "run" / "train.log").read_text()
    assert log.count("Traceback") == 1
    assert "rank 1 failed:\nTraceback" in log
    assert "in misbehave" in log
    assert ended.out.count(error) == 1
    assert (ended.errors, ended.tracebacks) == ([], 0)


def test_no_memory_left_on_one_rank_is_told_with_what_was_in_use(folder: Path) -> None:
    arguments = ("tracking.display=none", "+data.does=allocate", "+data.on_rank=0")
    ended = train(folder, *USERS_DATA, *arguments, ranks=2).wait()
    assert ended.code == 1
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"]) == ("oom", 2)
    assert "can't allocate memory" in summary["error"]
    memory = summary["memory"]
    assert memory == read_json(folder / "run" / "error.rank0.json")["memory"]
    assert memory["parameters_bytes"] >= (10 * 20 + 20 + 20 * 5 + 5) * 4 / 2
    assert memory["optimizer_bytes"] >= 2 * memory["parameters_bytes"]
    assert [file.name for file in (folder / "run").glob("error.*")] == ["error.rank0.json"]
    assert (ended.out, len(ended.errors), ended.tracebacks) == ("", 1, 0)
    assert ended.errors[0].startswith("error: rank 0: RuntimeError: ")
    assert ended.errors[0].endswith(f"traceback in {folder / 'run' / 'train.log'}")


def test_no_memory_left_in_the_first_step_is_told_with_its_peak(folder: Path) -> None:
    assert train(folder, *USERS_DATA, f"+model.scratch_bytes={1 << 50}", ranks=2).wait().code == 1
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"]) == ("oom", 0)
    memory = summary["memory"]
    assert memory["phase"] == "forward"
    assert memory["breakdown"]["parameters"] > 0 and memory["breakdown"]["unsharded_parameters"] > 0
    assert sum(memory["breakdown"].values()) == memory["allocated_peak_bytes"]


def test_a_rank_that_is_killed_fails_the_run(folder: Path) -> None:
    ended = train(folder, *USERS_DATA, "+data.does=die", ranks=2).wait()
    assert ended.code == 1
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert summary["error"].startswith("rank 1 ended without a word")
    assert ended.out.count("rank 1 ended without a word") == 1
    assert (ended.errors, ended.tracebacks) == ([], 0)


def test_a_rank_that_is_stuck_does_not_keep_the_others(folder: Path) -> None:
    arguments = ("tracking=wandb", "train.log_every=1", "+data.does=sleep", "+data.at_step=12")
    command = train(folder, *USERS_DATA, *arguments, ranks=2)
    command.wait_until((folder / "asleep").exists)  # rank 0 now waits for rank 1, in a collective
    command.wait_until(lambda: len(rows_of(folder / "run")) == 11)
    before = command.elapsed()
    command.process.send_signal(signal.SIGTERM)
    ended = command.wait()
    assert 1 < ended.seconds - before < interrupt.GRACE_SECONDS  # it is 1 s in the user's module
    assert_interrupted(folder, ended)


def test_a_loss_that_is_not_finite_fails_the_run(folder: Path) -> None:
    ended = train(folder, *QUICK, "train.log_every=5", "optimizer.lr=1e30", ranks=2).wait()
    assert ended.code == 1
    assert "exitcode  : 1 " in ended.err
    assert "(SIGTERM)" not in ended.err  # the other rank has waited until all was written
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"]) == ("failed", 5)
    assert "not finite since step 2: try a lower optimizer.lr" in summary["error"]
    assert ended.out.count("not finite since step 2") == 1
    assert not list((folder / "run").glob("error.*"))
    assert (ended.errors, ended.tracebacks) == ([], 0)


METRICS = {
    "train/loss", "train/perplexity", "train/accuracy", "train/grad_norm", "train/lr",
    "perf/step_ms", "perf/tokens_per_s", "perf/tokens_per_s_per_rank", "perf/tflops_per_rank", "perf/data_ms",
    "memory/parameters_gib", "memory/gradients_gib", "memory/optimizer_gib", "memory/host_rss_gib",
    "memory/allocated_peak_gib", "memory/activations_gib",
    "comm/all_gather_gib", "comm/reduce_scatter_gib", "comm/all_reduce_gib",
    "progress/step", "progress/samples",
}  # fmt: skip
EVAL_METRICS = {"eval/loss", "eval/perplexity", "eval/accuracy", "progress/step", "progress/samples"}


@dataclass
class Completed:
    """A run that completed."""

    folder: Path
    ended: Ended
    ranks: int

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summary_of(self.folder)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.folder / "run")


@pytest.fixture(scope="module", params=[1, 2, 4])
def completed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Completed:
    folder, ranks = tmp_path_factory.mktemp("completed"), request.param
    arguments = (*QUICK, "train.steps=25", "train.log_every=10", "train.eval_every=20")
    ended = train(folder, *arguments, ranks=ranks if ranks > 1 else None).wait()
    return Completed(folder, ended, ranks)


def test_a_completed_run_exits_with_0(completed: Completed) -> None:
    assert (completed.ended.code, completed.ended.err) == (0, "")
    assert (completed.summary["status"], completed.summary["error"]) == ("completed", None)
    assert (completed.summary["steps"], completed.summary["world_size"]) == (25, completed.ranks)
    assert sorted(file.name for file in (completed.folder / "run").iterdir()) == [
        ".hydra", "config.yaml", "metrics.jsonl", "summary.json", "train.log",
    ]  # fmt: skip
    assert [path.name for path in completed.folder.iterdir() if path.is_dir()] == ["run"]


def test_rows_have_the_names_that_are_fixed(completed: Completed) -> None:
    names = [{re.sub("_(min|max)$", "", name) for name in row} - {"step", "time"} for row in completed.rows]
    assert set.union(*(row for row in names if "eval/loss" not in row)) == METRICS
    assert set.union(*(row for row in names if "eval/loss" in row)) == EVAL_METRICS


def test_progress_only_grows(completed: Completed) -> None:
    steps = [row["progress/step"] for row in completed.rows]
    assert steps == [1, 10, 20, 20, 25, 25]
    assert [row["step"] for row in completed.rows] == steps
    assert [row["progress/samples"] for row in completed.rows] == [step * 8 * completed.ranks for step in steps]
    times = [row["time"] for row in completed.rows]
    assert times == sorted(times)


def test_the_summary_agrees_with_the_rows(completed: Completed) -> None:
    losses = [row["train/loss"] for row in completed.rows if "train/loss" in row]
    assert completed.summary["loss"] == {"first": losses[0], "last": losses[-1]}
    assert losses[-1] < losses[0]
    evaluations = [row["eval/loss"] for row in completed.rows if "eval/loss" in row]
    assert completed.summary["eval"]["loss"] == evaluations[-1]
    last = [row for row in completed.rows if "train/loss" in row][-1]
    for name, count in completed.summary["comm"].items():
        assert last[f"comm/{name.removesuffix('_bytes')}_gib"] == count / 2**30
    for name in ("parameters", "gradients", "optimizer"):
        assert last[f"memory/{name}_gib"] == completed.summary["memory"][f"{name}_bytes"] / 2**30
    assert f"step 25/25  loss {losses[-1]:.4f}" in completed.ended.out
    assert f"{losses[0]:.4f} -> {losses[-1]:.4f}" in completed.ended.out


def test_the_config_of_a_run_composes_again(completed: Completed) -> None:
    with initialize_config_dir(str(completed.folder / "run"), version_base="1.3"):
        written = compose("config")
        again = parse(written, world_size=completed.ranks, nodes=1)
    assert to_dict(again) == OmegaConf.to_container(written)
    assert (again.train.steps, again.train.global_batch) == (25, 8 * completed.ranks)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With which codes the process would have been ended; the grace is short."""
    codes: list[int] = []
    monkeypatch.setattr(interrupt, "leave", codes.append)
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.05)
    return codes


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_becomes_a_flag(signum: int, code: int, exits: list[int]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with watch_signals(lambda: 7) as watch:
        watch.check()
        signal.raise_signal(signum)
        with pytest.raises(Interrupted, match=signal.Signals(signum).name):
            watch.check()
        assert watch.exit_code == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert exits == []


def test_what_stays_after_the_grace_is_ended(exits: list[int]) -> None:
    threads = []
    with watch_signals(lambda: threads.append(threading.current_thread()) or 7):
        signal.raise_signal(signal.SIGTERM)
        until = time.monotonic() + 10
        while not exits and time.monotonic() < until:
            time.sleep(0.01)
    assert (len(threads), exits) == (1, [7])
    assert threads[0] is not threading.current_thread()


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with watch_signals(lambda: 7) as watch:
            signal.raise_signal(signal.SIGHUP)
            watch.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_signals_end_nothing(exits: list[int]) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda signum, frame: seen.append(signum))  # a DataLoader sets such a one
    try:
        with watch_signals(lambda: 7) as watch:
            subprocess.run(["true"], check=True)
            time.sleep(0.3)
            watch.check()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (seen, exits) == ([signal.SIGCHLD], [])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_processes_keep_their_signals_to_themselves(exits: list[int]) -> None:
    context = multiprocessing.get_context("fork")
    with watch_signals(lambda: 7) as watch:
        running = context.Event()
        child = context.Process(target=lambda: (running.set(), time.sleep(60)), daemon=True)
        child.start()
        running.wait()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        time.sleep(0.3)
        watch.check()
    assert exits == []
