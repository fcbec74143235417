// The trial viewer: pick a trial, page through it turn by turn. Arrow keys turn the pages.

const tip = h("div", { id: "tip" });
document.body.append(tip);

function tokenSpan(row, i) {
  const kind = row.provenance[i], logprob = row.logprobs[i];
  const text = facts.vocabulary[row.tokens[i]] ?? `⟨${row.tokens[i]}⟩`;
  const shown = kind === "c" ? text.replaceAll("\n", "↵\n") : text;
  const doubt = logprob === null ? null : `--doubt:${Math.round(100 * (1 - Math.exp(logprob)))}%`;
  const say = [`${PROVENANCE[kind] || kind} · id ${row.tokens[i]}`];
  if (logprob !== null) say.push(`p ${Math.exp(logprob).toFixed(3)} · logprob ${logprob.toFixed(3)}`);
  return h("span", { class: kind, style: doubt, "data-tip": say.join("\n") }, shown);
}

// A trajectory row, cut after the last sampled token of each turn; or the messages, by reply.
function turnsOf(trial) {
  const turns = [];
  for (const row of trial.rows) {
    let start = 0;
    for (const end of [...row.ends, row.tokens.length]) {
      if (end <= start) continue;
      const spans = [];
      for (let i = start; i < end; i++) spans.push(tokenSpan(row, i));
      const sampledTokens = [...row.provenance.slice(start, end)].filter((kind) => kind === "s").length;
      // What the template adds after the last reply belongs to the last turn.
      if (!sampledTokens && turns.length) turns[turns.length - 1].body.append(...spans);
      else turns.push({ body: h("div", { class: "tokens" }, spans), note: `${end - start - sampledTokens} tokens read, ${sampledTokens} sampled` });
      start = end;
    }
  }
  let body = null;
  for (const { role, text } of trial.messages) {
    if (!body) turns.push({ body: (body = h("div", { class: "tokens" })), note: "messages; no token record" });
    body.append(h("span", { class: "c" }, `${role}\n`), h("span", { class: role === "assistant" ? "s" : "o" }, text), "\n\n");
    if (role === "assistant") body = null;
  }
  return turns;
}

function diff(text) {
  const kind = (line) => (line.startsWith("@@") || line.startsWith("diff") ? "at" : line.startsWith("+") ? "add" : line.startsWith("-") ? "del" : "");
  return h("pre", { class: "diff" }, text.trimEnd().split("\n").map((line) => h("span", { class: kind(line) }, `${line}\n`)));
}

function trialFacts(trial) {
  const tests = Object.entries(trial.tests).map(([kind, verdicts]) => `${words(kind)}: ${Object.entries(verdicts).filter(([, n]) => n).map(([v, n]) => `${n} ${v}`).join(", ") || "none"}`);
  const versions = trial.rows.flatMap((row) => row.versions);
  const rows = [["outcome", trial.outcome], ["reward", trial.reward === null ? "none" : trial.reward], ["stop", trial.stop || "none"], ["turns", trial.turns]];
  if (tests.length) rows.push(["tests", tests.join("; ")]);
  if (versions.length) rows.push(["policy", [...new Set([Math.min(...versions), Math.max(...versions)])].join("–")]);
  if (trial.timings.total_sec !== undefined) rows.push(["took", `${trial.timings.total_sec.toFixed(2)} s`]);
  if (trial.error) rows.push(["why", trial.error]);
  return h("div", { class: "facts" }, rows.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, String(value)))));
}

function choice(name, values, onchange) {
  const select = h("select", { onchange }, h("option", { value: "" }, `all ${name}`), values.map(([value, label]) => h("option", { value }, label)));
  return select;
}

// The page holds each transcript compressed.
async function unpack(shown) {
  const bytes = Uint8Array.from(atob(shown.packed), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return { ...(await new Response(stream).json()), phase: shown.phase };
}

function drawViewer() {
  if (!facts.shown.length) { drop("viewer"); return () => {}; }
  const state = { matching: [], picked: null, trial: null, turns: [], page: 0, all: true, doubt: false };
  const order = facts.phases.map((p) => p.id);
  const phase = choice("phases", facts.phases.map((p) => [p.id, p.label]), refill);
  const outcome = choice("outcomes", OUTCOMES.filter((o) => facts.shown.some((t) => t.outcome === o)).map((o) => [o, o]), refill);
  const task = choice("tasks", [...new Set(facts.shown.map((t) => t.task_id))].sort().map((t) => [t, t]), refill);
  const list = h("div", { class: "panel list" }), pane = h("div", { class: "panel" });
  const back = h("button", { onclick: () => turn(-1) }, "←"), next = h("button", { onclick: () => turn(1) }, "→");
  const all = h("button", { onclick: () => { state.all = !state.all; show(); } }, "all turns");
  const doubt = h("button", { onclick: () => { state.doubt = !state.doubt; show(); }, title: "unlikely tokens stand out" }, "shade by probability");
  const where = h("span", { class: "note", style: "margin:0" });

  function refill() {
    state.matching = facts.shown.filter((t) => (!phase.value || t.phase === phase.value) && (!outcome.value || t.outcome === outcome.value) && (!task.value || t.task_id === task.value));
    state.matching.sort((a, b) => a.task_id.localeCompare(b.task_id) || order.indexOf(a.phase) - order.indexOf(b.phase) || a.trial_id.localeCompare(b.trial_id));
    list.replaceChildren(...state.matching.map((t) => h("button", { onclick: () => pick(t), title: t.trial_id }, h("span", { class: "dot", style: `background:${color(t.outcome)}` }), t.task_id.replace(/^nano__/, ""), h("small", {}, `${labels[t.phase]}${t.phase === "train" ? ` ${t.trial_id.slice(1, 6).replace(/^0+(?=.)/, "")}` : ""} · #${t.attempt}`))));
    if (!state.matching.length) list.append("no trial matches");
    pick(state.matching.includes(state.picked) ? state.picked : state.matching[0]);
  }
  async function pick(picked) {
    if (!picked) return;
    const chosen = state.matching.indexOf(picked);
    [...list.children].forEach((button, i) => button.classList.toggle("on", i === chosen));
    state.picked = picked;
    const trial = await unpack(picked);
    if (state.picked !== picked) return; // another one was, meanwhile
    Object.assign(state, { trial, turns: turnsOf(trial), page: 0 });
    show();
  }
  function turn(by) {
    state.page = state.all ? (by > 0 ? 0 : state.turns.length - 1) : Math.max(0, Math.min(state.turns.length - 1, state.page + by));
    state.all = false;
    show();
  }
  function show() {
    const { trial, turns, page } = state;
    if (!trial) return;
    all.classList.toggle("on", state.all);
    doubt.classList.toggle("on", state.doubt);
    back.disabled = !state.all && page === 0;
    next.disabled = !state.all && page >= turns.length - 1;
    where.textContent = state.all ? `${turns.length} turns` : `turn ${page + 1} of ${turns.length}`;
    const seen = turns.map((t, i) => [t, i]).filter(([, i]) => state.all || i === page);
    seen.forEach(([t]) => t.body.classList.toggle("doubt", state.doubt));
    const kinds = Object.keys(PROVENANCE).filter((kind) => trial.rows.some((row) => row.provenance.includes(kind)));
    pane.replaceChildren(h("b", {}, trial.trial_id), trialFacts(trial),
      h("div", { class: "legend" }, kinds.map((kind) => h("span", {}, h("span", { class: `swatch ${kind}` }), PROVENANCE[kind]))),
      ...seen.map(([t, i]) => h("div", { class: "turn" }, h("h4", {}, `turn ${i + 1} · ${t.note}`), t.body)),
      trial.patch ? h("details", { open: true }, h("summary", {}, "the patch that was graded"), diff(trial.patch)) : h("p", { class: "note" }, "no patch"),
      trial.log ? h("details", {}, h("summary", {}, "the log of its tests"), h("pre", { class: "diff" }, trial.log)) : "");
  }
  const viewer = h("div", { onmousemove: (event) => {
    const text = event.target.dataset?.tip;
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 230)}px`;
    tip.style.top = `${event.clientY + 18}px`;
  }, onmouseleave: () => (tip.style.display = "none") },
    h("div", { class: "controls" }, phase, outcome, task, back, next, where, all, doubt), h("div", { class: "split" }, list, pane));
  byId("viewer").append(viewer);
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const box = viewer.getBoundingClientRect();
    if (box.top < innerHeight && box.bottom > 0) turn(event.key === "ArrowRight" ? 1 : -1);
  });
  refill();
  // Open on a story, where there is one: a task that the last evaluation solved and the first did not.
  const at = (name, verdict) => facts.shown.filter((t) => t.phase === name && t.outcome === verdict);
  const lost = new Set(at(first, "unresolved").map((t) => t.task_id));
  pick(at(last, "resolved").find((t) => lost.has(t.task_id)) || state.matching[0]);
  return (id) => {
    if (![...task.options].some((option) => option.value === id)) return;
    phase.value = outcome.value = "";
    task.value = id;
    refill();
    viewer.scrollIntoView({ behavior: "smooth" });
  };
}
