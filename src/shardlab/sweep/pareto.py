"""Which jobs of a sweep no other one beats, and which of them to use."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf

from shardlab.sweep.records import Job
from shardlab.sweep.results import Results, Row
from shardlab.tracking.formats import format_gib

# Another job on the front is worth a word where it takes so much less memory (a part of the fastest job's) for no more
# than so much less speed.
MUCH_LESS_MEMORY, LITTLE_LESS_SPEED = 0.25, 0.15
_SAVERS = "a smaller train.micro_batch, activation=full, sharding=full_shard or more ranks"


@dataclass(frozen=True)
class Advice:
    """What to use.

    Attributes:
        text: one sentence.
        job: number of the job to use; None where no job completed.
        command: that runs it by hand.
        train_command: that trains what was planned; None where that does not fit, or the job has trained.
    """

    text: str
    job: int | None = None
    command: str | None = None
    train_command: str | None = None


def pareto_front(results: Results) -> list[Row]:
    """The completed jobs such that no other one is as good in throughput and in peak memory, and better in one.

    Returns:
        Rows, the smallest peak first; jobs that are equal in both are all there. None without a throughput.
    """
    front: list[Row] = []
    for row in sorted(
        (row for row in results.completed if row["perf.tokens_per_s"] and results.peak_bytes(row)),
        key=lambda row: (results.peak_bytes(row), -row["perf.tokens_per_s"]),
    ):
        last = front[-1] if front else None
        faster = last is None or row["perf.tokens_per_s"] > last["perf.tokens_per_s"]
        if faster or (last is not None and _figures(results, row) == _figures(results, last)):
            front.append(row)
    return front


def advise(results: Results) -> Advice:
    """Says which job to use, and why."""
    completed = results.completed
    if not completed:
        return Advice(_nothing_completed(results))
    if completed[0]["perf.tokens_per_s"]:
        return _advice(results, completed[0], _by_speed(results, completed))
    return _by_memory(results, completed)


def _advice(results: Results, row: Row, text: str) -> Advice:
    job = results.job(row["job"])
    trains = results.is_plan and row["plan.fits"] is not False
    train_command = shlex.join(_training(job)) if trains else None
    return Advice(text, row["job"], shlex.join(job.record.command), train_command)


def _training(job: Job) -> list[str]:
    """Trains what a job has planned, on as many ranks, with what `plan.fit` has found."""
    plan = job.plan or {}
    fit, ranks = plan.get("fit") or {}, plan.get("world_size", job.record.world_size)
    config = job.folder / "config.yaml"
    nodes = OmegaConf.select(OmegaConf.load(config), "cluster.nodes") or 1 if config.exists() else 1
    torchrun = ["torchrun", "--nproc-per-node", str(ranks // nodes)]
    if nodes > 1:
        torchrun += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_NODE:29500"]
    _, program, *arguments = job.record.command
    found = [f"{fit['key']}={fit['value']}"] if fit.get("value") else []
    planned = ("mode", "plan.fit", *(key.partition("=")[0] for key in found))
    return [*torchrun, program, *(a for a in arguments if a.partition("=")[0] not in planned), *found]


def _figures(results: Results, row: Row) -> tuple[float, int | None]:
    return row["perf.tokens_per_s"], results.peak_bytes(row)


def _by_speed(results: Results, completed: Sequence[Row]) -> str:
    fastest = completed[0]
    speed, peak = _figures(results, fastest)
    among = f"the fastest of {len(completed)} that completed" if len(completed) > 1 else "the only one that completed"
    text = f"Use {_named(results, fastest)}, {among}: {speed:,.0f} {results.unit}/s"
    if peak is None:
        return f"{text}."
    text += f" with a peak of {format_gib(peak)} per rank"
    smaller = []
    for row in pareto_front(results):
        other_speed, other_peak = _figures(results, row)
        assert other_peak is not None
        saved, lost = 1 - other_peak / peak, 1 - other_speed / speed
        if saved >= MUCH_LESS_MEMORY and lost <= LITTLE_LESS_SPEED:
            smaller.append((saved - lost, saved, lost, row))
    if smaller:
        _, saved, lost, row = max(smaller, key=lambda each: each[0])
        text += f"; {_named(results, row)} takes {100 * saved:.0f} % less memory and is {100 * lost:.0f} % slower"
    return f"{text}."


def _by_memory(results: Results, completed: Sequence[Row]) -> Advice:
    """Where there is no throughput: what fits, and what takes least."""
    sized = [row for row in completed if results.peak_bytes(row)]
    if not sized:
        return Advice(f"{results.counts()}; neither speed nor memory was measured.")
    if results.fit_key and completed[0]["plan.fit.value"]:
        return _advice(results, completed[0], _by_fit(results, completed))
    fitting = [row for row in sized if row["plan.fits"]] if results.is_plan else []
    least = min(fitting or sized, key=lambda row: results.peak_bytes(row) or 0)
    peak, capacity = results.peak_bytes(least) or 0, least["plan.capacity_bytes"]
    size, named = format_gib(peak), _named(results, least)
    total = len(sized)
    if not results.is_plan:
        text = f"No speed was measured: of {total} that completed {named} has the smallest peak, {size} per rank."
    elif fitting:
        of = f" of {format_gib(capacity)}" if capacity else ""
        how_many = "All" if len(fitting) == total else f"{len(fitting)} of"
        verdict = "The only plan fits" if total == 1 else f"{how_many} {total} plans fit"
        text = f"{verdict}: {named} takes least, {size}{of} per rank."
    elif all(row["plan.fits"] is False for row in sized):
        too_much = f"{format_gib(peak - capacity)} more than there is" if capacity else "too much"
        none = "The only plan does not fit" if total == 1 else f"None of {total} plans fits"
        text = f"{none}: {named} takes least, {size} per rank, {too_much}; try {_SAVERS}."
    else:
        text = f"Of {total} plans {named} takes least, {size} per rank; cluster.memory_gib=... tells what fits."
    return _advice(results, least, text)


def _by_fit(results: Results, completed: Sequence[Row]) -> str:
    largest = completed[0]
    peak, capacity = results.peak_bytes(largest), largest["plan.capacity_bytes"]
    among = f", the most of {len(completed)} plans," if len(completed) > 1 else ""
    return (
        f"Use {_named(results, largest)}: it has room for {results.fit_key}={largest['plan.fit.value']}{among} with "
        f"{format_gib(peak or 0)} of {format_gib(capacity)} per rank."
    )


def _nothing_completed(results: Results) -> str:
    statuses = Counter(row["status"] for row in results.others)
    hints = []
    if statuses["oom"] or statuses["killed"]:
        hints.append(f"try {_SAVERS}")
    if statuses["failed"] or statuses["skipped"]:
        hints.append("see the reasons of what failed or was skipped")
    if statuses["running"] or statuses["interrupted"]:
        hints.append("go on with it by sweep.resume=" + shlex.quote(str(results.folder)))
    return "; ".join([f"No job completed ({results.counts()})", *hints]) + "."


def _named(results: Results, row: Row) -> str:
    described = results.describe(row)
    return f"job {row['job']}" + (f" ({described})" if described else "")
