"""Runs every sharding strategy on 4 processes through train.py, and puts the table into the README.

    python bench/strategies.py            # about 6 minutes on 2 cores; writes bench/results/strategies.json
    python bench/strategies.py --render   # only renders the README's table from the recorded result

Each strategy runs REPEATS times, in turn, so that a slow minute of the machine does not fall on one strategy alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import RESULTS, record

ROOT = Path(__file__).parent.parent
STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
REPEATS = 3
RUN = ("train.steps=20", "train.micro_batch=2", "train.eval_every=0", "tracking=none", "tracking.display=none")
BEGIN, END = "<!-- strategies: made by bench/strategies.py -->\n", "<!-- end of strategies -->\n"


def run_once(strategy: str) -> dict[str, Any]:
    """Trains once; returns the summary."""
    replicas = ["sharding.replicas=2"] if strategy.startswith("hybrid") else []
    with tempfile.TemporaryDirectory() as folder:
        command = ["torchrun", "--nproc-per-node", "4", "train.py", *RUN, f"sharding={strategy}", *replicas]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *command[1:], f"hydra.run.dir={folder}"],
                       cwd=ROOT, env=environment, check=True)  # fmt: skip
        return json.loads((Path(folder) / "summary.json").read_text())


def measure() -> None:
    runs: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(REPEATS):
        for strategy in STRATEGIES:
            runs[strategy].append(run_once(strategy))
    print("written to", record("strategies", "python bench/strategies.py", runs))


def render() -> str:
    """The table, in Markdown."""
    recorded = json.loads((RESULTS / "strategies.json").read_text())
    machine = recorded["machine"]
    lines = [
        "| `sharding=` | parameters | gradients | optimizer | peak "
        "| all-gather | reduce-scatter | all-reduce | tokens/s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for strategy, runs in recorded["results"].items():
        first = runs[0]
        sizes = [
            first["memory"][f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer", "allocated_peak")
        ]
        sizes += [first["comm"][f"{name}_bytes"] for name in ("all_gather", "reduce_scatter", "all_reduce")]
        speeds = [run["perf"]["tokens_per_s"] for run in runs]
        cells = [f"`{strategy}`", *(f"{size / 2**20:.2f}" for size in sizes)]
        cells.append(f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f}–{max(speeds):,.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Sizes in MiB per rank: what is kept, the peak of all allocated memory, and what a step communicates. "
        "`llama_tiny`, fp32, AdamW, 4 processes (2 replica groups for the hybrids) on "
        f"{machine['cores']} cores of {machine['device']}, torch {machine['torch']}, {machine['date']}. "
        f"Tokens/s: median (range) of {REPEATS} runs; processes on one CPU say little of GPUs.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--render" not in sys.argv:
        measure()
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(before + BEGIN + "\n" + render() + "\n" + END + rest.split(END)[1])
