"""bench/plan_vs_gpu.py, as far as it goes without a GPU: the same processes, on a CPU."""

import math
import sys
from typing import Any

from shardlab.config import DeviceChoice
from shardlab.step import Step
from tests.ranks import one_process
from tests.training import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # as `python bench/plan_vs_gpu.py` has it

import plan_vs_gpu
from plan_vs_gpu import CPU_CASES, GPU_CASES, Case, in_own_process, line, measure, run

FP16 = next(case for case in CPU_CASES if "fp16" in case.name)


def test_on_a_cpu_a_plan_equals_the_ledger_of_rank_0_to_the_byte(capsys):
    (row,) = run([FP16], DeviceChoice.cpu)
    assert row["world_size"] == 64
    assert row["planned"]["allocated_bytes"] == row["measured"]["ledger_bytes"]
    assert row["planned"]["breakdown"] == row["measured"]["breakdown"]
    assert "+0.00" in capsys.readouterr().out


def measured_with(init_scale: str) -> tuple[dict[str, int], list[bool]]:
    """What the peak consists of, and for each step whether the gradient was finite."""
    finite, step = [], Step.__call__

    def noted(*args: Any) -> Any:
        output = step(*args)
        finite.append(math.isfinite(output.grad_norm.item()))
        return output

    Step.__call__ = noted  # type: ignore[method-assign]
    config = Case(f"{FP16.overrides} precision.init_scale={init_scale}", FP16.nodes).compose()
    breakdown = measure(config, FP16.world_size, DeviceChoice.cpu)["breakdown"]
    Step.__call__ = step  # type: ignore[method-assign]
    return breakdown, finite


def test_updates_that_fp16_skips_take_the_memory_of_others():
    with one_process() as pool:
        made, skipped = pool.map(measured_with, ["1.0", "1e38"])
    assert (made[1], skipped[1]) == ([True] * 3, [False] * 3)
    assert made[0] == skipped[0]
    assert made[0]["optimizer"] > 0


def test_what_fails_or_hangs_costs_a_line(monkeypatch):
    broken = Case(CPU_CASES[0].overrides + " model.dim=7").compose()
    failed = in_own_process(measure, broken, 8, DeviceChoice.cpu, environment={})
    monkeypatch.setattr(plan_vs_gpu, "LIMIT_SECONDS", 0.1)
    late = in_own_process(measure, broken, 8, DeviceChoice.cpu, environment={})
    assert "ConfigError: model.dim=7 must be a multiple" in failed["error"]
    assert late == {"error": "not finished within 0.1 s"}
    text = line({"case": "a case", "planned": late, "measured": failed})
    assert "plan: not finished" in text
    assert "run: " in text


def test_the_plans_error_is_in_percent_of_the_allocators_peaks():
    planned = {"allocated_bytes": 3 << 30, "reserved_bytes": 5 << 30}
    measured = {"allocated_bytes": 4 << 30, "reserved_bytes": 4 << 30, "ledger_bytes": 2 << 30}
    assert line({"case": "a case", "planned": planned, "measured": measured}).split() == (
        ["3.000", "4.000", "-25.00", "5.000", "4.000", "+25.00", "2.000", "a", "case"]
    )


def test_the_cases_for_a_gpu_can_be_composed():
    names = [case.name for case in GPU_CASES]
    assert len(set(names)) == len(names)
    for case in GPU_CASES:
        assert case.compose().train.global_batch % case.world_size == 0
