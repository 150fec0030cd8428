// What the server does now, and how this page's own requests went: small charts, each with its figures in words.

import { getJson } from "./api.js";
import { h, svg } from "./dom.js";

const EVERY = 1000; // milliseconds between two looks
const [WIDTH, HEIGHT] = [320, 72];

const whole = (value) => Math.round(value).toLocaleString("en");
const bytes = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : `${(value / 1e6).toFixed(0)} MB`);
const share = (part, all) => (all ? (100 * part) / all : 0);

/** One chart: a title, a figure, a line of the last values, and the same in a sentence. */
class Chart {
  constructor(id, title, unit, { most = null, digits = 0, kept = 60 } = {}) {
    Object.assign(this, { title, unit, most, digits, kept, values: [] });
    this.now = h("p", { class: "figure" }, "–");
    this.note = h("p", { class: "muted" }, "no data yet");
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.drawing = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: no data yet` }, this.area, this.line);
    this.element = h("section", { class: "card gauge", "aria-labelledby": `gauge-${id}` }, h("h3", { id: `gauge-${id}` }, title), this.now, this.drawing, this.note);
  }

  format(value) {
    return `${value.toFixed(this.digits)}${this.unit}`;
  }

  add(value, note, shown = this.format(value)) {
    this.values.push(value);
    if (this.values.length > this.kept) this.values.shift();
    this.now.textContent = shown;
    this.note.textContent = note;
    this.#draw();
  }

  #draw() {
    const top = this.most ?? Math.max(1, ...this.values) * 1.15;
    const step = WIDTH / (this.kept - 1);
    const start = WIDTH - (this.values.length - 1) * step;
    const points = this.values.map((value, index) => [start + index * step, HEIGHT - 2 - (Math.min(value, top) / top) * (HEIGHT - 8)]);
    const path = points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    this.line.setAttribute("d", points.length > 1 ? path : "");
    this.area.setAttribute("d", points.length > 1 ? `${path}L${WIDTH} ${HEIGHT}L${start.toFixed(1)} ${HEIGHT}Z` : "");
    const [least, most] = [Math.min(...this.values), Math.max(...this.values)];
    const words = `${this.title}: now ${this.format(this.values.at(-1))}; of the last ${this.values.length} values least ${this.format(least)}, most ${this.format(most)}`;
    this.drawing.setAttribute("aria-label", words);
  }
}

/** The live view; it asks the server only while it is in sight. */
export class Live {
  #timer = 0;
  #state = h("span", { class: "badge" }, "waiting");
  #table = h("tbody");
  #models = h("tbody");
  #totals = { read: 0, cached: 0, written: 0 };
  #sum = h("p", { class: "muted", id: "totals" }, "No request from this page yet.");

  constructor(root, { meter }) {
    this.charts = {
      rate: new Chart("rate", "Tokens per second, all requests", "", { digits: 1 }),
      busy: new Chart("busy", "Answers being written", ""),
      waiting: new Chart("waiting", "Requests waiting", ""),
      cache: new Chart("cache", "Cache in use", " %", { most: 100, digits: 1 }),
      first: new Chart("first", "Time to first token, this page", " s", { digits: 2, kept: 20 }),
      own: new Chart("own", "Tokens per second, this page", "", { digits: 1, kept: 20 }),
    };
    const columns = (...names) => h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col" }, name))));
    root.append(
      h("div", { class: "title-row" }, h("h2", null, "Server"), this.#state),
      h("div", { class: "gauges" }, Object.values(this.charts).map((chart) => chart.element)),
      h("section", { "aria-labelledby": "runs-title" },
        h("h2", { id: "runs-title" }, "Requests of this page"), this.#sum,
        h("div", { class: "table", tabindex: "0", role: "region", "aria-labelledby": "runs-title" },
          h("table", null, columns("Tokens in", "Cached", "Tokens out", "First token", "Tokens/s", "Seconds"), this.#table))),
      h("section", { "aria-labelledby": "models-title" },
        h("h2", { id: "models-title" }, "Models"),
        h("div", { class: "table", tabindex: "0", role: "region", "aria-labelledby": "models-title" },
          h("table", null, columns("Name", "Kind", "State", "Context", "Memory"), this.#models))),
    );
    meter.addEventListener("run", () => this.#addRun(meter.runs.at(-1)));
  }

  /** Begin or end to look. */
  show(visible) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (visible) this.#look();
  }

  async #look() {
    const mine = (this.#timer = setTimeout(() => {}, 0));
    try {
      if (!document.hidden) this.#draw(await getJson("/v1/stats"));
    } catch (error) {
      this.#setState("denied", error.status === 401 ? "needs an API key" : "no figures");
      this.#state.title = error.message;
    }
    if (this.#timer === mine) this.#timer = setTimeout(() => this.#look(), EVERY);
  }

  #draw(stats) {
    const { cache = {}, memory = {} } = stats;
    this.#setState(stats.draining ? "denied" : "approved", stats.draining ? "stopping" : "live");
    this.charts.rate.add(stats.tokens_per_second, "the server, over the last seconds");
    this.charts.busy.add(stats.active, `of ${stats.max_num_seqs} at once`);
    this.charts.waiting.add(stats.waiting, `room for ${whole(stats.max_queued_requests)} in the queue`);
    this.charts.cache.add(share(cache.tokens_used, cache.tokens_capacity), `${whole(cache.tokens_used)} of ${whole(cache.tokens_capacity)} tokens`);
    this.#models.replaceChildren(...(stats.models ?? []).map((model) => h("tr", null,
      h("th", { scope: "row" }, model.id),
      h("td", null, model.kind),
      h("td", null, model.loaded ? "loaded" : "loads when asked"),
      h("td", null, model.context_size ? whole(model.context_size) : "–"),
      h("td", null, model.bytes ? bytes(model.bytes) : "–"))));
    if (memory.budget) this.#models.append(h("tr", null, h("th", { scope: "row", colspan: 4 }, `All together, of ${bytes(memory.budget)} allowed`), h("td", null, bytes(memory.models ?? 0))));
  }

  #addRun(run) {
    const seconds = (value) => (value === null ? "–" : `${value.toFixed(2)} s`);
    const number = (value) => (value === null ? "–" : whole(value));
    const cells = [number(run.read), number(run.cached), number(run.written), seconds(run.first), run.rate === null ? "–" : run.rate.toFixed(1), run.seconds.toFixed(1)];
    this.#table.prepend(h("tr", null, cells.map((cell) => h("td", null, cell))));
    if (this.#table.children.length > 50) this.#table.lastElementChild.remove();
    if (run.first !== null) this.charts.first.add(run.first, "the last requests of this page");
    if (run.rate !== null) this.charts.own.add(run.rate, "the last requests of this page");
    for (const name of ["read", "cached", "written"]) this.#totals[name] += run[name] ?? 0;
    const { read, cached, written } = this.#totals;
    this.#sum.textContent = `${whole(read)} tokens read, ${whole(cached)} of them from the cache; ${whole(written)} written.`;
  }

  #setState(kind, words) {
    this.#state.className = `badge ${kind}`;
    this.#state.textContent = words;
    this.#state.title = "";
  }
}
