// The live view: what /status tells, every second while it is looked at.

import { element } from "./markdown.js";

const el = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const PACE = { looked: 1000, beside: 3000, hidden: 15000 };
const KEPT_POINTS = 120;
const FEWEST_POINTS = 20;  // below it the line does not fill the width

const speeds = [];
let timer = 0;
let looked = false;
let onPicture = () => {};

export function startStatus(callback) {
  onPicture = callback;
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  poll();
}

export function lookAtStatus(is) {
  looked = is;
  if (is) poll();
}

async function poll() {
  clearTimeout(timer);
  try {
    const response = await fetch("/status", { signal: AbortSignal.timeout(5000) });
    const picture = await response.json();
    speeds.push(picture.tokens_per_second);
    if (speeds.length > KEPT_POINTS) speeds.shift();
    pulse(picture);
    if (looked) board(picture);
    onPicture(picture);
  } catch {
    setPulse("bad", "server not reached");
    if (looked) el("board").replaceChildren(panel("Server", element("p", "bad", "The server cannot be reached; this view tries again by itself.")));
  }
  clearTimeout(timer);
  timer = setTimeout(poll, document.hidden ? PACE.hidden : looked ? PACE.looked : PACE.beside);
}

function setPulse(kind, text) {
  document.querySelector("#pulse .dot").className = "dot " + kind;
  if (el("pulse-text").textContent !== text) el("pulse-text").textContent = text;
}

function pulse(picture) {
  const parts = [picture.server.model];
  if (picture.draining) parts.push("stopping");
  else if (!picture.ready) parts.push("ranks not ready");
  parts.push(`${picture.tokens_per_second.toFixed(1)} tok/s`);
  if (picture.waiting) parts.push(`${picture.waiting} waiting`);
  setPulse(picture.ready ? "good" : picture.draining ? "warn" : "bad", parts.join(" · "));
}

function board(picture) {
  const panels = [now(picture), lanes(picture), memory(picture), ranks(picture), ...cards(picture), totals(picture), choices(picture)];
  el("board").replaceChildren(...panels);
}

function panel(title, ...content) { return element("section", "panel", element("h2", "", title), ...content); }

function figure(value, label, kind = "") {
  return element("div", "figure " + kind, element("b", "", value), element("span", "", label));
}

const whole = (number) => number.toLocaleString("en");
const percent = (share) => share == null ? "–" : `${Math.round(100 * share)} %`;

function now(picture) {
  const capacity = Number(picture.server.lanes);
  return panel("Now", element("div", "figures",
    figure(picture.tokens_per_second.toFixed(1), "tokens a second"),
    figure(`${picture.running} of ${capacity}`, "lanes in use"),
    figure(whole(picture.waiting), "waiting"),
    figure(percent(picture.acceptance), "of drafts accepted")), spark());
}

function spark() {
  const most = Math.max(...speeds, 1);
  const width = Math.max(speeds.length, FEWEST_POINTS) - 1;
  const points = speeds.map((speed, at) => `${100 - (speeds.length - 1 - at) * 100 / width},${29 - 27 * speed / most}`);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "tokens a second, the last two minutes");
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  line.setAttribute("fill", "none");
  line.setAttribute("stroke", "currentColor");
  line.setAttribute("stroke-width", "1.5");
  line.setAttribute("vector-effect", "non-scaling-stroke");
  svg.append(line);
  return svg;
}

function lanes(picture) {
  const capacity = Number(picture.server.lanes);
  const rows = Array.from({ length: Math.max(capacity, picture.running) }, (_, at) => {
    const lane = picture.lanes[at];
    if (!lane) return element("tr", "soft", element("td", "", String(at + 1)), element("td", "", "idle"), element("td"), element("td"));
    const speed = lane.tokens_per_second ? `${lane.tokens_per_second.toFixed(1)} tok/s` : lane.first_token_ms == null ? "reads the prompt" : "–";
    const accepted = lane.drafts_proposed ? percent(lane.drafts_accepted / lane.drafts_proposed) : "–";
    return element("tr", "", element("td", "", String(at + 1)),
      element("td", "", `${whole(lane.prompt_tokens)} + ${whole(lane.completion_tokens)}`), element("td", "", speed), element("td", "", accepted));
  });
  return panel("Lanes", table(["Lane", "Prompt + answer", "Pace", "Accepted"], rows));
}

function table(heads, rows) {
  const head = element("tr", "", ...heads.map((text) => element("th", "", text)));
  return element("div", "table", element("table", "", element("thead", "", head), element("tbody", "", ...rows)));
}

function bar(label, value, most, text) {
  const made = element("progress");
  made.max = Math.max(most, 1);
  made.value = value;
  made.setAttribute("aria-label", label);
  return element("div", "bar", element("p", "", element("span", "", label), element("span", "soft", text)), made);
}

function memory(picture) {
  const room = picture.max_context * Number(picture.server.lanes);
  const context = picture.context_tokens ?? 0;
  const bars = [bar("Context", context, room, `${whole(context)} of ${whole(room)} tokens`)];
  if (picture.kv_pages != null) {
    const used = picture.kv_pages - (picture.kv_pages_free ?? picture.kv_pages);
    bars.push(bar("Keys and values, each rank", used, picture.kv_pages, `${whole(used)} of ${whole(picture.kv_pages)} pages`));
  } else bars.push(element("p", "soft", "This backend keeps no keys and values."));
  if (picture.prefixes != null && picture.kv_pages != null) {
    const { cached_prompts, cached_tokens } = picture.counters;
    bars.push(element("p", "soft", `Prefix cache: ${whole(picture.prefixes)} kept, ${whole(picture.prefixes_evicted)} let go; `
      + `${whole(cached_prompts)} prompts found ${whole(cached_tokens)} tokens in it.`));
  }
  return panel("Context and caches", ...bars);
}

function ranks(picture) {
  if (!picture.ranks.length) return panel("Ranks", element("p", "bad", "No rank is up. They start again by themselves."));
  const counts = picture.ranks.map((rank) => rank.lockstep_records);
  const apart = Math.max(...counts) - Math.min(...counts);
  const rows = picture.ranks.map((rank) => element("tr", "",
    element("td", "", String(rank.rank)), element("td", "", rank.busy ? "busy" : "idle"),
    element("td", "", whole(rank.lockstep_records)), element("td", rank.last_step_seconds > 5 ? "warn" : "", `${rank.last_step_seconds.toFixed(1)} s`),
    element("td", "soft", String(rank.pid))));
  const word = picture.ranks.length < 2 ? "One rank: nothing to compare." : apart <= 1 ? "In lockstep." : `${apart} records apart.`;
  const restarts = picture.counters.restarts;
  const cut = picture.ranks.reduce((sum, rank) => sum + rank.fp16_overflows, 0);
  return panel("Ranks", table(["Rank", "State", "Lockstep records", "Last step", "Process"], rows),
    element("p", "soft", element("span", apart <= 1 ? "good" : "warn", word), ` Collective: ${picture.server.collective ?? "–"}. `,
      element("span", restarts ? "warn" : "", `Restarts: ${restarts}.`),
      element("span", "warn", cut ? ` ${whole(cut)} values did not fit fp16.` : "")));
}

function cards(picture) {
  if (!picture.cards.length) return [panel("Cards", element("p", "soft", "Clocks and temperatures are not known here: " + (picture.cards_missing ?? "not read yet") + "."))];
  const gigabytes = (bytes) => (bytes / 1e9).toFixed(1);
  const told = (value, unit) => value == null ? "–" : `${whole(value)} ${unit}`;
  return picture.cards.map((card) => panel(`Card ${card.index} · ${card.name}`, element("div", "figures",
    figure(told(card.temperature, "°C"), "temperature", card.temperature >= 80 ? "bad" : card.temperature >= 70 ? "warn" : ""),
    figure(told(card.clock, "MHz"), card.most_clock ? `clock, of ${card.most_clock}` : "clock"),
    figure(card.power == null ? "–" : `${Math.round(card.power)} W`, card.power_limit ? `of ${Math.round(card.power_limit)} W` : "power"),
    figure(card.busy_percent == null ? "–" : `${card.busy_percent} %`, "busy")),
    ...(card.memory ? [bar("Memory", card.memory_used, card.memory, `${gigabytes(card.memory_used)} of ${gigabytes(card.memory)} GB`)] : [])));
}

function totals(picture) {
  const { requests, finished, cancelled, failed, rejected, expired, prompt_tokens, completion_tokens } = picture.counters;
  return panel("Since the start", pairs({ "asked for": requests, finished, "client left": cancelled, "broken off": failed,
    "refused, queue full": rejected, "waited too long": expired, "prompt tokens": prompt_tokens, "answer tokens": completion_tokens }));
}

function choices(picture) { return panel("Choices", pairs(picture.server)); }

function pairs(entries) {
  return element("dl", "pairs", ...Object.entries(entries).flatMap(([name, value]) =>
    [element("dt", "", name.replaceAll("_", " ")), element("dd", "", typeof value === "number" ? whole(value) : value)]));
}
