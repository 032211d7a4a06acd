// The whole page: choice of run, four views, and what is said when there is nothing to show.

import { ComparePage } from "./compare_page.js";
import { clear, h } from "./dom.js";
import { reports } from "./reports_page.js";
import { RunPage } from "./run_page.js";
import { followTheme } from "./theme.js";

const VIEWS = [
  ["run", "Run"],
  ["composition", "Composition"],
  ["compare", "Compare runs"],
  ["reports", "Reports"],
];
const REFRESH_MS = 30000;

function emptyState() {
  return h(
    "section",
    { class: "card empty-state" },
    h("h2", {}, "No memory curves in these logs yet"),
    h("p", {}, "Add the callbacks of lightning_memtools to your Trainer, train, and come back:"),
    h(
      "pre",
      {},
      "import lightning as L\nfrom lightning_memtools import default_callbacks\n\n" +
        "trainer = L.Trainer(callbacks=default_callbacks())\ntrainer.fit(model)",
    ),
    h(
      "p",
      {},
      "MemoryMonitor logs memory/*, LossCurves logs loss/*. " +
        'Without a GPU, put the run inside VirtualDevice("RTX 4090") to see a GPU\'s memory.',
    ),
  );
}

export async function start(root, source) {
  const state = { run: null, view: "run", runs: [] };
  const picker = h("select", { id: "run", onchange: () => choose(picker.value) });
  const tabs = VIEWS.map(([name, label]) =>
    h(
      "button",
      {
        type: "button",
        role: "tab",
        id: `tab-${name}`,
        "aria-controls": "view",
        onclick: () => open(name),
        onkeydown: (event) => step(event, name),
      },
      label,
    ),
  );
  const place = h("main", { id: "view", role: "tabpanel", tabindex: "-1" });
  const problem = h("p", { class: "problem", role: "alert" });
  const pages = {
    run: new RunPage(source, place, "run"),
    composition: new RunPage(source, place, "composition"),
    compare: new ComparePage(source, place),
    reports: { show: (found) => reports(place, found.reports) },
  };
  const bar = h(
    "header",
    { class: "top" },
    h("h1", {}, "Memory"),
    h("label", { for: "run", class: "picker" }, h("span", {}, "Run"), picker),
    h("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, tabs),
  );
  root.replaceChildren(bar, problem, place);

  function step(event, name) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = (VIEWS.findIndex(([other]) => other === name) + by + VIEWS.length) % VIEWS.length;
    open(VIEWS[at][0]);
    tabs[at].focus();
  }

  async function open(name) {
    state.view = name;
    await show();
  }

  async function choose(run) {
    state.run = run;
    await show();
  }

  async function show() {
    tabs.forEach((tab, i) => {
      const chosen = VIEWS[i][0] === state.view;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    });
    place.setAttribute("aria-labelledby", `tab-${state.view}`);
    const { view, run } = state;
    try {
      if (view === "compare") {
        pages.compare.show(state.runs);
      } else {
        const found = await source.run(run);
        if (state.view === view && state.run === run) pages[view].show(found);
      }
      problem.textContent = "";
    } catch (error) {
      problem.textContent = error.message;
    }
  }

  async function refresh() {
    let found;
    try {
      found = await source.runs();
    } catch (error) {
      problem.textContent = error.message;
      return;
    }
    const changed = JSON.stringify(found.runs) !== JSON.stringify(state.runs);
    if (!changed && state.ready) return;
    state.ready = true;
    state.runs = found.runs;
    bar.hidden = !found.runs.length;
    if (!found.runs.length) {
      clear(place, emptyState());
      return;
    }
    const names = found.runs.map((run) => run.run);
    if (!names.includes(state.run)) state.run = found.newest;
    picker.replaceChildren(
      ...names.map((name) =>
        h(
          "option",
          { value: name, selected: name === state.run },
          name === "." ? ". (the log directory itself)" : name,
        ),
      ),
    );
    await show();
  }

  followTheme(() => {
    if (state.runs.length) show();
  });
  await refresh();
  document.documentElement.dataset.ready = "true";
  if (source.grows)
    setInterval(() => {
      if (!document.hidden) refresh();
    }, REFRESH_MS);
}
