// Building the page: elements from calls, never from strings of HTML, so that no text can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element: attributes as an object (`onclick` and the like are listeners), then children; text stays text. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const PATHS = {
  send: "M12 19V5m-6 6 6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 12a8 8 0 1 1-2.3-5.6M20 4v4h-4",
  check: "m5 12 5 5L19 7",
  cross: "m6 6 12 12M18 6 6 18",
  plus: "M12 5v14M5 12h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  tool: "M14.5 6.5a4 4 0 0 0-5 5L4 17l3 3 5.5-5.5a4 4 0 0 0 5-5L15 12l-3-3z",
  warning: "M12 4 2.5 20h19zM12 10v5m0 2.5v.1",
  down: "M12 5v14m-6-6 6 6 6-6",
  save: "M12 4v11m-5-5 5 5 5-5M5 20h14",
  open: "M12 15V4M7 9l5-5 5 5M5 20h14",
};

/** A line drawing beside a label; hidden from screen readers, which read the label. */
export function icon(name) {
  return svg(
    "svg",
    { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: PATHS[name] }),
  );
}

/** A button with an icon and a label; `quiet` shows the icon only and keeps the label as its name. */
export function button(label, { image = null, quiet = false, ...attributes } = {}) {
  const inside = [image && icon(image), quiet ? null : h("span", null, label)];
  const named = quiet ? { "aria-label": label, title: label } : {};
  return h("button", { type: "button", ...named, ...attributes }, ...inside);
}

let serial = 0;

/** A label above a control, joined by an id, with an optional hint that screen readers read too. */
export function field(label, control, hint = null) {
  control.id ||= `field-${++serial}`;
  const note = hint && h("p", { class: "hint", id: `${control.id}-hint` }, hint);
  if (note) control.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, note);
}

/** Say something to screen readers, once, when they have finished what they are saying. */
export function announce(text) {
  const region = document.getElementById("announcer");
  region.textContent = "";
  requestAnimationFrame(() => (region.textContent = text));
}

/** Call a function at most once a frame, however often it is asked for; `.now()` does it at once. */
export function throttled(work) {
  let frame = 0;
  const run = () => {
    frame = 0;
    work();
  };
  const ask = () => {
    frame ||= requestAnimationFrame(run);
  };
  ask.now = () => {
    if (frame) cancelAnimationFrame(frame);
    run();
  };
  return ask;
}

/** Copy text, also where the clipboard's own interface needs a secure address and this page has none. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "unseen", "aria-hidden": "true", tabindex: "-1", value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser did not allow copying");
}

/** Offer a text as a file to save. */
export function download(name, text, type = "application/json") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
