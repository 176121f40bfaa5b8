"""`report.html`: the results of a sweep as a page that needs nothing but itself.

`report.html`, `report.css` and `report.js` beside this file are what it is made from.
"""

import html
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from shardlab.run_folder import Status
from shardlab.sweep.page_table import table_of
from shardlab.sweep.pareto import Advice, advise, pareto_front
from shardlab.sweep.records import Job
from shardlab.sweep.results import COMMUNICATION, Results, Row, log_tail
from shardlab.telemetry.timeline import COLOURS, write_html
from shardlab.tracking.formats import format_seconds

CURVE_POINTS = 200  # of a job's loss
LOG_LINES = 20  # of a job that did not complete
_COLLECTIVE_COLOURS = ("#0072B2", "#E69F00", "#009E73")  # of Okabe and Ito, as `COLOURS`
_PROGRESS = ("tokens", "samples", "step")  # `progress/...`: what losses are drawn over, the first that rows have


def write_page(results: Results) -> None:
    """Writes `report.html` into the sweep's folder; it holds plotly.js too, about 5 MB."""
    advice, counts = advise(results), results.counts()
    front = {row["job"] for row in pareto_front(results)}
    data = json.dumps(_data(results, front) | {"advised": advice.job}, separators=(",", ":"))
    parts = {
        "TITLE": f"Sweep of {html.escape(counts)}",
        "COUNTS": html.escape(counts),
        "ADVICE": html.escape(advice.text),
        "COMMAND": _command(advice),
        "COMPARISON": "Predicted peak memory" if results.is_plan else "Throughput against peak memory",
        "TABLE": table_of(results, front),
        "STAR": "★ is the Pareto front: no other job is both faster and smaller. " if front else "",
        "FAILURES": _failures(results),
        "RUN": _what_was_run(results),
        "CSS": _asset("report.css"),
        "JS": _asset("report.js"),
        "DATA": data.replace("<", "\\u003c"),
    }
    write_html(results.folder / "report.html", _asset("report.html"), parts)


def _asset(name: str) -> str:
    return importlib.resources.files("shardlab.sweep").joinpath(name).read_text(encoding="utf-8")


# ---- what the page draws


def _data(results: Results, front: set[int]) -> dict[str, Any]:
    """What `report.js` draws; sizes in bytes, jobs in the order in which they are shown."""
    jobs = [results.job(row["job"]) for row in [*results.completed, *results.others]]
    curves = {job.record.number: read_curve(job) for job in jobs}
    progress = next((name for name in _PROGRESS if any(name in curve for curve in curves.values())), "step")
    return {
        "is_plan": results.is_plan,
        "unit": results.unit,
        "progress": {"step": "optimizer steps"}.get(progress, progress),
        "values": {key: list(dict.fromkeys(row[key] for row in results.rows)) for key in _keys(results)},
        "categories": {category.value: colour for category, colour in COLOURS.items()},
        "collectives": dict(zip(map(_collective, COMMUNICATION), _COLLECTIVE_COLOURS, strict=True)),
        "jobs": [
            _drawn(results, row, front) | {"loss": _points(curves[row["job"]], progress)}
            for row in [*results.completed, *results.others]
        ],
    }


def _drawn(results: Results, row: Row, front: set[int]) -> dict[str, Any]:
    job = results.job(row["job"])
    completed = row["status"] == Status.completed.value
    peak = (job.plan or {}).get("peak") or {}
    sizes = {_collective(name): row[name] for name in COMMUNICATION if row[name] is not None}
    return {
        "job": row["job"],
        "status": row["status"],
        "values": {key: row[key] for key in results.varied},
        "label": results.label(row),
        "front": row["job"] in front,
        "tokens_per_s": row["perf.tokens_per_s"] if completed else None,
        "peak_bytes": results.peak_bytes(row) if completed else None,
        "capacity_bytes": row["plan.capacity_bytes"],
        "fits": row["plan.fits"],
        "measured": (job.summary.get("memory") or {}).get("breakdown"),
        "predicted": peak.get("breakdown"),
        "communication": sizes or None,
    }


def _keys(results: Results) -> list[str]:
    """The keys that differ between jobs; first those that differ between jobs that completed."""

    def is_the_same(key: str) -> bool:
        return len({row[key] for row in results.completed}) < 2

    return sorted(results.varied, key=is_the_same)


def _collective(name: str) -> str:
    """The name of a collective in a column's."""
    return name.removeprefix("comm.").removesuffix("_bytes")


def read_curve(job: Job) -> dict[str, list[float]]:
    """The loss of a job over its course, and what had been trained on by then.

    Args:
        job: of which `metrics.jsonl` is read, as far as it goes.

    Returns:
        `loss`, and of the same length `step` and what is known of `tokens` and `samples`; of a long run some points.
    """
    file = job.folder / "metrics.jsonl"
    if not file.exists():
        return {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        rows = [row for line in _some(list(lines)) if (row := _row(line)) and row.get("train/loss") is not None]
    names = [name for name in _PROGRESS[:2] if rows and all(f"progress/{name}" in row for row in rows)]
    if not rows:
        return {}
    return {
        "loss": [row["train/loss"] for row in rows],
        "step": [row["step"] for row in rows],
        **{name: [row[f"progress/{name}"] for row in rows] for name in names},
    }


def _some(lines: list[str]) -> Iterable[str]:
    """Of those with a loss: all if they are few, else some at equal distances, the last among them."""
    lines = [line for line in lines if '"train/loss"' in line]
    every = -(-len(lines) // CURVE_POINTS) or 1
    return lines[::-every][::-1]


def _row(line: str) -> Mapping[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the last one of a run that was killed
        return None


def _points(curve: Mapping[str, list[float]], progress: str) -> dict[str, list[float]] | None:
    return {"x": curve[progress], "y": curve["loss"]} if progress in curve else None


# ---- what the page says


def _command(advice: Advice) -> str:
    commands = [command for command in (advice.command, advice.train_command) if command]
    return "".join(f'<pre class="command">{html.escape(command)}</pre>' for command in commands)


def _failures(results: Results) -> str:
    if not results.others:
        return ""
    entries = "\n".join(_failure(results, row) for row in results.others)
    return f'<section id="failures">\n<h2>What did not complete</h2>\n{entries}\n</section>'


def _failure(results: Results, row: Row) -> str:
    file, lines = log_tail(results.job(row["job"]), LOG_LINES)
    described, reason = html.escape(results.describe(row)), html.escape(row["error"] or "")
    parts = [
        '<div class="failure">',
        f"<h3>job {row['job']}: {html.escape(row['status'])}</h3>",
        f'<p class="note">{described}</p>' if described else "",
        f'<p class="reason">{reason}</p>' if reason else "",
    ]
    if lines:
        tail = html.escape("\n".join(lines))
        where = html.escape(f"{row['folder']}/{file}")
        parts.append(f"<details><summary>the last lines of {where}</summary><pre>{tail}</pre></details>")
    return "".join([*parts, "</div>"])


def _what_was_run(results: Results) -> str:
    record = results.record
    began = datetime.fromtimestamp(record.began).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    if record.ended is None:
        took = "had not ended when this was written"
    else:
        took = format_seconds(record.ended - record.began) + (", interrupted" if record.interrupted else "")
    rows = {
        "command": f"<pre>{html.escape(record.command)}</pre>",
        "mode": html.escape(record.mode),
        "machine": html.escape(record.machine),
        "torch": html.escape(record.torch),
        "began": html.escape(began),
        "took": html.escape(took),
        "folder": html.escape(str(results.folder.absolute())),
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows.items()) + "</dl>"
