// A schema made by filling in fields: one row each, nested for objects and lists of them.

import { button, h } from "./dom.js";
import { fromFields, toFields } from "./schema.js";

const TYPES = [
  ["string", "Text"],
  ["integer", "Whole number"],
  ["number", "Number"],
  ["boolean", "Yes or no"],
  ["enum", "One of"],
  ["array", "List"],
  ["object", "Group"],
];
const DEEPEST = 4;

/** The rows of one object; `.schema` is what they say, `onchange` is called when it changes. */
export class Builder {
  element = h("div", { class: "builder" });
  #rows = [];
  #list = h("ul", { class: "rows" });

  constructor(onchange, depth = 0) {
    this.onchange = onchange;
    this.depth = depth;
    const add = button("Add field", { image: "plus", class: "plain", onclick: () => this.#add().focus() });
    this.element.append(this.#list, add);
  }

  get fields() {
    return this.#rows.map((row) => row.field);
  }

  get schema() {
    return fromFields(this.fields);
  }

  /** Show a schema. False where there is something in it that rows cannot say; then nothing changes. */
  show(schema) {
    const fields = toFields(schema);
    if (!fields) return false;
    this.fill(fields);
    return true;
  }

  fill(fields) {
    this.#rows = [];
    this.#list.replaceChildren();
    for (const each of fields) this.#add(each);
  }

  #add(field = { name: "", type: "string", required: true, description: "" }) {
    const remove = (row) => {
      this.#rows = this.#rows.filter((each) => each !== row);
      row.element.remove();
      this.element.querySelector(":scope > button").focus();
      this.onchange();
    };
    const row = new Row(field, this.onchange, remove, this.depth);
    this.#rows.push(row);
    this.#list.append(row.element);
    return row;
  }
}

class Row {
  constructor(field, onchange, remove, depth) {
    this.onchange = onchange;
    this.depth = depth;
    const changed = () => onchange();
    const types = depth < DEEPEST ? TYPES : TYPES.filter(([type]) => type !== "object" && type !== "array");
    const options = (list) => list.map(([value, label]) => h("option", { value }, label));
    this.name = h("input", { "aria-label": "Name", placeholder: "name", value: field.name, spellcheck: "false", autocomplete: "off", oninput: changed });
    this.type = h("select", { "aria-label": "Type", onchange: () => this.#shape({}) }, options(types));
    this.type.value = field.type;
    this.required = h("input", { type: "checkbox", checked: field.required, onchange: changed });
    this.about = h("input", { "aria-label": "Description", placeholder: "description (optional)", value: field.description, oninput: changed });
    this.item = h("select", { "aria-label": "Items", onchange: () => this.#shape({}) }, options(types.filter(([type]) => type !== "array")));
    this.item.value = field.item ?? "string";
    this.options = h("input", { "aria-label": "Allowed values", placeholder: "red, green, blue", oninput: changed, value: (field.options ?? []).join(", ") });
    this.extra = h("div", { class: "extra" });
    const drop = button("Remove field", { image: "trash", quiet: true, class: "quiet", onclick: () => remove(this) });
    this.element = h("li", { class: "builder-row" },
      h("div", { class: "builder-line" }, this.name, this.type, h("label", { class: "check" }, this.required, "required"), drop),
      this.about,
      this.extra,
    );
    this.#shape(field);
  }

  get field() {
    const options = [...new Set(this.options.value.split(",").map((each) => each.trim()).filter(Boolean))];
    return {
      name: this.name.value.trim(),
      type: this.type.value,
      required: this.required.checked,
      description: this.about.value.trim(),
      item: this.item.value,
      options: options.length ? options : ["…"],
      fields: this.inner?.fields,
    };
  }

  focus() {
    this.name.focus();
  }

  #shape(field) {
    const list = this.type.value === "array";
    const kind = list ? this.item.value : this.type.value;
    this.inner = null;
    this.extra.replaceChildren();
    if (list) this.extra.append(h("label", { class: "check" }, "of", this.item));
    if (kind === "enum") this.extra.append(this.options);
    if (kind === "object") {
      this.inner = new Builder(this.onchange, this.depth + 1);
      this.inner.fill(field.fields ?? []);
      this.extra.append(this.inner.element);
    }
    if (!("type" in field)) this.onchange();
  }
}
