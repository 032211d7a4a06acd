// The figures of several runs side by side, with the difference to the first; their curves in one chart; and the
// modules and lines whose memory differs most, where each run has a snapshot of a step.

import { LinkedCharts, StepChart, column } from "./charts.js";
import { breakable, clear, h } from "./dom.js";
import { bytesOf, difference, milliseconds, number, size, whole } from "./format.js";
import { colours } from "./theme.js";

const CURVES = [
  [
    "Memory of the chosen runs",
    "peak allocated in training",
    (tag) => tag === "memory/train/peak_allocated_gib",
    bytesOf,
    size,
    true,
  ],
  ["Loss of the chosen runs", "training loss", (tag) => tag === "loss/train", (value) => value, number, false],
  [
    "Validation loss of the chosen runs",
    "validation loss",
    (tag) => tag === "loss/val",
    (value) => value,
    number,
    false,
  ],
];
const MOST_ROWS = 15;
const AT_FIRST = 6;
const STAGES = ["train", "val", "test", "predict"];

function figures() {
  const rows = [];
  for (const [name, words] of [
    ["peak_allocated", "peak allocated"],
    ["peak_reserved", "peak reserved"],
  ]) {
    for (const stage of STAGES)
      rows.push([`${words}, ${stage}`, (run) => run.stages[stage]?.[name]?.gib ?? null, (gib) => size(bytesOf(gib))]);
  }
  rows.push(["device", (run) => run.capacity_gib, (gib) => size(bytesOf(gib)), true]);
  rows.push(["host memory", (run) => run.host_gib, (gib) => size(bytesOf(gib))]);
  rows.push(["time per step, median", (run) => run.step_ms, milliseconds]);
  rows.push(["training loss, last", (run) => run.loss_train, number]);
  rows.push(["validation loss, last", (run) => run.loss_val, number]);
  rows.push(["last step", (run) => run.last_step, whole, true]);
  rows.push(["allocation retries", (run) => run.retries, whole, true]);
  rows.push(["out-of-memory errors", (run) => run.ooms, whole, true]);
  return rows;
}

export function comparison(runs) {
  const rows = figures().filter(([, of]) => runs.some((run) => of(run) !== null && of(run) !== 0));
  const [reference] = runs;
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "figure"),
    runs.map((run, i) =>
      h(
        "th",
        { scope: "col", class: "right name" },
        breakable(run.run),
        i ? null : h("span", { class: "remark" }, runs.length > 1 ? " (compared with)" : ""),
      ),
    ),
  );
  const body = rows.map(([label, of, format, plain]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, label),
      runs.map((run, i) => {
        const value = of(run);
        const change = i && !plain ? difference(value, of(reference)) : "";
        return h(
          "td",
          { class: "right" },
          value === null ? "–" : format(value),
          change
            ? h(
                "span",
                { class: `change ${change.startsWith("+") ? "up" : change.startsWith("−") ? "down" : ""}` },
                change,
              )
            : null,
        );
      }),
    ),
  );
  const sentences = runs.flatMap((run) => [
    run.checkpoint_plan === null ? [] : `Checkpoint plan of ${run.run}: ${run.checkpoint_plan}`,
    run.batch_size === null ? [] : `${run.run}: ${run.batch_size}`,
  ]);
  return h(
    "div",
    {},
    h("div", { class: "scroll" }, h("table", { class: "compare" }, h("thead", {}, head), h("tbody", {}, body))),
    sentences.flat().map((words) => h("p", { class: "remark" }, words)),
  );
}

// Rows of names whose bytes differ between runs, largest difference to the first run first.
export function changes(sides) {
  const [reference] = sides;
  const names = [...new Set(sides.flatMap((side) => Object.keys(side)))];
  const most = (name) => Math.max(...sides.map((side) => Math.abs((side[name] ?? 0) - (reference[name] ?? 0))));
  return names.filter((name) => most(name) > 0).sort((a, b) => most(b) - most(a) || (a < b ? -1 : 1));
}

function holdersTable(what, views, kind) {
  const sides = views.map(({ step }) => step.timeline.holders_at_peak[kind]);
  const names = changes(sides);
  if (!names.length) return null;
  const signed = (bytes) => (bytes ? ` ${bytes > 0 ? "+" : "−"}${size(Math.abs(bytes))}` : "");
  const cell = (side, name, i) => {
    const change = i ? (side[name] ?? 0) - (sides[0][name] ?? 0) : 0;
    return h(
      "td",
      { class: "right" },
      name in side ? size(side[name]) : "–",
      change ? h("span", { class: `change ${change > 0 ? "up" : "down"}` }, signed(change)) : null,
    );
  };
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, what),
    views.map(({ run }) => h("th", { scope: "col", class: "right name" }, breakable(run))),
  );
  const rows = names.slice(0, MOST_ROWS).map((name) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", class: "holder" }, breakable(name)),
      sides.map((side, i) => cell(side, name, i)),
    ),
  );
  const left =
    names.length > MOST_ROWS
      ? h("p", { class: "remark" }, `${whole(names.length - MOST_ROWS)} more differ by less.`)
      : null;
  return h(
    "section",
    { class: "card" },
    h("h3", {}, `Memory by ${what} at the peak of a step`),
    h("div", { class: "scroll" }, h("table", { class: "compare" }, h("thead", {}, head), h("tbody", {}, rows))),
    left,
  );
}

export class ComparePage {
  constructor(source, container) {
    this.source = source;
    this.container = container;
    this.left = null;
  }

  show(runs) {
    const place = h("div", {});
    const curves = h("div", { class: "one-step" });
    const holders = h("div", {});
    const draw = () => {
      const chosen = runs.filter((run) => !this.left.has(run.run));
      clear(place, chosen.length ? comparison(chosen) : h("p", { class: "empty" }, "Choose at least one run."));
      this.drawn = chosen;
      this.overlay(chosen, curves).catch((error) => clear(curves, h("p", { class: "card problem" }, error.message)));
      this.hold(chosen, holders).catch((error) => clear(holders, h("p", { class: "card problem" }, error.message)));
    };
    if (!this.left) {
      // A run with reports alone has nothing to compare. The last names are mostly the newest.
      const first = new Set(runs.filter((run) => run.last_step !== null).slice(-AT_FIRST));
      this.left = new Set(runs.filter((run) => !first.has(run)).map((run) => run.run));
    }
    const boxes = runs.map((run) =>
      h(
        "label",
        { class: "choice" },
        h("input", {
          type: "checkbox",
          checked: !this.left.has(run.run),
          onchange: (event) => {
            if (event.target.checked) this.left.delete(run.run);
            else this.left.add(run.run);
            draw();
          },
        }),
        run.run,
      ),
    );
    this.container.replaceChildren(
      h(
        "section",
        { class: "card" },
        h("h3", {}, "Runs side by side"),
        h("fieldset", { class: "choices" }, h("legend", {}, "runs"), boxes),
        place,
      ),
      curves,
      holders,
    );
    draw();
  }

  // The curves of the chosen runs in one chart for each kind.
  async overlay(chosen, place) {
    const views = await Promise.all(chosen.map(({ run }) => this.source.run(run, null)));
    if (this.drawn !== chosen || !place.isConnected) return;
    this.linked?.destroy();
    const linked = (this.linked = new LinkedCharts());
    const steps = views.flatMap((view) => view.groups.flatMap((group) => [group.steps[0], group.steps.at(-1)]));
    if (steps.length) linked.setFull(Math.min(...steps), Math.max(...steps));
    const { allocated, reserved, norm, val, time, capacity } = colours();
    const paint = [...new Set([allocated, reserved, norm, val, time, capacity])];
    const charts = CURVES.map(([title, describe, wanted, change, format, isSize]) => {
      const series = views.flatMap((view, i) =>
        view.groups.flatMap((group) =>
          Object.keys(group.series)
            .filter(wanted)
            .map((tag) => ({
              label: view.run,
              colour: paint[i % paint.length],
              style: "line",
              data: column(group, tag, change),
            })),
        ),
      );
      return series.length
        ? new StepChart(linked, {
            title,
            describe: `One curve for each run: ${describe}.`,
            series,
            height: 240,
            format,
            isSize,
          })
        : null;
    });
    clear(
      place,
      charts.map((chart) => chart?.element ?? null),
    );
    requestAnimationFrame(() => {
      linked.charts.forEach((chart) => chart.fit());
      linked.draw();
    });
  }

  // What the peaks consist of, in the runs that have a snapshot of a step.
  async hold(chosen, place) {
    const steps = await Promise.all(chosen.map(async ({ run }) => ({ run, step: await this.source.step(run, null) })));
    if (this.drawn !== chosen || !place.isConnected) return;
    const views = steps.filter(({ step }) => step.timeline);
    if (views.length < 2) {
      clear(
        place,
        chosen.length < 2
          ? null
          : h(
              "p",
              { class: "remark" },
              "Memory by module is compared where two runs have a snapshot of a step: " +
                "MemoryMonitor(snapshot_at_step=...) takes one.",
            ),
      );
      return;
    }
    clear(place, holdersTable("module", views, "modules"), holdersTable("line", views, "lines"));
  }
}
