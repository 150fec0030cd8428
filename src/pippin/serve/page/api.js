// Talking to the server this page came from, in OpenAI's protocol: requests, event streams, errors that say what to do.

/** An error of the server, in OpenAI's shape, or of the way to it (`status` 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, type = "", code = "", param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, type, code, param, retryAfter });
  }

  /** What the person in front of the page can do about it. */
  get advice() {
    if (this.status === 0) return "Check that the server still runs, then try again. What you wrote is kept.";
    if (this.status === 401 || this.status === 403) return "Enter a valid API key under Settings.";
    if (this.code === "context_length_exceeded")
      return "Start a new conversation, shorten the message, or lower the answer's maximum length.";
    if (this.status === 404) return "Choose another model under Settings.";
    if (this.status === 413) return "Send less text at once.";
    if (this.status === 429)
      return this.retryAfter ? `Try again in ${this.retryAfter} s.` : "Wait a little, then try again.";
    if (this.status === 503 || this.status === 529) return "The server is busy or still loading: try again in a moment.";
    if (this.status >= 500) return "Try again; the server's log says more.";
    return this.param ? `Change “${this.param}” and try again.` : "Change the request and try again.";
  }
}

/** Reads server-sent events from text that arrives in pieces cut anywhere. */
export class EventReader {
  #rest = "";
  #data = [];

  /** The data of each event that this piece completes. */
  push(text) {
    const events = [];
    this.#rest += text;
    // A carriage return at the very end may be half of a line's end.
    const held = this.#rest.endsWith("\r") ? 1 : 0;
    const lines = this.#rest.slice(0, this.#rest.length - held).split(/\r\n|\r|\n/);
    this.#rest = lines.pop() + (held ? "\r" : "");
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line === "data" || line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

/** The key for the server; kept for this tab only, and gone when it closes. */
export const key = {
  get: () => sessionStorage.getItem("pippin-key") ?? "",
  set: (value) => (value ? sessionStorage.setItem("pippin-key", value) : sessionStorage.removeItem("pippin-key")),
};

async function call(path, { body = null, signal = null } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let answer;
  try {
    const text = body === null ? null : JSON.stringify(body);
    answer = await fetch(path, { method: text === null ? "GET" : "POST", headers, body: text, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

async function failure(answer) {
  const text = await answer.text().catch(() => "");
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // Not JSON: something between this page and the server answered in its place.
  }
  const message = error.message ?? (text.slice(0, 300) || `The server answered with status ${answer.status}.`);
  return new ApiError(message, { status: answer.status, ...error, retryAfter: answer.headers.get("Retry-After") });
}

/** The JSON that a path answers with. */
export async function getJson(path, signal = null) {
  return (await call(path, { signal })).json();
}

/** The JSON that a path answers a body with. */
export async function postJson(path, body, signal = null) {
  return (await call(path, { body, signal })).json();
}

/** The chunks of a streamed completion, in order; ends after the last one. */
export async function* streamChat(body, signal) {
  const answer = await call("/v1/chat/completions", {
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
  });
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  const events = new EventReader();
  let finished = false;
  try {
    while (!finished) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection broke in the middle of the answer.");
      });
      if (done) break;
      for (const data of events.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") finished = true;
        else yield chunkOf(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!finished) throw new ApiError("The server ended the stream before the answer was complete.");
}

function chunkOf(data) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError("The server sent something that is not JSON.", { status: 500 });
  }
  if (chunk.error) throw new ApiError(chunk.error.message ?? "The server reported an error.", { status: 500, ...chunk.error });
  return chunk;
}
