// Memory over the events of one step, or of a whole snapshot: stacked parts, reserved memory, phases, the peak.

import { LinkedCharts, StepChart } from "./charts.js";
import { h } from "./dom.js";
import { percent, size, whole } from "./format.js";
import { colours } from "./theme.js";

const PART_NAMES = { optimizer: "optimizer state" };
const SHOWN_NAMES = 3;

// Parts without a colour of their own, such as lines of a program, take the colours in turn.
export function colourOf(name, i) {
  const { parts } = colours();
  return parts[name] ?? (name === "everything else" ? parts.other : Object.values(parts)[i % (Object.keys(parts).length - 1)]);
}

function stacked(view) {
  const totals = view.columns.map(() => 0);
  const names = Object.keys(view.parts);
  const series = names.map((name, i) => {
    const values = view.parts[name];
    const own = new Map(view.columns.map((at, k) => [at, values[k]]));
    const ceiling = values.map((value, k) => (totals[k] += value));
    const colour = colourOf(name, i);
    return { label: PART_NAMES[name] ?? name, colour, fill: colour, style: "area", data: [view.columns, ceiling], part: (at) => own.get(at) ?? null };
  });
  const reserved = { label: "reserved", colour: colours().line, style: "limit", data: [view.columns, view.reserved] };
  const peak = { label: "peak", colour: colours().marks.oom, style: "points", data: [[view.peak.at], [view.peak.bytes]] };
  return [...series.reverse(), reserved, peak];
}

function holders(view) {
  const names = ({ names }) => (names.length === 1 ? names[0] : `${names.slice(0, SHOWN_NAMES).join(", ")}${names.length > SHOWN_NAMES ? ", …" : ""}`);
  const amount = ({ names, bytes }) => (names.length === 1 ? size(bytes) : `${whole(names.length)} ${view.holders} of ${size(bytes)}`);
  const rows = view.top.map((one) => h("tr", {}, h("td", { class: "right" }, amount(one)), h("td", { class: "right" }, percent((one.bytes * one.names.length) / view.peak.bytes)), h("td", { class: "name" }, names(one))));
  return h("div", { class: "scroll" }, h("table", { class: "holders" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "right" }, "held at the peak"), h("th", { scope: "col", class: "right" }, "share"), h("th", { scope: "col" }, "by"))), h("tbody", {}, rows)));
}

// Returns the element, and the chart for whoever follows its cursor.
export function stepChart(view, title) {
  const linked = new LinkedCharts(() => {});
  linked.setFull(0, view.n_events);
  const where = view.peak.phase ? `, in ${view.peak.phase}` : "";
  const words = `Peak allocated ${size(view.peak.bytes)} at event ${whole(view.peak.at)}${where}. An event is an allocation or a freeing; ${view.name}.`;
  const chart = new StepChart(linked, {
    title, describe: words, series: stacked(view), height: 360, format: size, isSize: true, unit: "event", phases: view.phases,
    note: h("div", { class: "note" }, h("span", {}, words)),
  });
  requestAnimationFrame(() => { chart.fit(); linked.draw(); });
  const element = h("div", {}, chart.element, view.top.length ? h("section", { class: "card" }, h("h3", {}, "Who holds the peak"), holders(view)) : null);
  return { element, chart, linked };
}
