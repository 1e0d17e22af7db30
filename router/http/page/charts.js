// Sparklines and histograms. Everything is drawn anew at each update: a few hundred elements at most.

import { html, svg } from "./dom.js";
import { bytes, count, duration, durationText, percent, rate } from "./format.js";
import { quantile } from "./model.js";

const WIDTH = 200;
const HEIGHT = 34;

// Draws values (null: a gap) over a fixed number of slots, the newest at the right.
function sparkline(values, slots = 150) {
  const known = values.filter((value) => value !== null);
  const most = Math.max(...known, 0) || 1;
  const x = (index) => (((slots - values.length + index) / (slots - 1)) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - 1 - (value / most) * (HEIGHT - 4)).toFixed(1);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(svg("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }));
  for (const points of pieces(values)) {
    const line = points.map(([index, value]) => `${x(index)},${y(value)}`).join(" L");
    const [first, last] = [x(points[0][0]), x(points.at(-1)[0])];
    drawing.append(
      svg("path", { class: "area", d: `M${first},${HEIGHT} L${line} L${last},${HEIGHT} Z` }),
      svg("path", { class: "line", d: `M${line}${points.length === 1 ? " h1" : ""}` }),
    );
  }
  return drawing;
}

// Splits values at gaps into lists of [index, value]: nothing is drawn where nothing was measured.
function pieces(values) {
  const found = [];
  values.forEach((value, index) => {
    if (value === null) return;
    const last = found.at(-1);
    if (last && index - last.at(-1)[0] === 1) last.push([index, value]);
    else found.push([[index, value]]);
  });
  return found;
}

function figure(name, [value, unit], more, values) {
  return html("div", { class: "figure" },
    html("h3", {}, name),
    html("div", { class: "value" }, value, unit ? html("small", {}, unit) : ""),
    html("div", { class: "more" }, more),
    sparkline(values));
}

function recent(series, name) {
  const last = series.slice(-5);
  return last.length ? last.reduce((sum, slot) => sum + slot[name], 0) / last.length : 0;
}

export class Figures {
  #kv = [];

  constructor(place) {
    this.place = place;
  }

  show(model) {
    const series = model.series();
    const latencies = model.latencies();
    const quantiles = (name, share) => {
      const histogram = latencies.get(name);
      return histogram ? quantile(histogram.bounds, histogram.counts, share) : null;
    };
    const tail = (name) => (quantiles(name, 0.99) === null ? "no request yet" : `p99 ${durationText(quantiles(name, 0.99))}`);
    const kv = model.kv();
    const blockBytes = Math.max(...model.members.map((member) => member.figures.block_bytes ?? 0), 0);
    const share = kv.total ? kv.used / kv.total : 0;
    this.#kv = [...this.#kv, share].slice(-300);
    this.place.replaceChildren(
      figure("Requests", [rate(recent(series, "requests")), "/s"], `${count(model.numLive())} live`, series.map((slot) => slot.requests)),
      figure("Tokens", [rate(recent(series, "tokens")), "/s"], `${rate(recent(series, "prompt"))} prompt tokens/s`, series.map((slot) => slot.tokens)),
      figure("Time to first token", duration(quantiles("ttft", 0.5)), tail("ttft"), series.map((slot) => slot.ttft)),
      figure("Between tokens", duration(quantiles("itl", 0.5)), tail("itl"), series.map((slot) => slot.itl)),
      figure("KV in use", percent(share).split(" "), `${bytes(kv.used * blockBytes)} of ${bytes(kv.total * blockBytes)}`, this.#kv),
    );
  }
}

const TITLES = { ttft: "Time to first token", itl: "Between tokens", e2e: "Whole request" };
const BOX = { width: 270, height: 96, bottom: 16 };

export function showHistograms(place, latencies) {
  place.replaceChildren(...Object.entries(TITLES).map(([name, title]) => {
    const { bounds, counts } = latencies.get(name) ?? { bounds: [1], counts: [0, 0] };
    const [median, tail] = [quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99)];
    const total = counts.reduce((sum, number) => sum + number, 0);
    const said = [["p50 ", median], ["p99 ", tail]].map(([word, value]) => html("span", {}, word, html("b", {}, durationText(value))));
    const label = `${title}: ${total} observations, median ${durationText(median)}, 99th percentile ${durationText(tail)}`;
    return html("div", { class: "histogram" },
      html("div", { class: "top" }, html("span", {}, title), ...said), histogram(bounds, counts, [median, tail], label));
  }));
}

// Ranges have equal widths: their bounds grow in about equal steps of the logarithm. Empty ends are left out.
function histogram(bounds, counts, marks, label) {
  const drawing = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": label });
  const base = BOX.height - BOX.bottom;
  let first = counts.findIndex((number) => number > 0);
  let last = counts.findLastIndex((number) => number > 0);
  if (first < 0) [first, last] = [0, Math.min(7, bounds.length - 1)];
  [first, last] = [Math.max(0, first - 1), Math.min(counts.length - 1, Math.max(last + 1, first + 7))];
  const shown = counts.slice(first, last + 1);
  const step = BOX.width / shown.length;
  const most = Math.max(...shown, 1);
  shown.forEach((number, index) => {
    const height = number ? Math.max(1.5, (number / most) * (base - 6)) : 0;
    const bar = svg("rect", { x: index * step + 1, width: Math.max(1, step - 2), y: base - height, height, rx: 1 });
    const upper = bounds[first + index];
    bar.append(svg("title", {}, `${count(number)} ${upper === undefined ? "above" : `up to ${durationText(upper)}`}`));
    drawing.append(bar);
    if (upper !== undefined && index < shown.length - 1 && index % (shown.length < 9 ? 2 : 3) === 0) {
      const at = (index + 1) * step;
      drawing.append(svg("text", { x: at, y: BOX.height - 3, "text-anchor": "middle" }, durationText(upper).replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ")));
    }
  });
  drawing.append(svg("line", { class: "base", x1: 0, x2: BOX.width, y1: base + 0.5, y2: base + 0.5 }));
  for (const value of marks) {
    if (value === null) continue;
    const at = position(bounds, value, first, step);
    drawing.append(svg("line", { class: "mark", x1: at, x2: at, y1: 0, y2: base }));
  }
  return drawing;
}

function position(bounds, value, first, step) {
  const index = Math.max(first, bounds.findIndex((bound) => value <= bound));
  const lower = index ? bounds[index - 1] : 0;
  return (index - first + (value - lower) / (bounds[index] - lower)) * step;
}

