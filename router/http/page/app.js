// The page's order of events: follow the overview, and show each answer.

import { Figures, showHistograms } from "./charts.js";
import { Refused, follow, setKey } from "./connection.js";
import { Detail } from "./detail.js";
import { find, html, setText } from "./dom.js";
import { durationText, shortName, timeOfDay } from "./format.js";
import { showEvents, showMembers, showTarget, summary } from "./members.js";
import { Model } from "./model.js";
import { showNotable } from "./notable.js";
import { PromptBox } from "./prompt.js";
import { Timeline } from "./timeline.js";

const model = new Model();
const figures = new Figures(find("#figures"));
const timeline = new Timeline(find("#timeline"), find("#legend"), find("#span"), (request) => detail.open(request));
const detail = new Detail(find("#detail"), find("#notable"), () => {
  timeline.select(null);
  find("#timeline").focus();
});
const promptBox = new PromptBox(find("#prompt"), model);

function show(answer) {
  find("#key").hidden = true;
  find("main").hidden = false;
  model.update(answer, performance.now());
  const [text, isFault] = summary(model);
  setText(find("#summary"), text);
  find("#summary").classList.toggle("is-fault", isFault);
  setText(find("#source"), `${shortName(model.source)} · ${timeOfDay(model.now(performance.now()))}`);
  const requests = model.requests();
  figures.show(model);
  timeline.show(model);
  showNotable(find("#notable ol"), requests, model.now(performance.now()), (request) => timeline.select(request));
  showMembers(find("#pools"), model);
  showTarget(find("#target"), model.target);
  showEvents(find("#events ol"), model.events);
  showHistograms(find("#histograms"), model.latencies());
  detail.update(requests);
  promptBox.update(requests);
}

// The security policy lets this page talk to its own router only, so the others are links.
function showSilence(seconds) {
  const own = shortName(model.source);
  const others = model.members.filter((member) => member.role === "router" && member.member_id !== own && member.http_address);
  const links = others.flatMap((member) => [" ", html("a", { href: `${location.protocol}//${member.http_address}/ui` }, member.member_id)]);
  const text = `${own || "The router"} has not answered for ${durationText(seconds)}; trying again.`;
  find("#summary").replaceChildren(text, ...(links.length ? [" Other routers:", ...links] : []));
  find("#summary").classList.add("is-fault");
}

async function main() {
  try {
    await follow(() => model.seen(), show, showSilence);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    find("main").hidden = true;
    find("#key").hidden = false;
    setText(find("#summary"), "This router asks for an admin key. The page keeps it in memory only.");
    setText(find("#key-problem"), find("#key").dataset.tried ? error.message : "");
    find("#key input").focus();
  }
}

// `tandem ui` writes the key after the # of the address, which no server gets. Only the memory of this page keeps it.
function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return;
  setKey(key);
  history.replaceState(null, "", location.pathname);
}

find("#key").addEventListener("submit", (event) => {
  event.preventDefault();
  find("#key").dataset.tried = "yes";
  setKey(find("#key input").value);
  find("#key input").value = "";
  main();
});
takeKey();
main();
