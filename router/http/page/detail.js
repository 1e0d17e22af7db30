// One request: its ledger, its way through the cluster, and why its workers were chosen.

import { explain } from "./connection.js";
import { html } from "./dom.js";
import { PHASES, PHASE_NAMES, REASONS, bytes, count, durationText, percent, plural, shortName, timeOfDay } from "./format.js";
import { failed, wall } from "./model.js";

const SHOWN_CANDIDATES = 5;

export class Detail {
  #request = null;
  #placements = null; // once they are fetched

  // `list`: what stands at the same place while no request is open.
  constructor(place, list, onClose) {
    this.place = place;
    this.list = list;
    this.onClose = onClose;
    place.addEventListener("keydown", (event) => event.key === "Escape" && onClose());
  }

  async open(request) {
    this.#request = request;
    this.#placements = null;
    this.place.hidden = !request;
    this.list.hidden = Boolean(request);
    if (!request) return;
    this.#draw();
    const found = await explain(request.request_id).catch(() => ({ requests: [] }));
    if (this.#request?.request_id !== request.request_id) return; // another one was opened meanwhile
    const same = found.requests.find((each) => each.request_id === request.request_id);
    this.#placements = same?.placements ?? [];
    this.#draw();
  }

  // Shows the newer state of the open request.
  update(requests) {
    if (!this.#request) return;
    const newer = requests.find((each) => each.request_id === this.#request.request_id && each.router === this.#request.router);
    if (!newer || (newer.outcome && newer.outcome === this.#request.outcome)) return;
    if (newer.outcome) this.open(newer);
    else {
      this.#request = newer;
      this.#draw();
    }
  }

  #draw() {
    const request = this.#request;
    const close = html("button", { type: "button", "aria-label": "Close", on: { click: () => this.onClose() } }, "\u00d7");
    this.place.replaceChildren(
      html("div", { class: "title" }, html("span", { class: "id" }, request.label || request.request_id), close),
      ...(request.label ? [html("p", { class: "id outcome" }, request.request_id)] : []),
      outcome(request), html("h3", {}, "Where the time went"), ledger(request),
      html("h3", {}, "Path"), path(request), ...workerTimes(request),
      ...(this.#placements ?? []).flatMap((placement, number) => placementParts(placement, number, this.#placements.length)),
    );
  }
}

function outcome(request) {
  const parts = [
    request.outcome || "live", `${timeOfDay(request.arrived_s)}`, plural(request.num_prompt_tokens, "prompt token"),
    plural(request.num_tokens, "token"),
  ];
  if (request.ttft_s !== undefined) parts.push(`first token ${durationText(request.ttft_s)}`);
  if (request.itl_s !== undefined) parts.push(`${durationText(request.itl_s)} between tokens`);
  return html("p", { class: failed(request) ? "outcome is-fault" : "outcome" }, parts.join(" \u00b7 "));
}

function ledger(request) {
  const phases = new Map((request.ledger?.phases ?? []).map(({ phase, duration_s }) => [phase, duration_s]));
  const total = wall(request) || 1e-9;
  let before = 0;
  const rows = PHASES.filter((phase) => phases.has(phase)).map((phase) => {
    const seconds = phases.get(phase);
    const bar = html("i", { class: phase, "left%": (100 * before) / total, "width%": (100 * seconds) / total });
    before += seconds;
    return html("tr", {}, html("td", {}, PHASE_NAMES[phase]), html("td", { class: "is-wide" }, html("div", { class: "track" }, bar)),
      html("td", { class: "number" }, durationText(seconds)), html("td", { class: "number" }, percent(seconds / total)));
  });
  rows.push(html("tr", {}, html("td", {}, "wall time"), html("td"), html("td", { class: "number" }, durationText(wall(request))), html("td")));
  return html("table", {}, html("tbody", {}, ...rows));
}

// Router, workers in the order in which they joined, and how the KV moved.
function path(request) {
  const { members = [], transport, kv_bytes: kv, reasons = [] } = request.ledger ?? {};
  const steps = [shortName(request.router), ...members.map(shortName)];
  const parts = steps.flatMap((step, index) => (index ? [html("span", { class: "step" }, "\u2192"), html("span", {}, step)] : [html("span", {}, step)]));
  const moved = transport && transport !== "local" ? `${bytes(Number(kv))} of KV by ${transport}` : "no KV moved";
  const place = html("div", { class: "path" }, ...parts, html("span", { class: "step" }, moved));
  return reasons.length ? html("div", {}, place, html("p", { class: "is-fault" }, reasons.join(", "))) : place;
}

function workerTimes(request) {
  const times = request.ledger?.worker_times ?? [];
  if (!times.length) return [];
  const heading = html("tr", {}, html("th", {}, "worker"), ...["queued", "computed", "until"].map((name) => html("th", { class: "number" }, name)));
  const rows = times.slice(-12).map((time) => html("tr", {}, html("td", {}, shortName(time.member)),
    ...[time.queue_s, time.compute_s, time.ended_s].map((seconds) => html("td", { class: "number" }, durationText(seconds)))));
  return [html("table", {}, html("thead", {}, heading), html("tbody", {}, ...rows))];
}

function placementParts(placement, number, total) {
  const title = total > 1 ? `Why these workers, attempt ${number + 1}` : "Why these workers";
  const failure = placement.failure ? [html("p", { class: "is-fault" }, `ended early: ${placement.failure}`)] : [];
  const said = `${REASONS[placement.reason] ?? placement.reason}, ${durationText(placement.after_s)} after arrival`;
  const names = ["prefill", "decode", "ahead", "cached", "TTFT", "ITL"];
  const heading = html("tr", {}, ...names.map((name, index) => html("th", { class: index > 1 ? "number" : "" }, name)));
  const rows = placement.candidates.slice(0, SHOWN_CANDIDATES).map((candidate) => html("tr", { class: candidate.is_chosen ? "chosen" : "" },
    html("td", {}, shortName(candidate.prefill_member) || "–"), html("td", {}, shortName(candidate.decode_member)),
    html("td", { class: "number" }, count(candidate.depth)), html("td", { class: "number" }, count(candidate.num_cached)),
    html("td", { class: "number" }, durationText(candidate.prediction?.ttft_s)), html("td", { class: "number" }, durationText(candidate.prediction?.itl_s))));
  const more = placement.num_candidates - rows.length;
  return [
    html("h3", {}, title), html("p", { class: "outcome" }, said), ...failure,
    html("div", { class: "scroll" }, html("table", {}, html("thead", {}, heading), html("tbody", {}, ...rows))),
    ...(more > 0 ? [html("p", { class: "outcome" }, `and ${plural(more, "other candidate")}`)] : []),
  ];
}
