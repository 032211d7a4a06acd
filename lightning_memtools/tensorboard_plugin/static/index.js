// The tab in TensorBoard: loads its styles and asks the plugin's routes.

const here = (path) => new URL(path, import.meta.url);
const MODULES = [
  "app",
  "charts",
  "compare_page",
  "dom",
  "format",
  "reports_page",
  "run_page",
  "step_chart",
  "theme",
  "uPlot.esm",
  "verdict",
];
const STYLES = ["./uPlot.min.css", "./memory_tab.css"];

// Everything that the first picture needs is asked for at once: each round to the server would wait for the one before.
const begun = new Map();

function urlOf(path, query) {
  const url = here(path);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  return url;
}

async function answer(url) {
  const response = await fetch(url);
  if (!response.ok)
    throw new Error((await response.text()).slice(0, 500) || `TensorBoard answered ${response.status}.`);
  return response.json();
}

function begin(url) {
  const coming = answer(url);
  coming.catch(() => {}); // whoever asks for it gets the error
  begun.set(url.href, coming);
  return coming;
}

function ask(path, query = {}) {
  const url = urlOf(path, query);
  const coming = begun.get(url.href);
  begun.delete(url.href);
  return coming ?? answer(url);
}

const source = {
  grows: true,
  runs: () => ask("./runs"),
  step: (run) => ask("./step", { run }),
  run: (run) => ask("./run", { run }),
};

function link(rel, path) {
  const element = document.createElement("link");
  element.rel = rel;
  element.href = here(path);
  const loaded = new Promise((done) => {
    element.onload = element.onerror = done;
  });
  document.head.append(element);
  return loaded;
}

const styled = Promise.all(STYLES.map((path) => link("stylesheet", path)));
MODULES.forEach((name) => link("modulepreload", `./${name}.js`));
begin(urlOf("./runs", {})).then(
  ({ newest }) => {
    if (newest) begin(urlOf("./run", { run: newest }));
  },
  () => {},
);

export async function render() {
  document.documentElement.lang = "en";
  const { start } = await import("./app.js");
  await styled;
  const root = document.createElement("div");
  root.id = "memtools";
  document.body.append(root);
  await start(root, source);
}
