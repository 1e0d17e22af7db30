// Asks the router for the overview, again and again. Keys stay in this module's memory and are never stored.

const PERIOD_MS = 1000;
const HIDDEN_PERIOD_MS = 10000;
const TIMEOUT_MS = 5000;
const MAX_PAUSE_MS = 2000;

let adminKey = "";

export class Refused extends Error {} // the key is missing or wrong

export function setKey(key) {
  adminKey = key;
}

export function headers(key = adminKey) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401 || answer.status === 403) throw new Refused((await answer.json()).error.message);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

export function overview(seen) {
  return ask(`admin/overview?${new URLSearchParams(seen.map((position) => ["seen", position]))}`);
}

export function explain(name) {
  return ask(`admin/explain?${new URLSearchParams({ name })}`);
}

// Calls `onAnswer` with each answer, `onSilence` with the seconds since the last one, and ends at a refusal.
export async function follow(seen, onAnswer, onSilence) {
  let answeredMs = performance.now();
  let pauseMs = PERIOD_MS / 4;
  for (;;) {
    try {
      onAnswer(await overview(seen()));
      answeredMs = performance.now();
      pauseMs = PERIOD_MS / 4;
      await pause(document.hidden ? HIDDEN_PERIOD_MS : PERIOD_MS);
    } catch (error) {
      if (error instanceof Refused) throw error;
      console.warn(error);
      onSilence((performance.now() - answeredMs) / 1e3);
      await pause(pauseMs);
      pauseMs = Math.min(MAX_PAUSE_MS, 2 * pauseMs);
    }
  }
}

// Ends early when the page is shown again.
function pause(ms) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    document.addEventListener("visibilitychange", done);
  });
}
