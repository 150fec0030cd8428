// Reading JSON while it is being written.
//
// Each character is looked at once. A string may be shown while it grows; a number, a literal, half an escape or half
// of a surrogate pair is held back until it is whole, so a value that was shown is never taken back. The rules are those
// of `pippin.session.types.partial_json`, and a test holds the two together at every cut of many texts.

const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };
const LITERALS = { true: true, false: false, null: null };
const NUMBER = /^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$/;
const SPACE = " \t\n\r";

function put(container, step, value) {
  // A key such as "__proto__" is data here, and must not reach the setter of that name.
  if (Array.isArray(container)) container[step] = value;
  else Object.defineProperty(container, step, { value, writable: true, enumerable: true, configurable: true });
}

export class JsonReader {
  /** The value so far; undefined while nothing can be told. Containers in it are filled in place. */
  value = undefined;
  /** Whether the text is whole. */
  complete = false;

  #open = []; // containers that are not closed yet, outermost first
  #steps = []; // for each, the key or index that is being written
  #state = "value"; // what may come next: value, first, key, colon, next, end; or string, bare within a token
  #isKey = false;
  #text = ""; // the string or bare token that is being read
  #escape = ""; // an escape whose end is missing
  #high = ""; // the first half of a surrogate pair

  /** The path of the value that is being written, outermost first. */
  get path() {
    return [...this.#steps];
  }

  /** Read on. Throws a SyntaxError where no continuation could make this JSON. */
  push(piece) {
    for (const character of piece.split("")) this.#take(character);
    if (this.#state === "string" && !this.#isKey) this.#place(this.#text);
    return this;
  }

  /** Say that no more text comes: a number by itself is whole only now. */
  finish() {
    if (this.#state === "bare") this.#endBare();
    return this;
  }

  #fail(character) {
    throw new SyntaxError(`${JSON.stringify(character)} cannot stand here`);
  }

  #take(character) {
    if (this.#state === "string") return this.#inString(character);
    if (this.#state === "bare") {
      if (!" \t\n\r,]}".includes(character)) {
        this.#text += character;
        // A literal is whole with its last letter; of a number, more may follow.
        if (Object.hasOwn(LITERALS, this.#text)) this.#endBare();
        return;
      }
      this.#endBare();
    }
    if (SPACE.includes(character)) return;
    this.#structure(character);
  }

  #structure(character) {
    const state = this.#state;
    const inside = this.#open.at(-1);
    if (state === "next" && character === ",") {
      if (Array.isArray(inside)) this.#steps[this.#steps.length - 1] += 1;
      this.#state = Array.isArray(inside) ? "value" : "key";
    } else if ((state === "next" || state === "first") && character === (Array.isArray(inside) ? "]" : "}")) {
      this.#close();
    } else if (state === "colon" && character === ":") {
      this.#state = "value";
    } else if (character === '"' && state !== "colon" && state !== "next" && state !== "end") {
      this.#isKey = state === "key" || (state === "first" && !Array.isArray(inside));
      [this.#state, this.#text, this.#escape, this.#high] = ["string", "", "", ""];
    } else if (state === "value" || (state === "first" && Array.isArray(inside))) {
      this.#begin(character);
    } else {
      this.#fail(character);
    }
  }

  #begin(character) {
    if (character === "{" || character === "[") {
      const container = character === "[" ? [] : {};
      this.#place(container);
      this.#open.push(container);
      this.#steps.push(character === "[" ? 0 : "");
      this.#state = "first";
    } else if (/[-0-9tfn]/.test(character)) {
      [this.#state, this.#text] = ["bare", character];
    } else {
      this.#fail(character);
    }
  }

  #inString(character) {
    if (this.#escape) {
      this.#escape += character;
      if (this.#escape[1] === "u") {
        if (this.#escape.length > 2 && !/[0-9a-fA-F]/.test(character)) this.#fail(character);
        if (this.#escape.length === 6) this.#unit(String.fromCharCode(parseInt(this.#escape.slice(2), 16)));
        else return;
      } else if (character in ESCAPES) {
        this.#unit(ESCAPES[character]);
      } else {
        this.#fail(character);
      }
      this.#escape = "";
    } else if (character === "\\") {
      this.#escape = "\\";
    } else if (character === '"') {
      this.#flush();
      this.#endString();
    } else if (character < " ") {
      this.#fail(character);
    } else {
      this.#unit(character);
    }
  }

  /** Add one UTF-16 unit; the first half of a pair waits for the second. */
  #unit(unit) {
    this.#flush();
    if (unit >= "\ud800" && unit <= "\udbff") this.#high = unit;
    else this.#text += unit;
  }

  #flush() {
    this.#text += this.#high;
    this.#high = "";
  }

  #endString() {
    if (this.#isKey) {
      this.#steps[this.#steps.length - 1] = this.#text;
      this.#state = "colon";
    } else {
      this.#place(this.#text);
      this.#after();
    }
  }

  #endBare() {
    const text = this.#text;
    if (Object.hasOwn(LITERALS, text)) this.#place(LITERALS[text]);
    else if (NUMBER.test(text)) this.#place(Number(text));
    else this.#fail(text);
    this.#after();
  }

  #close() {
    this.#open.pop();
    this.#steps.pop();
    this.#after();
  }

  #after() {
    this.complete = this.#open.length === 0;
    this.#state = this.complete ? "end" : "next";
  }

  #place(value) {
    if (this.#open.length === 0) this.value = value;
    else put(this.#open.at(-1), this.#steps.at(-1), value);
  }
}
