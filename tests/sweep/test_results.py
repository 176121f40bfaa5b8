"""results.csv and results.jsonl: a row a job, whatever state the job is in, with what its own files say."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.errors import ConfigError
from shardlab.sweep.records import read_sweep, write_sweep
from shardlab.sweep.results import log_tail, read_results, write_results
from tests.commands import read_json
from tests.sweep.folders import MIB, completed, ended, write_finished_sweep, write_fits, write_jobs


def written(folder: Path) -> list[dict[str, Any]]:
    """The rows of results.jsonl, after it was written."""
    write_results(read_results(folder))
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_each_job_has_a_row_with_its_overrides_and_the_figures_of_its_summary(tmp_path):
    rows = written(write_finished_sweep(tmp_path))
    assert [row["status"] for row in rows] == ["completed"] * 4 + ["oom", "killed", "failed", "skipped"]
    assert [row["job"] for row in rows] == list(range(8))
    fastest, summary = rows[2], read_json(tmp_path / "2" / "summary.json")
    assert (fastest["sharding"], fastest["precision"], fastest["train.global_batch"]) == ("no_shard", "fp32", 32)
    for column in fastest:
        group, dot, name = column.partition(".")
        if dot and group in summary:
            assert fastest[column] == summary[group].get(name), column
    assert (fastest["world_size"], fastest["steps"], fastest["seconds"], fastest["folder"]) == (2, 50, 19.5, "2")
    failed = rows[6]
    assert failed["error"] == 'rank 0: KeyError: "<no> such & sample"'
    assert failed["perf.tokens_per_s"] is failed["comm.all_gather_bytes"] is failed["loss.last"] is None
    assert (rows[4]["memory.allocated_peak_bytes"], rows[4]["plan.allocated_peak_bytes"]) == (90 * MIB, 120 * MIB)


def test_rows_are_in_the_order_of_the_jobs_numbers(tmp_path):
    write_finished_sweep(tmp_path)
    record, _ = read_sweep(tmp_path)
    write_sweep(tmp_path, replace(record, jobs=[*record.jobs[5:], *record.jobs[:5]]))  # as a resume leaves it
    assert [row["job"] for row in written(tmp_path)] == list(range(8))


def test_the_csv_has_the_same_rows(tmp_path):
    rows = written(write_finished_sweep(tmp_path))
    with (tmp_path / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
    assert list(table[0])[:6] == ["job", "status", "sharding", "precision", "accumulation", "train.global_batch"]
    assert list(table[0])[-2:] == ["error", "folder"]


def test_a_key_that_some_jobs_override_is_null_in_the_others(tmp_path):
    run = completed(peak_mib=50, tokens_per_s=1.0, step_ms=1.0)
    jobs = ["+model.width=8 seed=1e-3", "~model.dropout data.path=a=b", "data.path=null ++seed=-3"]
    rows = written(write_jobs(tmp_path, [(overrides, run) for overrides in jobs]))
    keys = ("model.width", "seed", "model.dropout", "data.path")
    assert [[row[key] for key in keys] for row in rows] == [
        [8, 0.001, None, None],
        [None, None, "removed", "a=b"],
        [None, -3, None, "null"],
    ]


def test_plans_have_their_peaks_whether_they_fit_and_their_communication(tmp_path):
    rows = written(write_finished_sweep(tmp_path, mode="plan"))
    assert [row["plan.allocated_peak_bytes"] for row in rows[:4]] == [n * MIB for n in (51, 41, 81, 71)]
    assert [row["plan.fits"] for row in rows[:4]] == [True, True, False, True]
    assert {row["plan.capacity_bytes"] for row in rows[:4]} == {75 * MIB}
    assert {(row["comm.all_gather_bytes"], row["comm.reduce_scatter_bytes"]) for row in rows[:4]} == {
        (12 * MIB, 6 * MIB)
    }
    assert {row["perf.tokens_per_s"] for row in rows} == {None}


@pytest.mark.parametrize(("fits", "retries", "word"), [
    (True, 0, "yes"), (True, 2, "just"), (False, 0, "no"), (None, None, ""), (True, None, "yes"),
])  # fmt: skip
def test_a_plan_that_must_release_cached_memory_just_fits(tmp_path, fits, retries, word):
    row = {"plan.fits": fits, "plan.alloc_retries": retries}
    assert read_results(write_finished_sweep(tmp_path, mode="plan")).fits(row) == word


def test_what_plan_fit_has_found_is_a_column(tmp_path):
    rows = written(write_fits(tmp_path, [3, None, 48]))
    assert [row["plan.fit.value"] for row in rows] == [3, None, 48]
    assert [row["plan.fit"] for row in rows] == ["micro_batch"] * 3  # which is an override
    results = read_results(tmp_path)
    assert results.fit_key == "train.micro_batch"
    assert [row["job"] for row in results.completed] == [2, 0, 1]


def test_a_sweep_whose_parent_was_killed_gives_what_there_is(tmp_path):
    """One job runs, of one there is half a plan, one was not begun, of one nothing is there."""
    write_finished_sweep(tmp_path)
    (tmp_path / "0" / "summary.json").write_text('{"status": "running", "world_size": 2}')
    (tmp_path / "1" / "summary.json").unlink()
    (tmp_path / "1" / "plan.json").write_text('{"peak": {"alloc')
    (tmp_path / "5" / "summary.json").write_text('{"status": "killed", "error": null, "perf": null}')
    (tmp_path / "7" / "summary.json").unlink()
    (tmp_path / "6" / "job.json").unlink()
    rows = {row["job"]: row for row in written(tmp_path)}
    assert [(job, row["status"]) for job, row in rows.items()] == [
        (0, "running"),
        (1, "running"),
        (2, "completed"),
        (3, "completed"),
        (4, "oom"),
        (5, "killed"),
        (7, "interrupted"),
    ]
    assert rows[0]["plan.allocated_peak_bytes"] == 51 * MIB  # as plan.json, written ahead of the run, says
    assert rows[1]["plan.allocated_peak_bytes"] is None
    counts = read_results(tmp_path).counts()
    assert counts == ("8 jobs: 2 running, 2 completed, 1 oom, 1 killed, 1 interrupted, 1 left nothing")


def test_the_fastest_come_first(tmp_path):
    results = read_results(write_finished_sweep(tmp_path))
    assert [row["job"] for row in results.completed] == [2, 1, 3, 0]
    assert [row["job"] for row in results.others] == [4, 5, 6, 7]
    assert results.varied == ["sharding", "precision", "accumulation"]


def test_the_tail_of_a_log_leaves_out_what_torchrun_adds(tmp_path):
    write_jobs(tmp_path, [("seed=1", ended("failed", None))])
    (tmp_path / "0" / "launch.log").write_text(
        "x" * 70_000 + "\nstep 1\n\nerror: rank 1: no such sample\n"
        "W1130 06:46:01.120000 77 torch/distributed/elastic/multiprocessing/api.py:1022] Sending process 5 SIGTERM\n"
        "E1130 06:46:01.220000 77 site-packages/torch/distributed/elastic/multiprocessing/api.py:984] failed\n"
    )
    (job,) = read_results(tmp_path).jobs
    assert log_tail(job, 2) == ("launch.log", ["step 1", "error: rank 1: no such sample"])
    (tmp_path / "0" / "launch.log").unlink()
    assert log_tail(job, 2) == ("launch.log", [])


def test_the_tail_of_a_log_leaves_out_the_closing_table(tmp_path):
    write_jobs(tmp_path, [("seed=1", ended("failed", "not finished after hydra.launcher.timeout_s=30"))])
    (tmp_path / "0" / "launch.log").write_text(
        "  status    of a user's own\n\nstep 2/9\nstep 3/9\n\n"
        "  status      interrupted\n  all-gather  1.0 MiB per rank and step\n\n  files  /runs/0\n\nW&B is slow\n"
    )
    (job,) = read_results(tmp_path).jobs
    assert log_tail(job, 3)[1] == ["step 2/9", "step 3/9", "W&B is slow"]


def test_the_tail_of_a_log_is_the_last_traceback_where_there_is_one(tmp_path):
    write_jobs(tmp_path, [("seed=1", ended("failed", "rank 1: KeyError: 'no such sample'"))])
    traceback = [
        "Traceback (most recent call last):",
        '  File "users.py", line 5, in misbehave',
        "KeyError: 'no such sample'",
    ]
    earlier = "[2026-11-30 11:00:00,123][shardlab] a warning\nTraceback (most recent call last):\nOSError: earlier\n"
    log = f"{earlier}rank 1 failed:\n" + "\n".join(traceback) + "\n"
    (tmp_path / "0" / "train.log").write_text(f"{log}2026-11-30 11:00:01,123 rank 1 WARNING shardlab: the end\n")
    (job,) = read_results(tmp_path).jobs
    assert log_tail(job, 20) == ("train.log", traceback)
    assert log_tail(job, 2)[1] == traceback[1:]


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no sweep"):
        read_results(tmp_path)
