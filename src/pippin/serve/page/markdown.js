// Markdown as models write it, turned into elements while it arrives.
//
// `marked` reads the text into tokens. Every token becomes an element by a call, never through a string of HTML, so
// nothing in the text becomes markup and the page's policy can forbid HTML strings altogether. Images are not fetched,
// and a link shows where it leads. A block that is complete is never touched again; what may still grow is read anew, at
// most once a frame.

import { button, copyText, h, throttled } from "./dom.js";
import { Lexer, getDefaults } from "./vendor/marked.esm.js";

const OPTIONS = { ...getDefaults(), breaks: true };
const MAX_DEPTH = 20; // of blocks and marks inside each other; beyond it the text is shown as it is
// A last line of nothing but marks may become a rule, a list, a fence, a heading or a table: it waits for its text.
const UNDECIDED = /(?:^|\n)[ \t]*(?:[-*+_=~`#>|: \t]+|\d{1,9}[.)]?)$/;

/** Draws Markdown into an element as it arrives. */
export class Markdown {
  text = "";
  #root;
  #open = ""; // the text of the blocks that may still grow
  #shown = []; // what is shown of it: {token, element}
  #links = Object.create(null); // definitions of links so far
  #drawSoon;

  constructor(root) {
    this.#root = root;
    this.#drawSoon = throttled(() => this.#show(this.#read(this.#open.replace(UNDECIDED, ""))));
  }

  /** Add text; it is drawn within a frame. */
  push(text) {
    this.text += text;
    this.#open += text.replaceAll("\r", "");
    if (text.includes("\n")) this.#close();
    this.#drawSoon();
    return this;
  }

  /** No more text comes. */
  finish() {
    this.#drawSoon.now();
    this.#show(this.#read(this.#open));
    return this;
  }

  /** Draw for good what no further line can change: of the complete lines, all blocks but the last. */
  #close() {
    const tokens = this.#read(this.#open.slice(0, this.#open.lastIndexOf("\n") + 1));
    const closed = tokens.slice(0, Math.max(0, tokens.findLastIndex((token) => token.type !== "space")));
    const raw = closed.map((token) => token.raw).join("");
    if (!raw || !this.#open.startsWith(raw)) return;
    this.#show(closed);
    this.#shown = [];
    this.#open = this.#open.slice(raw.length);
  }

  /** The blocks of a text; as one block of plain text where it is nested too deeply to be read. */
  #read(text) {
    const lexer = new Lexer(OPTIONS);
    lexer.tokens.links = this.#links;
    try {
      return lexer.lex(text);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      return [{ type: "plain", raw: text }];
    }
  }

  /** Show blocks instead of those shown so far of the open text. */
  #show(tokens) {
    const before = this.#shown;
    this.#shown = tokens.map((token, index) => {
      const old = before[index];
      return { token, element: old && grow(old, token) ? old.element : block(token, 0) };
    });
    const elements = new Set(this.#shown.map(({ element }) => element));
    for (const { element } of before) if (!elements.has(element)) element?.remove();
    for (const element of elements) if (element && !element.isConnected) this.#root.append(element);
  }
}

/** Make an element that is shown into that of a later state of its block; false if it has to be built anew. */
function grow({ token: old, element }, token) {
  if (old.type !== token.type) return false;
  if (old.raw === token.raw) return true;
  if (token.type === "code" && old.lang === token.lang) {
    element.querySelector("code").textContent = codeText(token);
    return true;
  }
  if (token.type === "list" && old.ordered === token.ordered && old.start === token.start) {
    const same = (a, b) => a && a.loose === b.loose && a.raw.trimEnd() === b.raw.trimEnd();
    const known = [...element.children];
    element.replaceChildren(...token.items.map((item, at) => (same(old.items[at], item) ? known[at] : listItem(item, 0))));
    return true;
  }
  return false;
}

/** The element of a block; null for blank lines and for definitions of links. */
function block(token, depth) {
  if (token.type === "space" || token.type === "def") return null;
  if (depth > MAX_DEPTH) return h("p", null, token.raw);
  switch (token.type) {
    case "heading":
      return h(`h${Math.min(6, token.depth + 2)}`, null, inline(token.tokens));
    case "paragraph":
      return h("p", null, inline(token.tokens));
    case "text": // of an item in a list without blank lines
      return h("span", null, inline(token.tokens ?? [token]));
    case "checkbox":
      return h("span", null, token.checked ? "☑ " : "☐ ");
    case "code":
      return codeBlock(token);
    case "hr":
      return h("hr");
    case "blockquote":
      return h("blockquote", null, token.tokens.map((inner) => block(inner, depth + 1)));
    case "list":
      return h(
        token.ordered ? "ol" : "ul",
        { start: token.ordered && token.start !== 1 ? token.start : null },
        token.items.map((item) => listItem(item, depth)),
      );
    case "table": {
      const row = (cells, tag) => h("tr", null, cells.map((cell) => h(tag, null, inline(cell.tokens))));
      const body = token.rows.map((cells) => row(cells, "td"));
      return h("table", null, h("thead", null, row(token.header, "th")), h("tbody", null, body));
    }
    default: // HTML, which is shown and not obeyed
      return h("p", null, token.raw);
  }
}

function listItem(item, depth) {
  return h("li", null, item.tokens.map((inner) => block(inner, depth + 1)));
}

const MARKS = { strong: "strong", em: "em", del: "del" };

/** The nodes of marks inside a block. */
function inline(tokens, depth = 0) {
  return tokens.map((token) => {
    if (depth > MAX_DEPTH) return token.raw;
    if (token.type in MARKS) return h(MARKS[token.type], null, inline(token.tokens, depth + 1));
    if (token.type === "codespan") return h("code", null, token.text);
    if (token.type === "br") return h("br");
    if (token.type === "link") return link(token.href, token.text, inline(token.tokens, depth + 1));
    if (token.type === "image") return link(token.href, `[picture: ${token.text || "no description"}]`);
    return token.tokens ? inline(token.tokens, depth + 1) : (token.text ?? token.raw);
  });
}

/** A link that opens elsewhere and tells nobody where it was; anything but the web and mail stays text. */
export function link(address, label, content = label) {
  let target;
  try {
    target = new URL(address);
  } catch {
    return h("span", null, content);
  }
  if (!["http:", "https:", "mailto:"].includes(target.protocol)) return h("span", null, content);
  const rest = { href: target.href, rel: "noopener noreferrer nofollow", target: "_blank", title: target.href };
  const where = label.includes(target.host) || !target.host ? null : h("span", { class: "host" }, ` (${target.host})`);
  return h("a", rest, content, where);
}

const codeText = ({ text }) => (text ? `${text}\n` : "");

function codeBlock(token) {
  const language = token.lang?.trim().split(/\s/)[0] ?? "";
  const code = h("code", null, codeText(token));
  const copy = button("Copy code", { image: "copy", quiet: true, class: "quiet" });
  copy.addEventListener("click", () => copyFrom(copy, code));
  // The code scrolls sideways, so a keyboard must be able to reach it.
  const body = h("pre", { tabindex: "0", role: "region", "aria-label": `Code${language ? ` in ${language}` : ""}` }, code);
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", null, language || "code"), copy), body);
}

async function copyFrom(control, code) {
  await copyText(code.textContent);
  control.classList.add("done");
  setTimeout(() => control.classList.remove("done"), 1200);
}
