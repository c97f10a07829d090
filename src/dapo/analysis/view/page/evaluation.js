"use strict";
// Evaluations on held-out problems: each with its interval, and any two paired by problem.

const evaluationColumns = (binary) => [
  { name: "step", number: true, cell: (e) => View.count(e.step) },
  { name: binary ? "accuracy" : "mean score", number: true, cell: (e) => View.h("b", {}, View.judged(e.accuracy, binary)) },
  { name: "95 % interval", number: true, cell: (e) => (e.accuracy === null ? e.interval_note : e.low === null ? "none" : `${View.score(e.low, binary)} to ${View.score(e.high, binary)}`), title: "over problems" },
  { name: "other estimates", cell: (e) => Object.keys(e).filter((n) => /^(pass|cons)@/.test(n) && n !== "pass@1").map((n) => `${n} ${View.percent(e[n])}`).join("  ") || "–" },
  { name: "problems", number: true, cell: (e) => `${View.count(e.problems)} × ${e.samples_per_problem}` },
  { name: "tokens", number: true, cell: (e) => View.number(e.response_tokens_mean, 1), title: "mean response" },
  { name: "truncated", number: true, cell: (e) => View.percent(e.truncated_fraction) },
  { name: "without an answer", number: true, cell: (e) => View.percent(e.no_answer_fraction) },
  { name: "judged by", cell: (e) => (e.verifier ? View.optionValue(e.verifier) : "–"), title: "the verifier" },
];

View.verdict = (found, name) => (found.low === null ? "" : found.low <= 0 && found.high >= 0 ? "no significant difference" : `${name} is ${found.low > 0 ? "better" : "worse"}`);
// Green or red only where the interval excludes 0.
View.changeClass = (found) => (found.low > 0 || found.high < 0 ? View.signClass(found.difference) : "");

const verdictLine = (found, binary, isSame) => {
  if (isSame) return View.h("p", { id: "paired" }, "A and B are the same evaluation: choose another one to see the difference.");
  const unit = (v) => View.points(v, binary);
  const sure = found.low === null ? "no interval: fewer than two problems, or the same difference on all" : `95 % interval ${unit(found.low)} to ${unit(found.high)}`;
  const verdict = View.verdict(found, "B");
  if (!found.problems) return View.h("p", { id: "paired" }, "No problem has a verdict in both evaluations.");
  return View.h("p", { id: "paired" }, View.h("span", { class: `number ${View.changeClass(found)}` }, unit(found.difference)), `  ${sure}`, verdict ? View.h("b", {}, `: ${verdict}`) : "", ". ",
    `Paired over ${View.plural(found.problems, "problem")}: better on ${found.better}, worse on ${found.worse}, equal on ${found.equal}.`);
};

const pickEvaluation = (which, state, all) => {
  const element = View.h("select", { id: `pick-${which}`, "aria-label": `evaluation ${which.toUpperCase()}`, onchange: (event) => { const [run, step] = event.target.value.split("\n"); View.go({ [`${which}_run`]: run, [`${which}_step`]: step, problem: "", offset: "" }); } },
    all.map((e) => View.h("option", { value: `${e.run}\n${e.step}` }, `step ${e.step}: ${View.judged(e.accuracy, e.binary)}${all.every((x) => x.run === state.run) ? "" : `, ${e.run}`}`)));
  element.value = `${state[`${which}_run`]}\n${state[`${which}_step`]}`;
  return View.h("label", { class: "field" }, which === "a" ? "A (first)" : "B (second)", element);
};

const responseList = (title, row) => View.h("section", { class: "card" }, View.h("h2", {}, title), row.error ? View.h("p", { class: "note problem" }, row.error) : (row.responses || []).map((r) => View.h("div", { class: "response" },
  View.h("div", { class: "meta" }, View.verdictBadge(r), r.answer ? View.h("span", { class: "soft" }, "read as ", View.h("code", {}, r.answer)) : r.answer === "" ? View.h("span", { class: "soft" }, "no answer found") : null, View.h("span", { class: "soft" }, `${r.tokens} tokens${r.finish === "length" ? ", cut at the limit" : ""}`)),
  View.h("div", { class: "text-box" }, r.text))));

const problemDetail = async (state) => {
  const [a, b] = await Promise.all(["a", "b"].map((w) => View.get("evaluation", { run: state[`${w}_run`], step: state[`${w}_step`], problem: state.problem }).catch((error) => ({ error: error.message }))));
  return View.h("div", { id: "detail" }, View.h("div", { class: "head-row" }, View.h("h2", {}, `Problem ${state.problem}`), View.h("button", { type: "button", onclick: () => View.go({ problem: "" }) }, "close")),
    View.h("div", { class: "card prompt" }, View.h("div", { class: "text-box" }, a.question || b.question || ""), a.answer || b.answer ? View.h("p", { class: "note" }, "reference ", View.h("code", {}, String(a.answer || b.answer))) : null),
    View.h("div", { class: "split" }, responseList(`A: ${state.a_run}, step ${state.a_step}`, a), responseList(`B: ${state.b_run}, step ${state.b_step}`, b)), View.h("p", {}, " "));
};

// What changed comes first; problems with equal results are shown on request, except in an order that is not by change.
const pairedTable = (found, binary, state, order) => {
  const all = found.table.map((r) => ({ ...r, difference: r.first === null || r.second === null ? null : r.second - r.first }));
  const isHidden = (r) => order !== "hardest" && !state.equal && r.difference === 0;
  const rows = all.filter((r) => !isHidden(r)), numEqual = all.filter((r) => r.difference === 0).length;
  const orders = { worse: (a, b) => (a.difference ?? 9) - (b.difference ?? 9), better: (a, b) => (b.difference ?? -9) - (a.difference ?? -9), hardest: (a, b) => (a.second ?? 9) - (b.second ?? 9) };
  rows.sort(orders[order]);
  const offset = Number(state.offset) || 0, limit = View.pageRows(50);
  const equal = order === "hardest" || !numEqual ? null : View.h("p", { class: "note" }, `${View.plural(numEqual, "problem")} with equal results `, View.h("button", { type: "button", id: "equal", onclick: () => View.go({ equal: state.equal ? "" : 1, offset: "" }) }, state.equal ? "hide" : "show"));
  if (!rows.length) return [equal];
  return [equal, View.table([
    { name: "problem", class: "text", cell: (r) => View.h("a", { href: View.address({ problem: r.id }) }, View.h("div", { class: "clip" }, r.question || r.id)) },
    { name: "reference", class: "text", where: (r) => r.answer, cell: (r) => View.h("div", { class: "clip" }, String(r.answer)) },
    { name: "source", cell: (r) => r.source },
    { name: "A", number: true, cell: (r) => View.score(r.first, binary) },
    { name: "B", number: true, cell: (r) => View.score(r.second, binary) },
    { name: "B − A", number: true, cell: (r) => View.h("span", { class: View.signClass(r.difference) }, r.difference === null ? "–" : binary ? View.signed(100 * r.difference, 0) : View.signed(r.difference)) },
  ], rows.slice(offset, offset + limit), (r) => View.go({ problem: r.id })), View.pager(offset, limit, rows.length, (next) => View.go({ offset: next || "" }))];
};

// The evaluations, of many the last ones first to be seen.
const evaluationPages = (own, binary, state) => {
  const limit = View.pageRows(20) < 20 ? 5 : 12, last = Math.max(0, own.length - limit);
  const offset = state.evaluations === undefined ? last : Math.max(0, Math.min(last, Number(state.evaluations) || 0));
  const table = View.table(evaluationColumns(binary), own.slice(offset, offset + limit));
  return own.length <= limit ? [table] : [table, View.pager(offset, limit, own.length, (next) => View.go({ evaluations: Math.min(next, last) }), "", "evaluations")];
};

View.pages.evaluation = {
  title: "Evaluation",
  async show(main, state) {
    const lists = await Promise.all(View.runs().map(async (r) => {
      const found = await View.get("evaluations", { run: r.name }).catch((error) => { if (r.name === state.run) throw error; return { evaluations: [] }; });
      return found.evaluations.map((e) => ({ ...e, run: r.name }));
    }));
    const all = lists.flat().filter((e) => !e.problem), own = all.filter((e) => e.run === state.run);
    const damaged = lists.flat().filter((e) => e.problem && e.run === state.run);
    const head = View.h("div", { class: "head-row" }, View.h("h1", {}, "Evaluation"));
    const notes = damaged.map((e) => View.h("p", { class: "note problem" }, e.problem));
    if (!own.length) {
      const held = View.runs().find((r) => r.name === state.run).held_out;
      main.replaceChildren(head, ...notes, View.empty(held ? "No evaluation is stored: the first comes before step 1, the next ones every train.eval_every steps." : "This run has no held-out problems: data.eval is not set, so nothing was evaluated."));
      return { follow: View.show };
    }
    const chosen = { a_run: state.a_run || state.run, a_step: state.a_step ?? String(own[0].step), b_run: state.b_run || state.run, b_step: state.b_step ?? String(own[own.length - 1].step) };
    const now = { ...state, ...chosen }, binary = own.every((e) => e.binary), scale = binary ? 100 : 1;
    const scaled = (value) => (value === null || value === undefined ? null : value * scale);
    const format = (value) => (binary ? `${value.toFixed(1)} %` : View.number(value));
    const sources = [...new Set(own.flatMap((e) => Object.keys(e.by_source)))];
    const whole = { kind: "line", x: own.map((e) => e.step), y: own.map((e) => scaled(e.accuracy)), low: own.map((e) => scaled(e.low)), high: own.map((e) => scaled(e.high)), name: own[0].name, colour: "c1", width: 2, sizes: View.markerSize(own), format };
    const bySource = (source, i) => ({ ...whole, low: null, high: null, y: own.map((e) => (e.by_source[source] ? scaled(e.by_source[source].accuracy) : null)), name: source, colour: ["c0", "c2", "c3", "c4", "c5", "c6"][i % 6], width: 1.4, dashed: true, sizes: own.length < 15 ? 5 : 0 });
    const marks = View.marks(await View.metrics(state.run), "steps");
    const traces = () => [whole, ...(sources.length > 1 ? sources.map(bySource) : [])];
    const chart = View.chart({ title: binary ? "Held-out accuracy" : "Held-out score", note: "with the 95 % interval over problems; dotted: by source", traces, layout: () => ({ x: View.xAxis("steps", own.map((e) => e.step)), y: { title: binary ? "correct (%)" : "mean score", fromZero: true, limit: binary ? 100 : null }, marks }) });
    const body = [head, ...notes, View.h("div", { class: "split" }, chart, View.h("section", { class: "card" }, View.h("h2", {}, "Paired difference"), View.h("p", { class: "sub" }, "B minus A on the same problems; pairing removes their difficulty from the interval"),
      View.h("div", { class: "choices" }, pickEvaluation("a", now, all), pickEvaluation("b", now, all)), View.h("div", { id: "difference" }))), View.h("p", {}, " "), ...evaluationPages(own, binary, state), View.h("p", {}, " ")];
    main.replaceChildren(...body);
    if (state.problem) main.append(await problemDetail(now));
    try {
      const found = await View.get("paired", chosen);
      const order = ["worse", "better", "hardest"].includes(state.order) ? state.order : found.worse ? "worse" : "better";
      main.querySelector("#difference").replaceChildren(verdictLine(found, binary, chosen.a_run === chosen.b_run && chosen.a_step === chosen.b_step));
      main.append(View.h("div", { class: "head-row" }, View.h("h2", {}, "By problem"), View.choices("Order", [["worse", "most worsened"], ["better", "most improved"], ["hardest", "hardest in B"]], order, (next) => View.go({ order: next, offset: "" }))), ...pairedTable(found, binary, state, order).filter(Boolean));
    } catch (error) { main.querySelector("#difference").replaceChildren(View.h("p", { class: "note problem" }, error.message)); }
    return { redraw: () => chart.update(), async follow() {
      const found = await View.get("evaluations", { run: state.run });
      if (found.evaluations.length > own.length + damaged.length) await View.show();
    } };
  },
};
