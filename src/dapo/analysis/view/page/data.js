"use strict";
// The source of values: the server, or the file that `dapo view --save` wrote. Also the few helpers that
// every page uses. Text of models only ever becomes a text node: nothing here parses HTML.

const View = { pages: {}, words: { outcomes: {}, metrics: {} } };

View.report = (() => {
  const element = document.getElementById("report-data");
  return element ? JSON.parse(element.textContent) : null;
})();

View.offline = new Error("The server does not answer: is `dapo view` still running?");
View.get = async (path, parameters = {}, signal) => {
  if (View.report) return View.answerFromReport(path, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value !== undefined && value !== null && value !== "") query.set(name, value);
  let response;
  try {
    response = await fetch(`api/${path}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw View.offline;
  }
  const value = await response.json().catch(() => null);
  if (!response.ok || value === null) throw new Error((value && value.error) || `The server answered ${response.status}.`);
  return value;
};

// --- the same responses from a report

const within = (value, low, high) => (low === undefined || low === "" || value >= Number(low)) && (high === undefined || high === "" || value <= Number(high));
const among = (value, list) => !list || list.split(",").includes(value);
const verdictOf = (r) => (r.error ? "error" : r.correct === true ? "correct" : r.correct === false ? "wrong" : "score");
// Of a group: whether it trained on right and wrong responses, and the variance of its rewards.
const interestOf = (g) => (g.outcome === "trained" ? 1 + (g.responses.some((r) => r.correct === true) && g.responses.some((r) => r.correct === false)) : 0);
const spreadOf = (g) => {
  const rewards = g.responses.map((r) => r.reward).filter((r) => r !== null), mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  return rewards.reduce((sum, r) => sum + (r - mean) ** 2, 0) / rewards.length || 0;
};
const REPORT_SORTS = {
  spread: (a, b) => b.interest - a.interest || Number((b.spread - a.spread).toFixed(9)) || b.step - a.step || a.group_id - b.group_id || a.sample - b.sample,
  newest: (a, b) => b.step - a.step || a.group_id - b.group_id || a.sample - b.sample, oldest: (a, b) => a.step - b.step || a.group_id - b.group_id || a.sample - b.sample,
  longest: (a, b) => b.tokens - a.tokens, shortest: (a, b) => a.tokens - b.tokens, best: (a, b) => (b.reward ?? -1e9) - (a.reward ?? -1e9), worst: (a, b) => (a.reward ?? 1e9) - (b.reward ?? 1e9),
};

View.reportAnswers = {
  overview: (d) => d.overview,
  metrics: (d) => d.metrics,
  evaluations: (d) => ({ evaluations: d.evaluations }),
  options: (d) => d.options,
  findings: (d) => d.findings,
  log: (d, p) => (d.logs.error ? d.logs : { files: [], text: "", ...(d.logs.find((log) => log.file === p.file) || d.logs[0]), ...(d.logs.length ? { files: d.logs.map((log) => log.file) } : {}) }),
  rollouts(d, p) {
    const text = (p.text || "").toLowerCase();
    const rows = d.groups.flatMap((g) => g.responses.map((r) => ({ ...r, step: g.step, group_id: g.group_id, problem_id: g.problem_id, outcome: g.outcome, answer: g.answer, interest: interestOf(g), spread: spreadOf(g), question: g.question || g.prompt, tokens: r.response_tokens, turns: r.episode && r.episode.turns, branches: r.episode && r.episode.counts.branches, verdict: verdictOf(r) })))
      .filter((r) => within(r.step, p.first_step, p.last_step) && within(r.tokens, p.min_tokens, p.max_tokens) && among(r.outcome, p.outcomes) && among(r.verdict, p.verdicts)
        && (!p.problem || r.problem_id === p.problem) && (!p.finish || r.finish === p.finish) && (!text || r.response.toLowerCase().includes(text)));
    rows.sort(REPORT_SORTS[p.sort] || REPORT_SORTS.spread);
    return { rows: rows.slice(p.offset, p.offset + p.limit), total: rows.length, steps_left: 0, index: d.index, note: d.note };
  },
  group(d, p) {
    const find = (id) => d.groups.find((g) => g.step === Number(p.step) && g.group_id === id), found = find(Number(p.group));
    if (!found) throw new Error("This group is not in the report's sample; dapo view shows all groups.");
    const inReport = (id) => (find(id) ? id : null); // buttons lead only to groups of the report
    return { ...found, previous: inReport(found.previous), next: inReport(found.next) };
  },
  problems(d, p) {
    const rows = d.problems.rows.filter((r) => p.kind === "all" || r.kind === p.kind);
    const rate = (r) => (r.decided ? r.correct / r.decided : 2);
    rows.sort({ visits: (a, b) => b.visits - a.visits, rate: (a, b) => rate(a) - rate(b) || b.responses - a.responses, recent: (a, b) => b.last_step - a.last_step }[p.sort]);
    return { ...d.problems, rows: rows.slice(p.offset, p.offset + p.limit), total: rows.length };
  },
  evaluation(d, p) {
    const found = d.evaluation_tables[p.step];
    const row = found && found.table.find((r) => r.id === p.problem);
    if (!row) throw new Error("The report does not contain the responses of this evaluation; dapo view shows them.");
    return row;
  },
  paired(d, p) {
    const [a, b] = [Number(p.a_step), Number(p.b_step)], found = d.paired[a < b ? `${a}:${b}` : `${b}:${a}`];
    if (!found) throw new Error(a === b ? "Choose two different evaluations." : "The report does not contain this difference; dapo view shows it.");
    if (found.error) throw new Error(found.error);
    if (a < b) return found;
    const turned = found.table.map((r) => ({ ...r, first: r.second, second: r.first }));
    const minus = (v) => (v === null ? null : -v);
    return { ...found, difference: minus(found.difference), low: minus(found.high), high: minus(found.low), better: found.worse, worse: found.better, table: turned };
  },
};
View.answerFromReport = async (path, parameters) => {
  const value = View.reportAnswers[path](View.report, parameters);
  if (value.error) throw new Error(value.error);
  return value;
};

// --- the state of the page, which is in the address: #/rollouts?run=a&outcomes=trained

View.state = () => {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path || "overview", ...Object.fromEntries(new URLSearchParams(query)) };
};

View.address = (changes, base = View.state()) => {
  const { page, ...rest } = { ...base, ...changes };
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(rest)) if (value !== undefined && value !== null && value !== "") query.set(name, value);
  return `#/${page}?${query}`;
};

View.go = (changes, replace = false) => {
  const address = View.address(changes);
  if (address === location.hash) return;
  if (replace) { history.replaceState(null, "", address); View.show(); } else location.hash = address;
};

// The parameters that persist between pages.
View.link = (page, more = {}) => View.address({ page, ...more }, { run: View.state().run, x: View.state().x });

// --- elements

View.h = (tag, properties = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
};

View.empty = (text) => View.h("p", { class: "empty" }, text);
// What stands in the place of values until they are there: no number, and no judgement.
View.reading = (what = "the run") => View.h("p", { class: "empty reading", role: "status" }, `Reading ${what} …`);
// Whether all tables of responses are in the index, so that what it does not have does not exist.
View.isRead = ({ index }) => index.indexed >= index.steps;
// A long list has shorter pages on a narrow window.
View.pageRows = (rows) => (innerWidth > 640 ? rows : Math.min(rows, 15));

// What the reader has chosen for good, in the browser; nothing where it keeps nothing.
View.stored = {
  get: (name) => { try { return JSON.parse(localStorage.getItem(`dapo-${name}`)); } catch { return null; } },
  set: (name, value) => { try { localStorage.setItem(`dapo-${name}`, JSON.stringify(value)); } catch { /* private mode */ } },
};
// A name that fits into a legend or a button: its beginning and its end, where names of runs differ.
View.short = (name) => (name.length > 36 ? `${name.slice(0, 20)}…${name.slice(-15)}` : name);
View.plural = (count, noun, nouns = `${noun}s`) => `${View.count(count)} ${count === 1 ? noun : nouns}`;
View.note = (text) => (text ? View.h("p", { class: "note" }, text) : null);

// A row of buttons; one or several of them are chosen.
View.choices = (label, options, chosen, onchange, { several = false } = {}) => {
  const values = new Set(several ? String(chosen || "").split(",").filter(Boolean) : [chosen]);
  const press = (value) => {
    if (!several) return onchange(value);
    values.has(value) ? values.delete(value) : values.add(value);
    onchange([...values].join(","));
  };
  return View.h("span", { class: "field" }, label, View.h("span", { class: several ? "choices" : "choices joined", role: "group", "aria-label": label },
    options.map(([value, text, title]) => View.h("button", { type: "button", id: `${label}-${value}`.replace(/\s/g, "-"), title, "data-value": value, "aria-pressed": String(values.has(value)), onclick: () => press(value) }, text))));
};

// A table; a column with `where` is left out if that is false for all rows. `rowClass` names a class of a row.
View.table = (allColumns, rows, onopen, rowClass = () => "") => tableOf(allColumns.filter((c) => !c.where || rows.some(c.where)), rows, onopen, rowClass);
const tableOf = (columns, rows, onopen, rowClass) => View.h("div", { class: "table-wrap" }, View.h("table", {},
  View.h("thead", {}, View.h("tr", {}, columns.map((c) => View.h("th", { class: c.number && "n", scope: "col", title: c.title }, c.name)))),
  View.h("tbody", {}, rows.map((row, i) => View.h("tr", { class: `${onopen ? "open" : ""} ${rowClass(row, rows[i - 1])}`.trim() || null, onclick: onopen && ((event) => { if (!event.target.closest("a,button") && !String(getSelection())) onopen(row); }) },
    columns.map((c) => View.h("td", { class: c.number ? "n" : c.class, "data-name": c.name }, c.cell(row))))))));

View.pager = (offset, limit, total, go, more, id = "page") => View.h("div", { class: "pager" },
  View.h("span", {}, total ? `${View.count(offset + 1)} to ${View.count(Math.min(total, offset + limit))} of ${View.count(total)}${more || ""}` : ""),
  View.h("span", { class: "choices" },
    View.h("button", { type: "button", id: `${id}-previous`, disabled: offset <= 0, onclick: () => go(Math.max(0, offset - limit)) }, "← previous"),
    View.h("button", { type: "button", id: `${id}-next`, disabled: offset + limit >= total && !more, onclick: () => go(offset + limit) }, "next →")));

// A field that filters as one types.
View.searchBox = (id, label, value, oninput) => View.h("label", { class: "field" }, label, View.h("input", { id, type: "search", value: value || "", oninput: (event) => oninput(event.target.value.trim().toLowerCase()) }));

// --- formats of numbers

View.count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
View.number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
View.signed = (value, digits = 3) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits));
View.percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`);
View.seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
};
View.big = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(2)} G` : value >= 1e6 ? `${(value / 1e6).toFixed(2)} M` : value >= 1e4 ? `${(value / 1e3).toFixed(0)} k` : View.count(value));
View.words.outcome = (outcome) => outcome.replaceAll("_", " ");
View.signClass = (value) => (value > 0 ? "pos" : value < 0 ? "neg" : "soft");
View.points = (value, binary, unit = " points") => (value === null ? "–" : binary ? `${View.signed(100 * value, 1)}${unit}` : View.signed(value, 4));
View.score = (value, binary) => (binary ? View.percent(value) : View.number(value));
View.judged = (value, binary) => (value === null ? "nothing judged" : View.score(value, binary));

View.badge = (text, kind, title) => View.h("span", { class: `badge ${kind}`, title }, text);
View.verdictBadge = (row) => {
  const verdict = row.verdict || (row.error ? "error" : row.correct === true ? "correct" : row.correct === false ? "wrong" : "score");
  if (verdict === "score") return View.badge(`score ${View.number(row.score, 2)}`, "plain");
  return View.badge(verdict, { correct: "good", wrong: "bad", error: "warn" }[verdict], row.error || undefined);
};
View.outcomeBadge = (outcome) => View.badge(View.words.outcome(outcome), outcome === "trained" ? "good" : "plain", View.words.outcomes[outcome]);
