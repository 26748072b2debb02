// A rollout turn by turn: keys, and playing.
import { show } from "./live.js";

let timer = null;

const strip = () => document.querySelector("[data-player]");
const turn = () => document.getElementById("turn");

function go(number) {
  const link = strip()?.querySelector(`[data-turn="${number}"]`);
  if (!link) return Promise.resolve(false);
  return show(link.href, { push: false }).then((done) => {
    if (done) history.replaceState(null, "", link.href);
    return done;
  });
}

function current() {
  const found = turn();
  return found?.dataset.number
    ? { number: Number(found.dataset.number), last: Number(found.dataset.last) }
    : null;
}

function button() {
  return document.querySelector("[data-play]");
}

function stop() {
  clearTimeout(timer);
  timer = null;
  const play = button();
  if (play) {
    play.textContent = "▶ Play";
    play.setAttribute("aria-pressed", "false");
  }
}

function wait() {
  return Number(document.querySelector("[data-speed] select")?.value || 700);
}

function tick() {
  const at = current();
  if (!at || at.number >= at.last) return stop();
  go(at.number + 1).then((done) => {
    if (!done) stop();
    else if (timer !== null) timer = setTimeout(tick, wait());
  });
}

function toggle() {
  if (timer !== null) return stop();
  const at = current();
  if (!at || at.last < 2) return;
  const play = button();
  play.textContent = "❚❚ Stop";
  play.setAttribute("aria-pressed", "true");
  timer = setTimeout(tick, 0);
  if (at.number >= at.last) {
    clearTimeout(timer);
    timer = -1;
    go(1).then(() => {
      if (timer !== null) timer = setTimeout(tick, wait());
    });
  }
}

// The next screens are fetched before they are asked for.
function ahead() {
  const at = current();
  if (!at) return;
  for (const number of [at.number + 1, at.number + 2]) {
    const image = strip()?.querySelector(`[data-turn="${number}"] img`);
    if (image) new Image().src = image.src.replace(/\/thumbnail$/, "");
  }
  const link = strip()?.querySelector("[aria-current]");
  if (link) {
    const box = strip();
    box.scrollLeft = link.offsetLeft - box.offsetLeft - box.clientWidth / 2 + link.clientWidth / 2;
  }
}

export function onKey(event) {
  const at = current();
  if (!at || !strip()) return;
  if (event.key === " " && event.target.closest("button, summary, a[download]")) return;
  const to = {
    ArrowRight: at.number + 1, ArrowLeft: at.number - 1, Home: 1, End: at.last,
  }[event.key];
  if (to !== undefined && !event.target.closest(".plot")) {
    event.preventDefault();
    stop();
    if (to >= 1 && to <= at.last) go(to);
  } else if (event.key === " ") {
    event.preventDefault();
    toggle();
  }
}

export function start() {
  if (!strip()) return;
  const play = button();
  play.hidden = false;
  document.querySelector("[data-speed]").hidden = false;
  play.addEventListener("click", toggle);
  document.addEventListener("parts-changed", ahead);
  ahead();
}
