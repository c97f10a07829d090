"use strict";
// The judged responses as a table with filters, and one group side by side.

const ORDERS = [["spread", "trained groups first"], ["newest", "newest first"], ["oldest", "oldest first"], ["best", "highest reward"], ["worst", "lowest reward"], ["longest", "longest"], ["shortest", "shortest"]];
// A search reads the texts of one step after the other.
const SEARCH_ORDERS = ["newest", "oldest"];

View.indexNote = (found) => {
  const { index } = found, notes = [];
  if (found.note && index.steps) notes.push(found.note);
  if (!View.isRead(found)) notes.push(`Reading the tables: ${View.count(index.indexed)} of ${View.count(index.steps)} steps so far, the newest first.`);
  notes.push(...index.problems);
  return notes.length ? View.h("p", { class: "note", role: "status" }, notes.join(" ")) : null;
};

const field = (label, ...inputs) => View.h("label", { class: "field" }, label, ...inputs);
const input = (state, name, options = {}) => View.h("input", { id: `f-${name}`, type: "number", min: "0", value: state[name] || "", "aria-label": name.replaceAll("_", " "), ...options,
  onchange: (event) => View.go({ [name]: event.target.value.trim(), offset: "" }) });
const chooser = (id, state, name, options, label) => {
  const element = View.h("select", { id, "aria-label": label, onchange: (event) => View.go({ [name]: event.target.value, offset: "" }) },
    options.map(([value, text]) => View.h("option", { value }, text)));
  element.value = options.some(([value]) => value === state[name]) ? state[name] : options[0][0];
  return element;
};

const FILTERS = ["first_step", "last_step", "outcomes", "verdicts", "min_tokens", "max_tokens", "problem", "finish", "text", "sort"];

// On a narrow window the filters are closed at first, so that the table is on the first screen.
View.rolloutFilters = (state) => View.h("details", { class: "filter-box", open: innerWidth > 640 || FILTERS.some((name) => state[name]) }, View.h("summary", {}, "Filters"), rolloutForm(state));
const rolloutForm = (state) => View.h("form", { class: "filters", role: "search", onsubmit: (event) => { event.preventDefault(); if (document.activeElement) document.activeElement.blur(); } },
  field("Steps", input(state, "first_step", { placeholder: "first" }), "to", input(state, "last_step", { placeholder: "last" })),
  field("Tokens", input(state, "min_tokens", { placeholder: "min" }), "to", input(state, "max_tokens", { placeholder: "max" })),
  View.choices("Verdict", [["correct", "correct"], ["wrong", "wrong"], ["score", "score only"], ["error", "error", "the verifier gave no verdict"]], state.verdicts, (verdicts) => View.go({ verdicts, offset: "" }), { several: true }),
  View.choices("Outcome", Object.entries(View.words.outcomes).filter(([o]) => o !== "aborted").map(([o, why]) => [o, View.words.outcome(o), why]), state.outcomes, (outcomes) => View.go({ outcomes, offset: "" }), { several: true }),
  field("End", chooser("f-finish", state, "finish", [["", "any"], ["stop", "end token"], ["length", "length limit"]], "How the response ended")),
  field("Text", input(state, "text", { type: "search", min: null, placeholder: "in the response", maxLength: 200 })),
  field("Problem", input(state, "problem", { type: "search", min: null, placeholder: "id" })),
  field("Order", chooser("f-sort", state, "sort", ORDERS.filter(([order]) => !state.text || SEARCH_ORDERS.includes(order)), "Order")),
  FILTERS.some((name) => state[name]) ? View.h("button", { type: "button", id: "f-clear", onclick: () => View.go(Object.fromEntries([...FILTERS, "offset"].map((n) => [n, ""]))) }, "Clear") : null);

View.groupLink = (row) => View.link("group", { step: row.step, group: row.group_id, ...Object.fromEntries(FILTERS.concat("offset").map((n) => [`f.${n}`, View.state()[n]])) });

const COLUMNS = [
  { name: "step", number: true, cell: (r) => View.count(r.step) },
  { name: "group", class: "nowrap", cell: (r) => View.h("a", { href: View.groupLink(r), title: "all responses of this group" }, `${r.group_id}`, View.h("span", { class: "soft" }, ` · ${r.sample + 1}`)) },
  { name: "outcome", cell: (r) => View.outcomeBadge(r.outcome) },
  { name: "verdict", cell: View.verdictBadge },
  { name: "reward", number: true, cell: (r) => View.number(r.reward, 2) },
  { name: "advantage", number: true, title: "– : the response did not train", cell: (r) => View.h("span", { class: View.signClass(r.advantage) }, View.signed(r.advantage, 2)) },
  { name: "tokens", number: true, cell: (r) => [View.count(r.tokens), r.finish === "length" ? View.h("span", { class: "neg", title: "cut at the length limit" }, " ✂") : ""] },
  { name: "turns", number: true, where: (r) => r.turns != null, cell: (r) => View.count(r.turns) },
  { name: "branches", number: true, title: "conversations of an agent beside the first one", where: (r) => r.branches, cell: (r) => View.count(r.branches) },
  { name: "question", class: "text", cell: (r) => View.h("div", { class: "clip" }, r.question) },
  { name: "response", class: "text", cell: (r) => View.h("div", { class: "clip" }, r.response) },
  { name: "reference", class: "text short", where: (r) => r.answer, cell: (r) => View.h("div", { class: "clip" }, r.answer) },
];

View.pages.rollouts = {
  title: "Rollouts",
  async show(main, state, current) {
    const offset = Number(state.offset) || 0, limit = View.pageRows(50);
    const wanted = { run: state.run, offset, limit, ...Object.fromEntries(FILTERS.map((n) => [n, state[n]])) };
    const results = View.h("div");
    const draw = async () => {
      let found = await View.get("rollouts", wanted);
      while (current() && found.steps_left && found.rows.length < limit) {
        show(found, `Searching: ${View.count(found.steps_left)} steps left.`);
        found = await View.get("rollouts", wanted);
      }
      show(found);
      if (current() && !View.isRead(found)) setTimeout(() => current() && draw().catch(() => {}), 700);
    };
    const show = (found, progress) => {
      const filtered = FILTERS.some((n) => n !== "sort" && state[n]), isRead = View.isRead(found);
      const nothing = () => (!isRead ? View.reading("the responses") : View.empty(found.index.steps === 0 ? found.note || "There are no responses." : filtered ? "No response passes these filters. Remove one, or press Clear." : "There are no responses."));
      results.replaceChildren(...[
        found.rows.length || isRead ? View.indexNote(found) : null, progress ? View.h("p", { class: "note", role: "status" }, progress) : null,
        found.rows.length ? View.table(COLUMNS, found.rows, (row) => { location.hash = View.groupLink(row); }, (row, before) => (before && (before.step !== row.step || before.group_id !== row.group_id) ? "next-group" : ""))
          : progress ? null : nothing(),
        found.rows.length ? View.pager(offset, limit, found.total, (next) => View.go({ offset: next || "" }), found.steps_left ? ` and more: ${View.count(found.steps_left)} steps are not searched yet` : "") : null].filter(Boolean));
    };
    main.replaceChildren(View.h("div", { class: "head-row" }, View.h("h1", {}, "Rollouts"), View.h("span", { class: "note" }, View.report && View.report.groups.length < View.report.of_groups ? `a sample of ${View.count(View.report.groups.length)} of ${View.count(View.report.of_groups)} groups: of each step the first, the best and the worst that trained, and some that did not` : `every judged response${!state.sort && !state.text ? ", those of groups that trained with the largest spread of rewards first" : ""}; select one to see its group`)), View.rolloutFilters(state), results);
    await draw();
    return { follow: () => (offset === 0 ? draw() : undefined) };
  },
};

// --- one group

const COLOURINGS = [["none", "none"], ["probability", "probability"]];

View.backToTable = (state) => View.address({ page: "rollouts", ...Object.fromEntries(Object.entries(state).filter(([n]) => n.startsWith("f.")).map(([n, v]) => [n.slice(2), v])) }, { run: state.run, x: state.x });

// The colour and the tooltip of a token by its probability.
const probabilityClass = (p) => `p${Math.min(9, Math.floor(p * 10))}`;
const probabilityTitle = (p) => `probability ${p.toFixed(p < 0.001 ? 5 : 3)}`;

// The shown tokens from `start` to `end` as coloured spans, or as one text if they have no colours.
const tokenSpans = (response, colouring, start = 0, end = response.tokens.length) => {
  const values = colouring === "probability" ? response.probabilities : null, { sampled } = response;
  if (!values && !sampled) return response.tokens.slice(start, end).join("");
  return response.tokens.slice(start, end).map((text, k) => {
    const i = start + k;
    let kind = "", title = null;
    if (sampled && !sampled[i]) { kind = "observed"; title = "observed, not sampled"; }
    else if (values) { kind = probabilityClass(values[i]); title = probabilityTitle(values[i]); }
    return View.h("span", { class: `t ${kind}`, title }, text || "\u200b");
  });
};

// Whether all tokens of a turn are shown, so that it can have colours.
const hasTokens = (response, turn) => response.tokens && turn.tokens && turn.tokens[1] <= response.tokens.length;

// An episode as a conversation: the policy's turns with the colours of their tokens, and what it observed.
const conversation = (response, colouring) => {
  let number = 0;
  return View.h("div", { class: "conversation", tabindex: "0", "aria-label": "conversation" }, ending(response, response.turns.map((turn) => {
    if (turn.role !== "assistant") return View.h("div", { class: "message observed" }, View.h("span", { class: "role" }, turn.role), View.h("div", { class: "content" }, turn.text));
    number += 1;
    return View.h("div", { class: "message" },
      View.h("span", { class: "role" }, `turn ${number}`, turn.reward === null ? null : [" · reward ", View.h("b", { class: View.signClass(turn.reward) }, View.signed(turn.reward, 2))]),
      View.h("div", { class: "content" }, hasTokens(response, turn) ? tokenSpans(response, colouring, ...turn.tokens) : turn.text));
  })));
};

// The messages with what the environment said last. An episode that is cut gets it, and a reward, from `end`.
const ending = (response, messages) => {
  const { ending: text, is_cut: isCut, correct } = response.episode;
  if (!text && !isCut) return messages;
  const solved = correct === null ? "" : correct ? ", solved" : ", not solved";
  const who = isCut ? `cut with no turns or tokens left${solved}; end() said ${text ? "" : "nothing"}` : `the environment at the end${solved}`;
  return [...messages, View.h("div", { class: "message ending", title: `The policy does not read this.${isCut ? " The reward of end() is in that of the last turn." : ""}` }, View.h("span", { class: "role" }, who), text ? View.h("div", { class: "content" }, text) : null)];
};

// The calls of an agent as a tree: a conversation, then the branches that begin behind one of its calls, or with a history of their own.
const callTree = (response, colouring, asTokens) => {
  const firstOf = (branch) => response.calls.find((call) => call.branch === branch);
  const branches = [...new Set(response.calls.map((call) => call.branch))].filter((branch) => branch > 0);
  const branchOf = (number) => (number === null ? 0 : response.calls[number - 1].branch);
  const parts = (branch) => {
    const calls = response.calls.filter((call) => call.branch === branch);
    const below = branches.filter((other) => other !== branch && branchOf(firstOf(other).parent) === branch);
    return [...calls.map((call) => callParts(call, colouring, asTokens)), ...below.map(branchPart)].flat();
  };
  const branchPart = (branch) => {
    const { parent, reason } = firstOf(branch);
    return View.h("section", { class: "branch", "aria-label": `branch ${branch}` },
      View.h("p", { class: "branch-head" }, View.h("b", {}, `branch ${branch}`), parent === null ? "" : ` behind call ${parent}`, View.h("span", { class: "soft" }, `: ${reason}`)), parts(branch));
  };
  return View.h("div", { class: "conversation", tabindex: "0", "aria-label": "calls" }, parts(0));
};

const callParts = (call, colouring, asTokens) => {
  const read = asTokens && call.context && call.context.length
    ? [View.h("div", { class: "message observed" }, View.h("span", { class: "role" }, `${View.plural(call.observed_tokens, "token")} read`), View.h("div", { class: "content" }, call.context.join("")))]
    : call.messages.map((message) => View.h("div", { class: "message observed" }, View.h("span", { class: "role" }, message.role), View.h("div", { class: "content" }, message.text)));
  const cut = call.finish === "length" ? ", cut" : call.finish === "aborted" ? ", stopped" : "";
  const facts = [`call ${call.number} · ${View.plural(call.sampled_tokens, "token")} sampled${cut}`,
    call.retries ? ` · asked ${call.retries + 1} times` : null,
    call.tool_calls.length ? ` · tool: ${call.tool_calls.join(", ")}` : null,
    call.masked ? [" · ", View.h("b", { class: "neg" }, `masked: ${call.masked}`)] : null];
  const text = call.tokens ? tokenSpans(call, colouring) : call.text;
  return [...read, View.h("div", { class: `message${call.masked ? " masked" : ""}` }, View.h("span", { class: "role", title: JSON.stringify(call.options) }, facts), View.h("div", { class: "content" }, text))];
};

const responseText = (response, colouring, asTokens) => {
  if (response.calls) return callTree(response, colouring, asTokens);
  if (response.turns && !asTokens) return conversation(response, colouring);
  return View.h("div", { class: "text-box", tabindex: "0", "aria-label": "response" }, response.tokens ? tokenSpans(response, colouring) : response.response);
};

const AGENT_COUNTS = [["branches", "branch", "branches"], ["rewritten", "rewritten history", "rewritten histories"], ["retries", "retry", "retries"], ["refused", "refused request"], ["overridden", "overridden request"], ["unanswered", "empty answer"], ["masked_tokens", "masked token"], ["tokens_behind_stop", "token behind a stop text", "tokens behind stop texts"]];

// The numbers of an episode that a single response does not have.
const episodeFacts = ({ episode, observed_tokens, finish }) => (episode ? [
  observed_tokens ? View.h("span", { class: "soft" }, `${View.count(observed_tokens)} observed`) : null,
  View.h("span", { class: "soft" }, `${View.plural(episode.turns, episode.counts.calls === undefined ? "turn" : "call")}${episode.is_cut && finish !== "length" ? ", cut at the limit" : ""}`),
  ...AGENT_COUNTS.filter(([name]) => episode.counts[name]).map(([name, one, many]) => View.h("span", { class: "soft" }, View.plural(episode.counts[name], one, many))),
  episode.tool_calls ? View.h("span", { class: "soft" }, View.plural(episode.tool_calls, "tool call"), episode.tool_errors ? [", ", View.h("span", { class: "neg" }, `${View.count(episode.tool_errors)} failed`)] : null) : null] : null);

const probabilityLegend = () => ["0", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((i) => View.h("span", { class: `t p${i}` })), "1"];

const advantageBar = (value, largest) => {
  const bar = View.h("div", { class: "bar-track", title: `advantage ${View.signed(value)}` });
  if (value) {
    const part = View.h("i", { class: value > 0 ? "pos" : "neg" }), width = (50 * Math.abs(value)) / largest;
    part.style.left = `${value > 0 ? 50 : 50 - width}%`;
    part.style.width = `${width}%`;
    bar.append(part);
  }
  return bar;
};

const responseCard = (response, colouring, largest, open, asTokens) => View.h("section", { class: "card response", "aria-label": `response ${response.sample + 1}` },
  View.h("div", { class: "meta" }, View.h("b", {}, `${response.sample + 1}`), View.verdictBadge(response),
    View.h("span", {}, "reward ", View.h("b", {}, View.number(response.reward, 2))),
    View.h("span", {}, "advantage ", View.h("b", { class: View.signClass(response.advantage) }, View.signed(response.advantage, 2))),
    View.h("span", { class: "soft" }, `${View.count(response.response_tokens)} tokens${response.finish === "length" ? ", cut at the limit" : ""}`),
    episodeFacts(response),
    response.mean_probability === null ? null : View.h("span", { class: "soft" }, `mean p ${View.number(response.mean_probability, 2)}`)),
  advantageBar(response.advantage, largest),
  response.error ? View.h("p", { class: "note problem" }, response.error) : null,
  response.components ? View.h("p", { class: "note" }, `scores: ${JSON.stringify(response.components)}`) : null,
  responseText(response, colouring, asTokens),
  (response.tokens || response.calls) && response.tokens_left > 0 ? View.h("button", { type: "button", onclick: open }, `show the other ${View.count(response.tokens_left)} tokens`) : null);

const RECORDED = "The colours are the probabilities with which the sampler chose the tokens, at the sampling temperature; the trainer's are not recorded.";

// The reason why tokens have no colours.
const colourNote = (group, colouring) => {
  if (group.tokens !== "ready") return group.tokens === "loading" ? "Loading the tokenizer …" : `${group.tokens} The text is shown without colours.`;
  if (colouring === "probability" && !group.responses.some((r) => r.probabilities || (r.calls || []).some((call) => call.probabilities))) return "The sampler's log-probabilities are not recorded in this run (log.rollouts=no-logprobs), so tokens have no colours.";
  return null;
};

const drawGroup = (main, state, group) => {
  const colouring = state.colour || "probability";
  const largest = Math.max(1e-9, ...group.responses.map((r) => Math.abs(r.advantage || 0)));
  const decided = group.responses.some((r) => r.correct !== null);
  const order = state.by === "advantage" ? [...group.responses].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)) : group.responses;
  const neighbour = (id, text) => View.h("button", { type: "button", id: text.replace(" ", "-"), disabled: id === null, onclick: () => View.go({ group: id }) }, text);
  const colours = View.choices("Colour tokens by", COLOURINGS, colouring, (colour) => View.go({ colour }, true));
  const why = colourNote(group, colouring);
  main.replaceChildren(
    View.h("div", { class: "head-row" }, View.h("h1", {}, `Group ${group.group_id} of step ${View.count(group.step)}`),
      View.h("span", { class: "choices" }, View.h("a", { href: View.backToTable(state), class: "field" }, "← to the table"), neighbour(group.previous, "previous group"), neighbour(group.next, "next group"))),
    View.h("dl", { class: "facts" }, [["outcome", View.outcomeBadge(group.outcome)], ["correct", decided ? `${group.eq11.correct} of ${group.eq11.valid}` : group.eq11.valid ? "not decided: scores only" : "no verdict"], ["reward", `mean ${View.number(group.reward_mean)}, std ${View.number(group.reward_std)}`],
      group.answer ? ["reference", View.h("code", {}, group.answer)] : null, ["source", group.source], group.environment_seed ? ["seed of the episodes", View.h("code", { title: "All episodes of a group begin with this seed: reset(problem, seed) gets it, and an agent's random and numpy" }, group.environment_seed)] : null, ["problem", View.h("a", { href: View.link("rollouts", { problem: group.problem_id }), title: "all responses to this problem" }, group.problem_id)]]
      .filter(Boolean).map(([name, value]) => View.h("div", {}, View.h("dt", {}, name), View.h("dd", {}, value)))),
    View.note([`${View.words.outcome(group.outcome)}: ${group.eq11.why}.`, ...group.notes.map((note) => `Note: ${note}.`)].join(" ")),
    View.h("details", { class: "card prompt", open: group.prompt.length < 700 }, View.h("summary", {}, `Prompt, ${View.count(group.prompt_tokens)} tokens`), View.h("div", { class: "text-box" }, group.prompt), group.fields ? View.h("p", { class: "note" }, `other columns: ${JSON.stringify(group.fields)}`) : null),
    View.h("div", { class: "filters" }, colours,
      View.h("span", { class: "scale" }, colouring === "probability" ? probabilityLegend() : ""),
      group.responses.some((r) => r.turns || r.calls) ? View.choices("Show", [["conversation", "conversation"], ["tokens", "tokens", "the exact tokens, with those that the chat template puts around an observation"]], state.show || "conversation", (show) => View.go({ show }, true)) : null,
      View.choices("Order", [["sample", "as sampled"], ["advantage", "by reward"]], state.by || "sample", (by) => View.go({ by }, true))),
    why ? View.h("p", { class: "note", id: "why" }, why) : "",
    View.h("div", { class: "responses" }, order.map((r) => responseCard(r, colouring, largest, () => View.go({ all: 1 }), state.show === "tokens"))),
    View.h("p", { class: "note" }, `${RECORDED} `, View.report ? "" : View.h("span", {}, "The same numbers in a terminal: ", View.h("code", {}, group.command))));
};

View.pages.group = {
  title: "Group",
  async show(main, state, current) {
    const wanted = { run: state.run, step: state.step, group: state.group, all: state.all };
    let group = await View.get("group", wanted);
    const draw = () => { const at = scrollY; drawGroup(main, state, group); scrollTo(0, at); };
    draw();
    const loadTokens = async () => {
      while (current() && group.tokens === "loading") {
        await new Promise((done) => setTimeout(done, 500));
        group = await View.get("group", wanted);
      }
      if (current()) draw();
    };
    const failed = (error) => { group = { ...group, tokens: error.message }; if (current()) draw(); };
    if (group.tokens === "loading") setTimeout(() => loadTokens().catch(failed));
    return {};
  },
};
