"""What the screen says of a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.config import Config
from shardlab.planner.changes import Change
from shardlab.planner.cluster import ClusterConfig
from shardlab.planner.plan import Plan
from shardlab.planner.states import ModelStates
from shardlab.telemetry import WINDOW_STEPS
from shardlab.tracking import format_batch, format_gib

Rows = Sequence[tuple[str, str]]
GROUPS = ("model", "sharding", "precision", "optimizer", "activation")  # that the screen names
HOLDERS = 3  # modules or units that a line names


def show_plan(
    made: Plan,
    config: Config,
    cluster: ClusterConfig,
    *,
    states: ModelStates | None,
    fit: str | None,
    choices: Mapping[str, Any],
    file: str,
) -> None:
    """Prints the verdict, what is planned, and what the peak consists of.

    Args:
        made: the plan.
        config: of the run.
        cluster: resolved.
        states: by the closed formula, where it knows the optimizer.
        fit: what a search found, if there was one.
        choices: the name of the choice for each config group.
        file: where the plan was written.
    """
    peak = made.peak
    train, steps, seq_len = config.train, config.accumulation.steps, config.data.get("seq_len")
    batch = format_batch(train.micro_batch, steps or 1, made.world_size)
    where = f"in {peak.phase}" + (f" of {peak.module}" if peak.module else "")
    rows = [("plan", _verdict(made, cluster, steps=min(WINDOW_STEPS, train.steps)))]
    if fit:
        rows.append(("fit", fit))
    if states is not None:
        sizes = {"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer}
        kept = "in host memory" if config.sharding.cpu_offload else "the floor"
        parts = ", ".join(f"{name} {format_gib(nbytes)}" for name, nbytes in sizes.items())
        rows.append(("model states", f"{format_gib(states.total)}: {parts} ({kept})"))
    rows += [
        *((group, choices[group]) for group in GROUPS if choices.get(group)),
        ("batch", batch + (f", {seq_len} tokens each" if seq_len else "")),
        ("peak allocated", f"{format_gib(peak.allocated_bytes)}, {where}"),
    ]
    if peak.reserved_bytes is not None:
        lost = format_gib(peak.fragmentation_bytes or 0)
        rows.append(("peak reserved", f"{format_gib(peak.reserved_bytes)}, of which {lost} lost to fragmentation"))
    rows += _table(peak.breakdown, peak.allocated_bytes)
    rows += [(label, _largest(sizes)) for label, sizes in (
        ("activations of", peak.activations), ("unsharded in", peak.unsharded)
    ) if sizes]  # fmt: skip
    if made.host_peak_bytes > 1 << 20:
        rows.append(("host memory", format_gib(made.host_peak_bytes)))
    rows += [
        (name.removesuffix("_bytes").replace("_", "-"), f"{format_gib(nbytes)} per rank and step")
        for name, nbytes in made.comm.items()
        if nbytes
    ]
    rows += [("planned in", f"{made.wall_s:.1f} s"), ("file", file)]
    width = max(len(label) for label, _ in rows)
    print("".join(f"  {label.ljust(width)}  {text}\n" for label, text in rows), flush=True)


def show_changes(changes: Sequence[Change], *, planned: int, left: int) -> None:
    """Prints the changes that save most.

    Args:
        changes: to show.
        planned: how many were planned.
        left: how many were not, for want of time.
    """
    rows = [
        (
            " ".join(change.overrides),
            format_gib(change.allocated_bytes if change.reserved_bytes is None else change.reserved_bytes),
            f"saves {format_gib(change.saves_bytes)}",
            {True: "fits", False: "does not fit", None: ""}[change.fits],
            change.note,
        )
        for change in changes
    ]
    count = f"{planned} change{'s' if planned != 1 else ''} planned" + (
        f", {left} more not in time: plan.changes={planned + left} plans all" if left else ""
    )
    print(f"  {'what would save most' if rows else 'no change found that saves memory'} ({count})")
    overrides, sizes, *others = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else [0, 0]
    for change, size, *texts in rows:
        cells = [change.ljust(overrides), size.rjust(sizes), *map(str.ljust, texts, others)]
        print(("    " + "   ".join(cells)).rstrip())
    print(flush=True)


def _verdict(made: Plan, cluster: ClusterConfig, *, steps: int) -> str:
    peak, ranks = made.peak, ranks_of(made, cluster)
    if made.capacity_bytes is None or made.headroom_bytes is None:
        return f"{format_gib(peak.needed_bytes)} on each of {ranks}"
    fits = f"fits, with {format_gib(made.headroom_bytes)} to spare"
    if peak.alloc_retries:
        times = "once" if peak.alloc_retries == 1 else f"{peak.alloc_retries} times"
        within = "the step" if steps == 1 else f"{steps} steps"
        fits = f"just fits: cached memory must be released {times} in {within}, which takes time"
    lacks = f"does not fit: {format_gib(-made.headroom_bytes)} too much"
    of = f"{format_gib(peak.needed_bytes)} of {format_gib(made.capacity_bytes)} on each of {ranks}"
    return f"{fits if made.fits else lacks} ({of})"


def ranks_of(made: Plan, cluster: ClusterConfig) -> str:
    """How many devices of what kind were planned for."""
    return f"{made.world_size} x {cluster.name or cluster.device.name}"


def _largest(sizes: Mapping[str, int]) -> str:
    first = [f"{name or 'outside of modules'} {format_gib(nbytes)}" for name, nbytes in list(sizes.items())[:HOLDERS]]
    rest = sum(list(sizes.values())[HOLDERS:])
    return ", ".join(first + ([f"{len(sizes) - HOLDERS} others {format_gib(rest)}"] if rest else []))


def _table(breakdown: Mapping[str, int], total_bytes: int) -> Rows:
    sizes = {name: format_gib(nbytes) for name, nbytes in breakdown.items() if nbytes}
    width = max(map(len, sizes.values()), default=0)
    return [
        (f"  {name.replace('_', ' ')}", f"{size.rjust(width)}  {breakdown[name] / total_bytes:4.0%}")
        for name, size in sizes.items()
    ]
