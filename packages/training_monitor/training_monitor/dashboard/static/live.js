// Parts of a page, replaced by those that the server makes now: after a click
// on a link or form that only changes the view, and when something changed.
// A part is an element with `data-part` and an id. Charts are none: charts.js
// adds those that a page gets while it is open.

// Changes of a moment go together; then a page waits this long. A page that is
// watched, like a running episode's, has its own `data-every`.
const SOON_MS = 50;
const EVERY_MS = Number(document.body.dataset.every) || 1500;
const maker = window.trustedTypes
  ? // Only answers of this server come here, made by the same templates.
    window.trustedTypes.createPolicy("monitor-page", { createHTML: (text) => text })
  : { createHTML: (text) => text };

let running = null;
let again = false;

function parse(text) {
  return new DOMParser().parseFromString(maker.createHTML(text), "text/html");
}

function keepOpen(from, to) {
  const open = [...from.querySelectorAll("details")].map((d) => d.open);
  const next = [...to.querySelectorAll("details")];
  if (open.length === next.length) next.forEach((d, n) => (d.open = open[n]));
}

// Whether somebody is writing a label or a note there.
function isTyped(part) {
  const fields = [...part.querySelectorAll(".annotations input, .annotations textarea")];
  return fields.some((f) => f === document.activeElement || f.value !== f.defaultValue);
}

function replace(fresh, quiet) {
  const focused = document.activeElement;
  const path = focused && focused.getAttribute && focused.getAttribute("href");
  for (const part of document.querySelectorAll("[data-part]")) {
    const next = fresh.getElementById(part.id);
    if (!next) {
      part.replaceChildren();
      continue;
    }
    if (part.isEqualNode(next) || (quiet && isTyped(part))) continue;
    if (quiet) keepOpen(part, next);
    for (const box of part.querySelectorAll("input[type=checkbox]:checked")) {
      const same = [...next.querySelectorAll("input[type=checkbox]")].find((b) => b.value === box.value);
      if (same) same.checked = true;
    }
    const left = part.scrollLeft;
    const adopted = document.adoptNode(next);
    part.replaceWith(adopted);
    adopted.scrollLeft = left;
  }
  if (path && !document.contains(focused)) {
    const same = [...document.querySelectorAll("a[href]")].find((a) => a.getAttribute("href") === path);
    if (same) same.focus({ preventScroll: true });
  }
  document.title = fresh.title;
  document.dispatchEvent(new CustomEvent("parts-changed", { detail: fresh }));
}

// Resolves to whether the parts are those of `url` now. The last one asked
// for wins.
export async function show(url, { push = true, quiet = false } = {}) {
  running?.abort();
  const mine = (running = new AbortController());
  try {
    const answer = await fetch(url, { signal: mine.signal, headers: { accept: "text/html" } });
    if (answer.redirected && new URL(answer.url).pathname === "/login") {
      location.assign(answer.url);
      return false;
    }
    if (!answer.ok) {
      if (!quiet) location.assign(url);
      return false;
    }
    const text = await answer.text();
    if (mine !== running) return false;
    if (push) history.pushState(null, "", url);
    replace(parse(text), quiet);
    return true;
  } catch (error) {
    if (error.name !== "AbortError" && !quiet) location.assign(url);
    return false;
  } finally {
    if (mine === running) running = null;
  }
}

function onClick(event) {
  const link = event.target.closest("a[data-swap]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  // An address within SVG is an object.
  show(new URL(link.href.baseVal ?? link.href, location.href).href);
}

function address(form) {
  const url = new URL(form.getAttribute("action") || location.pathname, location.href);
  for (const [name, value] of new FormData(form)) {
    if (value !== "") url.searchParams.append(name, value);
  }
  return url.href;
}

function onSubmit(event) {
  if (!event.target.matches("form[data-swap]")) return;
  event.preventDefault();
  show(address(event.target));
}

function onChange(event) {
  if (event.target.matches("select[data-submit]")) event.target.form.requestSubmit();
}

function refresh() {
  if (running) {
    again = true;
    return;
  }
  again = false;
  show(location.href, { push: false, quiet: true }).finally(() => {
    if (again) setTimeout(refresh, EVERY_MS);
  });
}

// Calls `notify` with the kinds that changed: soon, and once in EVERY_MS at most.
function gather(notify) {
  let timer = null;
  let last = -EVERY_MS;
  let kinds = new Set();
  return (kind) => {
    kinds.add(kind);
    timer ??= setTimeout(() => {
      const now = kinds;
      last = performance.now();
      timer = null;
      kinds = new Set();
      notify(now);
    }, Math.max(SOON_MS, last + EVERY_MS - performance.now()));
  };
}

// Whether the page is of a run that has ended.
function isOver() {
  const state = document.getElementById("run-head")?.dataset.state;
  return ["completed", "failed", "cancelled"].includes(state);
}

function watch(training) {
  const sign = document.getElementById("live");
  const url = "/api/v1/events" + (training ? `?training_id=${training}` : "");
  const changed = gather((kinds) => {
    document.dispatchEvent(new CustomEvent("data-changed", { detail: kinds }));
    refresh();
  });
  let source = null;
  function say(word, on = false) {
    sign.textContent = isOver() ? "run over" : word;
    sign.classList.toggle("on", on && !isOver());
  }
  // The server of a run ends with it, and says so shortly before.
  async function serverEnds() {
    document.dispatchEvent(new CustomEvent("data-changed", { detail: new Set(["step", "eval"]) }));
    await show(location.href, { push: false, quiet: true });
    close();
    say("server ended");
    sign.title = "The run's server has ended with it. Its pages are served again by: python -m training_monitor serve";
  }
  function open() {
    if (source) return;
    say("connecting");
    source = new EventSource(url);
    source.addEventListener("open", () => say("live", true));
    source.addEventListener("error", () => say("no connection"));
    source.addEventListener("over", serverEnds);
    source.addEventListener("change", (event) => changed(JSON.parse(event.data).kind));
    source.addEventListener("reset", () => changed("step"));
  }
  function close() {
    source?.close();
    source = null;
  }
  sign.hidden = false;
  document.addEventListener("parts-changed", () => {
    if (source) say(source.readyState === EventSource.OPEN ? "live" : "connecting", source.readyState === EventSource.OPEN);
  });
  // A browser has six connections to a server: pages out of sight need none.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else {
      open();
      ["step", "eval", "baseline"].forEach(changed);
    }
  });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  if (!document.hidden) open();
}

export function start() {
  document.addEventListener("click", onClick);
  document.addEventListener("submit", onSubmit);
  document.addEventListener("change", onChange);
  window.addEventListener("popstate", () => show(location.href, { push: false }));
  const training = document.body.dataset.training;
  if (training !== undefined) watch(training);
}
