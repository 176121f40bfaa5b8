"""Plots of a sweep as plotly figures, for W&B; `report.html` draws its own."""

from collections.abc import Mapping

import plotly.graph_objects as go

from shardlab.sweep.page import read_curve
from shardlab.sweep.pareto import pareto_front
from shardlab.sweep.results import Results
from shardlab.telemetry.memory import GIB
from shardlab.telemetry.timeline import COLOURS


def throughput_against_memory(results: Results) -> go.Figure:
    """The completed jobs as points, and the Pareto front as a line through some of them."""
    figure = go.Figure(layout={"xaxis_title": "peak memory per rank (GiB)", "yaxis_title": f"{results.unit}/s"})
    for rows, style in ((results.completed, {"mode": "markers"}), (pareto_front(results), {"mode": "lines+markers"})):
        figure.add_scatter(
            x=[(results.peak_bytes(row) or 0) / GIB for row in rows],
            y=[row["perf.tokens_per_s"] for row in rows],
            text=[f"job {row['job']} {results.describe(row)}" for row in rows],
            name="jobs" if style["mode"] == "markers" else "Pareto front",
            **style,
        )
    return figure


def memory_by_category(results: Results) -> go.Figure:
    """What the peak of each job consists of, measured and predicted side by side."""
    bars: list[tuple[str, str, Mapping[str, int]]] = []  # job, kind, bytes by category
    for row in results.rows:
        job, name = results.job(row["job"]), f"job {row['job']}"
        if measured := (job.summary.get("memory") or {}).get("breakdown"):
            bars.append((name, "measured", measured))
        if predicted := ((job.plan or {}).get("peak") or {}).get("breakdown"):
            bars.append((name, "predicted", predicted))
    figure = go.Figure(layout={"barmode": "stack", "yaxis_title": "peak memory per rank (GiB)"})
    for category, colour in COLOURS.items():
        figure.add_bar(
            x=[[job for job, _, _ in bars], [kind for _, kind, _ in bars]],
            y=[sizes.get(category.value, 0) / GIB for _, _, sizes in bars],
            name=category.value.replace("_", " "),
            marker_color=colour,
        )
    return figure


def loss_curves(results: Results) -> go.Figure:
    """The training loss of each job."""
    figure = go.Figure(layout={"xaxis_title": "optimizer steps", "yaxis_title": "training loss (nats)"})
    for row in results.rows:
        if curve := read_curve(results.job(row["job"])):
            figure.add_scatter(x=curve["step"], y=curve["loss"], name=f"job {row['job']} {results.describe(row)}")
    return figure
