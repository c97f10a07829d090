"use strict";
// Charts: one card each, of a fixed height, so that nothing moves when values arrive. The colours are in style.css.

View.colour = (name) => {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};
View.faded = (colour, alpha) => colour.replace(/^rgba?\(([^)]+)\)$/, (_, parts) => `rgba(${parts.split(/,\s*/).slice(0, 3).join(",")},${alpha})`);

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
View.unitOf = (name) => { const m = View.metricOf(name); return !m || m.unit === "1" ? "" : m.unit === "fraction" ? "%" : m.unit; };
View.scaleOf = (name) => { const m = View.metricOf(name); return m && m.unit === "fraction" ? 100 : 1; };

// The layout of the x axis: from 0 to the last value in each chart of a page, with room for the markers at both ends.
View.xAxis = (axis, ...xs) => {
  const last = xs.flat().reduce((a, b) => Math.max(a, b), 0) || 1;
  return { title: View.axes[axis], autorangeoptions: { minallowed: -0.06 * last, maxallowed: 1.06 * last } };
};
// Steps are whole numbers: a short stretch of them has a tick at each.
const wholeTicks = (plot) => {
  const { range: [low, high], dtick = null } = plot.layout.xaxis, wanted = high - low < 6 ? 1 : null;
  if (dtick !== wanted) Plotly.relayout(plot, { "xaxis.dtick": wanted, "xaxis.tickmode": wanted ? "linear" : "auto" });
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
  const size = stretches.flatMap((rows, k) => [...(k ? [0] : []), ...rows.map(() => (rows.length < 2 ? 5 : 0))]);
  return { x: at, y: rows.map((i) => (i === null ? null : values[i])), size };
};

// A card with a chart. `traces` and `layout` are functions, called again when values come or the theme changes. The chart is drawn when the card comes
// near the window, and the others one by one when nothing else is to do: drawing ten charts at once takes seconds on a
// small machine.
const nearWindow = new IntersectionObserver((entries) => { for (const { target, isIntersecting } of entries) { target.near = isIntersecting; if (isIntersecting && target.waits) target.update(); } }, { rootMargin: "150px" });
const allCards = () => [...document.querySelectorAll("[data-chart]")];
let isPrinting = false, idle = 0;
const drawOneMore = () => {
  idle = 0;
  const card = allCards().find((each) => each.waits && !each.drawn);
  if (card) { card.update(undefined, true); drawWhenIdle(); }
};
const drawWhenIdle = () => { idle ||= (window.requestIdleCallback || setTimeout)(drawOneMore); };

// A sheet shows every chart, in the light colours, as wide as the sheet.
const printing = (now) => {
  isPrinting = now;
  document.documentElement.classList.toggle("printing", now);
  document.getElementById("print-head").textContent = [View.state().run, ...[...document.getElementById("summary").children].map((e) => e.textContent)].join(", ");
  for (const card of allCards()) card.update(undefined, true);
  for (const svg of document.querySelectorAll(".main-svg")) { // scaled to the sheet, whose width is not known here
    if (now) svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`); else svg.removeAttribute("viewBox");
  }
};
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));

View.chart = ({ title, note, traces, layout, empty, tall }) => {
  const plot = View.h("div", { class: tall ? "plot tall" : "plot", role: "img", "aria-label": title });
  const card = View.h("section", { class: "card" }, View.h("h2", {}, title), View.h("p", { class: "sub" }, note || "\u00a0"), plot);
  card.update = (next, now) => {
    if (next) ({ traces, empty } = next);
    card.waits = !card.near && !empty && !now;
    if (card.waits) { drawWhenIdle(); return; }
    if (empty) { if (card.drawn) Plotly.purge(plot); card.drawn = false; plot.className = "plot-empty"; plot.replaceChildren(empty); return; }
    if (!card.drawn) { plot.className = tall ? "plot tall" : "plot"; plot.replaceChildren(); }
    const isNew = !card.drawn, told = layout(), ofSteps = told.xaxis.title === View.axes.steps;
    card.drawn = true;
    const size = isPrinting ? { width: plot.clientWidth, height: plot.clientHeight } : {};
    Plotly.react(plot, traces(), { ...View.layout(told), ...size }, { displayModeBar: false, responsive: true });
    if (ofSteps) wholeTicks(plot);
    if (ofSteps && isNew) plot.on("plotly_relayout", () => wholeTicks(plot));
  };
  card.setAttribute("data-chart", title);
  nearWindow.observe(card);
  return card;
};

View.layout = ({ xaxis = {}, yaxis = {}, ...rest } = {}) => {
  const ink = View.colour("soft"), grid = View.colour("grid"), card = View.colour("card");
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, tickfont: { size: 11 }, automargin: true, fixedrange: false };
  return {
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 12, t: 6, b: 40 },
    hovermode: "x unified", hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: View.colour("ink"), size: 12 } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
    showlegend: true, dragmode: "zoom", uirevision: "as the reader left it",
    xaxis: { ...axis, showgrid: false, ...xaxis, title: { text: xaxis.title || "", font: { size: 11 }, standoff: 8 } },
    yaxis: { ...axis, rangemode: "tozero", ...yaxis, title: { text: yaxis.title || "", font: { size: 11 }, standoff: 6 } },
    ...rest,
  };
};

// A curve: a thin line of the logged values and, over many steps, a thick running mean.
View.curve = (metrics, x, name, { label, colour = "c0", scale = 1, smooth = true } = {}) => {
  const { x: at, y: raw, size } = pointsOf(View.stretches(metrics, name), x, metrics.columns[name]);
  if (!at.length) return [];
  const y = raw.map((v) => (v === null ? null : v * scale)), shade = View.colour(colour);
  const shown = at.length > 2 && size.some(Boolean) ? { mode: "lines+markers", marker: { size } } : { mode: at.length < 3 ? "lines+markers" : "lines" };
  const base = { x: at, type: "scatter", ...shown, cliponaxis: false, name: label || name };
  if (!smooth || at.length < SMOOTHED_FROM) return [{ ...base, y, line: { color: shade, width: 2 } }];
  return [
    { ...base, y, line: { color: View.faded(shade, 0.32), width: 1 }, showlegend: false, hoverinfo: "skip" },
    { ...base, y: View.smoothed(y), customdata: y, hovertemplate: "%{customdata:.4~g}", line: { color: shade, width: 2.2 } },
  ];
};

View.areas = (metrics, x, series) => {
  const any = metrics.steps.map((_, i) => (series.some(({ name }) => (metrics.columns[name] || [])[i] != null) ? 1 : null));
  const stretches = View.stretches({ steps: metrics.steps, columns: { any } }, "any");
  return series.filter(({ name }) => (metrics.columns[name] || []).some((v) => v)).flatMap(({ name, label, colour }) => stretches.map((rows, k) => ({
    x: rows.map((i) => x[i]), y: rows.map((i) => metrics.columns[name][i] || 0), type: "scatter", mode: "lines", stackgroup: `stretch ${k}`, legendgroup: name, showlegend: k === 0,
    name: label, line: { width: 0.5, color: View.colour(colour) }, fillcolor: View.faded(View.colour(colour), 0.75), hovertemplate: "%{y:.4~s}",
  })));
};
