// A memory snapshot offline: its timeline, and the blocks that are in use at any event, with their stacks.

import { clear, h } from "./dom.js";
import { size, whole } from "./format.js";
import { stepChart } from "./step_chart.js";
import { followTheme } from "./theme.js";

const MOST_ROWS = 200;

function rowsAt(view, event) {
  return view.blocks
    .filter(([born, died]) => born <= event && (died === null || died > event))
    .sort((a, b) => b[2] - a[2]);
}

function blockRow(view, [born, died, bytes, address, part, label, stack, name], open = false) {
  const frames = view.stacks[stack];
  const own = frames.find((frame) => !frame.includes("/torch/") && !frame.startsWith("<")) ?? frames[0];
  const where = own?.replace(/^.*\/([^/]+\/[^/]+:)/, "$1");
  const life = `event ${whole(born)} to ${died === null ? "the end" : whole(died)}`;
  return h(
    "details",
    { class: "block", open },
    h(
      "summary",
      {},
      h("span", { class: "right amount" }, size(bytes)),
      h("span", {}, part),
      h(
        "span",
        { class: "remark" },
        [name, view.labels[label], name || where === part ? null : where, life].filter(Boolean).join(" · "),
      ),
    ),
    h(
      "pre",
      {},
      [
        `address ${address}, ${whole(bytes)} bytes, ${life}`,
        ...(frames.length ? frames : ["(no stack was recorded)"]),
      ].join("\n"),
    ),
  );
}

export function startSnapshot(root, view) {
  const place = h("section", { class: "card", id: "blocks" });
  let shown = "";
  // `part`: list the blocks of one part, and open the largest with its stack.
  const choose = (event, part = null) => {
    const wanted = `${event} ${part}`;
    if (wanted === shown) return;
    shown = wanted;
    const alive = rowsAt(view, event).filter((block) => part === null || block[4] === part);
    const total = alive.reduce((sum, block) => sum + block[2], 0);
    const listed = alive.length > MOST_ROWS ? `; the largest ${MOST_ROWS} are listed` : "";
    const words = `${whole(alive.length)} blocks, ${size(total)}${listed}.`;
    const all =
      part === null
        ? null
        : h("button", { type: "button", class: "plain", onclick: () => choose(event) }, "All blocks");
    clear(
      place,
      h(
        "div",
        { class: "bar" },
        h(
          "h3",
          {},
          part === null ? "Blocks" : `Blocks of ${part}`,
          ` in use at event ${whole(event)}${event === view.peak.at ? " (the peak)" : ""}`,
        ),
        all,
      ),
      h("p", { class: "remark" }, words),
      alive.slice(0, MOST_ROWS).map((block, i) => blockRow(view, block, part !== null && i === 0)),
    );
  };
  const draw = () => {
    const { element, chart, partAt } = stepChart(
      view,
      view.title ? `Memory over ${view.title}` : "Memory over the recorded history",
    );
    const atCursor = () => (chart.plot.cursor.left >= 0 ? chart.plot.data[0][chart.plot.cursor.idx] : view.peak.at);
    chart.host.addEventListener("click", () =>
      choose(atCursor(), partAt(atCursor(), chart.plot.posToVal(chart.plot.cursor.top, "y"))),
    );
    chart.host.addEventListener("keydown", (event) => {
      if (event.key === "Enter") choose(atCursor());
    });
    clear(
      root,
      h(
        "header",
        { class: "top" },
        h("h1", {}, "Memory snapshot"),
        h("span", { class: "remark" }, `${view.name}${view.rank === null ? "" : `, rank ${view.rank}`}`),
      ),
      h(
        "div",
        { class: "bar" },
        h(
          "span",
          { class: "remark" },
          "Click on an area to list its blocks at that event, with the stack that allocated the largest; " +
            "Enter lists all blocks. Drag to zoom; double-click for all.",
        ),
      ),
      element,
      place,
    );
  };
  followTheme(draw);
  draw();
  choose(view.peak.at);
  document.documentElement.dataset.ready = "true";
}
