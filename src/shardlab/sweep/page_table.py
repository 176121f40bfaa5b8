"""The table of all jobs in `report.html`; its `data-value`s are what it is sorted by."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.run_folder import Status
from shardlab.sweep.results import Results, Row

_BAD = (Status.oom.value, Status.killed.value, Status.failed.value)


@dataclass(frozen=True)
class _Column:
    header: str
    values: Sequence[Any]  # of each row; None for what is not known
    form: Callable[[Any], str] = str

    @property
    def is_text(self) -> bool:
        return any(isinstance(value, str) for value in self.values)


def table_of(results: Results, front: set[int]) -> str:
    """The table as HTML.

    Args:
        results: of the sweep.
        front: numbers of the jobs to be marked.
    """
    rows = [*results.completed, *results.others]
    columns = [column for column in _columns(results, rows, front) if any(value is not None for value in column.values)]
    head = "".join(
        f'<th scope="col"{_class(column)}><button type="button">{html.escape(column.header)}</button></th>'
        for column in columns
    )
    body = "\n".join(
        ('<tr class="front">' if row["job"] in front else "<tr>")
        + "".join(_cell(column, column.values[index]) for column in columns)
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _columns(results: Results, rows: Sequence[Row], front: set[int]) -> list[_Column]:
    def figures(header: str, name: str, form: str) -> _Column:
        return _Column(header, [row[name] for row in rows], lambda value: f"{value:{form}}")

    peaks = [row[name] for row in rows for name in row if name.endswith("_peak_bytes") and row[name]]
    traffic = [row[name] for row in rows for name in row if name.startswith("comm.") and row[name]]
    sizes, moved = _unit(peaks), _unit(traffic)

    def size(header: str, values: Sequence[int | None], unit: tuple[str, int]) -> _Column:
        return _Column(header + unit[0], values, lambda nbytes: f"{nbytes / unit[1]:,.2f}")

    planned = [row["plan.reserved_peak_bytes"] or row["plan.allocated_peak_bytes"] for row in rows]
    measured = [row["memory.reserved_peak_bytes"] or row["memory.allocated_peak_bytes"] for row in rows]
    return [
        _Column("job", [row["job"] for row in rows], lambda job: f"★ {job}" if job in front else str(job)),
        _Column("status", [row["status"] for row in rows]),
        *(_Column(_broken(key), [row[key] for row in rows]) for key in results.varied),
        figures(results.fit_name.replace(" ", "\n"), "plan.fit.value", "d"),
        figures(f"{results.unit}/s", "perf.tokens_per_s", ",.0f"),
        figures("step,\nms", "perf.step_ms", ",.1f"),
        size("peak,\n", measured, sizes),
        size("predicted,\n", planned, sizes),
        figures("error,\n%", "plan.error_pct", "+z.1f"),
        size("capacity,\n", [row["plan.capacity_bytes"] for row in rows] if results.is_plan else [], sizes),
        _Column("fits", [results.fits(row) or None for row in rows] if results.is_plan else []),
        figures("first\nloss", "loss.first", ".4f"),
        figures("last\nloss", "loss.last", ".4f"),
        figures("held-out\nloss", "eval.loss", ".4f"),
        size("all-\ngather, ", [row["comm.all_gather_bytes"] for row in rows], moved),
        size("reduce-\nscatter, ", [row["comm.reduce_scatter_bytes"] for row in rows], moved),
        size("all-\nreduce, ", [row["comm.all_reduce_bytes"] for row in rows], moved),
        figures("steps", "steps", ",d"),
        figures("took,\ns", "seconds", ",.1f"),
    ]


def _cell(column: _Column, value: Any) -> str:
    if value is None:
        return f'<td{_class(column)} data-value=""></td>'
    text = html.escape(column.form(value))
    bad = column.header == "status" and value in _BAD
    return f'<td{_class(column, "bad" if bad else "")} data-value="{html.escape(str(value))}">{text}</td>'


def _class(column: _Column, *more: str) -> str:
    names = " ".join(filter(None, ["text" if column.is_text else "", *more]))
    return f' class="{names}"' if names else ""


def _broken(key: str) -> str:
    """A key over two lines."""
    group, dot, name = key.rpartition(".")
    return f"{group}{dot}\n{name}" if dot else name


def _unit(sizes: Sequence[int]) -> tuple[str, int]:
    """One unit for a column: GiB, or what its largest size is better told in."""
    largest = max(sizes, default=0)
    return next((unit for unit in (("GiB", 2**30), ("MiB", 2**20)) if largest >= unit[1]), ("KiB", 2**10))
