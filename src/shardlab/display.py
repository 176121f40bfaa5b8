"""What the display says of a run: before it, what runs; after it, what came of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardlab.build import Built
from shardlab.config import Config
from shardlab.device import Device
from shardlab.telemetry.prediction import Prediction, error_pct
from shardlab.tracking import RunHeader, format_batch, format_count, format_gib
from shardlab.trainer import Datasets


def header(
    config: Config,
    built: Built,
    datasets: Datasets,
    *,
    device: Device,
    mesh: DeviceMesh,
    choices: Mapping[str, str],
    notices: Sequence[str],
) -> RunHeader:
    """What runs, as labels and texts."""
    parameters = list(built.model.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    train, accumulation, ranks = config.train, config.accumulation, mesh.size()
    shape = " x ".join(str(n) for n in mesh.shape)
    batch = format_batch(train.micro_batch, accumulation.steps or 1, ranks)
    tokens = datasets.tokens_per_sample
    rows = {
        "model": f"{choices.get('model', '')}, {format_count(count)} parameters"
        + (f", {format_count(trained)} of them trained" if trained != count else ""),
        "sharding": f"{config.sharding.strategy.name}, mesh {shape}, {len(built.units) + 1} units",
        "precision": choices.get("precision", ""),
        "optimizer": choices.get("optimizer", ""),
        "activation": config.activation.policy.name,
        "batch": batch + (f", reduce {accumulation.reduce.name}" if accumulation.steps != 1 else ""),
        "data": choices.get("data", "") + (f", {tokens} tokens a sample" if tokens else ""),
        "device": f"{ranks} x {device.name}",
    }
    return RunHeader(rows=list(rows.items()), total_steps=train.steps, notices=list(notices))


def planned_row(prediction: Prediction) -> tuple[str, str]:
    """The row of the header that says what the plan ahead of the run predicts."""
    text = f"{format_gib(prediction.allocated_bytes)} allocated"
    if prediction.reserved_bytes is not None:
        text += f", {format_gib(prediction.reserved_bytes)} reserved"
    if prediction.capacity_bytes is not None:
        text += f" of {format_gib(prediction.capacity_bytes)}"
    verdict = {True: ": fits", False: ": does not fit", None: ""}[prediction.fits]
    return "plan", f"{text} per rank{verdict}"


def closing_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What came of a run, as labels and texts; what was not measured is left out."""
    perf, loss, memory, comm = (summary.get(key) or {} for key in ("perf", "loss", "memory", "comm"))
    plan = summary.get("plan") or {}
    rows = [("status", summary["status"]), ("steps", str(summary.get("steps", 0)))]
    if loss.get("first") is not None:
        rows.append(("loss", f"{loss['first']:.4f} -> {loss['last']:.4f}"))
    if (summary.get("eval") or {}).get("loss") is not None:
        rows.append(("held-out loss", f"{summary['eval']['loss']:.4f}"))
    if perf.get("step_ms"):
        rows += [(f"{perf['unit']}/s", f"{perf['tokens_per_s']:,.0f}"), ("step", f"{perf['step_ms']:,.1f} ms")]
    sizes = {
        "peak allocated": "allocated_peak_bytes",
        "peak reserved": "reserved_peak_bytes",
        "parameters": "parameters_bytes",
        "gradients": "gradients_bytes",
        "optimizer state": "optimizer_bytes",
        "host memory, peak": "host_rss_peak_bytes",
    }
    rows += [
        (label, f"{format_gib(memory[key])} per rank{_beside(plan, key, memory[key])}")
        for label, key in sizes.items()
        if memory.get(key) is not None
    ]
    rows += [
        (f"{name.removesuffix('_bytes').replace('_', '-')}", f"{format_gib(count)} per rank and step")
        for name, count in comm.items()
        if count >= 1024  # less is no gradient, but the count of labels and the norm
    ]
    return rows


def _beside(plan: Mapping[str, Any], key: str, measured: int) -> str:
    """What was planned of a size that was measured."""
    planned = plan.get(key)
    if planned is None:
        return ""
    if plan.get("error_pct") is None or not measured:  # the run ended before all was measured that was planned
        return f" (planned {format_gib(planned)})"
    error = round(error_pct(planned, measured), 1) + 0.0  # which makes 0.0 of -0.0
    return f" (planned {format_gib(planned)}, error {error:.1f} %)"
