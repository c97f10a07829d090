"use strict";
// Draws a chart into an element as SVG: lines with gaps, markers and intervals, stacked areas and stacked bars. One drags
// over a stretch to zoom in, double clicks to see all of it, and clicks on a name of the legend to hide its values. The
// colours are the names of variables in style.css, so that the theme and the sheet of a printer change them alone.
//
// A trace: { kind: "line" | "area" | "bar", name, x, y, colour }, where a y of null is a gap, and may have
//   width, faint, dashed   of its line
//   sizes                  diameter of each point's marker, 0 for none; one number for all
//   low, high              ends of the intervals: bars, or a shaded band where there are many
//   stack                  areas, or bars, of one name stand on each other; they have the same x
//   told                   the values that the reader is told, if they are not y; null: none
//   format                 a value as text
//   inLegend               false for further parts of what is in the legend
// A layout: { x: { title, end, whole }, y: { title, range, fromZero, limit }, legend, marks }; no value is above `limit`.
//   marks                  vertical lines: { x, text, colour }; the text is told near the line

const SVG_SPACE = "http://www.w3.org/2000/svg";
const svgElement = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS(SVG_SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
// The security policy forbids attributes with style, not properties.
const paint = (element, property, colour) => {
  element.style.setProperty(property, `var(--${colour})`);
  return element;
};

const FONT_PX = 11;
const ruler = document.createElement("canvas").getContext("2d");
const textWidth = (text) => {
  ruler.font = `${FONT_PX}px system-ui, sans-serif`;
  return ruler.measureText(text).width;
};

// --- numbers

// Round numbers from low to high, at most `most` of them; whole ones if they must be.
const ticksOf = (low, high, most, whole) => {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9)) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step);
  return { ticks, step };
};

const UNITS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
// The texts of ticks: as many digits as tell them apart, thousands as k.
const tickTexts = ({ ticks, step }) => {
  const largest = Math.max(...ticks.map(Math.abs), 0);
  if (largest !== 0 && largest < 1e-3) return ticks.map((tick) => (tick === 0 ? "0" : Number(tick.toPrecision(3)).toExponential().replace("-", "−").replace("e-", "e−")));
  const [unit, letter] = UNITS.find(([size]) => largest >= size && largest >= 1e4) || [1, ""];
  const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  return ticks.map((tick) => (tick === 0 ? "0" : (tick / unit).toFixed(digits).replace("-", "−") + letter));
};

// A value as the reader is told it: four digits.
View.told = (value) => {
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(3).replace(/-/g, "−");
  const text = Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
};

// The index of the x that is nearest; xs ascend.
const nearestIndex = (xs, x) => {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
};

const extent = (values) => {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
};

const sizeAt = (trace, i) => (Array.isArray(trace.sizes) ? trace.sizes[i] : trace.sizes) || 0;

// Areas of a stack and bars stand on each other: `base` and `top` of each value.
const stacked = (traces) => {
  const tops = new Map();
  return traces.map((trace) => {
    if (trace.kind === "line") return trace;
    const base = tops.get(trace.stack) || trace.y.map(() => 0);
    const top = trace.y.map((y, i) => base[i] + (y || 0));
    tops.set(trace.stack, top);
    return { ...trace, base, top };
  });
};

const path = (xs, ys) => {
  let text = "";
  let isOpen = false;
  xs.forEach((x, i) => {
    if (ys[i] === null) { isOpen = false; return; }
    text += `${isOpen ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
    isOpen = true;
  });
  return text;
};

const swatchOf = ({ kind, dashed, colour }) => {
  const shape = kind === "line" ? "" : " filled";
  return paint(View.h("span", { class: `swatch${shape}${dashed ? " dashed" : ""}` }), "color", colour);
};

// --- the chart

const EDGE = 9; // pixels at both ends of the x axis, for the markers
const LEAST_DRAG = 6;
const BAND_FROM = 15; // intervals: bars of more are a wall
const HOVER_RANGE = 40;
const MARK_RANGE = 6; // pixels at both sides of a mark in which its text is told

class Chart {
  constructor(plot, title) {
    this.plot = plot;
    this.hidden = new Set();
    this.zoomed = { x: null, y: null };
    this.legend = View.h("div", { class: "legend" });
    this.svg = svgElement("svg", { class: "chart", role: "img", "aria-label": title });
    this.tip = View.h("div", { class: "tip", hidden: true });
    plot.replaceChildren(this.legend, this.svg, this.tip);
    this.svg.addEventListener("pointerdown", (event) => this.beginDrag(event));
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerup", (event) => this.endDrag(event));
    this.svg.addEventListener("pointercancel", () => this.cancelDrag());
    this.svg.addEventListener("pointerleave", () => this.tell(null));
    this.svg.addEventListener("dblclick", () => this.zoom(null, null));
  }

  // Show these values; a stretch that the reader has chosen stays, and so does what he has hidden.
  show(traces, layout) {
    this.traces = traces;
    this.layout = layout;
    this.redraw();
  }

  // Show a stretch of each axis; null is all of it.
  zoom(x, y) {
    this.zoomed = { x, y };
    this.redraw();
  }

  redraw() {
    if (this.drag) { this.waits = true; return; }
    this.waits = false;
    this.drawnWidth = this.plot.clientWidth;
    this.drawLegend();
    const { width, height } = this.svg.getBoundingClientRect();
    if (width < 60 || height < 60) return;
    this.shown = stacked(this.traces.filter((trace) => !this.hidden.has(trace.name)));
    this.measure(width, height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.hover = svgElement("g", { class: "hover" });
    const values = svgElement("svg", { x: this.left, y: this.top - 3, width: this.innerWidth, height: this.innerHeight + 6, viewBox: `${this.left} ${this.top - 3} ${this.innerWidth} ${this.innerHeight + 6}` });
    const points = svgElement("g");
    for (const trace of this.shown) this.drawTrace(trace, values, points);
    this.svg.replaceChildren(...this.drawAxes(), ...this.drawMarks(), values, points, this.hover,
      svgElement("rect", { class: "drag", x: this.left, y: this.top, width: this.innerWidth, height: this.innerHeight }));
    this.tell(null);
  }

  drawLegend() {
    const named = this.layout.legend === false ? [] : this.traces.filter((trace) => trace.inLegend !== false);
    this.legend.replaceChildren(...named.map((trace) => {
      const isHidden = this.hidden.has(trace.name);
      const toggle = () => { if (isHidden) this.hidden.delete(trace.name); else this.hidden.add(trace.name); this.redraw(); };
      return View.h("span", { class: isHidden ? "entry off" : "entry", role: "button", tabindex: 0, "aria-pressed": String(!isHidden), title: isHidden ? "show" : "hide", onclick: toggle,
        onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } } },
      swatchOf(trace), View.h("span", { class: "legendtext" }, trace.name));
    }));
  }

  // The ranges of both axes, and the place of the drawing between its texts.
  measure(width, height) {
    const { x, y } = this.layout;
    const most = Math.max(2, Math.floor(height / 36));
    this.range = { x: this.zoomed.x || this.allOfX(), y: this.zoomed.y || this.allOfY(most) };
    this.yTicks = ticksOf(...this.range.y, most);
    this.yTexts = tickTexts(this.yTicks);
    const titleWidth = y.title ? FONT_PX + 9 : 0;
    this.left = Math.ceil(titleWidth + Math.max(20, ...this.yTexts.map(textWidth)) + 8);
    this.top = 8;
    this.innerWidth = width - this.left - 6;
    this.innerHeight = height - this.top - (x.title ? 40 : 22);
    this.xTicks = ticksOf(...this.range.x, Math.max(1, Math.floor(this.innerWidth / 70)), x.whole);
    this.xTexts = x.whole ? this.xTicks.ticks.map(String) : tickTexts(this.xTicks);
    const [low, high] = this.range.x;
    const [bottom, top] = this.range.y;
    const perX = (this.innerWidth - 2 * EDGE) / (high - low);
    const perY = this.innerHeight / (top - bottom);
    this.toX = (value) => this.left + EDGE + (value - low) * perX;
    this.toY = (value) => this.top + (top - value) * perY;
    this.fromX = (pixel) => low + (pixel - this.left - EDGE) / perX;
    this.fromY = (pixel) => top - (pixel - this.top) / perY;
  }

  allOfX() {
    const bars = this.traces.filter((trace) => trace.kind === "bar");
    const [first, last] = extent(this.traces.flatMap((trace) => trace.x)) || [0, 1];
    if (bars.length) return [first - 0.5, last + 0.5];
    return [Math.min(0, first), Math.max(last, this.layout.x.end || 0) || 1];
  }

  allOfY(most) {
    const { range, fromZero, limit } = this.layout.y;
    if (range) return range;
    const values = this.shown.flatMap((trace) => (trace.top ? [...trace.top, ...trace.base] : [...trace.y, ...(trace.low || []), ...(trace.high || [])]));
    let [low, high] = extent(values) || [0, 1];
    if (fromZero !== false) [low, high] = [Math.min(0, low), Math.max(0, high)];
    // an axis from 0 ends with a number, and none has numbers that cannot be
    if (fromZero !== false && low === 0 && high > 0) {
      const { step } = ticksOf(low, high, most);
      const top = step * Math.ceil(high / step - 1e-9);
      return [0, limit ? Math.max(high, Math.min(top, limit)) : top];
    }
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const bottom = fromZero !== false && low === 0 ? 0 : low - room;
    const top = fromZero !== false && high === 0 && low < 0 ? 0 : high + room;
    return [bottom, limit && high <= limit ? Math.min(top, limit) : top];
  }

  drawAxes() {
    const right = this.left + this.innerWidth;
    const bottom = this.top + this.innerHeight;
    const parts = [];
    this.yTicks.ticks.forEach((tick, i) => {
      const y = this.toY(tick);
      parts.push(svgElement("line", { class: "gridline", x1: this.left, x2: right, y1: y, y2: y }));
      parts.push(svgElement("g", { class: "ytick" }, svgElement("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, this.yTexts[i])));
    });
    parts.push(svgElement("line", { class: "axis", x1: this.left, x2: right, y1: bottom, y2: bottom }));
    this.xTicks.ticks.forEach((tick, i) => {
      const x = this.toX(tick);
      parts.push(svgElement("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      parts.push(svgElement("g", { class: "xtick" }, svgElement("text", { x, y: bottom + 16, "text-anchor": "middle" }, this.xTexts[i])));
    });
    if (this.layout.x.title) parts.push(svgElement("text", { class: "xtitle", x: (this.left + right) / 2, y: bottom + 33, "text-anchor": "middle" }, this.layout.x.title));
    if (this.layout.y.title) {
      const middle = (this.top + bottom) / 2;
      parts.push(svgElement("text", { class: "ytitle", x: FONT_PX, y: middle, "text-anchor": "middle", transform: `rotate(-90 ${FONT_PX} ${middle})` }, this.layout.y.title));
    }
    return parts;
  }

  // The marks in the stretch that is shown.
  shownMarks() {
    return (this.layout.marks || []).filter(({ x }) => x >= this.range.x[0] && x <= this.range.x[1]);
  }

  drawMarks() {
    return this.shownMarks().map(({ x, text, colour }) => {
      const place = this.toX(x);
      const line = svgElement("line", { class: "mark", x1: place, x2: place, y1: this.top, y2: this.top + this.innerHeight }, svgElement("title", {}, text));
      return colour ? paint(line, "stroke", colour) : line;
    });
  }

  drawTrace(trace, values, points) {
    const xs = trace.x.map(this.toX);
    if (trace.kind === "bar") this.drawBars(trace, xs, values);
    else if (trace.kind === "area") this.drawArea(trace, xs, values);
    else this.drawLine(trace, xs, values, points);
  }

  drawLine(trace, xs, values, points) {
    const ys = trace.y.map((y) => (y === null ? null : this.toY(y)));
    const hasInterval = (i) => Boolean(trace.low) && trace.y[i] !== null && trace.low[i] !== null && trace.high[i] !== null;
    const hasBand = trace.y.filter((_, i) => hasInterval(i)).length >= BAND_FROM;
    if (hasBand) values.append(this.band(trace, xs, hasInterval));
    values.append(paint(svgElement("path", { class: "line", d: path(xs, ys), "stroke-width": trace.width || 2, "stroke-opacity": trace.faint ? 0.34 : null, "stroke-dasharray": trace.dashed ? "2 3" : null }), "stroke", trace.colour));
    trace.y.forEach((y, i) => {
      if (y === null || !this.isInside(trace.x[i], y)) return;
      if (hasInterval(i) && !hasBand) points.append(this.interval(xs[i], trace.low[i], trace.high[i], trace.colour));
      if (sizeAt(trace, i)) points.append(paint(svgElement("circle", { class: "point", cx: xs[i], cy: ys[i], r: sizeAt(trace, i) / 2 }), "fill", trace.colour));
    });
  }

  // The intervals as areas, one for each stretch of points that the line joins.
  band(trace, xs, hasInterval) {
    const stretches = [[]];
    trace.y.forEach((_, i) => { if (hasInterval(i)) stretches[stretches.length - 1].push(i); else stretches.push([]); });
    const outline = (rows) => `${path(rows.map((i) => xs[i]), rows.map((i) => this.toY(trace.high[i])))}${path([...rows].reverse().map((i) => xs[i]), [...rows].reverse().map((i) => this.toY(trace.low[i]))).replace("M", "L")}Z`;
    const area = svgElement("path", { class: "band", d: stretches.filter((rows) => rows.length).map(outline).join("") });
    return paint(paint(area, "fill", trace.colour), "stroke", trace.colour);
  }

  isInside(x, y) {
    return x >= this.range.x[0] && x <= this.range.x[1] && y >= this.range.y[0] && y <= this.range.y[1];
  }

  interval(x, low, high, colour) {
    const [bottom, top] = this.range.y;
    const from = this.toY(Math.max(low, bottom));
    const to = this.toY(Math.min(high, top));
    const caps = [low >= bottom ? from : null, high <= top ? to : null].filter((y) => y !== null).map((y) => `M${x - 4} ${y}h8`);
    return paint(svgElement("path", { class: "interval", d: `M${x} ${from}V${to}${caps.join("")}` }), "stroke", colour);
  }

  drawArea(trace, xs, values) {
    const tops = trace.top.map(this.toY);
    const bases = trace.base.map(this.toY);
    const outline = `${path(xs, tops)}${path([...xs].reverse(), [...bases].reverse()).replace("M", "L")}Z`;
    const area = svgElement("path", { class: "area", d: outline, "stroke-width": xs.length < 2 ? 3 : 0.5 });
    values.append(paint(paint(area, "fill", trace.colour), "stroke", trace.colour));
  }

  drawBars(trace, xs, values) {
    const width = Math.max(1, (this.toX(1) - this.toX(0)) * 0.9);
    const bars = trace.x.map((_, i) => {
      const top = this.toY(trace.top[i]);
      return `M${(xs[i] - width / 2).toFixed(1)} ${top.toFixed(1)}h${width.toFixed(1)}V${this.toY(trace.base[i]).toFixed(1)}h${(-width).toFixed(1)}Z`;
    });
    values.append(paint(svgElement("path", { class: "bars", d: bars.join("") }), "fill", trace.colour));
  }

  // --- what the pointer does

  at(event) {
    const box = this.svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  beginDrag(event) {
    if (event.button !== 0 || !event.target.classList.contains("drag")) return;
    this.drag = { from: this.at(event), box: svgElement("rect", { class: "chosen" }) };
    this.svg.append(this.drag.box);
    this.svg.setPointerCapture(event.pointerId);
    this.tell(null);
  }

  move(event) {
    const [x, y] = this.at(event);
    if (!this.drag) { this.tell(event.target.classList.contains("drag") ? x : null, y); return; }
    const { xs, ys } = this.chosen(x, y);
    const [left, right] = xs || [this.left, this.left + this.innerWidth];
    const [top, bottom] = ys || [this.top, this.top + this.innerHeight];
    const isChosen = xs || ys;
    Object.entries({ x: left, y: top, width: isChosen ? right - left : 0, height: isChosen ? bottom - top : 0 }).forEach(([name, value]) => this.drag.box.setAttribute(name, value));
  }

  // The pixels of the stretch from where the drag began: of an axis along which it hardly went, none.
  chosen(x, y) {
    const within = (value, low, size) => Math.min(low + size, Math.max(low, value));
    const ends = (a, b) => (Math.abs(a - b) < LEAST_DRAG ? null : [Math.min(a, b), Math.max(a, b)]);
    let xs = ends(this.drag.from[0], within(x, this.left, this.innerWidth));
    let ys = ends(this.drag.from[1], within(y, this.top, this.innerHeight));
    const length = (pair) => (pair ? pair[1] - pair[0] : 0);
    if (length(ys) < 0.25 * length(xs)) ys = null;
    if (length(xs) < 0.25 * length(ys)) xs = null;
    return { xs, ys };
  }

  endDrag(event) {
    if (!this.drag) return;
    const { xs, ys } = this.chosen(...this.at(event));
    this.cancelDrag();
    if (!xs && !ys) return;
    this.zoom(xs ? xs.map(this.fromX) : this.zoomed.x, ys ? [this.fromY(ys[1]), this.fromY(ys[0])] : this.zoomed.y);
  }

  cancelDrag() {
    if (!this.drag) return;
    this.drag.box.remove();
    this.drag = null;
    if (this.waits) this.redraw();
  }

  // The values at the x that is nearest to the pointer, in a box beside it; null: none.
  tell(pixel, y = 0) {
    this.tip.hidden = true;
    if (!this.hover) return;
    this.hover.replaceChildren();
    if (pixel === null) return;
    const traces = this.shown.filter((trace) => trace.told !== null && trace.x.length);
    const wanted = this.fromX(pixel);
    const near = traces.map((trace) => trace.x[nearestIndex(trace.x, wanted)]);
    const x = near.reduce((best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best), Infinity);
    if (!(Math.abs(this.toX(x) - pixel) <= HOVER_RANGE) || x < this.range.x[0] || x > this.range.x[1]) return;
    const rows = traces.map((trace) => ({ trace, i: nearestIndex(trace.x, x) })).filter(({ trace, i }) => Math.abs(this.toX(trace.x[i]) - this.toX(x)) < 4 && trace.y[i] !== null);
    if (!rows.length) return;
    const place = this.toX(x);
    this.hover.append(svgElement("line", { x1: place, x2: place, y1: this.top, y2: this.top + this.innerHeight }));
    const inside = rows.filter(({ trace, i }) => this.isInside(trace.x[i], trace.top ? trace.top[i] : trace.y[i]));
    for (const { trace, i } of inside) this.hover.append(paint(svgElement("circle", { cx: this.toX(trace.x[i]), cy: this.toY(trace.top ? trace.top[i] : trace.y[i]), r: 3.5 }), "fill", trace.colour));
    const marks = this.shownMarks().filter((mark) => Math.abs(this.toX(mark.x) - pixel) <= MARK_RANGE || Math.abs(this.toX(mark.x) - place) <= MARK_RANGE);
    this.tip.replaceChildren(View.h("div", { class: "soft" }, this.layout.x.whole ? `step ${x}` : `${View.told(x)} ${this.layout.x.title}`), ...(rows[0].trace.kind === "line" ? rows : rows.reverse()).map(tipRow),
      ...marks.map(({ text }) => View.h("div", { class: "mark-text" }, text)));
    this.tip.hidden = false;
    const after = place + 14 + this.tip.offsetWidth > this.left + this.innerWidth ? place - 14 - this.tip.offsetWidth : place + 14;
    const lowest = this.top + this.innerHeight - this.tip.offsetHeight;
    const above = Math.max(0, Math.min(lowest, y - this.tip.offsetHeight / 2));
    this.tip.style.left = `${Math.max(0, after)}px`;
    this.tip.style.top = `${this.legend.offsetHeight + above}px`;
  }
}

const tipRow = ({ trace, i }) => {
  const format = trace.format || View.told;
  const hasInterval = trace.low && trace.low[i] !== null && trace.high[i] !== null;
  return View.h("div", { class: "told" }, swatchOf(trace), View.h("span", {}, trace.name), View.h("b", {}, format((trace.told || trace.y)[i])),
    hasInterval ? View.h("span", { class: "soft" }, `${format(trace.low[i])} to ${format(trace.high[i])}`) : null);
};
