"""`mode=plan`: plans the run that a config describes, shows the plan, and writes `plan.json`."""

import math
import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.nn as nn
from omegaconf import DictConfig, OmegaConf

from shardlab.build import make_model
from shardlab.config import Config, Fit, check_offload, parse, typed
from shardlab.errors import ConfigError
from shardlab.files import write_json
from shardlab.models.checks import check_data
from shardlab.planner.changes import Candidate, Change, candidates, change_of, composed_with
from shardlab.planner.cluster import ClusterConfig, ClusterDevice, resolve
from shardlab.planner.plan import Plan, PlannedPeak, make_plan, plan_with_record
from shardlab.planner.screen import GROUPS, ranks_of, show_changes, show_plan
from shardlab.planner.search import largest_that_fits, micro_batches, sequence_lengths
from shardlab.planner.states import states_of
from shardlab.planner.workers import Workers
from shardlab.run_folder import RunFolder, Status
from shardlab.telemetry import Ledger
from shardlab.telemetry.prediction import Prediction
from shardlab.telemetry.timeline import write_timeline
from shardlab.tracking import format_gib

FIT_KEYS = {Fit.micro_batch: "train.micro_batch", Fit.seq_len: "data.seq_len"}
MAX_WORKERS = 8  # processes that plan changes; each takes some 0.3 GiB
# Changes are begun for as long as the plan or the search took beyond the first of these, within the other two.
CHANGES_SECONDS = (1.5, 0.5, 10.0)
# Shown where `plan.changes` leaves it open: so many, and none where a run takes less than this part of the memory.
CHANGES, WORTH_A_CHANGE = 3, 0.1


def plan(cfg: DictConfig, *, folder: RunFolder, choices: Mapping[str, str], in_sweep: bool = False) -> dict[str, Any]:
    """Plans rank 0 of a run.

    Args:
        cfg: what Hydra composed over the schema; its `cluster` says for how many ranks, and of what kind.
        folder: of this job.
        choices: the name of the choice for each config group.
        in_sweep: whether it is one of many plans, which other processes make meanwhile: changes and a timeline are
            then left out, unless they are asked for.

    Returns:
        The summary, as in `summary.json`.

    Raises:
        ConfigError: for a mistake in the config.
    """
    cfg = _possible(typed(cfg))
    config, cluster = _read(cfg)
    folder.check_unused()
    folder.write_config(config)
    print(f"  planning for {cluster.world_size} x {cluster.name or cluster.device.name} ...", flush=True)
    began = time.monotonic()
    by_itself = 0 if in_sweep else CHANGES
    wanted, fit = by_itself if config.plan.changes is None else config.plan.changes, None
    with Workers(_attempt, min(cores() - 1, MAX_WORKERS) if wanted and not in_sweep else 0) as workers:
        # What follows takes seconds: the workers begin before it.
        tasks = _tasks(cfg, config, cluster, choices) if wanted else []
        waiting = workers.start(tasks) if cfg.plan.fit is None else []
        model = make_model(config.model)
        check_data(model, tokens_per_sample=config.data.get("seq_len"), vocab_size=config.data.get("vocab_size"))
        if cfg.plan.fit is None:
            made, ledger = plan_with_record(config, cluster)
        else:
            fit = _search(cfg, cluster, model)
            cfg, made, ledger = _with(cfg, fit.key, fit.planned), fit.plan, fit.ledger
            config = _parse(cfg, cluster)
            given = (f"{fit.key}={fit.planned}",)
            tasks = waiting = _tasks(cfg, config, cluster, choices, given) if wanted else []
        states = states_of(config, model, world_size=cluster.world_size)
        record = {
            **made.to_dict(),
            "states": states and {f"{name}_bytes": nbytes for name, nbytes in asdict(states).items()},
            "fit": fit and {"key": fit.key, "value": fit.value, "tried": {str(v): n for v, n in fit.tried.items()}},
            "changes": [],
        }
        summary = _summary(record)
        file = _write(record, folder)
        if fit:
            folder.write_config(config)
        folder.write_summary(summary)
        verdict = fit.verdict if fit else None
        if config.plan.timeline or (config.plan.timeline is None and not in_sweep):
            _write_timeline(folder, made, ledger, cluster, choices)
        show_plan(made, config, cluster, states=states, fit=verdict, choices=choices, file=str(file))
        if wanted and (config.plan.changes or _is_worth_a_change(made)):
            seconds = time.monotonic() - began if config.plan.changes is None else None
            changes, done = _plan_changes(workers, waiting, made, seconds)
            best = [change for change in changes if change.saves_bytes > 0][:wanted]
            _write(record | {"changes": [asdict(change) for change in best]}, folder)
            show_changes(best, planned=len(changes), left=len(tasks) - done)
    return summary


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": Status.completed.value,
        "error": None,
        "world_size": record["world_size"],
        "plan": Prediction.of_plan(record).to_summary(),
    }


def _write(record: Mapping[str, Any], folder: RunFolder) -> Path:
    file = folder.path / "plan.json"
    write_json(file, record)
    return file


def _write_timeline(
    folder: RunFolder, made: Plan, ledger: Ledger, cluster: ClusterConfig, choices: Mapping[str, str]
) -> None:
    run = " ".join(f"{group}={choices[group]}" for group in GROUPS if choices.get(group))
    peak_bytes, note = made.peak.allocated_bytes, ""
    if more_bytes := peak_bytes - ledger.peak().bytes:
        note = (
            f"The planned peak of {format_gib(peak_bytes)} counts {format_gib(more_bytes)} more: whole blocks of the "
            "caching allocator, and what it holds for cuBLAS."
        )
    write_timeline(folder.timeline_file, ledger, title=f"Planned: {run} on {ranks_of(made, cluster)}", note=note)


@dataclass(frozen=True)
class _Fit:
    """What a search found."""

    key: str
    value: int | None  # the largest that fits; None if even the smallest does not
    planned: int  # the value, or else the smallest
    plan: Plan  # of it
    ledger: Ledger
    verdict: str
    tried: Mapping[int, int]  # bytes that values need


def _read(cfg: DictConfig) -> tuple[Config, ClusterConfig]:
    cluster = _cluster(cfg)
    return _parse(cfg, cluster), cluster


def _cluster(cfg: DictConfig) -> ClusterConfig:
    given: ClusterConfig = OmegaConf.to_object(cfg.cluster)  # type: ignore[assignment]
    return resolve(given, allow_cuda=cfg.device.name != "cpu")


def _parse(cfg: DictConfig, cluster: ClusterConfig) -> Config:
    config = parse(cfg, world_size=cluster.world_size, nodes=cluster.nodes or 1)
    check_offload(config, on_cpu=cluster.device is ClusterDevice.cpu)
    return config


def _with(cfg: DictConfig, key: str, value: int) -> DictConfig:
    changed = cfg.copy()
    OmegaConf.update(changed, key, value)
    return changed


# ---- plan.fit


def _values(cfg: DictConfig, cluster: ClusterConfig, model: nn.Module | None = None) -> Sequence[int]:
    """The values that `plan.fit` has to choose from; `model` is needed for sequence lengths."""
    if cfg.plan.fit is Fit.seq_len:
        return sequence_lengths(getattr(model, "max_seq_len", None))
    return micro_batches(
        global_batch=cfg.train.global_batch,
        accumulation_steps=cfg.accumulation.steps,
        world_size=cluster.world_size,
    )


def _possible(cfg: DictConfig) -> DictConfig:
    """The config with a micro-batch to begin a search with, where the given one contradicts `train.global_batch`."""
    if cfg.plan.fit is not Fit.micro_batch:
        return cfg
    values = _values(cfg, _cluster(cfg))
    nearest = values[max(0, bisect_right(values, cfg.train.micro_batch) - 1)]
    return _with(cfg, FIT_KEYS[Fit.micro_batch], nearest)


def _search(cfg: DictConfig, cluster: ClusterConfig, model: nn.Module) -> _Fit:
    """Plans values of the key that `plan.fit` names until the largest that fits is known."""
    key, capacity = FIT_KEYS[cfg.plan.fit], cluster.usable_bytes
    start = OmegaConf.select(cfg, key)
    if capacity is None:
        raise ConfigError(
            f"plan.fit={cfg.plan.fit.name} needs a capacity, which cluster={cluster.name} lacks: choose a cluster that "
            "has one, e.g. cluster=h100_80gb, or set cluster.memory_gib"
        )
    if start is None:
        raise ConfigError(f"plan.fit={cfg.plan.fit.name}: the data has no {key}; use plan.fit=micro_batch")
    values, plans = _values(cfg, cluster, model), dict[int, tuple[Plan, Ledger]]()

    def needed_bytes(value: int) -> int:
        plans[value] = plan_with_record(_parse(_with(cfg, key, value), cluster), cluster)
        made = plans[value][0]
        fit = "does not fit" if not made.fits else "just fits" if made.peak.alloc_retries else "fits"
        print(f"  {f'{key}={value}':<24}  {format_gib(made.peak.needed_bytes):>10}  {fit}", flush=True)
        return made.peak.needed_bytes

    value, tried = largest_that_fits(needed_bytes, capacity, values, start=start)
    planned = values[0] if value is None else value
    if value is None:
        verdict = f"not even {key}={planned} fits"
    elif value == values[-1]:
        limit = "model.max_seq_len" if cfg.plan.fit is Fit.seq_len else f"train.global_batch={cfg.train.global_batch}"
        verdict = f"{key}={value}: all that {limit} allows"
    else:
        following = next(v for v in sorted(tried) if v > value)
        verdict = f"{key}={value} is the largest that fits; {following} takes {format_gib(tried[following])}"
    return _Fit(key, value, planned, *plans[planned], verdict, tried)


# ---- changes


@dataclass(frozen=True)
class _Task:
    """A change to plan."""

    candidate: Candidate
    given: tuple[str, ...]  # overrides without it: what a search found


def _tasks(
    cfg: DictConfig,
    config: Config,
    cluster: ClusterConfig,
    choices: Mapping[str, str],
    given: tuple[str, ...] = (),
) -> list[_Task]:
    return [_Task(candidate, given) for candidate in candidates(config, cluster, composed=cfg, groups=choices)]


def _attempt(task: _Task) -> PlannedPeak | None:
    """The peak with a change; None where it cannot be composed or planned, so that there is nothing to propose."""
    try:
        config, cluster = _read(typed(composed_with(task.given, task.candidate.overrides)))
        return make_plan(config, cluster).peak
    except Exception:
        return None


def _plan_changes(
    workers: Workers[_Task, PlannedPeak | None], tasks: Sequence[_Task], base: Plan, seconds: float | None
) -> tuple[list[Change], int]:
    """Plans changes. Returns those that could be planned, the best first, and how many were tried.

    Args:
        workers: that plan them beside this process.
        tasks: that are not given to them yet.
        base: the plan without changes.
        seconds: that this took, beside which the changes are to take little time; None = all are planned.
    """
    peak, now = base.peak, time.monotonic()
    unused_bytes = peak.fragmentation_bytes or 0
    tasks = sorted(tasks, key=lambda task: task.candidate.expected_bytes(peak.breakdown, unused_bytes), reverse=True)
    begin_seconds = wait_seconds = math.inf
    if seconds is not None:
        free, least, most = CHANGES_SECONDS
        begin_seconds = min(max(seconds - free, least), most)
        # A change takes as long as the plan, and twice that beside another one.
        wait_seconds = begin_seconds + min(2 * seconds, most)
    done = list(workers.run(tasks, start_until=now + begin_seconds, wait_until=now + wait_seconds))
    changes = [change_of(task.candidate, peak, base) for task, peak in done if peak is not None]
    return sorted(changes, key=lambda change: change.saves_bytes, reverse=True), len(done)


def _is_worth_a_change(made: Plan) -> bool:
    return made.capacity_bytes is None or made.peak.needed_bytes > WORTH_A_CHANGE * made.capacity_bytes


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
