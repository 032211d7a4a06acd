// The reports that callbacks wrote, newest first.

import { h } from "./dom.js";
import { whole } from "./format.js";

const TITLES = {
  "memtools/memory_summary": "Memory summary",
  "memtools/checkpoint_plan": "Checkpoint plan",
  "memtools/oom_report": "Out of memory",
  "memtools/nonfinite_report": "NaN or Inf",
  "memtools/batch_size": "Batch size",
  "memtools/doctor": "Training doctor",
  "memtools/leak": "Leak found",
  "memtools/loss_spike": "Loss spike",
};
const OPEN_AT_FIRST = 3;

export function reports(container, entries) {
  const seen = new Map();
  // Entries come newest first: the call's number counts from the oldest.
  const totals = new Map();
  entries.forEach(({ tag }) => totals.set(tag, (totals.get(tag) ?? 0) + 1));
  const cards = entries.map((entry, i) => {
    const before = seen.get(entry.tag) ?? 0;
    seen.set(entry.tag, before + 1);
    const total = totals.get(entry.tag);
    const which = total > 1 ? `call ${total - before} of ${total}` : null;
    const when = new Date(1000 * entry.time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
    const text = h("div", { class: "text" });
    text.innerHTML = entry.html; // the server's markdown-it, which shows HTML in a report as text
    return h(
      "details",
      { class: "card report", open: i < OPEN_AT_FIRST },
      h(
        "summary",
        {},
        h("span", { class: "title" }, TITLES[entry.tag] ?? entry.tag),
        h("span", { class: "remark" }, [which, `step ${whole(entry.step)}`, when].filter(Boolean).join(" · ")),
      ),
      text,
    );
  });
  container.replaceChildren(
    ...(cards.length
      ? cards
      : [
          h(
            "p",
            { class: "card empty" },
            "This run has no reports yet. Callbacks write them when fit, validate, test or predict ends, and when something goes wrong.",
          ),
        ]),
  );
}
