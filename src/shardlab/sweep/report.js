// Draws `sweep`: its `jobs` come in the order in which they are to be shown, the best first.
const find = id => document.getElementById(id);
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#A08A00"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const FEW = 15; // jobs of which each is labelled
const FIRST = 12; // jobs that a chart of bars shows at once
const BAR = 13, LABEL = 20, GAP = 10; // pixels
const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const CONFIG = { displayModeBar: false, responsive: true };
// On a touch screen a finger scrolls the page; it does not zoom.
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

// ---- numbers

// One unit for all sizes of a chart: that of its largest.
function unitOf(sizes) {
  const largest = Math.max(0, ...sizes);
  return UNITS.find(([, bytes]) => largest >= bytes) ?? UNITS.at(-1);
}

function inUnit(size, [name, bytes]) {
  const digits = name === "GiB" ? 2 : name === "B" ? 0 : 1;
  return `${(size / bytes).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${name}`;
}

const size = bytes => inUnit(bytes, unitOf([bytes]));
const number = value => value.toLocaleString("en", { maximumFractionDigits: 1 });
const sum = values => values.reduce((total, value) => total + value, 0);
const escaped = text => String(text).replace(/[&<>]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const shortened = (text, length) => (text.length > length ? `${text.slice(0, Math.max(length - 1, 1))}…` : text);

// ---- what all charts share

function layoutOf(more) {
  const { xaxis, yaxis, ...rest } = more;
  const axis = { gridcolor: "#E5E5E5", zerolinecolor: "#BBBBBB", linecolor: "#999999", automargin: true };
  return {
    paper_bgcolor: "#FFFFFF", plot_bgcolor: "#FFFFFF", font: { size: 13, color: "#1A1A1A" }, dragmode,
    margin: { l: 60, r: 14, t: 12, b: 48 }, showlegend: false, hovermode: "closest",
    hoverlabel: { align: "left", bgcolor: "#FFFFFF", font: { size: 13, color: "#1A1A1A" } },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}

// How a job is drawn, by the values of the two keys that were chosen.
function encoding() {
  const [colour, shape] = [find("colour").value, find("shape").value];
  const valuesOf = key => (key ? sweep.values[key] : []);
  const at = (list, key, job) => list[Math.max(valuesOf(key).indexOf(job.values[key]), 0) % list.length];
  return {
    colour: job => at(COLOURS, colour, job), symbol: job => at(SYMBOLS, shape, job), dash: job => at(DASHES, shape, job),
    legend: marks => [
      [colour, valuesOf(colour).map((value, i) => [COLOURS[i % COLOURS.length], "swatch", value])],
      [shape, valuesOf(shape).map((value, i) => ["#1A1A1A", marks[i % marks.length], value])],
    ],
  };
}

const PATHS = {
  swatch: "M1 1h12v12H1z", circle: "M7 2a5 5 0 1 0 .01 0z", square: "M2.5 2.5h9v9h-9z", diamond: "M7 1l6 6-6 6-6-6z",
  "triangle-up": "M7 2l6 10H1z", cross: "M5 1.5h4V5h3.5v4H9v3.5H5V9H1.5V5H5z", star: "M7 1l2 4 4 .5-3 3 1 4.5-4-2.3L3 13l1-4.5-3-3L5 5z",
};
const STROKES = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "12 4", longdashdot: "12 3 2 3" };

function mark(colour, name) {
  if (name in PATHS) {
    return `<svg width="14" height="14" aria-hidden="true"><path d="${PATHS[name]}" fill="${colour}"/></svg>`;
  }
  return `<svg width="34" height="14" aria-hidden="true"><path d="M1 7h32" stroke="${colour}" stroke-width="2"
    stroke-dasharray="${STROKES[name]}"/></svg>`;
}

// `groups`: a name, which may be empty, and entries of [colour, name of the mark, text].
function showLegend(id, groups) {
  const entry = ([colour, name, text]) => `<span>${mark(colour, name)}${escaped(text ?? "not set")}</span>`;
  find(id).innerHTML = groups.filter(([, entries]) => entries.length).map(([name, entries]) =>
    `<p>${name ? `<b>${escaped(name)}</b>` : ""}${entries.map(entry).join("")}</p>`).join("");
}

function described(job) {
  const values = Object.entries(job.values).filter(([, value]) => value !== null);
  return [`<b>job ${job.job}</b>`, ...values.map(([key, value]) => escaped(`${key}=${value}`))].join("<br>");
}

// ---- throughput against memory; of plans, predicted memory against capacity

// The texts at points; where there is no room for all, those of the front come first.
function labelsOf(jobs, xs, ys, { width, height }) {
  const texts = jobs.map(() => "");
  const importance = job => (job.job === sweep.advised ? 2 : job.front ? 1 : 0);
  const around = ([x, y], of) => ({ of, left: x - 7, right: x + 7, top: y - 10, bottom: y + 10 });
  const placed = jobs.map((job, i) => around([xs[i] * width, (1 - ys[i]) * height], i)).filter(({ of }) => jobs[of].front);
  const order = jobs.map((_, i) => i).sort((i, k) => importance(jobs[k]) - importance(jobs[i]));
  for (const i of order) {
    if (!importance(jobs[i]) && jobs.length > FEW) continue;
    const text = jobs[i].job === sweep.advised ? `${jobs[i].job}, advised` : `${jobs[i].job}`;
    const right = xs[i] * width - 5, bottom = (1 - ys[i]) * height - 5;
    const box = { left: right - 8 * text.length - 2, right, top: bottom - 15, bottom };
    if (placed.some(o => o.of !== i && box.left < o.right && o.left < box.right && box.top < o.bottom && o.top < box.bottom)) continue;
    placed.push(box);
    texts[i] = jobs[i].front ? `<b>${text}</b>` : text;
  }
  return texts;
}

// A range with some room around values, and where in it a value lies (0 to 1).
function rangeOf(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)], margin = 0.1 * (high - low || high);
  const range = [Math.max(low - margin, 0), high + margin];
  return { range, place: value => (value - range[0]) / (range[1] - range[0]) };
}

function drawFront() {
  const jobs = sweep.jobs.filter(job => job.tokens_per_s !== null && job.peak_bytes !== null);
  const plot = find("front-plot");
  if (!jobs.length) {
    plot.hidden = find("encoding").hidden = true;
    find("front-note").textContent = "No job completed whose throughput was measured.";
    return;
  }
  const unit = unitOf(jobs.map(job => job.peak_bytes)), drawn = encoding();
  const front = jobs.filter(job => job.front).sort((a, b) => a.peak_bytes - b.peak_bytes);
  const xs = list => list.map(job => job.peak_bytes / unit[1]), ys = list => list.map(job => job.tokens_per_s);
  const [x, y] = [rangeOf(xs(jobs)), rangeOf(ys(jobs))];
  const inside = { width: plot.clientWidth - 74, height: plot.clientHeight - 60 };
  const points = {
    type: "scatter", mode: "markers+text", name: "jobs", x: xs(jobs), y: ys(jobs), customdata: jobs.map(job => job.job),
    text: labelsOf(jobs, xs(jobs).map(x.place), ys(jobs).map(y.place), inside),
    textposition: "top left", textfont: { size: 12, color: "#1A1A1A" }, cliponaxis: false,
    marker: {
      color: jobs.map(drawn.colour), symbol: jobs.map(drawn.symbol),
      size: jobs.map(job => (job.front ? 12 : 9)), opacity: jobs.map(job => (job.front ? 1 : 0.65)),
      line: { color: "#1A1A1A", width: jobs.map(job => (job.job === sweep.advised ? 3 : job.front ? 1.5 : 0)) },
    },
    hovertext: jobs.map(job => `${described(job)}<br>${number(job.tokens_per_s)} ${sweep.unit}/s, ${size(job.peak_bytes)}`),
    hoverinfo: "text",
  };
  const line = {
    type: "scatter", mode: "lines", name: "Pareto front", x: xs(front), y: ys(front), hoverinfo: "skip",
    line: { color: "#777777", width: 1.5, shape: "hv", dash: "dot" },
  };
  const layout = layoutOf({
    xaxis: { title: { text: `peak memory per rank, ${unit[0]}`, standoff: 8 }, range: x.range },
    yaxis: { title: { text: `${sweep.unit}/s over all ranks`, standoff: 8 }, range: y.range, tickformat: "~s" },
  });
  Plotly.react(plot, [line, points], layout, CONFIG);
  showLegend("encoding-legend", drawn.legend(SYMBOLS));
  find("front-note").textContent =
    "Up and to the left is better. The dotted line is the Pareto front: of its jobs no other one is both faster and smaller.";
}

function drawCapacity() {
  const jobs = sweep.jobs.filter(job => job.peak_bytes !== null);
  if (!jobs.length) {
    find("front-plot").hidden = true;
    find("front-note").textContent = "No plan completed.";
    return;
  }
  const capacities = jobs.map(job => job.capacity_bytes ?? 0);
  const unit = unitOf([...jobs.map(job => job.peak_bytes), ...capacities]);
  const fits = { true: ["#0072B2", "fits"], false: ["#D55E00", "does not fit"], null: ["#777777", "not known whether it fits"] };
  const xs = jobs.map((_, i) => i);
  const peaks = {
    type: "bar", name: "peak", width: Math.min(0.75, jobs.length / 12), x: xs, y: jobs.map(job => job.peak_bytes / unit[1]), customdata: jobs.map(job => job.job),
    marker: { color: jobs.map(job => fits[job.fits][0]) }, hoverinfo: "text",
    hovertext: jobs.map(job => `${described(job)}<br>${size(job.peak_bytes)}`
      + (job.capacity_bytes ? ` of ${size(job.capacity_bytes)}` : "")),
  };
  // A limit that is far away would leave the bars no room.
  const isNear = Math.max(...capacities) <= 4 * Math.max(...jobs.map(job => job.peak_bytes));
  const limit = {
    type: "scatter", mode: "lines", name: "capacity", visible: isNear, hoverinfo: "skip", connectgaps: false,
    x: jobs.flatMap((_, i) => [i - 0.5, i + 0.5]), line: { color: "#1A1A1A", width: 2, shape: "linear" },
    y: jobs.flatMap(job => Array(2).fill(job.capacity_bytes ? job.capacity_bytes / unit[1] : null)),
  };
  const every = Math.ceil(jobs.length / Math.max(find("front-plot").clientWidth / 30, 1));
  const layout = layoutOf({
    xaxis: { title: { text: "job, the smallest peak first", standoff: 8 }, range: [-0.7, jobs.length - 0.3], showgrid: false, zeroline: false,
      tickvals: xs.filter(i => i % every === 0), ticktext: jobs.filter((_, i) => i % every === 0).map(job => `${job.job}`),
      tickangle: 0 },
    yaxis: { title: { text: `predicted peak per rank, ${unit[0]}`, standoff: 8 }, rangemode: "tozero" },
  });
  Plotly.react("front-plot", [peaks, limit], layout, CONFIG);
  const kinds = new Set(jobs.map(job => String(job.fits)));
  const entries = Object.entries(fits).filter(([kind]) => kinds.has(kind)).map(([, [colour, text]]) => [colour, "swatch", text]);
  const capacity = [...new Set(capacities.filter(Boolean))].map(size).join(", ");
  const text = isNear ? `capacity, ${capacity}` : `capacity, ${capacity}: beyond the plot`;
  showLegend("encoding-legend", [["", [...entries, ...(capacity ? [["#1A1A1A", "solid", text]] : [])]]]);
}

// ---- bars: for each job a line of text, and below it one bar or two

const shownAll = new Set();

// `barsOf(job)`: [what it is, bytes by category, opacity] for each bar; a job without any is left out.
function drawBars(name, colours, barsOf) {
  const all = sweep.jobs.filter(job => barsOf(job).length);
  find(name).hidden = !all.length;
  if (!all.length) return;
  const jobs = shownAll.has(name) ? all : all.slice(0, FIRST);
  const plot = find(`${name}-plot`), unit = unitOf(all.flatMap(job => barsOf(job).map(([, sizes]) => sum(Object.values(sizes)))));
  const rows = [], annotations = [], letters = Math.floor(plot.clientWidth / 7.2);
  let y = 0;
  for (const job of jobs) {
    const text = `job ${job.job}  ${job.label}`;
    annotations.push({ xref: "paper", x: 0, xanchor: "left", y: y + LABEL / 2, showarrow: false,
      text: escaped(shortened(text + (job.status === "completed" ? "" : `  (${job.status})`), letters)) });
    y += LABEL;
    for (const [kind, sizes, opacity] of barsOf(job)) {
      rows.push({ job, kind, sizes, opacity, y: y + BAR / 2, total: sum(Object.values(sizes)) });
      annotations.push({ x: rows.at(-1).total / unit[1], xanchor: "left", xshift: 3, y: y + BAR / 2, showarrow: false,
        text: inUnit(rows.at(-1).total, unit) + (kind ? ` ${kind}` : ""), font: { size: 12, color: "#444444" } });
      y += BAR + 1;
    }
    y += GAP;
  }
  const bases = rows.map(() => 0);
  const traces = Object.entries(colours).map(([category, colour]) => {
    const sizes = rows.map(row => row.sizes[category] ?? 0);
    const trace = {
      type: "bar", orientation: "h", name: category, y: rows.map(row => row.y), x: sizes.map(bytes => bytes / unit[1]),
      base: [...bases], width: BAR, customdata: rows.map(row => [row.job.job, row.kind]),
      marker: { color: colour, opacity: rows.map(row => row.opacity), line: { width: 0 } }, hoverinfo: "text",
      hovertext: rows.map((row, i) => `${described(row.job)}<br>${category.replaceAll("_", " ")}${row.kind ? `, ${row.kind}` : ""}:
        ${size(sizes[i])} (${Math.round((100 * sizes[i]) / (row.total || 1))} %)`),
    };
    sizes.forEach((bytes, i) => { bases[i] += bytes / unit[1]; });
    return trace;
  }).filter(trace => trace.x.some(Boolean));
  const longest = Math.max(...rows.map(row => row.total / unit[1])), words = plot.clientWidth < 600 ? 0.55 : 0.84;
  const layout = layoutOf({
    height: y + 52, barmode: "overlay", annotations, margin: { l: 0, r: 0, t: 0, b: 44 },
    xaxis: { range: [0, longest / words || 1], title: { text: unit[0], standoff: 6 }, fixedrange: true },
    yaxis: { range: [y, 0], visible: false, fixedrange: true, automargin: false },
  });
  Plotly.react(plot, traces, layout, CONFIG);
  showLegend(`${name}-legend`, [["", traces.map(trace => [colours[trace.name], "swatch", trace.name.replaceAll("_", " ")])]]);
  const more = find(`${name}-more`);
  more.hidden = all.length <= FIRST;
  more.textContent = shownAll.has(name) ? `show the first ${FIRST} only` : `show all ${all.length}`;
}

function drawMemory() {
  drawBars("memory", sweep.categories, job =>
    [["measured", job.measured, 1], ["predicted", job.predicted, sweep.is_plan ? 1 : 0.55]].filter(([, sizes]) => sizes));
}

function drawCommunication() {
  drawBars("communication", sweep.collectives, job => (job.communication ? [["", job.communication, 1]] : []));
}

// ---- loss

function drawLoss() {
  const jobs = sweep.jobs.filter(job => job.loss);
  find("loss").hidden = !jobs.length;
  if (!jobs.length) return;
  const drawn = encoding();
  const traces = jobs.map(job => ({
    type: "scatter", mode: job.loss.y.length > 1 ? "lines" : "markers", name: `job ${job.job}`, x: job.loss.x, y: job.loss.y,
    line: { color: drawn.colour(job), dash: drawn.dash(job), width: jobs.length <= FEW ? 2 : 1.25 },
    opacity: jobs.length <= FEW ? 1 : 0.7, hoverinfo: "text",
    hovertext: job.loss.x.map((x, i) => `${described(job)}<br>loss ${job.loss.y[i].toPrecision(4)} after ${number(x)} ${sweep.progress}`),
  }));
  const layout = layoutOf({
    xaxis: { title: { text: sweep.progress, standoff: 8 }, rangemode: "tozero", tickformat: "~s" },
    yaxis: { title: { text: "training loss", standoff: 8 } },
  });
  Plotly.react("loss-plot", traces, layout, CONFIG);
  showLegend("loss-legend", drawn.legend(DASHES));
}

// ---- the table

function sortBy(header) {
  const table = header.closest("table"), column = header.cellIndex, body = table.tBodies[0];
  const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", direction);
  const valueOf = row => {
    const text = row.cells[column].dataset.value;
    return text === "" ? null : header.classList.contains("text") ? text : Number(text);
  };
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  const keyed = [...body.rows].map(row => [valueOf(row), row]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null); // what is not known comes last, either way
    return direction === "ascending" ? compare(a, b) : compare(b, a);
  });
  body.append(...keyed.map(([, row]) => row));
}

document.querySelectorAll("th button").forEach(button => {
  button.onclick = () => sortBy(button.parentElement);
});

// ---- all of it

function drawAll() {
  (sweep.is_plan ? drawCapacity : drawFront)();
  drawMemory();
  drawLoss();
  drawCommunication();
}

const keys = Object.keys(sweep.values);
for (const [id, chosen] of [["colour", keys[0]], ["shape", keys[1]]]) {
  const select = find(id);
  for (const key of [...keys, ""]) select.add(new Option(key || "none", key, false, key === (chosen ?? "")));
  select.onchange = drawAll;
}
find("encoding").hidden = sweep.is_plan || !keys.length;
for (const name of ["memory", "communication"]) {
  find(`${name}-more`).onclick = () => {
    shownAll[shownAll.has(name) ? "delete" : "add"](name);
    drawAll();
  };
}
drawAll();
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) drawAll(); // texts are cut to the width; a phone's bars change the height alone
  width = innerWidth;
});
