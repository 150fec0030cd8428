// A calculator for the model: an expression is parsed and computed, never run as code.

const CONSTANTS = { pi: Math.PI, e: Math.E };
const FUNCTIONS = {
  sqrt: Math.sqrt, abs: Math.abs, round: Math.round, floor: Math.floor, ceil: Math.ceil,
  sin: Math.sin, cos: Math.cos, tan: Math.tan, ln: Math.log, log: Math.log10, exp: Math.exp,
  min: Math.min, max: Math.max,
};
const TOKEN = /\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([a-z]+)|(\*\*|[-+*/%^(),]))/iy;
const LONGEST = 1000;

function tokens(text) {
  const found = [];
  TOKEN.lastIndex = 0;
  let end = 0;
  while (end < text.trimEnd().length) {
    const match = TOKEN.exec(text);
    if (!match) throw new SyntaxError(`“${text.slice(end).trim()[0]}” is not part of an expression`);
    end = TOKEN.lastIndex;
    if (match[1]) found.push(Number(match[1]));
    else found.push(match[2] ? match[2].toLowerCase() : match[3] === "**" ? "^" : match[3]);
  }
  return found;
}

class Parser {
  constructor(list) {
    this.list = list;
    this.at = 0;
    this.depth = 0;
  }

  take(...wanted) {
    return wanted.includes(this.list[this.at]) ? this.list[this.at++] : null;
  }

  need(wanted) {
    if (this.take(wanted) === null) throw new SyntaxError(`a “${wanted}” is missing`);
  }

  sum() {
    if (++this.depth > 100) throw new SyntaxError("the expression is nested too deeply");
    let value = this.product();
    for (let sign; (sign = this.take("+", "-")); ) value = sign === "+" ? value + this.product() : value - this.product();
    this.depth -= 1;
    return value;
  }

  product() {
    let value = this.signed();
    for (let sign; (sign = this.take("*", "/", "%")); ) {
      const next = this.signed();
      if (next === 0 && sign !== "*") throw new RangeError("division by zero");
      value = sign === "*" ? value * next : sign === "/" ? value / next : value % next;
    }
    return value;
  }

  signed() {
    let negative = false;
    for (let sign; (sign = this.take("-", "+")); ) negative = sign === "-" ? !negative : negative;
    const value = this.power();
    return negative ? -value : value;
  }

  power() {
    const base = this.atom();
    return this.take("^") ? base ** this.signed() : base;
  }

  atom() {
    const token = this.list[this.at++];
    if (typeof token === "number") return token;
    if (token === "(") {
      const value = this.sum();
      this.need(")");
      return value;
    }
    if (Object.hasOwn(CONSTANTS, token ?? "")) return CONSTANTS[token];
    if (Object.hasOwn(FUNCTIONS, token ?? "")) return this.call(FUNCTIONS[token]);
    throw new SyntaxError(token === undefined ? "the expression ends too early" : `“${token}” is not known here`);
  }

  call(work) {
    this.need("(");
    const values = [this.sum()];
    while (this.take(",")) values.push(this.sum());
    this.need(")");
    return work(...values);
  }
}

/** The value of an arithmetic expression. Throws a SyntaxError or RangeError that says what is wrong with it. */
export function calculate(text) {
  if (text.length > LONGEST) throw new RangeError(`the expression is longer than ${LONGEST} characters`);
  const parser = new Parser(tokens(text));
  const value = parser.sum();
  if (parser.at < parser.list.length) throw new SyntaxError(`“${parser.list[parser.at]}” is not expected here`);
  if (!Number.isFinite(value)) throw new RangeError("the result is not a finite number");
  return Number(value.toPrecision(15));
}
