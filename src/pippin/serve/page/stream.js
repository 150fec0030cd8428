// One streamed answer: its pieces put together, and how fast they came.

import { streamChat } from "./api.js";

/** The figures of the requests of this page, newest last, for whoever wants to draw them. */
export class Meter extends EventTarget {
  runs = [];

  add(figures) {
    this.runs.push(figures);
    if (this.runs.length > 200) this.runs.shift();
    this.dispatchEvent(new Event("run"));
  }
}

/** The answer of one request as it grows. */
export class Answer {
  text = "";
  reasoning = "";
  calls = []; // {id, name, arguments}
  reason = null; // why it ended, in OpenAI's words
  usage = null;
  firstAfter = null; // seconds
  seconds = 0;
  pieces = 0;

  /** Tokens a second, from the first token on; null while there are too few to tell. */
  get rate() {
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const spent = this.seconds - (this.firstAfter ?? 0);
    return tokens > 3 && spent > 0 ? (tokens - 1) / spent : null;
  }

  /** The figures of this answer, as the live view shows them. */
  get figures() {
    return {
      first: this.firstAfter,
      rate: this.rate,
      read: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
      written: this.usage?.completion_tokens ?? this.pieces,
      reasoning: this.usage?.completion_tokens_details?.reasoning_tokens ?? 0,
      seconds: this.seconds,
    };
  }

  /** The message that goes back to the server with the next request. */
  get message() {
    const tool_calls = this.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
    return { role: "assistant", content: this.text || null, ...(tool_calls.length ? { tool_calls } : {}) };
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return {};
    if (choice.finish_reason) this.reason = choice.finish_reason;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    this.text += delta.content ?? "";
    this.text += delta.refusal ?? "";
    this.reasoning += thought;
    for (const part of delta.tool_calls ?? []) this.#takeCall(part);
    return { text: (delta.content ?? "") + (delta.refusal ?? ""), thought, calls: Boolean(delta.tool_calls?.length) };
  }

  #takeCall(part) {
    const call = (this.calls[part.index ?? this.calls.length] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

/**
 * Ask, and tell about each piece as it comes: `onpiece(piece, answer)`. Returns the answer; where something breaks, the
 * error carries what came until then as `.partial`.
 */
export async function ask(body, { signal, meter, onpiece = () => {} }) {
  const answer = new Answer();
  const begin = performance.now();
  const clock = () => (performance.now() - begin) / 1000;
  try {
    for await (const chunk of streamChat(body, signal)) {
      const piece = answer.take(chunk);
      if (piece.text || piece.thought || piece.calls) {
        answer.firstAfter ??= clock();
        answer.pieces += 1;
      }
      answer.seconds = clock();
      onpiece(piece, answer);
    }
    return answer;
  } catch (error) {
    answer.seconds = clock();
    error.partial = answer;
    throw error;
  } finally {
    if (answer.pieces) meter?.add(answer.figures);
  }
}
