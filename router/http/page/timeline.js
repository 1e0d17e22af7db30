// Requests as bars of phases on one time axis with the events of the cluster.

import { html, svg } from "./dom.js";
import { PHASES, PHASE_NAMES, durationText, plural, timeOfDay } from "./format.js";
import { failed, keyOf, wall } from "./model.js";

const SPANS_S = [["5 s", 5], ["30 s", 30], ["5 min", 300]];
const ROW = 13;
const BAR = 9;
const TOP = 30; // the lane of events
const BOTTOM = 20;
const MAX_ROWS = 24;
const LEAST_ROWS = 6;
const LEAST_WIDTH = 4;
const GAP_S = 0.004; // of the window's length, between two requests of one row

export class Timeline {
  #seconds = 30;
  #selected = null;
  #shown = []; // in the order of arrival
  #model = null;
  #width = 0;

  constructor(place, legend, span, onSelect) {
    this.place = place;
    this.onSelect = onSelect;
    legend.replaceChildren(...PHASES.map((phase) => html("li", {}, html("i", { class: `swatch ${phase}` }), PHASE_NAMES[phase])));
    this.buttons = SPANS_S.map(([text, seconds]) => html("button", {
      type: "button", "aria-pressed": String(seconds === this.#seconds), on: { click: () => this.#zoom(seconds) },
    }, text));
    span.replaceChildren(...this.buttons);
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "Timeline of requests: the arrow keys choose one, Enter opens it, Escape closes it");
    place.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - this.#width) < 1) return;
      this.#width = entry.contentRect.width;
      this.#draw();
    }).observe(place);
  }

  show(model) {
    this.#model = model;
    this.#draw();
  }

  select(request) {
    this.#selected = request ? keyOf(request) : null;
    this.#draw();
    this.onSelect(request);
  }

  #zoom(seconds) {
    this.#seconds = seconds;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(SPANS_S[index][1] === seconds)));
    this.#draw();
  }

  #onKey(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.select(null);
    else if (event.key === "Enter" && this.#selected) document.getElementById("detail").focus();
    else if (step && this.#shown.length) {
      event.preventDefault();
      const at = this.#shown.findIndex((request) => keyOf(request) === this.#selected);
      const next = at < 0 ? this.#shown.length - 1 : Math.min(this.#shown.length - 1, Math.max(0, at + step));
      this.select(this.#shown[next]);
    }
  }

  #draw() {
    if (!this.#model || this.#width < 50) return;
    const now = this.#model.now(performance.now());
    const from = now - this.#seconds;
    const rows = pack(this.#model.requests().filter((request) => request.arrived_s + wall(request) > from), this.#seconds);
    this.#shown = rows.placed.map(([request]) => request);
    const numRows = Math.min(MAX_ROWS, Math.max(LEAST_ROWS, rows.number));
    const height = TOP + numRows * ROW + BOTTOM;
    const x = (at) => ((at - from) / this.#seconds) * this.#width;
    const drawing = svg("svg", { viewBox: `0 0 ${this.#width} ${height}`, height, "aria-hidden": "true" });
    drawing.append(...this.#axis(x, now, height));
    for (const [request, row] of rows.placed) drawing.append(this.#request(request, TOP + row * ROW, x));
    drawing.append(...this.#events(x, from, height));
    if (!rows.placed.length) {
      drawing.append(svg("text", { x: this.#width / 2, y: TOP + (numRows * ROW) / 2, "text-anchor": "middle" }, "no request in this time"));
    }
    if (rows.hidden) {
      drawing.append(svg("text", { x: 0, y: 10 }, `${plural(rows.hidden, "more request")} at the same time not shown`));
    }
    this.place.replaceChildren(drawing);
  }

  #axis(x, now, height) {
    const step = [1, 2, 5, 10, 15, 30, 60, 120].find((each) => (this.#width * each) / this.#seconds > 90) ?? 120;
    const parts = [];
    for (let at = Math.ceil((now - this.#seconds) / step) * step; at <= now; at += step) {
      const left = x(at);
      parts.push(svg("line", { class: "grid", x1: left, x2: left, y1: TOP - 8, y2: height - BOTTOM + 2 }));
      if (left > 26 && left < this.#width - 26) {
        parts.push(svg("text", { x: left, y: height - 5, "text-anchor": "middle" }, timeOfDay(at)));
      }
    }
    return parts;
  }

  #request(request, y, x) {
    const start = x(request.arrived_s);
    const end = x(request.arrived_s + wall(request));
    const group = svg("g", {
      class: `request${failed(request) ? " has-failed" : ""}${keyOf(request) === this.#selected ? " is-selected" : ""}`,
      "data-request": request.request_id, on: { click: () => this.select(request) },
    });
    const stretch = Math.max(1, LEAST_WIDTH / (end - start)); // of a bar that would be too small to see
    for (const span of request.spans) {
      const left = Math.max(start + (x(request.arrived_s + span.start_s) - start) * stretch, -2);
      const right = start + (x(request.arrived_s + span.start_s + span.duration_s) - start) * stretch;
      if (right > 0) group.append(svg("rect", { class: span.phase, x: left, y: y + 2, height: BAR, width: Math.max(right - left, 0.2) }));
    }
    const said = `${request.label || request.request_id}\n${request.outcome || "live"}, ${durationText(wall(request))}, ${plural(request.num_tokens, "token")}`;
    group.append(svg("rect", { class: "frame", x: Math.max(start, -2), y: y + 1, height: BAR + 2, width: Math.max(end - Math.max(start, -2), LEAST_WIDTH), rx: 1.5 }));
    group.append(svg("title", {}, said));
    return group;
  }

  #events(x, from, height) {
    return this.#model.events.filter((event) => event.at_s > from).map((event) => {
      const at = x(event.at_s);
      const group = svg("g", { class: `event ${event.kind}` }, svg("path", { d: mark(event.kind, at, 16) }), svg("title", {}, event.text));
      if (event.kind !== "member") group.prepend(svg("line", { x1: at, x2: at, y1: 22, y2: height - BOTTOM }));
      return group;
    });
  }
}

// Shapes differ too, so that no colour is needed: faults are triangles, scale events squares, members circles.
function mark(kind, x, y) {
  if (kind === "fault") return `M${x - 4.5},${y + 4} h9 l-4.5,-8.5 z`;
  if (kind === "scale") return `M${x - 3.5},${y - 3.5} h7 v7 h-7 z`;
  return `M${x - 3},${y} a3,3 0 1 0 6,0 a3,3 0 1 0 -6,0 z`;
}

// Gives each request the first row that is free.
function pack(requests, seconds) {
  const ends = [];
  const placed = [];
  let hidden = 0;
  requests.sort((a, b) => a.arrived_s - b.arrived_s);
  for (const request of requests) {
    let row = ends.findIndex((end) => end <= request.arrived_s);
    if (row < 0) row = ends.length;
    if (row >= MAX_ROWS) {
      hidden += 1;
      continue;
    }
    ends[row] = request.arrived_s + Math.max(wall(request), seconds * GAP_S) + seconds * GAP_S;
    placed.push([request, row]);
  }
  return { placed, hidden, number: ends.length };
}
