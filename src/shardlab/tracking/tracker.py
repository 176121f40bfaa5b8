"""What the trainer talks to: one object on every rank, which writes on rank 0 and is silent elsewhere."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.tracking.config import Display, TrackingConfig, WandbMode
from shardlab.tracking.metrics_file import MetricsFile

if TYPE_CHECKING:
    from shardlab.tracking.console import Console
    from shardlab.tracking.wandb_run import WandbRun

logger = logging.getLogger(__name__)
Rows = Sequence[tuple[str, str]]  # label, value


@dataclass(frozen=True)
class RunHeader:
    """What the display says before the first step."""

    rows: Rows  # what runs
    total_steps: int
    notices: Sequence[str] = field(default_factory=list)  # what the user may not expect


class Tracker:
    """Hands rows of metrics, progress and notices to whatever is attached: nothing, on ranks above 0.

    Whatever goes wrong in here is said once and does not stop the run.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.console: Console | None = None
        self.metrics: MetricsFile | None = None
        self.wandb: WandbRun | None = None
        self._said: set[str] = set()
        self._held: list[str] | None = None  # notices to be shown below the header
        self._failed: set[str] = set()
        self._finished = False

    def start(self, header: RunHeader, *, late_rows: Callable[[], Rows] = tuple) -> None:
        """Shows what runs, and opens the W&B run.

        Args:
            header: of the display.
            late_rows: more rows of the header, which take a while: called when all else is done. What it raises passes.
        """
        self._note_rows(header.rows)
        if self.console:
            self._try(self.console, self.console.start, header)
        rows: Rows = ()
        self._held = []
        try:
            for text in header.notices:
                self.notice(text)
            if self.wandb:
                self._try(self.wandb, self.wandb.start)
            rows = late_rows()
        finally:
            self._note_rows(rows)
            if self.console:
                self._try(self.console, self.console.begin, rows)
            held, self._held = self._held, None
            for text in held:
                self._show_notice(text)

    def log(self, row: Mapping[str, float | int], step: int) -> None:
        """Writes one row of metrics, which were reduced over ranks.

        Args:
            row: metrics by the names of the design (`train/loss`, `perf/step_ms`, `progress/tokens`, ...).
            step: optimizer steps done.
        """
        for sink in (self.metrics, self.wandb, self.console):
            if sink and not self._finished:
                self._try(sink, sink.log, row, step)

    def advance(self, step: int) -> None:
        """Moves the progress bar; cheap enough for every step."""
        if self.console and not self._finished:
            self._try(self.console, self.console.advance, step)

    def notice(self, text: str) -> None:
        """Says something on the screen and in the log, once."""
        if text in self._said or not (self.console or self.metrics):
            return
        self._said.add(text)
        logger.info(text)
        if self._held is None:
            self._show_notice(text)
        else:
            self._held.append(text)

    def finish(self, summary: Mapping[str, Any], *, table: Rows) -> None:
        """Ends all that was started; a second call does nothing.

        Args:
            summary: as in summary.json; its `status` decides how the W&B run ends.
            table: what came of the run, for the screen.
        """
        if self._finished:
            return
        self._finished = True
        try:
            if self.console:  # the terminal first: what follows may take a while, or be interrupted
                self._try(self.console, self.console.stop)
            if self.metrics:
                self._try(self.metrics, self.metrics.finish)
            if self.wandb:
                self._try(self.wandb, self.wandb.finish, summary)
        finally:
            self._note_rows([("status", str(summary.get("status"))), *(row for row in table if row[0] != "status")])
            if self.console:
                self._try(self.console, self.console.close, summary, table, self._where())

    def _show_notice(self, text: str) -> None:
        if self.console:
            self._try(self.console, self.console.notice, text)

    def _note_rows(self, rows: Rows) -> None:
        """Rows of the display, in the log file too."""
        if self.metrics:
            for label, value in rows:
                logger.info("%s: %s", label, value)

    def _where(self) -> Rows:
        return [("files", str(self.run_dir)), *(self.wandb.where() if self.wandb else [])]

    def _try(self, sink: "Console | MetricsFile | WandbRun", call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            if sink.name not in self._failed:
                self._failed.add(sink.name)
                logger.info("%s failed", sink.name, exc_info=True)
                self.notice(f"{sink.name} fails ({type(error).__name__}: {error}); the run goes on without")


def make_tracker(
    cfg: TrackingConfig, run_dir: Path, *, config: Mapping[str, Any], tags: Sequence[str], rank: int
) -> Tracker:
    """Makes the tracker of one rank.

    Args:
        cfg: the config node `tracking`.
        run_dir: the run folder.
        config: the run's whole config, resolved, for W&B.
        tags: what W&B can filter runs by, as `sharding=full_shard`.
        rank: 0 tracks; the others get a tracker that does nothing.
    """
    tracker = Tracker(run_dir)
    if rank != 0:
        return tracker
    logging.raiseExceptions = False  # a log file on a full disk would print a traceback for each record
    tracker.metrics = MetricsFile(run_dir / "metrics.jsonl", tracker.notice)
    # Imported here: rich and wandb take time, and most ranks need neither.
    if Display(cfg.display) is not Display.none:
        from shardlab.tracking.console import Console

        tracker.console = Console(Display(cfg.display))
    from shardlab.tracking.wandb_run import WandbRun, wandb_mode

    if wandb_mode(cfg.wandb) is not WandbMode.disabled:
        tracker.wandb = WandbRun(cfg.wandb, run_dir, config=config, tags=list(tags), notice=tracker.notice)
    return tracker
