// Everything a page does in the browser. The page is whole without it.
import * as charts from "./charts.js";
import * as live from "./live.js";
import * as player from "./player.js";

const THEMES = ["", "dark", "light"];
const root = document.documentElement;

function showTheme(button) {
  const word = root.dataset.theme || "system";
  button.textContent = `Theme: ${word}`;
}

function nextTheme(button) {
  const now = THEMES.indexOf(root.dataset.theme || "");
  const theme = THEMES[(now + 1) % THEMES.length];
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  document.cookie = `theme=${theme}; path=/; max-age=31536000; samesite=strict`;
  showTheme(button);
  document.dispatchEvent(new CustomEvent("theme-changed"));
}

function rows() {
  return [...document.querySelectorAll("[data-row]")].filter(
    (row) => row.offsetParent !== null
  );
}

function moveRow(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const to = at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by;
  const row = all[Math.min(all.length - 1, Math.max(0, to))];
  row.focus();
  row.scrollIntoView({ block: "nearest" });
}

function follow(selector) {
  const found = [...document.querySelectorAll(selector)];
  if (found.length) found[found.length - 1].click();
  return found.length > 0;
}

function typing(target) {
  return target.closest("input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]");
}

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing(event.target) || document.querySelector("dialog[open]")) return;
  const actions = {
    j: () => moveRow(1),
    k: () => moveRow(-1),
    "[": () => follow("[data-previous]"),
    "]": () => follow("[data-next]"),
    u: () => follow("[data-up]") || follow(".brand"),
    t: () => nextTheme(document.getElementById("theme")),
    "?": () => document.getElementById("keys").showModal(),
    "/": () => document.getElementById("search")?.focus(),
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  } else {
    player.onKey(event);
  }
}

function start() {
  const theme = document.getElementById("theme");
  theme.hidden = false;
  showTheme(theme);
  theme.addEventListener("click", () => nextTheme(theme));
  const help = document.getElementById("help");
  help.hidden = false;
  help.addEventListener("click", () => document.getElementById("keys").showModal());
  document.addEventListener("keydown", onKey);
  live.start();
  charts.start();
  player.start();
}

start();

// Copies the text of the element that a button names; without a clipboard, as
// on plain HTTP from another machine, the text is selected.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const shown = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(shown.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(shown);
    button.textContent = "Selected: press Ctrl+C";
  }
});
