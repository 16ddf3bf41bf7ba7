// The table of runs, their events and their ranks.
import { count, duration, element, gib, number, percent, runColour, short, tell } from "./words.js";

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

/** The columns of the table, each with the value that sorts its rows. */
const COLUMNS = [
  ["Run", (run) => run.name], ["State", (run) => run.summary.state], ["Step", (run) => run.summary.step], ["Left", left],
  ["Loss", (run) => run.summary.latest.loss], ["Evaluation", (run) => run.summary.latest.eval_loss], ["Tokens/s", (run) => run.summary.latest.tokens_per_second],
  ["MFU", (run) => run.summary.latest.mfu], ["Memory used / planned", (run) => run.summary.latest.peak_memory_bytes],
  ["Alarms", (run) => run.summary.events.reduce((sum, some) => sum + some, 0)], ["Recipe, device", (run) => run.summary.record?.recipe],
];

/** The values that rows can be grouped by. */
const GROUPS = {
  recipe: (run) => run.summary.record?.recipe ?? "no recipe known",
  device: (run) => run.summary.record?.device ?? "no device known",
  state: (run) => STATES[run.summary.state] ?? run.summary.state,
};

/** Orders two values, from the largest if `down`; what is missing comes last in both orders. */
function order(a, b, down = false) {
  const missing = [a, b].map((value) => value === undefined || value === null);
  if (missing[0] || missing[1]) return missing[0] - missing[1];
  const rises = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  return down ? -rises : rises;
}

/** The order, the groups and the search of the table of runs. */
export class Arrangement {
  constructor(head, body, changed) {
    Object.assign(this, { body, column: null, down: false, key: "" });
    this.heads = COLUMNS.map(([name], column) => {
      const button = element("button", { type: "button" }, name);
      button.addEventListener("click", () => {
        [this.down, this.column] = [this.column === column && !this.down, column];
        changed();
      });
      return element("th", { scope: "col" }, button);
    });
    head.replaceChildren(...this.heads);
  }

  /** The runs whose words contain those of `search`. */
  found(runs, search) {
    const words = search.toLowerCase().split(" ").filter(Boolean);
    return runs.filter((run) => {
      const text = [run.name, run.summary.folder, run.summary.state, run.summary.record?.recipe, run.summary.record?.device].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  /** Puts the rows of `runs` in order; moves them only if the order changes, so that the focus stays. */
  arrange(runs, search, group) {
    const list = this.found(runs, search);
    if (this.column !== null) {
      const value = COLUMNS[this.column][1];
      list.sort((a, b) => order(value(a), value(b), this.down) || a.id - b.id);
    }
    const named = GROUPS[group];
    if (named) list.sort((a, b) => order(named(a), named(b)));
    this.heads.forEach((head, column) => head.setAttribute("aria-sort", column === this.column ? (this.down ? "descending" : "ascending") : "none"));
    const rows = list.flatMap((run, place) => {
      const starts = named && (place === 0 || named(list[place - 1]) !== named(run));
      const count = named && list.filter((other) => named(other) === named(run)).length;
      return starts ? [`${named(run)}: ${count} ${count === 1 ? "run" : "runs"}`, run] : [run];
    });
    const key = JSON.stringify(rows.map((row) => (typeof row === "string" ? row : row.id)));
    if (key === this.key) return;
    this.key = key;
    const head = (text) => element("tr", { class: "group" }, element("th", { scope: "rowgroup", colspan: COLUMNS.length }, text));
    this.body.replaceChildren(...rows.map((row) => (typeof row === "string" ? head(row) : row.row.row)));
  }
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
    this.name = element("span");
    const label = element("label", { for: `show-${run.id}` }, this.swatch, this.name);
    this.state = element("span", { class: "state" });
    this.detail = element("div", { class: "detail" });
    this.cells = Array.from({ length: 9 }, () => element("td"));
    this.row = element("tr", {}, element("th", { scope: "row" }, this.box, label), element("td", {}, this.state, this.detail), ...this.cells);
  }

  update() {
    const { state, detail } = this.run.summary;
    tell(this.name, short(this.run.name, 40));
    this.swatch.style.background = runColour(this.run.id);
    this.box.checked = this.run.shown;
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
    return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `Samples and completions of ${run.name}` }, made);
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
