// One run: memory against the device's capacity, and below it losses and step time on the same steps.

import { LinkedCharts, StepChart, column } from "./charts.js";
import { clear, h } from "./dom.js";
import { PART_NAMES, bytesOf, milliseconds, number, percent, size, threeDigits, whole } from "./format.js";
import { stepChart } from "./step_chart.js";
import { colours } from "./theme.js";
import { compositionAtPeak, verdict } from "./verdict.js";

const STAGE_NAMES = {
  train: "training",
  val: "validation",
  test: "test",
  predict: "prediction",
};
const EVALUATION = ["val", "test", "predict"];
const PARTS = ["parameters", "gradients", "optimizer", "activations", "inputs", "other"];
// Below this share of the device the line of the capacity would press the curves to the floor, and the parts of the
// composition would be too narrow to see.
const SHOW_CAPACITY_FROM = 0.2;

const groupWith = (view, tag) => view.groups.find((group) => tag in group.series);
const data = (view, tag, change) => {
  const group = groupWith(view, tag);
  return group ? column(group, tag, change) : [[], []];
};
const has = (view, tag) => groupWith(view, tag) !== undefined;
const counted = (n, one, several) => `${whole(n)} ${n === 1 ? one : several}`;
const highest = (values) => values.reduce((top, value) => (value !== null && value > top ? value : top), 0);

export function cards(summary) {
  const stages = Object.entries(summary.stages);
  const top = (name) => stages.filter(([, peaks]) => peaks[name]).sort((a, b) => b[1][name].gib - a[1][name].gib)[0];
  const capacity = bytesOf(summary.capacity_gib);
  const found = [];
  const card = (label, value, remark) =>
    found.push(
      h(
        "div",
        { class: "card figure" },
        h("div", { class: "label" }, label),
        h("div", { class: "number" }, value),
        h("div", { class: "remark" }, remark),
      ),
    );
  const allocated = top("peak_allocated");
  if (allocated) {
    const [stage, peaks] = allocated;
    card(
      "Peak allocated",
      size(bytesOf(peaks.peak_allocated.gib)),
      `${STAGE_NAMES[stage]}, step ${whole(peaks.peak_allocated.step)}`,
    );
  }
  const reserved = top("peak_reserved");
  if (reserved) {
    const bytes = bytesOf(reserved[1].peak_reserved.gib);
    card(
      "Peak reserved",
      size(bytes),
      capacity ? `${percent(bytes / capacity)} of the device` : STAGE_NAMES[reserved[0]],
    );
    if (capacity) card("Left on the device", size(Math.max(0, capacity - bytes)), `of ${size(capacity)}`);
  }
  if (!allocated && summary.host_gib !== null)
    card("Host memory", size(bytesOf(summary.host_gib)), "of this process, at most");
  if (!allocated && summary.host_limit_gib !== null)
    card(
      "Left on the host",
      size(Math.max(0, bytesOf(summary.host_limit_gib - summary.host_used_gib))),
      `of ${size(bytesOf(summary.host_limit_gib))}, at least`,
    );
  if (summary.step_ms !== null) card("Time per step", milliseconds(summary.step_ms), "median");
  if (summary.loss_train !== null)
    card(
      "Training loss",
      threeDigits(summary.loss_train),
      summary.loss_val === null ? "last" : `last; validation ${threeDigits(summary.loss_val)}`,
    );
  if (summary.retries || summary.ooms)
    card(
      "Memory pressure",
      counted(summary.retries ?? 0, "retry", "retries"),
      counted(summary.ooms ?? 0, "out-of-memory error", "out-of-memory errors"),
    );
  return h("div", { class: "figures" }, found);
}

// A bar of what the memory consists of at the peak; it opens the page with the areas.
function compositionBar(view) {
  const bytes = Object.fromEntries(compositionAtPeak(view));
  const total = Object.values(bytes).reduce((sum, one) => sum + one, 0);
  if (!total) return null;
  const capacity = bytesOf(view.summary.capacity_gib) ?? 0;
  const all = total < SHOW_CAPACITY_FROM * capacity ? total : Math.max(capacity, total);
  const parts = PARTS.filter((part) => bytes[part]).map((part) => [
    PART_NAMES[part] ?? part,
    bytes[part],
    colours().parts[part],
  ]);
  if (all > total) parts.push(["free", all - total, "transparent"]);
  const open = () => document.getElementById("tab-composition")?.click();
  const share = all < capacity ? `, ${percent(total / capacity)} of the device` : "";
  return h(
    "button",
    { type: "button", class: "card composition", onclick: open, title: "Show the composition over training" },
    h("span", { class: "label" }, `Composition at the peak of ${size(total)}${share}`),
    h(
      "span",
      { class: "strip", "aria-hidden": "true" },
      parts.map(([, n, colour]) => h("span", { style: `flex-grow:${n / all};background:${colour}` })),
    ),
    h(
      "span",
      { class: "note" },
      parts.map(([name, n, colour]) =>
        h("span", { class: "part", style: `--c:${colour}` }, `${name} ${size(n)} (${percent(n / all)})`),
      ),
    ),
  );
}

function memoryChart(linked, view) {
  const paint = colours();
  const series = memorySeries(view);
  if (!series.length) return null;
  const capacity = bytesOf(view.summary.capacity_gib);
  const top = highest(series.flatMap((one) => one.data[1]));
  const limit =
    capacity &&
    series.push({
      label: "capacity",
      colour: paint.capacity,
      style: "limit",
      data: capacityData(view, capacity),
      hidden: top < SHOW_CAPACITY_FROM * capacity,
    });
  const bands = [];
  const at = (label) => series.findIndex((one) => one.label === label) + 1;
  if (at("peak reserved") && at("reserved now"))
    bands.push({ series: [at("peak reserved"), at("reserved now")], fill: `${paint.reserved}30` });
  if (at("peak allocated") && at("allocated now"))
    bands.push({ series: [at("peak allocated"), at("allocated now")], fill: `${paint.allocated}38` });
  const stages = EVALUATION.filter((stage) => view.evaluations.some((one) => one.stage === stage));
  const note = h(
    "div",
    { class: "note" },
    stages.map((stage) => h("span", { class: "shade", style: `--c:${paint.stages[stage]}` }, STAGE_NAMES[stage])),
    limit && top < SHOW_CAPACITY_FROM * capacity
      ? h(
          "span",
          {},
          `The device has ${size(capacity)}: the peak is ${percent(top / capacity)} of it. `,
          "Choose “capacity” to see the line.",
        )
      : null,
  );
  const ofCapacity = capacity ? ` of ${size(capacity)}` : "";
  return new StepChart(linked, {
    title: "Memory",
    height: 336,
    series,
    bands,
    format: size,
    isSize: true,
    shading: view.evaluations,
    marks: view.marks,
    note,
    describe: `Highest value ${size(top)}${ofCapacity}. Peaks are the highest since the point before.`,
  });
}

function capacityData(view, capacity) {
  const steps = view.groups.flatMap((group) => (group.steps.length ? [group.steps[0], group.steps.at(-1)] : []));
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  return first === last
    ? [
        [first - 0.5, first + 0.5],
        [capacity, capacity],
      ]
    : [
        [first, last + 1],
        [capacity, capacity],
      ];
}

function memorySeries(view) {
  const paint = colours();
  const series = [];
  const add = (tag, label, colour, style, more = {}) => {
    if (has(view, tag)) series.push({ label, colour, style, data: data(view, tag, bytesOf), ...more });
  };
  add("memory/train/peak_reserved_gib", "peak reserved", paint.reserved, "peak");
  add("memory/train/reserved_gib", "reserved now", paint.reserved, "faint");
  add("memory/train/peak_allocated_gib", "peak allocated", paint.allocated, "peak");
  add("memory/train/allocated_gib", "allocated now", paint.allocated, "faint");
  for (const stage of EVALUATION)
    add(`memory/${stage}/peak_allocated_gib`, `${STAGE_NAMES[stage]} peak`, paint.stages[stage], "points");
  return series;
}

// Host memory. What is resident is logged at every point, its parts now and then: reading them takes longer.
function hostSeries(view) {
  const paint = colours();
  const series = [];
  const add = (tag, label, colour, style = "line", hidden = false) => {
    const [steps, values] = data(view, tag, bytesOf);
    if (steps.length && values.some((value) => value > 0))
      series.push({ label, colour, style, hidden, data: [steps, values] });
  };
  add("memory/host_rss_gib", "this process", paint.allocated);
  add("memory/host/workers_gib", "loader workers", paint.val);
  add("memory/host/pinned_gib", "pinned", paint.reserved);
  add("memory/host/shared_gib", "shared memory (/dev/shm)", paint.norm);
  const limit = bytesOf(view.summary.host_limit_gib);
  const isSmall = highest(series.flatMap((one) => one.data[1])) < SHOW_CAPACITY_FROM * limit;
  add("memory/host/process_gib", "this process, shared pages divided (PSS)", paint.parts.optimizer, "line", true);
  add("memory/host/unique_gib", "this process, unshared pages (USS)", paint.parts.activations, "line", true);
  add("memory/host/used_gib", "used by everyone", paint.capacity, "faint", isSmall);
  if (limit)
    series.push({
      label: "limit",
      colour: paint.capacity,
      style: "limit",
      data: capacityData(view, limit),
      hidden: isSmall,
    });
  return series;
}

function hostNote(view) {
  const limit = bytesOf(view.summary.host_limit_gib);
  return limit
    ? h(
        "div",
        { class: "note" },
        h(
          "span",
          {},
          `At most ${size(bytesOf(view.summary.host_used_gib))} of ${size(limit)} were used by everyone `,
          "on this machine or in this container.",
        ),
      )
    : null;
}

function matching(view, prefix) {
  return view.groups
    .flatMap((group) => Object.keys(group.series))
    .filter((tag) => tag === prefix || tag.startsWith(`${prefix}/`))
    .sort();
}

// The first curve of each kind has the kind's colour, further ones take those that are left in turn.
function curves(view, kinds) {
  const paint = colours();
  const taken = kinds.map(({ colour }) => colour);
  const left = [paint.reserved, paint.norm, paint.time, paint.val, paint.train, paint.stages.predict].filter(
    (colour, i, all) => !taken.includes(colour) && all.indexOf(colour) === i,
  );
  let further = 0;
  return kinds.flatMap(({ prefix, label, colour }) =>
    matching(view, prefix).map((tag, i) => ({
      label: label(tag),
      colour: i ? left[further++ % left.length] : colour,
      style: "line",
      data: data(view, tag),
    })),
  );
}

function lossSeries(view) {
  const { train, val } = colours();
  return curves(view, [
    { prefix: "loss/train", label: (tag) => tag.replace("loss/train", "training"), colour: train },
    { prefix: "loss/val", label: (tag) => tag.replace("loss/val", "validation"), colour: val },
  ]);
}

// The curves of some tags that there are, each with its label and colour.
const those = (view, tags) =>
  tags
    .filter(([tag]) => has(view, tag))
    .map(([tag, label, colour]) => ({ label, colour, style: "line", data: data(view, tag) }));

function timeSeries(view) {
  const { time, parts } = colours();
  return those(view, [
    ["time/step_ms", "per step", time],
    ["time/data_ms", "wait for data", parts.gradients],
    ["time/forward_ms", "forward", parts.activations],
    ["time/backward_ms", "backward", parts.temporaries],
    ["time/optimizer_ms", "optimizer", parts.optimizer],
  ]);
}

function compositionSeries(view) {
  const group = groupWith(view, "memory/composition/parameters_gib");
  if (!group) return [];
  const parts = PARTS.map((name) => [name, group.series[`memory/composition/${name}_gib`]]).filter(([, values]) =>
    values?.some((value) => value > 0),
  );
  const totals = group.steps.map(() => 0);
  const stacked = parts.map(([name, values]) => {
    const own = new Map(group.steps.map((step, i) => [step, bytesOf(values[i])]));
    const ceiling = values.map((value, i) => (totals[i] += bytesOf(value ?? 0)));
    const colour = colours().parts[name];
    return {
      label: PART_NAMES[name] ?? name,
      colour,
      fill: colour,
      style: "area",
      data: column({ steps: group.steps, series: { x: ceiling } }, "x"),
      part: (step) => own.get(step) ?? null,
    };
  });
  return stacked.reverse(); // the highest stack first: each area is filled down to the floor and covered by the next
}

// The figures of the areas, at the peak and at the last point.
function compositionTable(view) {
  const group = groupWith(view, "memory/composition/parameters_gib");
  const parts = PARTS.filter((name) => group.series[`memory/composition/${name}_gib`]?.some((value) => value > 0));
  const at = (i) => parts.map((name) => bytesOf(group.series[`memory/composition/${name}_gib`][i] ?? 0));
  const sum = (values) => values.reduce((total, one) => total + one, 0);
  const totals = group.steps.map((step, i) => sum(at(i)));
  const peak = totals.indexOf(highest(totals));
  const last = group.steps.length - 1;
  const cells = (bytes, total) => [
    h("td", { class: "right" }, size(bytes)),
    h("td", { class: "right" }, total ? percent(bytes / total) : ""),
  ];
  const [atPeak, atLast] = [at(peak), at(last)];
  const rows = parts.map((name, i) =>
    h(
      "tr",
      {},
      h(
        "th",
        { scope: "row" },
        h("span", { class: "part", style: `--c:${colours().parts[name]}` }, PART_NAMES[name] ?? name),
      ),
      cells(atPeak[i], totals[peak]),
      cells(atLast[i], totals[last]),
    ),
  );
  const head = (words, step) =>
    h("th", { scope: "colgroup", colspan: 2, class: "right" }, words, h("br"), `step ${whole(group.steps[step])}`);
  return h(
    "section",
    { class: "card" },
    h("h3", {}, "Figures"),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "consists of"),
            head("at the peak", peak),
            head("at the last point", last),
          ),
        ),
        h(
          "tbody",
          {},
          rows,
          h(
            "tr",
            {},
            h("th", { scope: "row" }, "total"),
            cells(totals[peak], totals[peak]),
            cells(totals[last], totals[last]),
          ),
        ),
      ),
    ),
  );
}

function wordsOf(mark) {
  if (mark.kind === "cache") return `Cache emptied: ${size(bytesOf(mark.gib))} released in ${milliseconds(mark.ms)}.`;
  return `${whole(mark.count)} ${mark.words}.`;
}

function eventsTable(view) {
  if (!view.marks.length) return null;
  const rows = view.marks.map((mark) =>
    h(
      "tr",
      {},
      h("td", { class: "right" }, whole(mark.step)),
      h(
        "td",
        {},
        h("span", { class: "dot", style: `--c:${colours().marks[mark.kind]}`, "aria-hidden": "true" }),
        mark.words,
      ),
    ),
  );
  return h(
    "details",
    { class: "card events" },
    h("summary", {}, `Events (${view.marks.length})`),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h("tr", {}, h("th", { scope: "col", class: "right" }, "step"), h("th", { scope: "col" }, "what happened")),
        ),
        h("tbody", {}, rows),
      ),
    ),
  );
}

function wordsOnPoints(view) {
  const sum = (counts) => counts.reduce((total, one) => total + one, 0);
  const points = sum(view.groups.map((group) => group.n_points));
  const drawn = sum(view.groups.map((group) => group.steps.length));
  const merged =
    drawn < points
      ? [
          `${whole(points)} points are drawn as ${whole(drawn)}: ` +
            "of neighbouring steps the highest and lowest stay, so no peak is lost.",
        ]
      : [];
  return [...merged, ...view.notes].map((text) => h("p", { class: "remark" }, text));
}

// Shows a run.
export class RunPage {
  constructor(source, container, kind) {
    this.source = source;
    this.kind = kind;
    this.words = h("div", { class: "words" });
    this.container = container;
  }

  show(found) {
    const view = { ...found, marks: found.marks.map((mark) => ({ ...mark, words: wordsOf(mark) })) };
    this.linked?.destroy();
    const range = this.linked?.range ?? null;
    this.linked = new LinkedCharts();
    const steps = view.groups.flatMap((group) => [group.steps[0], group.steps.at(-1)]);
    // An evaluation is shaded from its step to the next, also at the end.
    const ends = view.evaluations.map(({ step }) => step + 1);
    if (steps.length)
      this.linked.setFull(
        steps.reduce((a, b) => Math.min(a, b)),
        [...steps, ...ends].reduce((a, b) => Math.max(a, b)),
      );
    this.run = view.run;
    this.linked.range = range && this.shownRun === view.run ? range : null;
    this.shownRun = view.run;
    this.parts = this.kind === "composition" ? this.compositionParts(view) : this.runParts(view);
    clear(this.words, wordsOnPoints(view));
    const all = h("button", { type: "button", class: "plain", onclick: () => this.linked.reset() }, "Show all steps");
    const step = this.kind === "composition" ? this.oneStep(view.run) : null;
    clear(
      this.container,
      this.kind === "run" ? verdict(view) : null,
      this.kind === "run" ? cards(view.summary) : null,
      this.kind === "run" ? compositionBar(view) : null,
      this.parts.length
        ? h(
            "div",
            { class: "bar" },
            h("span", { class: "remark" }, "Drag over a chart to zoom; double-click for all steps."),
            all,
          )
        : null,
      this.kind === "composition" && this.parts.length
        ? h("div", { class: "beside" }, this.parts[0].element, compositionTable(view))
        : this.parts.map((chart) => chart.element),
      this.words,
      this.kind === "run" ? eventsTable(view) : null,
      step,
      this.parts.length
        ? null
        : h(
            "p",
            { class: "card empty" },
            this.kind === "run"
              ? "This run has no curves. See its reports."
              : "What the memory consists of is not known for this run: MemoryMonitor logs memory/composition/* " +
                  "where the device can tell, such as on CUDA and inside VirtualDevice.",
          ),
    );
    requestAnimationFrame(() => {
      this.linked.charts.forEach((chart) => chart.fit());
      this.linked.draw();
    });
  }

  // Where there is a snapshot of a single step: its timeline.
  oneStep(run) {
    const place = h("div", { class: "one-step" });
    const problem = (words) => clear(place, h("p", { class: "card problem" }, words));
    const show = async () => {
      const found = await this.source.step(run);
      if (this.run !== run) return;
      if (found.problem) problem(found.problem);
      if (!found.timeline) return;
      const { title, rank } = found.timeline;
      const drawn = stepChart(found.timeline, `Composition over ${title}, rank ${rank}`);
      this.step?.destroy();
      this.step = drawn.linked;
      clear(place, drawn.element);
    };
    show().catch((error) => problem(error.message));
    return place;
  }

  runParts(view) {
    const parts = [];
    const memory = memoryChart(this.linked, view);
    if (memory) {
      parts.push(memory);
    }
    const add = (title, describe, series, format, more = {}) => {
      const found = series(view);
      if (found.length)
        parts.push(
          new StepChart(this.linked, {
            title,
            describe,
            series: found,
            height: 206,
            format,
            shading: view.evaluations,
            marks: [],
            ...more,
          }),
        );
    };
    if (!memory)
      add("Host memory", "Each part once: shared pages are divided among the processes.", hostSeries, size, {
        isSize: true,
        height: 330,
        note: hostNote(view),
      });
    add("Loss", "Training and validation loss.", lossSeries, number, {
      fits: true,
      marks: view.marks.filter(({ kind }) => !["cache", "retry"].includes(kind)),
    });
    add("Step time", "Host time per training step.", timeSeries, milliseconds);
    if (memory)
      add("Host memory", "Each part once: shared pages are divided among the processes.", hostSeries, size, {
        isSize: true,
        note: hostNote(view),
      });
    return parts;
  }

  compositionParts(view) {
    const series = compositionSeries(view);
    if (!series.length) return [];
    const chart = new StepChart(this.linked, {
      title: "Composition at the peak",
      describe: "Stacked areas; together they are the peak of allocated memory since the point before.",
      series,
      height: 420,
      format: size,
      isSize: true,
      shading: [],
      marks: view.marks,
    });
    return [chart];
  }
}
