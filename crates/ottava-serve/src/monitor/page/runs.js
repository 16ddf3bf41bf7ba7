// The table of runs, their events and their ranks.
import { count, duration, element, gib, number, percent, tell } from "./words.js";

/** States in words. */
const STATES = {
  missing: "missing", starting: "starting", running: "running", silent: "silent", finished: "finished", stopped: "stopped", failed: "failed", ended: "ended",
  killed: "killed", empty: "no run yet",
};

/** Seconds that a run still takes, at its newest speed. */
function left(run) {
  const { record, step, latest } = run.summary;
  if (!record?.max_steps || run.summary.state !== "running" || !latest.tokens_per_second) return undefined;
  return ((record.max_steps - step) * record.tokens_per_step) / latest.tokens_per_second;
}

/** The cells of a run, in the order of the head of the table. */
function cells(run) {
  const { record, step, latest, events } = run.summary;
  const used = latest.peak_memory_bytes;
  const steps = step === null ? "–" : record?.max_steps ? `${step} of ${record.max_steps}` : String(step);
  const device = record ? `${record.recipe}, ${record.ranks > 1 ? `${record.ranks} × ` : ""}${record.device}` : "–";
  const found = ["alarms", "findings", "rollbacks"].map((name, i) => [events[i], name]).filter(([number]) => number > 0);
  return [steps, duration(left(run)), number(latest.loss), number(latest.eval_loss), count(latest.tokens_per_second), percent(latest.mfu),
    `${gib(used)} / ${gib(record?.planned_memory_bytes)}`, found.map((words) => words.join(" ")).join(", ") || "none", device];
}

/** A row of the table, which is updated in place, so that the focus stays. */
export class Row {
  constructor(run, toggled) {
    this.run = run;
    this.box = element("input", { type: "checkbox", id: `show-${run.id}` });
    this.box.checked = run.shown;
    this.box.addEventListener("change", () => toggled(this.box.checked));
    this.swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    this.swatch.style.background = `var(--run-${run.id % 8})`;
    this.name = element("span");
    const label = element("label", { for: `show-${run.id}` }, this.swatch, this.name);
    this.state = element("span", { class: "state" });
    this.detail = element("div", { class: "detail" });
    this.cells = Array.from({ length: 9 }, () => element("td"));
    this.row = element("tr", {}, element("th", { scope: "row" }, this.box, label), element("td", {}, this.state, this.detail), ...this.cells);
  }

  update() {
    const { state, detail } = this.run.summary;
    tell(this.name, this.run.name);
    this.row.title = this.run.summary.folder;
    this.state.className = `state ${state}`;
    tell(this.state, STATES[state] ?? state);
    tell(this.detail, detail);
    this.detail.hidden = detail === "";
    cells(this.run).forEach((text, i) => tell(this.cells[i], text));
  }
}

/** Alarms, findings and rollbacks of the runs that are shown, the newest first. */
export function eventList(runs) {
  const lists = runs.filter((run) => run.events.length > 0).map((run) => {
    const rows = run.events.toReversed().map((event) =>
      element("tr", {}, element("td", { class: "number" }, String(event.step)), element("td", {}, event.kind), element("td", { class: "detail" }, event.text)));
    const head = element("thead", {}, element("tr", {}, ...["Step", "Kind", "What was found"].map((text) => element("th", { scope: "col" }, text))));
    const made = element("table", {}, element("caption", { class: "hint" }, run.name), head, element("tbody", {}, ...rows));
    return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `Events of ${run.name}` }, made);
  });
  return lists.length ? lists : [element("p", { class: "hint" }, "Nothing was found.")];
}

/** Completions of the runs that are shown, the newest first. */
export function completionList(runs) {
  return runs.filter((run) => run.completions.length > 0).map((run) => {
    const rows = run.completions.toReversed().map(({ step, reward, prompt, completion }) =>
      element("tr", {}, element("td", { class: "number" }, String(step)), element("td", { class: "number" }, number(reward)), element("td", { class: "text" }, prompt), element("td", { class: "text" }, completion)));
    const head = element("thead", {}, element("tr", {}, ...["Step", "Reward", "Prompt", "Completion"].map((text) => element("th", { scope: "col" }, text))));
    const made = element("table", {}, element("caption", { class: "hint" }, run.name), head, element("tbody", {}, ...rows));
    return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `Completions of ${run.name}` }, made);
  });
}

/** The ranks of a run, whose logs are fetched when they are opened. */
export class RankList {
  constructor(run) {
    this.run = run;
    this.words = element("p");
    this.logs = element("div");
    this.details = element("details", {}, element("summary", {}, "Logs of the ranks"), this.logs);
    this.details.addEventListener("toggle", () => this.details.open && this.fetch());
    this.place = element("div", {}, this.words, this.details);
  }

  update() {
    const { record } = this.run.summary;
    const ranks = record ? `${record.ranks} ${record.ranks === 1 ? "rank" : "ranks"} on ${record.device}: ${record.mesh}` : "no run.json says how many";
    tell(this.words, `${this.run.name}: ${ranks}`);
    this.details.hidden = !record || record.ranks < 2;
  }

  async fetch() {
    const response = await fetch(`api/logs?run=${this.run.id}`).catch(() => null);
    const logs = response?.ok ? await response.json() : [];
    const parts = logs.flatMap(({ rank, text }) => [element("h3", {}, `rank ${rank}`), element("pre", { tabindex: "0", "aria-label": `End of the log of rank ${rank}` }, text)]);
    this.logs.replaceChildren(...(parts.length ? parts : [element("p", { class: "hint" }, "There are no logs: rank 0 writes to the terminal, others to rank-N.log.")]));
  }
}
