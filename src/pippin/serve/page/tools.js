// Tools that the model may ask for: their definitions, the few that run in this page, and the cards that ask for consent.

import { calculate } from "./calculator.js";
import { button, field, h, icon } from "./dom.js";
import { check } from "./schema.js";

const object = (properties, required = []) => ({ type: "object", properties, required, additionalProperties: false });

/** The tools that this page can run by itself. */
export const BUILT_IN = [
  {
    name: "clock",
    description: "The current date and time, in the user's time zone or another one.",
    parameters: object({ time_zone: { type: "string", description: "IANA name such as Europe/Oslo; empty for the user's" } }),
    run: ({ time_zone: zone }) => {
      const options = { dateStyle: "full", timeStyle: "long", ...(zone ? { timeZone: zone } : {}) };
      return new Intl.DateTimeFormat("en-GB", options).format(new Date());
    },
  },
  {
    name: "calculator",
    description: "The value of an arithmetic expression, such as (2 + 3) * sqrt(16) or 7 % 4.",
    parameters: object({ expression: { type: "string" } }, ["expression"]),
    run: ({ expression }) => String(calculate(expression)),
  },
  {
    name: "roll_dice",
    description: "Roll dice and return what each shows, and the sum.",
    parameters: object(
      {
        count: { type: "integer", minimum: 1, maximum: 20 },
        sides: { type: "integer", minimum: 2, maximum: 100 },
      },
      ["count", "sides"],
    ),
    run: ({ count, sides }) => {
      const rolls = Array.from({ length: count }, () => roll(sides));
      return JSON.stringify({ rolls, sum: rolls.reduce((a, b) => a + b, 0) });
    },
  },
];

function roll(sides) {
  // Numbers above the last whole multiple would favor low sides, so they are drawn again.
  const limit = Math.floor(2 ** 32 / sides) * sides;
  for (;;) {
    const [drawn] = crypto.getRandomValues(new Uint32Array(1));
    if (drawn < limit) return (drawn % sides) + 1;
  }
}

const NAME = /^[a-zA-Z0-9_-]{1,64}$/;

/** The tools and which of them are offered; dispatches "change". */
export class Toolbox extends EventTarget {
  tools = BUILT_IN.map((tool) => ({ ...tool, on: false }));
  #root;
  #list = h("ul", { class: "tool-list" });
  #must = h("input", { type: "checkbox", id: "must-call" });
  #log = h("ol", { class: "call-log" });
  #none = h("p", { class: "hint" }, "No calls yet. Switch a tool on and ask for something that needs it.");

  constructor(root) {
    super();
    this.#root = root;
    this.#build();
  }

  get active() {
    return this.tools.filter((tool) => tool.on);
  }

  /** The `tools` of a request, the first of its turn or a later one; nothing where none is on. */
  request(first) {
    const list = this.active.map(({ name, description, parameters }) => ({
      type: "function",
      function: { name, description, parameters },
    }));
    if (!list.length) return {};
    return { tools: list, ...(first && this.#must.checked ? { tool_choice: "required" } : {}) };
  }

  find(name) {
    return this.tools.find((tool) => tool.name === name) ?? null;
  }

  /** Keep a line about a call that was decided. */
  record({ name, arguments: given, outcome, result }) {
    this.#none.remove();
    const words = { approved: "ran", answered: "answered by you", denied: "denied" };
    this.#log.prepend(
      h("li", null,
        h("span", { class: `badge ${outcome}` }, words[outcome]),
        h("code", null, `${name}(${given})`),
        h("p", null, result),
      ),
    );
  }

  #build() {
    const name = h("input", { id: "tool-name", autocomplete: "off", spellcheck: "false", placeholder: "get_weather" });
    const about = h("input", { id: "tool-about", placeholder: "Today's weather in a town" });
    const schema = h("textarea", { id: "tool-schema", rows: 9, spellcheck: "false", class: "mono" });
    schema.value = JSON.stringify(object({ town: { type: "string" } }, ["town"]), null, 2);
    const problem = h("p", { class: "problem", role: "alert" });
    const form = h("form", { class: "card", novalidate: true },
      h("h3", null, "Define a tool"),
      field("Name", name, "Letters, digits, _ and -."),
      field("Description", about, "The model reads this to decide when to call."),
      field("Arguments, as JSON Schema", schema),
      problem,
      h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, icon("plus"), h("span", null, "Add tool"))),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      problem.textContent = this.#add(name.value.trim(), about.value.trim(), schema.value);
      if (!problem.textContent) name.value = about.value = "";
    });
    this.#root.append(
      h("section", { class: "column", "aria-labelledby": "tools-title" },
        h("h2", { id: "tools-title" }, "Tools"),
        h("p", { class: "lead" }, "The model may ask for the tools you switch on. Nothing runs before you approve it, in the conversation."),
        this.#list,
        h("label", { class: "check" }, this.#must, "The model must call a tool before it answers"),
        form,
      ),
      h("section", { class: "column", "aria-labelledby": "log-title" },
        h("h2", { id: "log-title" }, "Calls"), this.#none, this.#log),
    );
    this.#draw();
  }

  #add(name, description, text) {
    if (!NAME.test(name)) return "A name has 1 to 64 letters, digits, _ or -.";
    if (this.find(name)) return `There is a tool “${name}” already.`;
    let parameters;
    try {
      parameters = JSON.parse(text);
    } catch (error) {
      return `The arguments are not JSON: ${error.message}`;
    }
    if (parameters?.type !== "object") return "The arguments' schema must be of type “object”.";
    this.tools.push({ name, description, parameters, run: null, on: true });
    this.#draw();
    return "";
  }

  #draw() {
    this.#list.replaceChildren(...this.tools.map((tool) => this.#row(tool)));
    this.dispatchEvent(new Event("change"));
  }

  #row(tool) {
    const id = `tool-${tool.name}`;
    const flip = (event) => {
      tool.on = event.target.checked;
      this.dispatchEvent(new Event("change"));
    };
    const remove = () => {
      this.tools = this.tools.filter((each) => each !== tool);
      this.#draw();
    };
    const names = Object.keys(tool.parameters.properties ?? {}).join(", ");
    return h("li", { class: "card tool" },
      h("input", { type: "checkbox", role: "switch", class: "switch", id, checked: tool.on, onchange: flip }),
      h("label", { for: id },
        h("strong", { class: "mono" }, tool.name, h("span", { class: "muted" }, `(${names})`)),
        h("span", { class: "muted" }, tool.description || "No description."),
      ),
      tool.run
        ? h("span", { class: "badge" }, "runs here")
        : button(`Remove ${tool.name}`, { image: "trash", quiet: true, class: "quiet", onclick: remove }),
    );
  }
}

/** A card for one call; `decide()` resolves to {arguments, outcome, result} once the user has decided. */
export class CallCard {
  element;
  #call;
  #tool;
  #shown;
  #actions = h("div", { class: "row" });
  #state = h("span", { class: "badge" }, "asks for approval");
  #settle;
  #decision = new Promise((settle) => (this.#settle = settle));

  constructor(call, tool) {
    this.#call = call;
    this.#tool = tool;
    this.#shown = h("pre", { class: "arguments", tabindex: "0", role: "region", "aria-label": "Arguments" });
    this.element = h("section", { class: "card call", "aria-label": `Call of ${call.name}` },
      h("header", null, icon("tool"), h("strong", { class: "mono" }, call.name), this.#state),
      this.#shown,
      this.#actions,
    );
    this.update();
  }

  /** Show the arguments as they are now. */
  update() {
    let text = this.#call.arguments;
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // They are still being written.
    }
    this.#shown.textContent = text || "{}";
  }

  /** Ask the user. Rejects when `signal` ends the wait. */
  decide(signal) {
    this.update();
    signal.addEventListener("abort", () => this.#finish("stopped", null, ""), { once: true });
    this.#ask();
    return this.#decision;
  }

  focus() {
    this.#actions.querySelector("button, textarea, input")?.focus();
  }

  #problems() {
    let value;
    try {
      value = JSON.parse(this.#call.arguments || "{}");
    } catch (error) {
      return { value: null, found: [{ path: "The arguments", message: `are not JSON (${error.message})` }] };
    }
    return { value, found: this.#tool ? check(value, this.#tool.parameters) : [{ path: this.#call.name, message: "is not a tool here" }] };
  }

  #ask() {
    const { found } = this.#problems();
    const approve = button("Approve", { image: "check", class: "primary", disabled: found.length > 0, onclick: () => this.#approve() });
    this.#show(
      found.length ? h("p", { class: "problem" }, found.map(({ path, message }) => `${path} ${message}`).join("; ")) : null,
      approve,
      button("Deny", { image: "cross", onclick: () => this.#askReason() }),
      button("Edit", { image: "edit", class: "plain", onclick: () => this.#edit() }),
    );
  }

  #show(...parts) {
    const had = this.#actions.contains(document.activeElement);
    this.#actions.replaceChildren(...parts.filter(Boolean));
    if (had) this.focus();
  }

  #approve() {
    if (!this.#tool.run) return this.#askResult();
    const { value } = this.#problems();
    try {
      this.#finish("approved", "ran", this.#tool.run(value));
    } catch (error) {
      this.#finish("approved", "failed", `The tool failed: ${error.message}`);
    }
  }

  #askResult() {
    const area = h("textarea", { rows: 3, placeholder: "What the tool returns" });
    const give = () => this.#finish("answered", "answered by you", area.value);
    this.#show(
      field(`Result of ${this.#call.name}`, area, "This page cannot run this tool, so say what it returns."),
      button("Give result", { image: "check", class: "primary", onclick: give }),
      button("Back", { class: "plain", onclick: () => this.#ask() }),
    );
  }

  #askReason() {
    const input = h("input", { placeholder: "optional" });
    const deny = () => {
      const why = input.value.trim();
      this.#finish("denied", "denied", `The user denied this call${why ? `: ${why}` : "."} Do not repeat it; answer without it or ask.`);
    };
    input.addEventListener("keydown", (event) => event.key === "Enter" && !event.isComposing && (event.preventDefault(), deny()));
    this.#show(
      field("Why not? The model will be told", input),
      button("Deny call", { image: "cross", class: "danger", onclick: deny }),
      button("Back", { class: "plain", onclick: () => this.#ask() }),
    );
  }

  #edit() {
    const area = h("textarea", { rows: Math.min(14, this.#shown.textContent.split("\n").length + 1), class: "mono", spellcheck: "false" });
    area.value = this.#shown.textContent;
    const problem = h("p", { class: "problem", role: "alert" });
    const before = this.#call.arguments;
    const keep = () => {
      this.#call.arguments = area.value;
      const { value, found } = this.#problems();
      problem.textContent = found.map(({ path, message }) => `${path} ${message}`).join("; ");
      if (found.length) {
        this.#call.arguments = before;
        return;
      }
      this.#call.arguments = JSON.stringify(value);
      this.update();
      this.#ask();
    };
    this.#show(
      field("Arguments", area), problem,
      button("Keep changes", { image: "check", class: "primary", onclick: keep }),
      button("Back", { class: "plain", onclick: () => this.#ask() }),
    );
  }

  #finish(outcome, word, result) {
    const had = this.#actions.contains(document.activeElement);
    this.#state.textContent = word ?? "stopped";
    this.#state.className = `badge ${outcome}`;
    this.#actions.replaceChildren();
    this.#actions.remove();
    if (word) this.element.append(h("div", { class: "result" }, h("span", { class: "muted" }, "Result"), h("pre", { tabindex: "0", role: "region", "aria-label": "Result" }, result)));
    if (had) document.getElementById("prompt")?.focus();
    this.#settle({ arguments: this.#call.arguments, outcome, result });
  }
}
