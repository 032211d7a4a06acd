// A run in words: how it ended, whether it fits, what fills the device, and whether training is healthy.

import { h } from "./dom.js";
import { PART_NAMES, bytesOf, percent, size, whole } from "./format.js";

const BARELY = 0.05;
const FINDINGS = {
  "memtools/nonfinite_report": ["", "no"],
  "memtools/leak": ["A leak: ", "no"],
  "memtools/doctor": ["TrainingDoctor: ", "look"],
  "memtools/loss_spike": ["A loss spike: ", "look"],
};

const open = (view) => () => document.getElementById(`tab-${view}`)?.click();
const link = (words, view) => h("button", { type: "button", class: "link", onclick: open(view) }, words);
const reportOf = (view, tag) => view.reports.find((one) => one.tag === tag && !one.found_nothing);

function highestReserved(summary) {
  const peaks = Object.values(summary.stages).map((stage) => stage.peak_reserved?.gib ?? 0);
  return bytesOf(Math.max(0, ...peaks));
}

function doesItFit(view) {
  const { summary } = view;
  const ranOut = reportOf(view, "memtools/oom_report");
  if (summary.recoveries)
    return ["look", `Not every batch: ${whole(summary.recoveries)} ran out of memory and went on in parts.`, "reports"];
  if (ranOut) return ["no", `No. ${ranOut.words}`, "reports"];
  const [reserved, capacity] = [highestReserved(summary), bytesOf(summary.capacity_gib)];
  if (reserved && capacity) {
    const left = Math.max(0, capacity - reserved);
    const answer = left < BARELY * capacity ? ["look", "Barely."] : ["yes", "Yes."];
    const reservedWords = `At most ${size(reserved)} of ${size(capacity)} were reserved`;
    const leftWords = `${size(left)} (${percent(left / capacity)}) were left`;
    return [answer[0], `${answer[1]} ${reservedWords}; ${leftWords}.`, "reports"];
  }
  if (reserved)
    return ["", `At most ${size(reserved)} were reserved. The size of the device was not logged.`, "reports"];
  if (summary.host_gib !== null) {
    const limit = summary.host_limit_gib === null ? "" : `, of ${size(bytesOf(summary.host_limit_gib))}`;
    return [
      "",
      `No GPU was used. This process took at most ${size(bytesOf(summary.host_gib))} of host memory${limit}.`,
      null,
    ];
  }
  return ["", "Memory was not logged.", null];
}

// What memory consists of where it is highest: each part that holds something, with its bytes.
export function compositionAtPeak(view) {
  const group = view.groups.find(({ series }) => "memory/composition/parameters_gib" in series);
  if (!group) return [];
  const parts = Object.entries(group.series).map(([tag, values]) => [tag.match(/(\w+)_gib$/)[1], values]);
  const totals = group.steps.map((_, i) => parts.reduce((sum, [, values]) => sum + (values[i] ?? 0), 0));
  const peak = totals.reduce((top, total, i) => (total > totals[top] ? i : top), 0);
  return parts.map(([part, values]) => [part, bytesOf(values[peak] ?? 0)]).filter(([, bytes]) => bytes > 0);
}

function whatFillsIt(view) {
  const { summary } = view;
  const parts = compositionAtPeak(view).sort((a, b) => b[1] - a[1]);
  const total = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  if (!total && !highestReserved(summary) && summary.host_gib !== null)
    return ["", "Not known without a GPU: wrap fit in VirtualDevice(...) or use memtools dry-run to see.", null];
  if (!total) return ["", "Not known: MemoryMonitor logs memory/composition/* on CUDA and inside VirtualDevice.", null];
  const words = parts.slice(0, 3).map(([name, bytes]) => `${PART_NAMES[name] ?? name} ${percent(bytes / total)}`);
  words[0] = words[0].replace(/^./, (letter) => letter.toUpperCase());
  return ["", `${words.join(", ")} of ${size(total)} at the peak.`, "composition"];
}

function isItHealthy(view) {
  const found = Object.entries(FINDINGS)
    .map(([tag, [name, answer]]) => [reportOf(view, tag), name, answer])
    .filter(([report]) => report);
  if (found.length) {
    const answer = found.some(([, , one]) => one === "no") ? "no" : "look";
    return [answer, found.map(([report, name]) => `${name}${report.words}`).join(" "), "reports"];
  }
  const bad = view.marks.find(({ kind }) => kind === "nonfinite");
  if (bad) return ["no", `Step ${whole(bad.step)}: ${bad.words}`, "reports"];
  const looked = view.reports.filter((report) => report.found_nothing).map((report) => report.words);
  if (view.summary.loss_train === null) return ["", looked.join(" ") || "No training loss was logged.", "reports"];
  return ["yes", ["Yes: all logged losses are finite.", ...looked].join(" "), "reports"];
}

const LINK_WORDS = { reports: "Reports", composition: "Composition" };

export function verdict(view) {
  const ended = view.reports.find(({ tag }) => tag === "memtools/ended");
  const row = (question, [answer, words, page]) =>
    h(
      "div",
      { class: `answer ${answer}` },
      h("dt", {}, question),
      h("dd", {}, words, " ", page ? link(LINK_WORDS[page], page) : null),
    );
  return h(
    "section",
    { class: "card verdict", "aria-label": "This run in words" },
    ended
      ? h(
          "p",
          { class: "ended", role: "alert" },
          `This run ended with an error. ${ended.words} `,
          link("Read why", "reports"),
        )
      : null,
    h(
      "dl",
      {},
      row("Does it fit?", doesItFit(view)),
      row("What fills it?", whatFillsIt(view)),
      row("Is it healthy?", isItHealthy(view)),
    ),
  );
}
