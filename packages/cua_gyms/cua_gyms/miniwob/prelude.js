// Runs in each new document before its own scripts; see page.py.
//
// The page's time stands still except in advance(): timers, animation frames,
// Date and performance.now() all read one counter of milliseconds. __tunix is
// what Python calls; all it returns is JSON.
(() => {
  'use strict';
  const EPOCH = Date.UTC(2020, 0, 1, 12);
  const FRAME_MS = 16;
  const RealDate = Date;
  const realFrame = window.requestAnimationFrame.bind(window);
  const realTimeout = window.setTimeout.bind(window);

  // Time.
  let time = 0;
  let lastId = 0;
  const timers = new Map();  // id -> {at, every, run}, in order of creation
  const add = (at, every, run) => {
    timers.set(++lastId, {at, every, run});
    return lastId;
  };
  const runner = (code, args) => typeof code === 'function'
      ? () => code.apply(window, args)
      : () => (0, eval)(String(code));
  const span = delay => Math.max(1, Number(delay) || 0);
  const remove = id => { timers.delete(id); };
  window.setTimeout = (code, delay, ...args) =>
      add(time + span(delay), 0, runner(code, args));
  window.setInterval = (code, delay, ...args) =>
      add(time + span(delay), span(delay), runner(code, args));
  window.requestAnimationFrame = callback =>
      add(time - time % FRAME_MS + FRAME_MS, 0, () => callback(time));
  window.requestIdleCallback = callback => add(time + 1, 0, () =>
      callback({didTimeout: false, timeRemaining: () => FRAME_MS}));
  window.clearTimeout = window.clearInterval = remove;
  window.cancelAnimationFrame = window.cancelIdleCallback = remove;
  Performance.prototype.now = () => time;
  const now = () => EPOCH + time;
  window.Date = new Proxy(RealDate, {
    construct: (target, args, self) =>
        Reflect.construct(target, args.length ? args : [now()], self),
    apply: () => new RealDate(now()).toString(),
    get: (target, name) => name === 'now' ? now : target[name],
  });
  const advance = async milliseconds => {
    const end = time + milliseconds;
    for (;;) {
      let next = null, id = 0;
      for (const [key, timer] of timers) {
        if (timer.at <= end && (next === null || timer.at < next.at)) {
          next = timer;
          id = key;
        }
      }
      if (next === null) break;
      time = Math.max(time, next.at);
      if (next.every) next.at = time + next.every; else timers.delete(id);
      try {
        next.run();
      } catch (error) {
        reportError(error);
      }
      await null;  // Promises that it settled have their turn.
    }
    time = end;
  };

  // What a page draws by lot before it is seeded is always the same.
  let state = 1;
  Math.random = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 4294967296;
  };

  // The browser's clipboard is common to all tabs, this one is not.
  let clip = '';
  const keep = () => {
    const e = document.activeElement;
    const field = e && (e.tagName === 'TEXTAREA' || e.tagName === 'INPUT');
    const text = field && e.selectionStart !== null
        ? e.value.substring(e.selectionStart, e.selectionEnd)
        : String(getSelection());
    if (text) clip = text;
  };
  document.addEventListener('copy', keep, true);
  document.addEventListener('cut', keep, true);
  document.addEventListener('paste', event => {
    event.preventDefault();
    if (clip) document.execCommand('insertText', false, clip);
  }, true);

  // Links and forms that would leave the document do nothing.
  window.navigation.addEventListener('navigate', event => {
    if (!event.hashChange && event.cancelable) event.preventDefault();
  });

  const STYLE = `
    #reward-display, #click-canvas, #sync-task-cover {
      display: none !important;
    }
    /* Nothing moves by itself. */
    *, *::before, *::after {
      caret-animation: manual;
      transition: none !important;
    }
    /* Lists drop down inside the page, where a screenshot sees them. */
    select:not([multiple]):not([size]),
    select:not([multiple]):not([size])::picker(select) {
      appearance: base-select;
    }
    ::picker(select) {
      max-height: 100px;
      overflow-y: auto;
    }
    select:not([multiple]):not([size]) option {
      min-block-size: 16px;
    }`;
  let marker = null, limit = 0, began = 0, pictures = [];
  const prepare = () => {
    const style = document.createElement('style');
    style.textContent = STYLE;
    document.head.appendChild(style);
    marker = document.createElement('div');
    marker.style.cssText = 'position: fixed; top: 0; right: 0;' +
        'width: MARKER_SIZEpx; height: MARKER_SIZEpx; z-index: 99999;' +
        'pointer-events: none';
    document.documentElement.appendChild(marker);
    document.body.removeEventListener('click', core.canvasDrawClick);
    limit = core.EPISODE_MAX_TIME;
  };
  // Leaves nothing of the last instance to paste, to undo or, after an edit, to
  // redo.
  const forget = () => {
    clip = '';
    const undo = () => document.queryCommandEnabled('undo') &&
        document.execCommand('undo');
    for (let i = 0; i < 1000 && undo(); i++);  // A page may edit in answer.
    const field = document.createElement('input');
    document.body.prepend(field);
    field.focus();
    document.execCommand('insertText', false, 'x');
    undo();
    field.remove();
  };
  // Real time, so that a lost file cannot hold up the episode for ever.
  const loaded = picture => Promise.race([
    picture.decode().catch(() => null),
    new Promise(resolve => realTimeout(resolve, 2000)),
  ]);

  window.__tunix = {
    // Starts an instance; returns its goal.
    start: async (seed, mode, maxTime, images) => {
      if (marker === null) {
        prepare();
        // Kept, so that they are shown at once wherever the page uses them.
        pictures = images.map(url => {
          const picture = new Image();
          picture.src = url;
          return picture;
        });
        await Promise.all(pictures.map(loaded));
      } else {
        forget();
        timers.clear();
        core.EP_TIMER = null;
        // Tab begins at the top again, as on a page that was never clicked.
        const first = document.createElement('button');
        document.body.prepend(first);
        first.focus();
        first.remove();
      }
      time = began = 0;
      core.EPISODE_MAX_TIME = maxTime || limit;
      core.setDataMode(mode);
      Math.seedrandom(seed);
      core.startEpisodeReal();
      for (let i = 0; i < 100 && !WOB_TASK_READY; i++) await advance(50);
      if (!WOB_TASK_READY) throw new Error('not ready after 5 s of its time');
      await advance(FRAME_MS);
      await Promise.all([...document.images].map(loaded));
      began = time;
      const goal = core.getUtterance();
      return typeof goal === 'string' ? goal : goal.utterance;
    },
    // Lets time pass, then shows `number` and returns the page's state.
    step: async (number, milliseconds, settle) => {
      if (settle) {  // Scrolling is carried out, then reported, by frames.
        await new Promise(realFrame);
        await new Promise(realFrame);
      }
      if (milliseconds > 0) await advance(milliseconds);
      marker.style.background =
          'rgb(' + (number & 255) + ',' + (number >> 8 & 255) + ',90)';
      return [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_GLOBAL,
              WOB_REWARD_REASON, time - began];
    },
  };
})();
