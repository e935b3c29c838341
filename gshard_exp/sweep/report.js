"use strict";
// Draws the charts of a report as SVG: hover, keyboard, legend, theme, table of values. It reads the
// JSON of #data, and asks for nothing else.
const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set(); // names of series that the legend hides, in every chart
const redraws = []; // one function a chart
const tip = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 2.5", "8 3 2 3", "12 4", "4 4"];
const GAP = 14; // pixels between pointer and tip
const NARROW = 560; // pixels; report.css has the same

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "rect", "title"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Numbers ----------------------------------------------------------------------------------------

function si(value, digits = 3) {
  const size = Math.abs(value);
  const units = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
  for (const [scale, letter] of units) {
    if (size >= 0.9995 * scale) return `${Number((value / scale).toPrecision(digits))}${letter}`;
  }
  return size && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

// Labels of an axis, with as many digits as it takes to tell them apart.
function labels(ticks) {
  for (let digits = 3; digits < 7; digits++) {
    const texts = ticks.map((tick) => si(tick, digits));
    if (new Set(texts).size === ticks.length || digits === 6) return texts;
  }
}

const precise = (value) => (Math.abs(value) >= 1e4 ? si(value) : String(Number(value.toPrecision(4))));

// The same, with as many digits for each, for values one below the other.
const aligned = (value) => (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? si(value) : value.toPrecision(4));

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return ticks.map((t) => Number(t.toPrecision(12)));
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const every = Math.max(1, Math.ceil(decades / count));
  const within = decades > 0.7 * count ? [1] : decades > 1.3 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  const ticks = [];
  for (let d = Math.floor(Math.log10(low)); d <= Math.log10(high); d++) {
    if (within.length === 1 && d % every) continue;
    for (const m of within) {
      if (m * 10 ** d >= low * 0.999 && m * 10 ** d <= high * 1.001) ticks.push(Number((m * 10 ** d).toPrecision(12)));
    }
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high, count).filter((t) => t > 0);
}

// From values to pixels: {to(value), ticks, low, high}.
function scale(values, log, start, end, count) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (log) {
    const room = low === high ? 1.5 : (high / low) ** 0.04;
    [low, high] = [low / room, high * room];
  } else {
    const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
    [low, high] = [low - room, high + room];
  }
  const f = log ? Math.log : (x) => x;
  const to = (x) => start + ((f(x) - f(low)) / (f(high) - f(low))) * (end - start);
  return { to, ticks: (log ? logTicks : linearTicks)(low, high, count) };
}

// Marks ------------------------------------------------------------------------------------------

function markPath(shape, x, y, r) {
  const polygon = (...points) => `M${points.map(([a, b]) => `${x + a * r} ${y + b * r}`).join("L")}Z`;
  const shapes = [
    () => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
    () => polygon([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]),
    () => polygon([0, -1.15], [1.1, 0.85], [-1.1, 0.85]),
    () => polygon([0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]),
    () => polygon([0, 1.15], [1.1, -0.85], [-1.1, -0.85]),
    () => polygon([-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]),
  ];
  return shapes[shape]();
}

function sample(series) {
  const svg = make("svg", { width: 26, height: 12, "aria-hidden": "true", class: `c${series.colour}` });
  svg.append(make("path", { class: "line", d: "M1 6H25", "stroke-dasharray": DASHES[series.shape] }));
  svg.append(make("path", { class: "mark", d: markPath(series.shape, 13, 6, 4) }));
  return svg;
}

function legend(list, box) {
  for (const series of list) {
    const button = make("button", { type: "button", "aria-pressed": "true", title: "Show or hide" }, sample(series), series.name);
    button.dataset.series = series.name;
    button.addEventListener("click", () => {
      const off = hidden.has(series.name);
      hidden[off ? "delete" : "add"](series.name);
      for (const other of document.querySelectorAll("button[data-series]")) {
        other.setAttribute("aria-pressed", String(!hidden.has(other.dataset.series)));
      }
      redraws.forEach((draw) => draw());
    });
    box.append(button);
  }
}

// Tip --------------------------------------------------------------------------------------------

function showTip(box, x, y, head, rows, note) {
  tip.replaceChildren(make("strong", {}, head));
  for (const [series, text] of rows) {
    const row = make("div", { class: "row" });
    if (series) row.append(sample(series), make("span", {}, series.name));
    row.append(make("b", {}, text));
    tip.append(row);
  }
  if (note) tip.append(make("div", { class: "note" }, note));
  tip.hidden = false;
  const frame = box.getBoundingClientRect();
  const [wide, tall] = [tip.offsetWidth, tip.offsetHeight];
  const page = document.documentElement.clientWidth;
  if (page < NARROW) {
    // There is no room beside a finger: at the edge of the screen that is farther from it.
    tip.style.left = "4px";
    tip.style.top = `${frame.top + y > window.innerHeight / 2 ? 4 : window.innerHeight - tall - 4}px`;
    return;
  }
  let left = frame.left + x + GAP;
  if (left + wide > page - 4) left = Math.max(4, frame.left + x - wide - GAP);
  const top = Math.min(Math.max(4, frame.top + y - tall / 2), window.innerHeight - tall - 4);
  tip.style.left = `${Math.min(left, Math.max(4, page - wide - 4))}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

const hideTip = () => (tip.hidden = true);

// Lines and marks --------------------------------------------------------------------------------

function drawChart(chart, box) {
  const shown = chart.series.filter((series) => !hidden.has(series.name));
  const wide = Math.max(box.clientWidth, 240);
  const tall = Math.round(Math.min(360, Math.max(230, wide * 0.56)));
  const svg = make("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", tabindex: 0, "aria-label": `${chart.title}. ${chart.about} Arrow keys read the points.` });
  box.replaceChildren(svg);
  const points = shown.flatMap((series) => series.points);
  if (!points.length) {
    svg.append(make("text", { x: wide / 2, y: tall / 2, class: "empty", "text-anchor": "middle" }, "all series are hidden"));
    return;
  }
  const y = scale(points.map((p) => p[1]), chart.y.log, tall - 40, 26, tall / 55);
  const texts = labels(y.ticks);
  const left = 12 + 7 * Math.max(...texts.map((t) => t.length));
  const x = scale(points.map((p) => p[0]), chart.x.log, left, wide - 14, (wide - left) / 80);
  y.ticks.forEach((tick, i) => {
    svg.append(make("line", { class: "grid", x1: left, x2: wide - 10, y1: y.to(tick), y2: y.to(tick) }));
    svg.append(make("text", { x: left - 6, y: y.to(tick) + 4, "text-anchor": "end" }, texts[i]));
  });
  let end = -Infinity;
  const names = labels(x.ticks);
  x.ticks.forEach((tick, i) => {
    const half = 3.5 * names[i].length;
    const at = Math.min(x.to(tick), wide - half);
    if (at - half < end + 6) return; // labels that would touch
    end = at + half;
    svg.append(make("line", { class: "grid", x1: x.to(tick), x2: x.to(tick), y1: 26, y2: tall - 40 }));
    svg.append(make("text", { x: at, y: tall - 24, "text-anchor": "middle" }, names[i]));
  });
  svg.append(make("text", { class: "label", x: 0, y: 12 }, chart.y.label));
  svg.append(make("text", { class: "label", x: wide - 4, y: tall - 6, "text-anchor": "end" }, chart.x.label));
  for (const series of shown) svg.append(seriesMarks(series, x, y));
  const cross = make("line", { class: "cross", y1: 26, y2: tall - 40, visibility: "hidden" });
  const dots = make("g", { class: "dots" });
  svg.append(cross, dots);
  listen(svg, box, chart, shown, x, y, cross, dots);
}

function seriesMarks(series, x, y) {
  const group = make("g", { class: `series c${series.colour}`, "data-series": series.name });
  const at = series.points.map(([a, b]) => [x.to(a), y.to(b)]);
  if (series.line && at.length > 1) {
    const d = `M${at.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`;
    group.append(make("path", { class: "line", d, "stroke-dasharray": DASHES[series.shape] }));
  }
  if (!series.line || at.length <= 12) {
    for (const [a, b] of at) group.append(make("path", { class: "mark", d: markPath(series.shape, a, b, series.line ? 3.5 : 5) }));
  }
  return group;
}

function listen(svg, box, chart, shown, x, y, cross, dots) {
  const all = shown
    .flatMap((series) => series.points.map((point, i) => ({ series, point, note: (series.notes || [])[i], px: x.to(point[0]), py: y.to(point[1]) })))
    .sort((a, b) => a.px - b.px || a.py - b.py);
  const lines = shown.some((series) => series.line);
  let cursor = -1;
  const clear = () => {
    hideTip();
    cross.setAttribute("visibility", "hidden");
    dots.replaceChildren();
  };
  const tell = (px, py) => {
    const far = (p) => (lines ? Math.abs(p.px - px) * 4 + Math.abs(p.py - py) * 0.25 : Math.hypot(p.px - px, p.py - py));
    const near = all.reduce((best, p) => (far(p) < far(best) ? p : best));
    let told = [near];
    if (lines) {
      // Of every line the point next to the nearest one's x, if it is near enough to stand for it.
      told = shown.map((series) => all.filter((p) => p.series === series).reduce((best, p) => (Math.abs(p.px - near.px) < Math.abs(best.px - near.px) ? p : best)))
        .filter((p) => Math.abs(p.px - near.px) < 16).sort((a, b) => a.py - b.py).slice(0, 14);
      cross.setAttribute("x1", near.px);
      cross.setAttribute("x2", near.px);
      cross.setAttribute("visibility", "visible");
    }
    dots.replaceChildren(...told.map((p) => make("path", { class: `mark c${p.series.colour}`, d: markPath(p.series.shape, p.px, p.py, 5.5) })));
    showTip(box, near.px, near.py, `${chart.x.label}: ${precise(near.point[0])}`, told.map((p) => [p.series, aligned(p.point[1])]), near.note);
  };
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    tell(event.clientX - frame.left, event.clientY - frame.top);
  });
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("blur", clear);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") clear();
    if (!step) return;
    event.preventDefault();
    cursor = Math.min(all.length - 1, Math.max(0, cursor + step));
    tell(all[cursor].px, all[cursor].py);
  });
}

// Heat maps --------------------------------------------------------------------------------------

const percent = (value) => `${Number((100 * value).toPrecision(3))} %`;

function heatColour(heat, value, top) {
  if (heat.middle === null) return ["--heat-high", "--heat-zero", top ? value / top : 0];
  if (value >= heat.middle) return ["--heat-above", "--heat-even", Math.min(1, (value - heat.middle) / Math.max(top - heat.middle, heat.middle))];
  return ["--heat-below", "--heat-even", (heat.middle - value) / heat.middle];
}

const mixed = ([full, none, share]) => `color-mix(in oklab, var(${full}) ${(100 * share).toFixed(1)}%, var(${none}))`;

function drawHeat(heat, box) {
  const wide = Math.max(box.clientWidth, 240);
  const text = heat.unit === "%" ? percent : precise;
  const top = Math.max(...heat.values.flat().filter((v) => v !== null), 0);
  const left = 14 + 6.6 * Math.max(...heat.rows.map((r) => r.length));
  const [row, cell] = [22, (wide - left - 4) / heat.columns.length];
  const tall = 8 + row * heat.rows.length + 36;
  const svg = make("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", tabindex: 0, "aria-label": `${heat.title} of ${heat.run}. ${heat.about} Arrow keys read the cells.` });
  heat.rows.forEach((name, r) => {
    svg.append(make("text", { x: left - 8, y: 8 + row * r + 15, "text-anchor": "end" }, name));
    heat.values[r].forEach((value, c) => {
      const rect = make("rect", { class: "cell", x: left + c * cell, y: 8 + row * r, width: Math.max(cell - 1, 0.5), height: row - 2, rx: cell > 10 ? 2 : 0 });
      rect.style.fill = value === null ? "none" : mixed(heatColour(heat, value, top));
      svg.append(rect);
    });
  });
  const longest = Math.max(...heat.columns.map((c) => c.length));
  const every = Math.ceil((7 * longest + 10) / cell);
  heat.columns.forEach((name, c) => {
    if (c % every === 0) svg.append(make("text", { x: left + (c + 0.5) * cell, y: tall - 22, "text-anchor": "middle" }, name));
  });
  svg.append(make("text", { class: "label", x: wide - 4, y: tall - 5, "text-anchor": "end" }, heat.column_label));
  const ring = make("rect", { class: "ring", height: row, width: cell + 1, visibility: "hidden" });
  svg.append(ring);
  box.replaceChildren(svg, heatKey(heat, top, text));
  const at = [0, 0];
  const tell = () => {
    const [r, c] = at;
    ring.setAttribute("x", left + c * cell - 1);
    ring.setAttribute("y", 7 + row * r);
    ring.setAttribute("visibility", "visible");
    const value = heat.values[r][c];
    showTip(box, left + (c + 0.5) * cell, 8 + row * (r + 0.5), `${heat.rows[r]}, ${heat.column_label} ${heat.columns[c]}`, [[null, value === null ? "not logged" : text(value)]]);
  };
  const clear = () => {
    hideTip();
    ring.setAttribute("visibility", "hidden");
  };
  const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    at[0] = clamp(Math.floor((event.clientY - frame.top - 8) / row), heat.rows.length);
    at[1] = clamp(Math.floor((event.clientX - frame.left - left) / cell), heat.columns.length);
    tell();
  });
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("blur", clear);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    at[0] = clamp(at[0] + move[0], heat.rows.length);
    at[1] = clamp(at[1] + move[1], heat.columns.length);
    tell();
  });
}

function heatKey(heat, top, text) {
  const bar = make("span", { class: "bar", "aria-hidden": "true" });
  const high = heat.middle === null ? top : Math.max(top, 2 * heat.middle);
  const stops = heat.middle === null ? ["--heat-zero", "--heat-high"] : ["--heat-below", "--heat-even", "--heat-above"];
  bar.style.background = `linear-gradient(to right in oklab, ${stops.map((s) => `var(${s})`).join(", ")})`;
  const even = heat.middle === null ? [] : [make("span", { class: "even" }, `${heat.middle}: even`)];
  return make("div", { class: "key" }, "0", bar, text(high), ...even);
}

// Tables -----------------------------------------------------------------------------------------

function valuesTable(chart) {
  const table = make("table");
  if (chart.series) {
    table.append(make("tr", {}, ...["series", chart.x.label, chart.y.label, ""].map((h) => make("th", { scope: "col" }, h))));
    for (const series of chart.series) {
      series.points.forEach(([a, b], i) => table.append(make("tr", {}, ...[series.name, precise(a), precise(b), (series.notes || [])[i] || ""].map((c) => make("td", {}, c)))));
    }
  } else {
    table.append(make("tr", {}, ...["", ...chart.columns].map((h) => make("th", { scope: "col" }, h))));
    chart.values.forEach((row, r) => table.append(make("tr", {}, make("th", { scope: "row" }, chart.rows[r]), ...row.map((v) => make("td", {}, v === null ? "-" : precise(v))))));
  }
  return table;
}

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value || row.cells[column].textContent;
      const compare = (a, b) => (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : String(a).localeCompare(String(b)));
      body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * compare(key(a), key(b))));
    });
  });
}

// Page -------------------------------------------------------------------------------------------

function start() {
  const byName = Object.fromEntries(data.charts.map((chart) => [chart.name, chart]));
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = byName[figure.dataset.chart];
    const box = figure.querySelector(".plot");
    const draw = () => (box.clientWidth ? (chart.series ? drawChart : drawHeat)(chart, box) : null);
    let width = 0;
    new ResizeObserver(() => {
      if (box.clientWidth === width) return;
      width = box.clientWidth;
      draw();
    }).observe(box);
    if (chart.series) redraws.push(draw);
    const own = figure.querySelector(".legend");
    if (own) legend(chart.series, own);
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => details.querySelector(".scroll").replaceChildren(...(details.open ? [valuesTable(chart)] : [])));
  }
  const shared = document.getElementById("legend");
  if (shared) legend(data.runs, shared);
  document.querySelectorAll("table.sortable").forEach(sortable);
  const choice = document.getElementById("which-run");
  const choose = () => document.querySelectorAll("figure[data-run]").forEach((f) => (f.hidden = f.dataset.run !== choice.value));
  if (choice) choice.addEventListener("change", choose);
  if (choice) choose();
  theme();
  window.addEventListener("scroll", hideTip, { passive: true });
}

function theme() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => (button.textContent = dark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();
}

start();
