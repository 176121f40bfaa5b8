"""What a rank keeps in memory, against sizes worked out by hand."""

import itertools
from threading import Timer
from typing import ClassVar

import pytest
import torch

from shardlab.device import Cpu
from shardlab.telemetry import Ledger, MemoryMeter, collectives, reduce_over_ranks
from shardlab.telemetry.events import Phase
from shardlab.telemetry.memory import storage_nbytes
from tests.training import CPU, batches_of, built_from, config_of, recorded_run

RUN = (
    "model=mlp",
    "model.input_size=7",
    "model.hidden_size=5",
    "model.output_size=3",
    "data=random_classes",
    "data.features=7",
    "data.classes=3",
    "optimizer=adamw",
)
# fc1.weight, fc1.bias, fc2.weight, fc2.bias: none divides by two ranks.
SHAPES = [(5, 7), (5,), (3, 5), (3,)]
PARAMETERS = 5 * 7 + 5 + 3 * 5 + 3
# torch.chunk's halves of dim 0: 3 and 2 rows, 2 and 1 rows. FSDP2 pads the second rank's to the first's, at its first
# forward.
ON_RANK = [3 * 7 + 3 + 2 * 5 + 2, 2 * 7 + 2 + 1 * 5 + 1]
PADDED = ON_RANK[0]
STEP_COUNTERS = 4 * len(SHAPES)  # fused Adam counts steps in one float32 for each parameter


def test_a_shared_storage_counts_once_and_as_a_whole():
    storage = torch.zeros(100)
    assert storage_nbytes([storage[:10], storage[50:60], storage.view(10, 10)]) == 400
    assert storage_nbytes([storage[:10], torch.zeros(3, dtype=torch.bfloat16)]) == 406
    assert storage_nbytes([]) == 0


def states_over_two_steps(*overrides: str) -> list[dict[str, int]]:
    """Readings before the first step, after it, and after the second."""
    config = config_of(*RUN, "train.steps=2", *overrides)
    built = built_from(config)
    meter = MemoryMeter(built.model, built.optimizers, Cpu(CPU), Ledger(CPU))
    readings = [dict(vars(meter.states()))]
    for micro_batches in batches_of(config):
        built.step(micro_batches)
        readings.append(dict(vars(meter.states())))
    return readings


@pytest.mark.parametrize(("overrides", "parameters", "gradients", "state"), [
    # A padded half of all parameters and gradients; two fp32 values for each of this rank's own rows.
    (["sharding=full_shard"], [4 * PADDED] * 2, [4 * PADDED] * 2, [8 * ON_RANK[0], 8 * ON_RANK[1]]),
    (["sharding=shard_grad_op"], [4 * PADDED] * 2, [4 * PADDED] * 2, [8 * ON_RANK[0], 8 * ON_RANK[1]]),
    (["precision=bf16"], [4 * PADDED] * 2, [4 * PADDED] * 2, [8 * ON_RANK[0], 8 * ON_RANK[1]]),
    (["precision=bf16_pure"], [2 * PADDED] * 2, [2 * PADDED] * 2, [4 * ON_RANK[0], 4 * ON_RANK[1]]),
    (["sharding=no_shard"], [4 * PARAMETERS] * 2, [4 * PARAMETERS] * 2, [8 * PARAMETERS] * 2),
    (["sharding=shard_optimizer"], [4 * PARAMETERS] * 2, [4 * PARAMETERS] * 2, [8 * ON_RANK[0], 8 * ON_RANK[1]]),
])  # fmt: skip
def test_states_of_a_run(on_ranks, overrides, parameters, gradients, state):
    for rank, (before, first, second) in enumerate(on_ranks(2)(states_over_two_steps, *overrides)):
        assert before["parameters"] in (parameters[rank], parameters[rank] * ON_RANK[rank] // PADDED)
        assert (before["gradients"], before["optimizer"]) == (0, 0)
        assert first == second
        assert first == {
            "parameters": parameters[rank],
            "gradients": gradients[rank],
            "optimizer": state[rank] + STEP_COUNTERS,
        }


def test_sgd_with_momentum_keeps_one_value_per_parameter(on_ranks):
    for rank, readings in enumerate(on_ranks(2)(states_over_two_steps, "optimizer=sgd")):
        assert readings[-1]["optimizer"] == 4 * ON_RANK[rank]


class FakeGpu(Cpu):
    """An allocator whose peaks the test sets."""

    peaks: ClassVar[dict[str, int]] = {}

    def memory_bytes(self):
        return dict(self.peaks)

    def reset_peak_memory(self):
        self.peaks.update(allocated_peak=5, reserved_peak=50)


def meter_on(device: Cpu) -> MemoryMeter:
    model = torch.nn.Linear(2, 2)
    return MemoryMeter(model, [torch.optim.SGD(model.parameters())], device, Ledger(CPU))


def test_the_runs_peak_outlives_the_intervals():
    device = FakeGpu(CPU)
    meter = meter_on(device)
    device.peaks.update(allocated_peak=70, reserved_peak=80)
    assert meter.read()["allocated_peak"] == 70
    meter.reset_peak()
    assert meter.read()["allocated_peak"] == 5
    device.peaks.update(reserved_peak=90)
    summary = meter.summary()
    assert (summary["run_allocated_peak_bytes"], summary["run_reserved_peak_bytes"]) == (70, 90)


def test_the_windows_peak_is_that_of_its_steps_and_of_build():
    device = FakeGpu(CPU)
    device.peaks.update(allocated_peak=10, reserved_peak=40)  # by build
    meter = meter_on(device)
    device.peaks.update(allocated_peak=1000, reserved_peak=1000)  # outside: before the first step, such as W&B's start
    for number, allocated in enumerate([20, 60, 30, 500], 1):
        with meter.step(number, []):
            device.peaks.update(allocated_peak=allocated, reserved_peak=allocated + 30)
        device.peaks.update(allocated_peak=700, reserved_peak=700)  # evaluation
    summary = meter.summary()
    assert (summary["allocated_peak_bytes"], summary["reserved_peak_bytes"]) == (60, 90)
    assert (summary["run_allocated_peak_bytes"], summary["run_reserved_peak_bytes"]) == (1000, 1000)


def test_a_step_that_fails_counts_as_far_as_it_came():
    device = FakeGpu(CPU)
    device.peaks.update(allocated_peak=10, reserved_peak=40)
    meter = meter_on(device)
    with pytest.raises(MemoryError), meter.step(1, []):
        device.peaks.update(allocated_peak=60, reserved_peak=90)
        _ = torch.zeros(100)
        raise MemoryError
    summary = meter.summary()
    assert (summary["allocated_peak_bytes"], summary["reserved_peak_bytes"]) == (60, 90)
    assert summary["breakdown"] is not None and sum(summary["breakdown"].values()) == 400
    assert summary["phase"] == "forward"


def test_a_cpu_has_no_allocator_peaks_and_no_peak_before_a_step():
    summary = meter_on(Cpu(CPU)).summary()
    peaks = [summary[f"{prefix}{name}_peak_bytes"] for prefix in ("", "run_") for name in ("allocated", "reserved")]
    assert peaks == [None] * 4


def test_rows_hold_gib_and_say_where_ranks_differ():
    gib = 2**30
    row = reduce_over_ranks(
        [
            {"parameters": gib, "host_rss": 3 * gib, "alloc_retries": 2, "ooms": 0},
            {"parameters": gib, "host_rss": gib // 2, "alloc_retries": 0, "ooms": 0},
        ]
    )
    assert row == {
        "memory/parameters_gib": 1.0,
        "memory/host_rss_gib": 3.0,
        "memory/host_rss_gib_min": 0.5,
        "memory/host_rss_gib_max": 3.0,
        "memory/alloc_retries": 2,
        "memory/alloc_retries_min": 0,
        "memory/alloc_retries_max": 2,
        "memory/ooms": 0,
    }


def phases_and_modules(*overrides: str) -> tuple[list[str], set[str], list[str]]:
    """Of the last step of a run: its phases in order, the modules of its backward, and who runs when it is over."""
    ledger = recorded_run(*overrides)
    events = ledger.events[ledger.step_starts[-1] :]
    phases = [phase.value for phase, _ in itertools.groupby(event.phase for event in events)]
    modules = {event.module for event in events if event.phase is Phase.backward}
    return phases, modules, list(ledger._modules)


def test_recomputed_forwards_belong_to_backward_and_norm_and_clipping_to_the_update(on_ranks):
    run = ("model=llama_tiny", "model.layers=2", "data=random_tokens", "data.seq_len=16", "train.micro_batch=1",
           "train.steps=2", "accumulation=reduce_every", "accumulation.steps=2", "activation=full")  # fmt: skip
    ((phases, modules, running),) = on_ranks(1)(phases_and_modules, *run)
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]
    assert {"layers.0.attention.wq", "layers.1.feed_forward.w2", "output"} <= modules
    assert running == [""]  # though recomputation is left early, by an exception


def test_what_a_collectives_backend_lets_go_of_late_dies_before_the_next_birth(monkeypatch):
    monkeypatch.setattr(collectives, "PATIENCE_S", 30)
    held = []

    def keep_for_a_moment(tensor, async_op):
        held.extend([tensor, tensor[:50]])  # as gloo's worker thread has the tensor, and views of it
        Timer(0.02, held.clear).start()

    with torch.library._scoped_library("c10d", "FRAGMENT") as library:
        library.define("keep_for_a_moment(Tensor tensor, bool async_op=True) -> ()")
        library.impl("keep_for_a_moment", keep_for_a_moment, "CPU")
        with Ledger(CPU) as account:
            sent = torch.zeros(100)
            torch.ops.c10d.keep_for_a_moment(sent, False)
            del sent
            kept = torch.zeros(10)
    assert [event.after for event in account.events] == [400, 0, 4 * kept.numel()]
