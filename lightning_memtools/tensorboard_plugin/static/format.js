// Numbers as people read them: sizes in the unit that suits them, three digits.

const GIB = 2 ** 30;
const UNITS = [
  ["B", 1],
  ["KiB", 2 ** 10],
  ["MiB", 2 ** 20],
  ["GiB", GIB],
  ["TiB", 2 ** 40],
];

// The parts of memory whose name on the page is not that in the logs.
export const PART_NAMES = { optimizer: "optimizer state" };

export const bytesOf = (gib) => (gib === null || gib === undefined ? null : gib * GIB);

export function unitFor(bytes) {
  let found = UNITS[0];
  for (const unit of UNITS) if (Math.abs(bytes) >= unit[1]) found = unit;
  return found;
}

export function threeDigits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return value.toFixed(size < 0.995 ? 3 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const [name, factor] = unitFor(bytes);
  return name === "B" ? `${Math.round(bytes)} B` : `${threeDigits(bytes / factor)} ${name}`;
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms >= 1000 ? `${threeDigits(ms / 1000)} s` : `${threeDigits(ms)} ms`;
}

export const number = (value) => (value === null || value === undefined ? "–" : threeDigits(value));
export const whole = (value) =>
  value === null || value === undefined ? "–" : (Math.round(value) + 0).toLocaleString("en-US"); // + 0: no "-0"

// For an axis: without zeros at the end, "0.5" and not "0.500".
export const tick = (text) => text.replace(/(\.\d*?)0+(?=\s|$)/, "$1").replace(/\.(?=\s|$)/, "");

export function percent(share) {
  const value = 100 * share;
  return value > 0 && value < 0.1 ? "< 0.1%" : `${value.toFixed(value < 10 ? 1 : 0)}%`;
}

export function difference(value, reference) {
  if (value === null || value === undefined || !reference) return "";
  const change = (100 * (value - reference)) / Math.abs(reference);
  if (Math.abs(change) < 0.05) return "±0%";
  return `${change > 0 ? "+" : "−"}${Math.abs(change) < 10 ? Math.abs(change).toFixed(1) : whole(Math.abs(change))}%`;
}

// Distances between the lines of a grid that are round in the unit, not in bytes.
export function incrementsFor(factor) {
  const found = [];
  for (let power = -6; power < 7; power += 1) for (const digit of [1, 2, 5]) found.push(digit * 10 ** power * factor);
  return found;
}
