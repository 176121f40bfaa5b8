"""Times whole `mode=plan` commands, from the shell's point of view: imports, plan, changes, timeline.

    python bench/plan_speed.py             # three runs of each, about 5 minutes on 2 cores
    python bench/plan_speed.py --runs 1

Prints seconds (median and range) and the most host memory of each, with its target, and writes
bench/results/plan_speed.json; exits with 1 where a target is missed. The machine should do nothing else.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record

ROOT = Path(__file__).parent.parent
TARGET_GIB = 4
LLAMA3 = "data=random_tokens data.seq_len=8192 data.vocab_size=128256 train.micro_batch=1 precision=bf16"
# 5 x 5 x 2 x 2 = 100 plans; half of them accumulate four micro-batches a step.
SWEEP = (
    "-m cluster=h100_80gb sharding=full_shard,shard_grad_op,no_shard,hybrid_shard,shard_optimizer "
    "precision=fp32,bf16,bf16_autocast,bf16_pure,fp16 accumulation=none,reduce_last activation=none,full"
)
# Command and target in seconds.
CASES = {
    "llama_tiny on 8 GPUs": ("cluster=h100_80gb", 6),
    "Llama-3 8B on 8 GPUs": ("experiment=published/torchtitan_llama3_8b_8xh100", 12),
    "Llama-3 70B on 256 GPUs": (f"model=llama3_70b cluster=h100_80gb cluster.nodes=32 activation=full {LLAMA3}", 25),
    "Llama-3 405B on 1024 GPUs": (f"model=llama3_405b cluster=h200 cluster.nodes=128 activation=full {LLAMA3}", 60),
    "100 plans of llama_tiny": (SWEEP, 60),
}  # fmt: skip


def run(overrides: str) -> tuple[float, float]:
    """Runs a command once. Returns seconds, and GiB of the largest process."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [f"hydra.run.dir={folder}/run", f"hydra.sweep.dir={folder}/sweep"]
        command = [sys.executable, "train.py", "mode=plan", *overrides.split(), *folders]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} exited with {process.returncode}")
    return seconds, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    results = {}
    for name, (overrides, target_s) in CASES.items():
        measured = [run(overrides) for _ in range(runs)]
        seconds = sorted(seconds for seconds, _ in measured)
        host_gib = max(gib for _, gib in measured)
        results[name] = {
            "command": f"python train.py mode=plan {overrides}",
            "seconds": {"median": statistics.median(seconds), "least": seconds[0], "most": seconds[-1]},
            "target_s": target_s,
            "host_gib": host_gib,
        }
        print(
            f"{name}: {statistics.median(seconds):.1f} s ({seconds[0]:.1f} to {seconds[-1]:.1f}; target {target_s}), "
            f"{host_gib:.2f} GiB (target {TARGET_GIB})",
            flush=True,
        )
    print("written to", record("plan_speed", f"python bench/plan_speed.py --runs {runs}", results))
    if missed := [name for name, result in results.items() if not _is_met(result)]:
        sys.exit(f"missed its target: {', '.join(missed)}")


def _is_met(result: dict[str, Any]) -> bool:
    return result["seconds"]["median"] <= result["target_s"] and result["host_gib"] <= TARGET_GIB


if __name__ == "__main__":
    main()
