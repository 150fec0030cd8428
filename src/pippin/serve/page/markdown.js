// Markdown as models write it, turned into elements while it arrives.
//
// A block that is finished is never touched again; only the last one is drawn anew, at most once a frame, and a long
// code block or paragraph grows by appending. Every element is built by a call, so nothing in the text becomes markup;
// pictures are not fetched, and a link shows where it leads.

import { button, copyText, h, throttled } from "./dom.js";

const LONGEST_INLINE = 20_000; // beyond this a paragraph is shown as it is
const DEEPEST = 6;

const INLINE = [
  ["`", (text, at) => codeSpan(text, at)],
  ["**", (text, at, depth) => pair(text, at, "**", "strong", depth)],
  ["__", (text, at, depth) => pair(text, at, "__", "strong", depth)],
  ["~~", (text, at, depth) => pair(text, at, "~~", "del", depth)],
  ["*", (text, at, depth) => pair(text, at, "*", "em", depth)],
  ["_", (text, at, depth) => pair(text, at, "_", "em", depth)],
  ["![", (text, at) => linkAt(text, at + 1, true)],
  ["[", (text, at) => linkAt(text, at, false)],
  ["http://", (text, at) => bareLink(text, at)],
  ["https://", (text, at) => bareLink(text, at)],
];

/** The inline part of Markdown as a list of nodes and strings. */
export function inline(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST_INLINE) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  while (at < text.length) {
    if (text[at] === "\\" && /[\\`*_{}[\]()#+.!~-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const rule = "`*_~![h".includes(text[at]) && INLINE.find(([mark]) => text.startsWith(mark, at));
    const found = rule && rule[1](text, at, depth);
    if (found) {
      if (plain) nodes.push(plain);
      plain = "";
      nodes.push(found.node);
      at = found.end;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function codeSpan(text, at) {
  const fence = /^`+/.exec(text.slice(at, at + 20))[0];
  const end = text.indexOf(fence, at + fence.length);
  if (end < 0) return null;
  return { node: h("code", null, text.slice(at + fence.length, end).trim() || " "), end: end + fence.length };
}

function pair(text, at, mark, tag, depth) {
  const start = at + mark.length;
  const end = text.indexOf(mark, start + 1);
  const inWord = mark[0] === "_" && (/\w/.test(text[at - 1] ?? "") || /\w/.test(text[end + mark.length] ?? ""));
  if (end < 0 || inWord || /\s/.test(text[start]) || /\s/.test(text[end - 1])) return null;
  return { node: h(tag, null, inline(text.slice(start, end), depth + 1)), end: end + mark.length };
}

function linkAt(text, at, picture) {
  const middle = text.indexOf("](", at);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0 || end - at > 2000 || text.slice(at, middle).includes("\n")) return null;
  const label = text.slice(at + 1, middle);
  const address = text.slice(middle + 2, end).trim().split(/\s/)[0];
  const shown = picture ? `[picture: ${label || "no description"}]` : label;
  return { node: link(address, shown), end: end + 1 };
}

function bareLink(text, at) {
  const address = /^https?:\/\/[^\s<>"'`)\]]+/.exec(text.slice(at, at + 2000))?.[0].replace(/[.,;:!?]+$/, "");
  return address ? { node: link(address, address), end: at + address.length } : null;
}

/** A link that opens elsewhere and tells nobody where it was; anything but the web and mail stays text. */
export function link(address, label) {
  let target;
  try {
    target = new URL(address);
  } catch {
    return h("span", null, label);
  }
  if (!["http:", "https:", "mailto:"].includes(target.protocol)) return h("span", null, label);
  const rest = { href: target.href, rel: "noopener noreferrer nofollow", target: "_blank", title: target.href };
  const where = label.includes(target.host) || !target.host ? null : h("span", { class: "host" }, ` (${target.host})`);
  return h("a", rest, label, where);
}

const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const ROW = /^\s*\|.*\|\s*$/;

/** Draws Markdown into an element as it arrives. */
export class Markdown {
  text = "";
  #root;
  #line = ""; // the line whose end is missing
  #block = null; // the block that may still grow: {kind, element, lines, ...}
  #lists = []; // open lists, outermost first: {element, indent}
  #drawSoon;

  constructor(root) {
    this.#root = root;
    this.#drawSoon = throttled(() => this.#draw());
  }

  /** Add text; it is drawn within a frame. */
  push(text) {
    this.text += text;
    const lines = (this.#line + text).split("\n");
    this.#line = lines.pop();
    for (const line of lines) this.#take(line.replace(/\r$/, ""));
    this.#drawSoon();
    return this;
  }

  /** No more text comes. */
  finish() {
    if (this.#line) this.#take(this.#line);
    this.#line = "";
    this.#drawSoon.now();
    return this;
  }

  #draw() {
    const block = this.#block;
    const tail = this.#line;
    if (block?.kind === "code") {
      const closing = tail && tail.trimStart().startsWith(block.fence);
      block.growing.data = closing ? "" : tail;
      return;
    }
    if (tail && !(block && this.#continues(block, tail))) {
      // The beginning of a line that will be a block of its own: shown as plain text until its end tells which.
      if (!this.#preview) this.#preview = h("p", { class: "growing" });
      if (!this.#preview.isConnected) this.#root.append(this.#preview);
      this.#preview.replaceChildren(...inline(tail.replace(/^\s*([#>]+|[-*+]|\d+[.)])\s*/, "")));
    } else {
      this.#preview?.remove();
    }
    if (block?.dirty || (tail && block)) this.#redraw(block, tail);
  }

  #preview = null;

  #continues(block, line) {
    if (block.kind === "table") return ROW.test(line) || line.trimStart().startsWith("|");
    if (line.trim() === "" || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return false;
    if (ITEM.test(line) || /^\s*([-*+]|\d+[.)]|[#>`~|]+)?\s*$/.test(line)) return false;
    return block.kind === "quote" ? QUOTE.test(line) : !QUOTE.test(line);
  }

  #redraw(block, tail) {
    const lines = tail && this.#continues(block, tail) ? [...block.lines, tail] : block.lines;
    block.dirty = false;
    if (block.kind === "table") drawTable(block.element, lines);
    else block.element.replaceChildren(...inlineLines(lines.map((line) => this.#bare(block, line))));
  }

  #bare(block, line) {
    return block.kind === "quote" ? line.replace(QUOTE, "$1") : line.trim();
  }

  #take(line) {
    const block = this.#block;
    if (block?.kind === "code") {
      if (line.trim().startsWith(block.fence) && line.trim().replaceAll(block.fence[0], "") === "") this.#end();
      else block.code.insertBefore(document.createTextNode(`${line}\n`), block.growing);
      return;
    }
    if (block && this.#continues(block, line)) {
      block.lines.push(line);
      block.dirty = true;
      return;
    }
    this.#end();
    this.#begin(line);
  }

  #begin(line) {
    if (line.trim() === "") return;
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    if (!item && !/^\s+\S/.test(line)) this.#lists = [];
    if (fence) this.#startCode(fence[1], fence[2]);
    else if (heading) this.#add(h(`h${Math.min(6, heading[1].length + 2)}`, null, inline(heading[2])));
    else if (RULE.test(line)) this.#add(h("hr"));
    else if (item) this.#startItem(item);
    else if (ROW.test(line)) this.#open("table", h("table"), line);
    else if (QUOTE.test(line)) this.#open("quote", h("blockquote"), line);
    else this.#open("text", h("p"), line);
  }

  #add(element) {
    this.#preview?.remove();
    const list = this.#lists.at(-1);
    (list?.element.lastElementChild ?? this.#root).append(element);
    return element;
  }

  #open(kind, element, line) {
    this.#add(element);
    this.#block = { kind, element, lines: [line], dirty: true };
  }

  #end() {
    if (this.#block?.dirty) this.#redraw(this.#block, "");
    if (this.#block?.kind === "code") this.#block.growing.data = "";
    this.#block = null;
  }

  #startItem([, space, mark, text]) {
    const indent = space.replaceAll("\t", "    ").length;
    const tag = /\d/.test(mark) ? "ol" : "ul";
    while (this.#lists.length && this.#lists.at(-1).indent > indent) this.#lists.pop();
    let list = this.#lists.at(-1);
    if (list && indent === list.indent && list.element.localName !== tag) {
      this.#lists.pop();
      list = null;
    }
    if (!list || indent > list.indent + 1) {
      const start = tag === "ol" && parseInt(mark) !== 1 ? parseInt(mark) : null;
      const element = this.#lists.length < DEEPEST ? this.#add(h(tag, { start })) : list.element;
      if (this.#lists.length < DEEPEST) this.#lists.push({ element, indent });
      list = this.#lists.at(-1);
    }
    this.#preview?.remove();
    const own = h("span");
    list.element.append(h("li", null, own));
    this.#block = { kind: "text", element: own, lines: [text], dirty: true };
  }

  #startCode(fence, language) {
    const growing = document.createTextNode("");
    const code = h("code", null, growing);
    const copy = button("Copy code", { image: "copy", quiet: true, class: "quiet" });
    copy.addEventListener("click", () => copyFrom(copy, code));
    // The code scrolls sideways, so a keyboard must be able to reach it.
    const body = h("pre", { tabindex: "0", role: "region", "aria-label": `Code${language ? ` in ${language}` : ""}` }, code);
    this.#add(h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", null, language || "code"), copy), body));
    this.#block = { kind: "code", fence, code, growing };
  }
}

function inlineLines(lines) {
  const nodes = inline(lines.map((line) => line.replace(/ {2,}$/, "")).join("\n"));
  return nodes.flatMap((node) => (typeof node === "string" ? breaks(node) : [node]));
}

function breaks(text) {
  return text.split("\n").flatMap((line, index) => (index ? [h("br"), line] : [line]));
}

function drawTable(table, lines) {
  const rows = lines.map((line) => line.trim().replace(/^\||\|$/g, "").split("|"));
  const ruled = rows.length > 1 && rows[1].every((cell) => /^\s*:?-{1,}:?\s*$/.test(cell));
  const row = (cells, tag) => h("tr", null, cells.map((cell) => h(tag, null, inline(cell.trim()))));
  const head = ruled ? h("thead", null, row(rows[0], "th")) : null;
  const body = h("tbody", null, rows.slice(ruled ? 2 : 0).map((cells) => row(cells, "td")));
  table.replaceChildren(...[head, body].filter(Boolean));
}

async function copyFrom(control, code) {
  await copyText(code.textContent);
  control.classList.add("done");
  setTimeout(() => control.classList.remove("done"), 1200);
}
