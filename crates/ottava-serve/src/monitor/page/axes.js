// What charts are drawn over: steps, tokens, or hours of training.
import { count, number } from "./words.js";

/** Steps of a run, and the tokens that it had read after each. Without such a series, as many tokens as a full step has. */
function tokensRead(run) {
  const { steps = [], means = [] } = run.series.get("tokens") ?? {};
  const perStep = run.summary.record?.tokens_per_step ?? 1;
  return steps.length > 0 ? [[0, ...steps], [0, ...means]] : [[0, 1], [0, perStep]];
}

/** The value at `x` of a line through the points `xs`, `ys`; beyond its ends, the line goes on as its nearest part does. */
export function interpolate(xs, ys, x) {
  if (xs.length < 2) return xs.length === 1 ? ys[0] : 0;
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return ys[low] + ((x - xs[low]) * (ys[high] - ys[low])) / (xs[high] - xs[low]);
}

/** Steps of a run, and the hours of training until each: tokens divided by their speed, without evaluations and saves. */
function clock(run) {
  const speed = run.series.get("tokens_per_second");
  const [steps, tokens] = tokensRead(run);
  let [before, hours] = [0, 0];
  const all = [[0], [0]];
  (speed?.steps ?? []).forEach((step, place) => {
    const read = interpolate(steps, tokens, step);
    hours += (read - before) / Math.max(speed.means[place], 1e-9) / 3600;
    before = read;
    all[0].push(step);
    all[1].push(hours);
  });
  return all;
}

/** Each axis has its name, the places of steps of a run, and the words of a tick and of a place. */
export const STEPS = { name: "step", of: (_, steps) => steps, tick: (step) => (Number.isInteger(step) ? String(step) : ""), words: (step) => `step ${step}` };

export const AXES = {
  step: STEPS,
  tokens: {
    name: "tokens",
    of: (run, steps) => {
      const [known, tokens] = tokensRead(run);
      return steps.map((step) => interpolate(known, tokens, step));
    },
    tick: count,
    words: (tokens) => `${count(tokens)} tokens`,
  },
  hours: {
    name: "hours",
    of: (run, steps) => {
      const [known, hours] = clock(run);
      return steps.map((step) => interpolate(known, hours, step));
    },
    tick: (hours) => `${Number(hours.toPrecision(6))} h`,
    words: (hours) => `${number(hours)} hours of training`,
  },
};
