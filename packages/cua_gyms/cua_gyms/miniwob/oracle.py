"""Reads the next right action of some MiniWoB++ families from the page.

For warm starts and tests. Reads the document of a gym's tab through
`WobPage.evaluate` and returns a `GuiAction` for the current screen; it
keeps no state, so it also continues after a policy's mistakes.

Does not solve other families than `ORACLE_FAMILIES`.
"""

from __future__ import annotations

import json
from typing import Any

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base

from cua_gyms.miniwob import miniwob_gym
from cua_gyms.miniwob import page as page_lib

_Action = gui_action.GuiAction
_Kind = gui_action.GuiActionKind

# JavaScript that the expressions below may use: what the page asks for, and the
# parts of it that stand in quotes.
_PRELUDE = r"""
const said = (u => u.utterance ?? u)(core.getUtterance());
const quoted = [...said.matchAll(/"(.*?)"/g)].map(m => m[1]);
const find = selector => document.querySelector(selector);
const named = (selector, name) => [...document.querySelectorAll(selector)].find(
    e => e.textContent.trim() === name);
// The next box whose mark is not as asked for, then the button.
const boxes = wanted => [...document.querySelectorAll('#boxes label')].find(
    l => l.querySelector('input').checked !== wanted.includes(
        l.textContent.trim()))?.querySelector('input') ?? find('#subbtn');
"""

# Each is an expression of the element to click now.
_CLICK = {
  "click-button": "named('#area button', quoted[0])",
  "click-button-sequence": (
    "find(buttonsPushed.length ? '#subbtn2' : '#subbtn')"
  ),
  "click-checkboxes": (
    "boxes(/Select (.*) and click/.exec(said)[1].split(', '))"
  ),
  "click-color": (
    "find(`#area [data-color='${/the (.*) colored/.exec(said)[1]}']`)"
  ),
  "click-dialog": "find('.ui-dialog button.ui-button')",
  "click-dialog-2": (
    "quoted[0] === 'x' ? find('.ui-dialog-titlebar button')"
    " : named('.ui-dialog-buttonpane button', quoted[0])"
  ),
  "click-link": "named('#area .alink', quoted[0])",
  "click-option": "boxes([/Select (.*) and click/.exec(said)[1]])",
  "click-tab": "find(`#area a[href='#tabs-${/#(.)/.exec(said)[1]}']`)",
  "click-test": "find('#subbtn')",
  "click-test-2": "find('#subbtn')",
  "click-test-transfer": ("find(/TWO/.test(said) ? '#subbtn2' : '#subbtn')"),
  "click-widget": "find(`#area [data-type='${quoted[0]}']`)",
  "focus-text": "find('#tt')",
  "focus-text-2": "find(`#tt${/(\\d)/.exec(said)[1]}`)",
  "unicode-test": "named('#area button', quoted[0])",
}
# Each is an expression of the fields to fill in order, with what goes into
# them; then `#subbtn` is to be clicked.
_FILL = {
  "enter-password": (
    "[[find('#password'), quoted[0]], [find('#verify'), quoted[0]]]"
  ),
  "enter-text": "[[find('#tt'), quoted[0]]]",
  "enter-text-2": (
    "[[find('#tt'), /upper/.test(said) ? quoted[0].toUpperCase()"
    " : quoted[0].toLowerCase()]]"
  ),
  "enter-text-dynamic": "[[find('#tt'), quoted[0]]]",
  "login-user": (
    "[[find('#username'), quoted[0]], [find('#password'), quoted[1]]]"
  ),
}

ORACLE_FAMILIES = tuple(sorted({**_CLICK, **_FILL}))


async def oracle_action(gym: miniwob_gym.MiniWobGym) -> _Action | None:
  """Returns the next right action in the gym's episode; None when it is over.

  Raises:
    RuntimeError: no episode is running.
    ValueError: the family has no oracle.
    LookupError: the element to click is missing or wholly covered: this page
      cannot be solved.
  """
  if gym.task is None or gym.page is None:
    raise RuntimeError("no episode is running; call start(task) first")
  if gym.over:
    return None
  family = gym.task.family
  if family in _CLICK:
    return await _click(gym, gym.page, gym.task, _CLICK[family])
  if family not in _FILL:
    raise ValueError(
      f"there is no oracle for {family!r}; known: {', '.join(ORACLE_FAMILIES)}"
    )
  # The first field that is not as it should be.
  unfilled = f"""{_FILL[family]}.find(([e, wanted]) => e.value !== wanted)"""
  state = await gym.page.evaluate(
    "(() => {%s const next = %s; if (!next) return null;"
    " const [e, wanted] = next;"
    " return [e.id, wanted, e.value.length, e.selectionEnd -"
    " e.selectionStart, document.activeElement === e]; })()"
    % (_PRELUDE, unfilled)
  )
  if state is None:
    return await _click(gym, gym.page, gym.task, "find('#subbtn')")
  field, text, length, selected, focused = state
  if not focused:
    return await _click(gym, gym.page, gym.task, f"find('#{field}')")
  if selected < length:
    return _Action(_Kind.KEY, keys=("ctrl", "a"))
  return _Action(_Kind.TYPE, text=text)


async def describe(
  gym: miniwob_gym.MiniWobGym, x: float, y: float
) -> str | None:
  """Returns the name of the element at a pixel; None when it has none.

  Raises:
    RuntimeError: no episode is running.
  """
  if gym.page is None:
    raise RuntimeError("no episode is running; call start(task) first")
  return await gym.page.evaluate(
    """((x, y) => {
        const e = document.elementFromPoint(x, y)
            ?.closest('button, input, textarea, a, label, .alink, .color');
        if (!e) return null;
        if (e.matches('.color')) return `the ${e.dataset.color} box`;
        if (e.closest('.ui-dialog-titlebar')) {
          return 'the close box of the dialog';
        }
        if (e.matches('label') || /^(checkbox|radio)$/.test(e.type)) {
          const name = e.closest('label')?.textContent.trim();
          return name ? `the ${name} box` : null;
        }
        if (e.matches('input:not([type=button]):not([type=submit]), textarea'))
          return 'the text field';
        const name = (e.value || e.textContent).trim();
        if (!name) return null;
        return `the ${name} ${e.matches('a, .alink') ? 'link' : 'button'}`;
      })(%g, %g)"""
    % (x / gym.scale, y / gym.scale)
  )


async def _click(
  gym: miniwob_gym.MiniWobGym,
  page: page_lib.WobPage,
  task: base.Task,
  element: str,
) -> _Action:
  """Returns a click on an uncovered point of the element (an expression)."""
  point: list[Any] | None = await page.evaluate(
    """(() => {
        %s
        const e = %s;
        if (!e) return null;
        const r = e.getBoundingClientRect();
        const shown = (x, y) => {
          if (x < 0 || y < 0 || x >= %g || y >= %g) return false;
          const hit = document.elementFromPoint(x, y);
          return hit && (hit === e || e.contains(hit));
        };
        for (const [u, v] of [[.5, .5], [.2, .2], [.8, .2], [.2, .8], [.8, .8],
                              [.05, .5], [.95, .5], [.5, .05], [.5, .95]]) {
          const x = Math.floor(r.left + u * r.width);
          const y = Math.floor(r.top + v * r.height);
          if (shown(x, y)) return [x, y];
        }
        // Pages drop elements on top of each other: a sliver may be left.
        for (let y = Math.floor(r.top); y < r.bottom; ++y) {
          for (let x = Math.floor(r.left); x < r.right; ++x) {
            if (shown(x, y)) return [x, y];
          }
        }
        return null;
      })()"""
    % (_PRELUDE, element, gym.width / gym.scale, gym.height / gym.scale)
  )
  if point is None:
    raise LookupError(
      f"{task.task_id}: no point of {json.dumps(element)} can be clicked"
    )
  x, y = (gym.scale * (c + 0.5) // 1 for c in point)
  return _Action(_Kind.CLICK, x=x, y=y)
