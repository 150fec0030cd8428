// Answers in a shape: a schema, a question, and a form that fills while the model writes.

import { postJson } from "./api.js";
import { announce, button, copyText, field, h, icon, throttled } from "./dom.js";
import { Builder } from "./builder.js";
import { view } from "./form.js";
import { JsonReader } from "./json.js";
import { figuresLine, problemCard } from "./reply.js";
import { check } from "./schema.js";
import { sourceView } from "./source.js";
import { ask } from "./stream.js";

const text = () => ({ type: "string" });
const shape = (properties, required = Object.keys(properties)) => ({
  type: "object", properties, required, additionalProperties: false,
});

const EXAMPLES = {
  "A person": {
    prompt: "Ada Lovelace, born in London in 1815, was a mathematician and a writer. She knew Charles Babbage.",
    schema: shape({
      name: text(),
      birth_year: { type: "integer" },
      birthplace: text(),
      occupations: { type: "array", items: text() },
    }),
  },
  "A support ticket": {
    prompt: "Hi, since this morning I can't log in: the page says “session expired” again and again. I need my invoices today! Kim",
    schema: shape({
      summary: text(),
      urgency: { type: "string", enum: ["low", "normal", "high"] },
      area: { type: "string", enum: ["login", "billing", "shipping", "other"] },
      customer: text(),
      needs_reply: { type: "boolean" },
    }),
  },
  "A recipe": {
    prompt: "Invent a simple soup with apples and leeks for two people.",
    schema: shape({
      title: text(),
      minutes: { type: "integer" },
      vegetarian: { type: "boolean" },
      ingredients: { type: "array", items: shape({ name: text(), amount: text() }) },
      steps: { type: "array", items: text() },
    }),
  },
};

/** The structured-output view; dispatches "busy". */
export class Structured extends EventTarget {
  #running = null;
  #schemaText;
  #builder;
  #prompt;
  #problem = h("p", { class: "problem", role: "alert" });
  #state = h("span", { class: "badge", id: "result-state" }, "no result yet");
  #place = h("div", { class: "form-view" });
  #raw = h("pre", { class: "raw", tabindex: "0", role: "region", "aria-label": "The answer as JSON" });
  #notes = h("div", { class: "notes" });
  #quoted = h("input", { type: "checkbox", role: "switch", class: "switch", id: "quoted" });
  #source = h("div");

  constructor(root, { settings, meter, onproblem }) {
    super();
    Object.assign(this, { settings, meter, onproblem });
    this.#build(root);
    this.#example("A person");
  }

  get busy() {
    return this.#running !== null;
  }

  stop() {
    this.#running?.abort();
  }

  // --- the schema ----------------------------------------------------------------------------------------------------

  #build(root) {
    const draw = throttled(() => this.#skeleton());
    this.#schemaText = h("textarea", { id: "schema", rows: 16, spellcheck: "false", class: "mono", oninput: draw });
    this.#builder = new Builder(() => {
      this.#schemaText.value = JSON.stringify(this.#builder.schema, null, 2);
      this.#skeleton();
    });
    this.#prompt = h("textarea", { id: "schema-prompt", rows: 4 });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.busy) this.run();
    });
    const choose = h("select", { id: "example", onchange: () => this.#example(choose.value) }, Object.keys(EXAMPLES).map((name) => h("option", null, name)));
    this.runButton = button("Fill in", { image: "send", class: "primary", id: "fill", onclick: () => (this.busy ? this.stop() : this.run()) });
    const copy = button("Copy JSON", { image: "copy", class: "plain", onclick: () => copyText(this.#raw.textContent).then(() => announce("Copied."), this.onproblem) });
    root.append(
      h("section", { class: "column", "aria-labelledby": "shape-title" },
        h("div", { class: "title-row" }, h("h2", { id: "shape-title" }, "Shape"), h("label", { class: "inline", for: "example" }, "Example"), choose),
        this.#ways(),
        this.#problem,
        field("Text or question", this.#prompt, "Enter fills in the form, Shift+Enter begins a new line."),
        h("div", { class: "row" }, this.runButton, this.#quoted, h("label", { for: "quoted" }, "Only what the text says")),
      ),
      h("section", { class: "column", "aria-labelledby": "result-title" },
        h("div", { class: "title-row" }, h("h2", { id: "result-title" }, "Result"), this.#state),
        this.#place,
        this.#source,
        this.#notes,
        h("details", null, h("summary", null, "JSON"), this.#raw, copy),
      ),
    );
  }

  /** The two ways to write a schema, as tabs. */
  #ways() {
    const fieldsPanel = h("div", { role: "tabpanel", id: "panel-fields", "aria-labelledby": "way-fields" }, this.#builder.element);
    const jsonPanel = h("div", { role: "tabpanel", id: "panel-json", "aria-labelledby": "way-json", hidden: true },
      h("label", { class: "unseen", for: "schema" }, "JSON Schema"), this.#schemaText);
    const pick = (json) => {
      this.#problem.textContent = "";
      if (!json && !this.#toBuilder()) return;
      fieldsPanel.hidden = json;
      jsonPanel.hidden = !json;
      ways.forEach((way, index) => {
        way.setAttribute("aria-selected", String(json === Boolean(index)));
        way.tabIndex = json === Boolean(index) ? 0 : -1;
      });
    };
    const ways = ["Fields", "JSON Schema"].map((label, index) =>
      h("button", { type: "button", role: "tab", id: index ? "way-json" : "way-fields", "aria-controls": index ? "panel-json" : "panel-fields", onclick: () => pick(Boolean(index)) }, label));
    const bar = h("div", { class: "segments", role: "tablist", "aria-label": "How to write the schema" }, ways);
    bar.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = ways[ways.indexOf(document.activeElement) ? 0 : 1];
      other.focus();
      other.click();
    });
    this.pickWay = pick;
    return [bar, fieldsPanel, jsonPanel];
  }

  #toBuilder() {
    const schema = this.#schema();
    if (schema && this.#builder.show(schema)) return true;
    if (schema) this.#problem.textContent = "This schema says more than fields can show; edit it as JSON.";
    return false;
  }

  #example(name) {
    const { prompt, schema } = EXAMPLES[name];
    this.#schemaText.value = JSON.stringify(schema, null, 2);
    this.#prompt.value = prompt;
    this.pickWay(false);
    this.#skeleton();
  }

  /** The schema as it stands, or null with the reason shown. */
  #schema() {
    try {
      const schema = JSON.parse(this.#schemaText.value);
      if (schema === null || typeof schema !== "object" || Array.isArray(schema)) throw new SyntaxError("a schema is an object in { }");
      return schema;
    } catch (error) {
      this.#problem.textContent = `The schema is not JSON: ${error.message}`;
      return null;
    }
  }

  #skeleton() {
    if (this.busy) return;
    this.#problem.textContent = "";
    const schema = this.#schema();
    if (!schema) return;
    this.#place.replaceChildren(view(schema, schema).element);
    this.#notes.replaceChildren();
    this.#source.replaceChildren();
    this.#raw.textContent = "";
    this.#setState("", "no result yet");
  }

  // --- the answer ----------------------------------------------------------------------------------------------------

  /** Ask, and fill in the form. */
  async run() {
    const schema = this.#schema();
    if (!schema || this.busy) return;
    if (!this.#prompt.value.trim()) return this.#prompt.focus();
    const form = view(schema, schema);
    this.#place.replaceChildren(form.element);
    this.#notes.replaceChildren();
    this.#source.replaceChildren();
    this.#raw.textContent = "";
    if (this.#quoted.checked) return this.#extract(schema, form);
    const reader = new JsonReader();
    const draw = throttled(() => form.update(reader.value, true));
    this.#setRunning(new AbortController());
    this.#setState("running", "writing…");
    // Where the columns stand below each other, the result may be out of sight.
    if (matchMedia("(max-width: 860px)").matches) this.#place.parentElement.scrollIntoView({ block: "start" });
    const onpiece = (piece) => {
      if (!piece.text) return;
      this.#raw.append(piece.text);
      reader.push(piece.text);
      draw();
    };
    try {
      const answer = await ask(this.#request(schema), { signal: this.#running.signal, meter: this.meter, onpiece });
      reader.finish();
      draw.now();
      form.update(reader.value, false);
      this.#judge(answer, reader, schema);
    } catch (error) {
      this.#failed(error);
    }
    this.#setRunning(null);
  }

  /** Fill in the form with parts of the text, and mark them in it. */
  async #extract(schema, form) {
    const input = this.#prompt.value;
    this.#setRunning(new AbortController());
    this.#setState("running", "reading…");
    try {
      const { model } = this.settings.request();
      const { value, spans, notes } = await postJson("/v1/extractions", { model, input, schema }, this.#running.signal);
      form.update(value, false);
      this.#raw.textContent = JSON.stringify(value, null, 2);
      this.#source.replaceChildren(h("h3", null, "In the text"), sourceView(input, spans));
      this.#notes.replaceChildren(...notes.map((note) => h("p", { class: "hint" }, note)));
      this.#setState("approved", "from the text");
      announce(`The form is filled in with ${spans.length} parts of the text.`);
    } catch (error) {
      this.#failed(error);
    }
    this.#setRunning(null);
  }

  #request(schema) {
    const name = (typeof schema.title === "string" ? schema.title : "answer").replaceAll(/[^a-zA-Z0-9_-]/g, "_").slice(0, 64) || "answer";
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    return {
      ...this.settings.request(),
      messages: [...system, { role: "user", content: this.#prompt.value }],
      response_format: { type: "json_schema", json_schema: { name, schema, strict: true } },
    };
  }

  #judge(answer, reader, schema) {
    this.#notes.append(figuresLine(answer.figures));
    if (!reader.complete) {
      this.#setState("denied", "cut short");
      const why = answer.reason === "length" ? "The answer reached its longest length; raise “Max tokens” under Settings." : "The answer ended before the JSON did.";
      this.#notes.prepend(h("p", { class: "problem" }, why));
      return announce(why);
    }
    this.#raw.textContent = JSON.stringify(reader.value, null, 2);
    const found = check(reader.value, schema);
    if (!found.length) {
      this.#setState("approved", "valid");
      return announce("The form is filled in, and the answer is valid.");
    }
    this.#setState("denied", "not valid");
    this.#notes.prepend(h("ul", { class: "problem" }, found.slice(0, 20).map(({ path, message }) => h("li", null, h("code", null, path), ` ${message}`))));
    announce(`The answer is not valid: ${found[0].path} ${found[0].message}`);
  }

  #failed(error) {
    if (error.name === "AbortError") return this.#setState("", "stopped");
    this.#setState("denied", error.name === "SyntaxError" ? "not JSON" : "failed");
    if (error.name === "SyntaxError") this.#notes.append(h("p", { class: "problem", role: "alert" }, `The answer is not JSON: ${error.message}`));
    else this.#notes.append(problemCard(error, { again: () => this.run(), settings: this.onproblem }));
  }

  #setState(kind, words) {
    this.#state.className = `badge ${kind}`;
    this.#state.textContent = words;
  }

  #setRunning(controller) {
    this.#running = controller;
    this.runButton.replaceChildren(icon(this.busy ? "stop" : "send"), h("span", null, this.busy ? "Stop" : "Fill in"));
    this.runButton.classList.toggle("stop", this.busy);
    this.dispatchEvent(new Event("busy"));
  }
}
