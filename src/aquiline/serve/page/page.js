// The page: wires the conversation, the composer and the settings to each other.

import { served } from "./api.js";
import { Conversation } from "./conversation.js";
import { Settings } from "./settings.js";

const find = (css) => document.querySelector(css);
const [message, send, stop, compare] = ["#message", "#send", "#stop", "#compare"].map(find);
const [scroller, panel, opener, main] = ["#conversation", "#settings", "#open", "main"].map(find);
const wide = matchMedia("(min-width: 60rem)"); // as in page.css: the settings stand beside the conversation

let model = null; // what the server tells of its model
let isAtEnd = true; // whether the reader follows the end of the conversation

const settings = new Settings(find("#fields"));
const conversation = new Conversation(
  find("#turns"),
  { turn: find("#turn-template"), answer: find("#answer-template") },
  {
    settings,
    model: () => model,
    running: showRunning,
    said: (text) => (find("#said").textContent = text),
    failed: () => openSettings(settings.fields.key),
  },
);

/** The focus stays where it is, unless what has it goes away. */
function showRunning(isRunning) {
  send.setAttribute("aria-disabled", isRunning);
  if (!isRunning && document.activeElement === stop) message.focus();
  stop.hidden = !isRunning;
  if (isRunning && document.activeElement === document.body) stop.focus();
  if (!isRunning && (model === null || "draft_generation" in model)) showModel();
}

async function showModel() {
  const shown = find("#model");
  try {
    model = await served(settings.key);
    const context = model.max_model_len ? `, ${model.max_model_len.toLocaleString("en")} tokens of context` : "";
    const learnt = "draft_generation" in model ? `, draft of generation ${model.draft_generation}` : "";
    shown.textContent = model.id.split("/").at(-1) + context + learnt;
    shown.title = model.id;
  } catch (failure) {
    model = null;
    shown.textContent = failure.kind === "key" ? "asks for an API key" : "does not answer";
    shown.title = failure.message;
    if (failure.kind === "key") openSettings(settings.fields.key);
  }
}

function submit() {
  const text = message.value;
  if (conversation.isRunning || !text.trim()) return;
  const { wrong } = settings;
  if (wrong) {
    openSettings(wrong);
    wrong.reportValidity();
    return;
  }
  message.value = "";
  isAtEnd = true;
  conversation.send(text, compare.checked);
}

function openSettings(field) {
  panel.hidden = false;
  placeSettings();
  field?.focus();
}

/** A narrow page shows the settings above the conversation, which then takes no focus. */
function placeSettings() {
  opener.setAttribute("aria-expanded", !panel.hidden);
  main.inert = !panel.hidden && !wide.matches;
}

opener.addEventListener("click", () => (panel.hidden ? openSettings() : closeSettings()));
wide.addEventListener("change", placeSettings);

function closeSettings() {
  panel.hidden = true;
  placeSettings();
  opener.focus();
}

find("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
stop.addEventListener("click", () => conversation.stop());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (conversation.isRunning) conversation.stop();
  else if (main.inert) closeSettings();
});
find("#new").addEventListener("click", () => {
  conversation.clear();
  message.focus();
});
for (const example of document.querySelectorAll(".example"))
  example.addEventListener("click", () => {
    message.value = example.textContent;
    message.focus();
  });
settings.fields.key.addEventListener("change", showModel);
settings.form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (main.inert) closeSettings();
  message.focus();
});

scroller.addEventListener("scroll", () => {
  isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
});
scroller.addEventListener("grown", () => {
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
});

panel.hidden = !wide.matches;
placeSettings();
showModel();
