"""The ledger's peak against torch.profiler's memory events: what the one does not see, and why.

    python bench/ledger_vs_profiler.py  # 36 runs, some 5 minutes; writes bench/results/ledger_vs_profiler.json

Each run is a real one on CPUs (2 ranks, hybrids on 4) of `llama_tiny` with 2 blocks, watched by both from before
`build` to the end of the second step; `compare` in `tests/telemetry/test_ledger_and_profiler.py` says how. Columns:

- `storages`: by how many bytes the peaks differ once the profiler's leaves out what no storage is;
- `untold`: storages whose end the profiler missed, by which `storages` may be too high;
- `all`: by how many percent the profiler's peak of everything exceeds the ledger's. It depends on when gloo's threads
  come to let go of their copies, as `storages` does not;
- what the profiler saw besides storages at that peak: gloo's copies, states of the random number generator, scratch;
- the largest scratch at any time, and the operator that took it.
"""

import itertools
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tests' ranks and runs

from record import record
from tests.ranks import RankPool
from tests.telemetry.test_ledger_and_profiler import GENERATOR_STATE, PROCESS_GROUP, RUN, Comparison, compare

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "shard_optimizer")
PRECISIONS = ("fp32", "bf16", "fp16")
POLICIES = ("none", "full")
COLUMNS = "{:18} {:4} {:4} {:>11} {:>8} {:>8} {:>6} | {:>9} {:>9} {:>9} | {}"


def row(strategy: str, precision: str, policy: str, ranks: list[Comparison]) -> str:
    """One line, of the rank whose profiler saw most."""
    most = max(ranks, key=lambda rank: rank.profiler)
    least_alike = max(ranks, key=lambda rank: abs(rank.storages - rank.ledger))
    scratch = {kind: size for kind, size in most.largest.items() if kind not in (PROCESS_GROUP, GENERATOR_STATE)}
    operator = max(scratch, key=lambda kind: scratch[kind])
    at_peak = sum(size for kind, size in most.unseen.items() if kind in scratch)
    return COLUMNS.format(
        strategy,
        precision,
        policy,
        f"{most.ledger:,}",
        f"{least_alike.storages - least_alike.ledger:,}",
        f"{least_alike.untold:,}",
        f"{100 * (most.profiler / most.ledger - 1):.2f}",
        f"{most.unseen.get(PROCESS_GROUP, 0):,}",
        f"{most.unseen.get(GENERATOR_STATE, 0):,}",
        f"{at_peak:,}",
        f"{scratch[operator]:,} {operator}",
    )


def main() -> None:
    print(
        COLUMNS.format(
            "sharding", "", "act.", "ledger, B", "storages", "untold", "all, %", "gloo, B", "RNG, B", "scratch", ""
        )
    )
    pools = {world_size: RankPool(world_size) for world_size in (2, 4)}
    results = []
    for choice in itertools.product(STRATEGIES, PRECISIONS, POLICIES):
        strategy, precision, policy = choice
        hybrid = strategy.startswith("hybrid")
        overrides = (f"sharding={strategy}", f"precision={precision}", f"activation={policy}")
        more = ("sharding.replicas=2",) if hybrid else ()
        ranks = pools[4 if hybrid else 2](compare, *RUN, *overrides, *more)
        print(row(*choice, ranks), flush=True)
        results.append({"run": " ".join(overrides), "ranks": [asdict(rank) for rank in ranks]})
    for pool in pools.values():
        pool.close()
    print("written to", record("ledger_vs_profiler", "python bench/ledger_vs_profiler.py", results))


if __name__ == "__main__":
    main()
