// Numbers and names in words, and small helpers for elements.

/** A number with about four digits. */
export function number(value) {
  if (value === undefined || value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(5)));
}

/** A large count, such as 12.3k. */
export function count(value) {
  if (value === undefined || value === null) return "–";
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= unit) return `${Number((value / unit).toPrecision(4))}${name}`;
  }
  return String(Number(value.toPrecision(4)));
}

/** Bytes, such as 1.5 GiB. */
export function gib(bytes) {
  if (bytes === undefined || bytes === null) return "–";
  return bytes > 0 && bytes < 2 ** 30 ? `${Number((bytes / 2 ** 20).toPrecision(4))} MiB` : `${Number((bytes / 2 ** 30).toPrecision(4))} GiB`;
}

export const percent = (share) => (share === undefined || share === null ? "–" : `${(100 * share).toPrecision(3)} %`);

/** A duration, such as 3 h 20 min. */
export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${(hours / 24).toPrecision(3)} days`;
}

/** An element with attributes and children; text children are text, never markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Replaces the text of an element where it differs, so that screen readers hear changes alone. */
export function tell(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** The value of a colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The number of colours in the style sheet. */
const NAMED = 8;

/** A colour of the circle of hues, as #rrggbb. */
function fromHue(hue, lightness) {
  const reach = 0.85 * Math.min(lightness, 1 - lightness);
  const part = (offset) => {
    const place = (offset + hue / 30) % 12;
    const value = lightness - reach * Math.max(-1, Math.min(place - 3, 9 - place, 1));
    return Math.round(255 * value).toString(16).padStart(2, "0");
  };
  return `#${part(0)}${part(8)}${part(4)}`;
}

/** The colour of a run. After the colours of the style sheet, hues follow that are far from the hues before them. */
export function runColour(id) {
  if (id < NAMED) return colour(`run-${id}`);
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const shade = [0, -0.1, 0.1][id % 3];
  return fromHue((20 + 137.508 * id) % 360, (isDark ? 0.62 : 0.38) + shade);
}

/** A name of at most `most` letters, without its middle. */
export function short(name, most = 28) {
  return name.length <= most ? name : `${name.slice(0, most / 2)}…${name.slice(name.length - most / 2 + 1)}`;
}

/** Shows a table in `place`: the one that is there gets new cells, so that focus and scrolling stay. The first column names the row. */
export function fillTable(place, caption, heads, rows) {
  let region = place.querySelector(".wide");
  if (!region) {
    const made = element("table", {}, element("caption", { class: "hint" }), element("thead"), element("tbody"));
    region = element("div", { class: "wide", tabindex: "0", role: "region" }, made);
    place.append(region);
  }
  const shown = region.firstElementChild;
  region.setAttribute("aria-label", caption);
  tell(shown.caption, caption);
  shown.tHead.replaceChildren(element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text))));
  const row = ([first, ...rest]) => element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((text) => element("td", { class: "number" }, text)));
  shown.tBodies[0].replaceChildren(...rows.map(row));
}

/** `most` of the places 0 to `length` - 1, evenly spread, with the first and the last. */
export function spread(length, most) {
  if (length <= most) return Array.from({ length }, (_, place) => place);
  return Array.from({ length: most }, (_, i) => Math.round((i * (length - 1)) / (most - 1)));
}
