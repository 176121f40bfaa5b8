"""Step times, with a clock that the test moves."""

import pytest

from shardlab.telemetry import Throughput
from shardlab.telemetry import throughput as module
from shardlab.telemetry.throughput import WARMUP_STEPS


class Machine:
    """A host that issues work, and a device that does it later; `now` is what the host's clock shows."""

    def __init__(self):
        self.now = 100.0
        self.backlog = 0.0  # seconds of work that the device has not done

    def perf_counter(self):
        return self.now

    def issue(self, device_s: float, host_s: float = 0.0):
        self.now += host_s
        self.backlog += device_s

    def synchronize(self):
        self.now += self.backlog
        self.backlog = 0.0


@pytest.fixture
def machine(monkeypatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(module.time, "perf_counter", machine.perf_counter)
    return machine


def run(machine: Machine, step_seconds: list[float], *, log_after: set[int], pause_s: float = 50.0):
    """A loop as the trainer's: the figures after each log step, and the total."""
    throughput = Throughput(total_steps=len(step_seconds), synchronize=machine.synchronize)
    machine.now += 7.0  # between construction and the loop
    throughput.resume()
    rows = {}
    for step, seconds in enumerate(step_seconds, 1):
        machine.issue(seconds)
        throughput.step(data_seconds=seconds / 10)
        if step in log_after:
            throughput.pause()
            rows[step] = throughput.take()
            machine.now += pause_s  # logging, evaluation
            throughput.resume()
    return rows, throughput.total()


def test_warm_up_and_pauses_are_left_out(machine):
    rows, total = run(machine, [30.0, 25.0, 20.0, 2.0, 3.0, 4.0, 5.0, 6.0], log_after={1, 5, 8})
    assert rows[1] is None
    assert rows[5] == pytest.approx({"step_ms": 2500, "data_ms": 250, "steps_per_s": 0.4})  # steps 4 and 5
    assert rows[8] == pytest.approx({"step_ms": 5000, "data_ms": 500, "steps_per_s": 0.2})  # steps 6 to 8
    assert total == pytest.approx({"step_ms": 4000, "data_ms": 400, "steps_per_s": 0.25})


@pytest.mark.parametrize("log_after", [{1, 2, 3, 4, 5, 6}, {3, 6}, {1, 4, 6}, {6}])
def test_the_total_does_not_depend_on_where_intervals_end(machine, log_after):
    _, total = run(machine, [30.0, 25.0, 20.0, 2.0, 3.0, 4.0], log_after=log_after)
    assert total == pytest.approx({"step_ms": 3000, "data_ms": 300, "steps_per_s": 1 / 3})


@pytest.mark.parametrize(("step_seconds", "step_ms"), [
    ([8.0], 8000),  # nothing else to measure
    ([8.0, 3.0], 3000),
    ([8.0, 3.0, 2.0], 2000),
    ([8.0, 3.0, 2.0, 1.0], 1000),
])  # fmt: skip
def test_short_runs_measure_their_last_step(machine, step_seconds, step_ms):
    rows, total = run(machine, step_seconds, log_after={1, len(step_seconds)})
    assert rows[len(step_seconds)]["step_ms"] == pytest.approx(step_ms)
    assert total["step_ms"] == pytest.approx(step_ms)


def test_nothing_waits_for_the_device_between_intervals(machine):
    throughput = Throughput(total_steps=10, synchronize=machine.synchronize)
    throughput.resume()
    for step in range(1, 7):
        machine.issue(1.0)
        throughput.step(data_seconds=0.0)
        if step == WARMUP_STEPS:  # the clock starts with the device at rest
            assert machine.backlog == 0
    assert machine.backlog == 6.0 - WARMUP_STEPS
    throughput.pause()
    assert throughput.take()["step_ms"] == pytest.approx(1000)


def test_a_device_that_falls_behind_is_waited_for(machine):
    """The host issues a step in 1 ms, the device takes a second: the second counts."""
    throughput = Throughput(total_steps=4, synchronize=machine.synchronize)
    throughput.resume()
    for _ in range(4):
        machine.issue(1.0, host_s=0.001)
        throughput.step(data_seconds=0.0)
    throughput.pause()
    assert throughput.take()["step_ms"] == pytest.approx(1001)


def test_no_steps_no_figures(machine):
    throughput = Throughput(total_steps=5, synchronize=machine.synchronize)
    throughput.pause()
    assert throughput.take() is None
    assert throughput.total() is None
