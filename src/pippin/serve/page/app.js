// The page: its views, the settings, light and dark, and the keys that work everywhere.

import { ApiError } from "./api.js";
import { Chat } from "./chat.js";
import { announce, button, h } from "./dom.js";
import { Live } from "./live.js";
import { problemCard } from "./reply.js";
import { Settings } from "./settings.js";
import { Meter } from "./stream.js";
import { Structured } from "./structured.js";
import { Toolbox } from "./tools.js";

const byId = (id) => document.getElementById(id);
const wide = matchMedia("(min-width: 1180px)");
const THEMES = { auto: "Colors: as the system", light: "Colors: light", dark: "Colors: dark" };

// --- problems -----------------------------------------------------------------------------------------------------

/** Show an error above everything, until it is dismissed; without an error only the settings are opened. */
function showProblem(error) {
  if (error === null) return openSettings(true);
  const card = problemCard(error instanceof Error ? error : new ApiError(String(error)), { settings: openSettings });
  card.append(button("Dismiss", { image: "cross", quiet: true, class: "quiet", onclick: () => card.remove() }));
  byId("alerts").replaceChildren(card);
}

/** A problem with what the user gave, in the same place. */
function tell(message, advice) {
  const error = new ApiError(message, { status: 400 });
  Object.defineProperty(error, "advice", { value: advice });
  showProblem(error);
}

// --- views --------------------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("#tabs [role=tab]")];

function showView(tab) {
  for (const each of tabs) {
    const on = each === tab;
    each.setAttribute("aria-selected", String(on));
    each.tabIndex = on ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !on;
  }
  document.body.dataset.view = tab.id.replace("tab-", "");
  live.show(tab.id === "tab-live");
}

function wireTabs() {
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => showView(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = tabs[(to + tabs.length) % tabs.length];
      next.focus();
      showView(next);
    });
  });
}

// --- settings: docked where there is room, else a dialog -------------------------------------------------------------

const panel = byId("settings");

function openSettings(open = true) {
  if (panel.open) panel.close();
  if (open && wide.matches) panel.setAttribute("open", "");
  else if (open) panel.showModal();
  byId("toggle-settings").setAttribute("aria-expanded", String(panel.open));
  document.body.classList.toggle("docked", panel.open && wide.matches);
  if (open && wide.matches && document.activeElement !== document.body) byId("model").focus();
}

function wireSettings() {
  byId("toggle-settings").addEventListener("click", () => openSettings(!panel.open));
  byId("close-settings").addEventListener("click", () => {
    openSettings(false);
    byId("toggle-settings").focus();
  });
  panel.addEventListener("close", () => {
    byId("toggle-settings").setAttribute("aria-expanded", "false");
    document.body.classList.remove("docked");
  });
  panel.addEventListener("click", (event) => event.target === panel && !wide.matches && panel.close());
  wide.addEventListener("change", () => openSettings(wide.matches));
  openSettings(wide.matches);
}

// --- light and dark -----------------------------------------------------------------------------------------------

function setTheme(theme) {
  const known = THEMES[theme] ? theme : "auto";
  if (known === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = known;
  byId("theme").setAttribute("aria-label", THEMES[known]);
  byId("theme").title = THEMES[known];
  byId("theme").dataset.theme = known;
}

function wireTheme() {
  const names = Object.keys(THEMES);
  setTheme(localStorage.getItem("pippin-theme") ?? "auto");
  byId("theme").addEventListener("click", () => {
    const next = names[(names.indexOf(byId("theme").dataset.theme) + 1) % names.length];
    if (next === "auto") localStorage.removeItem("pippin-theme");
    else localStorage.setItem("pippin-theme", next);
    setTheme(next);
    announce(THEMES[next]);
  });
}

// --- start --------------------------------------------------------------------------------------------------------

const meter = new Meter();
const settings = new Settings(byId("settings-body"));
const toolbox = new Toolbox(byId("view-tools"));
const chat = new Chat({ settings, toolbox, meter, onproblem: showProblem });
const structured = new Structured(byId("view-structured"), { settings, meter, onproblem: showProblem });
const live = new Live(byId("view-live"), { meter });

function showStatus() {
  const busy = chat.busy || structured.busy;
  byId("status").className = `status ${busy ? "busy" : settings.model ? "ready" : "off"}`;
  byId("status-text").textContent = settings.model || "no model";
  const size = settings.facts?.context_size ?? settings.facts?.max_model_len;
  byId("status").title = size ? `${settings.model}, ${size.toLocaleString("en")} tokens of context` : settings.model;
}

function showTools() {
  const names = toolbox.active.map((tool) => tool.name);
  byId("tools-on").lastElementChild.textContent = names.length ? names.join(", ") : "No tools";
  byId("tools-on").classList.toggle("on", names.length > 0);
}

function wireConversation() {
  const file = byId("open-file");
  byId("new").addEventListener("click", () => {
    chat.clear();
    announce("A new conversation.");
  });
  byId("save").addEventListener("click", () => chat.save());
  byId("open").addEventListener("click", () => file.click());
  file.addEventListener("change", async () => {
    const [chosen] = file.files;
    file.value = "";
    if (!chosen) return;
    try {
      chat.open(await chosen.text());
      announce("The conversation is open.");
    } catch (error) {
      tell(`“${chosen.name}” cannot be opened.`, error.message);
    }
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || panel.matches(":modal")) return;
  if (chat.busy) chat.stop();
  else if (structured.busy) structured.stop();
});

settings.addEventListener("models", () => {
  showStatus();
  byId("alerts").replaceChildren();
});
settings.addEventListener("problem", ({ detail }) => {
  showStatus();
  showProblem(detail);
});
for (const view of [chat, structured]) view.addEventListener("busy", showStatus);
toolbox.addEventListener("change", showTools);
byId("tools-on").addEventListener("click", () => {
  showView(byId("tab-tools"));
  byId("tab-tools").focus();
});
byId("view-live").prepend(h("h1", { class: "unseen" }, "What the server does now"));
wireTabs();
wireTheme();
wireSettings();
wireConversation();
showTools();
showStatus();
settings.load();
byId("prompt").focus({ preventScroll: true });
