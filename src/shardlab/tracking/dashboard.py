"""Builds the project's workspace in Weights & Biases: sections as the metrics are named, and a headline above them.

    python -m shardlab.tracking.dashboard --entity my-team --project shardlab
    python -m shardlab.tracking.dashboard --json workspace.json    # only writes what would be saved, without an account

Needs the extra `dashboard`: `pip install -e ".[dashboard]"`. Each call saves a view of its own, beside those there are.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.errors import ConfigError
from shardlab.tracking.wandb_run import is_logged_in, quiet_wandb, reason_of

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "shardlab"  # of the view
X_AXIS = "progress/tokens"
STRATEGY = "sharding.strategy"  # the key of the config that runs are grouped by

# What the headline plots: one point a strategy (W&B shows the mean of the runs of a group), `<metric>.<kind>` as
# W&B's summary has it.
MEMORY, THROUGHPUT = "memory/allocated_peak_gib.max", "perf/tokens_per_s.mean"


@dataclass(frozen=True)
class Lines:
    """A panel of curves over `X_AXIS`."""

    title: str
    metrics: Sequence[str]
    log_y: bool = False


# Every metric that the trainer logs, in the section that its name begins with.
SECTIONS: Mapping[str, Sequence[Lines]] = {
    "train": [
        Lines("loss (nats)", ["train/loss"]),
        Lines("perplexity", ["train/perplexity"], log_y=True),
        Lines("accuracy", ["train/accuracy"]),
        Lines("gradient norm", ["train/grad_norm"], log_y=True),
        Lines("learning rate", ["train/lr"]),
        Lines("loss scale (fp16)", ["train/loss_scale"], log_y=True),
        Lines("skipped steps (fp16)", ["train/skipped_steps"]),
    ],
    "eval": [
        Lines("held-out loss (nats)", ["eval/loss"]),
        Lines("held-out perplexity", ["eval/perplexity"], log_y=True),
        Lines("held-out accuracy", ["eval/accuracy"]),
    ],
    "perf": [
        Lines("tokens/s, all ranks", ["perf/tokens_per_s"]),
        Lines("tokens/s per rank", ["perf/tokens_per_s_per_rank"]),
        Lines("step and waiting for data (ms)", ["perf/step_ms", "perf/data_ms"], log_y=True),
        Lines("TFLOP/s per rank", ["perf/tflops_per_rank"]),
        Lines("model FLOPs utilisation", ["perf/mfu"]),
    ],
    "memory": [
        Lines(
            "peaks per rank (GiB)",
            ["memory/allocated_peak_gib", "memory/active_peak_gib", "memory/reserved_peak_gib"],
        ),
        Lines(
            "what is kept per rank (GiB)",
            ["memory/parameters_gib", "memory/gradients_gib", "memory/optimizer_gib", "memory/activations_gib"],
        ),
        Lines("host memory per rank (GiB)", ["memory/host_rss_gib"]),
        Lines("retried allocations, and failed ones", ["memory/alloc_retries", "memory/ooms"]),
    ],
    "comm": [
        Lines(
            "communicated per rank and step (GiB)",
            ["comm/all_gather_gib", "comm/reduce_scatter_gib", "comm/all_reduce_gib"],
        ),
    ],
    "plan": [
        Lines("predicted peaks per rank (GiB)", ["plan/allocated_peak_gib", "plan/reserved_peak_gib"]),
        Lines("prediction above measurement (%)", ["plan/error_pct"]),
    ],
    "progress": [
        Lines("steps", ["progress/step"]),
        Lines("samples", ["progress/samples"]),
        Lines("tokens", ["progress/tokens"]),
    ],
}


def make_workspace(*, entity: str, project: str) -> "Workspace":
    """Makes the workspace; nothing is sent anywhere.

    Args:
        entity: user or team.
        project: of the runs.

    Raises:
        ConfigError: where the package is missing.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
        from wandb_workspaces import expr
    except ImportError as error:
        raise ConfigError('the dashboard needs wandb-workspaces: pip install -e ".[dashboard]"') from error

    def lines(panel: Lines, x: str) -> wr.LinePlot:
        return wr.LinePlot(title=panel.title, x=x, y=list(panel.metrics), log_y=panel.log_y or None)

    def bars(title: str, metric: str) -> wr.BarPlot:
        return wr.BarPlot(title=title, metrics=[metric], groupby=wr.Config(STRATEGY))

    headline = ws.Section(
        name="memory against throughput, by strategy",
        is_open=True,
        pinned=True,
        layout_settings=ws.SectionLayoutSettings(columns=3, rows=1),
        panels=[
            wr.ScatterPlot(title="peak per rank (GiB), tokens/s of all ranks", x=MEMORY, y=THROUGHPUT),
            bars("peak per rank (GiB)", MEMORY),
            bars("tokens/s of all ranks", THROUGHPUT),
        ],
    )
    sections = [
        ws.Section(
            name=name,
            is_open=name in ("train", "eval", "perf", "memory"),
            panels=[lines(panel, "Step" if name == "progress" else X_AXIS) for panel in panels],
        )
        for name, panels in SECTIONS.items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[headline, *sections],
        settings=ws.WorkspaceSettings(x_axis=X_AXIS, group_by_prefix="first", max_runs=50),
        runset_settings=ws.RunsetSettings(
            filters=expr.And(expr.Metric("JobType") != "sweep"),  # the runs alone, not what sums up a sweep
            groupby=[expr.Config(STRATEGY)],
            pinned_columns=[f"summary:{MEMORY}", f"summary:{THROUGHPUT}", "summary:train/loss.last"],
        ),
    )


def specification(workspace: "Workspace") -> dict[str, Any]:
    """What W&B would store of a workspace, as plain JSON."""
    view = workspace._to_model()  # what `save` sends; there is no public way to see it before
    return json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))


def save(*, entity: str | None, project: str) -> str:
    """Saves the workspace. Returns its address.

    Raises:
        ConfigError: without the package, or without an account.
    """
    make_workspace(entity="", project=project)  # says first where the package is missing
    if not is_logged_in():
        raise ConfigError(
            "the dashboard is saved in W&B, and you are not logged in: run `wandb login`, or name a file with --json"
        )
    entity = entity or quiet_wandb().Api().default_entity
    if not entity:
        raise ConfigError("your W&B account has no default entity: name a user or team with --entity")
    return make_workspace(entity=entity, project=project).save().url


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 1 where W&B fails, 2 for what the user can put right."""
    parser = argparse.ArgumentParser(prog="python -m shardlab.tracking.dashboard", description=__doc__.split("\n")[0])
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY"), help="user or team; default: your own")
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "shardlab"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the workspace there instead of saving it")
    given = parser.parse_args(arguments)
    try:
        if given.json:
            workspace = make_workspace(entity=given.entity or "", project=given.project)
            given.json.write_text(json.dumps(specification(workspace), indent=2) + "\n")
            print(given.json)
        else:
            print(save(entity=given.entity, project=given.project))
    except (ConfigError, OSError) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except Exception as error:  # W&B's own, of many classes
        print(f"error: W&B does not take the dashboard: {reason_of(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
