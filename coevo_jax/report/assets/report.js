"use strict";
// The report's page. Everything from a run is put in as text (textContent), never as markup.
const RUNS = JSON.parse(document.getElementById("data").textContent);
const TABS = [["overview", "Overview"], ["curves", "Curves"], ["browse", "Rubric browser"], ["rubrics", "Rubrics over time"], ["alarms", "Alarms"]];
const MAIN = document.getElementById("main");
const state = { tab: "overview", run: 0, question: -1, smooth: 0.6, search: "", filter: "", sort: "updates", a: null, b: null, update: null, shown: 100 };
const cache = new Map();

// ---------------------------------------------------------------------------------------------- elements

function el(name, attributes, ...children) {
  const svg = ["svg", "path", "line", "rect", "text", "g", "title"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child instanceof Node ? child : seen(String(child)));
  return node;
}
// Characters that would hide or reorder what stands there are shown by their number.
function seen(text) {
  return text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (c) => "\u27e8U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9");
}
function num(x) {
  if (x === null || x === undefined) return "-";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x)) return String(x);
  const size = Math.abs(x);
  return size >= 1e-3 && size < 1e5 ? String(Number(x.toPrecision(4))) : x.toExponential(2);
}
function tags(flags) { return flags.map((f) => el("span", { class: "tag" }, f)); }
function table(head, rows, label) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", null, el("thead", null, el("tr", null, head.map((h, i) => el("th", { scope: "col", class: i ? "n" : "" }, h)))),
      el("tbody", null, rows.map((r) => el("tr", null, r.map((c, i) => el("td", { class: i ? "n" : "" }, c)))))));
}
function say(text) { document.getElementById("said").textContent = text; }

// ---------------------------------------------------------------------------------------------- data

function column(run, name) { return run.columns[name] || []; }
function series(run, name) {
  // One line a role: [role, [[step, value], ...]].
  const roles = column(run, "role"), values = column(run, name), out = new Map();
  values.forEach((v, i) => {
    if (typeof v !== "number") return;
    const role = roles[i] || "";
    if (!out.has(role)) out.set(role, []);
    out.get(role).push([run.steps[i], v]);
  });
  return [...out];
}
function smoothed(points, weight) {
  // Exponential, without the start's bias.
  let sum = 0, norm = 0;
  return points.map(([x, y]) => { sum = weight * sum + (1 - weight) * y; norm = weight * norm + (1 - weight); return [x, sum / norm]; });
}
async function rowsOf(run, question) {
  const key = "q-" + run + "-" + question;
  if (!cache.has(key)) {
    const bytes = Uint8Array.from(atob(document.getElementById(key).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    cache.set(key, JSON.parse(await new Response(stream).text()));
  }
  return cache.get(key);
}

// ---------------------------------------------------------------------------------------------- charts

const W = 420, H = 190, PAD = { l: 52, r: 10, t: 8, b: 24 };
function chart(title, lines, note) {
  // lines: [{label, points}]. Arrow keys move a cursor that says its values.
  const all = lines.flatMap((l) => l.points);
  const card = el("section", { class: "card chart" }, el("h3", null, title));
  if (!all.length) return card;
  let [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [y0, y1] = [Infinity, -Infinity];
  for (const [, y] of all) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
  const X = (x) => PAD.l + (x - x0) / (x1 - x0) * (W - PAD.l - PAD.r), Y = (y) => H - PAD.b - (y - y0) / (y1 - y0) * (H - PAD.t - PAD.b);
  const path = (points) => points.map(([x, y], i) => (i ? "L" : "M") + X(x).toFixed(1) + " " + Y(y).toFixed(1)).join("");
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: "0", "aria-label":
    `${title}: ` + lines.map((l) => `${l.label} from ${num(l.points[0][1])} to ${num(l.points[l.points.length - 1][1])}`).join("; ") });
  for (let i = 0; i <= 4; i++) {
    const y = y0 + (y1 - y0) * i / 4;
    svg.append(el("line", { class: "axis", x1: PAD.l, x2: W - PAD.r, y1: Y(y), y2: Y(y) }), el("text", { x: PAD.l - 5, y: Y(y) + 4, "text-anchor": "end" }, num(y)));
  }
  for (const x of [x0, (x0 + x1) / 2, x1]) svg.append(el("text", { x: X(x), y: H - 6, "text-anchor": x === x0 ? "start" : x === x1 ? "end" : "middle" }, num(Math.round(x))));
  lines.forEach((l, i) => {
    if (state.smooth > 0 && l.points.length > 4) svg.append(el("path", { class: "raw k" + i % 8, d: path(l.points) }));
    svg.append(el("path", { class: "k" + i % 8, d: path(state.smooth > 0 && l.points.length > 4 ? smoothed(l.points, state.smooth) : l.points) }));
  });
  const cursor = el("line", { class: "cursor", y1: PAD.t, y2: H - PAD.b, x1: -9, x2: -9 });
  svg.append(cursor);
  const legend = el("div", { class: "legend" });
  const steps = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b);
  let at = steps.length - 1;
  const show = (i, aloud) => {
    at = Math.max(0, Math.min(steps.length - 1, i));
    cursor.setAttribute("x1", X(steps[at])); cursor.setAttribute("x2", X(steps[at]));
    const parts = lines.map((l) => {
      const near = l.points.reduce((best, p) => Math.abs(p[0] - steps[at]) < Math.abs(best[0] - steps[at]) ? p : best);
      return `${l.label} ${num(near[1])}`;
    });
    legend.replaceChildren(...parts.map((p, i) => el("span", null, el("i", { class: "b" + i % 8 }), p)), el("span", null, `update ${steps[at]}`));
    if (aloud) say(`update ${steps[at]}: ${parts.join(", ")}`);
  };
  svg.addEventListener("mousemove", (e) => {
    const box = svg.getBoundingClientRect(), x = x0 + ((e.clientX - box.left) / box.width * W - PAD.l) / (W - PAD.l - PAD.r) * (x1 - x0);
    show(steps.reduce((best, s, i) => Math.abs(s - x) < Math.abs(steps[best] - x) ? i : best, 0));
  });
  svg.addEventListener("keydown", (e) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[e.key];
    if (move) { e.preventDefault(); show(at + move, true); }
  });
  show(at);
  card.append(svg, legend);
  if (note) card.append(el("p", { class: "soft" }, note));
  card.append(el("button", { type: "button", onclick: () => download(title, lines) }, "Data as CSV"));
  return card;
}
function download(title, lines) {
  const text = "line,update,value\n" + lines.flatMap((l) => l.points.map((p) => `"${l.label.replaceAll('"', '""')}",${p[0]},${p[1]}`)).join("\n") + "\n";
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: title.replace(/[^\w.-]+/g, "_") + ".csv" });
  link.click();
  URL.revokeObjectURL(link.href);
}
const GROUPS = [
  ["Reward and its parts", (n) => n.startsWith("reward/") || n.startsWith("reward_model/")],
  ["Rubrics and pairs", (n) => n.startsWith("rubric/") || n.startsWith("pairs/")],
  ["Judge", (n) => n.startsWith("judge/") || n.startsWith("panel/") || n.startsWith("heldout")],
  ["Groups and advantages", (n) => n.startsWith("groups/") || n.startsWith("advantage/")],
  ["KL, entropy, ratio, loss", (n) => /^(kl|entropy|ratio|clip_fraction|loss|logp_gap|importance_weight|grad_norm|update_norm|param_norm|lr|critic)/.test(n)],
  ["Lengths", (n) => n.startsWith("completions/") || n.startsWith("tokens/")],
  ["Controls", (n) => n.startsWith("control/")],
  ["Time and throughput", (n) => n.startsWith("time/") || n.startsWith("sampler/")],
  ["Replay buffer", (n) => n.startsWith("buffer/")],
];
const FIRST = ["reward/mean", "reward/margin/mean", "reward/format/mean", "rubric/valid_share", "rubric/pair_accuracy", "kl", "entropy",
  "completions/length/mean", "completions/truncated_share", "judge/failure_share", "groups/zero_variance_share", "pairs/gap_mean",
  "sampler/tokens_per_second", "time/total", "loss", "reward_model/accuracy", "heldout/accuracy"];
function numeric(runs) {
  const names = new Set();
  for (const run of runs) for (const [name, values] of Object.entries(run.columns)) if (values.some((v) => typeof v === "number") && !["cycle", "policy_updates"].includes(name)) names.add(name);
  return [...names].sort();
}
function linesOf(runs, name) {
  return runs.flatMap((run) => series(run, name).map(([role, points]) => ({ label: [runs.length > 1 ? run.name : "", role].filter(Boolean).join(" "), points })));
}
function charts(runs, names) {
  return el("div", { class: "cards" }, names.map((n) => [n, linesOf(runs, n)]).filter(([, l]) => l.length).map(([n, l]) => chart(n, l)));
}
function timeChart(run) {
  const names = Object.keys(run.columns).filter((n) => n.startsWith("time/") && n !== "time/total");
  const sums = names.map((n) => [n.slice(5), column(run, n).reduce((a, b) => a + (typeof b === "number" ? b : 0), 0)]);
  const total = column(run, "time/total").reduce((a, b) => a + (b || 0), 0) || 1;
  sums.sort((a, b) => b[1] - a[1]);
  return table(["part", "seconds", "share of all"], sums.map(([n, s]) => [n, num(s), (100 * s / total).toFixed(1) + " %"]), "Time by part");
}

// ---------------------------------------------------------------------------------------------- parts of the report

function overview() {
  const run = RUNS[state.run];
  const out = [el("h2", null, "The alternation"), strip(run), el("h2", null, "Phases"), phaseTable(run)];
  if (RUNS.length > 1) out.push(el("h2", null, "Runs side by side"), compare());
  out.push(el("h2", null, "Main curves"), charts([run], FIRST.slice(0, 8)), el("h2", null, "Where the time goes"), timeChart(run), el("h2", null, "Configuration"), config(run));
  return out;
}
function strip(run) {
  const stages = [...new Set(run.phases.map((p) => p.stage))], last = run.steps.length ? run.steps[run.steps.length - 1] : 1;
  const svg = el("svg", { viewBox: "0 0 1000 46", role: "img", "aria-label": "Phases: " + run.phases.map((p) => `${p.stage} of cycle ${p.cycle + 1}, updates ${p.first} to ${p.last}`).join("; ") });
  for (const p of run.phases) {
    const x = p.first / (last + 1) * 1000, w = (p.last - p.first + 1) / (last + 1) * 1000;
    svg.append(el("rect", { x, width: Math.max(w - 1, 1), y: 4, height: 22, class: "b" + stages.indexOf(p.stage) % 8 }, el("title", null, `cycle ${p.cycle + 1} ${p.stage}: updates ${p.first} to ${p.last}`)));
    if (w > 24) svg.append(el("text", { x: x + w / 2, y: 42, "text-anchor": "middle" }, String(p.cycle + 1)));
  }
  return el("div", null, svg, el("div", { class: "legend" }, stages.map((s, i) => el("span", null, el("i", { class: "b" + i % 8 }), s)), el("span", null, "numbers: cycles")));
}
function phaseTable(run) {
  const names = ["reward/mean", "reward/std", "rubric/valid_share", "reward/margin/mean", "rubric/pair_accuracy", "judge/failure_share", "kl", "entropy", "completions/length/mean", "time/total"].filter((n) => run.columns[n]);
  const rows = run.phases.map((p) => {
    const inside = run.steps.map((s, i) => [s, i]).filter(([s, i]) => s >= p.first && s <= p.last && column(run, "stage")[i] === p.stage).map(([, i]) => i);
    return [`cycle ${p.cycle + 1} ${p.stage}`, `${p.first}-${p.last}`, ...names.map((n) => {
      const v = inside.map((i) => column(run, n)[i]).filter((x) => typeof x === "number");
      return v.length ? num(v.reduce((a, b) => a + b, 0) / v.length) : "-";
    })];
  });
  return table(["phase (means)", "updates", ...names], rows, "Means by phase");
}
function compare() {
  const names = FIRST.filter((n) => RUNS.some((r) => r.columns[n]));
  const tail = (run, n) => { const v = column(run, n).filter((x) => typeof x === "number").slice(-10); return v.length ? num(v.reduce((a, b) => a + b, 0) / v.length) : "-"; };
  return table(["mean of the last 10 values", ...RUNS.map((r) => r.name)], names.map((n) => [n, ...RUNS.map((r) => tail(r, n))]), "Runs side by side");
}
function config(run) {
  return el("details", null, el("summary", null, "Every key of the run's config"), el("pre", { tabindex: "0" }, JSON.stringify(run.config, null, 1)));
}
function curves() {
  const runs = RUNS.length > 1 ? RUNS : [RUNS[0]], names = numeric(runs), used = new Set(FIRST);
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, id: "smooth", onchange: (e) => { state.smooth = Number(e.target.value); render(); document.getElementById("smooth").focus(); } });
  const out = [el("div", { class: "tools" }, el("label", null, `Smoothing ${state.smooth}`, slider)), el("h2", null, "Main curves"), charts(runs, FIRST)];
  for (const [title, match] of [...GROUPS, ["Others", () => true]]) {
    const own = names.filter((n) => !used.has(n) && match(n));
    own.forEach((n) => used.add(n));
    if (!own.length) continue;
    const body = el("div", null);
    const box = el("details", { ontoggle: () => { if (box.open && !body.firstChild) body.append(charts(runs, own)); } }, el("summary", null, `${title} (${own.length})`), body);
    out.push(box);
  }
  return out;
}
function rubricsOverTime() {
  const names = numeric([RUNS[state.run]]).filter((n) => /^(rubric|evolution)\//.test(n));
  return [el("h2", null, "Rubrics over time"), el("p", { class: "soft" }, "What the generator's rubrics are like, update by update: docs/metrics.md says what each name counts."), charts([RUNS[state.run]], names)];
}
function alarms() {
  const run = RUNS[state.run];
  if (!run.alarms.length) return [el("p", null, "No alarm was on in any update.")];
  const rows = run.alarms.slice(0, 2000).map((a) => [a.name, a.role, num(a.value), String(a.step), el("button", { type: "button", onclick: () => toUpdate(a.step) }, "rows")]);
  return [el("p", null, `${run.alarms.length} alarms. "rows" shows the questions of that update.`), table(["metric", "role", "value", "update", ""], rows, "Alarms")];
}
function toUpdate(step) { state.tab = "browse"; state.update = step; state.filter = ""; state.search = ""; state.question = -1; render(true); }

// ---------------------------------------------------------------------------------------------- the rubric browser

const FILTERS = [["", "all"], ["failed", "a judgement failed"], ["tie", "tied pairs"], ["flat", "zero variance"], ["truncated", "truncated"], ["invalid", "invalid rubric"], ["untrained", "not trained on"]];
const SORTS = [["updates", "most updates"], ["high", "highest reward"], ["low", "lowest reward"], ["text", "text"]];
function select(id, label, options, value, change) {
  return el("label", null, label, el("select", { id, onchange: (e) => change(e.target.value) }, options.map(([v, t]) => el("option", { value: v, selected: String(v) === String(value) }, t))));
}
function browse() {
  const run = RUNS[state.run];
  if (!run.questions.length) return [el("p", null, "This run folder holds no rollouts.")];
  const left = run.all_questions - run.questions.length;
  const list = el("ul", { class: "list", id: "questions", "aria-label": "Questions" }), detail = el("div", { id: "detail" });
  const search = el("input", { id: "search", type: "search", value: state.search, oninput: (e) => { state.search = e.target.value; state.shown = 100; fillList(list); } });
  const deep = el("button", { type: "button", id: "deep", onclick: () => searchTexts(list) }, "Search answers and rubrics too");
  const tools = el("div", { class: "tools" }, el("label", null, "Search questions", search), deep,
    select("filter", "Rows", FILTERS, state.filter, (v) => { state.filter = v; fillList(list); showQuestion(detail); }),
    select("sort", "Order", SORTS, state.sort, (v) => { state.sort = v; fillList(list); }),
    state.update === null ? null : el("button", { type: "button", onclick: () => { state.update = null; render(); } }, `only update ${state.update}: show all`));
  fillList(list);
  showQuestion(detail);
  return [el("p", { class: "soft" }, `${run.questions.length} of ${run.all_questions} questions, ${run.rows} of ${run.all_rows} rows` + (left ? " (the rest is left out for the file's size: --rows_mb)" : "")),
    tools, el("div", { class: "browse" }, el("div", null, list), detail)];
}
let found = null; // question numbers that a search of all texts found, with its words
async function searchTexts(list) {
  const run = RUNS[state.run], wanted = state.search.toLowerCase(), hits = new Set();
  for (let i = 0; i < run.questions.length; i++) {
    if (i % 50 === 49) { say(`searched ${i + 1} of ${run.questions.length} questions`); await new Promise((r) => setTimeout(r)); }
    if (JSON.stringify(await rowsOf(state.run, i)).toLowerCase().includes(JSON.stringify(wanted).slice(1, -1))) hits.add(i);
  }
  found = { words: state.search, run: state.run, hits };
  fillList(list);
}
function matching() {
  const run = RUNS[state.run], words = state.search.toLowerCase();
  const deep = found && found.words === state.search && found.run === state.run && words ? found.hits : null;
  const out = run.questions.map((q, i) => [q, i]).filter(([q, i]) => (!words || q.text.toLowerCase().includes(words) || q.record.toLowerCase().includes(words) || (deep && deep.has(i)))
    && (!state.filter || q.flags.includes(state.filter)) && (state.update === null || q.updates.includes(state.update)));
  const by = { updates: (a, b) => b[0].updates.length - a[0].updates.length, high: (a, b) => (b[0].high ?? -1e9) - (a[0].high ?? -1e9),
    low: (a, b) => (a[0].low ?? 1e9) - (b[0].low ?? 1e9), text: (a, b) => a[0].text.localeCompare(b[0].text) };
  return out.sort(by[state.sort]);
}
function fillList(list) {
  const all = matching();
  const buttons = all.slice(0, state.shown).map(([q, i]) => el("li", null, el("button", { type: "button", "data-question": i, "aria-current": i === state.question ? "true" : "false", onclick: () => pick(i) },
    q.text.slice(0, 180) || "(no text)", el("br"), el("span", { class: "soft" }, `${q.updates.length} updates, ${q.rows} rows `), tags(q.flags))));
  if (all.length > state.shown) buttons.push(el("li", null, el("button", { type: "button", onclick: () => { state.shown += 200; fillList(list); } }, `${all.length - state.shown} more`)));
  if (!all.length) buttons.push(el("li", null, el("p", { class: "soft" }, "No question matches.")));
  list.replaceChildren(...buttons);
  say(`${all.length} questions`);
}
function pick(i) {
  state.question = i; state.a = state.b = null;
  for (const b of document.querySelectorAll("#questions button[data-question]")) b.setAttribute("aria-current", Number(b.dataset.question) === i ? "true" : "false");
  remember();
  showQuestion(document.getElementById("detail"));
}
async function showQuestion(box) {
  if (state.question < 0) { box.replaceChildren(el("p", { class: "soft" }, "Pick a question.")); return; }
  const q = RUNS[state.run].questions[state.question], rows = await rowsOf(state.run, state.question);
  const withRubric = [...new Set(rows.filter((r) => r.criteria.length).map((r) => r.update))].sort((a, b) => a - b);
  if (state.a === null) state.a = withRubric[0] ?? null;
  if (state.b === null) state.b = withRubric[withRubric.length - 1] ?? null;
  const updates = q.updates.filter((u) => state.update === null || u === state.update);
  box.replaceChildren(el("h2", null, "Question"), el("pre", { tabindex: "0", dir: "auto", id: "question" }, q.text), el("p", { class: "soft" }, `${q.record}; in updates ${q.updates.join(", ")}`),
    el("h2", null, "Its rubrics, two updates side by side"), sideBySide(rows, withRubric, box), el("h2", null, "Answers, rubrics and verdicts"),
    ...updates.map((u) => oneUpdate(u, rows.filter((r) => r.update === u && (!state.filter || r.flags.includes(state.filter))), u === updates[updates.length - 1])));
}
function sideBySide(rows, updates, box) {
  if (!updates.length) return el("p", { class: "soft" }, "No rubric of this question reads as a list of criteria.");
  const options = updates.map((u) => [u, `update ${u}`]);
  const rubric = (u) => rows.find((r) => r.update === u && r.criteria.length).criteria;
  const [left, right] = compareCriteria(rubric(state.a), rubric(state.b));
  const column = (id, u, items, change) => el("div", null, select(id, "Rubric of", options, u, change), el("ul", { class: "crit" }, items.map(([text, weight, kind]) =>
    el("li", { class: kind }, weight === null ? null : el("strong", null, num(weight) + " "), text + " ", kind ? el("span", { class: "tag" }, kind) : null))));
  return el("div", { class: "two" }, column("left", state.a, left, (v) => { state.a = Number(v); showQuestion(box).then(() => document.getElementById("left").focus()); }),
    column("right", state.b, right, (v) => { state.b = Number(v); showQuestion(box).then(() => document.getElementById("right").focus()); }));
}
function words(text) { return new Set(text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || []); }
function compareCriteria(a, b) {
  // Equal texts and weights are unmarked; a like text (half of its words) or another weight is changed; the others came or went.
  const taken = new Map(), like = (x, y) => { const [p, q] = [words(x), words(y)], both = [...p].filter((w) => q.has(w)).length; return both / (p.size + q.size - both || 1); };
  const pairs = a.flatMap((x, i) => b.map((y, j) => [x[0] === y[0] ? 2 : like(x[0], y[0]), i, j])).filter((p) => p[0] >= 0.5).sort((p, q) => q[0] - p[0]);
  const used = new Set();
  for (const [, i, j] of pairs) if (!taken.has(i) && !used.has(j)) { taken.set(i, j); used.add(j); }
  const kind = (i, j) => a[i][0] === b[j][0] && a[i][1] === b[j][1] ? "" : "changed";
  const back = new Map([...taken].map(([i, j]) => [j, i]));
  return [a.map(([t, w], i) => [t, w, taken.has(i) ? kind(i, taken.get(i)) : "gone"]), b.map(([t, w], j) => [t, w, back.has(j) ? kind(back.get(j), j) : "new"])];
}
function oneUpdate(update, rows, last) {
  if (!rows.length) return null;
  return el("details", { open: state.update !== null || state.filter !== "" || rows[0].update === state.b || last }, el("summary", null, `Update ${update}: ${[...new Set(rows.map((r) => r.role))].join(", ")}, ${rows.length} rows, reward ${num(Math.min(...rows.map((r) => r.reward ?? Infinity)))} to ${num(Math.max(...rows.map((r) => r.reward ?? -Infinity)))}`),
    rows.map((r) => oneRow(r)));
}
const KNOWN = ["update", "role", "slot", "group", "sample", "completion", "answers", "finish", "reward", "parts", "advantage", "trained", "flags", "criteria", "rubric", "pair"];
function oneRow(r) {
  const parts = Object.entries(r.parts || {}).map(([n, v]) => `${n} ${num(v)}`).join(", ");
  const out = [el("p", null, el("strong", null, `${r.role}, group ${r.group}, sample ${r.sample}: reward ${num(r.reward)}`), ` (${parts || "no parts"}), advantage ${num(r.advantage)} `, tags(r.flags)),
    ...(r.completion === undefined ? [] : [el("h3", null, r.role === "rubric" ? "What the generator wrote" : "Answer"), el("pre", { tabindex: "0", dir: "auto" }, r.completion)]),
    ...(r.answers || []).flatMap((text, i) => [el("h3", null, `Answer ${i + 1}`), el("pre", { tabindex: "0", dir: "auto" }, text)])];
  if (r.rubric) out.push(el("details", null, el("summary", null, "The rubric that it was judged by"), el("pre", { tabindex: "0", dir: "auto" }, r.rubric)));
  if (r.pair) out.push(pair(r.pair));
  for (const [name, value] of Object.entries(r)) {
    if (KNOWN.includes(name)) continue;
    const items = Array.isArray(value) ? value : [value];
    if (items.length && items.every((v) => v && typeof v === "object" && "status" in v && "raw" in v)) items.forEach((v) => out.push(verdict(name, v, r.criteria)));
    else if (value !== "" && value !== null) out.push(el("p", { class: "soft" }, `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`));
  }
  return el("div", { class: "row" }, out);
}
function pair(p) {
  const facts = Object.entries(p).filter(([n, v]) => !["accepted", "rejected"].includes(n) && v !== null).map(([n, v]) => `${n} ${v}`).join(", ");
  return el("details", null, el("summary", null, `The pair: ${facts}`), el("div", { class: "two" }, el("div", null, el("h3", null, "Better"), el("pre", { tabindex: "0", dir: "auto" }, p.accepted)), el("div", null, el("h3", null, "Worse"), el("pre", { tabindex: "0", dir: "auto" }, p.rejected))));
}
function verdict(name, v, criteria) {
  const parts = v.parts || [];
  return el("details", null, el("summary", null, `${name}: `, el("span", { class: v.status === "ok" ? "good" : "bad" }, v.status), ` score ${num(v.score)} ${v.detail || ""}`),
    parts.length ? el("ul", { class: "crit" }, parts.map((s, i) => el("li", null, `${num(s)} `, criteria[i] ? criteria[i][0] : ""))) : null,
    v.raw ? el("pre", { tabindex: "0", dir: "auto" }, v.raw) : null);
}

// ---------------------------------------------------------------------------------------------- frame

const PARTS = { overview, curves, browse, rubrics: rubricsOverTime, alarms };
function remember() {
  const text = [state.tab, state.run, state.question < 0 ? "" : state.question].join("/");
  if (location.hash.slice(1) !== text) history.replaceState(null, "", "#" + text);
}
function recall() {
  const [tab, run, question] = location.hash.slice(1).split("/");
  if (PARTS[tab]) state.tab = tab;
  if (RUNS[Number(run)]) state.run = Number(run);
  if (question && RUNS[state.run].questions[Number(question)]) state.question = Number(question);
}
function render(focus) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const on = tab.dataset.tab === state.tab;
    tab.setAttribute("aria-selected", on ? "true" : "false");
    tab.tabIndex = on ? 0 : -1;
    if (on) MAIN.setAttribute("aria-labelledby", tab.id);
  }
  document.getElementById("run").value = String(state.run);
  MAIN.replaceChildren(...PARTS[state.tab]().filter((x) => x));
  remember();
  if (focus) MAIN.focus();
}
function start() {
  document.getElementById("title").textContent = document.title;
  const tabs = document.getElementById("tabs");
  TABS.forEach(([name, label]) => tabs.append(el("button", { type: "button", role: "tab", id: "tab-" + name, "data-tab": name, "aria-controls": "main", onclick: () => { state.tab = name; render(); } }, label)));
  tabs.addEventListener("keydown", (e) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!move) return;
    const names = TABS.map((t) => t[0]);
    state.tab = names[(names.indexOf(state.tab) + move + names.length) % names.length];
    render();
    document.getElementById("tab-" + state.tab).focus();
  });
  const run = document.getElementById("run");
  RUNS.forEach((r, i) => run.append(el("option", { value: i }, r.name)));
  run.addEventListener("change", () => { state.run = Number(run.value); state.question = -1; state.a = state.b = state.update = null; render(); run.focus(); });
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  recall();
  render();
}
start();
