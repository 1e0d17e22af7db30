// Numbers with real units, for people.

export const PHASES = ["tokenize", "admit", "prefill_queue", "prefill", "transfer", "decode_queue", "decode", "retry"];
export const PHASE_NAMES = {
  tokenize: "tokenize", admit: "admit", prefill_queue: "prefill queue", prefill: "prefill", transfer: "transfer",
  decode_queue: "decode queue", decode: "decode", retry: "retry",
};

// What decided a placement, as `tandem explain` says it.
export const REASONS = {
  only_candidate: "there was no other candidate",
  lowest_load: "it has the fewest sequences ahead",
  cached_prefix: "the beginning of the prompt is cached there",
  turn: "it was its turn",
  slo: "all others are predicted to miss more latency targets",
  ttft: "its first token is predicted to be the earliest",
  token_delay: "first tokens are equally early; it delays later tokens the least",
  kv_bytes: "latencies are equal; it moves the least KV",
  tie: "drawn from equal candidates",
  explored: "drawn by exploration instead of the best one",
  unknown_speed: "a worker has not reported its speed yet: chosen by load and cached prefix",
};

function digits(value, significant) {
  if (value === 0) return "0";
  const places = Math.max(0, significant - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(places, 3));
}

// Returns [number, unit].
export function duration(seconds) {
  if (seconds === undefined || seconds === null) return ["–", ""];
  if (seconds < 0.0995) return [digits(seconds * 1e3, 2), "ms"];
  if (seconds < 0.9995) return [(seconds * 1e3).toFixed(0), "ms"];
  if (seconds < 120) return [digits(seconds, 3), "s"];
  return [(seconds / 60).toFixed(1), "min"];
}

export function durationText(seconds) {
  return duration(seconds).join(" ").trim();
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US").replaceAll(",", "\u2009");
}

export function rate(value) {
  return value >= 99.5 ? count(value) : value === 0 ? "0" : value.toFixed(value < 9.95 ? 1 : 0);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${digits(value, 3)} ${units[unit]}`;
}

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.05) return "<0.1 %";
  return `${value === 0 || value >= 9.95 ? value.toFixed(0) : value.toFixed(1)} %`;
}

export function timeOfDay(unixSeconds) {
  return new Date(unixSeconds * 1e3).toTimeString().slice(0, 8);
}

// "prefill-0@1f2e" is shown without its incarnation.
export function shortName(member) {
  return member ? member.split("@")[0] : "";
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
