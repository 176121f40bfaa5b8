"""Writes the folder of a sweep as the launcher and its runs leave it: for tests of tables and reports."""

import json
import time
from pathlib import Path
from typing import Any

from shardlab.sweep.records import JobRecord, SweepRecord, write_job, write_sweep

MIB = 2**20

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
    four jobs that completed, one each that ran out of memory, was killed, failed, and was skipped."""
    jobs = [
        ("full_shard", "fp32", "none", _completed(peak_mib=50, tokens_per_s=4800.0, step_ms=850.0)),
        ("full_shard", "bf16", "none", _completed(peak_mib=40, tokens_per_s=5200.0, step_ms=780.0)),
        ("no_shard", "fp32", "none", _completed(peak_mib=80, tokens_per_s=5900.0, step_ms=690.0)),
        ("no_shard", "bf16", "none", _completed(peak_mib=70, tokens_per_s=5100.0, step_ms=800.0)),
        ("full_shard", "fp32", "reduce_last", _ended("oom", "rank 1: RuntimeError: can't allocate memory", oom=True)),
        ("full_shard", "bf16", "reduce_last", _ended("killed", "rank 1 was killed (SIGKILL)")),
        ("no_shard", "fp32", "reduce_last", _ended("failed", 'rank 0: KeyError: "<no> such & sample"')),
        ("no_shard", "bf16", "reduce_last", _ended("skipped", "train.global_batch=31 is no multiple of 32")),
    ]
    began = 1_790_000_000.0
    names = [str(number) for number in range(len(jobs))]
    for number, (sharding, precision, accumulation, summary) in enumerate(jobs):
        run = folder / names[number]
        run.mkdir(parents=True)
        overrides = [
            f"sharding={sharding}", f"precision={precision}", f"accumulation={accumulation}", "train.global_batch=32",
        ]  # fmt: skip
        skipped = summary["status"] == "skipped"
        write_job(
            run,
            JobRecord(
                number=number,
                overrides=overrides,
                digest=f"digest-{number}",
                world_size=2,
                command=["torchrun", "--nproc-per-node", "2", "train.py", *overrides],
                began=None if skipped else began + 20 * number,
                seconds=None if skipped else 19.5,
            ),
        )
        (run / "summary.json").write_text(json.dumps(summary))
        if summary["status"] == "completed":
            (run / "plan.json").write_text(json.dumps(_plan(summary)))
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows(number)))
        if not skipped:
            (run / "launch.log").write_text(f"step 1/50 loss 5.9\nerror: {summary['error']}\n")
    write_sweep(
        folder,
        SweepRecord(
            command="python train.py -m sharding=full_shard,no_shard precision=fp32,bf16 "
            "accumulation=none,reduce_last train.global_batch=32",
            began=began,
            machine="2 x CPU",
            torch="2.13.0+cpu",
            mode=mode,
            jobs=names,
            ended=began + 200.0,
        ),
    )
    return folder


def _completed(*, peak_mib: int, tokens_per_s: float, step_ms: float) -> dict[str, Any]:
    breakdown = {name: mib * MIB for name, mib in BREAKDOWN.items()}
    breakdown["activations"] += (peak_mib - 50) * MIB
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


def _ended(status: str, error: str, *, oom: bool = False) -> dict[str, Any]:
    summary = {"status": status, "error": error, "world_size": 2}
    if oom:
        memory = _completed(peak_mib=90, tokens_per_s=1.0, step_ms=1.0)["memory"]
        summary |= {"steps": 1, "memory": memory, "plan": {"allocated_peak_bytes": 120 * MIB}}
    return summary


def _plan(summary: dict[str, Any]) -> dict[str, Any]:
    breakdown = dict(summary["memory"]["breakdown"])
    breakdown["other"] += MIB
    peak = {
        "allocated_bytes": summary["plan"]["allocated_peak_bytes"],
        "reserved_bytes": None,
        "phase": "backward",
        "module": "layers.3.feed_forward",
        "breakdown": breakdown,
    }
    return {
        "world_size": 2,
        "peak": peak,
        "capacity_bytes": None,
        "fits": None,
        "headroom_bytes": None,
        "comm": summary["comm"],
        "wall_s": 1.5,
    }


def _rows(number: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "time": time.time(),
            "train/loss": 5.9 * 0.98**step + 0.1 * number,
            "progress/step": step,
            "progress/tokens": step * 8192,
        }
        for step in (1, 10, 20, 30, 40, 50)
    ]
