// Charts over training steps that share their cursor and their zoom.

import uPlot from "./uPlot.esm.js";
import { h } from "./dom.js";
import { incrementsFor, tick, unitFor, whole } from "./format.js";
import { colours } from "./theme.js";

const STEPPED = ["peak", "faint", "area"];
const NEAR_PX = 6;
const KEYS = "Arrow keys move the cursor, plus and minus zoom, Escape shows all steps.";

// The charts of one page.
export class LinkedCharts {
  constructor() {
    this.charts = [];
    this.range = null;
    this.full = [0, 1];
    this.sync = uPlot.sync(`memtools-${Math.random()}`);
    this.sizes = new ResizeObserver(() => this.charts.forEach((chart) => chart.fit()));
  }

  add(chart) {
    this.charts.push(chart);
    this.sizes.observe(chart.host);
  }

  destroy() {
    this.sizes.disconnect();
    this.charts.forEach((chart) => chart.plot.destroy());
    this.charts = [];
  }

  setFull(first, last) {
    this.full = last > first ? [first, last] : [first - 0.5, first + 0.5];
  }

  shown() {
    return this.range ?? this.full;
  }

  zoom(first, last) {
    const [low, high] = this.full;
    const width = Math.max(last - first, Math.min(2, high - low));
    const begin = Math.max(low, Math.min(first, high - width));
    const end = Math.min(high, begin + width);
    this.range = begin <= low && end >= high ? null : [begin, end];
    this.draw();
  }

  reset() {
    this.zoom(...this.full);
  }

  draw() {
    const [min, max] = this.shown();
    this.charts.forEach((chart) => chart.plot.setScale("x", { min, max }));
  }
}

// A line through a single point would not be seen: it becomes as wide as the step.
function widened([steps, values]) {
  if (steps.length !== 1) return [steps, values];
  const [step, value] = [steps[0], values[0]];
  return [
    [step - 0.4, step, step + 0.4],
    [value, value, value],
  ];
}

// Points at equal steps become one, the highest: a chart has one value per step.
export function column(group, tag, change = (value) => value) {
  const steps = [];
  const values = [];
  group.series[tag].forEach((value, i) => {
    const changed = value === null ? null : change(value);
    if (steps.length && steps.at(-1) === group.steps[i]) {
      values[values.length - 1] = changed === null ? values.at(-1) : Math.max(values.at(-1) ?? changed, changed);
    } else {
      steps.push(group.steps[i]);
      values.push(changed);
    }
  });
  return [steps, values];
}

const MARK_NAMES = {
  cache: "cache emptied",
  retry: "allocation retry",
  oom: "out of memory",
  leak: "leak found",
  nonfinite: "NaN or Inf",
  spike: "loss spike",
};

// The legend of the marks that a chart has.
function marksNote(marks) {
  const kinds = Object.keys(MARK_NAMES).filter((kind) => marks.some((mark) => mark.kind === kind));
  return kinds.length
    ? h(
        "div",
        { class: "note" },
        kinds.map((kind) => h("span", { class: "event", style: `--c:${colours().marks[kind]}` }, MARK_NAMES[kind])),
      )
    : null;
}

export class StepChart {
  // `series`: {label, colour, data: [steps, values], style, fill, hidden}.
  // A style is "line", "faint", "peak", "points", "limit" or "area".
  // `marks`: {step, kind, words}, said when the cursor is near. `fits`: the axis begins at the lowest value, not at 0.
  constructor(
    linked,
    {
      title,
      describe,
      series,
      height = 220,
      bands = [],
      format,
      isSize = false,
      shading = [],
      marks = [],
      note = null,
      top = null,
      unit = "step",
      phases = [],
      fits = false,
    },
  ) {
    this.linked = linked;
    this.series = series;
    this.format = format;
    this.isSize = isSize;
    this.top = top;
    this.fits = fits;
    this.unit = unit;
    this.phases = phases;
    this.shading = shading;
    this.marks = marks;
    this.host = h("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "chart",
      "aria-label": `${title}. ${describe} ${KEYS}`,
    });
    this.spoken = h("div", { class: "spoken", "aria-live": "polite" });
    this.values = series.map(() => h("span", { class: "value" }));
    this.at = h("span", { class: "at" });
    const legend = h(
      "ul",
      { class: "legend", "aria-label": `Curves of ${title}` },
      series.map((one, i) => h("li", {}, this.legendButton(one, i))),
    );
    this.element = h(
      "section",
      { class: "card chart" },
      h("header", {}, h("h3", {}, title), this.at),
      legend,
      note,
      marksNote(marks),
      this.host,
      this.spoken,
    );
    this.height = height;
    this.plot = new uPlot(this.options(height, bands), this.joined(), this.host);
    this.host.addEventListener("keydown", (event) => this.key(event));
    linked.add(this);
  }

  legendButton(one, i) {
    const button = h(
      "button",
      {
        type: "button",
        "aria-pressed": String(!one.hidden),
        title: "Show or hide this curve",
        onclick: () => {
          one.hidden = !one.hidden;
          button.setAttribute("aria-pressed", String(!one.hidden));
          this.plot.setSeries(i + 1, { show: !one.hidden });
        },
      },
      h("span", { class: `key ${one.style ?? "line"}`, style: `--c:${one.colour}`, "aria-hidden": "true" }),
      one.label,
      this.values[i],
    );
    return button;
  }

  joined() {
    const tables = this.series.map((one) => (STEPPED.includes(one.style) ? widened(one.data) : one.data));
    return tables.length ? uPlot.join(tables) : [[]];
  }

  fit() {
    const width = Math.floor(this.host.clientWidth);
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  options(height, bands) {
    const paint = colours();
    const font = "11px system-ui, sans-serif";
    const axis = {
      stroke: paint.text,
      font,
      grid: { stroke: paint.grid, width: 1 },
      ticks: { stroke: paint.grid, width: 1, size: 4 },
    };
    const unit = () => unitFor(this.plot?.scales.y.max || 1);
    return {
      width: 600,
      height,
      bands,
      padding: [10, 14, 0, 0],
      legend: { show: false },
      focus: { alpha: 1 },
      cursor: {
        sync: { key: this.linked.sync.key, setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => () => this.linked.reset() },
      },
      scales: {
        x: { time: false, range: () => this.linked.shown() },
        // From 0, and below it only where there are negative losses.
        y: {
          range: (u, min, max) =>
            this.fits && max > min
              ? [min - 0.06 * (max - min), max + 0.06 * (max - min)]
              : [min < 0 ? min * 1.08 : 0, this.top ?? (max > 0 ? max * 1.08 : min < 0 ? 0 : 1)],
        },
      },
      axes: [
        {
          ...axis,
          size: 30,
          space: 70,
          label: this.unit === "step" ? "training step" : this.unit,
          labelFont: font,
          labelSize: 16,
          labelGap: 0,
          incrs: incrementsFor(1).filter((x) => x >= 1),
          values: (u, splits) => splits.map(whole),
        },
        {
          ...axis,
          size: 78,
          gap: 6,
          ...(this.isSize
            ? {
                incrs: (u, index, min, max) => incrementsFor(unitFor(max)[1]),
                values: (u, splits) =>
                  splits.map((value) => (value === 0 ? "0" : `${+(value / unit()[1]).toPrecision(4)} ${unit()[0]}`)),
              }
            : { values: (u, splits) => splits.map((value) => tick(this.format(value))) }),
        },
      ],
      series: [{}, ...this.series.map((one) => drawn(one))],
      hooks: {
        drawClear: [(u) => this.shade(u)],
        draw: [(u) => this.markPhases(u), (u) => this.mark(u)],
        setCursor: [(u) => this.show(u)],
        setSelect: [
          (u) => {
            if (u.select.width < 4) return;
            const [first, last] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            this.linked.zoom(first, last);
          },
        ],
      },
    };
  }

  shade(u) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    let free = -Infinity;
    for (const { stage, step } of this.shading) {
      const begin = u.valToPos(step, "x", true);
      const end = Math.max(u.valToPos(step + 1, "x", true), begin + 3 * devicePixelRatio);
      if (end < left || begin > left + width || begin < free) continue;
      ctx.fillStyle = `${colours().stages[stage]}38`;
      ctx.fillRect(begin, top, end - begin, height);
      free = begin + 1;
    }
    ctx.restore();
  }

  markPhases(u) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * scale}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    ctx.lineJoin = "round";
    ctx.fillStyle = colours().text;
    let [end, line] = [-Infinity, 0];
    for (const [at, name] of this.phases) {
      const x = u.valToPos(at, "x", true);
      if (x < left || x > left + width) continue;
      ctx.setLineDash([2 * scale, 3 * scale]);
      ctx.lineWidth = scale;
      ctx.strokeStyle = colours().text;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      line = x < end ? line + 1 : 0; // names that would overlap stand below each other
      end = x + 8 * scale + ctx.measureText(name).width;
      // Curves and lines below the name are painted over, so that it can be read.
      ctx.setLineDash([]);
      ctx.lineWidth = 4 * scale;
      ctx.strokeStyle = colours().card;
      ctx.strokeText(name, x + 4 * scale, top + (4 + 13 * line) * scale);
      ctx.fillText(name, x + 4 * scale, top + (4 + 13 * line) * scale);
    }
    ctx.restore();
  }

  mark(u) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const scale = devicePixelRatio;
    ctx.save();
    for (const { step, kind } of this.marks) {
      const x = u.valToPos(step, "x", true);
      if (x < left || x > left + width) continue;
      ctx.strokeStyle = ctx.fillStyle = colours().marks[kind];
      ctx.setLineDash([3 * scale, 3 * scale]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - 5 * scale, top - 1);
      ctx.lineTo(x + 5 * scale, top - 1);
      ctx.lineTo(x, top + 7 * scale);
      ctx.fill();
    }
    ctx.restore();
  }

  // The last value at or before the cursor: curves have their points at different steps.
  show(u) {
    const { idx } = u.cursor;
    const on = idx !== null && idx !== undefined && u.cursor.left >= 0;
    const near = on
      ? this.marks
          .filter(({ step }) => Math.abs(u.valToPos(step, "x") - u.cursor.left) < NEAR_PX)
          .map(({ words }) => words)
      : [];
    this.at.textContent = on ? [`${this.unit} ${whole(u.data[0][idx])}`, ...near].join(" · ") : "";
    this.series.forEach((one, i) => {
      const values = u.data[i + 1];
      let at = idx;
      while (on && at > 0 && (values[at] === null || values[at] === undefined)) at -= 1;
      const value = on ? values[at] : null;
      const shown = one.part ? one.part(u.data[0][at], value) : value;
      this.values[i].textContent = shown === null || shown === undefined ? "" : this.format(shown);
    });
  }

  speak() {
    const words = this.series.map((one, i) =>
      this.values[i].textContent ? `${one.label} ${this.values[i].textContent}` : "",
    );
    this.spoken.textContent = [this.at.textContent, ...words.filter(Boolean)].join(", ");
  }

  key(event) {
    const [first, last] = this.linked.shown();
    const middle = (first + last) / 2;
    const quarter = (last - first) / 4;
    const { plot } = this;
    const move = (by) => {
      const steps = plot.data[0];
      const inside = (i) => steps[i] >= first && steps[i] <= last;
      let at = (plot.cursor.left >= 0 ? plot.cursor.idx : by > 0 ? -1 : steps.length) + by;
      while (at >= 0 && at < steps.length && !inside(at)) at += by;
      if (at < 0 || at >= steps.length) return;
      // The other charts' cursors move too.
      plot.setCursor({ left: plot.valToPos(steps[at], "x"), top: plot.over.clientHeight / 2 }, true, true);
      this.speak();
    };
    const actions = {
      ArrowRight: () => move(1),
      ArrowLeft: () => move(-1),
      "+": () => this.linked.zoom(middle - quarter, middle + quarter),
      "=": () => this.linked.zoom(middle - quarter, middle + quarter),
      "-": () => this.linked.zoom(middle - 4 * quarter, middle + 4 * quarter),
      Escape: () => this.linked.reset(),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }
}

function drawn(one) {
  const base = {
    label: one.label,
    stroke: one.colour,
    width: 1.5,
    spanGaps: true,
    points: { show: false },
    show: !one.hidden,
  };
  const few = one.data[0].length < 40;
  const dot = { show: few, size: 5, width: 1, fill: one.colour };
  switch (one.style) {
    case "peak":
      return { ...base, width: 2, paths: uPlot.paths.stepped({ align: -1 }) };
    case "points":
      return {
        ...base,
        width: 0,
        paths: () => null,
        points: { show: true, size: 9, width: 2, fill: one.colour, stroke: one.edge ?? one.colour },
      };
    case "limit":
      return { ...base, dash: [7, 5] };
    case "area":
      return { ...base, width: 1, fill: one.fill, paths: uPlot.paths.stepped({ align: -1 }) };
    case "faint":
      return { ...base, width: 1, paths: uPlot.paths.stepped({ align: -1 }) };
    default:
      return { ...base, width: 2, points: dot };
  }
}
