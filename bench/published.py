"""Plans each preset in conf/experiment/published, and compares the plan with the figure that was published of that run.

    python bench/published.py            # all, each in its own process; writes bench/results/published.json
    python bench/published.py NAME ...   # only these, and nothing is written

Each is planned twice: as the preset has it, with shardlab's own model; and in the operators that the publisher's code
had at the time, which keep other memory ("same operators", bench/torchtitan_llama.py).

Not covered: FSDP2's own changes since. Until pytorch#129721 (2024-06-27) reduce-scatter's inputs were allocated in its
stream, whose pool shares nothing with the default stream's. With those events moved there, the runs before that date
reserve 59.65 (published 59.48), 58.92 (59.41) and 30.80 GiB (31.02) in the plan of torch 2.13's FSDP2.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import record

ROOT = Path(__file__).parent.parent
GIB = 1 << 30
COLUMNS = ("planned", "same_operators")
H100_GIB = 95.0396  # what a percentage in torchtitan#165 is of, as it says itself

TORCHTITAN = ("model._target_=bench.torchtitan_llama.Transformer",)
KEPT_LOGITS = (*TORCHTITAN, "+model.keep_logits=true")  # before torchtitan#391 (2024-06-12)
# A rotary table for twice ModelArgs' 32768 positions, which are in the log of torchtitan#171 (2024-03-27).
MARCH_2024 = (*KEPT_LOGITS, "model.max_seq_len=65536")


@dataclass(frozen=True)
class Published:
    """What was published of a run.

    Attributes:
        source: URL.
        reserved_gib: peak reserved (`reserved_bytes.all.peak`).
        allocated_gib: peak active (`active_bytes.all.peak`); equal to allocated where nothing calls `record_stream`;
            None where it was not published.
        operators: overrides that give the model the publisher's operators of that time.
    """

    source: str
    reserved_gib: float
    allocated_gib: float | None = None
    operators: tuple[str, ...] = TORCHTITAN


_TITAN = "https://github.com/pytorch/torchtitan"
_DECEMBER_2024 = f"{_TITAN}/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
FIGURES = {  # by the preset's name
    "torchtitan_llama3_8b_8xh100": Published(_DECEMBER_2024, 82.4),
    "torchtitan_llama3_8b_128xh100": Published(_DECEMBER_2024, 67.0),
    "torchtitan_llama3_8b_8xh100_batch1": Published(f"{_TITAN}/pull/985", 49.58),
    "torchtitan_llama3_8b_8xa100": Published(f"{_TITAN}/pull/355", 59.48, operators=KEPT_LOGITS),
    "torchtitan_llama2_7b_8xh100_selective": Published(
        f"{_TITAN}/pull/165", 0.6251 * H100_GIB, 0.5213 * H100_GIB, operators=MARCH_2024
    ),
    "torchtitan_llama2_7b_8xh100_full": Published(
        f"{_TITAN}/pull/165", 0.3264 * H100_GIB, 0.2392 * H100_GIB, operators=MARCH_2024
    ),
}


def plan(preset: str, *overrides: str) -> dict[str, float]:
    """Plans a preset by the command that a user would give; GiB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "mode=plan", f"experiment=published/{preset}", *overrides]
        command += ["plan.changes=0", "plan.timeline=false", f"hydra.run.dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        peak = json.loads((Path(folder) / "plan.json").read_text())["peak"]
    return {"reserved_gib": peak["reserved_bytes"] / GIB, "allocated_gib": peak["allocated_bytes"] / GIB}


def compare(preset: str) -> dict[str, Any]:
    """Published and planned figures of a preset, in GiB, and the plans' errors in percent."""
    figure = FIGURES[preset]
    published = {"reserved_gib": figure.reserved_gib, "allocated_gib": figure.allocated_gib}
    row: dict[str, Any] = {"source": figure.source, "published": published}
    for column, overrides in zip(COLUMNS, ((), figure.operators), strict=True):
        gib = plan(preset, *overrides)
        errors = {
            key.replace("_gib", "_error_pct"): 100 * (gib[key] / true - 1) for key, true in published.items() if true
        }
        row[column] = gib | errors
    return row


def show(preset: str, row: dict[str, Any]) -> None:
    """Prints a line for each figure."""
    for kind in ("reserved", "allocated"):
        if row["published"][f"{kind}_gib"] is not None:
            columns = (f"{row[c][f'{kind}_gib']:8.2f} {row[c][f'{kind}_error_pct']:+6.1f} %" for c in COLUMNS)
            print(f"{preset:38} {kind:9} {row['published'][f'{kind}_gib']:9.2f}", *columns, row["source"], flush=True)


def main() -> None:
    presets = sys.argv[1:] or list(FIGURES)
    if unknown := set(presets) - set(FIGURES):
        sys.exit(f"no figure is known for {', '.join(sorted(unknown))}; known: {', '.join(FIGURES)}")
    print(f"{'peak, GiB':38} {'':9} {'published':>9} {'planned':>17} {'same operators':>17} source")
    rows = {}
    for preset in presets:
        rows[preset] = compare(preset)
        show(preset, rows[preset])
    if not sys.argv[1:]:
        print("written to", record("published", "python bench/published.py", rows))


if __name__ == "__main__":
    main()
