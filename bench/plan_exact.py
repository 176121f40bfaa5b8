"""Plans and measures every combination of strategy, precision, accumulation, activation policy and optimizer on CPUs.

    python bench/plan_exact.py             # 270 combinations, about 50 minutes on 2 cores
    python bench/plan_exact.py --every 10  # each tenth of them
    python bench/plan_exact.py --repeats   # plans that repeat equal blocks and steps against those that simulate all

Each is planned in one process and measured by the trainer in others (2 ranks, hybrids on 4). Prints those that differ,
by a byte, and writes bench/results/plan_exact.json; with --repeats plan_repeats.json, where records are compared event
by event, for 8 GPUs.
"""

import argparse
import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tests' ranks and runs

from record import record
from tests.planner.test_blocks import RUN as SEVEN_BLOCKS
from tests.planner.test_blocks import repeated_and_simulated
from tests.planner.test_plan import RUN, planned
from tests.ranks import RankPool
from tests.training import measured_memory

GROUPS = {
    "sharding": ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "shard_optimizer"),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": ("none", "reduce_every", "reduce_last"),
    "activation": ("none", "full", "selective"),
    "optimizer": ("sgd", "adamw"),
}


def combinations() -> list[dict[str, str]]:
    """All that can be built: fp16 needs a fused optimizer, and PyTorch's fused SGD takes no sharded parameters."""
    every = (dict(zip(GROUPS, choice, strict=True)) for choice in itertools.product(*GROUPS.values()))
    return [c for c in every if (c["precision"], c["optimizer"]) != ("fp16", "sgd")]


def compare_repeats(combination: dict[str, str], planner: ProcessPoolExecutor) -> tuple[str | None, bool]:
    """How a record with repeated blocks, micro-batches and steps differs from one without; None where it does not.

    And whether all of these were repeated: where a record is not regular enough, all blocks are simulated after all.
    """
    overrides = [f"{group}={choice}" for group, choice in combination.items()]
    replicas = ("sharding.replicas=2",) if combination["sharding"].startswith("hybrid") else ()
    accumulates = combination["accumulation"] != "none"
    run = (*SEVEN_BLOCKS, *overrides, *replicas, *(("accumulation.steps=4",) if accumulates else ()))
    repeated, some, every = planner.submit(repeated_and_simulated, run, False).result()
    expected = {"lengthen": 1, "repeat_step": 1} | ({"repeat": 2} if accumulates else {})
    return None if some == every else "the records differ", repeated == expected


def compare(combination: dict[str, str], pools: dict[int, RankPool], planner: ProcessPoolExecutor) -> str | None:
    """What differs between plan and measurement; None where nothing does."""
    hybrid = combination["sharding"].startswith("hybrid")
    world_size = 4 if hybrid else 2
    overrides = [f"{group}={choice}" for group, choice in combination.items()]
    run = (*RUN, *overrides, *(("sharding.replicas=2",) if hybrid else ()))
    future = planner.submit(planned, run, world_size)
    measured = pools[world_size](measured_memory, *run)
    peak = future.result()["peak"]
    if max(memory["allocated_peak_bytes"] for memory in measured) != peak["allocated_bytes"]:
        return f"measured {[m['allocated_peak_bytes'] for m in measured]}, planned {peak['allocated_bytes']}"
    if measured[0]["breakdown"] != peak["breakdown"]:
        return f"measured {measured[0]['breakdown']}, planned {peak['breakdown']}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="compare each so-many-th combination")
    parser.add_argument("--repeats", action="store_true", help="compare repeated records with simulated ones")
    arguments = parser.parse_args()
    every = arguments.every
    chosen, differences, simulated = combinations()[::every], {}, []
    pools = {world_size: RankPool(world_size) for world_size in (() if arguments.repeats else (2, 4))}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as planner:
        for number, combination in enumerate(chosen, 1):
            name = " ".join(f"{group}={choice}" for group, choice in combination.items())
            if arguments.repeats:
                difference, was_repeated = compare_repeats(combination, planner)
                simulated += [] if was_repeated else [name]
            else:
                difference = compare(combination, pools, planner)
            if difference:
                differences[name] = difference
                print(f"{name}: {difference}")
            print(f"{number}/{len(chosen)} compared, {len(differences)} differ", end="\r", flush=True)
    for pool in pools.values():
        pool.close()
    print()
    results = {"compared": len(chosen), "of": len(combinations()), "differ": differences}
    if arguments.repeats:
        results["simulated_whole"] = simulated
    command = f"python bench/plan_exact.py --every {every}" + (" --repeats" if arguments.repeats else "")
    print("written to", record("plan_repeats" if arguments.repeats else "plan_exact", command, results))


if __name__ == "__main__":
    main()
