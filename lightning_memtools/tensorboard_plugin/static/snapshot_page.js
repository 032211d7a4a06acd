// A memory snapshot offline: its timeline, and who holds the peak.

import { clear, h } from "./dom.js";
import { stepChart } from "./step_chart.js";
import { followTheme } from "./theme.js";

export function startSnapshot(root, view) {
  const draw = () => {
    const title = view.title ? `Memory over ${view.title}` : "Memory over the recorded history";
    clear(
      root,
      h(
        "header",
        { class: "top" },
        h("h1", {}, "Memory snapshot"),
        h("span", { class: "remark" }, `${view.name}${view.rank === null ? "" : `, rank ${view.rank}`}`),
      ),
      h("div", { class: "bar" }, h("span", { class: "remark" }, "Drag to zoom; double-click for all.")),
      stepChart(view, title).element,
    );
  };
  followTheme(draw);
  draw();
  document.documentElement.dataset.ready = "true";
}
