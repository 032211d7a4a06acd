// The reports that callbacks wrote: what ended the run first and open, then findings, then the others, closed.

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
  "memtools/ended": "How the run ended",
};
const OPEN = ["memtools/ended", "memtools/oom_report", "memtools/nonfinite_report"];

export function reports(container, entries) {
  const seen = new Map();
  // Of a kind the newest comes first: the call's number counts from the oldest.
  const totals = new Map();
  entries.forEach(({ tag }) => totals.set(tag, (totals.get(tag) ?? 0) + 1));
  const cards = entries.map((entry) => {
    const before = seen.get(entry.tag) ?? 0;
    seen.set(entry.tag, before + 1);
    const total = totals.get(entry.tag);
    const which = total > 1 ? `call ${total - before} of ${total}` : null;
    const when = new Date(1000 * entry.time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
    const title = h("span", { class: "title" }, TITLES[entry.tag] ?? entry.tag);
    const facts = [which, `step ${whole(entry.step)}`, when].filter(Boolean).join(" · ");
    if (entry.found_nothing)
      return h("p", { class: "card nothing" }, title, h("span", { class: "remark" }, `${entry.words} · ${facts}`));
    const text = h("div", { class: "text" });
    text.innerHTML = entry.html; // the server's markdown-it, which shows HTML in a report as text
    return h(
      "details",
      { class: "card report", open: OPEN.includes(entry.tag) || entries.length === 1 },
      h("summary", {}, title, h("span", { class: "remark" }, facts)),
      text,
    );
  });
  const words =
    "This run has no reports yet. " +
    "Callbacks write them when fit, validate, test or predict ends, and when something goes wrong.";
  container.replaceChildren(...(cards.length ? cards : [h("p", { class: "card empty" }, words)]));
}
