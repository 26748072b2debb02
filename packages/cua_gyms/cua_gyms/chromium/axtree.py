"""Writes a page's accessibility tree as text, and acts on elements by its ids.

    RootWebArea 'Sign in', focused
      [1] textbox 'Name' value='Anna', required
      *[2] button 'Send', disabled=True

A line holds an element's id, role, name, value and states in the form of
BrowserGym's `flatten_axtree_to_str`; a tab is a level of depth. Lines that are
new or different since the turn before begin with `*`.

Promises:
* An id is an element's as long as the episode lasts, and is never another's.
* Only what lies in the viewport is written, and the options of lists that do;
  `more above` and `more below` in the first line tell of the rest.
* A text has at most `limit` characters; its last line tells how many lines it
  leaves out.
* The page is not changed by being read: ids are kept here, not in its document.
* Text goes into a page as the argument of a function, or by input events.

Does not: descend into frames, which are one line each, or into the shadow roots
of the browser's own widgets.

Source: browsergym.utils.obs of ServiceNow/BrowserGym.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.environments.gyms import spec

from cua_gyms.chromium import devtools
from cua_gyms.chromium import tab as tab_lib

OBSERVATIONS = ("screenshot", "axtree", "both")
"""What a gym may show of a page: its picture, its tree, or both."""
LIMIT = 8000
"""Characters of a tree's text, unless a gym's settings say otherwise."""
_NAME = 200
"""Characters of a name or a value that are written."""
_HIDDEN = 10
"""Ids of elements that are no longer shown, which are listed."""

# BrowserGym leaves these out, except `url`, the address of a page or a link.
_UNSHOWN = frozenset({
    "editable", "readonly", "level", "settable", "multiline", "invalid",
    "focusable", "url",
})  # fmt: skip
_IF_TRUE = frozenset({"required", "focused", "atomic"})
_WRITTEN_TYPES = frozenset({
    "boolean", "booleanOrUndefined", "tristate", "token", "tokenList",
    "integer", "number", "string",
})  # fmt: skip
_NO_LINE = frozenset({"LineBreak", "InlineTextBox"})
_CLICKABLE_ANYHOW = frozenset({
    "button", "link", "textbox", "searchbox", "checkbox", "radio", "option",
    "tab", "combobox", "listbox", "menuitem", "menuitemcheckbox",
    "menuitemradio", "switch", "slider", "spinbutton", "RootWebArea",
})  # fmt: skip
_STYLES = ("overflow-x", "overflow-y", "position")

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in CSS pixels of the viewport."""


@dataclasses.dataclass(frozen=True)
class _Layout:
  """Positions of a document's nodes.

  Attributes:
    visible: Node -> whether a part of its box lies in the viewport; a node
      without a box is absent.
    clickable: Nodes that listen to clicks.
    above, below: Whether the document goes on beyond the viewport.
  """

  visible: Mapping[int, bool]
  clickable: frozenset[int]
  above: bool
  below: bool


def check(observation: str, tree_characters: int) -> None:
  """Checks the settings of a gym that may show trees.

  Raises:
    ValueError: naming the setting, its value and the values allowed.
  """
  if observation not in OBSERVATIONS:
    raise ValueError(
      f"observation={observation!r} must be one of {', '.join(OBSERVATIONS)}"
    )
  least, most = spec.BOUNDS["tree_characters"]
  if not least <= tree_characters <= most:
    raise ValueError(
      f"tree_characters={tree_characters!r} must be in [{least}, {most}]"
    )


def error_of(info: Mapping[str, Any]) -> str:
  """Returns the error of an action, for a policy that sees no picture of it."""
  ignored = info.get("ignored")
  return f"Error: {ignored}" if ignored else ""


class Unreachable(ValueError):
  """An action on an element that cannot be carried out; says why."""


class PageTree:
  """The tree of one tab during one episode; see the module docstring.

  Attributes:
    text: Text of the last `look`, "" before it.
    scrolled: Whether `locate` has scrolled the page since the last `look`.
  """

  def __init__(
    self, tab: tab_lib.Tab, width: float, height: float, limit: int = LIMIT
  ):
    """Args:

    tab: Tab that shows the page.
    width, height: Size of the viewport that the policy sees, in CSS pixels.
    limit: Characters of a text.
    """
    self.text = ""
    self.scrolled = False
    self._tab = tab
    self._size = width, height
    self._limit = limit
    self._nodes: dict[str, int] = {}  # Id -> the browser's number of the node.
    self._ids: dict[int, str] = {}
    self._lines: collections.Counter[str] | None = None

  async def look(self) -> str:
    """Returns the page as text.

    Raises:
      DevToolsError: the browser failed.
    """
    reading = [
      self._tab.post("Accessibility.getFullAXTree"),
      self._tab.post(
        "DOMSnapshot.captureSnapshot", {"computedStyles": list(_STYLES)}
      ),
    ]
    tree, snapshot = [await answer for answer in reading]
    self.scrolled = False
    layout = _layout(snapshot, *self._size)
    shown = list(self._written(tree["nodes"], layout))
    before, self._lines = self._lines, collections.Counter()
    lines, length = [], 0
    for number, (depth, node, line) in enumerate(shown):
      text = self._with_id(node, line)
      self._lines[text] += 1
      mark = before is not None and self._lines[text] > before[text]
      text = "\t" * depth + "*" * mark + text
      length += len(text) + 1
      if length > self._limit and number:
        lines.append(f"({len(shown) - number} more lines are left out)")
        break
      lines.append(text)
    lines += self._hidden(before)
    self.text = "\n".join(lines)
    return self.text

  def _with_id(self, node: int | None, line: str) -> str:
    if node is None:
      return line
    if node not in self._ids:
      self._ids[node] = str(len(self._ids) + 1)
      self._nodes[self._ids[node]] = node
    return f"[{self._ids[node]}] {line}"

  def _hidden(self, before: collections.Counter[str] | None) -> list[str]:
    """A line of the ids that the text before had and this one lacks."""

    def ids(lines: Mapping[str, int]) -> set[str]:
      return {line[1 : line.index("]")] for line in lines if line[0] == "["}

    hidden = sorted(ids(before or {}) - ids(self._lines or {}), key=int)
    if not hidden:
      return []
    listed = [f"[{element}]" for element in hidden[:_HIDDEN]]
    listed += ["…"] * (len(hidden) > _HIDDEN)
    return [f"(no longer shown: {', '.join(listed)})"]

  def _written(
    self, nodes: list[dict[str, Any]], layout: _Layout
  ) -> Iterator[tuple[int, int | None, str]]:
    """(depth, node with an id or None, line) of each line, in order."""
    by_id = {node["nodeId"]: node for node in nodes}
    # Depth, node, what the line above it says, whether it is in a shown list.
    stack = [(0, nodes[0], "", False)] if nodes else []
    while stack:
      depth, node, context, listed = stack.pop()
      role = node.get("role", {}).get("value", "")
      backend = node.get("backendDOMNodeId")
      visible = layout.visible.get(backend) if backend else None
      if visible is None:  # No box: a line of a list that is closed.
        visible = listed and role == "option"
      name = _short(node.get("name", {}).get("value", "")).strip()
      value = node.get("value", {}).get("value")
      states = list(_states(node, layout))
      line = role
      if role == "RootWebArea":
        visible, backend = True, None
        states += ["more above"] * layout.above + ["more below"] * layout.below
      elif role == "StaticText":
        visible = visible and bool(name) and name not in context
        backend = None
      elif role == "generic" and not states:
        visible = False
      visible = visible and not node.get("ignored") and role not in _NO_LINE
      if visible:
        if name or role != "generic":
          line += f" {name!r}"
        if value not in (None, ""):
          line += f" value={_short(value)!r}"
        yield depth, backend, ", ".join([line, *states])
        context = f"{name} {'' if value is None else value}"
        if role == "RootWebArea":
          context = ""  # A screenshot does not show the title.
        depth += 1
        listed = listed or role in ("combobox", "listbox")
      for child in reversed(node.get("childIds", ())):
        if child in by_id and child != node["nodeId"]:
          stack.append((depth, by_id[child], context, listed))

  # --- elements ---------------------------------------------------------------

  async def locate(self, element: str) -> tuple[float, float]:
    """Returns a point of an element that a click reaches, in CSS pixels.

    The page is scrolled to the element.

    Raises:
      Unreachable: there is no such element, or it is covered or not shown.
      DevToolsError: the browser failed.
    """
    x, y, scrolled = await self._call(element, _LOCATE, *self._size)
    self.scrolled |= scrolled
    return float(x), float(y)

  async def focus(self, element: str) -> None:
    """Gives an element the keyboard's focus; raises as `locate`."""
    await self._call(element, _FOCUS)

  async def fill(self, element: str, text: str) -> None:
    """Sets a field's text, a list's options or a box's state.

    Args:
      element: Id of the element.
      text: Text of a field; values or labels of a list's options, one a line;
        "true" or "false" of a checkbox, "true" of a radio button.

    Raises:
      Unreachable: see `locate`; or the element does not take such a value.
      DevToolsError: the browser failed.
    """
    step = await self._call(element, _FILL, text)
    if step == "click":
      await self._tab.click(*await self.locate(element), "left", 1)
    elif step == "type" and text:
      await self._tab.type_text(text)
    elif step == "type":
      await self._tab.press_keys(("delete",))

  async def _call(self, element: str, function: str, *arguments: Any) -> Any:
    """Calls a function on an element; its answer's `error` is raised."""
    node = self._nodes.get(element)
    if node is None:
      raise Unreachable(f"there is no element {element!r} on this page")
    try:
      answer = await self._tab.post("DOM.resolveNode", {"backendNodeId": node})
      answer = await self._tab.post(
        "Runtime.callFunctionOn",
        {
          "objectId": answer["object"]["objectId"],
          "functionDeclaration": function,
          "arguments": [{"value": value} for value in arguments],
          "returnByValue": True,
        },
      )
    except devtools.CommandFailed:
      if self._tab.dead is not None:
        raise
      answer = {"result": {"value": {"error": _LEFT}}}
    if (thrown := answer.get("exceptionDetails")) is not None:
      text = thrown.get("exception", {}).get("description", thrown["text"])
      raise devtools.CommandFailed(f"{self._tab.url}: {text[:500]}")
    value = answer["result"].get("value")
    if isinstance(value, dict) and "error" in value:
      raise Unreachable(f"element {element!r} {value['error']}")
    return value


def _short(value: object) -> str:
  text = str(value)
  return text if len(text) <= _NAME else text[: _NAME - 1] + "…"


def _states(node: Mapping[str, Any], layout: _Layout) -> Iterator[str]:
  """The states of a line, in BrowserGym's form."""
  role = node.get("role", {}).get("value")
  if (
    node.get("backendDOMNodeId") in layout.clickable
    and role not in _CLICKABLE_ANYHOW
  ):
    yield "clickable"
  for one in node.get("properties", ()):
    name, value = one["name"], one["value"]
    if name in _UNSHOWN or value.get("type") not in _WRITTEN_TYPES:
      continue
    if name not in _IF_TRUE:
      yield (
        f"{name}={_short(value.get('value'))!r}"
        if isinstance(value.get("value"), str)
        else f"{name}={value.get('value')!r}"
      )
    elif value.get("value"):
      yield name


def _layout(
  snapshot: Mapping[str, Any], width: float, height: float
) -> _Layout:
  """Reads the main document of a snapshot."""
  document, strings = snapshot["documents"][0], snapshot["strings"]
  nodes, boxes = document["nodes"], document["layout"]
  dx, dy = document.get("scrollOffsetX", 0), document.get("scrollOffsetY", 0)
  backend, parents = nodes["backendNodeId"], nodes["parentIndex"]
  placed: dict[int, tuple[Box, list[str]]] = {}
  for index, (x, y, w, h), styles in zip(
    boxes["nodeIndex"], boxes["bounds"], boxes["styles"]
  ):
    box = (x - dx, y - dy, x - dx + w, y - dy + h)
    # The first box of a node is its own, others are of its pseudo-elements.
    placed.setdefault(index, (box, [strings[s] for s in styles if s >= 0]))
  view = (0.0, 0.0, float(width), float(height))
  clips: dict[int, Box] = {}  # What the children of a node may show.
  visible: dict[int, bool] = {}
  for index, parent in enumerate(parents):
    clip = clips.get(parent, view)
    if index in placed:
      box, styles = placed[index]
      if "fixed" in styles[2:]:
        clip = view
      part = _common(box, clip)
      visible[backend[index]] = (
        part[2] - part[0] >= 1 and part[3] - part[1] >= 1
      )
      # The overflow of html and body is the viewport's.
      name = strings[nodes["nodeName"][index]]
      if name not in ("HTML", "BODY") and set(styles[:2]) - {"visible"}:
        clip = part
    clips[index] = clip
  clickable = nodes.get("isClickable", {}).get("index", ())
  return _Layout(
    visible,
    frozenset(backend[index] for index in clickable),
    dy >= 1,
    # The first box is the window's, of which the policy may see a part.
    document.get("contentHeight", 0) - dy - placed[0][0][3] - dy >= 1,
  )


def _common(a: Box, b: Box) -> Box:
  return (max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))


# --- functions that run in the page -------------------------------------------

_LEFT = "is no longer on the page"
# The centre of the element first, then a grid, then every few pixels: pages
# put elements on top of each other, and a sliver may be left.
_LOCATE = """function(width, height) {
  if (!this.isConnected) return {error: 'is no longer on the page'};
  const e = this.nodeType === 1 ? this : this.parentElement;
  const place = e.getBoundingClientRect();
  e.scrollIntoViewIfNeeded();
  const now = e.getBoundingClientRect();
  const scrolled = now.x !== place.x || now.y !== place.y;
  const root = e.getRootNode();
  const boxes = [...e.getClientRects()].filter(b => b.width && b.height);
  if (!boxes.length) return {error: 'is not shown'};
  const free = (x, y) => {
    if (x < 0 || y < 0 || x >= width || y >= height) return false;
    const hit = root.elementFromPoint(x, y);
    return hit && (hit === e || e.contains(hit));
  };
  for (const parts of [1, 3, 24]) {
    for (const b of boxes) {
      for (let i = 0; i < parts; ++i) {
        for (let j = 0; j < parts; ++j) {
          const x = b.left + b.width * (j + .5) / parts;
          const y = b.top + b.height * (i + .5) / parts;
          if (free(x, y)) return [x, y, scrolled];
        }
      }
    }
  }
  return {error: 'is covered, or outside the visible page'};
}"""
_FOCUS = """function() {
  if (!this.isConnected) return {error: 'is no longer on the page'};
  this.focus?.();
  return this.getRootNode().activeElement === this ? true
      : {error: 'cannot be focused'};
}"""
_FILL = """function(text) {
  const e = this;
  if (!e.isConnected) return {error: 'is no longer on the page'};
  const tell = () => ['input', 'change'].forEach(
      name => e.dispatchEvent(new Event(name, {bubbles: true})));
  if (e.disabled) return {error: 'is disabled'};
  if (e.tagName === 'SELECT') {
    const names = e.multiple ? text.split('\\n') : [text];
    const chosen = names.map(name => [...e.options].find(
        o => o.value === name || o.label.trim() === name.trim()));
    const missing = names[chosen.findIndex(o => !o)];
    if (missing !== undefined) {
      return {error: `has no option ${JSON.stringify(missing)}`};
    }
    e.focus();
    for (const o of e.options) o.selected = chosen.includes(o);
    tell();
    return 'set';
  }
  const role = e.getAttribute?.('role');
  const box = ['checkbox', 'radio'].includes(e.type) ||
      ['checkbox', 'radio', 'switch', 'menuitemcheckbox'].includes(role);
  if (box) {
    if (text !== 'true' && text !== 'false') {
      return {error: 'is checked or unchecked, and takes no text'};
    }
    const on = 'checked' in e ? e.checked
        : e.getAttribute('aria-checked') === 'true';
    return on === (text === 'true') ? 'set' : 'click';
  }
  if (e.readOnly) return {error: 'is read-only'};
  if (/^(color|date|datetime-local|month|range|time|week)$/.test(e.type)) {
    const before = e.value;
    e.focus();
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value')
        .set.call(e, text);
    if (e.value !== text) {
      const got = e.value;
      e.value = before;
      return {error: `takes no ${JSON.stringify(text)} (it became ` +
          `${JSON.stringify(got)})`};
    }
    tell();
    return 'set';
  }
  const field = e.tagName === 'TEXTAREA' || (e.tagName === 'INPUT' &&
      !/^(button|submit|reset|image|file|hidden)$/.test(e.type));
  if (field) {
    e.focus();
    e.select();
    return 'type';
  }
  if (e.isContentEditable) {
    e.focus();
    getSelection().selectAllChildren(e);
    return 'type';
  }
  return {error: 'is no field, list or box that can be filled'};
}"""
