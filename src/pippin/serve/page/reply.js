// How an answer looks: what the model thought, what it said, the calls in between, and the figures below.

import { ApiError } from "./api.js";
import { button, h, icon, throttled } from "./dom.js";
import { Markdown } from "./markdown.js";

const ENDINGS = {
  length: "The answer reached its longest length; raise “Max tokens” under Settings for more.",
  content_filter: "The server's guardrails ended this answer.",
};

const PATIENCE = 3000; // milliseconds without a word until the page says what it waits for

/** One answer, with everything between two messages of the user. */
export class Reply {
  element;
  figures = null;
  #body = h("div", { class: "body" });
  #markdown = null;
  #thought = null;
  #texts = [];
  #patience = h("span", { class: "hint" });
  #waiting = h("p", { class: "waiting" }, h("span", { class: "dots", "aria-hidden": "true" }, h("i"), h("i"), h("i")), this.#patience);
  #timer = 0;

  constructor(model) {
    const head = h("header", null, h("span", { class: "mark", "aria-hidden": "true" }), h("span", null, model || "Assistant"));
    this.element = h("article", { class: "message reply", "aria-label": "Answer" }, head, this.#body);
  }

  /** All that was said, without the thinking and the calls. */
  get text() {
    return this.#texts.map((markdown) => markdown.text).filter(Boolean).join("\n\n");
  }

  /** The next request of the same turn begins. */
  begin() {
    this.#markdown = this.#thought = null;
    this.#body.append(this.#waiting);
    this.#patience.textContent = "";
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => (this.#patience.textContent = "Waiting: the model may still be loading, or others are first."), PATIENCE);
    this.element.setAttribute("aria-busy", "true");
  }

  push({ text, thought, calls }) {
    if (text || thought || calls) this.#stopWaiting();
    if (thought) this.#think(thought);
    if (text) this.#say(text);
  }

  /** Add a card after what was said. */
  add(element) {
    this.#settle();
    this.#body.append(element);
  }

  note(text) {
    this.add(h("p", { class: "note" }, text));
  }

  ended(reason) {
    if (ENDINGS[reason]) this.note(ENDINGS[reason]);
  }

  close() {
    this.#settle();
    this.#stopWaiting();
    this.element.removeAttribute("aria-busy");
  }

  /** Show an answer that was saved. */
  replay(entries) {
    for (const entry of entries) {
      if (entry.role === "tool") this.add(savedCard("Result", entry.content ?? ""));
      else if (entry.content) this.#say(entry.content);
      this.#settle();
      for (const call of entry.tool_calls ?? [])
        this.add(savedCard(`Call of ${call?.function?.name}`, String(call?.function?.arguments ?? "")));
    }
    this.close();
  }

  #stopWaiting() {
    clearTimeout(this.#timer);
    this.#waiting.remove();
  }

  #say(text) {
    if (!this.#markdown) {
      const place = h("div", { class: "text" });
      this.#body.append(place);
      this.#markdown = new Markdown(place);
      this.#texts.push(this.#markdown);
      if (this.#thought) this.#thought.box.open = false;
    }
    this.#markdown.push(text);
  }

  #think(text) {
    if (!this.#thought) {
      const place = document.createTextNode("");
      const box = h("details", { class: "thought", open: true }, h("summary", null, "Thinking"), h("p", null, place));
      this.#body.append(box);
      const thought = { box, text: "" };
      thought.draw = throttled(() => (place.data = thought.text));
      this.#thought = thought;
    }
    this.#thought.text += text;
    this.#thought.draw();
  }

  #settle() {
    this.#markdown?.finish();
    this.#thought?.draw.now();
    this.#markdown = null;
  }
}

function savedCard(label, text) {
  return h("section", { class: "card call" },
    h("header", null, icon("tool"), h("strong", null, label)),
    h("pre", { class: "arguments", tabindex: "0", role: "region", "aria-label": label }, text));
}

const tokens = (count) => `${count.toLocaleString("en")} token${count === 1 ? "" : "s"}`;

/** The figures of one answer in a line. */
export function figuresLine(figures) {
  const parts = [];
  if (figures.rate !== null) parts.push(`${figures.rate.toFixed(1)} tokens/s`);
  if (figures.first !== null) parts.push(`first after ${figures.first.toFixed(2)} s`);
  if (figures.read !== null) parts.push(`${tokens(figures.read)} in${figures.cached ? `, ${figures.cached.toLocaleString("en")} cached` : ""}`);
  parts.push(`${tokens(figures.written)} out`);
  return h("span", { class: "figures" }, parts.join(" · "));
}

const sentence = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

/** A visible account of an error and what to do about it. */
export function problemCard(error, { again = null, settings = null } = {}) {
  const known = error instanceof ApiError;
  const needsSettings = known && [401, 403, 404].includes(error.status);
  return h("div", { class: "card trouble", role: "alert" },
    icon("warning"),
    h("div", null,
      h("strong", null, known ? sentence(error.message) : `Something in this page failed: ${error.message}`),
      h("p", null, known ? error.advice : "Save the conversation, then reload the page."),
      known && error.code ? h("p", { class: "muted" }, `Status ${error.status}, ${error.code}`) : null,
      h("div", { class: "row" },
        again ? button("Try again", { image: "again", onclick: again }) : null,
        needsSettings && settings ? button("Open settings", { class: "plain", onclick: () => settings(null) }) : null,
      ),
    ),
  );
}
