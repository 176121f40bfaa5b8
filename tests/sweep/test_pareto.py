"""The Pareto front against its definition, and the advice in each kind of sweep."""

import json
import random
import shlex

import pytest

from shardlab.sweep.pareto import advise, pareto_front
from shardlab.sweep.results import read_results
from tests.sweep.folders import MIB, completed, ended, write_finished_sweep, write_fits, write_jobs


def run(peak_mib: int, tokens_per_s: float | None):
    summary = completed(peak_mib=peak_mib, tokens_per_s=tokens_per_s or 0.0, step_ms=1.0)
    if tokens_per_s is None:
        summary["perf"] = None
    return summary


def sweep(folder, *runs, **settings):
    return read_results(write_jobs(folder, [(f"seed={i}", summary) for i, summary in enumerate(runs)], **settings))


def test_no_job_beats_one_of_the_front_and_one_of_the_front_beats_each_other_job(tmp_path):
    draw = random.Random(0)
    points = [(draw.randrange(50, 62), float(draw.randrange(1, 13))) for _ in range(40)]
    assert len(set(points)) < len(points)  # some are equal
    results = sweep(tmp_path, *(run(*point) for point in points))

    def beats(one, other):
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    expected = {i for i, point in enumerate(points) if not any(beats(other, point) for other in points)}
    front = pareto_front(results)
    assert {row["job"] for row in front} == expected
    peaks = [results.peak_bytes(row) for row in front]
    assert peaks == sorted(peaks)


def test_reserved_memory_counts_where_there_is_any(tmp_path):
    wasteful, thrifty = run(50, 2.0), run(60, 1.0)
    wasteful["memory"]["reserved_peak_bytes"] = 99 * MIB
    thrifty["memory"]["reserved_peak_bytes"] = 61 * MIB
    results = sweep(tmp_path, wasteful, thrifty)
    assert [(row["job"], results.peak_bytes(row)) for row in pareto_front(results)] == [(1, 61 * MIB), (0, 99 * MIB)]


def test_what_did_not_complete_or_was_not_measured_is_on_no_front(tmp_path):
    results = sweep(tmp_path, ended("oom", "no memory", oom=True), run(50, None), run(60, 3.0))
    assert [row["job"] for row in pareto_front(results)] == [2]


def test_the_advice_is_the_fastest_job_and_one_that_takes_much_less_for_little(tmp_path):
    advice = advise(read_results(write_finished_sweep(tmp_path)))
    assert advice.text == (
        "Use job 2 (sharding=no_shard precision=fp32 accumulation=none), the fastest of 4 that completed: "
        "5,900 tokens/s with a peak of 80.0 MiB per rank; job 1 (sharding=full_shard precision=bf16 accumulation=none) "
        "takes 50 % less memory and is 12 % slower."
    )
    overrides = ["sharding=no_shard", "precision=fp32", "accumulation=none", "train.global_batch=32"]
    assert advice.job == 2
    assert advice.command is not None
    assert shlex.split(advice.command) == ["torchrun", "--nproc-per-node", "2", "train.py", *overrides]


@pytest.mark.parametrize("other", [(70, 99.0), (50, 80.0), (100, 99.9)])
def test_a_job_that_saves_little_or_costs_much_is_not_mentioned(tmp_path, other):
    advice = advise(sweep(tmp_path, run(80, 100.0), run(*other)))
    assert advice.text == (
        "Use job 0 (seed=0), the fastest of 2 that completed: 100 tokens/s with a peak of 80.0 MiB per rank."
    )


def test_one_job_alone_is_the_only_one(tmp_path):
    advice = advise(sweep(tmp_path, run(80, 100.0)))
    assert advice.text == ("Use job 0, the only one that completed: 100 tokens/s with a peak of 80.0 MiB per rank.")


def test_where_nothing_completed_the_advice_says_what_to_try(tmp_path):
    oom, failed = ended("oom", "no memory", oom=True), ended("failed", "KeyError")
    advice = advise(sweep(tmp_path / "a", oom, failed))
    assert advice.text == (
        "No job completed (2 jobs: 1 oom, 1 failed); try a smaller train.micro_batch, activation=full, "
        "sharding=full_shard or more ranks; see the reasons of what failed or was skipped."
    )
    assert advice.command is None
    assert "train.micro_batch" not in advise(sweep(tmp_path / "b", failed)).text
    running = {"status": "running", "error": None}
    assert f"sweep.resume={tmp_path / 'c'}" in advise(sweep(tmp_path / "c", running)).text


def test_where_no_speed_was_measured_the_smallest_is_named(tmp_path):
    advice = advise(sweep(tmp_path, run(80, None), run(60, None)))
    assert advice.text == (
        "No speed was measured: of 2 that completed job 1 (seed=1) has the smallest peak, 60.0 MiB per rank."
    )
    assert advice.job == 1


@pytest.mark.parametrize(
    ("capacity_mib", "text"),
    [
        (75, "1 of 2 plans fit: job 1 (seed=1) takes least, 61.0 MiB of 75.0 MiB per rank."),
        (
            50,
            "None of 2 plans fits: job 1 (seed=1) takes least, 61.0 MiB per rank, 11.0 MiB more than there is; try a "
            "smaller train.micro_batch, activation=full, sharding=full_shard or more ranks.",
        ),
        (None, "Of 2 plans job 1 (seed=1) takes least, 61.0 MiB per rank; cluster.memory_gib=... tells what fits."),
    ],
)
def test_of_plans_the_smallest_that_fits_is_advised(tmp_path, capacity_mib, text):
    capacity = capacity_mib and capacity_mib * MIB
    advice = advise(sweep(tmp_path, run(80, 1.0), run(60, 1.0), mode="plan", capacity_bytes=capacity))
    assert advice.text == text
    assert advice.command == "python train.py mode=plan seed=1"
    train_command = None if capacity_mib == 50 else "torchrun --nproc-per-node 2 train.py seed=1"
    assert advice.train_command == train_command


def test_a_plan_is_trained_on_the_nodes_of_its_cluster(tmp_path):
    sweep(tmp_path, run(80, 1.0), mode="plan")
    plan = json.loads((tmp_path / "0/plan.json").read_text())
    (tmp_path / "0/plan.json").write_text(json.dumps(plan | {"world_size": 16}))
    (tmp_path / "0/config.yaml").write_text("cluster: {nodes: 2, gpus_per_node: 8}")
    assert advise(read_results(tmp_path)).train_command == (
        "torchrun --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 train.py seed=0"
    )


def test_of_plans_that_searched_the_largest_value_is_advised(tmp_path):
    advice = advise(read_results(write_fits(tmp_path / "a", [3, None, 48])))
    assert advice.text == (
        "Use job 2 (model.layers=2): it has room for train.micro_batch=48, the most of 3 plans, with 71.0 MiB of "
        "75.0 MiB per rank."
    )
    assert advice.command == "python train.py mode=plan model.layers=2 plan.fit=micro_batch"
    assert advice.train_command == "torchrun --nproc-per-node 2 train.py model.layers=2 train.micro_batch=48"
    assert advise(read_results(write_fits(tmp_path / "b", [None]))).text.startswith("The only plan does not fit")
