// Asks the server for what is new, and keeps it. Series have as many points as the server keeps, so a page that stays open does not grow.
import { AXES } from "./axes.js";
import { CastMap, Chart, scale } from "./charts.js";
import { Arrangement, RankList, Row, completionList, eventList } from "./runs.js";
import { exportLine, fetchSettings, showSettings } from "./settings.js";
import { count, duration, gib, percent, tell } from "./words.js";

/** Milliseconds between two questions, while the page is seen and while it is not. */
const [SEEN, HIDDEN] = [1000, 10000];
// Runs that are shown at first; an address that ends with #all shows all runs.
const SHOWN = 8;

const at = (id) => document.getElementById(id);
const runs = new Map();
let epoch = "";

const isLog = () => at("logarithmic").checked;
const sentinel = (name, label) => [{ name: `sentinel/${name}`, label, dots: true }];
const charts = [
  new Chart("Loss (nats per token)", [{ name: "loss", label: "training", smooth: true }, { name: "eval_loss", label: "evaluation", dots: true, dash: [6, 3] }], { log: isLog }),
  new Chart("Reward", [{ name: "reward", label: "training", smooth: true }, { name: "eval_reward", label: "evaluation", dots: true, dash: [6, 3] }]),
  new Chart("Gradient norm", [{ name: "grad_norm", label: "norm", smooth: true }], { log: isLog }),
  new Chart("Learning rate", [{ name: "learning_rate", label: "rate" }]),
  new Chart("Tokens per second", [{ name: "tokens_per_second", label: "tokens/s", smooth: true }], { format: count }),
  new Chart("Model FLOP utilisation, of the BF16 peak", [{ name: "mfu", label: "MFU", smooth: true }], { format: percent }),
  new Chart("GPU power (watts)", [{ name: "gpu_power_watts", label: "power", smooth: true }]),
  new Chart("GPU load", [{ name: "gpu_utilization", label: "load", smooth: true }], { format: percent }),
  new Chart("Memory", [{ name: "peak_memory_bytes", label: "used" }, { name: "planned", label: "planned", dash: [4, 4] }], { format: gib }),
  new Chart("FP8 elements saturated", [{ name: "fp8_saturated", label: "share", smooth: true }]),
  new Chart("FP8 elements underflowed", [{ name: "fp8_underflowed", label: "share", smooth: true }]),
  new Chart("Sentinel: loss gap to BF16 (nats)", sentinel("loss_gap", "gap")),
  new Chart("Sentinel: cosine of gradients", sentinel("gradient_cosine", "cosine")),
];
const charted = new Set(charts.flatMap((chart) => chart.lines.map((line) => line.name)).concat("tokens"));
const more = new Map();
const shown = () => [...runs.values()].filter((run) => run.shown);
const arrangement = new Arrangement(at("runs").tHead.rows[0], at("runs").tBodies[0], arrange);
at("charts").append(...charts.map((chart) => chart.figure));
at("scale").append(...scale());

/** Columns of a part replace those from `from` on. */
function splice(columns, part, names) {
  for (const name of names) {
    columns[name].length = Math.min(columns[name].length, part.from);
    columns[name].push(...part[name]);
  }
}

function takeSeries(run, name, part) {
  const series = run.series.get(name) ?? { steps: [], means: [] };
  if (part.low && !series.low) Object.assign(series, { low: [...series.means], high: [...series.means] });
  if (!part.low) delete series.low, delete series.high;
  splice(series, part, part.low ? ["steps", "means", "low", "high"] : ["steps", "means"]);
  run.series.set(name, series);
}

function take(run, changes) {
  for (const [name, part] of Object.entries(changes.series)) takeSeries(run, name, part);
  if (changes.casts) {
    splice(run.casts, changes.casts, ["steps", "saturated", "underflowed"]);
    Object.assign(run.casts, { layers: changes.casts.layers, worst: changes.casts.worst });
  }
  if (changes.events) run.events = changes.events;
  if (changes.completions) run.completions = changes.completions;
  // A line at the height that was planned.
  const [planned, steps] = [run.summary.record?.planned_memory_bytes, run.series.get("peak_memory_bytes")?.steps];
  if (planned && steps?.length) run.series.set("planned", { steps: [steps[0], steps.at(-1)], means: [planned, planned] });
}

function newRun(summary) {
  const run = { id: summary.id, name: summary.name, shown: summary.id < SHOWN || location.hash === "#all", summary, since: 0 };
  forget(run);
  run.row = new Row(run, (on) => choose((other) => (other === run ? on : other.shown)));
  [run.map, run.ranks, run.exported] = [new CastMap(run), new RankList(run), exportLine(run)];
  return run;
}

/** Shows the runs for which `isShown` is true. */
function choose(isShown) {
  for (const run of runs.values()) {
    const on = isShown(run);
    if (run.shown && !on) forget(run);
    run.shown = on;
    run.row.update();
  }
  draw();
  showEvents();
  ask();
}

function arrange() {
  arrangement.arrange([...runs.values()], at("search").value, at("group").value);
}

function drawSettings() {
  showSettings(at("settings"), shown(), at("different").checked, at("keys").value);
}

/** Drops what the page has of a run; the server sends all again when it is asked to. */
function forget(run) {
  Object.assign(run, { since: 0, series: new Map(), casts: { layers: [], steps: [], saturated: [], underflowed: [], worst: [] }, events: [], completions: [] });
}

function draw() {
  const [list, weight, axis] = [shown(), Number(at("smoothing").value), AXES[at("axis").value]];
  charts.forEach((chart) => chart.draw(list, weight, axis));
  const others = new Set(list.flatMap((run) => [...run.series.keys()].filter((name) => !charted.has(name))));
  at("more").hidden = others.size === 0;
  if (at("more").open) {
    for (const name of [...others].sort()) {
      if (!more.has(name)) {
        more.set(name, new Chart(name, [{ name, label: name }]));
        at("more-charts").append(more.get(name).figure);
      }
    }
    more.forEach((chart) => chart.draw(list, weight, axis));
  }
  const measure = document.querySelector("input[name=measure]:checked").value;
  const mapped = list.filter((run) => run.casts.steps.length > 0);
  mapped.forEach((run) => run.map.draw(measure));
  place(at("maps"), mapped.map((run) => run.map.figure), "No run that is shown has recorded its casts (logging.cast_statistics_steps, and an FP8 recipe).");
  place(at("ranks"), list.map((run) => run.ranks.place), "No run is shown.");
  list.forEach((run) => run.ranks.update());
  list.forEach((run) => fetchSettings(run, drawSettings));
  drawSettings();
  place(at("export"), list.map((run) => run.exported), "No run is shown.");
}

/** Puts `parts` into `target` where they are others than those that it has, or `words` if there are none. */
function place(target, parts, words) {
  const same = parts.length > 0 && parts.length === target.children.length && parts.every((part, i) => target.children[i] === part);
  if (same) return;
  if (parts.length > 0) target.replaceChildren(...parts);
  else if (target.textContent !== words) target.textContent = words;
}

function showEvents() {
  at("events").replaceChildren(...eventList(shown()));
  const lists = completionList(shown());
  at("completions").replaceChildren(...lists);
  at("completions-part").hidden = lists.length === 0;
}

/** Takes an answer to a question from the revisions in `asked`, by run. Returns whether there is more to ask for at once. */
function show(answer, asked) {
  // Another server, whose runs may be others.
  if (epoch && answer.epoch !== epoch) return location.reload();
  epoch = answer.epoch;
  let events = false;
  for (const summary of answer.runs) {
    const run = runs.get(summary.id) ?? newRun(summary);
    Object.assign(run, { summary, name: summary.name });
    runs.set(summary.id, run);
    const changes = answer.changes[summary.id];
    // Not of a run that was hidden meanwhile.
    if (changes && run.shown && asked.get(run.id) === run.since) {
      take(run, changes);
      run.since = summary.revision;
      events ||= Boolean(changes.events || changes.completions);
    }
    run.row.update();
  }
  arrange();
  at("choice").hidden = runs.size < 2;
  at("no-runs").hidden = runs.size > 0;
  at("runs").hidden = runs.size === 0;
  const problems = answer.runs.flatMap((run) => run.problems.map((text) => `${run.name}: ${text}`));
  if (answer.left_out) problems.push("There are more runs than are monitored; name fewer folders.");
  tell(at("problems"), problems.join("\n"));
  draw();
  if (events) showEvents();
  const pending = shown().some((run) => run.since === 0 || run.summary.pending);
  const written = Math.max(0, ...answer.runs.map((run) => run.written ?? 0));
  tell(at("age"), written ? `newest line ${duration(Math.max(0, answer.now - written))} ago` : "");
  at("connection").className = "";
  tell(at("connection"), pending ? "Reading the files of runs…" : "Connected");
  if (!pending) document.body.dataset.painted ??= Math.round(performance.now());
  return pending;
}

let timer;
let asking = false;

/** Asks for what is new, now and from here on. */
async function ask() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  let soon = false;
  try {
    const asked = new Map(shown().map((run) => [run.id, run.since]));
    const since = [...asked].map(([id, revision]) => `${id}:${revision}`).join(",");
    const response = await fetch(`api/runs?epoch=${epoch}&since=${since}`);
    if (!response.ok) throw new Error(`status ${response.status}`);
    const known = runs.size;
    soon = show(await response.json(), asked) || runs.size > known;
  } catch (error) {
    at("connection").className = "lost";
    tell(at("connection"), `The server does not answer (${error.message}); what is shown is what it last said. The page of a training run ends with the run, and ottava monitor FOLDER shows the run again.`);
  }
  asking = false;
  timer = setTimeout(ask, soon ? 20 : document.hidden ? HIDDEN : SEEN);
}

at("smoothing").addEventListener("input", () => {
  tell(at("smoothing-value"), Number(at("smoothing").value).toFixed(2));
  draw();
});
at("logarithmic").addEventListener("change", draw);
at("axis").addEventListener("change", draw);
at("search").addEventListener("input", arrange);
at("group").addEventListener("change", arrange);
at("different").addEventListener("change", drawSettings);
at("keys").addEventListener("input", drawSettings);
at("only").addEventListener("click", () => {
  const found = new Set(arrangement.found([...runs.values()], at("search").value));
  choose((run) => found.has(run));
});
at("none").addEventListener("click", () => choose(() => false));
at("more").addEventListener("toggle", draw);
document.querySelectorAll("input[name=measure]").forEach((input) => input.addEventListener("change", draw));
document.addEventListener("visibilitychange", () => document.hidden || ask());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(() => requestAnimationFrame(draw)).observe(at("charts"));
ask();
