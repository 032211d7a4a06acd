// The markdown that reports use, as elements: headings, tables, lists, quotations, code, bold, links as text. Anything else, HTML
// and scripts among it, is shown as the text that it is.

import { h } from "./dom.js";

// A long path or name may be broken at its slashes and underscores, so that a table need not be as wide as it.
const breakable = (text) => text.split(/(?<=\w[/_])(?=\w)/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

const INLINE = /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*([^*]+)\*\*|\[([^\]]+)\]\(([^)\s]+)\)|\\([\\|*_`#])/g;

export function inline(text) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(...breakable(text.slice(at, match.index)));
    if (match[2] !== undefined) parts.push(h("code", {}, match[2]));
    else if (match[3] !== undefined) parts.push(h("strong", {}, inline(match[3])));
    else if (match[4] !== undefined) parts.push(`${match[4]} (${match[5]})`);
    else parts.push(match[6]);
    at = match.index + match[0].length;
  }
  parts.push(...breakable(text.slice(at)));
  return parts.filter((part) => part !== "");
}

const cellsOf = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
const isRule = (line) => line !== undefined && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(line) && line.includes("-");

function table(lines) {
  const alignments = cellsOf(lines[1]).map((rule) => (rule.endsWith(":") ? "right" : "left"));
  const heads = cellsOf(lines[0]).some((cell) => cell !== "");
  const row = (line, tag) => h("tr", {}, cellsOf(line).map((cell, i) =>
    h(tag, { class: alignments[i] ?? "left", scope: tag === "th" ? "col" : null }, inline(cell))));
  return h("div", { class: "scroll" }, h("table", {},
    heads ? h("thead", {}, row(lines[0], "th")) : null, h("tbody", {}, lines.slice(2).map((line) => row(line, "td")))));
}

export function markdown(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  const isStart = (line, next) => /^\s*(#{1,6}\s|[-*]\s|\d+\.\s|```|>|$)/.test(line) || (line.includes("|") && isRule(next));
  while (at < lines.length) {
    const line = lines[at];
    const heading = /^\s*(#{1,6})\s+(.*)$/.exec(line);
    if (line.trim() === "") {
      at += 1;
    } else if (heading) {
      blocks.push(h(heading[1].length <= 3 ? "h4" : "h5", {}, inline(heading[2])));
      at += 1;
    } else if (/^\s*```/.test(line)) {
      const end = lines.findIndex((other, i) => i > at && /^\s*```/.test(other));
      const stop = end < 0 ? lines.length : end;
      blocks.push(h("pre", { tabindex: "0" }, lines.slice(at + 1, stop).join("\n")));
      at = stop + 1;
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      while (at < lines.length && /^\s*>/.test(lines[at])) quoted.push(lines[at++].replace(/^\s*> ?/, ""));
      blocks.push(h("blockquote", {}, inline(quoted.join(" "))));
    } else if (line.includes("|") && isRule(lines[at + 1])) {
      let stop = at + 2;
      while (stop < lines.length && lines[stop].includes("|")) stop += 1;
      blocks.push(table(lines.slice(at, stop)));
      at = stop;
    } else if (/^\s*([-*]|\d+\.)\s/.test(line)) {
      const items = [];
      const ordered = /^\s*\d+\./.test(line);
      while (at < lines.length && lines[at].trim() !== "" && !/^\s*```/.test(lines[at])) {
        const item = /^\s*(?:[-*]|\d+\.)\s+(.*)$/.exec(lines[at]);
        if (item) items.push(item[1]);
        else items[items.length - 1] += ` ${lines[at].trim()}`;
        at += 1;
      }
      blocks.push(h(ordered ? "ol" : "ul", {}, items.map((item) => h("li", {}, inline(item)))));
    } else {
      const words = [line];
      at += 1;
      while (at < lines.length && !isStart(lines[at], lines[at + 1])) words.push(lines[at++]);
      blocks.push(h("p", {}, inline(words.join(" "))));
    }
  }
  return blocks;
}
