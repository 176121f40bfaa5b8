"""A page that shows live memory over a step, event by event, from the storage ledger; it works without a network."""

import html
import importlib.resources
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.telemetry.events import Category, Event
from shardlab.telemetry.ledger import Ledger
from shardlab.telemetry.memory import GIB

MAX_POINTS = 4000  # drawn of a view: more than a screen has pixels

# From the bottom of the stack: what stays through the step, what grows and shrinks once, what comes and goes with each
# unit. The colours are those of Okabe and Ito, which the colour-blind tell apart, and two greys.
COLOURS = {
    Category.parameters: "#0072B2",
    Category.optimizer: "#009E73",
    Category.inputs: "#444444",
    Category.other: "#BBBBBB",
    Category.gradients: "#D55E00",
    Category.activations: "#CC79A7",
    Category.unsharded_parameters: "#56B4E9",
    Category.unsharded_gradients: "#E69F00",
    Category.communication: "#F0E442",
}
_BANDS = ("#FFFFFF", "#EEF0F3")
# Sections narrower than these parts of the width have no band (less than a pixel), no label, only an upright one.
_BAND_SHARE, _LABEL_SHARE, _LEVEL_LABEL_SHARE = 0.001, 0.04, 0.2
_HEADROOM = 1.35  # the height of the plot over that of the peak: room for labels


@dataclass(frozen=True)
class _View:
    """A stretch of events on one device; point k is the state after k of them, point 0 that in which it begins."""

    name: str
    events: Sequence[Event]
    phases: Sequence[str]  # of each event
    levels: np.ndarray  # (events + 1, categories) int64, bytes; categories in the order of the stack
    sections: Sequence[tuple[str, int, int]]  # label, first and last point

    @property
    def totals(self) -> np.ndarray:
        return self.levels.sum(axis=1)

    def place(self, point: int) -> str:
        """What happened just before a point: its phase, and the module if there is one."""
        if point == 0:
            return "at the beginning"
        module = self.events[point - 1].module
        return self.phases[point - 1] + (f" of {module}" if module else "")


def write_timeline(file: Path, ledger: Ledger, *, title: str, note: str = "") -> None:
    """Writes an HTML page of the live memory of the ledger's device: over the last step, and over the whole window.

    Args:
        file: to write; it holds plotly.js too, about 5 MB.
        ledger: of a run or of a plan, when the window has ended.
        title: of the page, plain text.
        note: about the peak, plain text.
    """
    views = _views(ledger)
    sentences = [*map(_peak_sentence, views), *([note] if note else [])]
    peaks = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    data = json.dumps([_drawn(view) for view in views], separators=(",", ":")).replace("<", "\\u003c")
    write_html(file, _BODY, {"TITLE": html.escape(title), "PEAKS": peaks, "VIEWS": data})


def write_html(file: Path, body: str, parts: Mapping[str, str]) -> None:
    """Writes an HTML page that needs nothing but itself; it may not load anything, whatever plotly.js could do.

    Args:
        file: to write; it holds plotly.js too, about 5 MB.
        body: from the style sheet on. Of places such as `@TITLE@` in it, `@PLOTLY@` is for the script that draws.
        parts: what comes to the other places, among them the page's title.
    """
    parts = {**parts, "PLOTLY": _plotly_js()}
    file.write_text(re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _HEAD + body), encoding="utf-8")


def _plotly_js() -> str:
    return importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


# The series


def _views(ledger: Ledger) -> list[_View]:
    """The last step, and the whole window where that is more."""
    indices = [i for i, event in enumerate(ledger.events) if event.entry.device == ledger.device]
    events = [ledger.events[i] for i in indices]
    starts = np.searchsorted(indices, ledger.step_starts).tolist()
    levels = _levels(events)
    bounds = [0, *starts, len(events)]
    labels = ["build", *(f"step {number}" for number in range(1, len(starts) + 1))]
    sections = list(zip(labels, bounds, bounds[1:], strict=False))
    window = _View("the whole window", events, [event.phase.value for event in events], levels, sections)
    if not starts:
        return [window]
    events = events[starts[-1] :]
    phases = [event.phase.value for event in events]
    step = _View(f"step {len(starts)}", events, phases, levels[starts[-1] :], _phase_sections(phases))
    return [step, window]


def _levels(events: Sequence[Event]) -> np.ndarray:
    """Live bytes before the first event and after each, (events + 1, categories)."""
    rows = {category: row for row, category in enumerate(COLOURS)}
    levels = np.zeros((len(events) + 1, len(rows)), dtype=np.int64)
    categories = np.fromiter((rows[event.entry.category] for event in events), dtype=np.intp, count=len(events))
    changes = np.fromiter((event.after - event.before for event in events), dtype=np.int64, count=len(events))
    levels[np.arange(1, len(events) + 1), categories] = changes
    return levels.cumsum(axis=0)


def _phase_sections(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """Stretches of one phase; forward and backward are numbered where there are several micro-batches."""
    begins = [i for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    counts = Counter(phases[i] for i in begins)
    so_far: Counter[str] = Counter()
    labels = []
    for name in (phases[i] for i in begins):
        so_far[name] += 1
        labels.append(f"{name} {so_far[name]}" if counts[name] > 1 else name)
    return list(zip(labels, begins, [*begins[1:], len(phases)], strict=False))


def _kept(totals: np.ndarray) -> np.ndarray:
    """The points to draw: all of them if they are few, else the first highest and lowest of each of many stretches."""
    if len(totals) <= MAX_POINTS:
        return np.arange(len(totals))
    bounds = np.linspace(0, len(totals), MAX_POINTS // 2, dtype=np.intp)
    stretches = [(begin, totals[begin:end]) for begin, end in itertools.pairwise(bounds)]
    extremes = [begin + point for begin, part in stretches for point in (part.argmin(), part.argmax())]
    return np.unique([0, *extremes, len(totals) - 1])


# The page


def _peak_sentence(view: _View) -> str:
    peak = int(view.totals.argmax())
    nbytes = int(view.totals[peak])
    where = f"after event {peak:,} of {len(view.events):,}: {view.place(peak)}"
    return f"Peak of {view.name}: {_format_gib(nbytes)} ({nbytes:,} bytes) {where}."


def _format_gib(nbytes: int) -> str:
    gib = nbytes / GIB
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{gib:.3g} GiB"


def _drawn(view: _View) -> dict[str, Any]:
    """What the page shows of a view: at some of its points, the bytes of each category that occurs, and their sum."""
    points = _kept(view.totals)
    peak = int(view.totals.argmax())
    series = [
        {"name": category.value.replace("_", " "), "colour": colour, "bytes": nbytes}
        for (category, colour), nbytes in zip(COLOURS.items(), view.levels[points].T.tolist(), strict=True)
        if any(nbytes)
    ]
    series.append({"name": "total", "colour": "#333333", "bytes": view.totals[points].tolist()})
    return {
        "name": view.name.removeprefix("the "),
        "events": len(view.events),
        "points": points.tolist(),
        "peak": int(np.searchsorted(points, peak)),  # its index among the points
        "places": [view.place(point) for point in points.tolist()],
        "series": series,
        "layout": _layout(view, peak),
    }


def _layout(view: _View, peak: int) -> dict[str, Any]:
    """Axes, bands of the sections, and the mark at the peak."""
    events = max(len(view.events), 1)
    nbytes = int(view.totals[peak])
    mark = {
        "x": peak,
        "y": nbytes / GIB,
        "text": f"<b>peak {_format_gib(nbytes)}</b>",
        "xanchor": ("left", "center", "right")[min(3 * peak // events, 2)],
        "ax": 0,
        "ay": -24,
        "arrowhead": 2,
    }
    return {
        "paper_bgcolor": "#FFFFFF",
        "plot_bgcolor": "#FFFFFF",
        "font": {"size": 13, "color": "#1A1A1A"},
        "margin": {"l": 64, "r": 8, "t": 8, "b": 46},
        "showlegend": False,  # the table beside it is one
        "hovermode": "x",
        "hoverdistance": -1,
        "spikedistance": -1,
        "xaxis": {
            "title": {"text": "allocation events, in order (not time)", "standoff": 6},
            "range": [0, events],
            "tickformat": ",d",
            "showgrid": False,
            "showspikes": True,
            "spikemode": "across",
            "spikedash": "solid",
            "spikethickness": 1,
            "spikecolor": "#333333",
        },
        "yaxis": {
            "title": {"text": "live memory, GiB"},
            "range": [0, _HEADROOM * nbytes / GIB or 1],
            "fixedrange": True,
            "gridcolor": "#DDDDDD",
        },
        "shapes": [
            _band(begin, end, _BANDS[i % 2])
            for i, (_, begin, end) in enumerate(view.sections)
            if end - begin > _BAND_SHARE * events
        ],
        "annotations": [
            *(
                _label(text, (begin + end) / 2, upright=end - begin < _LEVEL_LABEL_SHARE * events)
                for text, begin, end in view.sections
                if end - begin > _LABEL_SHARE * events
            ),
            mark,
        ],
    }


def _band(begin: int, end: int, colour: str) -> dict[str, Any]:
    box = {"x0": begin, "x1": end, "yref": "paper", "y0": 0, "y1": 1}
    return box | {"type": "rect", "layer": "below", "fillcolor": colour, "line": {"width": 0}}


def _label(text: str, x: float, *, upright: bool) -> dict[str, Any]:
    """The name of a section, at its top."""
    place = {"x": x, "y": 1, "yref": "paper", "yanchor": "top", "showarrow": False}
    return place | {"text": text, "textangle": -90 if upright else 0}


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>@TITLE@</title>
"""

_BODY = """<style>
:root { color-scheme: light; }
body { margin: 0 auto; padding: 12px; max-width: 1500px; background: #fff; color: #1a1a1a;
 font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 6px; }
p { margin: 0 0 4px; }
h1, p { overflow-wrap: anywhere; }
button { font: inherit; padding: 5px 12px; margin: 6px 6px 6px 0; border: 1px solid #999; border-radius: 4px;
 background: #fff; color: #1a1a1a; }
button:disabled { background: #1a1a1a; color: #fff; }
#plot { height: clamp(330px, 65vh, 660px); }
table { font-size: 13px; border-spacing: 0; }
td, th { padding: 1px 0 1px 8px; white-space: nowrap; font-weight: inherit; }
td:first-child { padding-left: 0; }
td:nth-child(n+2), th { text-align: right; font-variant-numeric: tabular-nums; }
tr:last-child { font-weight: bold; }
i { display: inline-block; width: 12px; height: 12px; margin-right: 7px; }
.note { color: #555; font-size: 0.87rem; margin-top: 8px; }
@media (min-width: 900px) {
 main { display: grid; grid-template-columns: minmax(0, 1fr) 360px; gap: 16px; align-items: start; }
}
</style>
</head>
<body>
<h1>@TITLE@</h1>
@PEAKS@
<nav></nav>
<main>
<div id="plot"></div>
<div>
<p id="where"></p>
<table></table>
<p class="note">Point at the plot, or tap on it, to see what was alive then; drag to zoom, double-click to zoom out.
These are the storages on one rank's device: what an allocator rounds up or keeps in reserve is not in it.</p>
</div>
</main>
<script>@PLOTLY@</script>
<script>
const views = @VIEWS@;
const [nav, plot, where, table] = ["nav", "#plot", "#where", "table"].map(name => document.querySelector(name));
const gib = bytes => bytes / 2 ** 30;
let view;

function draw(chosen) {
  view = chosen;
  const traces = view.series.map(({bytes, colour}, i) => ({
    type: "scatter", mode: "lines", hoverinfo: "none", x: view.points, y: bytes.map(gib),
    ...i < view.series.length - 1
      ? {stackgroup: "live", fillcolor: colour, line: {shape: "hv", width: 0}}
      : {line: {shape: "hv", width: 0.75, color: colour}},
  }));
  Plotly.react(plot, traces, view.layout, {responsive: true, displayModeBar: false});
  [...nav.children].forEach((button, i) => button.disabled = views[i] === view);
  show(view.peak);
}

function show(index) {
  const number = n => n.toLocaleString("en");
  const peak = index === view.peak ? " (the peak)" : "";
  where.textContent =
    `After event ${number(view.points[index])} of ${number(view.events)}${peak}: ${view.places[index]}`;
  const rows = view.series.map(({name, colour, bytes}) => `<tr><td><i style="background: ${colour}"></i>${name}</td>
    <td>${gib(bytes[index]).toFixed(3)}</td><td>${number(bytes[index])}</td></tr>`);
  table.innerHTML = `<tr><th></th><th>GiB</th><th>bytes</th></tr>${rows.join("")}`;
}

for (const each of views) {
  const button = nav.appendChild(document.createElement("button"));
  button.textContent = each.name;
  button.onclick = () => draw(each);
}
draw(views[0]);
plot.on("plotly_hover", event => show(event.points[0].pointNumber));
</script>
</body>
</html>
"""
