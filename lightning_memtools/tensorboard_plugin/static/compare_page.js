// The figures of several runs side by side, with the difference to the first, and their curves in one chart.

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

export class ComparePage {
  constructor(source, container) {
    this.source = source;
    this.container = container;
    this.left = null;
  }

  show(runs) {
    const place = h("div", {});
    const curves = h("div", { class: "one-step" });
    const draw = () => {
      const chosen = runs.filter((run) => !this.left.has(run.run));
      clear(place, chosen.length ? comparison(chosen) : h("p", { class: "empty" }, "Choose at least one run."));
      this.drawn = chosen;
      this.overlay(chosen, curves).catch((error) => clear(curves, h("p", { class: "card problem" }, error.message)));
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
}
