// Charts of series over steps, each with a table, and maps of casts.
/* global uPlot */
import { STEPS } from "./axes.js";
import { colour, element, fillTable, number, runColour, short, spread, tell } from "./words.js";

const HEIGHT = 210;
/** Rows of the table of a chart. */
const ROWS = 20;
/** Runs whose values are written under the title of a chart. */
const WRITTEN = 4;

/** Joins values by run: the name of a run is written once, and `most` runs are written. `values` are `[run, words]`. */
function byRun(values, most) {
  const runs = new Map();
  for (const [run, words] of values) runs.set(run, [...(runs.get(run) ?? []), words]);
  if (runs.size === 1) return [...runs.values()][0].join("; ");
  if (most === 0) return `${runs.size} runs; point at a step to read values`;
  const written = [...runs].slice(0, most).map(([run, words]) => `${short(run.name)}: ${words.join(", ")}`);
  const more = runs.size - written.length;
  return written.join("; ") + (more > 0 ? `; and ${more} more in the table` : "");
}

/** An exponential moving mean, corrected for its start. */
function smooth(values, weight) {
  let [mean, share] = [0, 0];
  return values.map((value) => {
    [mean, share] = [weight * mean + (1 - weight) * value, weight * share + (1 - weight)];
    return mean / share;
  });
}

/** Columns that share their steps, for uPlot; a step that one lacks is a gap that its line spans. */
function join(parts) {
  return parts.length === 0 ? [[]] : uPlot.join(parts.map(({ steps, columns }) => [steps, ...columns]), parts.map(({ columns }) => columns.map(() => 0)));
}

/** A chart of one or several series by name, over all runs that are shown. */
export class Chart {
  /** `lines` are `{name, label, smooth, dash, scale}`; `options` may have `log` and `format`. */
  constructor(title, lines, options = {}) {
    Object.assign(this, { title, lines, options, plot: null, key: "", at: null, axis: STEPS });
    this.latest = element("span", { class: "latest" });
    this.place = element("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title });
    this.details = element("details", {}, element("summary", {}, `Table: ${title}`));
    this.figure = element("figure", {}, element("figcaption", {}, title, this.latest), this.place, this.details);
    this.details.addEventListener("toggle", () => this.tabulate());
    this.place.addEventListener("keydown", (event) => this.press(event));
    this.runs = [];
  }

  format(value) {
    return (this.options.format ?? number)(value);
  }

  /** What is drawn of each run: columns over the steps of each series. */
  parts(weight) {
    const parts = [];
    for (const run of this.runs) {
      for (const line of this.lines) {
        const series = run.series.get(line.name);
        if (!series || series.steps.length === 0) continue;
        const stroke = runColour(run.id);
        const { label } = line;
        const part = { run, line, series, steps: this.axis.of(run, series.steps), columns: [], styles: [] };
        if (line.smooth && weight > 0) {
          part.columns.push(smooth(series.means, weight));
          part.styles.push({ label, stroke, run, width: 2 });
          // Beside many runs, the raw values would hide the lines.
          if (this.runs.length <= WRITTEN) {
            part.columns.push(series.means);
            part.styles.push({ label: `${label}, raw`, stroke: `${stroke}55`, run, width: 1 });
          }
        } else {
          part.columns.push(series.means);
          part.styles.push({ label, stroke, run, width: line.dots ? 2 : 1.5, dash: line.dash, points: { show: Boolean(line.dots) && series.steps.length < 200, size: 6 } });
        }
        if (series.low && this.runs.length <= 2) {
          part.columns.push(series.high, series.low);
          part.styles.push({ label: `${label}, highest`, stroke: `${stroke}33`, run, width: 1 }, { label: `${label}, lowest`, stroke: `${stroke}33`, run, width: 1 });
          part.band = true;
        }
        parts.push(part);
      }
    }
    return parts;
  }

  /** Draws `runs` over `axis`. Returns whether there is anything to draw. */
  draw(runs, weight, axis) {
    Object.assign(this, { runs, axis });
    const parts = this.parts(weight);
    this.figure.hidden = parts.length === 0;
    if (parts.length === 0) {
      this.plot?.destroy();
      [this.plot, this.key] = [null, ""];
      return false;
    }
    const data = join(parts);
    const log = this.options.log?.() && data.slice(1).every((column) => column.every((value) => !(value <= 0)));
    const styles = parts.flatMap((part) => part.styles);
    // A chart is made anew only if its lines or its place change; else only its data do.
    const width = Math.max(this.place.clientWidth, 200);
    const looks = styles.map(({ run, ...style }) => ({ run: run.id, ...style }));
    const key = JSON.stringify([log, looks, width, window.devicePixelRatio, axis.name]);
    if (key !== this.key) {
      this.plot?.destroy();
      this.plot = new uPlot(this.describe(parts, styles, log, width), data, this.place);
      this.key = key;
    } else {
      this.plot.setData(data, this.plot.scales.x.auto !== false && !this.zoomed);
      if (this.zoomed) this.plot.redraw();
    }
    this.say(parts);
    if (this.details.open) this.tabulate();
    return true;
  }

  describe(parts, styles, log, width) {
    const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid") }, font: "12px system-ui, sans-serif" };
    const bands = [];
    let column = 1;
    for (const part of parts) {
      const end = column + part.columns.length - 1;
      if (part.band) bands.push({ series: [end - 1, end], fill: `${runColour(part.run.id)}22` });
      column = end + 1;
    }
    return {
      width, height: HEIGHT, bands, legend: { show: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [{ ...axis, space: 70, size: 34, values: (_, ticks) => ticks.map((tick) => this.axis.tick(tick)) }, { ...axis, size: 78, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.format(tick))) }],
      series: [{ label: this.axis.name }, ...styles.map(({ run, ...style }) => ({ points: { show: false }, ...style, spanGaps: true, scale: "y" }))],
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => this.read(plot)], setScale: [(plot, name) => name === "x" && this.note(plot)] },
    };
  }

  /** Remembers whether a part of the steps is shown. */
  note(plot) {
    const steps = plot.data[0];
    this.zoomed = steps.length > 0 && (plot.scales.x.min > steps[0] || plot.scales.x.max < steps[steps.length - 1]);
  }

  /** Says the newest values, as long as no step is pointed at. */
  say(parts) {
    this.styles = parts.flatMap((part) => part.styles);
    const values = parts.map(({ run, line, series }) => {
      const last = series.means.length - 1;
      return [run, `${line.label} ${this.format(series.means[last])} at step ${series.steps[last]}`];
    });
    this.newest = byRun(values, this.runs.length > WRITTEN ? 0 : WRITTEN);
    if (this.at === null) tell(this.latest, this.newest);
    this.place.setAttribute("aria-label", `${this.title}: ${this.newest}. Left and right arrows read values; a table follows.`);
  }

  /** Shows the values at the step that is pointed at. */
  read(plot) {
    const place = plot.cursor.idx;
    this.at = place ?? null;
    if (this.at === null) return tell(this.latest, this.newest ?? "");
    const values = this.styles.map(({ run, label }, i) => [run, label, plot.data[i + 1]?.[place]]);
    const shown = values.filter(([, , value]) => value !== null && value !== undefined).map(([run, label, value]) => [run, `${label} ${this.format(value)}`]);
    tell(this.latest, `${this.axis.words(plot.data[0][place])}: ${byRun(shown, 2 * WRITTEN)}`);
  }

  press(event) {
    const plot = this.plot;
    const steps = plot?.data[0];
    if (!steps?.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = plot.scales.x;
    const zoom = (factor) => {
      const centre = this.at === null ? max : steps[this.at];
      plot.setScale("x", { min: Math.max(steps[0], centre - (max - min) * factor / 2), max: Math.min(steps[steps.length - 1], centre + (max - min) * factor / 2) });
    };
    const go = (place) => {
      const to = Math.min(Math.max(place, 0), steps.length - 1);
      plot.setCursor({ left: plot.valToPos(steps[to], "x"), top: plot.over.clientHeight / 2 });
      this.place.setAttribute("aria-label", `${this.title}, ${this.latest.textContent}`);
    };
    const stride = event.shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => go((this.at ?? steps.length) - stride), ArrowRight: () => go((this.at ?? -1) + stride),
      Home: () => go(0), End: () => go(steps.length - 1), "+": () => zoom(0.5), "-": () => zoom(2),
      0: () => plot.setScale("x", { min: steps[0], max: steps[steps.length - 1] }), Escape: () => plot.setCursor({ left: -10, top: -10 }),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  tabulate() {
    if (!this.details.open) return;
    const rows = [];
    for (const { run, line, series } of this.parts(0)) {
      for (const place of spread(series.steps.length, ROWS)) {
        rows.push([`${run.name}: ${line.label}`, String(series.steps[place]), this.format(series.means[place]),
          this.format(series.low?.[place] ?? series.means[place]), this.format(series.high?.[place] ?? series.means[place])]);
      }
    }
    fillTable(this.details, `${this.title}: up to ${ROWS} points of each series`, ["Series", "Up to step", "Mean", "Lowest", "Highest"], rows);
  }
}

/** Colours of shares, from the level on. */
const LEVELS = [[0, null, "none"], [Number.MIN_VALUE, "#fef3c7", "some"], [1e-6, "#fde68a", "1e-6"], [1e-5, "#fbbf24", "1e-5"], [1e-4, "#f59e0b", "1e-4"],
  [1e-3, "#ea580c", "1e-3"], [1e-2, "#b91c1c", "1e-2"], [1e-1, "#581c1c", "0.1 and more"]];

const levelOf = (share) => LEVELS.findLast(([from]) => share >= from);

/** The meaning of the colours. */
export function scale() {
  return LEVELS.flatMap(([, fill, label]) => {
    const box = element("span", { class: "level", "aria-hidden": "true" });
    if (fill) box.style.background = fill;
    return [box, label];
  });
}

/** The width in pixels of a line of a map with fewer than `WIDE` lines. */
const [COLUMN, WIDE] = [24, 40];

/** A map of the casts of a run, by layer and step. */
export class CastMap {
  constructor(run) {
    this.run = run;
    this.canvas = element("canvas", { role: "img" });
    this.latest = element("span", { class: "latest" });
    this.details = element("details", {}, element("summary", {}, "Table of the map"));
    this.name = element("span");
    this.figure = element("figure", { class: "map" }, element("figcaption", {}, this.name, this.latest), this.canvas, this.details);
    this.details.addEventListener("toggle", () => this.tabulate());
    this.canvas.addEventListener("mousemove", (event) => this.read(event));
    this.canvas.addEventListener("mouseleave", () => tell(this.latest, this.words));
  }

  draw(measure) {
    this.measure = measure;
    tell(this.name, this.run.name);
    const { layers, steps } = this.run.casts;
    const cells = this.run.casts[measure];
    [this.canvas.width, this.canvas.height] = [Math.max(steps.length, 1), Math.max(layers.length, 1)];
    // Few lines keep the shape of a map: a column for each line.
    this.canvas.style.width = steps.length < WIDE ? `${Math.max(steps.length, 1) * COLUMN}px` : "100%";
    this.canvas.style.height = `${Math.min(Math.max(layers.length * 12, 24), 480)}px`;
    const context = this.canvas.getContext("2d");
    cells.forEach((column, x) => layers.forEach((_, y) => {
      const [, fill] = levelOf(column[y] ?? 0);
      if (!fill) return;
      context.fillStyle = fill;
      context.fillRect(x, y, 1, 1);
    }));
    const worst = this.run.casts.worst.map(([name, saturated, underflowed]) => `${name} ${number(measure === "saturated" ? saturated : underflowed)}`);
    const range = steps.length ? `steps ${steps[0]} to ${steps[steps.length - 1]}, ${layers[0]} above to ${layers[layers.length - 1]} below` : "no casts recorded";
    this.words = `${range}. Newest line, most lost: ${worst.slice(0, 3).join(", ") || "nothing"}`;
    tell(this.latest, this.words);
    this.canvas.setAttribute("aria-label", `Share ${measure} by layer and step: ${this.words}. A table follows.`);
    if (this.details.open) this.tabulate();
  }

  read(event) {
    const box = this.canvas.getBoundingClientRect();
    const { layers, steps } = this.run.casts;
    const x = Math.min(Math.floor(((event.clientX - box.left) / box.width) * steps.length), steps.length - 1);
    const y = Math.min(Math.floor(((event.clientY - box.top) / box.height) * layers.length), layers.length - 1);
    if (x < 0 || y < 0) return;
    tell(this.latest, `${layers[y]}, up to step ${steps[x]}: ${number(this.run.casts[this.measure][x][y] ?? 0)} ${this.measure}`);
  }

  tabulate() {
    if (!this.details.open) return;
    const { layers, steps } = this.run.casts;
    const places = spread(steps.length, 10);
    const rows = layers.map((layer, y) => [layer, ...places.map((x) => number(this.run.casts[this.measure][x][y] ?? 0))]);
    fillTable(this.details, `Largest share ${this.measure} of a cast, by layer and step`, ["Layer", ...places.map((x) => String(steps[x]))], rows);
  }
}
