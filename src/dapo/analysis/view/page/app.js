"use strict";
// Starts the page: runs, tabs, summary line, theme, and updates of a live run.

const POLL_MS = 3000;
const TABS = [["overview", "Overview"], ["metrics", "Metrics"], ["rollouts", "Rollouts"], ["problems", "Problems"], ["evaluation", "Evaluation"], ["compare", "Compare"], ["findings", "Findings"], ["options", "Options"], ["log", "Log"]];
const NOT_IN_REPORTS = ["compare"];
const known = new Map();
let shown = null, turn = 0, runs = [];

// A run's metrics; requested again only when they have changed.
View.metrics = async (run) => {
  const last = known.get(run);
  const found = await View.get("metrics", { run, version: last && last.version });
  if (found.unchanged) { last.summary = found.summary; return last; }
  known.set(run, found);
  return found;
};
View.runs = () => runs;
View.wholeRuns = () => runs.filter((r) => r.state !== "damaged");

const loadRuns = async () => {
  const found = await View.get("overview");
  runs = found.runs;
  View.words.outcomes = found.outcomes;
  View.words.metrics = Object.fromEntries(found.metrics.map((m) => [m.name, m]));
};
const isKnown = (run) => runs.some((r) => r.name === run);

// The reason why the address leads to nothing, or null.
const wrongAddress = (state) => {
  if (!isKnown(state.run)) return runs.length ? `There is no run ${state.run} here. Choose one of the ${View.count(runs.length)} above.` : "There is no run here yet. The page shows the first one as soon as it begins.";
  if (!View.pages[state.page]) return `There is no page ${state.page}. The pages are: ${TABS.map(([page]) => page).join(", ")}.`;
  return null;
};

View.show = async () => {
  const state = View.state(), mine = ++turn, main = document.getElementById("main");
  const focused = document.activeElement && document.activeElement.id;
  const keepFocus = () => { const element = focused && document.activeElement === document.body && document.getElementById(focused); if (element) element.focus({ preventScroll: true }); };
  if (!state.run && runs.length) return View.go({ run: (View.wholeRuns()[0] || runs[0]).name }, true);
  if (!isKnown(state.run) && !View.report) await loadRuns().catch(() => {});
  if (mine !== turn) return;
  drawHead(state);
  keepFocus();
  if (shown && shown.leave) shown.leave();
  const wrong = wrongAddress(state);
  const subject = JSON.stringify([state.page, state.run, state.step, state.group]), isSame = shown !== null && shown.subject === subject;
  if (wrong) { shown = null; main.replaceChildren(View.empty(wrong)); document.title = "dapo view"; return; }
  // values of another page, run or group do not stay below this one's name
  main.classList.toggle("loading", isSame);
  if (!isSame) { main.replaceChildren(View.reading()); shown = { subject }; }
  const stage = View.h("div");
  try {
    const next = (await View.pages[state.page].show(stage, state, () => mine === turn)) || {};
    if (mine !== turn) return;
    const scroll = scrollY;
    shown = { ...next, subject };
    main.replaceChildren(stage);
    if (shown.redraw) shown.redraw();
    scrollTo(0, isSame ? scroll : 0);
    keepFocus();
    document.title = `${View.pages[state.page].title}: ${state.run} – dapo`;
  } catch (error) {
    if (mine === turn) { shown = null; main.replaceChildren(View.empty(error.message)); }
  } finally {
    if (mine === turn) main.classList.remove("loading");
  }
};

const drawHead = (state) => {
  const select = document.getElementById("run");
  select.replaceChildren(...runs.map((r) => View.h("option", { value: r.name }, r.state === "damaged" ? `${r.name} (damaged)` : r.name)));
  select.value = select.title = state.run;
  const tabs = TABS.filter(([page]) => !(View.report && NOT_IN_REPORTS.includes(page)));
  document.getElementById("tabs").replaceChildren(...tabs.map(([page, title]) =>
    View.h("a", { id: `tab-${page}`, href: View.link(page), "aria-current": page === state.page || (page === "rollouts" && state.page === "group") ? "page" : null }, title)));
  const tabList = document.getElementById("tabs"), current = tabList.querySelector("[aria-current]");
  if (current && tabList.scrollWidth > tabList.clientWidth) tabList.scrollLeft = current.offsetLeft - (tabList.clientWidth - current.offsetWidth) / 2;
  drawSummary(runs.find((r) => r.name === state.run), known.get(state.run));
  if (isKnown(state.run)) View.metrics(state.run).then((m) => drawChange(state.run, m), () => {});
};

// The paired difference of a run's first and last evaluation; a new pair is requested once.
const changes = new Map();
const changeOf = async (run, metrics) => {
  const { at, accuracy } = evaluated(metrics), [first, last] = [at[0], at[at.length - 1]];
  if (first === last) return null;
  const pair = { a_run: run, a_step: metrics.steps[first], b_run: run, b_step: metrics.steps[last] };
  const key = JSON.stringify([pair, accuracy[first], accuracy[last]]);
  if (!changes.has(key)) changes.set(key, await View.get("paired", pair));
  return changes.get(key);
};
const drawChange = async (run, metrics) => {
  const mine = turn;
  drawSummary(metrics.summary, metrics);
  const change = await changeOf(run, metrics).catch(() => null); // evaluations that differ in more than the model are not paired
  if (mine === turn && change) document.querySelector(".headline").after(changeLink(change, evaluated(metrics).binary));
};
const changeLink = (change, binary) => View.h("a", { class: "change", href: View.link("evaluation"), title: `Mean difference on the same ${View.count(change.problems)} problems, with its 95 % interval: better on ${change.better}, worse on ${change.worse}` },
  "paired ", View.h("b", { class: View.changeClass(change) }, View.points(change.difference, binary)), change.low === null ? "" : ` (${View.points(change.low, binary, "")} to ${View.points(change.high, binary, "")})`);

// The evaluations of the newest data in the metrics: where they are, and the column of accuracies.
const evaluated = (metrics) => {
  const name = View.evaluationNames(metrics)[0], accuracy = metrics.columns[`eval/${name}/accuracy`] || [];
  return { name, accuracy, binary: !View.isMeanScore(metrics, name), at: metrics.steps.map((_, i) => i).filter((i) => accuracy[i] != null) };
};

// Held-out accuracy before training and now, with the interval of the newest.
const headline = (metrics) => {
  const found = metrics && evaluated(metrics), { name, at, accuracy } = found || {};
  if (!found || !at.length) return "";
  const column = (n) => metrics.columns[`eval/${name}/${n}`] || [];
  const first = at[0], last = at[at.length - 1];
  const shownAs = (v) => View.score(v, found.binary);
  const interval = column("low")[last] == null ? "" : ` (${shownAs(column("low")[last]).replace(" %", "")} to ${shownAs(column("high")[last]).replace(" %", "")})`;
  const change = first === last ? shownAs(accuracy[first]) : `${shownAs(accuracy[first])} → ${shownAs(accuracy[last])}`;
  return View.h("span", { class: "headline", title: `${found.binary ? "Accuracy" : "Mean score"} on the held-out problems ${name}: step ${metrics.steps[first]}${first === last ? "" : ` and step ${metrics.steps[last]}`}, with the 95 % interval of the last` }, found.binary ? "held out " : "held out, mean score ", View.h("b", {}, `${change}${interval}`));
};

// On a narrow window some facts of the head are folded behind this button.
const moreFacts = (head) => {
  const isOpen = head.classList.contains("open");
  return View.h("button", { type: "button", id: "more-facts", "aria-expanded": String(isOpen), onclick: (event) => {
    const nowOpen = head.classList.toggle("open");
    event.target.setAttribute("aria-expanded", String(nowOpen));
    event.target.textContent = nowOpen ? "less" : "more";
  } }, isOpen ? "less" : "more");
};

const drawSummary = (s, metrics) => {
  const head = document.getElementById("summary");
  if (!s) { head.replaceChildren(); return; }
  const kind = { running: "live", finished: "good", solved: "good", stopped: "warn", failed: "bad", damaged: "bad" }[s.state] || "plain";
  const facts = [["model", s.model || "–"], ["data", s.data || "–"], ...(s.held_out === s.data ? [] : [["held-out data", s.held_out || "none"]]), ["tokens", View.big(s.tokens)], ["time", View.seconds(s.seconds)]];
  head.replaceChildren(
    View.badge(s.state, kind, s.note && s.note !== s.state ? s.note : undefined),
    headline(metrics),
    View.h("span", {}, "step ", View.h("b", {}, `${View.count(s.steps)}${s.num_steps ? ` of ${View.count(s.num_steps)}` : ""}`)),
    s.seconds_left !== null && s.seconds_left !== undefined ? View.h("span", {}, "about ", View.h("b", {}, View.seconds(s.seconds_left)), " left") : "",
    ...facts.map(([name, value]) => View.h("span", { class: "fact" }, `${name} `, View.h("b", {}, value))),
    moreFacts(head),
    s.note && ["stopped", "failed", "damaged"].includes(s.state) ? View.h("span", {}, s.note) : "");
};

// Asks for new runs, and for new metrics of the shown run.
const follow = async () => {
  try {
    if (document.hidden) return;
    const names = await View.get("runs");
    document.getElementById("offline").hidden = true;
    if (names.some((name) => !isKnown(name))) {
      await loadRuns();
      if (shown) drawHead(View.state()); else await View.show();
    }
    if (!shown) return;
    const state = View.state(), mine = turn, shownRuns = [...new Set([state.run, ...(shown.runs || [])])];
    const before = shownRuns.map((run) => known.get(run)), found = await Promise.all(shownRuns.map(View.metrics));
    if (mine !== turn) return;
    const at = runs.findIndex((r) => r.name === state.run);
    if (at >= 0) { runs[at] = found[0].summary; drawChange(state.run, found[0]); }
    if (found.some((each, i) => each !== before[i]) && shown.follow) await shown.follow();
  } catch (error) { document.getElementById("offline").hidden = error !== View.offline; } // the page stays as it was
  finally { setTimeout(follow, POLL_MS); }
};

const THEMES = { auto: "light", light: "dark", dark: "auto" };
const setTheme = (theme) => {
  const button = document.getElementById("theme");
  if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  button.textContent = { auto: "◐ system", light: "☀ light", dark: "☾ dark" }[theme];
  button.title = `Colours: ${theme}. Click for ${THEMES[theme]}.`;
  button.dataset.now = theme;
};

const start = async () => {
  const theme = View.stored.get("theme");
  setTheme(THEMES[theme] ? theme : "auto");
  document.getElementById("main").replaceChildren(View.reading("the runs"));
  document.getElementById("theme").addEventListener("click", (event) => { const next = THEMES[event.target.dataset.now]; View.stored.set("theme", next); setTheme(next); });
  document.getElementById("run").addEventListener("change", (event) => { location.hash = View.address({ run: event.target.value }, { page: View.state().page === "group" ? "rollouts" : View.state().page, x: View.state().x }); });
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); }); // the address holds the state
  addEventListener("hashchange", View.show);
  try {
    await loadRuns();
  } catch (error) {
    document.getElementById("main").replaceChildren(View.empty(error.message));
    return;
  }
  await View.show();
  if (!View.report) setTimeout(follow, POLL_MS);
};
start();
