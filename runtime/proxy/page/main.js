// Puts the page together: settings, the two views, and the picture of the server that both show.

import { setImages, startChat } from "./chat.js";
import { startSettings } from "./settings.js";
import { lookAtStatus, startStatus } from "./status.js";

const el = (id) => document.getElementById(id);
const VIEWS = ["chat", "status"];

function look(view) {
  for (const name of VIEWS) {
    el(name).hidden = name !== view;
    el("tab-" + name).setAttribute("aria-selected", String(name === view));
  }
  lookAtStatus(view === "status");
  if (location.hash.slice(1) !== view && (location.hash || view !== "chat")) history.replaceState(null, "", "#" + view);
}

startSettings();
startChat();
for (const name of VIEWS) el("tab-" + name).addEventListener("click", () => look(name));
addEventListener("hashchange", () => look(location.hash === "#status" ? "status" : "chat"));
look(location.hash === "#status" ? "status" : "chat");
startStatus((picture) => {
  setImages(picture.images);
  document.title = picture.server.model;
  el("empty-model").textContent = `${picture.server.model} · ${picture.server.recipe} · ${picture.max_context.toLocaleString("en")} tokens of context`;
});
