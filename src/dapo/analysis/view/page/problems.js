"use strict";
// The problems that the run visited: how often, how well they were answered over time, and which were never solved.

const KINDS = [["all", "all"], ["never", "never solved"], ["sometimes", "sometimes"], ["always", "always solved"], ["undecided", "neither right nor wrong"]];

const visitCells = (row) => View.h("span", { class: "cells" }, row.seen.map((visit) => {
  const rate = visit.decided ? visit.correct / visit.decided : null;
  const cell = View.h("a", { class: rate === null ? "cell none" : rate === 0 ? "cell zero" : "cell", href: View.link("group", { step: visit.step, group: visit.group_id }),
    title: `step ${visit.step}: ${visit.score === null ? "no verdict" : rate === null ? `mean score ${View.number(visit.score, 2)}` : `${visit.correct} of ${visit.decided} correct`}, ${View.words.outcome(visit.outcome)}` },
    View.h("span", { class: "visually-hidden" }, `step ${visit.step}`));
  if (rate !== null) cell.style.setProperty("--rate", rate);
  return cell;
}));

const PROBLEM_COLUMNS = [
  { name: "problem", cell: (r) => View.h("a", { class: "mono", href: View.link("rollouts", { problem: r.problem_id }) }, r.problem_id.slice(0, 16)) },
  { name: "question", class: "text", cell: (r) => View.h("div", { class: "clip" }, r.question || "") },
  { name: "reference", class: "text", where: (r) => r.answer, cell: (r) => View.h("div", { class: "clip" }, r.answer || "") },
  { name: "source", cell: (r) => r.source },
  { name: "visits", number: true, cell: (r) => View.count(r.visits) },
  { name: "correct", number: true, title: "of all decided responses", cell: (r) => (r.decided ? `${View.count(r.correct)}/${View.count(r.decided)}` : View.number(r.score, 2)) },
  { name: "pass rate", number: true, cell: (r) => (r.decided ? View.percent(r.correct / r.decided, 0) : "–") },
  { name: "over time, one cell per visit", cell: visitCells },
];

const countCards = (counts, all, isRead) => [[isRead ? "problems seen" : "problems seen so far", all], ["never solved", counts.never], ["sometimes", counts.sometimes], ["always solved", counts.always], ...(counts.undecided ? [["neither right nor wrong", counts.undecided]] : [])]
  .map(([name, value]) => View.h("div", { class: "card" }, View.h("div", { class: "number" }, View.count(value || 0)), View.h("div", { class: "soft" }, name)));

View.pages.problems = {
  title: "Problems",
  async show(main, state, current) {
    const kind = state.kind || "all", sort = state.order || "visits", offset = Number(state.offset) || 0, limit = View.pageRows(50);
    let byStep = [];
    const marks = View.marks(await View.metrics(state.run), "steps");
    const traces = () => [["none", "0 %", "red"], ["few", "below half", "c1"], ["many", "half or more", "c5"], ["all", "100 %", "c2"]].map(([key, label, colour]) => ({
      kind: "bar", stack: "groups", name: label, colour, x: byStep.map((s) => s.step), y: byStep.map((s) => s[key]) }));
    const chart = View.chart({ title: "Groups by pass rate", note: "judged groups of a step by their fraction of correct responses", traces, layout: () => ({ x: View.xAxis("steps"), y: { title: "groups" }, marks }) });
    const cards = View.h("div", { class: "cards" }), table = View.h("div");
    const draw = async () => {
      const found = await View.get("problems", { run: state.run, kind, sort, offset, limit });
      byStep = found.by_step;
      const all = Object.values(found.counts).reduce((a, b) => a + b, 0), isRead = View.isRead(found);
      // an index that is being filled has no zero and no reason for one
      chart.hidden = !isRead && !byStep.length;
      cards.replaceChildren(...(isRead || all ? countCards(found.counts, all, isRead) : []));
      chart.update({ traces, empty: byStep.length || !isRead ? null : found.note || (all ? "No response is right or wrong: there are only scores, or no verdicts." : "No problem has been judged yet.") });
      const nothing = () => (isRead ? View.empty(found.index.steps ? `No problem is in this class: ${KINDS.find(([k]) => k === kind)[1]}.` : found.note || "No problem has been judged yet.") : View.reading("the responses"));
      table.replaceChildren(...[found.rows.length || isRead ? View.indexNote(found) : null,
        found.rows.length ? View.table(PROBLEM_COLUMNS, found.rows, (row) => { location.hash = View.link("rollouts", { problem: row.problem_id }); }) : nothing(),
        found.rows.length ? View.pager(offset, limit, found.total, (next) => View.go({ offset: next || "" })) : null].filter(Boolean));
      if (current() && !isRead) setTimeout(() => current() && draw().catch(() => {}), 900);
    };
    main.replaceChildren(View.h("div", { class: "head-row" }, View.h("h1", {}, "Problems"), View.h("span", { class: "note" }, "groups judged after their batch was full do not count: their problems come again")), cards, chart,
      View.h("p", {}, " "),
      View.h("div", { class: "filters" }, View.choices("Show", KINDS, kind, (value) => View.go({ kind: value, offset: "" })),
        View.choices("Order", [["visits", "most visits"], ["rate", "lowest pass rate"], ["recent", "last seen"]], sort, (order) => View.go({ order, offset: "" }))), table);
    await draw();
    return { redraw: () => chart.update(), follow: draw };
  },
};
