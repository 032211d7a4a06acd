// The figures of several runs side by side, with the difference to the first in percent.

import { breakable, h } from "./dom.js";
import { bytesOf, difference, milliseconds, number, size, whole } from "./format.js";

const STAGES = ["train", "val", "test", "predict"];

function figures() {
  const rows = [];
  for (const [name, words] of [["peak_allocated", "peak allocated"], ["peak_reserved", "peak reserved"]]) {
    for (const stage of STAGES) rows.push([`${words}, ${stage}`, (run) => run.stages[stage]?.[name]?.gib ?? null, (gib) => size(bytesOf(gib))]);
  }
  rows.push(["device", (run) => run.capacity_gib, (gib) => size(bytesOf(gib)), true]);
  rows.push(["host memory", (run) => run.host_gib, (gib) => size(bytesOf(gib))]);
  rows.push(["time per step, median", (run) => run.step_ms, milliseconds]);
  rows.push(["training loss, last", (run) => run.loss_train, number]);
  rows.push(["validation loss, last", (run) => run.loss_val, number]);
  rows.push(["last step", (run) => run.last_step, whole, true]);
  rows.push(["allocation retries", (run) => run.retries, whole, true]);
  rows.push(["out-of-memory errors", (run) => run.ooms, whole, true]);
  rows.push(["batch size", (run) => run.batch_size, String, true]);
  rows.push(["checkpoint plan", (run) => run.checkpoint_plan, String, true]);
  return rows;
}

export function comparison(runs) {
  const rows = figures().filter(([, of]) => runs.some((run) => of(run) !== null && of(run) !== 0));
  const [reference] = runs;
  const head = h("tr", {}, h("th", { scope: "col" }, "figure"), runs.map((run, i) => h("th", { scope: "col", class: "right name" }, breakable(run.run), i ? null : h("span", { class: "remark" }, runs.length > 1 ? " (compared with)" : ""))));
  const body = rows.map(([label, of, format, plain]) => h("tr", {}, h("th", { scope: "row" }, label), runs.map((run, i) => {
    const value = of(run);
    const change = i && !plain ? difference(value, of(reference)) : "";
    return h("td", { class: "right" }, value === null ? "–" : format(value), change ? h("span", { class: `change ${change.startsWith("+") ? "up" : change.startsWith("−") ? "down" : ""}` }, change) : null);
  })));
  return h("div", { class: "scroll" }, h("table", { class: "compare" }, h("thead", {}, head), h("tbody", {}, body)));
}

export class ComparePage {
  constructor(container) {
    this.container = container;
    this.left = new Set();
  }

  show(runs) {
    const place = h("div", {});
    const draw = () => {
      const chosen = runs.filter((run) => !this.left.has(run.run));
      place.replaceChildren(chosen.length ? comparison(chosen) : h("p", { class: "empty" }, "Choose at least one run."));
    };
    if (runs.length > 6 && !this.left.size) runs.slice(6).forEach((run) => this.left.add(run.run));
    const boxes = runs.map((run) => h("label", { class: "choice" }, h("input", { type: "checkbox", checked: !this.left.has(run.run), onchange: (event) => {
      if (event.target.checked) this.left.delete(run.run); else this.left.add(run.run);
      draw();
    } }), run.run));
    this.container.replaceChildren(h("section", { class: "card" }, h("h3", {}, "Runs side by side"), h("fieldset", { class: "choices" }, h("legend", {}, "runs"), boxes), place));
    draw();
  }
}
