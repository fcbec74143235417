// The page: facts in, sections out. A section without facts is taken away.

const facts = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const drop = (id) => byId(id).closest("section").remove();
const steps = [...new Set(facts.phases.map((p) => p.id).filter((id) => /^[eg]\d/.test(id)).map((id) => id.slice(1)))].sort();
for (const phase of facts.phases) {
  const step = phase.id.slice(1);
  const first = facts.series.sft.loss ? "after SFT" : "before RL";
  const label = step === steps[0] ? first : step === steps[steps.length - 1] ? "after RL" : `step ${+step}`;
  phase.label = { eval: "evaluation", train: "training" }[phase.id] ?? (phase.id[0] === "g" ? `${label}, greedy` : label);
}
const labels = Object.fromEntries(facts.phases.map((p) => [p.id, p.label]));
const sampled = facts.phases.map((p) => p.id).filter((id) => /^(e\d+|eval)$/.test(id));
const [first, last] = [sampled[0], sampled[sampled.length - 1]];

const OUTCOMES = ["resolved", "unresolved", "no_patch", "patch_rejected", "tamper", "infra_error", "grader_error"];
const PROVENANCE = { s: "sampled by the model", o: "observed", c: "template", f: "written by another", r: "sampled elsewhere", y: "closed for it" };
const MAIN = {
  sft: ["loss", "reward_mean", "probe_reward", "entropy", "grad_norm", "tokens_per_sec"],
  rl: ["entropy", "grad_norm", "logprob_gap", "kl", "clip_fraction", "turns_mean", "trials_without_reward", "tokens_per_sec", "trials_per_sec", "step_sec"],
};
const WHY = {
  loss: "of the demonstrations", entropy: "nats a token: what is left to explore",
  grad_norm: "before clipping", logprob_gap: "sampler against trainer, per token", kl: "from the policy that sampled",
  clip_fraction: "share of tokens at the clip", turns_mean: "model calls a trial", tokens_per_sec: "",
  trials_without_reward: "our machinery failed", trials_per_sec: "", step_sec: "one step, sampling and update",
};
const words = (key) => key.replaceAll("_", " ").replace("per sec", "/ s").replace(/ sec$/, ", seconds");

function duration(sec) {
  const minutes = Math.floor(sec / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min ${Math.round(sec % 60)} s` : `${Math.round(sec)} s`;
}

function drawSummary() {
  const parts = [`${facts.tasks.length} tasks`, `${facts.trials} trials`];
  if (facts.wallSec) parts.push(duration(facts.wallSec));
  parts.push(facts.noReward ? `${facts.noReward} trials without a reward (our machinery failed)` : "every trial has a reward");
  byId("summary").textContent = parts.join(" · ");
  if (facts.noHeadline) byId("cards").before(h("p", { class: "alarm" }, facts.noHeadline));
}

function drawCards() {
  const fixed = (x) => x.toFixed(2);
  const span = (e) => `[${fixed(e.low)}, ${fixed(e.high)}]`;
  for (const { label, values, gain } of facts.scores) {
    const [before, after] = values;
    const big = after
      ? [h("span", { style: `color:${color("before")}` }, fixed(before.value)), h("span", { class: "arrow" }, "→"), h("span", { style: `color:${color("after")}` }, fixed(after.value))]
      : [h("span", { style: `color:${color("after")}` }, fixed(before.value))];
    const note = gain
      ? h("div", { class: "gain" }, `${gain.value >= 0 ? "+" : ""}${fixed(gain.value)} ${span(gain)}`)
      : h("div", { class: "note" }, values.map(span).join(" → "));
    byId("cards").append(h("div", { class: "card" }, h("h3", {}, `${label}, ${before.tasks} tasks`), h("div", { class: "big" }, big), note,
      intervals(values, after ? ["before", "after"] : ["after"])));
  }
  if (!facts.scores.length) byId("cards").remove();
  else byId("cards").after(h("p", { class: "note" }, facts.scores[0].values[1]
    ? [swatch("before", labels[first]), " → ", swatch("after", labels[last]), ". Bars are 95 % intervals over tasks and attempts; the gain is paired by task."]
    : "Bars are 95 % intervals over tasks and attempts."));
}

function drawCurves() {
  const { rl, sft } = facts.series;
  const marks = facts.evals.filter((e) => "avg_at_k" in e).map((e) => ({
    x: e.step, value: e.avg_at_k, low: e.avg_low ?? e.avg_at_k, high: e.avg_high ?? e.avg_at_k, color: e.greedy ? "before" : "after", hollow: e.greedy }));
  if (rl.reward_mean) {
    byId("reward").append(chart({ title: "reward in training, mean of each step", points: rl.reward_mean, marks, range: [0, 1], width: 1120, height: 260 }),
      h("div", { class: "legend" }, swatch("accent", "training tasks (heavy: smoothed)"), swatch("after", "held-out tasks, sampled"), swatch("before", "held-out tasks, greedy")));
  }
  for (const stage of ["rl", "sft"]) {
    const series = facts.series[stage];
    const draw = (key) => chart({ title: words(key), why: WHY[key] ?? "", points: series[key] });
    byId(stage).append(...MAIN[stage].filter((key) => series[key]).map(draw));
    const rest = Object.keys(series).filter((key) => !MAIN[stage].includes(key) && key !== "reward_mean");
    byId("more").append(...rest.map((key) => chart({ title: `${stage}: ${words(key)}`, points: series[key] })));
    if (!Object.keys(series).length) drop(stage);
  }
  if (!byId("more").children.length) byId("more").parentNode.remove();
}

function drawKinds() {
  const kinds = [...new Set(facts.tasks.map((t) => t.kind))].filter(Boolean);
  const share = (kind, phase) => {
    const counts = facts.tasks.filter((t) => t.kind === kind && t.counts[phase]).map((t) => t.counts[phase]);
    const graded = counts.reduce((sum, [n]) => sum + n, 0);
    return graded ? counts.reduce((sum, [, c]) => sum + c, 0) / graded : null;
  };
  const rows = kinds.map((name) => ({ name, before: share(name, first), after: share(name, last) })).filter((r) => r.before !== null && r.after !== null);
  if (first === last || rows.length < 2) return drop("kinds");
  rows.sort((a, b) => b.after - b.before - (a.after - a.before));
  byId("kinds").append(h("div", { class: "panel" }, dumbbells(rows)));
}

// Of a phase's trials: how many ended in each way, and the mean of each clock.
function endsOf({ ends }) {
  const [outcomes, stops, seconds] = [{}, {}, {}];
  for (const [outcome, stop, clocks] of ends) {
    outcomes[outcome] = (outcomes[outcome] ?? 0) + 1;
    stops[stop] = (stops[stop] ?? 0) + 1;
    for (const [name, sec] of Object.entries(clocks)) seconds[name] = (seconds[name] ?? 0) + sec / ends.length;
  }
  return { outcomes, stops, seconds };
}

function drawOutcomes() {
  for (const phase of facts.phases) Object.assign(phase, endsOf(phase));
  const bars = h("div", { class: "bars" });
  for (const phase of facts.phases) {
    const pieces = OUTCOMES.filter((o) => phase.outcomes[o]).map((o) => h("span", { style: `flex:${phase.outcomes[o]};background:${color(o)}`, title: `${o}: ${phase.outcomes[o]}` }, String(phase.outcomes[o])));
    const stops = Object.entries(phase.stops).map(([stop, n]) => `${n} ${stop}`).join(", ");
    const clocks = Object.entries(phase.seconds).map(([name, sec]) => `${name.replace("_sec", "")} ${sec.toFixed(2)}`).join(", ");
    bars.append(h("span", {}, phase.label), h("div", { class: "bar" }, pieces), h("span", { class: "note", style: "margin:0" }, stops));
    if (clocks) bars.append(h("span", {}), h("span", { class: "note", style: "margin:0" }, `mean seconds of a trial: ${clocks}`), h("span", {}));
  }
  const seen = OUTCOMES.filter((o) => facts.phases.some((p) => p.outcomes[o]));
  byId("outcomes").append(h("div", { class: "panel" }, bars, h("div", { class: "legend" }, seen.map((o) => swatch(o, o.replaceAll("_", " "))))));
}

function drawRepositories() {
  const repos = {};
  for (const { id, counts } of facts.tasks) {
    const own = (repos[id.replace(/-[^-]*$/, "")] ??= { tasks: 0, counts: {} });
    own.tasks += 1;
    for (const [phase, [n, c]] of Object.entries(counts)) {
      const sum = (own.counts[phase] ??= [0, 0]);
      sum[0] += n;
      sum[1] += c;
    }
  }
  const names = Object.keys(repos).sort((a, b) => repos[b].tasks - repos[a].tasks);
  if (names.length < 2) return drop("repositories");
  const share = (count) => (count ? h("td", { class: "share" }, h("i", { style: `--p:${(100 * count[1]) / count[0]}%` }), `${count[1]} of ${count[0]}`) : h("td", {}, ""));
  const row = (name) => h("tr", {}, h("td", {}, name), h("td", {}, String(repos[name].tasks)), facts.phases.map((p) => share(repos[name].counts[p.id])));
  const head = ["repository", "tasks", ...facts.phases.map((p) => p.label)].map((text) => h("th", {}, text));
  byId("repositories").append(h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, names.map(row)))));
}

function drawTasks(open) {
  const columns = [{ name: "task", key: (t) => t.id }];
  if (facts.tasks.some((t) => t.kind)) columns.push({ name: "kind", key: (t) => t.kind });
  if (facts.tasks.some((t) => t.issue)) columns.push({ name: "issue", key: (t) => t.issue });
  if (facts.tasks.some((t) => t.certificate)) columns.push({ name: "certificate", key: (t) => t.certificate ?? "", title: (t) => (t.doubts ?? []).join("\n") });
  for (const p of facts.phases) columns.push({ name: p.label, phase: p.id, key: (t) => { const c = t.counts[p.id]; return c ? c[1] / c[0] : -1; } });
  const cell = (task, { phase, key, title }) => {
    const count = task.counts[phase];
    if (!phase) return h("td", title?.(task) ? { title: title(task) } : {}, key(task));
    if (!count) return h("td", {}, "");
    return h("td", { class: "share" }, h("i", { style: `--p:${(100 * count[1]) / count[0]}%` }), `${count[1]} of ${count[0]}`);
  };
  const body = h("tbody", {});
  const fillBody = (tasks) => body.replaceChildren(...tasks.map((t) => h("tr", { onclick: () => open(t.id) }, columns.map((c) => cell(t, c)))));
  const heads = columns.map((column) => h("th", { onclick: (event) => {
    const head = event.currentTarget, up = head.classList.contains("sorted") && !head.classList.contains("up");
    heads.forEach((other) => (other.className = ""));
    head.className = up ? "sorted up" : "sorted";
    const rows = facts.tasks.map((t) => [column.key(t), t]);
    rows.sort(([a], [b]) => (typeof a === "number" ? b - a : a.localeCompare(b)) * (up ? -1 : 1));
    fillBody(rows.map(([, t]) => t));
  } }, column.name));
  fillBody(facts.tasks);
  byId("tasks").append(h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body)));
}

drawSummary();
drawCards();
drawCurves();
if (!facts.series.rl.reward_mean && !byId("rl")?.children.length) byId("reward")?.closest("section").remove();
drawKinds();
drawOutcomes();
drawRepositories();
drawTasks(drawViewer());
byId("recipe").textContent = facts.recipe;
document.querySelector("main").append(h("footer", {}, `One file, no network. ${facts.shown.length === facts.trials ? "The transcript of every trial is" : `Transcripts of ${facts.shown.length} of ${facts.trials} trials are`} in it.`));
