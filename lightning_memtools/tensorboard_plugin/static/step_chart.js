// Memory over the events of one step, or of a whole snapshot: stacked parts, reserved memory, phases, the peak.

import { LinkedCharts, StepChart } from "./charts.js";
import { h } from "./dom.js";
import { PART_NAMES, percent, size, whole } from "./format.js";
import { colours } from "./theme.js";

const SHOWN_NAMES = 3;

function stacked(view) {
  const totals = view.columns.map(() => 0);
  const names = Object.keys(view.parts);
  const series = names.map((name) => {
    const values = view.parts[name];
    const own = new Map(view.columns.map((at, k) => [at, values[k]]));
    const ceiling = values.map((value, k) => (totals[k] += value));
    const { parts } = colours();
    const colour = parts[name] ?? parts.other;
    return {
      label: PART_NAMES[name] ?? name,
      colour,
      fill: colour,
      style: "area",
      data: [view.columns, ceiling],
      part: (at) => own.get(at) ?? null,
    };
  });
  const reserved = { label: "reserved", colour: colours().line, style: "limit", data: [view.columns, view.reserved] };
  const peak = {
    label: "peak",
    colour: colours().marks.oom,
    style: "points",
    data: [[view.peak.at], [view.peak.bytes]],
  };
  return [...series.reverse(), reserved, peak];
}

function holders(view) {
  const hasParts = view.top.some(({ part }) => part);
  const row = (bytes, part, words) =>
    h(
      "tr",
      {},
      h("td", { class: "right" }, percent(bytes / view.peak.bytes)),
      h("td", { class: "right" }, size(bytes)),
      hasParts ? h("td", {}, PART_NAMES[part] ?? part) : null,
      h("td", { class: "name" }, words),
    );
  const words = (names, bytes) => {
    if (names.length === 1) return names[0];
    const more = names.length > SHOWN_NAMES ? ", …" : "";
    return `${whole(names.length)} of ${size(bytes)}: ${names.slice(0, SHOWN_NAMES).join(", ")}${more}`;
  };
  const rows = view.top.map(({ bytes, part, names }) => row(bytes * names.length, part, words(names, bytes)));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "holders" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col", class: "right" }, "share"),
          h("th", { scope: "col", class: "right" }, "held"),
          hasParts ? h("th", { scope: "col" }, "what") : null,
          h("th", { scope: "col" }, "by"),
        ),
      ),
      h("tbody", {}, rows, row(view.peak.bytes, "", "total at the peak")),
    ),
  );
}

// Returns the element, and the linked charts, to destroy them.
export function stepChart(view, title) {
  const linked = new LinkedCharts();
  linked.setFull(0, view.n_events);
  const where = view.peak.phase ? `, in ${view.peak.phase}` : "";
  const peak = `Peak allocated ${size(view.peak.bytes)} at event ${whole(view.peak.at)}${where}.`;
  const words = `${peak} An event is an allocation or a freeing; ${view.name}.`;
  const chart = new StepChart(linked, {
    title,
    describe: words,
    series: stacked(view),
    height: 360,
    format: size,
    isSize: true,
    unit: "event",
    phases: view.phases,
    note: h("div", { class: "note" }, h("span", {}, words)),
  });
  requestAnimationFrame(() => {
    chart.fit();
    linked.draw();
  });
  const element = h(
    "div",
    {},
    chart.element,
    view.top.length ? h("section", { class: "card" }, h("h3", {}, "Who holds the peak"), holders(view)) : null,
  );
  return { element, linked };
}
