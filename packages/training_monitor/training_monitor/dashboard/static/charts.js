// Curves of one run or of several, on uPlot. The view is in the URL: smooth,
// x, log, first, last.
import uPlot from "./vendor/uplot.js";

const COLOURS = 10;
const POINTS = 1200;
// What a curve of many steps is smoothed by unless the URL has another weight.
const SMOOTH = 0.6;
const MANY = 40;
// Distances of ticks of an axis of steps: whole ones only.
const WHOLE = Array.from({ length: 10 }, (_, n) => [1, 2, 5].map((m) => m * 10 ** n)).flat();
const sync = uPlot.sync("curves");
let figures = [];
let data = [];
let wanted = 0;

const box = () => document.getElementById("charts");

function state() {
  const query = new URLSearchParams(location.search);
  const number = (name) => (query.get(name) === null ? null : Number(query.get(name)));
  return {
    // null: as long as the curve is.
    smooth: query.get("smooth") ? Math.min(0.98, Math.max(0, Number(query.get("smooth")) || 0)) : null,
    axis: query.get("x") === "time" ? "time" : "step",
    log: new Set((query.get("log") || "").split(",").filter(Boolean)),
    first: number("first"),
    last: number("last"),
  };
}

function keep(changes) {
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "" || value === undefined) url.searchParams.delete(name);
    else url.searchParams.set(name, value);
  }
  history.replaceState(null, "", url);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// An exponential moving average without the pull of its first value.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// As the server's `text.visible`: no character hides or reorders others.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff]/g;

function plain(text) {
  const shown = text.length > 60 ? `${text.slice(0, 59)}…` : text;
  // Pairs of surrogates are characters like any other.
  return [...shown]
    .map((c) => (c.length > 1 ? c : c.replace(HIDDEN, (h) => `[U+${h.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`)))
    .join("");
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}

async function load() {
  const mine = ++wanted;
  const names = new Set(["time"]);
  for (const figure of box().querySelectorAll(".chart")) {
    figure.dataset.names.split(",").forEach((name) => names.add(name));
  }
  const { first, last } = state();
  const query = new URLSearchParams({ names: [...names].join(","), points: POINTS });
  if (first !== null) query.set("first", Math.floor(first));
  if (last !== null) query.set("last", Math.ceil(last));
  const runs = JSON.parse(box().dataset.runs);
  const found = await Promise.all(
    runs.map(async (run, place) => {
      const answer = await fetch(`/api/v1/trainings/${run.id}/curves?${query}`);
      if (!answer.ok) throw new Error(`curves of ${run.name}: ${answer.status}`);
      return { ...(await answer.json()), run, place };
    })
  );
  if (mine === wanted) data = found;
  return mine === wanted;
}

// [{label, one, values, evals?, base, colour}] of a chart. A baseline's series
// have the colours of the run's own, dashed.
function seriesOf(figure) {
  const names = figure.dataset.names.split(",");
  const several = data.filter((one) => !one.run.baseline).length > 1;
  const found = [];
  for (const one of data) {
    const base = Boolean(one.run.baseline);
    for (const name of names) {
      const own = name.endsWith("/")
        ? Object.keys(one.series).filter((key) => key.startsWith(name)).sort()
        : name in one.series ? [name] : [];
      for (const key of own) {
        const tail = key.includes("/") ? key.slice(key.indexOf("/") + 1) : key;
        const label = several ? one.run.name : base ? `${tail}, baseline` : tail;
        found.push({ label, key, one, base, values: one.series[key], colour: several ? one.place : null });
      }
    }
    if (figure.dataset.evals !== undefined && one.evals.length) {
      const { first, last } = state();
      const inside = one.evals.filter((e) => (first === null || e.step >= first) && (last === null || e.step <= last));
      found.push({ label: base ? "evaluations, baseline" : "evaluations", key: "", one, base, evals: inside, values: null, colour: null });
    }
  }
  const colours = new Map();
  for (const series of found) {
    if (!colours.has(series.key)) colours.set(series.key, colours.size);
    series.colour = (series.colour ?? colours.get(series.key)) % COLOURS;
  }
  return found;
}

// The horizontal place of a step: itself, or when it ended.
function places(one, axis) {
  const times = one.series.time;
  if (axis !== "time" || !times) return one.step;
  // A gap between two known times is not shown; without any there is no time.
  return one.step.map((step, n) => times[n] ?? null);
}

function weightOf(s, smooth) {
  return s.evals ? 0 : smooth ?? (s.values.length >= MANY ? SMOOTH : 0);
}

// The series as they are read, and behind them the raw ones of those that are
// smoothed.
function table(series, axis, smooth) {
  const raw = series.filter((s) => weightOf(s, smooth));
  const tables = [...series, ...raw].map((s, place) => {
    if (s.evals) {
      const steps = new Map(s.one.step.map((step, n) => [step, places(s.one, axis)[n]]));
      const points = new Map();
      for (const e of s.evals) {
        const at = axis === "time" ? steps.get(e.step) : e.step;
        if (at !== undefined && at !== null) points.set(at, e.rate);
      }
      const xs = [...points.keys()].sort((a, b) => a - b);
      return [xs, xs.map((x) => points.get(x))];
    }
    const xs = places(s.one, axis);
    const ys = smoothed(s.values, place < series.length ? weightOf(s, smooth) : 0);
    const known = xs.map((x, n) => [x, ys[n]]).filter(([x]) => x !== null);
    known.sort((a, b) => a[0] - b[0]);
    return [known.map((k) => k[0]), known.map((k) => k[1])];
  });
  const usable = tables.map((t) => (t[0].length ? t : [[0], [null]]));
  return uPlot.join(usable);
}

function stepAt(chart, index) {
  const one = chart.series[0]?.one;
  if (!one) return null;
  const x = chart.plot.data[0][index];
  const place = places(one, state().axis).indexOf(x);
  if (place >= 0) return { step: one.step[place], one };
  for (const s of chart.series) {
    const at = places(s.one, state().axis).indexOf(x);
    if (at >= 0) return { step: s.one.step[at], one: s.one };
  }
  return null;
}

function read(chart, index) {
  const out = chart.figure.querySelector(".readout");
  const parts = [];
  const last = chart.plot.data[0].length - 1;
  const at = index ?? last;
  const found = index === null ? null : stepAt(chart, at);
  if (found) {
    const link = document.createElement("a");
    link.href = `/runs/${found.one.run.id}/steps/${found.step}`;
    link.textContent = `step ${found.step}`;
    parts.push(link);
  }
  chart.series.forEach((s, n) => {
    const values = chart.plot.data[n + 1];
    let value = values[at];
    if (index === null) {
      for (let i = last; i >= 0 && (value === null || value === undefined); i--) value = values[i];
    }
    if (index !== null && (value === null || value === undefined)) return;
    const item = document.createElement("span");
    const key = document.createElement("span");
    key.className = `key c${s.colour}${s.base ? " base" : ""}`;
    const bold = document.createElement("b");
    bold.textContent = short(value);
    item.append(key, `${plain(s.label)} `, bold);
    parts.push(item);
  });
  out.replaceChildren(...parts);
}

function open(chart) {
  const index = chart.plot.cursor.idx ?? chart.at;
  if (index === null || index === undefined) return;
  const found = stepAt(chart, index);
  if (found) location.assign(`/runs/${found.one.run.id}/steps/${found.step}`);
}

function zoom(from, to) {
  if (state().axis === "time") return; // The window is one of steps.
  keep({ first: Math.floor(from), last: Math.ceil(to) });
  reload();
}

function draw(figure) {
  const { smooth, axis, log } = state();
  const series = seriesOf(figure);
  const holder = figure.querySelector(".plot");
  const readout = figure.querySelector(".readout");
  holder.replaceChildren();
  figure.classList.toggle("failed", !series.length);
  if (!series.length) {
    holder.textContent = "nothing yet";
    readout.replaceChildren();
    return null;
  }
  const key = figure.dataset.key;
  const grid = { stroke: colour("--line"), width: 1 };
  const ink = colour("--faint");
  const share = figure.dataset.unit === "share";
  const whole = share;
  const isLog = log.has(key);
  figure.querySelector("[data-log]").setAttribute("aria-pressed", String(isLog));
  const values = table(series, axis, smooth);
  if (isLog) {
    for (const column of values.slice(1)) {
      column.forEach((v, n) => (column[n] = v > 0 ? v : null));
    }
  }
  const few = values[0].length < 40;
  const chart = { figure, series, at: null };
  const options = {
    width: holder.clientWidth,
    height: holder.clientHeight,
    legend: { show: false },
    cursor: {
      sync: { key: sync.key, setSeries: false },
      drag: { x: axis === "step", y: false, setScale: false },
      points: { size: 6 },
    },
    scales: {
      x: { time: axis === "time" },
      y: isLog ? { distr: 3 } : whole
        ? { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(1, high ?? 1)] }
        : { range: (_, low, high) => (low === high ? [low - (low ? Math.abs(low) / 2 : 0), high + (Math.abs(high) / 2 || 1)] : uPlot.rangeNum(low, high, 0.08, true)) },
    },
    axes: [
      {
        stroke: ink, grid, ticks: grid, size: 26, font: "11px system-ui, sans-serif", space: 60,
        ...(axis === "step" && { incrs: WHOLE }),
      },
      {
        stroke: ink, grid, ticks: { show: false }, size: 48, font: "11px system-ui, sans-serif",
        space: 26, values: (_, ticks) => ticks.map((t) => (t === null ? "" : share ? `${Math.round(t * 100)} %` : short(t))),
      },
    ],
    series: [
      {},
      ...series.map((s) => ({
        label: s.label,
        stroke: colour(`--c${s.colour}`),
        width: s.evals ? 0 : 1.4,
        dash: s.base ? [5, 4] : undefined,
        spanGaps: !s.evals,
        points: s.evals
          ? { show: true, size: 8, fill: colour(s.base ? "--card" : `--c${s.colour}`), stroke: colour(s.base ? `--c${s.colour}` : "--card") }
          : { show: few, size: 4 },
        paths: s.evals ? () => null : undefined,
      })),
      ...series.filter((s) => weightOf(s, smooth)).map((s) => ({
        stroke: colour(`--c${s.colour}`), alpha: 0.28, width: 1, spanGaps: true, points: { show: false },
      })),
    ],
    hooks: {
      setCursor: [(plot) => {
        const index = plot.cursor.left >= 0 ? plot.cursor.idx : null;
        chart.at = index;
        if (chart.plot) read(chart, index ?? null);
      }],
      setSelect: [(plot) => {
        if (plot.select.width < 4) return;
        const from = plot.posToVal(plot.select.left, "x");
        const to = plot.posToVal(plot.select.left + plot.select.width, "x");
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        zoom(from, to);
      }],
    },
  };
  chart.plot = new uPlot(options, values, holder);
  let pressed = null;
  chart.plot.over.addEventListener("mousedown", (e) => (pressed = e.clientX));
  chart.plot.over.addEventListener("click", (e) => {
    if (pressed !== null && Math.abs(e.clientX - pressed) < 4) open(chart);
  });
  holder.onkeydown = (event) => {
    const count = chart.plot.data[0].length;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: 10, PageUp: -10 }[event.key];
    if (by) {
      event.preventDefault();
      const from = chart.at ?? (by > 0 ? -1 : count);
      const to = Math.min(count - 1, Math.max(0, from + by));
      const left = chart.plot.valToPos(chart.plot.data[0][to], "x");
      chart.plot.setCursor({ left, top: 10 });
      chart.at = to;
      read(chart, to);
      figure.querySelector(".readout").setAttribute("aria-live", "polite");
    } else if (event.key === "Enter") {
      event.preventDefault();
      open(chart);
    } else if (event.key === "Escape") {
      chart.plot.setCursor({ left: -10, top: -10 });
    }
  };
  holder.classList.add("over");
  read(chart, null);
  return chart;
}

function drawAll() {
  figures.forEach((chart) => chart?.plot.destroy());
  figures = [...box().querySelectorAll(".chart")].map(draw);
  const { first, last } = state();
  const reset = document.querySelector("[data-reset]");
  if (reset) reset.hidden = first === null && last === null;
  box().dataset.ready = String(Number(box().dataset.ready || 0) + 1);
}

// Puts the charts that `fresh` has and the page has not into their places;
// returns whether there were any. None is taken away from its reader.
function adopt(fresh) {
  const next = fresh.getElementById("charts");
  if (!next) return false;
  const name = (child) => child.dataset.key ?? child.textContent;
  let last = null;
  let changed = false;
  for (const child of [...next.children]) {
    const same = [...box().children].find((c) => c.tagName === child.tagName && name(c) === name(child));
    if (same) {
      last = same;
      continue;
    }
    const adopted = document.adoptNode(child);
    if (last) last.after(adopted);
    else box().prepend(adopted);
    last = adopted;
    changed = true;
  }
  return changed;
}

async function reload() {
  try {
    if (await load()) drawAll();
  } catch (error) {
    const note = document.createElement("p");
    note.className = "bad";
    note.setAttribute("role", "alert");
    note.textContent = `The curves cannot be had: ${error.message}`;
    box().querySelectorAll(":scope > p").forEach((p) => p.remove());
    box().prepend(note);
  }
}

function tools() {
  const form = document.getElementById("chart-tools");
  const { smooth, axis } = state();
  form.smooth.value = smooth ?? SMOOTH;
  form.querySelector("output").textContent = smooth ?? "auto";
  form.addEventListener("submit", (event) => event.preventDefault());
  form.smooth.addEventListener("input", () => {
    form.querySelector("output").textContent = form.smooth.value;
    keep({ smooth: form.smooth.value });
    drawAll();
  });
  const buttons = [...form.querySelectorAll("[data-axis]")];
  buttons.forEach((button) => {
    button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
    button.addEventListener("click", () => {
      keep({ x: button.dataset.axis === "step" ? null : button.dataset.axis });
      buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      drawAll();
    });
  });
  form.querySelector("[data-reset]").addEventListener("click", () => {
    keep({ first: null, last: null });
    reload();
  });
  box().addEventListener("click", (event) => {
    const button = event.target.closest("[data-log]");
    if (!button) return;
    const { log } = state();
    const key = button.closest(".chart").dataset.key;
    if (!log.delete(key)) log.add(key);
    keep({ log: [...log].join(",") || null });
    drawAll();
  });
}

export function start() {
  if (!box()) return;
  tools();
  reload();
  document.addEventListener("data-changed", (event) => {
    if (["step", "eval", "baseline"].some((kind) => event.detail.has(kind))) reload();
  });
  document.addEventListener("parts-changed", (event) => {
    if (adopt(event.detail)) reload();
  });
  document.addEventListener("theme-changed", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let timer = null;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const width = box().clientWidth;
      if (data.length && width !== Number(box().dataset.width)) {
        box().dataset.width = width;
        figures.forEach((c) => c?.plot.setSize({
          width: c.figure.querySelector(".plot").clientWidth,
          height: c.figure.querySelector(".plot").clientHeight,
        }));
      }
    }, 100);
  }).observe(box());
}
