// What the user has set: kept in the browser, but for the key, which lives as long as the tab.

const el = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "thinking", "scheme", "system", "tools"];

export function startSettings() {
  for (const id of KEPT) {
    el(id).value = localStorage.getItem("duovolt." + id) ?? "";
    el(id).addEventListener("change", () => { localStorage.setItem("duovolt." + id, el(id).value); applyScheme(); });
  }
  el("key").value = sessionStorage.getItem("duovolt.key") ?? "";
  el("key").addEventListener("input", () => sessionStorage.setItem("duovolt.key", el("key").value));
  el("toggle").addEventListener("click", () => {
    el("settings").hidden = !el("settings").hidden;
    el("toggle").setAttribute("aria-expanded", String(!el("settings").hidden));
  });
  applyScheme();
}

function applyScheme() { document.documentElement.style.colorScheme = el("scheme").value || "light dark"; }

export function apiKey() { return el("key").value.trim(); }

// The fields of a request that the settings decide. Throws if one of them is out of its bounds.
export function requestSettings() {
  const found = {};
  for (const id of NUMBERS) {
    if (!el(id).checkValidity()) throw new Error(`${el(id).parentElement.firstChild.textContent.trim()}: ${el(id).validationMessage}`);
    if (el(id).value !== "") found[id] = Number(el(id).value);
  }
  if (el("thinking").value) found.chat_template_kwargs = { enable_thinking: el("thinking").value === "true" };
  return found;
}

export function systemMessage() { return el("system").value.trim(); }

// The list of tools, null without one. Throws if it is no JSON list.
export function readTools() {
  const text = el("tools").value.trim();
  if (!text) return null;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: not JSON (${error.message}).`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: expected a JSON list.");
  return tools.length ? tools : null;
}
