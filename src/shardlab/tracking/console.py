"""The screen: what runs, how far it is, what came of it."""

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import rich.console
from rich.console import RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from shardlab.tracking.config import Display
from shardlab.tracking.formats import format_count, format_gib, format_seconds

if TYPE_CHECKING:
    from shardlab.tracking.tracker import RunHeader

REDRAW_SECONDS = 0.5
MEMORY = {"memory/allocated_peak_gib": "peak", "memory/host_rss_gib": "host"}  # the first that a row has is shown
STATUS_STYLE = {"completed": "green", "interrupted": "yellow", "skipped": "yellow"}  # any other is bad news
INDENT = "  "


class Console:
    """A progress bar with a header and a closing table; on what is no terminal, lines without control characters."""

    name = "the display"

    def __init__(self, display: Display):
        self._console = _RichConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)
        # rich takes FORCE_COLOR for a terminal; a bar needs a real one.
        can_redraw = sys.stdout.isatty() and not self._console.is_dumb_terminal
        self._wants_bar = can_redraw and display is Display.auto
        self._bar: Progress | None = None
        self._clock = _Clock()
        self._total = 0
        self._label_width = 0  # of the header
        self._drawn = 0.0

    def start(self, header: "RunHeader") -> None:
        """Prints what runs."""
        self._total = header.total_steps
        self._label_width = max((len(label) for label, _ in header.rows), default=0)
        self._rows(header.rows)

    def begin(self, more: Sequence[tuple[str, str]]) -> None:
        """Prints more rows of the header, and draws the bar."""
        self._rows(more, label_width=self._label_width)
        self._console.print()
        if self._wants_bar:
            self._bar = self._make_bar(digits=len(str(self._total)))
            self._bar.add_task("", total=self._total, stats="", left="")
            self._bar.start()
            self._console.show_cursor()  # never hidden, so that nothing that kills the run can leave it hidden

    def advance(self, step: int) -> None:
        """Moves the bar; draws it now and then."""
        self._clock.tick(step)
        now = time.monotonic()
        if self._bar and now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._draw(step)

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Shows a row's figures: in the bar, or as a line; those of an evaluation always as a line."""
        self._clock.tick(step)
        where = f"step {step:>{len(str(self._total))}}/{self._total}"
        stats, left = _training(row), self._left(step)
        if stats and self._bar:
            self._bar.update(self._bar.task_ids[0], stats=stats)
        elif stats:
            self._line(INDENT.join(part for part in (where, stats, left) if part))
        if evaluation := _evaluation(row):
            self._line(f"{where}{INDENT}{evaluation}")

    def notice(self, text: str) -> None:
        """Prints a line above the bar."""
        self._line(f"note: {text}", style="yellow")

    def stop(self) -> None:
        """Leaves the bar as it is, and the terminal as it was."""
        if self._bar and self._bar.live.is_started:
            self._draw(self._clock.step)
            self._bar.stop()

    def close(
        self, summary: Mapping[str, Any], table: Sequence[tuple[str, str]], where: Sequence[tuple[str, str]]
    ) -> None:
        """Prints the closing table."""
        status = str(summary.get("status", ""))
        rows = [("status", status)]
        if summary.get("error"):
            rows.append(("error", str(summary["error"])))
        rows += [row for row in table if row[0] != "status"]
        self._console.print()
        self._rows(rows, status_style=STATUS_STYLE.get(status, "red"))
        self._console.print()
        self._rows(where, wrap=False)  # paths and commands are there to be copied
        self._console.print()

    def _make_bar(self, digits: int) -> Progress:
        step = f"step {{task.completed:>{digits}.0f}}/{{task.total:.0f}}"
        return _Bar(
            TextColumn(step, markup=False, table_column=Column(no_wrap=True, min_width=6 + 2 * digits)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[stats]}", markup=False),
            TextColumn("{task.fields[left]}", markup=False),
            console=self._console,
            auto_refresh=False,  # drawn from advance: no thread that competes with the training
            expand=True,
        )

    def _draw(self, step: int) -> None:
        assert self._bar is not None
        self._bar.update(self._bar.task_ids[0], completed=step, left=self._left(step), refresh=True)

    def _left(self, step: int) -> str:
        seconds = self._clock.left(self._total)
        return "" if seconds is None or step >= self._total else f"{format_seconds(max(seconds, 1.0))} left"

    def _rows(
        self, rows: Sequence[tuple[str, str]], *, label_width: int = 0, wrap: bool = True, status_style: str = ""
    ) -> None:
        """Prints labels and values in two columns, long values wrapped under themselves."""
        width = max([label_width, *(len(label) for label, _ in rows)])
        for label, value in rows:
            text = Text(INDENT + label.ljust(width) + INDENT, style="dim")
            indent = len(text)
            if wrap and self._console.is_terminal:
                value = ("\n" + " " * indent).join(_wrapped(value, self._console.width - indent))
            self._console.print(text.append(value, style="not dim " + (status_style if label == "status" else "")))

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))


class _RichConsole(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Goes quiet where nobody reads any more; rich would end the process, and so the training."""
        with suppress(SystemExit):
            super().on_broken_pipe()


class _Bar(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        """Leaves the last columns free: on a full line, the `^C` that a terminal echoes would push the bar down."""
        yield Constrain(self.make_tasks_table(self.tasks), shutil.get_terminal_size().columns - 3)


class _Clock:
    """Guesses the time left from the pace so far, without the first step, which is slow."""

    def __init__(self) -> None:
        self.step = 0
        self._first: tuple[int, float] | None = None
        self._last = 0.0

    def tick(self, step: int) -> None:
        if step == self.step:
            return
        self.step, self._last = step, time.monotonic()
        self._first = self._first or (step, self._last)

    def left(self, total: int) -> float | None:
        """Seconds until step `total`; None before two steps are done."""
        if self._first is None or self._first[0] == self.step:
            return None
        first_step, began = self._first
        return (self._last - began) / (self.step - first_step) * (total - self.step)


def _training(row: Mapping[str, Any]) -> str:
    """Loss, pace and memory in a few words; empty where the row has none of them."""
    parts = []
    if "train/loss" in row:
        parts.append(f"loss {_number(row['train/loss'])}")
    if "perf/tokens_per_s" in row:
        unit = "tokens" if "progress/tokens" in row else "samples"
        parts.append(f"{format_count(row['perf/tokens_per_s'])} {unit}/s")
    for name, label in MEMORY.items():
        gib = row.get(f"{name}_max", row.get(name))  # the fullest rank's
        if parts and gib is not None:
            parts.append(f"{label} {format_gib(gib * 2**30)}")
            break
    return INDENT.join(parts)


def _evaluation(row: Mapping[str, Any]) -> str:
    names = sorted((key for key in row if key.startswith("eval/")), key=lambda key: key != "eval/loss")
    parts = [f"{name.removeprefix('eval/')} {_number(row[name])}" for name in names]
    return "held-out: " + INDENT.join(parts) if parts else ""


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:.4g}"


def _wrapped(value: str, width: int) -> list[str]:
    lines = [
        textwrap.wrap(line, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
        for line in value.splitlines()
    ]
    return [part for line in lines for part in line] or [""]
