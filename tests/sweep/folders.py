"""Writes the folder of a sweep as the launcher and its runs leave it: for tests of tables and reports."""

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlab.sweep.records import JobRecord, SweepRecord, write_job, write_sweep

MIB, GIB = 2**20, 2**30
BEGAN = 1_790_000_000.0
CAPACITY_BYTES = 79 * GIB

BREAKDOWN = {
    "parameters": 3,
    "gradients": 2,
    "optimizer": 6,
    "unsharded_parameters": 2,
    "unsharded_gradients": 1,
    "activations": 33,
    "communication": 2,
    "inputs": 0,
    "other": 1,
}  # MiB; 50 in all


def write_finished_sweep(folder: Path, *, mode: str = "train") -> Path:
    """A sweep of two strategies, two precisions and an accumulation that does not go together with one of them:
    four jobs that completed, one each that ran out of memory, was killed, failed, and was skipped.

    With `mode="plan"` one of the four does not fit."""
    jobs = [
        ("full_shard", "fp32", "none", completed(peak_mib=50, tokens_per_s=4800.0, step_ms=850.0)),
        ("full_shard", "bf16", "none", completed(peak_mib=40, tokens_per_s=5200.0, step_ms=780.0)),
        ("no_shard", "fp32", "none", completed(peak_mib=80, tokens_per_s=5900.0, step_ms=690.0)),
        ("no_shard", "bf16", "none", completed(peak_mib=70, tokens_per_s=5100.0, step_ms=800.0)),
        ("full_shard", "fp32", "reduce_last", ended("oom", "rank 1: RuntimeError: can't allocate memory", oom=True)),
        ("full_shard", "bf16", "reduce_last", ended("killed", "rank 1 was killed (SIGKILL)")),
        ("no_shard", "fp32", "reduce_last", ended("failed", 'rank 0: KeyError: "<no> such & sample"')),
        ("no_shard", "bf16", "reduce_last", ended("skipped", "train.global_batch=31 is no multiple of 32")),
    ]
    return write_jobs(
        folder,
        [
            (f"sharding={sharding} precision={precision} accumulation={accumulation} train.global_batch=32", summary)
            for sharding, precision, accumulation, summary in jobs
        ],
        mode=mode,
        capacity_bytes=75 * MIB if mode == "plan" else None,
        command="python train.py -m sharding=full_shard,no_shard precision=fp32,bf16 "
        "accumulation=none,reduce_last train.global_batch=32",
    )


def write_large_sweep(folder: Path, *, mode: str = "train", micro_batches: int = 4) -> Path:
    """A sweep of strategies, precisions and micro-batches on GPUs, 15 jobs a micro-batch; the largest do not fit."""
    strategies = {"full_shard": 1.0, "shard_grad_op": 1.3, "hybrid_shard": 1.6, "no_shard": 3.2, "shard_optimizer": 2.4}
    precisions = {"fp32": (2.0, 0.5), "bf16": (1.0, 1.0), "bf16_autocast": (1.4, 0.85)}
    sizes = [2**i for i in range(micro_batches)]
    draw = random.Random(0)
    jobs = []
    for sharding, precision, micro_batch in itertools.product(strategies, precisions, sizes):
        weight, speed = precisions[precision]
        peak_mib = int(1024 * (8 * strategies[sharding] + 6 * micro_batch) * weight * draw.uniform(0.97, 1.03))
        tokens_per_s = 9000 * speed * micro_batch**0.3 * strategies[sharding] ** 0.15 * draw.uniform(0.95, 1.05)
        summary = completed(peak_mib=peak_mib, tokens_per_s=tokens_per_s, step_ms=1e6 * micro_batch / tokens_per_s)
        summary["memory"]["reserved_peak_bytes"] = int(summary["memory"]["allocated_peak_bytes"] * 1.04)
        summary["plan"]["reserved_peak_bytes"] = int(summary["plan"]["allocated_peak_bytes"] * 1.03)
        if mode == "train" and summary["memory"]["reserved_peak_bytes"] > CAPACITY_BYTES:
            error = "rank 3: OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB."
            summary = ended("oom", error, oom=True)
        overrides = f"sharding={sharding} precision={precision} train.micro_batch={micro_batch} model=llama3_8b"
        jobs.append((overrides, summary))
    return write_jobs(
        folder,
        jobs,
        mode=mode,
        capacity_bytes=CAPACITY_BYTES,
        metrics_rows=1000,
        machine="8 x NVIDIA H100 80GB HBM3",
        command=f"python train.py -m model=llama3_8b sharding={','.join(strategies)} "
        f"precision={','.join(precisions)} train.micro_batch={','.join(map(str, sizes))}",
    )


def write_jobs(
    folder: Path,
    jobs: Sequence[tuple[str, dict[str, Any]]],
    *,
    mode: str = "train",
    capacity_bytes: int | None = None,
    metrics_rows: int = 6,
    machine: str = "2 x CPU",
    command: str = "python train.py -m",
) -> Path:
    """A sweep of jobs.

    Args:
        folder: to write to.
        jobs: overrides with spaces between, and the summary of a run; of a plan it keeps what a plan has.
        mode: train or plan.
        capacity_bytes: that the plans know of.
        metrics_rows: of each run that completed.
        machine: that the sweep ran on.
        command: that began it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, (overrides, summary) in enumerate(jobs):
        _write_job(folder / str(number), number, overrides.split(), summary, mode, capacity_bytes, metrics_rows)
    write_sweep(
        folder,
        SweepRecord(
            command=command + (" mode=plan" if mode == "plan" else ""),
            began=BEGAN,
            machine=machine,
            torch="2.13.0+cpu",
            mode=mode,
            jobs=[str(number) for number in range(len(jobs))],
            ended=BEGAN + 200.0,
        ),
    )
    return folder


def _write_job(
    run: Path,
    number: int,
    overrides: list[str],
    summary: dict[str, Any],
    mode: str,
    capacity_bytes: int | None,
    metrics_rows: int,
) -> None:
    run.mkdir(parents=True)
    skipped = summary["status"] == "skipped"
    program = (
        ["python", "train.py", "mode=plan"] if mode == "plan" else ["torchrun", "--nproc-per-node", "2", "train.py"]
    )
    write_job(
        run,
        JobRecord(
            number=number,
            overrides=overrides,
            digest=f"digest-{number}",
            world_size=2,
            command=[*program, *overrides],
            began=None if skipped else BEGAN + 20 * number,
            seconds=None if skipped else 19.5,
        ),
    )
    if summary["status"] == "completed":
        plan = _plan(summary, capacity_bytes)
        (run / "plan.json").write_text(json.dumps(plan))
        if mode == "plan":
            summary = {key: summary[key] for key in ("status", "error", "world_size", "plan")}
            summary["plan"] = {**summary["plan"], "error_pct": None, "fits": plan["fits"]}
        else:
            rows = _rows(number, metrics_rows)
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").write_text(json.dumps(summary))
    if not skipped:
        (run / "launch.log").write_text(f"step 1/50 loss 5.9\nerror: {summary['error']}\n")


def write_fits(folder: Path, values: Sequence[int | None]) -> Path:
    """A sweep of plans that have searched the largest micro-batch; None is one where not even the smallest fits."""
    run = completed(peak_mib=70, tokens_per_s=1.0, step_ms=1.0)
    jobs = [(f"model.layers={number} plan.fit=micro_batch", run) for number in range(len(values))]
    write_jobs(folder, jobs, mode="plan", capacity_bytes=75 * MIB)
    for number, value in enumerate(values):
        file = folder / str(number) / "plan.json"
        plan = json.loads(file.read_text()) | {"fits": value is not None, "headroom_bytes": None}
        file.write_text(json.dumps(plan | {"fit": {"key": "train.micro_batch", "value": value, "tried": {}}}))
        summary = json.loads((folder / str(number) / "summary.json").read_text())
        summary["plan"]["fits"] = plan["fits"]
        (folder / str(number) / "summary.json").write_text(json.dumps(summary))
    return folder


def completed(*, peak_mib: int, tokens_per_s: float, step_ms: float) -> dict[str, Any]:
    scale = max(1, peak_mib // 100)
    breakdown = {name: scale * mib * MIB for name, mib in BREAKDOWN.items()}
    breakdown["activations"] += (peak_mib - 50 * scale) * MIB
    return {
        "status": "completed",
        "error": None,
        "world_size": 2,
        "steps": 50,
        "loss": {"first": 5.9, "last": 2.5},
        "eval": {"loss": 2.6},
        "perf": {"step_ms": step_ms, "tokens_per_s": tokens_per_s, "unit": "tokens", "flops_per_token": 1e7},
        "comm": {"all_gather_bytes": 12 * MIB, "reduce_scatter_bytes": 6 * MIB, "all_reduce_bytes": 164},
        "memory": {
            "allocated_peak_bytes": peak_mib * MIB,
            "reserved_peak_bytes": None,
            "breakdown": breakdown,
            "phase": "backward",
            "module": "layers.3.feed_forward",
            "host_rss_peak_bytes": 480 * MIB,
        },
        "plan": {
            "allocated_peak_bytes": (peak_mib + 1) * MIB,
            "reserved_peak_bytes": None,
            "error_pct": 100 / peak_mib,
        },
    }


def ended(status: str, error: str, *, oom: bool = False) -> dict[str, Any]:
    summary = {"status": status, "error": error, "world_size": 2}
    if oom:
        memory = completed(peak_mib=90, tokens_per_s=1.0, step_ms=1.0)["memory"]
        summary |= {"steps": 1, "memory": memory, "plan": {"allocated_peak_bytes": 120 * MIB}}
    return summary


def _plan(summary: dict[str, Any], capacity_bytes: int | None) -> dict[str, Any]:
    breakdown = dict(summary["memory"]["breakdown"])
    breakdown["other"] += MIB
    peak = {
        "allocated_bytes": summary["plan"]["allocated_peak_bytes"],
        "reserved_bytes": summary["plan"]["reserved_peak_bytes"],
        "phase": "backward",
        "module": "layers.3.feed_forward",
        "breakdown": breakdown,
    }
    headroom = capacity_bytes and capacity_bytes - (peak["reserved_bytes"] or peak["allocated_bytes"])
    return {
        "world_size": 2,
        "peak": peak,
        "capacity_bytes": capacity_bytes,
        "fits": None if headroom is None else headroom >= 0,
        "headroom_bytes": headroom,
        "comm": summary["comm"],
        "wall_s": 1.5,
    }


def _rows(number: int, count: int) -> list[dict[str, Any]]:
    """Rows of a run of 50 steps, or of one of as many as there are rows."""
    last = max(count, 50)
    return [
        {
            "step": step,
            "time": time.time(),
            "train/loss": 5.9 * 0.98 ** (50 * step / last) + 0.1 * number,
            "progress/step": step,
            "progress/tokens": step * 8192,
        }
        for step in sorted({1, *(last * i // (count - 1) for i in range(1, count))})
    ]
