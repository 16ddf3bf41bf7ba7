// Settings of runs side by side.
import { element, short, tell } from "./words.js";

/** Fetches the settings of a run once for each of its starts, and calls `done` when they are there. */
export async function fetchSettings(run, done) {
  const start = run.summary.record?.started ?? 0;
  if (run.settingsOf === start) return;
  run.settingsOf = start;
  const response = await fetch(`api/settings?run=${run.id}`).catch(() => null);
  run.settings = response?.ok ? await response.json() : {};
  // After a failure, the next update of the page fetches them again.
  if (!response?.ok) run.settingsOf = undefined;
  done();
}

/** The rows of a table of settings: a key, and the value of each run. */
export function settingRows(runs, onlyDifferent, search) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings ?? {})))].sort();
  const rows = keys.map((key) => [key, ...runs.map((run) => run.settings?.[key] ?? "–")]);
  const words = search.toLowerCase();
  return rows.filter(([key, first, ...rest]) => {
    const differs = rest.some((value) => value !== first);
    return (!onlyDifferent || runs.length < 2 || differs) && [key, first, ...rest].some((text) => text.toLowerCase().includes(words));
  });
}

/** Shows the settings of `runs` in `place`. */
export function showSettings(place, runs, onlyDifferent, search) {
  const rows = settingRows(runs, onlyDifferent, search);
  // The table is made anew only if it changes, so that scrolling and selections stay.
  const key = JSON.stringify([runs.map((run) => run.name), rows]);
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  if (rows.length === 0) {
    place.replaceChildren();
    return tell(place, runs.length > 1 && onlyDifferent ? "No setting differs between the runs that are shown." : "There are no settings to show.");
  }
  const head = element("tr", {}, ...["Setting", ...runs.map((run) => short(run.name))].map((text) => element("th", { scope: "col" }, text)));
  const row = ([name, first, ...rest]) => {
    const differs = rest.some((value) => value !== first);
    return element("tr", {}, element("th", { scope: "row" }, name), ...[first, ...rest].map((text) => element("td", { class: differs ? "differs" : undefined }, text)));
  };
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows.map(row)));
  place.replaceChildren(element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Settings of runs" }, table));
}

/** A line with links to the metrics of a run. */
export function exportLine(run) {
  const link = (kind) => element("a", { href: `api/metrics.${kind}?run=${run.id}`, download: `${run.name.replaceAll("/", "-")}.${kind}` }, kind.toUpperCase());
  return element("li", {}, `${run.name}: `, link("csv"), " ", link("json"));
}
