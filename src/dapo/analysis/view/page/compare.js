"use strict";
// Several runs: their curves over steps, tokens or seconds, and the options that differ.

const COMPARED = ["eval accuracy", "reward/accuracy", "reward/mean", "rollout/response_tokens_mean", "loss/entropy", "loss/token_prob_mean", "rollout/keep_rate", "time/step_s"];
const RUN_COLOURS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

// The metrics of the charts: a verifier of scores logs no accuracy of its responses, but their mean score.
const comparedOf = (all) => {
  const logs = (name) => all.some((metrics) => metrics.columns[name]);
  return COMPARED.map((name) => (name === "reward/accuracy" && !logs(name) && logs("reward/score_mean") ? "reward/score_mean" : name));
};

const metricTraces = (name, runs, all, axis) => runs.flatMap((run, i) => {
  const metrics = all[i], x = View.xOf(metrics, axis), colour = RUN_COLOURS[i % RUN_COLOURS.length];
  if (name === "eval accuracy") return View.evaluationNames(metrics).slice(0, 1).flatMap((n) => View.heldOut(metrics, x, n, colour, View.short(run)));
  return View.curve(metrics, x, name, { label: View.short(run), colour, scale: View.scaleOf(name, all) });
});

// The largest possible value of a chart: fractions and accuracies are percentages.
View.limitOf = (name, all) => (name === "eval accuracy" ? (all.some(View.hasMeanScores) ? null : 100) : View.scaleOf(name, all) === 100 ? 100 : null);
const unitOf = (name, all) => (name === "eval accuracy" ? (all.some(View.hasMeanScores) ? "held out, mean score" : "held out (%)") : View.unitOf(name, all));

// The options in which runs differ, with the value in each.
const differing = (tables) => {
  const values = tables.map((t) => new Map(t.rows.map((r) => [r.name, r.value])));
  const names = [...new Set(values.flatMap((v) => [...v.keys()]))];
  const rows = names.map((name) => ({ name, values: values.map((v) => v.get(name) ?? null) }));
  return { options: names.length, rows: rows.filter((r) => r.values.some((v) => JSON.stringify(v) !== JSON.stringify(r.values[0]))) };
};

// The last evaluation of each other run, paired by problem with that of the first.
const pairedWithFirst = async (runs) => {
  const last = await Promise.all(runs.map(async (run) => (await View.get("evaluations", { run })).evaluations.filter((e) => !e.problem).pop()));
  return Promise.all(runs.slice(1).map(async (run, i) => {
    const [a, b] = [last[0], last[i + 1]];
    if (!a || !b) return { run, error: `${a ? run : runs[0]} has no evaluation` };
    const found = await View.get("paired", { a_run: runs[0], a_step: a.step, b_run: run, b_step: b.step }).catch((error) => ({ error: error.message }));
    return { run, a, b, ...found };
  }));
};
const pairedColumns = (first, isBinary) => [
  { name: "run", cell: (r) => (r.error ? r.run : View.h("a", { href: View.link("evaluation", { a_run: first, a_step: r.a.step, b_run: r.run, b_step: r.b.step }), title: "the same difference by problem" }, r.run)) },
  { name: isBinary ? "accuracy" : "mean score", number: true, cell: (r) => (r.a && r.b ? `${View.judged(r.a.accuracy, r.a.binary)} → ${View.judged(r.b.accuracy, r.b.binary)}` : "") },
  { name: "difference", number: true, cell: (r) => (r.error ? "" : View.h("b", { class: View.changeClass(r) }, View.points(r.difference, r.a.binary))) },
  { name: "95 % interval", number: true, cell: (r) => (r.error ? "" : r.low === null ? "none" : `${View.points(r.low, r.a.binary, "")} to ${View.points(r.high, r.a.binary, "")}`) },
  { name: "verdict", cell: (r) => (r.error ? View.h("span", { class: "note problem" }, `not paired: ${r.error}`) : View.verdict(r, r.run)) },
  { name: "problems", cell: (r) => (r.error ? "" : `${View.count(r.problems)}: better on ${r.better}, worse on ${r.worse}`) },
];

View.pages.compare = {
  title: "Compare",
  async show(main, state) {
    const names = View.wholeRuns().map((r) => r.name);
    const head = View.h("div", { class: "head-row" }, View.h("h1", {}, "Compare"));
    if (names.length < 2) { main.replaceChildren(head, View.empty("Only one run is shown. To compare runs: dapo view RUN OTHER_RUN, or dapo view in the folder that contains runs/.")); return {}; }
    const newest = [...new Set([state.run, ...names])].filter((n) => names.includes(n)).slice(0, 4); // the open run first
    const asked = state.runs ? state.runs.split(",") : newest, chosen = asked.filter((n) => names.includes(n)), absent = asked.filter((n) => !names.includes(n));
    const axis = View.axes[state.x] ? state.x : "steps";
    let [all, options, paired] = await Promise.all([Promise.all(chosen.map(View.metrics)), Promise.all(chosen.map((run) => View.get("options", { run }))), pairedWithFirst(chosen)]);
    const pairedAreBinary = () => paired.every((r) => !r.a || r.a.binary);
    const heldOut = View.h("div", { id: "held-out" }), drawPaired = () => heldOut.replaceChildren(View.table(pairedColumns(chosen[0], pairedAreBinary()), paired));
    const difference = differing(options);
    const every = [...new Set(all.flatMap((m) => Object.keys(m.columns)))].sort();
    const compared = comparedOf(all);
    const metrics = [...compared, ...(state.metric && !compared.includes(state.metric) ? [state.metric] : [])];
    const order = state.metric ? [state.metric, ...metrics.filter((m) => m !== state.metric)] : metrics;
    const cards = order.map((name) => View.chart({ title: name === "eval accuracy" ? (all.some(View.hasMeanScores) ? "Held-out score" : "Held-out accuracy") : name, note: (View.metricOf(name) || {}).meaning || "with 95 % intervals", traces: () => metricTraces(name, chosen, all, axis), layout: () => ({ x: View.xAxis(axis, ...all.map((m) => View.xOf(m, axis))), y: { title: unitOf(name, all), fromZero: !name.startsWith("reward/mean"), limit: View.limitOf(name, all) }, marks: chosen.flatMap((run, i) => View.marks(all[i], axis, { run: View.short(run), colour: RUN_COLOURS[i % RUN_COLOURS.length] })) }) }));
    const picker = View.h("select", { id: "metric", "aria-label": "Metric to show first", onchange: (event) => View.go({ metric: event.target.value }) }, View.h("option", { value: "" }, "any other metric …"), every.map((n) => View.h("option", { value: n }, n)));
    picker.value = state.metric || "";
    const rows = difference.rows;
    main.replaceChildren(View.h("div", { class: "head-row" }, View.h("h1", {}, "Compare"), View.choices("Over", Object.keys(View.axes).map((a) => [a, a]), axis, (x) => View.go({ x }))),
      View.h("div", { class: "filters" }, View.choices("Runs", [...chosen, ...names.filter((n) => !chosen.includes(n))].map((n) => [n, View.short(n), n]), chosen.join(","), (runs) => View.go({ runs: runs || names[0] }), { several: true }), View.h("label", { class: "field" }, "First chart", picker)),
      absent.length ? View.h("p", { class: "note problem" }, `There is no run ${absent.join(", ")} here, or it is damaged.`) : "",
      ...(paired.length ? [View.h("div", { class: "head-row" }, View.h("h2", {}, `Held-out ${pairedAreBinary() ? "accuracy" : "score"}, compared with ${chosen[0]}`), View.note("last evaluations, paired by problem: the difficulty of the problems does not widen the interval")), heldOut, View.h("p", {}, " ")] : []),
      View.h("div", { class: "grid" }, cards),
      View.h("div", { class: "head-row" }, View.h("h2", {}, "Options that differ"), View.h("span", { class: "note" }, `${rows.length} of ${difference.options} options`)),
      rows.length ? View.h("div", { id: "differing" }, View.table([{ name: "option", cell: (r) => View.h("code", {}, r.name) }, ...chosen.map((n, i) => ({ name: View.short(n), title: n, cell: (r) => View.optionValue(r.values[i]) }))], rows)) : View.empty(chosen.length < 2 ? "Choose a second run to see where the options differ." : "These runs have the same options."));
    const draw = () => cards.forEach((card, i) => { const traces = metricTraces(order[i], chosen, all, axis); card.update({ traces: () => metricTraces(order[i], chosen, all, axis), empty: traces.length ? null : "None of these runs logged this metric." }); });
    if (paired.length) drawPaired();
    return { redraw: draw, runs: chosen, async follow() { [all, paired] = await Promise.all([Promise.all(chosen.map(View.metrics)), pairedWithFirst(chosen)]); draw(); if (paired.length) drawPaired(); } };
  },
};
