"""What the screen says at the end of a sweep: readable in 80 columns, on a terminal and in a file."""

import io
import json

from shardlab.sweep.results import read_results
from shardlab.sweep.screen import show
from tests.sweep.folders import BREAKDOWN, GIB, completed, ended, write_finished_sweep, write_fits, write_jobs


def shown(folder, *, columns=80, **settings) -> list[str]:
    """The lines that are printed of a sweep, where the output is no terminal."""
    out = io.StringIO()
    show(read_results(folder), file=out, width=columns, **settings)
    return out.getvalue().splitlines()


def test_the_table_is_sorted_by_throughput_and_marks_the_front(tmp_path):
    lines = shown(write_finished_sweep(tmp_path), columns=120)
    table = [line.split() for line in lines if "MiB" in line and "none" in line][:4]
    assert table == [
        ["*", "2", "no_shard", "fp32", "none", "5,900", "690.0", "80.0", "MiB", "+1.2", "%", "2.5"],
        ["*", "1", "full_shard", "bf16", "none", "5,200", "780.0", "40.0", "MiB", "+2.5", "%", "2.5"],
        ["3", "no_shard", "bf16", "none", "5,100", "800.0", "70.0", "MiB", "+1.4", "%", "2.5"],
        ["0", "full_shard", "fp32", "none", "4,800", "850.0", "50.0", "MiB", "+2.0", "%", "2.5"],
    ]
    header = next(line for line in lines if line.split()[:1] == ["job"])
    assert header.split() == [
        "job", "sharding", "precision", "accumulation", "tokens/s", "step", "ms", "peak", "plan", "error", "loss",
    ]  # fmt: skip


def test_nothing_is_wider_than_80_columns_but_the_command(tmp_path):
    lines = shown(write_finished_sweep(tmp_path))
    wide = [line for line in lines if len(line) > 80]
    assert len(wide) == 1
    assert wide[0].startswith("  torchrun --nproc-per-node 2 train.py sharding=no_shard")
    assert not any("\x1b" in line for line in lines)
    assert any("5,900  80.0 MiB" in line for line in lines)  # the figures that matter are still there
    assert "  results.csv has more than there is room for here: step ms, plan error" in lines
    assert not any("room" in line for line in shown(tmp_path, columns=120))


def test_a_terminal_gets_colours_and_the_same_text(tmp_path):
    write_finished_sweep(tmp_path)
    plain, coloured = shown(tmp_path), shown(tmp_path, force_terminal=True, color_system="standard", no_color=False)
    assert any("\x1b[31m" in line for line in coloured)  # red, of what failed
    assert len(coloured) == len(plain)


def test_what_did_not_complete_comes_after_the_table_with_its_reason(tmp_path):
    lines = shown(write_finished_sweep(tmp_path), columns=120)
    (last,) = [i for i, line in enumerate(lines) if "4,800" in line]
    below = "\n".join(lines[last:])
    assert "  job 4 oom (full_shard fp32 reduce_last): rank 1: RuntimeError: can't allocate memory\n" in below
    assert '  job 6 failed (no_shard fp32 reduce_last): rank 0: KeyError: "<no> such & sample"\n' in below
    assert "  job 7 skipped (no_shard bf16 reduce_last): train.global_batch=31 is no multiple of 32\n" in below
    assert "step 1/50" in below  # of the log of the job that failed
    assert below.count("step 1/50") == 1
    assert lines[1] == "  8 jobs: 4 completed, 1 oom, 1 failed, 1 killed, 1 skipped"


def test_what_memory_was_taken_by_is_shown_of_what_ran_out_of_it(tmp_path):
    oom = ended("oom", "no memory", oom=True)
    oom["memory"] |= {"allocated_peak_bytes": 90 * GIB, "reserved_peak_bytes": 95 * GIB}
    oom["memory"]["breakdown"] = {name: mib * GIB for name, mib in BREAKDOWN.items()}
    write_jobs(tmp_path, [("seed=1", oom), ("seed=2", ended("killed", "SIGKILL")), ("seed=3", ended("failed", "x"))])
    breakdown = {"unsharded_parameters": 7 * GIB, "inputs": 1 * GIB, "other": 0}
    for number in (1, 2):
        peak = {"allocated_bytes": 8 * GIB, "reserved_bytes": None, "breakdown": breakdown}
        (tmp_path / str(number) / "plan.json").write_text(json.dumps({"peak": peak}))
    lines = shown(tmp_path)
    assert lines[3:8] == [
        "  job 0 oom (seed=1): no memory",
        "      measured peak 95.00 GiB: activations 33.00 GiB, optimizer 6.00 GiB,",
        "        parameters 3.00 GiB",
        "      planned peak 0.12 GiB",
        "  job 1 killed (seed=2): SIGKILL",
    ]
    assert lines[8] == "      planned peak 8.00 GiB: unsharded parameters 7.00 GiB, inputs 1.00 GiB"
    assert lines[9].startswith("  job 2 failed")  # whose memory is not why
    assert "peak" not in "".join(lines[9:])


def test_a_job_that_failed_without_a_reason_shows_the_end_of_its_log(tmp_path):
    write_jobs(tmp_path, [("seed=1", ended("failed", None))])
    (tmp_path / "0" / "launch.log").write_text("\n".join(f"[line {i}]" for i in range(9)))
    lines = shown(tmp_path)
    assert lines[3:7] == ["  job 0 failed: [line 8]", "      [line 5]", "      [line 6]", "      [line 7]"]
    assert "No job completed (1 job: 1 failed); see the reasons" in "\n".join(lines)


def test_many_long_overrides_share_a_column(tmp_path):
    run = completed(peak_mib=50, tokens_per_s=1234.0, step_ms=1.0)
    names = [" ".join(f"group{key}.some_long_name={key * value}" for key in range(1, 9)) for value in (1, 2)]
    lines = shown(write_jobs(tmp_path, [(name, run) for name in names]))
    table = lines[: next(i for i, line in enumerate(lines) if "Use job" in line)]
    assert max(map(len, table)) <= 80
    text = " ".join(table)
    assert "overrides" in text
    assert "group8.some_long_name=16" in text
    assert "1,234" in text
    assert "50.0 MiB" in text


def test_plans_are_sorted_by_their_peaks_and_say_whether_they_fit(tmp_path):
    lines = shown(write_finished_sweep(tmp_path, mode="plan"))
    table = [line.split() for line in lines if "MiB" in line and line.endswith((" yes", " no"))]
    assert [row[0] for row in table] == ["1", "0", "3", "2"]
    assert table[-1][4:] == ["81.0", "MiB", "75.0", "MiB", "no"]
    assert "  results.csv has more than there is room for here: capacity" in shown(tmp_path, columns=60)
    assert lines[-4:-1] == ["  To train it:", "", "  torchrun --nproc-per-node 2 train.py sharding=full_shard "
        "precision=bf16 accumulation=none train.global_batch=32"]  # fmt: skip


def test_plans_that_searched_are_sorted_by_what_they_found(tmp_path):
    lines = shown(write_fits(tmp_path, [3, None, 48]))
    table = [line.split() for line in lines if "MiB" in line and line.endswith((" yes", " no"))]
    assert [(row[0], *row[1:-5]) for row in table] == [("2", "2", "48"), ("0", "0", "3"), ("1", "1")]
    assert next(line for line in lines if line.split()[:1] == ["job"]).split()[2:4] == ["largest", "micro_batch"]
