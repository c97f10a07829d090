"use strict";
// What a run was told and what it said: its options, the findings of the doctor, and its logs.

const findingCard = (f) => View.h("section", { class: "card finding" },
  View.h("h2", {}, View.badge(f.severity, { error: "bad", warning: "warn" }[f.severity] || "plain"), ` ${f.name.replaceAll("_", " ")}`),
  View.h("p", { class: "sub" }, f.holds ? `since step ${f.since}` : `from step ${f.since} to ${f.steps[1]}, no longer`),
  View.h("p", {}, f.cause),
  f.change.length ? View.h("p", {}, "try ", f.change.map((change, i) => [i ? " or " : "", View.h("code", {}, change)])) : null,
  f.advice ? View.h("p", {}, f.advice) : null,
  View.h("p", { class: "note" }, `steps ${f.steps[0]} to ${f.steps[1]}: `, Object.entries(f.evidence).map(([name, value], i) => [i ? ", " : "", View.metricOf(name) && !View.report ? View.h("a", { href: View.link("metrics", { find: name }) }, name) : name, ` ${Number(value.toPrecision(4))}`])),
  f.problems.length ? View.h("p", { class: "note" }, `${f.has_unread ? "at least " : ""}${View.count(f.responses)} responses show it, most often those to `, f.problems.map((p, i) => [i ? ", " : "", View.h("a", { href: View.link("rollouts", { problem: p.id, first_step: f.steps[0], last_step: f.steps[1] }) }, p.id), ` (${p.responses})`])) : null,
  f.error ? View.h("p", { class: "note" }, "error ", View.h("code", {}, f.error)) : null,
  f.example ? View.h("p", { class: "note" }, "example ", View.h("code", {}, f.example)) : null);

View.pages.findings = {
  title: "Findings",
  async show(main, state) {
    const draw = async () => {
      const found = await View.get("findings", { run: state.run });
      const seen = `${View.plural(found.steps, "step")}, ${View.plural(found.evaluations, "evaluation")} and ${View.plural(found.rollout_tables, "table")} of responses, by the ${found.rules.length} rules of dapo doctor`;
      main.replaceChildren(View.h("div", { class: "head-row" }, View.h("h1", {}, "Findings"), View.h("span", { class: "note" }, seen)),
        found.findings.length ? View.h("div", { class: "stack" }, found.findings.map(findingCard)) : View.empty(found.steps ? "Nothing wrong found." : "No step has been logged yet."));
    };
    await draw();
    return { follow: draw };
  },
};

View.optionText = (value) => (value === null || value === undefined ? "none" : typeof value === "string" ? value : JSON.stringify(value));
View.optionValue = (value) => View.h(value === null || value === undefined ? "span" : "code", { class: value === null || value === undefined ? "soft" : null }, View.optionText(value));

const optionColumns = (found) => [
  { name: "option", cell: (r) => [View.h("code", {}, r.name), r.written === false && r.changed ? " " : "", r.written === false && r.changed ? View.badge("set to fit", "plain", "Not the default: dapo chose it for the other options and this machine") : ""] },
  { name: "value", cell: (r) => View.optionValue(r.value) },
  { name: `default of ${found.preset}`, cell: (r) => (r.changed ? View.optionValue(r.default) : View.h("span", { class: "soft" }, "the same")) },
  ...(found.changes.length ? [{ name: "before a resume", cell: (r) => r.earlier.map((e) => View.h("div", {}, View.optionValue(e.value), ` up to step ${e.last}`)) }] : []),
  { name: "meaning", class: "text", cell: (r) => r.meaning || "" },
];

View.pages.options = {
  title: "Options",
  async show(main, state) {
    const found = await View.get("options", { run: state.run }), lists = View.h("div");
    const isRecorded = found.rows.some((r) => r.written !== null);
    for (const r of found.rows) {
      r.earlier = found.changes.filter((c) => r.name in c.options).map((c) => ({ value: c.options[r.name][0], last: c.after_step }));
      r.changed = JSON.stringify(r.value) !== JSON.stringify(r.default);
      r.isFirst = r.earlier.length > 0 || (isRecorded ? r.written : r.changed);
    }
    const columns = optionColumns(found), byChange = (a, b) => b.changed - a.changed;
    const first = isRecorded ? ["Written by you", "in the configuration, the command or the call, and by each resume"] : ["Not the default", "this run does not record which options were written"];
    let isOpen = false;
    const section = (title, note, rows, none) => [View.h("div", { class: "head-row" }, View.h("h2", {}, title), View.h("span", { class: "note" }, note)), rows.length ? View.table(columns, rows) : View.empty(none)];
    const filter = (text) => {
      const rows = found.rows.filter((r) => (r.name + r.meaning).toLowerCase().includes(text));
      const chosen = rows.filter((r) => r.isFirst), rest = rows.filter((r) => !r.isFirst).sort(byChange), fitted = rest.filter((r) => r.changed).length;
      if (!rows.length) { lists.replaceChildren(View.empty("No option is like that.")); return; }
      const folded = View.h("details", { class: "section", open: isOpen || Boolean(text), ontoggle: (event) => { if (!text) isOpen = event.target.open; } },
        View.h("summary", {}, View.h("b", {}, View.plural(rest.length, isRecorded ? "other option" : "option")), View.h("span", { class: "soft" }, fitted ? ` ${View.count(fitted)} set to fit, then the defaults` : " with their defaults")), rest.length ? View.table(columns, rest) : null);
      lists.replaceChildren(...(chosen.length || !text ? section(...first, chosen, isRecorded ? "No option was written: all have their defaults." : "Every option has its default.") : []), ...(rest.length ? [folded] : []));
    };
    main.replaceChildren(View.h("div", { class: "head-row" }, View.h("h1", {}, "Options"), View.note(`${View.count(found.rows.length)} options, preset ${found.preset}`)),
      View.h("div", { class: "filters" }, View.searchBox("f-find", "Contains", state.find, (find) => { history.replaceState(null, "", View.address({ find })); filter(find); })), lists);
    filter((state.find || "").toLowerCase());
  },
};

// A log as lines: those of a new process and warnings stand out.
const logLines = (text) => text.split(/(?<=\n)/).map((line) => (line.startsWith("--- ") ? View.h("b", {}, line) : line.startsWith("warning: ") || line.startsWith("ended: ") ? View.h("span", { class: "warned" }, line) : line));

View.pages.log = {
  title: "Log",
  async show(main, state) {
    const draw = async () => {
      const found = await View.get("log", { run: state.run, file: state.file });
      const text = View.h("div", { class: "card text-box log", tabindex: "0", "aria-label": "log" }, logLines(found.text));
      main.replaceChildren(View.h("div", { class: "head-row" }, View.h("h1", {}, "Log"),
        found.files.length > 1 ? View.choices("File", found.files.map((f) => [f, f]), found.file, (file) => View.go({ file })) : View.h("span", { class: "note" }, found.file || "")),
      View.note(found.left_out ? `The last ${View.big(found.text.length)} characters; ${View.big(found.left_out)} bytes before them are only in the file.` : "") || "",
      found.files.length ? text : View.empty("No log: this run kept no lines of its console, and its verifier printed nothing."));
    };
    const box = () => document.querySelector(".log"), toTheEnd = () => { if (box()) box().scrollTop = box().scrollHeight; };
    await draw();
    return { redraw: toTheEnd, async follow() {
      // a reader who has scrolled back stays there
      const before = box(), at = before && before.scrollTop, isAtEnd = !before || before.scrollHeight - before.scrollTop - before.clientHeight < 30;
      await draw();
      if (isAtEnd) toTheEnd(); else if (box()) box().scrollTop = at;
    } };
  },
};
