"""Forked workers: what they do, when they stop, and that none is left."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardlab.planner.workers import Lost, Workers
from tests.ranks import forking, one_process


def do(task: str) -> tuple[str, int]:
    """`sleep` takes long, `die` kills the process that does it."""
    if task == "sleep":
        time.sleep(30)
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return task.upper(), os.getpid()


def done_by(
    count: int, first: list[str], then: list[str], start_seconds: float = 20, wait_seconds: float = 20
) -> tuple[dict[str, tuple[str, int]], int, bool]:
    """Results by task, this process, and whether all workers have ended."""
    with Workers(do, count) as workers:
        processes = list(workers._processes.values())
        left = workers.start(first)
        now = time.monotonic()
        done = dict(workers.run([*left, *then], start_until=now + start_seconds, wait_until=now + wait_seconds))
    return done, os.getpid(), all(process.exitcode is not None for process in processes)


def all_done_by(count: int, tasks: list[str]) -> tuple[list[str], list[tuple[str, tuple[str, int] | Lost, float]]]:
    """The tasks as they were begun, and as they were done; where `stop` begins, all ends."""
    begun: list[str] = []
    with Workers(do, count) as workers:
        done = list(workers.run_all(tasks, begun=begun.append, stopped=lambda: "stop" in begun))
    return begun, done


def sleep_in_workers(told: Connection) -> None:
    """Tells which processes it has started, and waits for them."""
    with Workers(do, 2) as workers:
        workers.start(["sleep", "sleep"])
        told.send([process.pid for process in workers._processes.values()])
        time.sleep(30)


@pytest.fixture(scope="module")
def pool():
    """A process without threads, as the planner is."""
    with one_process() as pool:
        yield pool


@pytest.fixture(scope="module")
def alone(pool):
    """Calls `done_by` in that process."""
    return lambda *args: pool.submit(done_by, *args).result()


def test_tasks_are_done_in_other_processes(alone):
    done, parent, ended = alone(2, ["a", "b", "c"], ["d", "e"])
    assert {task: text for task, (text, _) in done.items()} == {task: task.upper() for task in "abcde"}
    started = {done[task][1] for task in "abc"}
    assert parent not in started
    assert len(started) == 2
    assert {process for _, process in done.values()} <= started | {parent}  # which does its share of the others
    assert ended


def test_a_task_that_takes_too_long_is_left_and_its_worker_ended(alone):
    began = time.monotonic()
    done, _, ended = alone(2, ["sleep"], ["a", "b"], 1.0, 1.5)
    assert set(done) == {"a", "b"}
    assert ended
    assert time.monotonic() - began < 10


def test_nothing_is_begun_after_the_time_for_it(alone):
    done, _, _ = alone(2, [], ["a", "b"], -1.0)
    assert done == {}


def test_a_worker_that_is_killed_loses_its_own_task_alone(alone):
    done, _, _ = alone(2, [], ["die", "a", "b", "c"])
    assert set(done) == {"a", "b", "c"}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_without_workers_all_is_done_in_this_process(alone, count):
    done, parent, _ = alone(count, ["a"], ["b"])
    assert {text for text, _ in done.values()} == {"A", "B"}
    assert (done["a"][1] == parent) == (count == 0)


def test_a_process_with_threads_is_not_forked():
    with one_process() as pool:  # has a thread in this process while it works
        pool.submit(os.getpid).result()
        done, parent, _ = done_by(2, ["a"], ["b"])
    assert {process for _, process in done.values()} == {parent}


# ---- all of them


def test_all_tasks_are_done_in_other_processes_alone(pool):
    begun, done = pool.submit(all_done_by, 2, list("abcde")).result()
    parent = pool.submit(os.getpid).result()
    assert begun == list("abcde")
    assert {task: result[0] for task, result, _ in done} == {task: task.upper() for task in "abcde"}
    assert parent not in {result[1] for _, result, _ in done}
    assert all(seconds > 0 for _, _, seconds in done)


def test_a_worker_that_is_killed_is_told_and_replaced(pool):
    _, done = pool.submit(all_done_by, 1, ["a", "die", "b", "c"]).result()
    results = {task: result for task, result, _ in done}
    assert list(results) == ["a", "die", "b", "c"]
    assert results["die"] == Lost(-signal.SIGKILL)
    assert results["b"][1] == results["c"][1] != results["a"][1]


@pytest.mark.parametrize("count", [0, 2])
def test_nothing_is_begun_or_waited_for_after_a_stop(pool, count):
    began = time.monotonic()
    begun, done = pool.submit(all_done_by, count, ["a", "stop", *(["sleep"] if count else []), "b"]).result()
    assert begun[:2] == ["a", "stop"] and "b" not in begun
    assert {task for task, _, _ in done} <= {"a", "stop"}
    assert time.monotonic() - began < 10


def test_workers_end_with_a_parent_that_is_killed():
    context = forking()
    told, telling = context.Pipe(duplex=False)
    parent = context.Process(target=sleep_in_workers, args=(telling,))
    parent.start()
    workers = told.recv()
    assert len(workers) == 2
    parent.kill()
    parent.join()
    patience = time.monotonic() + 10
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < patience, "workers are left over"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process exists, and has not ended without anyone to tell."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
