// What holds for every request: the model, the key, the instructions and the sampling options.

import { ApiError, getJson, key } from "./api.js";
import { button, field, h } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }, "0 to 2; 0 is not random"],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }, "0 to 1"],
  ["top_k", "Top k", { min: 0, step: 1 }, "0 keeps all"],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }, "of one answer"],
  ["seed", "Seed", { step: 1 }, "for equal answers"],
];
const EFFORTS = [
  ["", "Default"],
  ["none", "None"],
  ["low", "Light"],
  ["medium", "Moderate"],
  ["high", "Deep"],
];

/** The settings panel; dispatches "models" when the list of models is there, and "problem" with an error. */
export class Settings extends EventTarget {
  models = [];
  #inputs = {};

  constructor(root) {
    super();
    this.#build(root);
  }

  /** The model that is asked. */
  get model() {
    return this.#inputs.model.value;
  }

  /** What the server tells about the model that is asked. */
  get facts() {
    return this.models.find((each) => each.id === this.model) ?? null;
  }

  get system() {
    return this.#inputs.system.value.trim();
  }

  set system(text) {
    this.#inputs.system.value = text;
  }

  /** The fields of a request; what is left empty is the server's choice. Throws what cannot be sent. */
  request() {
    if (!this.model) throw new ApiError("There is no model to ask yet.", { status: 404 });
    const body = { model: this.model };
    for (const [name, label] of NUMBERS) {
      const input = this.#inputs[name];
      if (!input.checkValidity()) {
        input.reportValidity();
        throw new ApiError(`${label}: ${input.validationMessage}`, { status: 400, param: label });
      }
      if (input.value !== "") body[name] = Number(input.value);
    }
    const stop = this.#inputs.stop.value.split("\n").filter(Boolean);
    if (stop.length) body.stop = stop.slice(0, 4);
    if (this.#inputs.reasoning.value) body.reasoning_effort = this.#inputs.reasoning.value;
    return body;
  }

  /** Ask the server which models it has. */
  async load() {
    this.#inputs.model.setAttribute("aria-busy", "true");
    try {
      const { data } = await getJson("/v1/models");
      this.models = data.filter((each) => (each.kind ?? "chat") !== "encoder");
      const chosen = this.model;
      this.#inputs.model.replaceChildren(...this.models.map(({ id }) => h("option", { value: id }, id)));
      if (this.models.some(({ id }) => id === chosen)) this.#inputs.model.value = chosen;
      this.dispatchEvent(new Event("models"));
    } catch (error) {
      this.dispatchEvent(new CustomEvent("problem", { detail: error }));
    } finally {
      this.#inputs.model.removeAttribute("aria-busy");
    }
  }

  #build(root) {
    const inputs = this.#inputs;
    inputs.model = h("select", { id: "model", onchange: () => this.dispatchEvent(new Event("models")) });
    inputs.system = h("textarea", { id: "system", rows: 4, placeholder: "You are a helpful assistant." });
    inputs.stop = h("textarea", { rows: 2, spellcheck: "false" });
    inputs.reasoning = h("select", { id: "reasoning" }, EFFORTS.map(([value, label]) => h("option", { value }, label)));
    for (const [name, , limits] of NUMBERS)
      inputs[name] = h("input", { id: name, type: "number", placeholder: "default", ...limits });
    inputs.key = h("input", {
      id: "api-key", type: "password", autocomplete: "off", spellcheck: "false", placeholder: "none", value: key.get(),
      onchange: () => {
        key.set(inputs.key.value.trim());
        this.load();
      },
    });
    const numbers = NUMBERS.map(([name, label, , hint]) => field(label, inputs[name], hint));
    root.addEventListener("submit", (event) => event.preventDefault());
    root.append(
      field("Model", inputs.model),
      field("Instructions", inputs.system, "Sent before every conversation, as the system message."),
      h("div", { class: "pairs" }, numbers, field("Thinking", inputs.reasoning, "if the model can")),
      field("Stop texts", inputs.stop, "One a line, at most four: the answer ends before the first of them."),
      field("API key", inputs.key, "Kept in this tab until it closes; needed only if the server has keys."),
      button("Reset options", { class: "plain", onclick: () => this.#reset() }),
    );
  }

  #reset() {
    for (const [name] of NUMBERS) this.#inputs[name].value = "";
    this.#inputs.stop.value = this.#inputs.reasoning.value = "";
  }
}
