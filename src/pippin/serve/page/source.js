// A text with the parts marked that values were read from.

import { h } from "./dom.js";

/** The text in pieces, each with the spans that cover it; offsets of spans count characters, as the server does. */
export function segments(text, spans) {
  const characters = Array.from(text);
  const inside = spans.filter(({ start, end }) => 0 <= start && start < end && end <= characters.length);
  const cuts = [...new Set([0, characters.length, ...inside.flatMap(({ start, end }) => [start, end])])].sort((a, b) => a - b);
  return cuts.slice(0, -1).map((from, index) => ({
    text: characters.slice(from, cuts[index + 1]).join(""),
    spans: inside.filter(({ start, end }) => start <= from && cuts[index + 1] <= end),
  }));
}

/** The name of a value as programs write it: `lines[0].price`. */
export function nameOf(path) {
  return path.map((part) => (typeof part === "number" ? `[${part}]` : `.${part}`)).join("").replace(/^\./, "");
}

/** What is said of a marked part: the names of its values, and how sure the model is of each. */
export function caption(spans) {
  return spans
    .map(({ path, confidence }) => nameOf(path) + (confidence === null ? "" : ` ${Math.round(100 * confidence)} %`))
    .join(", ");
}

/** The text with its marks; the name of a value stands behind each, for readers of any kind. */
export function sourceView(text, spans) {
  return h("p", { class: "source" }, segments(text, spans).map((piece) =>
    piece.spans.length
      ? h("mark", { title: caption(piece.spans) }, piece.text, h("sup", null, caption(piece.spans)))
      : piece.text));
}
