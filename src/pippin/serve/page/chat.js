// The conversation: turns, the loop through tool calls, and what can be done with each message.
//
// It lives in this page only. A turn is what the user said and all that followed: answers, calls and their results.

import { ApiError } from "./api.js";
import { announce, button, copyText, download, h, icon } from "./dom.js";
import { figuresLine, problemCard, Reply } from "./reply.js";
import { ask } from "./stream.js";
import { CallCard } from "./tools.js";

const MOST_ROUNDS = 8;
const FORMAT = "pippin-conversation";

const STARTERS = [
  ["Explain", "Explain in three sentences how a bicycle stays upright."],
  ["Write", "Write a short, friendly reminder that the library books are due on Friday."],
  ["Sort", "Make a table of three fruits with their color and season."],
  ["Code", "Write a Python function that returns the n-th Fibonacci number."],
];

/** The chat view; dispatches "busy" whenever it begins or ends to work. */
export class Chat extends EventTarget {
  turns = []; // {user, entries, userElement, replyElement}
  #running = null; // the AbortController of what runs
  #pinned = true;

  constructor({ settings, toolbox, meter, onproblem }) {
    super();
    Object.assign(this, { settings, toolbox, meter, onproblem });
    this.log = document.getElementById("log");
    this.prompt = document.getElementById("prompt");
    this.sendButton = document.getElementById("send");
    this.#wire();
    this.#welcome();
  }

  get busy() {
    return this.#running !== null;
  }

  /** End what runs; what came so far stays. */
  stop() {
    this.#running?.abort();
  }

  // --- sending -------------------------------------------------------------------------------------------------------

  async send(text) {
    if (this.busy || !text.trim()) return;
    const turn = { user: text, entries: [] };
    this.turns.push(turn);
    this.#drawUser(turn);
    await this.#run(turn);
  }

  async #run(turn) {
    const controller = new AbortController();
    this.#setRunning(controller);
    this.#pinned = true;
    const reply = new Reply(this.settings.model);
    turn.replyElement?.remove();
    turn.replyElement = reply.element;
    turn.userElement.after(reply.element);
    turn.entries = [];
    let trouble = null;
    try {
      await this.#rounds(turn, reply, controller.signal);
    } catch (error) {
      if (error.name === "AbortError") reply.note("Stopped.");
      else trouble = error;
    }
    reply.close();
    if (trouble) this.#showTrouble(turn, reply, trouble);
    this.#addReplyActions(turn, reply);
    this.#setRunning(null);
    if (!trouble) announce(`Answer: ${reply.text.slice(0, 1500) || "nothing"}`);
  }

  async #rounds(turn, reply, signal) {
    for (let round = 0; round < MOST_ROUNDS; round += 1) {
      const body = { ...this.settings.request(), messages: this.#messages(turn), ...this.toolbox.request(round === 0) };
      const answer = await this.#oneAnswer(turn, reply, body, signal);
      if (!answer.calls.length) return;
      await this.#decideCalls(turn, reply, answer, signal);
    }
    reply.note(`The model asked for tools ${MOST_ROUNDS} times in a row, so the page stopped here.`);
  }

  async #oneAnswer(turn, reply, body, signal) {
    const cards = [];
    reply.begin();
    const onpiece = (piece, answer) => {
      reply.push(piece);
      if (piece.calls) this.#drawCalls(reply, answer, cards);
    };
    try {
      const answer = await ask(body, { signal, meter: this.meter, onpiece });
      reply.figures = answer.figures;
      reply.ended(answer.reason);
      turn.entries.push({ ...answer.message, content: answer.text || (answer.calls.length ? null : "") });
      answer.cards = cards;
      return answer;
    } catch (error) {
      const partial = error.partial;
      cards.forEach((card) => card.element.remove());
      if (partial?.text) turn.entries.push({ role: "assistant", content: partial.text });
      if (partial) reply.figures = partial.figures;
      throw error;
    }
  }

  #drawCalls(reply, answer, cards) {
    answer.calls.forEach((call, index) => {
      if (!cards[index]) {
        cards[index] = new CallCard(call, this.toolbox.find(call.name));
        reply.add(cards[index].element);
      }
      cards[index].update();
    });
  }

  async #decideCalls(turn, reply, answer, signal) {
    const before = turn.entries.length - 1;
    const names = answer.calls.map((call) => call.name).join(" and ");
    announce(`The model asks to call ${names}. Approve, deny or edit it in the conversation.`);
    const waiting = answer.cards.map((card) => card.decide(signal));
    // The focus goes to the decision only if it would not be taken from something the user is writing.
    if (document.activeElement === document.body || (document.activeElement === this.prompt && !this.prompt.value)) answer.cards[0].focus();
    const decisions = await Promise.all(waiting);
    if (signal.aborted) {
      turn.entries.length = before;
      throw new DOMException("stopped", "AbortError");
    }
    // The user may have changed the arguments, and the model should see what was really called.
    turn.entries[before] = { ...answer.message };
    decisions.forEach((decision, index) => {
      const call = answer.calls[index];
      turn.entries.push({ role: "tool", tool_call_id: call.id, content: decision.result });
      this.toolbox.record({ name: call.name, ...decision });
    });
  }

  #messages(last) {
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    const turns = this.turns.slice(0, this.turns.indexOf(last) + 1);
    return [...system, ...turns.flatMap((turn) => [{ role: "user", content: turn.user }, ...turn.entries])];
  }

  #showTrouble(turn, reply, error) {
    if (!(error instanceof ApiError)) console.error(error);
    reply.add(problemCard(error, { again: () => this.#again(turn), settings: this.onproblem }));
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  #drawUser(turn) {
    document.getElementById("welcome")?.remove();
    const body = h("div", { class: "bubble" }, turn.user);
    const actions = h("div", { class: "actions" },
      this.#copyButton("Copy message", () => turn.user),
      button("Edit message", { image: "edit", quiet: true, class: "quiet", onclick: () => this.#edit(turn) }),
    );
    const element = h("article", { class: "message user", "aria-label": "You" }, body, actions);
    if (turn.userElement?.isConnected) turn.userElement.replaceWith(element);
    else this.log.append(element);
    turn.userElement = element;
  }

  #addReplyActions(turn, reply) {
    reply.element.append(
      h("footer", { class: "actions" },
        reply.text ? this.#copyButton("Copy answer", () => reply.text) : null,
        button("Regenerate answer", { image: "again", quiet: true, class: "quiet", onclick: () => this.#again(turn) }),
        reply.figures?.written ? figuresLine(reply.figures) : null,
      ),
    );
  }

  #copyButton(label, text) {
    const copy = async () => {
      try {
        await copyText(text());
        announce("Copied.");
        control.classList.add("done");
        setTimeout(() => control.classList.remove("done"), 1200);
      } catch (error) {
        this.onproblem(error);
      }
    };
    const control = button(label, { image: "copy", quiet: true, class: "quiet", onclick: copy });
    return control;
  }

  #again(turn) {
    if (this.busy) return;
    this.#dropAfter(turn);
    this.prompt.focus();
    this.#run(turn);
  }

  #dropAfter(turn) {
    for (const later of this.turns.splice(this.turns.indexOf(turn) + 1)) {
      later.userElement.remove();
      later.replyElement?.remove();
    }
  }

  #edit(turn) {
    if (this.busy) return;
    const area = h("textarea", { rows: Math.min(10, turn.user.split("\n").length + 1), "aria-label": "Edit message" });
    area.value = turn.user;
    const back = () => {
      this.#drawUser(turn);
      turn.userElement.querySelector("button:last-of-type").focus();
    };
    const resend = () => {
      if (this.busy || !area.value.trim()) return;
      turn.user = area.value;
      this.#drawUser(turn);
      this.#again(turn);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      resend();
    });
    turn.userElement.replaceChildren(
      h("div", { class: "editor" }, area,
        h("div", { class: "row" },
          button("Resend", { image: "send", class: "primary", onclick: resend }),
          button("Cancel", { class: "plain", onclick: back }),
          h("span", { class: "hint" }, "What came after this message is dropped."),
        )),
    );
    area.focus();
  }

  #welcome() {
    const start = (text) => {
      this.prompt.value = text;
      this.prompt.focus();
      this.prompt.dispatchEvent(new Event("input"));
    };
    this.log.append(
      h("div", { id: "welcome" },
        h("h2", null, "What can I help you with?"),
        h("p", { class: "lead" }, "This page talks to the server it came from and to nothing else. The conversation stays in this tab: close it, and it is gone."),
        h("div", { class: "starters" }, STARTERS.map(([label, text]) =>
          h("button", { type: "button", class: "card", onclick: () => start(text) }, h("strong", null, label), h("span", null, text)))),
      ),
    );
  }

  // --- the whole conversation ----------------------------------------------------------------------------------------

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
    this.#welcome();
    this.prompt.focus();
  }

  save() {
    const turns = this.turns.map(({ user, entries }) => ({ user, entries }));
    const whole = { format: FORMAT, version: 1, model: this.settings.model, instructions: this.settings.system, turns };
    download("conversation.json", JSON.stringify(whole, null, 2));
  }

  /** Show a saved conversation. Throws an Error that says what is wrong with the file. */
  open(text) {
    const turns = parseConversation(text);
    this.clear();
    this.settings.system = turns.instructions;
    for (const { user, entries } of turns.list) {
      const turn = { user, entries };
      this.turns.push(turn);
      this.#drawUser(turn);
      const reply = new Reply(turns.model);
      reply.replay(entries);
      turn.replyElement = reply.element;
      turn.userElement.after(reply.element);
      this.#addReplyActions(turn, reply);
    }
  }

  // --- controls ------------------------------------------------------------------------------------------------------

  #setRunning(controller) {
    this.#running = controller;
    this.log.setAttribute("aria-busy", String(this.busy));
    this.sendButton.replaceChildren(icon(this.busy ? "stop" : "send"));
    const label = this.busy ? "Stop (Escape)" : "Send (Enter)";
    this.sendButton.setAttribute("aria-label", label);
    this.sendButton.title = label;
    this.sendButton.classList.toggle("stop", this.busy);
    this.dispatchEvent(new Event("busy"));
  }

  #wire() {
    const submit = () => {
      if (this.busy) return this.stop();
      const text = this.prompt.value;
      if (!text.trim()) return this.prompt.focus();
      this.prompt.value = "";
      this.prompt.dispatchEvent(new Event("input"));
      this.send(text);
    };
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.busy) submit();
    });
    this.prompt.addEventListener("input", () => {
      this.prompt.style.height = "auto";
      this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, 240)}px`;
    });
    this.#followTheEnd();
  }

  #followTheEnd() {
    const down = document.getElementById("to-end");
    const view = this.log.parentElement;
    const follow = () => {
      if (this.#pinned && this.turns.length) view.scrollTop = view.scrollHeight;
    };
    let last = 0;
    view.addEventListener("scroll", () => {
      // Text that grows leaves the end behind without anyone having scrolled: only a move upwards lets go of it.
      const near = view.scrollHeight - view.scrollTop - view.clientHeight < 48;
      if (near || view.scrollTop < last) this.#pinned = near;
      last = view.scrollTop;
      down.hidden = this.#pinned;
    });
    down.addEventListener("click", () => {
      this.#pinned = true;
      follow();
      this.prompt.focus();
    });
    const sizes = new ResizeObserver(follow);
    sizes.observe(this.log);
    sizes.observe(view);
  }
}

/** The parts of a saved conversation. Throws an Error where the file is none. */
export function parseConversation(text) {
  let whole;
  try {
    whole = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON; choose one that was saved with “Save conversation”.");
  }
  if (whole?.format !== FORMAT || !Array.isArray(whole.turns)) throw new Error("The file is not a saved conversation.");
  if (whole.version !== 1) throw new Error(`The file has version ${whole.version}; this page reads version 1.`);
  const isEntry = (entry) =>
    ["assistant", "tool"].includes(entry?.role) && (entry.content === null || typeof entry.content === "string");
  const isTurn = (turn) => typeof turn?.user === "string" && Array.isArray(turn.entries) && turn.entries.every(isEntry);
  if (!whole.turns.every(isTurn)) throw new Error("The file holds something that is not a message.");
  return { model: String(whole.model ?? ""), instructions: String(whole.instructions ?? ""), list: whole.turns };
}
