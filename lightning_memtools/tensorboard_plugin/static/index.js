// The tab in TensorBoard: loads its styles and asks the plugin's routes.

import { start } from "./app.js";

const here = (path) => new URL(path, import.meta.url);

async function ask(path, query = {}) {
  const url = here(path);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const answer = await fetch(url);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 500) || `TensorBoard answered ${answer.status}.`);
  return answer.json();
}

const source = {
  grows: true,
  runs: () => ask("./runs"),
  step: (run, snapshot) => ask("./step", { run, ...(snapshot ? { snapshot } : {}) }),
  reports: (run) => ask("./reports", { run }),
  run: (run, shown) => ask("./run", { run, buckets: Math.max(200, Math.min(1000, Math.round(innerWidth / 2))), ...(shown ? { first: shown[0], last: shown[1] } : {}) }),
};

function styles(name) {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = here(name);
  const loaded = new Promise((done) => { link.onload = link.onerror = done; });
  document.head.append(link);
  return loaded;
}

export async function render() {
  document.documentElement.lang = "en";
  await Promise.all([styles("./uPlot.min.css"), styles("./memory_tab.css")]);
  const root = document.createElement("div");
  root.id = "memtools";
  document.body.append(root);
  await start(root, source);
}
