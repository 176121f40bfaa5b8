"""How much longer a job takes in a sweep than the same command by hand.

    python bench/sweep_overhead.py             # about 3 minutes on 2 cores
    python bench/sweep_overhead.py --pairs 7

Runs sweeps of one job, and the job's own command, in turns. Of a sweep's job counts what the user waits for beyond the
job itself: from its start to its end as `job.json` has it. What a sweep takes once, its own start and its report, is
shown apart. Writes bench/results/sweep_overhead.json. The machine should do nothing else.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

from shardlab.sweep.records import read_sweep

ROOT = Path(__file__).parent.parent
RUN = ("train.steps=20", "train.micro_batch=2", "train.eval_every=null", "tracking.wandb.mode=offline")
ALLOWED_S, ALLOWED_PART = 2.0, 0.05


def seconds_of(command: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    by_hand, in_sweep, once = [], [], []
    for number in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
            by_hand.append(seconds_of([*torchrun, *RUN, f"hydra.run.dir={folder}/alone"]))
            whole = seconds_of([sys.executable, "train.py", "-m", *RUN, f"hydra.sweep.dir={folder}/sweep"])
            (job,) = read_sweep(Path(folder) / "sweep")[1]
            assert job.record.seconds is not None
            in_sweep.append(job.record.seconds)
            once.append(whole - job.record.seconds)
        print(
            f"{number + 1}: {by_hand[-1]:.1f} s by hand, {in_sweep[-1]:.1f} s in a sweep, {once[-1]:.1f} s once a sweep"
        )
    longer = [ours - alone for ours, alone in zip(in_sweep, by_hand, strict=True)]
    results = {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in {"by_hand_s": by_hand, "in_sweep_s": in_sweep, "longer_s": longer, "once_s": once}.items()
    }
    allowed = max(ALLOWED_S, ALLOWED_PART * results["by_hand_s"]["median"])
    print(f"{results['longer_s']['median']:+.1f} s a job; allowed {allowed:.1f} s")
    print("written to", record("sweep_overhead", f"python bench/sweep_overhead.py --pairs {pairs}", results))


if __name__ == "__main__":
    main()
