"""What the screen says at the end of a sweep: a table of what completed, what did not and why, and what to use."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import rich.console
from rich.box import SIMPLE_HEAD
from rich.table import Table

from shardlab.sweep.pareto import Advice, advise, pareto_front
from shardlab.sweep.results import Results, Row, log_tail
from shardlab.tracking.formats import format_gib

STATUS_STYLE = {"running": "yellow", "interrupted": "yellow", "skipped": "yellow"}  # any other is bad news
LOG_LINES = 4  # of a job that failed
CATEGORIES = 3  # of what a job's memory was taken by
_INDENT, _GAP = 2, 2
_CAPACITY = "of"  # header of what there is, beside that of the planned peak


@dataclass(frozen=True)
class _Column:
    header: str
    cells: Sequence[str]
    is_text: bool = False
    rank: int = 0  # where the screen is narrow, those with the highest are left out first; 0 = never

    @property
    def width(self) -> int:
        return max(map(len, [self.header, *self.cells]))


def show(results: Results, **settings: Any) -> None:
    """Prints the results of a sweep.

    Args:
        results: of the sweep.
        **settings: of rich's console; without any, the standard output is it, in 80 columns where that is no terminal.
    """
    console = rich.console.Console(highlight=False, markup=False, emoji=False, **settings)
    console.print(f"\n  {results.counts()}", soft_wrap=True)
    if results.completed:
        _show_completed(results, console)
    if results.others:
        console.print()
        for row in results.others:
            _show_other(results, row, console)
    _show_advice(advise(results), console)


def _show_completed(results: Results, console: rich.console.Console) -> None:
    rows, front = results.completed, {row["job"] for row in pareto_front(results)}
    every = _columns(results, rows, front)
    columns = _fitted(every, results, rows, console.width - _INDENT)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False, header_style="dim")
    for column in columns:
        table.add_column(
            column.header, justify="left" if column.is_text else "right", no_wrap=not column.is_text, overflow="fold"
        )
    for index, row in enumerate(rows):
        table.add_row(*(column.cells[index] for column in columns), style="bold" if row["job"] in front else "")
    console.print()
    with console.capture() as capture:
        console.print(table, width=console.width - _INDENT)
    # Trailing spaces would wrap on a narrower screen, or when they are copied.
    for line in capture.get().splitlines():
        console.out(" " * _INDENT + line.rstrip(), highlight=False)
    if front:
        console.print("  * no other job is both faster and smaller (the Pareto front)", style="dim")
    shown = {column.header for column in columns}
    left_out = [column for column in every if column.rank and column.header not in shown]
    if left_out:
        names = ("capacity" if column.header == _CAPACITY else column.header for column in left_out)
        console.print(f"  results.csv has more than there is room for here: {', '.join(names)}", style="dim")


def _columns(results: Results, rows: Sequence[Row], front: set[int]) -> list[_Column]:
    digits = max(len(str(row["job"])) for row in rows)
    job = _Column("job", [f"{'*' if row['job'] in front else ' '} {row['job']:>{digits}}" for row in rows])
    varied = [
        _Column(_short(key, results.varied), ["" if row[key] is None else str(row[key]) for row in rows], is_text=True)
        for key in results.varied
    ]
    peak = _Column("planned peak" if results.is_plan else "peak", [_size(results.peak_bytes(row)) for row in rows])
    if results.is_plan:
        figures = [
            _Column(results.fit_name, [_number(row["plan.fit.value"], "d") for row in rows]),
            peak,
            _Column(_CAPACITY, [_size(row["plan.capacity_bytes"]) for row in rows], rank=1),
            _Column("fits", [results.fits(row) for row in rows]),
        ]
    else:
        figures = [
            _Column(f"{results.unit}/s", [_number(row["perf.tokens_per_s"], ",.0f") for row in rows]),
            _Column("step ms", [_number(row["perf.step_ms"], ",.1f") for row in rows], rank=3),
            peak,
            _Column("plan error", [_number(row["plan.error_pct"], "+z.1f", " %") for row in rows], rank=2),
            _Column("loss", [_number(row["loss.last"], ".4g") for row in rows], rank=1),
        ]
    return [job, *varied, *(column for column in figures if any(column.cells))]


def _fitted(columns: Sequence[_Column], results: Results, rows: Sequence[Row], width: int) -> list[_Column]:
    """Leaves out what a narrow screen has no room for; puts the overrides into one column where even that is not it."""
    kept = list(columns)
    while _width(kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    if _width(kept) > width:
        folded = _Column("overrides", [results.describe(row) for row in rows], is_text=True)
        narrow = [replace(column) for column in kept if not column.is_text]
        kept = [narrow[0], folded, *narrow[1:]]
    return kept


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width + _GAP for column in columns)


def _show_other(results: Results, row: Row, console: rich.console.Console) -> None:
    """What became of a job that did not complete, and why."""
    label = results.label(row)
    lines = log_tail(results.job(row["job"]), LOG_LINES)[1] if row["status"] == "failed" else []
    reason = row["error"] or (lines.pop() if lines else "")
    head = f"job {row['job']} {row['status']}" + (f" ({label})" if label else "") + (f": {reason}" if reason else "")
    for line in _wrapped(head, console, indent="    "):
        console.print(f"  {line}", soft_wrap=True, style=STATUS_STYLE.get(row["status"], "red"))
    for line in lines:
        if line.removeprefix("error: ").strip() not in (reason, reason.partition(": ")[2]):  # that follows the rank
            console.print(f"      {line}"[: console.width], soft_wrap=True, style="dim")
    for text in _peaks(results, row) if row["status"] in ("oom", "killed") else []:
        for line in _wrapped(f"    {text}", console, indent="      "):
            console.print(f"  {line}", soft_wrap=True, style="dim")


def _wrapped(text: str, console: rich.console.Console, *, indent: str) -> list[str]:
    return textwrap.wrap(text, console.width - _INDENT, subsequent_indent=indent, break_on_hyphens=False)


def _peaks(results: Results, row: Row) -> list[str]:
    """The peaks of a job that were measured and planned, with what most of each is."""
    job = results.job(row["job"])
    measured, planned = job.summary.get("memory") or {}, (job.plan or {}).get("peak") or {}
    lines = []
    for kind, how, of in (("memory", "measured", measured), ("plan", "planned", planned)):
        nbytes = row[f"{kind}.reserved_peak_bytes"] or row[f"{kind}.allocated_peak_bytes"]
        largest = Counter(of.get("breakdown") or {}).most_common(CATEGORIES)
        parts = [f"{category.replace('_', ' ')} {format_gib(size)}" for category, size in largest if size]
        if nbytes:
            lines.append(f"{how} peak {format_gib(nbytes)}" + (f": {', '.join(parts)}" if parts else ""))
    return lines


def _show_advice(advice: Advice, console: rich.console.Console) -> None:
    console.print()
    for line in textwrap.wrap(advice.text, console.width - _INDENT, break_on_hyphens=False, break_long_words=False):
        console.print(f"  {line}", soft_wrap=True, style="bold")
    if advice.command:
        console.print(f"\n  {advice.command}", soft_wrap=True)  # on one line: to be copied
    if advice.train_command:
        console.print(f"\n  To train it:\n\n  {advice.train_command}", soft_wrap=True)
    console.print()


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key, where no other key has the same."""
    last = [each.rsplit(".", 1)[-1] for each in keys]
    name = key.rsplit(".", 1)[-1]
    return name if last.count(name) == 1 else key


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_gib(nbytes)


def _number(value: float | None, form: str, after: str = "") -> str:
    return "" if value is None else f"{value:{form}}{after}"
