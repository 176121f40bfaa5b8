"""A sweep in Weights & Biases: the group of its jobs, and one run that sums it up."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what takes time to import comes where it is needed: the launcher imports this module
    from shardlab.sweep.results import Results
    from shardlab.tracking.config import WandbConfig

JOB_TYPE = "sweep"


def group_of(folder: Path) -> str:
    """The W&B group of a sweep's runs, where `tracking.wandb.group` names none.

    Args:
        folder: of the sweep.
    """
    folder = folder.resolve()
    return f"sweep {folder.parent.name}/{folder.name}"


def log_summary(folder: Path) -> str | None:
    """Logs one run for the whole sweep, in the group of its jobs: the table, the plots, and the figures that matter.

    Where it goes is what the jobs' `tracking.wandb` says; the files of an offline run lie in `wandb/` of the folder.

    Args:
        folder: of the sweep.

    Returns:
        One line for the user: where the run is, or what went wrong. None where the jobs had W&B disabled, or none of
        them came as far as its config.
    """
    try:
        return _log(folder)
    except Exception as error:  # W&B may fail in any way
        from shardlab.errors import describe

        return f"W&B has no summary of the sweep: {describe(error)}"


def _log(folder: Path) -> str | None:
    cfg = next((cfg for cfg in _configs(folder) if not _is_disabled(cfg)), None)
    if cfg is None:
        return None
    import wandb

    from shardlab.sweep import plots
    from shardlab.sweep.results import read_results
    from shardlab.tracking.wandb_run import WandbRun

    results, notices = read_results(folder), list[str]()
    run = WandbRun(
        replace(cfg, group=cfg.group or group_of(folder), job_type=JOB_TYPE, name=group_of(folder)),
        folder,
        config={key: getattr(results.record, key) for key in ("command", "mode", "machine", "torch")},
        tags=[],
        notice=notices.append,
    )
    run.start()
    rows = [[row[column] for column in results.columns] for row in results.rows]
    # A key's values may be numbers in one job and names in another.
    run.show({"results": wandb.Table(columns=[*results.columns], data=rows, allow_mixed_types=True)})
    for plot in (plots.throughput_against_memory, plots.memory_by_category, plots.loss_curves):
        run.show({plot.__name__: wandb.Plotly(plot(results))})
    run.finish(_headlines(results))
    where = [f"{label} the W&B run of the sweep: {value}" for label, value in run.where()]
    return "; ".join([*(notice for notice in notices if "W&B run http" not in notice), *where])


def _configs(folder: Path) -> Iterator["WandbConfig"]:
    """`tracking.wandb` of the jobs that got as far as writing their config."""
    from omegaconf import OmegaConf

    from shardlab.sweep.records import read_sweep
    from shardlab.tracking.config import WandbConfig

    for job in read_sweep(folder)[1]:
        file = job.folder / "config.yaml"
        if file.exists():
            yield OmegaConf.to_object(  # type: ignore[misc]
                OmegaConf.merge(OmegaConf.structured(WandbConfig), OmegaConf.load(file).tracking.wandb)
            )


def _is_disabled(cfg: "WandbConfig") -> bool:
    from shardlab.tracking.config import WandbMode
    from shardlab.tracking.wandb_run import wandb_mode

    return wandb_mode(cfg) is WandbMode.disabled


def _headlines(results: "Results") -> dict[str, Any]:
    """What W&B's run table shows of a sweep: what came of its jobs, the fastest of them, and the one to use."""
    from shardlab.run_folder import Status
    from shardlab.sweep.pareto import advise

    counts = Counter(row["status"] for row in results.rows)
    advice, fastest = advise(results), next(iter(results.completed), None)
    status = Status.failed if counts[Status.failed.value] else Status.completed
    return {
        "status": (Status.interrupted if results.record.interrupted else status).value,
        "jobs": {"total": len(results.record.jobs), **counts},
        "best": fastest
        and {
            "job": fastest["job"],
            "overrides": results.describe(fastest),
            "tokens_per_s": fastest["perf.tokens_per_s"],
            "peak_bytes": results.peak_bytes(fastest),
        },
        "advice": {"text": advice.text, "command": advice.command},
    }
