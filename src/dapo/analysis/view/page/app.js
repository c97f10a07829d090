"use strict";
// Starts the page: runs, tabs, summary line, theme, and updates of a live run.

const POLL_MS = 3000;
const TABS = [["overview", "Overview"], ["rollouts", "Rollouts"], ["problems", "Problems"], ["evaluation", "Evaluation"], ["compare", "Compare"]];
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

View.show = async () => {
  const state = View.state(), mine = ++turn, main = document.getElementById("main");
  if (!state.run || !runs.some((r) => r.name === state.run)) {
    if (state.run) { main.replaceChildren(View.empty(`There is no run ${state.run} here.`)); return; }
    return View.go({ run: (View.wholeRuns()[0] || runs[0]).name }, true);
  }
  drawHead(state);
  if (shown && shown.leave) shown.leave();
  main.classList.add("loading");
  const stage = View.h("div");
  try {
    const next = (await View.pages[state.page].show(stage, state, () => mine === turn)) || {};
    if (mine !== turn) return;
    const samePage = shown && shown.page === state.page, scroll = scrollY;
    const focus = samePage && document.activeElement && document.activeElement.id;
    shown = { ...next, page: state.page };
    main.replaceChildren(stage);
    if (shown.redraw) shown.redraw();
    scrollTo(0, samePage ? scroll : 0);
    if (focus && document.getElementById(focus)) document.getElementById(focus).focus();
    document.title = `${View.pages[state.page].title}: ${state.run} – dapo`;
  } catch (error) {
    if (mine === turn) main.replaceChildren(View.empty(error.message));
  } finally {
    if (mine === turn) main.classList.remove("loading");
  }
};

const drawHead = (state) => {
  const select = document.getElementById("run");
  if (select.length !== runs.length) select.replaceChildren(...runs.map((r) => View.h("option", { value: r.name }, r.state === "damaged" ? `${r.name} (damaged)` : r.name)));
  select.value = state.run;
  const tabs = TABS.filter(([page]) => !(View.report && page === "compare"));
  document.getElementById("tabs").replaceChildren(...tabs.map(([page, title]) =>
    View.h("a", { href: View.link(page), "aria-current": page === state.page || (page === "rollouts" && state.page === "group") ? "page" : null }, title)));
  drawSummary(runs.find((r) => r.name === state.run));
};

const drawSummary = (s) => {
  const kind = { running: "live", finished: "good", solved: "good", stopped: "warn", failed: "bad", damaged: "bad" }[s.state] || "plain";
  const facts = [["model", s.model], ["data", s.data || "–"], ["held out", s.held_out || "none"], ["tokens", View.big(s.tokens)], ["time", View.seconds(s.seconds)]];
  document.getElementById("summary").replaceChildren(
    View.badge(s.state, kind, s.note && s.note !== s.state ? s.note : undefined),
    View.h("span", {}, "step ", View.h("b", {}, `${View.count(s.steps)}${s.num_steps ? ` of ${View.count(s.num_steps)}` : ""}`)),
    s.seconds_left !== null && s.seconds_left !== undefined ? View.h("span", {}, "about ", View.h("b", {}, View.seconds(s.seconds_left)), " left") : "",
    ...facts.map(([name, value]) => View.h("span", {}, `${name} `, View.h("b", {}, value))),
    s.note && ["stopped", "failed", "damaged"].includes(s.state) ? View.h("span", {}, s.note) : "");
};

const follow = async () => {
  const state = View.state(), mine = turn;
  try {
    if (document.hidden || !shown) return;
    const before = known.get(state.run), found = await View.metrics(state.run);
    if (mine !== turn) return;
    const at = runs.findIndex((r) => r.name === state.run);
    if (at >= 0) { runs[at] = found.summary; drawSummary(found.summary); }
    if (found !== before && shown.follow) await shown.follow();
  } catch { /* the server has ended: keep the page as it was */ }
  finally { setTimeout(follow, POLL_MS); }
};

const THEMES = { auto: "light", light: "dark", dark: "auto" };
const storage = { get: () => { try { return localStorage.getItem("dapo-theme"); } catch { return null; } }, set: (v) => { try { localStorage.setItem("dapo-theme", v); } catch { /* private mode */ } } };
const setTheme = (theme) => {
  const button = document.getElementById("theme");
  if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  button.textContent = { auto: "◐ system", light: "☀ light", dark: "☾ dark" }[theme];
  button.title = `Colours: ${theme}. Click for ${THEMES[theme]}.`;
  button.dataset.now = theme;
  if (shown && shown.redraw) shown.redraw();
};

const start = async () => {
  setTheme(THEMES[storage.get()] ? storage.get() : "auto");
  document.getElementById("theme").addEventListener("click", (event) => { const next = THEMES[event.target.dataset.now]; storage.set(next); setTheme(next); });
  document.getElementById("run").addEventListener("change", (event) => { location.hash = View.address({ run: event.target.value }, { page: View.state().page === "group" ? "rollouts" : View.state().page, x: View.state().x }); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shown && shown.redraw) shown.redraw(); });
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); }); // the address holds the state
  addEventListener("hashchange", View.show);
  try {
    const found = await View.get("overview");
    runs = found.runs;
    View.words.outcomes = found.outcomes;
    View.words.phases = found.phases;
    View.words.metrics = Object.fromEntries(found.metrics.map((m) => [m.name, m]));
  } catch (error) {
    document.getElementById("main").replaceChildren(View.empty(error.message));
    return;
  }
  await View.show();
  if (!View.report) setTimeout(follow, POLL_MS);
};
start();
