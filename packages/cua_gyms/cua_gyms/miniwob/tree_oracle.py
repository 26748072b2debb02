"""Solves MiniWoB++ families by what a text policy sees: the goal and the tree.

For warm starts and tests. Reads the goal and the text of the tree that the
gym's last observation shows, and nothing else of the page; names elements by
id. Keeps no state, so that it also continues after a policy's mistakes.

Does not solve other families than `ORACLE.families`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Callable, Iterator, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import spec

from cua_gyms.miniwob import miniwob_gym

_Action = gui_action.GuiAction
_Kind = gui_action.GuiActionKind

_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_LINE = re.compile(
  r"^(?P<tabs>\t*)\*?(?:\[(?P<id>\d+)\] )?(?P<role>\w+)"
  rf"(?: (?P<name>{_TEXT}))?(?: value=(?P<value>{_TEXT}))?(?P<states>.*)$"
)


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of a tree.

  Attributes:
    id: Id of the element, "" of a line without one.
    role, name, value: as written; "" for none.
    states: the rest of the line.
    depth: Its indentation.
  """

  id: str
  role: str
  name: str
  value: str
  states: str
  depth: int


@dataclasses.dataclass(frozen=True)
class Page:
  """An episode's goal and the lines of the tree, as the policy sees them."""

  goal: str
  lines: Sequence[Line]

  @classmethod
  def of(cls, goal: str, tree: str) -> Page:
    lines = []
    for text in tree.split("\n"):
      if match := _LINE.match(text):
        name, value = (
          ast.literal_eval(part) if part else ""
          for part in match.group("name", "value")
        )
        lines.append(
            Line(match["id"] or "", match["role"], name, value,
                 match["states"], len(match["tabs"]))
        )  # fmt: skip
    return cls(goal, lines)

  @property
  def quoted(self) -> list[str]:
    """The parts of the goal that stand in quotes."""
    return re.findall(r'"(.*?)"', self.goal)

  def part(self, pattern: str) -> str:
    """Returns the group of a pattern in the goal."""
    match = re.search(pattern, self.goal)
    if match is None:
      raise LookupError(f"the goal {self.goal!r} holds no {pattern!r}")
    return match[1].strip()

  def all(self, *roles: str, name: str | None = None) -> list[Line]:
    """Elements with one of the roles; with `name`, only those named so."""
    return [
      line
      for line in self.lines
      if line.id and line.role in roles and name in (None, line.name)
    ]

  def one(self, *roles: str, name: str | None = None, at: int = 0) -> Line:
    """The element at a place among `all`; LookupError if there is none."""
    lines = self.all(*roles, name=name)
    if at >= len(lines):
      raise LookupError(f"the page shows no {'/'.join(roles)} {name or ''!r}")
    return lines[at]

  def under(self, line: Line) -> Iterator[Line]:
    """The lines below a line that are deeper."""
    start = self.lines.index(line) + 1
    for other in self.lines[start:]:
      if other.depth <= line.depth:
        return
      yield other

  def holding(self, text: str) -> Line | None:
    """The first clickable element whose text is this."""
    for line in self.lines:
      if line.id and "clickable" in line.states:
        below = [l.name for l in self.under(line)]
        if text in ([line.name] if line.name else below):
          return line
    return None


def _click(line: Line) -> _Action:
  return _Action(_Kind.CLICK, element=line.id)


def _button(page: Page, name: str | None = None) -> _Action:
  return _click(page.one("button", name=name))


def _filled(page: Page, line: Line, text: str) -> _Action | None:
  """Fills a field, None where it holds the text already."""
  if line.value == text:
    return None
  return _Action(_Kind.FILL, element=line.id, text=text)


def _form(page: Page, *texts: str, button: str | None = None) -> _Action:
  """Fills the text fields in order, then clicks the button."""
  for at, text in enumerate(texts):
    field = page.one("textbox", at=at)
    # A password is shown as dots.
    if set(field.value) == {"•"} and len(field.value) == len(text):
      continue
    if (action := _filled(page, field, text)) is not None:
      return action
  return _button(page, button)


def _sequence(page: Page) -> _Action:
  pushed = "focused" in page.one("button", name="ONE").states
  return _button(page, "TWO" if pushed else "ONE")


def _boxes(page: Page) -> _Action:
  chosen = page.part("Select (.*) and click").split(", ")
  for box in page.all("checkbox", "radio"):
    if ("checked='true'" in box.states) != (box.name in chosen):
      if box.role == "checkbox" or box.name in chosen:
        return _click(box)
  return _button(page, "Submit")


def _dialog(page: Page) -> _Action:
  name = page.quoted[0] if page.quoted else "x"
  return _button(page, "Close" if name == "x" else name)


def _link(page: Page) -> _Action:
  line = page.holding(page.quoted[0])
  if line is None:
    raise LookupError(f"the page shows no link {page.quoted[0]!r}")
  return _click(line)


def _tab(page: Page) -> _Action:
  number = page.part(r"Tab #(\d)")
  return _click(page.one("link", "tab", name=f"Tab #{number}"))


def _search(page: Page, *roles: str, state: str) -> _Action:
  """Opens sections one after another until one shows the link."""
  if (line := page.holding(page.quoted[0])) is not None:
    return _click(line)
  sections = page.all(*roles)
  opened = [i for i, line in enumerate(sections) if state in line.states]
  following = opened[-1] + 1 if opened else 0
  if following >= len(sections):
    following = 0
  if not sections:
    raise LookupError("the page shows nothing to open")
  return _click(sections[following])


def _collapsible(page: Page) -> _Action:
  header = page.one("tab")
  opened = "expanded=True" in header.states
  return _button(page, "Submit") if opened else _click(header)


def _focus(page: Page) -> _Action:
  number = re.search(r"(\d)", page.goal)
  return _click(page.one("textbox", at=int(number[1]) - 1 if number else 0))


def _options(page: Page) -> _Action:
  box = page.one("combobox", "listbox")
  names = page.part("Select (.*) from the").split(", ")
  options = {l.name: l.states for l in page.under(box) if l.role == "option"}
  chosen = {n for n, states in options.items() if "selected=True" in states}
  # A scrolled list shows some of its options only.
  shown = {n for n in names if n in options}
  if (box.value == names[0]) or (shown and chosen == shown):
    return _button(page, "Submit")
  if box.role == "listbox" and "focused" in box.states:
    return _button(page, "Submit")
  return _Action(_Kind.FILL, element=box.id, text="\n".join(names))


def _date(page: Page) -> _Action:
  month, day, year = page.part(r"(\d+/\d+/\d+)").split("/")
  return _filled(page, page.one("Date"), f"{year}-{month}-{day}") or _button(
    page, "Submit"
  )


def _time(page: Page) -> _Action:
  hour, minute, half = re.search(r"(\d+):(\d+) ?([AP])M", page.goal).groups()  # type: ignore[union-attr]
  hours = int(hour) % 12 + 12 * (half == "P")
  return _filled(
    page, page.one("InputTime"), f"{hours:02}:{minute}"
  ) or _button(page, "Submit")


def _table(page: Page) -> _Action:
  label = page.part("value of (.*) into")
  cells = page.all("cell")
  names = [cell.name for cell in cells]
  if label not in names:
    raise LookupError(f"the table shows no {label!r}")
  return _form(page, names[names.index(label) + 1], button="Submit")


def _sum(page: Page) -> _Action:
  for line in page.lines:
    terms = re.search(r"(-?\d+) ?([-+x*]) ?(-?\d+) ?=", line.name)
    if terms:
      a, b = int(terms[1]), int(terms[3])
      value = {"+": a + b, "-": a - b}.get(terms[2], a * b)
      return _form(page, str(value), button="Submit")
  raise LookupError("the page shows no sum")


_SOLVERS: dict[str, Callable[[Page], _Action]] = {
  "choose-list": _options,
  "click-button": lambda p: _button(p, p.quoted[0]),
  "click-button-sequence": _sequence,
  "click-checkboxes": _boxes,
  "click-checkboxes-large": _boxes,
  "click-checkboxes-transfer": _boxes,
  "click-collapsible": _collapsible,
  "click-collapsible-2": lambda p: _search(p, "tab", state="expanded=True"),
  "click-dialog": _dialog,
  "click-dialog-2": _dialog,
  "click-link": _link,
  "click-option": _boxes,
  "click-scroll-list": _options,
  "click-tab": _tab,
  "click-tab-2": lambda p: _search(p, "tab", state="selected=True"),
  "click-test": _button,
  "click-test-2": lambda p: _button(p, "ONE"),
  "click-test-transfer": lambda p: _button(p, p.part("button ([A-Z]+)")),
  "enter-date": _date,
  "enter-password": lambda p: _form(p, p.quoted[0], p.quoted[0]),
  "enter-text": lambda p: _form(p, p.quoted[0]),
  "enter-text-2": lambda p: _form(
    p, p.quoted[0].upper() if "upper" in p.goal else p.quoted[0].lower()
  ),
  "enter-text-dynamic": lambda p: _form(p, p.quoted[0]),
  "enter-time": _time,
  "focus-text": _focus,
  "focus-text-2": _focus,
  "login-user": lambda p: _form(p, *p.quoted[:2]),
  "read-table": _table,
  "simple-arithmetic": _sum,
  "unicode-test": lambda p: _button(p, p.quoted[0]),
}


def solve(family: str, goal: str, tree: str) -> _Action:
  """Returns the next right action on the page that a tree shows.

  Raises:
    ValueError: the family has no oracle.
    LookupError: the tree does not show what the goal needs.
  """
  if family not in _SOLVERS:
    raise ValueError(
      f"there is no oracle by id for {family!r}; known: {', '.join(_SOLVERS)}"
    )
  return _SOLVERS[family](Page.of(goal, tree))


def oracle_action(gym: miniwob_gym.MiniWobGym) -> _Action | None:
  """Returns the next right action in the gym's episode; None when it is over.

  Raises:
    RuntimeError: no episode is running, or the gym shows no tree.
    ValueError: the family has no oracle.
    LookupError: the tree does not show what the goal needs.
  """
  if gym.task is None or gym.tree is None:
    raise RuntimeError(
      "no episode with a tree is running; call start(task) of a gym with"
      " observation=axtree or both"
    )
  if gym.over:
    return None
  return solve(gym.task.family, gym.goal, gym.tree.text)


def _unnamed(gym: miniwob_gym.MiniWobGym, x: float, y: float) -> None:
  """Names nothing: an id says what is clicked."""
  del gym, x, y


ORACLE = spec.Oracle(oracle_action, _unnamed, tuple(sorted(_SOLVERS)))
