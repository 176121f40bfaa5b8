"""Plots of a sweep as plotly figures, for W&B; `report.html` draws its own."""

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
    bars = []  # job, kind, breakdown
    for row in results.rows:
        job = results.job(row["job"])
        measured = (job.summary.get("memory") or {}).get("breakdown")
        predicted = ((job.plan or {}).get("peak") or {}).get("breakdown")
        bars += [
            (f"job {row['job']}", kind, sizes) for kind, sizes in (("measured", measured), ("predicted", predicted))
        ]
    bars = [bar for bar in bars if bar[2]]
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
