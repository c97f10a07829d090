"use strict";
// The curves of a run: those of the paper's figure 7, held-out accuracy, keep rate, token breakdown, seconds, memory.

View.evaluationNames = (metrics) => {
  const all = Object.keys(metrics.columns).filter((n) => n.startsWith("eval/") && n.endsWith("/accuracy")).map((n) => n.slice(5, -9));
  const whole = all.filter((n) => metrics.columns[`eval/${n}/avg@1`] || Object.keys(metrics.columns).some((m) => m.startsWith(`eval/${n}/avg@`)));
  // a fork may have evaluated other data before: the newest evaluation is the first
  const newest = (n) => metrics.columns[`eval/${n}/accuracy`].findLastIndex((v) => v !== null);
  return (whole.length ? whole : all).sort((a, b) => newest(b) - newest(a));
};

// Whether an evaluation's accuracy is a mean score; older runs show it by values outside of 0 to 1 alone.
View.isMeanScore = (metrics, name) => {
  const column = (n) => metrics.columns[`eval/${name}/${n}`] || [];
  if (column("score_mean").some((v) => v != null)) return true;
  return ["accuracy", "low", "high"].some((n) => column(n).some((v) => v != null && (v < 0 || v > 1)));
};
View.hasMeanScores = (metrics) => View.evaluationNames(metrics).some((n) => View.isMeanScore(metrics, n));

View.missing = (metrics, why) => {
  if (metrics.steps.some((s) => s > 0)) return why;
  if (metrics.problem) return "The metrics of this run cannot be read.";
  return metrics.summary.state === "running" ? "No step is finished yet: the first curve begins with step 1." : "This run ended before its first step.";
};

// Many evaluations have no markers, so that the curve is seen.
View.markerSize = (points) => (points.length < 15 ? 7 : 0);

View.heldOut = (metrics, x, name, colour, label) => {
  const isScore = View.isMeanScore(metrics, name), scale = isScore ? 1 : 100;
  const column = (n) => metrics.columns[`eval/${name}/${n}`] || [], stretches = View.stretches(metrics, `eval/${name}/accuracy`);
  const points = (n) => pointsOf(stretches, x, column(n).map((v) => (v === null ? null : scale * v)));
  const { x: at, y, sizes } = points("accuracy"), low = points("low").y, high = points("high").y;
  const ends = low.some((value) => value != null) ? { low: low.map((value) => value ?? null), high: high.map((value) => value ?? null) } : {};
  return [{ kind: "line", x: at, y, ...ends, name: label || name, colour, width: 2, sizes: View.markerSize(at) || sizes, format: (value) => (isScore ? View.number(value) : `${value.toFixed(1)} %`) }];
};

const CURVE_SPECS = [
  { title: (m) => (View.hasMeanScores(m) ? "Held-out score" : "Held-out accuracy"), note: (m) => `with its 95 % interval, and the ${View.hasMeanScores(m) ? "score" : "accuracy"} of all judged training responses`,
    unit: (m) => (View.hasMeanScores(m) ? "mean score" : "correct (%)"), zero: (m) => !View.hasMeanScores(m), limit: (m) => (View.hasMeanScores(m) ? null : 100),
    names: (m) => [View.hasMeanScores(m) ? "reward/score_mean" : "reward/accuracy", ...View.evaluationNames(m).map((n) => `eval/${n}/accuracy`)],
    draw: (m, x) => [...View.evaluationNames(m).flatMap((n, i) => View.heldOut(m, x, n, ["c1", "c2", "c3", "c4"][i % 4], `held out: ${n}`)), ...(View.hasMeanScores(m) ? View.curve(m, x, "reward/score_mean", { label: "training" }) : View.curve(m, x, "reward/accuracy", { label: "training", scale: 100 }))] },
  { title: "Loss", note: "mean negative log-probability of the demonstrations' tokens", names: ["loss/nll"], optional: true, unit: "nats", draw: (m, x) => View.curve(m, x, "loss/nll", { label: "loss" }) },
  { title: "Response length", note: "mean tokens of a response (Fig. 7a)", names: ["rollout/response_tokens_mean"], draw: (m, x) => View.curve(m, x, "rollout/response_tokens_mean", { label: "mean length" }), unit: "tokens" },
  { title: "Reward", note: "shaped reward: score plus overlong penalty (Fig. 7b)", names: ["reward/mean"], zero: false, unit: "reward",
    draw: (m, x) => [...View.curve(m, x, "reward/mean", { label: "all judged responses" }), ...View.curve(m, x, "reward/trained_mean", { label: "groups that train", colour: "c1" })] },
  { title: "Entropy", note: "of the policy at the sampled positions, in nats (Fig. 7c)", names: ["loss/entropy"], draw: (m, x) => View.curve(m, x, "loss/entropy", { label: "entropy" }), unit: "nats" },
  { title: "Mean probability", note: "of the sampled tokens (Fig. 7d)", names: ["loss/token_prob_mean"], draw: (m, x) => View.curve(m, x, "loss/token_prob_mean", { label: "mean probability" }), range: [0, 1], unit: "probability" },
  { title: "Groups", note: "of the judged groups: kept by dynamic sampling (Eq. 11), or dropped", names: ["rollout/keep_rate"], range: [0, 100], unit: "groups (%)",
    draw: (m, x) => [["rollout/keep_rate", "kept", "c0"], ["rollout/all_correct_fraction", "all correct", "c2"], ["rollout/all_wrong_fraction", "all wrong", "red"]].flatMap(([n, label, colour]) => View.curve(m, x, n, { label, colour, scale: 100 })) },
  { title: "Token breakdown", note: "every generated token of a step by the outcome of its group", names: ["rollout/tokens_generated"], unit: "tokens per step",
    draw: (m, x) => View.areas(m, x, Object.keys(View.words.outcomes).map((o) => ({ name: `rollout/tokens_${o}`, label: View.words.outcome(o), colour: View.outcomeColours[o] || "c7" }))) },
  { title: "Seconds of a step", note: "by phase", names: ["time/step_s"], unit: "seconds per step", draw: (m, x) => View.areas(View.withoutJudging(m), x, View.phaseSeries(m)) },
  { title: "Memory", note: "peak resident memory of the process so far", names: ["time/peak_memory_gib"], unit: "GiB",
    draw: (m, x) => [...View.curve(m, x, "time/peak_memory_gib", { label: "process", smooth: false }), ...View.curve(m, x, "time/peak_gpu_memory_gib", { label: "GPU, of the step", colour: "c1", smooth: false })] },
  { title: "Clipping and truncation", note: "tokens at the lower and upper clip (Eq. 8), responses cut at the length limit", names: ["loss/clip_high_fraction", "rollout/truncated_fraction"], unit: "%", limit: 100,
    draw: (m, x) => [["loss/clip_high_fraction", "upper clip", "c1"], ["loss/clip_low_fraction", "lower clip", "c0"], ["rollout/truncated_fraction", "truncated", "c4"], ["rollout/episodes_cut_fraction", "episodes cut", "c3"]].flatMap(([n, label, colour]) => View.curve(m, x, n, { label, colour, scale: 100 })) },
  { title: "Idle", note: "seconds of a step in which the trainer waits for its batch, and the engine for new weights (schedule: async)", names: ["time/engine_idle_s", "time/trainer_idle_s"], optional: true, unit: "seconds per step",
    draw: (m, x) => [["time/trainer_idle_s", "trainer", "c1"], ["time/engine_idle_s", "engine", "c0"]].flatMap(([n, label, colour]) => View.curve(m, x, n, { label, colour })) },
  { title: "Staleness", note: "age of the policy that sampled a trained token, in steps (schedule: async)", names: ["rollout/staleness_max"], optional: true, unit: "steps",
    draw: (m, x) => [["rollout/staleness_mean", "mean", "c0"], ["rollout/staleness_max", "largest", "c1"]].flatMap(([n, label, colour]) => View.curve(m, x, n, { label, colour })) },
  { title: "Turns", note: "mean turns of an episode", names: ["rollout/turns_mean"], optional: true, unit: "turns", draw: (m, x) => View.curve(m, x, "rollout/turns_mean", { label: "mean turns" }) },
  { title: "Branches", note: "mean branches of an agent's episode", names: ["rollout/branches_mean"], optional: true, unit: "branches", draw: (m, x) => View.curve(m, x, "rollout/branches_mean", { label: "mean branches" }) },
  { title: "Observed tokens", note: "answers of the environment, which never train", names: ["rollout/observation_tokens"], optional: true, unit: "tokens per step", draw: (m, x) => View.curve(m, x, "rollout/observation_tokens", { label: "observed" }) },
  { title: "Tools and environment", note: "tool calls, those that failed, and episodes whose environment failed", names: ["rollout/tool_calls", "rollout/environment_errors"], optional: true, unit: "per step",
    draw: (m, x) => [["rollout/tool_calls", "tool calls", "c0"], ["rollout/tool_errors", "failed calls", "c1"], ["rollout/environment_errors", "environment errors", "red"]].flatMap(([n, label, colour]) => View.curve(m, x, n, { label, colour })) },
];
// An optional chart needs a value other than 0; in a supervised run, which samples nothing, every chart does.
const specsOf = (m) => CURVE_SPECS.filter((spec) => !(spec.optional || m.columns["loss/nll"]) || [spec.names].flat().some((n) => (typeof n === "function" ? n(m) : [n]).some((each) => (m.columns[each] || []).some(Boolean))));

View.phaseSeries = (m) => {
  // with schedule=async the batch is sampled beside the other phases: the trainer's seconds add up to the step
  const beside = m.columns["time/trainer_idle_s"] ? ["generate", "judge_wait"] : [];
  const phases = [["load_weights", "c8"], ["generate", "c0"], ["judge_wait", "c5"], ["write_rollouts", "c6"], ["old_logprobs", "c3"], ["update", "c1"], ["trainer_idle", "c7"], ["evaluate", "c2"]];
  return phases.filter(([p]) => !beside.includes(p)).map(([p, colour]) => ({
    name: `time/${p}_s`, label: p.replaceAll("_", " "), colour }));
};
// Generating includes waiting for verdicts: the areas add up only without it.
View.withoutJudging = (m) => {
  const generate = m.columns["time/generate_s"], wait = m.columns["time/judge_wait_s"];
  if (!generate || !wait) return m;
  return { ...m, columns: { ...m.columns, "time/generate_s": generate.map((v, i) => (v === null ? null : Math.max(0, v - (wait[i] || 0)))) } };
};

View.specEmpty = (spec, m) => {
  const names = typeof spec.names === "function" ? spec.names(m) : spec.names;
  return names.some((n) => (m.columns[n] || []).some((v) => v !== null)) ? null : View.missing(m, names.some((n) => m.columns[n]) ? `No value of ${names.filter((n) => m.columns[n]).join(" or ")} is finite.` : `This run did not log ${names.join(" or ")}.`);
};

View.pages.overview = {
  title: "Overview",
  async show(main, state) {
    let metrics = await View.metrics(state.run);
    const axis = View.axes[state.x] ? state.x : "steps";
    const of = (value) => (typeof value === "function" ? value(metrics) : value), hadScores = View.hasMeanScores(metrics);
    const specs = specsOf(metrics), cards = specs.map((spec) => View.chart({ title: of(spec.title), note: of(spec.note), traces: () => spec.draw(metrics, View.xOf(metrics, axis)),
      layout: () => ({ x: View.xAxis(axis, View.xOf(metrics, axis)), y: { title: of(spec.unit), range: spec.range, fromZero: of(spec.zero), limit: of(spec.limit) }, marks: View.marks(metrics, axis) }) }));
    main.replaceChildren(
      View.h("div", { class: "head-row" }, View.h("h1", {}, "Overview"), View.choices("Over", Object.keys(View.axes).map((a) => [a, a]), axis, (x) => View.go({ x }))),
      metrics.problem ? View.h("p", { class: "note problem" }, metrics.problem) : "",
      View.h("div", { class: "grid" }, cards),
      View.smoothingNote(metrics));
    const draw = () => cards.forEach((card, i) => card.update({ traces: () => specs[i].draw(metrics, View.xOf(metrics, axis)), empty: View.specEmpty(specs[i], metrics) }));
    draw();
    return { redraw: draw, async follow() { metrics = await View.metrics(state.run); if (specsOf(metrics).length > specs.length || View.hasMeanScores(metrics) !== hadScores) await View.show(); else draw(); } };
  },
};

View.smoothingNote = (m) => (m.steps.length >= SMOOTHED_FROM ? View.note("Thin lines are the values of each step, thick lines a running mean over a tenth of the steps. Drag over a chart to zoom in, double click to see all of it.") : View.note("Drag over a chart to zoom in, double click to see all of it."));
