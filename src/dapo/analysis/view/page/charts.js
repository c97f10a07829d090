"use strict";
// Charts: one card each, of a fixed height, so that nothing moves when values arrive. The colours are in style.css.

View.outcomeColours = { trained: "c0", all_correct: "c2", all_wrong: "red", zero_variance: "c3", filtered: "c5", invalid: "c6", excess: "c7", aborted: "c8" };

const SMOOTHED_FROM = 15;
View.smoothed = (values) => {
  const half = Math.max(3, Math.floor(values.length / 10) | 1) >> 1;
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
};

// The x axis: steps, generated tokens or seconds, both summed over the steps.
View.axes = { steps: "training step", tokens: "generated tokens", seconds: "seconds" };
View.xOf = (metrics, axis) => {
  if (axis !== "tokens" && axis !== "seconds") return metrics.steps;
  const each = metrics.columns[axis === "tokens" ? "rollout/tokens_generated" : "time/step_s"] || [];
  let sum = 0;
  return metrics.steps.map((_, i) => (sum += each[i] || 0));
};

// The description of a logged metric, also of one in a family such as eval/{data}/accuracy.
View.metricOf = (name) => {
  const words = View.words.metrics;
  return words[name] || Object.values(words).find((m) => m.name.includes("{") && new RegExp(`^${m.name.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replace(/\{\w+\}/g, ".+")}$`).test(name)) || null;
};
// Whether the accuracy of an evaluation, or of one of its sources, is a mean score in one of the runs.
const isOfScores = (name, all) => {
  const found = /^eval\/(.+)\/(accuracy|low|high|avg@\d+)$/.exec(name);
  return found !== null && all.some((metrics) => View.isMeanScore(metrics, found[1]));
};
View.unitOf = (name, all) => {
  if (isOfScores(name, all)) return "mean score";
  const m = View.metricOf(name);
  return !m || m.unit === "1" ? "" : m.unit === "fraction" ? "%" : m.unit;
};
View.scaleOf = (name, all) => { const m = View.metricOf(name); return m && m.unit === "fraction" && !isOfScores(name, all) ? 100 : 1; };

// The layout of the x axis: from 0 to the last value in each chart of a page. Steps are whole numbers.
View.xAxis = (axis, ...xs) => ({ title: View.axes[axis], end: xs.flat().reduce((a, b) => Math.max(a, b), 0), whole: axis === "steps" });

// A mark where a resume changed options: between the last step before it and the first one after it.
View.marks = (metrics, axis, { run = "", colour = null } = {}) => {
  const x = View.xOf(metrics, axis);
  return (metrics.changes || []).map(({ after_step, options }) => {
    const last = metrics.steps.findLastIndex((step) => step <= after_step);
    const changes = Object.entries(options).map(([name, [before, now]]) => `${name} ${View.optionText(before)} → ${View.optionText(now)}`);
    const at = [x[last], x[last + 1]].filter((value) => value !== undefined);
    return { x: at.length ? at.reduce((a, b) => a + b) / at.length : 0, text: `${run && `${run}: `}resumed after step ${after_step} with ${changes.join(", ")}`, colour };
  });
};

// The rows of a curve from its first value to its last, in stretches: between two of them the line has a gap, because a
// step is missing or has no finite value. Evaluations are made now and then: there only one without a verdict is a gap.
View.stretches = (metrics, name) => {
  const column = (n) => metrics.columns[n] || [], known = (i) => column(name)[i] != null, found = [];
  const isEvaluation = name.startsWith("eval/"), evaluated = column(name.replace(/[^/]+$/, "truncated_fraction"));
  let joined = false;
  metrics.steps.forEach((step, i) => {
    const isNext = isEvaluation || (i > 0 && step === metrics.steps[i - 1] + 1);
    if (known(i)) { if (joined && isNext) found[found.length - 1].push(i); else found.push([i]); }
    joined = known(i) || (joined && isEvaluation && evaluated[i] == null);
  });
  return found;
};
// Stretches as points with null between them, which is a gap; a point between two gaps has a marker.
const pointsOf = (stretches, x, values) => {
  const rows = stretches.flatMap((rows, k) => (k ? [null, ...rows] : rows)), at = rows.map((i, k) => x[i ?? rows[k + 1]]);
  const sizes = stretches.flatMap((rows, k) => [...(k ? [0] : []), ...rows.map(() => (rows.length < 2 ? 5 : 0))]);
  return { x: at, y: rows.map((i) => (i === null ? null : values[i])), sizes };
};

// A card with a chart. `traces` and `layout` are functions, called again when values come. The chart is drawn when the card
// comes near the window, and the others one by one when nothing else is to do: a page has up to a hundred of them.
const nearWindow = new IntersectionObserver((entries) => { for (const { target, isIntersecting } of entries) { target.near = isIntersecting; if (isIntersecting && target.waits) target.update(); } }, { rootMargin: "150px" });
const allCards = () => [...document.querySelectorAll("[data-chart]")];
let isPrinting = false, idle = 0;
const drawOneMore = () => {
  idle = 0;
  const card = allCards().find((each) => each.waits && !each.drawn && each.checkVisibility());
  if (card) { card.update(undefined, true); drawWhenIdle(); }
};
const drawWhenIdle = () => { idle ||= (window.requestIdleCallback || setTimeout)(drawOneMore); };

// A sheet shows every chart, in the light colours, as wide as the sheet.
const printing = (now) => {
  isPrinting = now;
  document.documentElement.classList.toggle("printing", now);
  document.getElementById("print-head").textContent = [View.state().run, ...[...document.getElementById("summary").querySelectorAll(":scope > :not(button)")].map((e) => e.textContent)].join(", ");
  for (const card of allCards()) card.update(undefined, true);
};
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));

const resized = new ResizeObserver((entries) => { for (const { target } of entries) if (!isPrinting && target.chart && target.clientWidth !== target.chart.drawnWidth) target.chart.redraw(); });

View.chart = ({ title, note, traces, layout, empty }) => {
  const plot = View.h("div", { class: "plot" });
  const card = View.h("section", { class: "card" }, View.h("h2", {}, title), View.h("p", { class: "sub" }, note || "\u00a0"), plot);
  card.update = (next, now) => {
    if (next) ({ traces, empty } = next);
    card.waits = !card.near && !empty && !now;
    if (card.waits) { drawWhenIdle(); return; }
    card.drawn = !empty;
    if (empty) { plot.chart = null; plot.className = "plot-empty"; plot.replaceChildren(empty); return; }
    plot.className = "plot";
    plot.chart ||= new Chart(plot, title);
    plot.chart.show(traces(), layout());
  };
  card.setAttribute("data-chart", title);
  nearWindow.observe(card);
  resized.observe(plot);
  return card;
};

// A curve: a thin line of the logged values and, over many steps, a thick running mean.
// `ends` names the columns of the ends of its intervals.
View.curve = (metrics, x, name, { label, colour = "c0", scale = 1, smooth = true, ends = null } = {}) => {
  const stretches = View.stretches(metrics, name);
  const scaled = (column) => pointsOf(stretches, x, column).y.map((value) => (value == null ? null : value * scale));
  const { x: at, sizes } = pointsOf(stretches, x, metrics.columns[name]);
  if (!at.length) return [];
  const y = scaled(metrics.columns[name]);
  const base = { kind: "line", x: at, name: label || name, colour, sizes: at.length < 3 ? 6 : sizes };
  if (ends) return [{ ...base, y, width: 2, sizes: View.markerSize(at) || sizes, low: scaled(metrics.columns[ends.low]), high: scaled(metrics.columns[ends.high]) }];
  if (!smooth || at.length < SMOOTHED_FROM) return [{ ...base, y, width: 2 }];
  return [
    { ...base, y, width: 1, faint: true, inLegend: false, told: null },
    { ...base, y: View.smoothed(y), told: y, width: 2.2 },
  ];
};

View.areas = (metrics, x, series) => {
  const any = metrics.steps.map((_, i) => (series.some(({ name }) => (metrics.columns[name] || [])[i] != null) ? 1 : null));
  const stretches = View.stretches({ steps: metrics.steps, columns: { any } }, "any");
  const present = series.filter(({ name }) => (metrics.columns[name] || []).some((value) => value));
  return present.flatMap(({ name, label, colour }) => stretches.map((rows, k) => ({
    kind: "area", name: label, colour, stack: `stretch ${k}`, inLegend: k === 0,
    x: rows.map((i) => x[i]), y: rows.map((i) => metrics.columns[name][i] || 0),
  })));
};
