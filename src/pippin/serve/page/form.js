// A form that a value fills while it is written.
//
// JSON grows at its end only, so drawing looks at what is new and at the last child of each open container: the work of
// a whole answer grows with its length, not with its square.

import { h } from "./dom.js";
import { kindOf, resolve } from "./schema.js";

const DEEPEST = 24;
const SKELETON = 4; // levels that are drawn before there is a value

/** A view of the value of a schema: `.update(value, growing)` shows what is there so far. */
export function view(schema, root, depth = 0) {
  const rule = resolve(schema, root);
  const kind = kindOf(rule);
  if (depth < DEEPEST && kind === "object") return new ObjectView(rule, root, depth);
  if (depth < DEEPEST && kind === "array") return new ArrayView(rule, root, depth);
  if (kind === "enum") return new ChoiceView(rule);
  if (kind === "any") return new AnyView(root, depth);
  return new ScalarView(kind);
}

/** The name of a property for people: its title, or its key with spaces. */
export function labelOf(name, schema) {
  if (typeof schema?.title === "string" && schema.title) return schema.title;
  const words = name.replaceAll(/[_-]+/g, " ").replaceAll(/([a-z])([A-Z])/g, "$1 $2").trim() || name;
  return words[0].toUpperCase() + words.slice(1);
}

class ScalarView {
  constructor(kind) {
    this.element = h("span", { class: `value ${kind} empty` });
    this.shown = null;
  }

  update(value, growing = false) {
    this.element.classList.toggle("growing", growing && typeof value === "string");
    const text = growing && value === "" ? "" : scalarText(value);
    if (text === this.shown) return;
    this.shown = text;
    this.element.classList.remove("empty");
    this.element.classList.toggle("null", value === null);
    this.element.textContent = text;
    if (typeof value === "boolean") this.element.dataset.is = String(value);
  }
}

function scalarText(value) {
  if (value === null) return "null";
  if (typeof value === "boolean") return value ? "Yes" : "No";
  if (value === "") return "(empty)";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

class ChoiceView {
  constructor({ enum: options }) {
    this.options = options.map((option) => [JSON.stringify(option), h("span", { class: "choice" }, String(option))]);
    this.element = h("span", { class: "choices" }, this.options.slice(0, 50).map(([, element]) => element));
  }

  update(value, growing = false) {
    if (growing) return; // half a name could be the wrong one
    const chosen = JSON.stringify(value);
    for (const [option, element] of this.options) {
      element.classList.toggle("chosen", option === chosen);
      if (option !== chosen) continue;
      element.setAttribute("aria-current", "true");
      if (!element.isConnected) this.element.append(element);
    }
  }
}

class ObjectView {
  #rows = new Map();
  #done = 0;

  constructor(schema, root, depth) {
    Object.assign(this, { schema, root, depth });
    this.element = h("dl", { class: "object" });
    if (depth < SKELETON) for (const name of Object.keys(schema.properties ?? {})) this.#row(name);
  }

  #row(name) {
    const known = this.schema.properties ?? {};
    const extra = typeof this.schema.additionalProperties === "object" ? this.schema.additionalProperties : {};
    const schema = resolve(Object.hasOwn(known, name) ? known[name] : extra, this.root);
    const inner = view(schema, this.root, this.depth + 1);
    const missing = this.schema.required?.includes(name) ? null : h("span", { class: "muted" }, " optional");
    const term = h("dt", { title: typeof schema.description === "string" ? schema.description : null }, labelOf(name, schema), missing);
    this.element.append(h("div", { class: "entry" }, term, h("dd", null, inner.element)));
    this.#rows.set(name, inner);
    return inner;
  }

  update(value, growing = false) {
    if (value === null || typeof value !== "object") return;
    const names = Object.keys(value);
    // Only the last one can still change; those before it are drawn once more, when they are no longer the last.
    for (let index = Math.max(0, this.#done - 1); index < names.length; index += 1) {
      const name = names[index];
      (this.#rows.get(name) ?? this.#row(name)).update(value[name], growing && index === names.length - 1);
    }
    this.#done = names.length;
  }
}

class ArrayView {
  #items = [];

  constructor(schema, root, depth) {
    Object.assign(this, { schema, root, depth });
    this.element = h("ol", { class: "array" });
  }

  update(value, growing = false) {
    if (!Array.isArray(value)) return;
    for (let index = Math.max(0, this.#items.length - 1); index < value.length; index += 1) {
      if (!this.#items[index]) {
        const inner = view(this.schema.prefixItems?.[index] ?? this.schema.items ?? {}, this.root, this.depth + 1);
        this.#items[index] = inner;
        this.element.append(h("li", null, inner.element));
      }
      this.#items[index].update(value[index], growing && index === value.length - 1);
    }
  }
}

/** Takes its shape from the value, where the schema leaves it open. */
class AnyView {
  #inner = null;

  constructor(root, depth) {
    Object.assign(this, { root, depth });
    this.element = h("div", { class: "any" }, h("span", { class: "value empty" }));
  }

  update(value, growing = false) {
    if (value === undefined) return;
    if (!this.#inner) {
      const kind = Array.isArray(value) ? "array" : value !== null && typeof value === "object" ? "object" : typeof value;
      this.#inner = view({ type: kind === "object" || kind === "array" ? kind : "string" }, this.root, this.depth + 1);
      this.element.replaceChildren(this.#inner.element);
    }
    this.#inner.update(value, growing);
  }
}
