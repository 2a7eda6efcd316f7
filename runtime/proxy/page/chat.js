// The conversation: what has been said, how it is shown, and the one answer that may be on its way.

import { element, Markdown } from "./markdown.js";
import { answer, Refusal } from "./stream.js";
import { apiKey, readTools, requestSettings, systemMessage } from "./settings.js";

const KEPT = "duovolt.talk";
const SAVE_MS = 1000;
const IMAGE_BYTES = 8 << 20;
const el = (id) => document.getElementById(id);

let turns = [];      // what is sent: {role, content, images?, tool_calls?, tool_call_id?} and what is only shown
let running = null;  // the AbortController of the answer on its way
let images = [];     // data URLs that go with the next question
let readsImages = false;
let saved = 0;
let leaving = false; // what the end of the page does to an answer is not the answer's end

export function startChat() {
  el("ask").addEventListener("submit", (event) => { event.preventDefault(); running ? stop() : send(); });
  el("question").addEventListener("input", grow);
  el("question").addEventListener("keydown", onKey);
  document.addEventListener("keydown", onAnyKey);
  el("fresh").addEventListener("click", forget);
  el("log").addEventListener("click", onClick);
  el("scroll").addEventListener("scroll", () => { el("down").hidden = atEnd(); });
  el("down").addEventListener("click", toEnd);
  window.addEventListener("pagehide", () => { save(true); leaving = true; });
  window.addEventListener("pageshow", () => { leaving = false; });
  for (const name of ["dragover", "dragleave", "drop"]) document.addEventListener(name, onDrag);
  document.addEventListener("paste", (event) => takeFiles(event.clipboardData?.files ?? [], event));
  restore();
  grow();
}

export function setImages(reads) { readsImages = reads; }

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) send();
  } else if (event.key === "ArrowUp" && !el("question").value) {
    const last = turns.findLast((turn) => turn.role === "user");
    if (last) { event.preventDefault(); el("question").value = last.content; grow(); }
  }
}

function onAnyKey(event) {
  if (event.key === "Escape" && running) stop();
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); el("question").focus(); }
}

function stop() { running?.abort(); }

function send() {
  const text = el("question").value.trim();
  if (!text && !images.length) return;
  const turn = { role: "user", content: text };
  if (images.length) turn.images = images;
  turns.push(turn);
  images = [];
  showImages();
  el("question").value = "";
  grow();
  notice("");
  show(turn);
  ask();
}

function forget() {
  stop();
  turns = [];
  images = [];
  showImages();
  notice("");
  el("log").replaceChildren();
  el("empty").hidden = false;
  save(true);
  el("question").focus();
}

// ---- asking

async function ask() {
  const talk = turns;  // New begins another one, and what comes late must not get into it
  let body;
  try {
    body = { messages: spoken(talk), stream: true, stream_options: { include_usage: true }, ...requestSettings() };
    const tools = readTools();
    if (tools) body.tools = tools;
  } catch (error) {
    notice(error.message);
    return;
  }
  const turn = { role: "assistant", content: "", reasoning: "", tool_calls: [], facts: [], error: "" };
  talk.push(turn);
  const view = show(turn, true);
  running = new AbortController();
  busy(true);
  const began = performance.now();
  let locked = false;
  try {
    for await (const event of answer(body, apiKey(), running.signal)) {
      const choice = event.choices?.[0];
      if (choice?.delta) take(turn, choice.delta, began);
      if (event.duovolt) turn.facts = facts(event.duovolt, choice?.finish_reason);
      if (event.usage) turn.facts.push(`${event.usage.completion_tokens} tokens`);
      view.later();
      if (talk === turns) save(false);
    }
  } catch (error) {
    if (error.name === "AbortError") turn.facts = ["stopped"];
    else turn.error = error.message;
    locked = error instanceof Refusal && error.status === 401;
  }
  if (turn.reasoning && turn.thought === undefined) turn.thought = performance.now() - began;
  running = null;
  busy(false);
  if (talk !== turns) return;
  view.waiting(false);
  view.now();
  save(true);
  if (locked) askForKey();
  else if (!matchMedia("(pointer: coarse)").matches) el("question").focus();
}

function take(turn, delta, began) {
  if (delta.reasoning_content) turn.reasoning += delta.reasoning_content;
  if (delta.content || delta.tool_calls) turn.thought ??= performance.now() - began;
  turn.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const call = (turn.tool_calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
}

// The turns as the API takes them: an answer that failed before its first word is left out.
function spoken(talk) {
  const system = systemMessage();
  return [...(system ? [{ role: "system", content: system }] : []), ...talk.flatMap((turn) => {
    if (turn.role === "user" && turn.images) {
      const parts = turn.images.map((url) => ({ type: "image_url", image_url: { url } }));
      return [{ role: "user", content: [...parts, { type: "text", text: turn.content }] }];
    }
    if (turn.role === "tool") return [{ role: "tool", tool_call_id: turn.tool_call_id, content: turn.content }];
    if (turn.role === "user") return [{ role: "user", content: turn.content }];
    if (!turn.content && !turn.tool_calls.length) return [];
    const message = { role: "assistant", content: turn.content };
    if (turn.reasoning) message.reasoning_content = turn.reasoning;
    if (turn.tool_calls.length) message.tool_calls = turn.tool_calls;
    return [message];
  })];
}

function facts(timings, finish) {
  const found = [];
  if (timings.tokens_per_second) found.push(`${timings.tokens_per_second.toFixed(1)} tok/s`);
  if (timings.acceptance != null) found.push(`${Math.round(100 * timings.acceptance)} % of drafts accepted`);
  if (finish === "length") found.push("cut at the length limit");
  return found;
}

function busy(is) {
  el("send").textContent = is ? "Stop" : "Send";
  el("send").classList.toggle("stop", is);
  el("send").title = is ? "Esc" : "Enter";
}

function askForKey() {
  if (el("settings").hidden) el("toggle").click();
  el("key").focus();
}

// ---- showing

// A turn in the log; for an answer, what brings it up to date.
function show(turn, live = false) {
  el("empty").hidden = true;
  for (const old of el("log").querySelectorAll("[data-last]")) old.remove();
  const node = element("article", "turn " + turn.role);
  el("log").append(node);
  if (turn.role !== "assistant") {
    for (const url of turn.images ?? []) { const image = element("img"); image.src = url; image.alt = "your image"; node.append(image); }
    node.append(turn.content);
    toEnd();
    return null;
  }
  const thought = element("div");
  const summary = element("summary", "", "Thinking");
  const think = element("details", "think", summary, thought);
  const text = element("div", "text");
  const calls = element("div");
  const cursor = element("span", "waiting");
  const error = element("div", "error");
  const foot = element("div", "foot");
  node.append(think, text, calls, cursor, error, foot);
  const markdown = new Markdown(text);
  let asked = false;
  const view = {
    waiting(is) { cursor.hidden = !is; think.classList.toggle("live", is); },
    later() {  // as often as the screen, not as the tokens
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => { asked = false; view.now(); });
    },
    now() {
      const follow = atEnd();
      think.hidden = !turn.reasoning;
      if (thought.textContent.length !== turn.reasoning.length) thought.textContent = turn.reasoning;
      const over = turn.thought !== undefined;
      summary.textContent = over ? `Thought for ${(turn.thought / 1000).toFixed(1)} s` : "Thinking";
      if (over) think.classList.remove("live");
      text.hidden = !turn.content.trim();
      markdown.show(turn.content);
      calls.replaceChildren(...turn.tool_calls.map((call) => callNode(call)));
      error.hidden = !turn.error;
      error.textContent = turn.error;
      foot.replaceChildren(...turn.facts.map((fact) => element("span", "", fact)));
      if (cursor.hidden) addActions(turn, calls, foot);
      if (follow) toEnd();
    },
  };
  view.waiting(live);
  view.now();
  toEnd();
  return view;
}

function callNode(call) {
  let shown = call.function.arguments;
  try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* not whole yet: as it is */ }
  const name = element("code", "", call.function.name);
  return element("div", "call", element("header", "", "Calls ", name), element("pre", "", element("code", "", shown)));
}

function addActions(turn, calls, foot) {
  const last = turn === turns.at(-1);
  const action = (label, name, title) => {
    const button = element("button", "quiet", label);
    button.type = "button";
    button.dataset[name] = "answer";
    button.title = title;
    return button;
  };
  if (turn.content) foot.append(action("Copy", "copy", "Copy the answer"));
  if (!last) return;
  const again = action("Regenerate", "again", "Ask once more");
  again.dataset.last = "";
  foot.append(again);
  if (!turn.tool_calls.length || turn.error) return;
  const fields = turn.tool_calls.map((call) => {
    const field = element("input");
    field.placeholder = `What ${call.function.name} answers`;
    field.setAttribute("aria-label", field.placeholder);
    return field;
  });
  const form = element("form", "", ...fields, element("button", "", "Send"));
  form.dataset.last = "";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    turn.tool_calls.forEach((call, number) => {
      const result = { role: "tool", tool_call_id: call.id, content: fields[number].value };
      turns.push(result);
      show(result);
    });
    ask();
  });
  calls.lastChild.append(form);
}

function onClick(event) {
  const button = event.target.closest("button");
  if (!button) return;
  const article = button.closest("article");
  if (button.dataset.copy === "code") copy(button.parentElement.querySelector("code").textContent, button);
  if (button.dataset.copy === "answer") copy(turns[[...el("log").children].indexOf(article)].content, button);
  if (button.dataset.again && !running) {
    turns.pop();
    article.remove();
    ask();
  }
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no clipboard outside https and localhost: the old way
    const field = element("textarea", "", text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}

function atEnd() {
  const scroll = el("scroll");
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
}

function toEnd() { el("scroll").scrollTop = el("scroll").scrollHeight; }

function grow() {
  el("question").style.height = "auto";
  el("question").style.height = el("question").scrollHeight + 2 + "px";
}

function notice(text) {
  el("notice").textContent = text;
  el("notice").hidden = !text;
}

// ---- images

function onDrag(event) {
  const files = event.dataTransfer?.types.includes("Files");
  if (!files) return;
  event.preventDefault();
  document.body.classList.toggle("dropping", event.type === "dragover");
  if (event.type === "drop") takeFiles(event.dataTransfer.files, event);
}

function takeFiles(files, event) {
  if (!files.length) return;
  event.preventDefault();
  if (!readsImages) return notice("This model reads text only: the file was not taken.");
  for (const file of files) {
    if (!file.type.startsWith("image/")) { notice(`${file.name} is no image.`); continue; }
    if (file.size > IMAGE_BYTES) { notice(`${file.name} has more than ${IMAGE_BYTES >> 20} MB.`); continue; }
    const reader = new FileReader();
    reader.onload = () => { images.push(reader.result); showImages(); };
    reader.readAsDataURL(file);
  }
}

function showImages() {
  el("images").hidden = !images.length;
  el("images").replaceChildren(...images.map((url, number) => {
    const image = element("img");
    image.src = url;
    image.alt = "image to send";
    const button = element("button", "", image);
    button.type = "button";
    button.title = "Take it out";
    button.addEventListener("click", () => { images.splice(number, 1); showImages(); });
    return button;
  }));
}

// ---- keeping

function save(now) {
  if (leaving || !now && performance.now() - saved < SAVE_MS) return;
  saved = performance.now();
  try {
    localStorage.setItem(KEPT, JSON.stringify(turns.map(({ images: dropped, ...turn }) => turn)));
  } catch { /* no room: the conversation is longer than a browser keeps */ }
}

function restore() {
  try {
    turns = JSON.parse(localStorage.getItem(KEPT)) ?? [];
  } catch {
    turns = [];
  }
  for (const turn of turns) {
    if (turn.role === "assistant" && !turn.facts.length && !turn.error) turn.facts = ["broken off when the page was left"];
    show(turn);
  }
}
