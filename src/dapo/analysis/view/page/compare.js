"use strict";
// Several runs: their curves over steps, tokens or seconds, and the options that differ.

const COMPARED = ["eval accuracy", "reward/accuracy", "reward/mean", "rollout/response_tokens_mean", "loss/entropy", "loss/token_prob_mean", "rollout/keep_rate", "time/step_s"];
const RUN_COLOURS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

const metricTraces = (name, runs, all, axis) => runs.flatMap((run, i) => {
  const metrics = all[i], x = View.xOf(metrics, axis), colour = RUN_COLOURS[i % RUN_COLOURS.length];
  if (name === "eval accuracy") return View.evaluationNames(metrics).slice(0, 1).flatMap((n) => View.heldOut(metrics, x, n, colour, run));
  const words = View.words.metrics[name], scale = words && words.unit === "fraction" ? 100 : 1;
  return View.curve(metrics, x, name, { label: run, colour, scale });
});

const unitOf = (name) => { const w = View.words.metrics[name]; return name === "eval accuracy" ? "held out (%)" : !w ? "" : w.unit === "fraction" ? "%" : w.unit; };
const shownValue = (value) => (value === null || value === undefined ? View.h("span", { class: "soft" }, "not set") : View.h("code", {}, typeof value === "string" ? value : JSON.stringify(value)));

View.pages.compare = {
  title: "Compare",
  async show(main, state) {
    const names = View.wholeRuns().map((r) => r.name);
    const head = View.h("div", { class: "head-row" }, View.h("h1", {}, "Compare"));
    if (names.length < 2) { main.replaceChildren(head, View.empty("Only one run is shown. To compare runs: dapo view RUN OTHER_RUN, or dapo view in the folder that contains runs/.")); return {}; }
    const chosen = (state.runs ? state.runs.split(",") : names.slice(0, 4)).filter((n) => names.includes(n));
    const axis = View.axes[state.x] ? state.x : "steps";
    const [all, difference] = await Promise.all([Promise.all(chosen.map(View.metrics)), View.get("configs", { runs: chosen.join(",") })]);
    const every = [...new Set(all.flatMap((m) => Object.keys(m.columns)))].sort();
    const metrics = [...COMPARED, ...(state.metric && !COMPARED.includes(state.metric) ? [state.metric] : [])];
    const order = state.metric ? [state.metric, ...metrics.filter((m) => m !== state.metric)] : metrics;
    const cards = order.map((name) => View.chart({ title: name === "eval accuracy" ? "Held-out accuracy" : name, note: (View.words.metrics[name] || {}).meaning || "with 95 % intervals", traces: () => metricTraces(name, chosen, all, axis), layout: { xaxis: { title: View.axes[axis], rangemode: "tozero" }, yaxis: { title: unitOf(name), rangemode: name.startsWith("reward/mean") ? "normal" : "tozero" } } }));
    const picker = View.h("select", { id: "metric", "aria-label": "Metric to show first", onchange: (event) => View.go({ metric: event.target.value }) }, View.h("option", { value: "" }, "any other metric …"), every.map((n) => View.h("option", { value: n }, n)));
    picker.value = state.metric || "";
    const rows = difference.rows;
    main.replaceChildren(View.h("div", { class: "head-row" }, View.h("h1", {}, "Compare"), View.choices("Over", Object.keys(View.axes).map((a) => [a, a]), axis, (x) => View.go({ x }))),
      View.h("div", { class: "filters" }, View.choices("Runs", names.map((n) => [n, n]), chosen.join(","), (runs) => View.go({ runs: runs || names[0] }), { several: true }), View.h("label", { class: "field" }, "First chart", picker)),
      View.h("div", { class: "grid" }, cards),
      View.h("div", { class: "head-row" }, View.h("h2", {}, "Options that differ"), View.h("span", { class: "note" }, `${rows.length} of ${difference.options} options`)),
      rows.length ? View.table([{ name: "option", cell: (r) => View.h("code", {}, r.name) }, ...chosen.map((n, i) => ({ name: n, cell: (r) => shownValue(r.values[i]) }))], rows) : View.empty(chosen.length < 2 ? "Choose a second run to see where the options differ." : "These runs have the same options."));
    const draw = () => cards.forEach((card, i) => { const traces = metricTraces(order[i], chosen, all, axis); card.update({ traces: () => metricTraces(order[i], chosen, all, axis), empty: traces.length ? null : "None of these runs logged this metric." }); });
    return { redraw: draw };
  },
};
