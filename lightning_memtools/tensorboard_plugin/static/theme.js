// Light or dark, as the surrounding TensorBoard is. The colours of curves are those of Okabe and Ito, which people with
// any colour vision can tell apart.

const PALETTE = {
  light: {
    allocated: "#0072B2",
    reserved: "#E69F00",
    capacity: "#6b7280",
    train: "#0072B2",
    val: "#D55E00",
    time: "#CC79A7",
    norm: "#009E73",
    grid: "#e5e9f0",
    card: "#ffffff",
    text: "#5b6472",
    line: "#1f2937",
    rss: "#6b7280",
    stages: { val: "#009E73", test: "#CC79A7", predict: "#B79F00" },
    marks: {
      cache: "#0072B2",
      retry: "#D55E00",
      oom: "#C1121F",
      leak: "#111827",
      nonfinite: "#7B2CBF",
      spike: "#A16207",
    },
    parts: {
      parameters: "#0072B2",
      gradients: "#E69F00",
      optimizer: "#56B4E9",
      activations: "#009E73",
      inputs: "#F0E442",
      temporaries: "#D55E00",
      other: "#999999",
    },
  },
  dark: {
    allocated: "#56B4E9",
    reserved: "#F2B134",
    capacity: "#9aa4b2",
    train: "#56B4E9",
    val: "#FF8A50",
    time: "#E39CC4",
    norm: "#2CC79A",
    grid: "#2b323d",
    card: "#1c222b",
    text: "#aab3c0",
    line: "#e6eaf0",
    rss: "#9aa4b2",
    stages: { val: "#2CC79A", test: "#E39CC4", predict: "#F0E442" },
    marks: {
      cache: "#56B4E9",
      retry: "#FF8A50",
      oom: "#FF6B6B",
      leak: "#F9FAFB",
      nonfinite: "#C79BFF",
      spike: "#F0C04A",
    },
    parts: {
      parameters: "#2D8FD0",
      gradients: "#F2B134",
      optimizer: "#7CC8F2",
      activations: "#17A67E",
      inputs: "#F0E442",
      temporaries: "#FF8A50",
      other: "#8b93a0",
    },
  },
};

function outerBody() {
  try {
    return window.parent.document.body;
  } catch {
    return document.body; // a page of another site shows the tab
  }
}

export function isDark() {
  if (document.documentElement.dataset.page === "report") return matchMedia("(prefers-color-scheme: dark)").matches;
  return outerBody().classList.contains("dark-mode");
}

export const colours = () => PALETTE[isDark() ? "dark" : "light"];

export function followTheme(changed) {
  const apply = () => {
    const name = isDark() ? "dark" : "light";
    if (document.documentElement.dataset.theme === name) return;
    document.documentElement.dataset.theme = name;
    changed();
  };
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  new MutationObserver(apply).observe(outerBody(), { attributes: true, attributeFilter: ["class"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
}
