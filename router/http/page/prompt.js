// Sends a prompt to the OpenAI-compatible API of this router and shows its tokens as they come.

import { headers } from "./connection.js";
import { html, setText } from "./dom.js";
import { durationText, plural } from "./format.js";

const MAX_SHOWN = 5000; // tokens

export class PromptBox {
  #abort = null;
  #tokens = []; // {element, at}: seconds since the request was sent
  #label = "";

  constructor(section, model) {
    this.form = section.querySelector("form");
    this.button = this.form.querySelector("button");
    this.answer = section.querySelector("#answer");
    this.figures = section.querySelector("#answer-figures");
    this.model = model;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#abort) this.#abort.abort();
      else this.#send();
    });
    this.form.elements.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  // Once the request has ended, its timeline tells the phase in which most of the wait for each token was spent.
  update(requests) {
    if (!this.#label || this.#abort) return;
    const ended = requests.find((request) => request.label === this.#label && request.outcome);
    if (!ended) return;
    this.#label = "";
    let before = 0;
    for (const { element, at } of this.#tokens) {
      element.className = phaseOfMost(ended.spans, before, at);
      before = at;
    }
  }

  async #send() {
    const { text, tokens, key } = this.form.elements;
    this.#abort = new AbortController();
    this.#label = `page-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
    this.#tokens = [];
    this.answer.replaceChildren();
    setText(this.figures, "");
    setText(this.button, "Stop");
    const began = performance.now();
    try {
      await this.#stream(text.value, Number(tokens.value), key.value, began);
    } catch (error) {
      if (error.name !== "AbortError") this.answer.append(html("p", { class: "is-fault" }, error.message));
    }
    this.#abort = null;
    setText(this.button, "Send");
  }

  async #stream(prompt, maxTokens, key, began) {
    const model = this.model.members[0]?.model ?? "";
    const answer = await fetch("v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json", "x-request-id": this.#label, ...(key ? headers(key) : headers()) },
      body: JSON.stringify({ model, prompt, max_tokens: maxTokens, stream: true }),
      signal: this.#abort.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const text = event.choices?.[0]?.text;
      if (text) this.#show(text, (performance.now() - began) / 1e3);
    }
  }

  #show(text, at) {
    const element = html("span", { class: this.#tokens.length ? "decode" : "prefill" }, text);
    if (this.#tokens.length < MAX_SHOWN) this.answer.append(element);
    this.#tokens.push({ element, at });
    const first = this.#tokens[0].at;
    const between = this.#tokens.length > 1 ? `, ${durationText((at - first) / (this.#tokens.length - 1))} between tokens` : "";
    setText(this.figures, `${plural(this.#tokens.length, "token")}, first after ${durationText(first)}${between}`);
  }
}

// The events of a stream of server-sent events, without the last one.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function phaseOfMost(spans, from, to) {
  let [best, most] = ["decode", 0];
  const sums = new Map();
  for (const span of spans) {
    const overlap = Math.min(to, span.start_s + span.duration_s) - Math.max(from, span.start_s);
    if (overlap <= 0) continue;
    sums.set(span.phase, (sums.get(span.phase) ?? 0) + overlap);
    if (sums.get(span.phase) > most) [best, most] = [span.phase, sums.get(span.phase)];
  }
  return best;
}
