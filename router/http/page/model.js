// What the page knows: the overviews of all routers, merged. Bounded, and never a prompt or an output.

const MAX_ENDED = 1500;
const MAX_EVENTS = 400;
const SLOT_S = 2; // the routers' sample period
const MAX_SLOTS = 150;
const KV_STATES = ["held", "leased", "quarantined", "evicted", "cached"];

export class Model {
  members = [];
  target = null;
  events = [];
  ended = new Map(); // by router and id
  #routers = new Map(); // by name: {position, live, numLive, latencies, samples, problem, breakers, slow, registryAge}
  #figures = new Map(); // by member: the last two readings
  #clock = null; // the asked router's time, and ours when it came

  update(answer, nowMs) {
    const [own] = answer.routers;
    this.#clock = { unix: own.time_s, ms: nowMs };
    this.members = answer.members;
    this.target = answer.target ?? null;
    this.source = own.router;
    this.#measure(answer.members, own.time_s);
    const present = new Set(answer.routers.map((router) => router.router));
    for (const name of this.#routers.keys()) if (!present.has(name)) this.#routers.delete(name);
    for (const router of answer.routers) this.#merge(router, router === own);
    for (const key of [...this.ended.keys()].slice(0, Math.max(0, this.ended.size - MAX_ENDED))) this.ended.delete(key);
    this.events.splice(0, Math.max(0, this.events.length - MAX_EVENTS));
  }

  // The Unix time by the asked router's clock.
  now(nowMs) {
    return this.#clock ? this.#clock.unix + (nowMs - this.#clock.ms) / 1e3 : 0;
  }

  seen() {
    return [...this.#routers].filter(([, router]) => router.position).map(
      ([name, { position }]) => `${name}:${position.ended}:${position.events}:${position.samples}`,
    );
  }

  routers() {
    return [...this.#routers].map(([name, router]) => ({ name, ...router }));
  }

  live() {
    return this.routers().flatMap((router) => router.live.map((request) => ({ ...request, router: router.name })));
  }

  numLive() {
    return this.routers().reduce((sum, router) => sum + router.numLive, 0);
  }

  requests() {
    return [...this.ended.values(), ...this.live()];
  }

  // Five minutes of all routers in slots of two seconds, the oldest first: {at, requests, prompt, tokens, ttft, itl}.
  series() {
    const slots = new Map();
    for (const router of this.#routers.values()) {
      for (const sample of router.samples) {
        const at = Math.floor(sample.at_s / SLOT_S);
        const slot = slots.get(at) ?? { at: at * SLOT_S, requests: 0, failed: 0, prompt: 0, tokens: 0, ttft: null, itl: null };
        const period = Math.max(sample.period_s, 0.1);
        slot.requests += sample.num_ended / period;
        slot.failed += sample.num_failed;
        slot.prompt += sample.num_prompt_tokens / period;
        slot.tokens += sample.num_tokens / period;
        slot.ttft = Math.max(slot.ttft ?? 0, sample.ttft_p50_s ?? 0) || null;
        slot.itl = Math.max(slot.itl ?? 0, sample.itl_p50_s ?? 0) || null;
        slots.set(at, slot);
      }
    }
    return [...slots.values()].sort((a, b) => a.at - b.at).slice(-MAX_SLOTS);
  }

  // The histograms of all routers together, by name.
  latencies() {
    const merged = new Map();
    for (const router of this.#routers.values()) {
      for (const { name, bounds_s, counts } of router.latencies) {
        const before = merged.get(name);
        merged.set(name, { bounds: bounds_s, counts: before ? before.counts.map((n, i) => n + counts[i]) : [...counts] });
      }
    }
    return merged;
  }

  kv() {
    const sums = { total: 0, used: 0 };
    for (const member of this.members) {
      const blocks = kvBlocks(member);
      sums.total += blocks.total;
      sums.used += blocks.used;
    }
    return sums;
  }

  // A worker's tokens per second since the last reading: computed (prompts) and drawn.
  workerRates(member) {
    const readings = this.#figures.get(`${member.member_id}@${member.incarnation}`);
    if (!readings || !readings.before) return null;
    const seconds = readings.now.at - readings.before.at;
    const difference = (name) => Math.max(0, readings.now[name] - readings.before[name]) / seconds;
    return { computed: difference("computed"), drawn: difference("drawn") };
  }

  #measure(members, at) {
    const readings = new Map();
    for (const member of members) {
      const name = `${member.member_id}@${member.incarnation}`;
      const { tokens_computed: computed, tokens_drawn: drawn } = member.figures;
      const before = this.#figures.get(name);
      if (computed === undefined) continue;
      if (before && at - before.now.at < 2) readings.set(name, before); // too short for a rate
      else readings.set(name, { now: { at, computed, drawn }, before: before?.now });
    }
    this.#figures = readings;
  }

  #merge(router, isOwn) {
    const before = this.#routers.get(router.router);
    if (router.problem) {
      const kept = before ?? { position: null, samples: [], latencies: [] };
      this.#routers.set(router.router, { ...kept, live: [], numLive: 0, breakers: [], slow: [], problem: router.problem, registryAge: 0 });
      return;
    }
    this.#routers.set(router.router, {
      position: router.position,
      live: router.live,
      numLive: router.num_live,
      latencies: router.latencies,
      samples: [...(before?.samples ?? []), ...router.samples].slice(-MAX_SLOTS),
      breakers: router.breakers,
      slow: router.slow,
      registryAge: router.registry_age_s,
      problem: "",
    });
    for (const request of router.ended) {
      this.ended.set(`${router.router} ${request.request_id} ${request.arrived_s}`, { ...request, router: router.router });
    }
    // Every router sees the same members; what others say of them would be shown twice.
    const events = isOwn || !before ? router.events : router.events.filter((event) => event.kind === "fault" && !event.member);
    const known = new Set(this.events.map((event) => event.text + Math.round(event.at_s / 3)));
    this.events.push(...events.filter((event) => !known.has(event.text + Math.round(event.at_s / 3))));
    this.events.sort((a, b) => a.at_s - b.at_s);
  }
}

export const keyOf = (request) => `${request.router} ${request.request_id}`;

export function wall(request) {
  return request.ledger?.wall_s ?? 0;
}

export function failed(request) {
  return Boolean(request.outcome) && request.outcome !== "ok" && request.outcome !== "cancelled";
}

// Whether an attempt failed, or a fallback was taken.
export function retried(request) {
  return request.num_placements > 1 || (request.ledger?.reasons ?? []).length > 0;
}

// A worker's blocks by state: {total, used, states: [[name, number]]}. Cached blocks are free for others.
export function kvBlocks(member) {
  const states = KV_STATES.map((name) => [name, member.figures[`blocks_${name}`] ?? 0]);
  const cached = member.figures.blocks_cached ?? 0;
  const occupied = states.reduce((sum, [, number]) => sum + number, 0);
  return { total: occupied + (member.figures.blocks_free ?? 0), used: occupied - cached, states };
}

export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, number) => sum + number, 0);
  if (!total) return null;
  let below = 0;
  for (let index = 0; index < counts.length; index += 1) {
    if (counts[index] && below + counts[index] >= share * total) {
      if (index === bounds.length) return bounds[index - 1];
      const lower = index ? bounds[index - 1] : 0;
      return lower + ((bounds[index] - lower) * (share * total - below)) / counts[index];
    }
    below += counts[index];
  }
  return bounds[bounds.length - 1];
}
