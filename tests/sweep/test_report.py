"""The end of a sweep: what is written, however little there is, and that it never fails the sweep."""

import json
import re
import time

import pytest
from omegaconf import OmegaConf

from shardlab.sweep import report, wandb_summary
from shardlab.sweep.callback import SweepReport
from shardlab.sweep.page import CURVE_POINTS, read_curve
from shardlab.sweep.results import read_results
from tests.sweep.folders import completed, ended, write_finished_sweep, write_fits, write_jobs, write_large_sweep


@pytest.fixture(autouse=True)
def logged(monkeypatch):
    """Folders whose summary went to W&B; it has tests of its own."""
    folders = []
    monkeypatch.setattr(wandb_summary, "log_summary", lambda folder: folders.append(folder))
    return folders


def page_of(folder) -> tuple[str, dict]:
    """The page without plotly.js, and what it draws."""
    report.make_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    (data,) = re.findall(r"^const sweep = (.*);$", page, re.MULTILINE)
    return re.sub(r"(?s)<script>/\*\*\n\* plotly.js.*?</script>", "", page), json.loads(data)


def test_the_command_makes_all_files_again_and_prints_the_table(tmp_path, capsys, logged):
    write_finished_sweep(tmp_path)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "* 2  no_shard" in out
    assert f"  {tmp_path}/report.html\n" in out
    for name in ("results.csv", "results.jsonl", "report.html"):
        assert (tmp_path / name).stat().st_size
    assert logged == []  # it may be run any number of times


@pytest.mark.parametrize("arguments", [["nowhere"], [], ["a", "b"], ["--help"]])
def test_a_wrong_folder_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert report.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .*(holds no sweep|name one folder).*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_the_page_loads_nothing_and_takes_no_markup_from_what_jobs_say(tmp_path):
    evil = "</script><script src=x></pre><img src=x>@DATA@ &lt; \\1"
    write_jobs(tmp_path, [(f"seed={evil.replace(' ', '')}", ended("failed", evil)), ("seed=1", ended("oom", evil))])
    page, data = page_of(tmp_path)
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:" in page
    assert not re.search(r"<(link|img|iframe)|<\w+ [^>]*\b(src|href)=|@import|url\(|fetch\(|://", page)
    assert page.count("</script>") == page.count("\n<script>") == 1
    assert "&lt;/script&gt;&lt;script src=x&gt;&lt;/pre&gt;&lt;img src=x&gt;@DATA@ &amp;lt; \\1" in page
    assert data["jobs"][0]["values"]["seed"] == evil.replace(" ", "")


def test_what_is_drawn_is_what_the_files_say(tmp_path):
    _, data = page_of(write_finished_sweep(tmp_path))
    rows = {row["job"]: row for row in read_results(tmp_path).rows}
    assert [job["job"] for job in data["jobs"]] == [2, 1, 3, 0, 4, 5, 6, 7]
    assert data["advised"] == 2
    assert {job["job"] for job in data["jobs"] if job["front"]} == {1, 2}
    for job in data["jobs"][:4]:
        row = rows[job["job"]]
        assert (job["tokens_per_s"], job["peak_bytes"]) == (
            row["perf.tokens_per_s"],
            row["memory.allocated_peak_bytes"],
        )
        assert sum(job["measured"].values()) == row["memory.allocated_peak_bytes"]
        assert sum(job["predicted"].values()) == row["plan.allocated_peak_bytes"]
        assert job["communication"] == {
            name: row[f"comm.{name}_bytes"] for name in ("all_gather", "reduce_scatter", "all_reduce")
        }
        written = [json.loads(line) for line in (tmp_path / row["folder"] / "metrics.jsonl").read_text().splitlines()]
        assert job["loss"] == {
            "x": [each["progress/tokens"] for each in written],
            "y": [each["train/loss"] for each in written],
        }
    oom = data["jobs"][4]
    assert oom["measured"] is not None
    assert oom["tokens_per_s"] is oom["peak_bytes"] is oom["loss"] is None


def test_the_table_has_what_plan_fit_has_found(tmp_path):
    page, _ = page_of(write_fits(tmp_path, [3, None, 48]))
    assert "largest\nmicro_batch</button>" in page
    assert 'data-value="48">48</td>' in page


def test_a_long_curve_is_thinned_to_its_last_point_and_half_a_row_is_left_out(tmp_path):
    write_jobs(tmp_path, [("seed=1", completed(peak_mib=50, tokens_per_s=1.0, step_ms=1.0))], metrics_rows=5003)
    file = tmp_path / "0" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    with file.open("a") as more:
        more.write('{"step": 5010, "eval/loss": 1.0}\n{"step": 5010, "train/loss": null}\n')
    (job,) = read_results(tmp_path).jobs
    curve = read_curve(job)
    assert CURVE_POINTS / 2 < len(curve["loss"]) <= CURVE_POINTS
    assert curve["step"][-1] in (rows[-1]["step"], rows[-26]["step"])
    assert set(zip(curve["step"], curve["loss"], strict=True)) <= {(row["step"], row["train/loss"]) for row in rows}
    file.write_text('{"step": 1, "train/loss": 3.5}\n{"step": 2, "train/lo')
    assert read_curve(job) == {"loss": [3.5], "step": [1]}


def test_a_sweep_of_which_little_is_left_still_gives_a_page(tmp_path):
    write_finished_sweep(tmp_path)
    for number in range(8):
        (tmp_path / str(number) / "summary.json").unlink()
        (tmp_path / str(number) / "plan.json").write_text("{")
    (tmp_path / "3" / "job.json").unlink()
    page, data = page_of(tmp_path)
    assert [job["status"] for job in data["jobs"]] == ["running"] * 6 + ["interrupted"]
    assert "No job completed (8 jobs: 6 running, 1 interrupted, 1 left nothing)" in page
    write_jobs(tmp_path / "none", [])
    assert "0 jobs: none" in page_of(tmp_path / "none")[0]


def test_a_hundred_jobs_are_quick(tmp_path):
    write_large_sweep(tmp_path, micro_batches=7)
    began = time.monotonic()
    page, data = page_of(tmp_path)
    assert time.monotonic() - began < 5
    assert len(data["jobs"]) == 105
    assert len(page) < 2_000_000


def test_the_end_of_a_sweep_reports_and_tells_wandb(tmp_path, capsys, logged):
    write_finished_sweep(tmp_path)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}, "launcher": {"_target_": "x"}}})
    SweepReport().on_multirun_end(config)
    assert logged == [tmp_path]
    assert (tmp_path / "report.html").exists()
    assert "Use job 2" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", [{"node_rank": 1}, {}])
def test_no_report_where_the_launcher_left_no_sweep_or_on_a_second_node(tmp_path, capsys, logged, launcher):
    folder = tmp_path / "sweep"
    folder.mkdir()
    if launcher:
        write_finished_sweep(folder)
    SweepReport().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}, "launcher": launcher}}))
    assert (logged, capsys.readouterr().out) == ([], "")
    assert not (folder / "report.html").exists()


def test_a_report_that_fails_is_a_note_and_leaves_its_traceback(tmp_path, capsys, monkeypatch, logged):
    write_finished_sweep(tmp_path)
    (tmp_path / "report.html").mkdir()
    report.finish(tmp_path)
    out, err = capsys.readouterr()
    assert err == ""
    assert "Use job 2" in out  # what can be told is told all the same
    note = out.splitlines()[-2]
    assert note.startswith("  note: the report is not complete (IsADirectoryError: ")
    assert note.endswith(f"python -m shardlab.sweep.report {tmp_path}")
    assert "Traceback" in (tmp_path / "report_error.log").read_text()


def test_what_wandb_says_is_a_note(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(wandb_summary, "log_summary", lambda folder: "see the W&B run of the sweep: offline")
    report.finish(write_finished_sweep(tmp_path))
    assert capsys.readouterr().out.endswith("  note: see the W&B run of the sweep: offline\n\n")
