// The requests that an operator looks for: those that failed or were retried, the newest first, then the slowest.

import { html } from "./dom.js";
import { PHASES, durationText } from "./format.js";
import { failed, keyOf, retried, wall } from "./model.js";

const MAX_TROUBLED = 5;
const MAX_SHOWN = 9;
const WITHIN_S = 600;

export function showNotable(place, requests, now, onOpen) {
  const recent = requests.filter((request) => request.arrived_s > now - WITHIN_S);
  const troubled = recent.filter((request) => failed(request) || retried(request));
  troubled.sort((a, b) => b.arrived_s - a.arrived_s);
  troubled.splice(MAX_TROUBLED);
  const slow = recent.filter((request) => !troubled.includes(request)).sort((a, b) => wall(b) - wall(a));
  const shown = [...troubled, ...slow.slice(0, MAX_SHOWN - troubled.length)];
  const name = shown.map((request) => `${keyOf(request)} ${request.outcome || wall(request)}`).join();
  if (place.dataset.shown === name && shown.length) return; // nothing has changed: the focus stays where it is
  place.dataset.shown = name;
  const longest = Math.max(...shown.map(wall), 1e-9);
  place.replaceChildren(...shown.map((request) => row(request, longest, onOpen)));
  if (!shown.length) place.append(html("li", { class: "empty" }, "No request in the last ten minutes."));
}

function row(request, longest, onOpen) {
  const why = failed(request) ? request.outcome : (request.ledger?.reasons ?? []).join(", ");
  return html("li", {}, html("button", { type: "button", on: { click: () => onOpen(request) } },
    html("span", { class: "id" }, request.label || request.request_id), bar(request, longest),
    html("span", { class: "number" }, durationText(wall(request))),
    ...(why ? [html("span", { class: "why" }, why)] : [])));
}

function bar(request, longest) {
  let before = 0;
  const phases = new Map((request.ledger?.phases ?? []).map(({ phase, duration_s }) => [phase, duration_s]));
  const parts = PHASES.filter((phase) => phases.has(phase)).map((phase) => {
    const part = html("i", { class: phase, "left%": (100 * before) / longest, "width%": (100 * phases.get(phase)) / longest });
    before += phases.get(phase);
    return part;
  });
  return html("span", { class: "track" }, ...parts);
}
