"""Describes each MiniWoB++ task family: turn limit, words, oracle or not.

The package describes most of its tasks in the docstrings of its environments;
they are read from its source, which is not imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re

# About twice the actions that a practised user needs.
MAX_TURNS = {
    "ascending-numbers": 8, "bisect-angle": 4, "book-flight": 20,
    "book-flight-nodelay": 20, "button-delay": 4, "buy-ticket": 4,
    "chase-circle": 20, "choose-date": 16, "choose-date-easy": 6,
    "choose-date-medium": 8, "choose-date-nodelay": 16, "choose-list": 6,
    "circle-center": 4, "click-button": 3, "click-button-sequence": 4,
    "click-checkboxes": 14, "click-checkboxes-large": 26,
    "click-checkboxes-soft": 14, "click-checkboxes-transfer": 14,
    "click-collapsible": 4, "click-collapsible-2": 10,
    "click-collapsible-2-nodelay": 10, "click-collapsible-nodelay": 4,
    "click-color": 2, "click-dialog": 2, "click-dialog-2": 2, "click-link": 3,
    "click-menu": 8, "click-menu-2": 8, "click-option": 4, "click-pie": 4,
    "click-pie-nodelay": 4, "click-scroll-list": 8, "click-shades": 14,
    "click-shape": 2, "click-tab": 2, "click-tab-2": 10, "click-tab-2-easy": 6,
    "click-tab-2-hard": 14, "click-tab-2-medium": 10, "click-test": 2,
    "click-test-2": 2, "click-test-transfer": 2, "click-widget": 3,
    "copy-paste": 8, "copy-paste-2": 8, "count-shape": 2, "count-sides": 2,
    "daily-calendar": 14, "drag-box": 3, "drag-circle": 6, "drag-cube": 6,
    "drag-items": 6, "drag-items-grid": 4, "drag-shapes": 14,
    "drag-shapes-2": 14, "drag-single-shape": 4, "drag-sort-numbers": 10,
    "draw-circle": 4, "draw-line": 6, "email-inbox": 10,
    "email-inbox-delete": 4, "email-inbox-forward": 10,
    "email-inbox-forward-nl": 10, "email-inbox-forward-nl-turk": 10,
    "email-inbox-important": 4, "email-inbox-nl-turk": 10,
    "email-inbox-noscroll": 10, "email-inbox-reply": 10,
    "email-inbox-star-reply": 12, "enter-date": 6, "enter-password": 8,
    "enter-text": 5, "enter-text-2": 5, "enter-text-dynamic": 5,
    "enter-time": 6, "find-greatest": 8, "find-midpoint": 4, "find-word": 6,
    "focus-text": 2, "focus-text-2": 2, "form-sequence": 8,
    "form-sequence-2": 8, "form-sequence-3": 8, "generate-number": 12,
    "grid-coordinate": 2, "guess-number": 20, "highlight-text": 4,
    "highlight-text-2": 4, "hot-cold": 20, "hover-shape": 16,
    "identify-shape": 2, "login-user": 8, "login-user-popup": 10,
    "moving-items": 20, "multi-layouts": 14, "multi-orderings": 14,
    "navigate-tree": 10, "number-checkboxes": 30, "odd-or-even": 14,
    "order-food": 14, "phone-book": 16, "read-table": 6, "read-table-2": 10,
    "resize-textarea": 6, "right-angle": 4, "scroll-text": 8,
    "scroll-text-2": 8, "search-engine": 16, "sign-agreement": 12,
    "simon-says": 16, "simple-algebra": 5, "simple-arithmetic": 5,
    "social-media": 8, "social-media-all": 24, "social-media-some": 16,
    "stock-market": 20, "terminal": 12, "text-editor": 8, "text-transform": 6,
    "tic-tac-toe": 10, "unicode-test": 2, "use-autocomplete": 8,
    "use-autocomplete-nodelay": 8, "use-colorwheel": 6, "use-colorwheel-2": 6,
    "use-slider": 6, "use-slider-2": 10, "use-spinner": 10,
    "visual-addition": 6,
}  # fmt: skip
"""Of all families of miniwob 1.1."""

DEFAULT_MAX_TURNS = 10
"""Of a family that is not among them."""

QUICK_FAMILIES = frozenset({
    "circle-center", "click-button", "click-button-sequence",
    "click-checkboxes", "click-checkboxes-large", "click-checkboxes-soft",
    "click-checkboxes-transfer", "click-color", "click-dialog",
    "click-dialog-2", "click-link", "click-option", "click-shape",
    "click-test", "click-test-2", "click-test-transfer", "click-widget",
    "count-shape", "count-sides", "enter-password", "enter-text",
    "enter-text-2", "focus-text", "focus-text-2", "grid-coordinate",
    "identify-shape", "login-user", "odd-or-even", "read-table",
    "simple-algebra", "simple-arithmetic", "unicode-test", "use-slider",
})  # fmt: skip
"""Families whose page, started again without being loaded anew, has shown the
same pixels as a fresh one throughout: 12 instances of each, after random input
to an earlier episode and during random input."""

# Of the pages for which the package has no environment.
_WORDS = {
  "button-delay": "Click two buttons, the second not before a while.",
  "chase-circle": "Keep the pointer on a circle that moves.",
  "hover-shape": "Keep the pointer on a shape that changes its place.",
  "moving-items": "Click items that fall before they are gone.",
  "simon-says": "Repeat a sequence of buttons that light up.",
}
_DEFAULT_LIMIT_S = 10.0
_LIMIT = re.compile(r"core\.EPISODE_MAX_TIME\s*=\s*(\d+)")


@dataclasses.dataclass(frozen=True)
class Info:
  """One family.

  Attributes:
    family: its name.
    max_turns: actions that an episode may take.
    limit_s: Seconds of the page's own time, after which it ends with -1 where
      `time_limit` is set.
    quick: whether an instance may be started without loading the page anew.
    oracle: whether `oracle_action` can play it.
    words: description of the task, "" where there is none.
  """

  family: str
  max_turns: int
  limit_s: float
  quick: bool
  oracle: bool
  words: str


def about(family: str, page: pathlib.Path, oracle: bool = False) -> Info:
  """Returns the description of the family whose page this is."""
  limit = _LIMIT.search(page.read_text(encoding="utf-8", errors="replace"))
  words = _WORDS.get(family) or _described(page.parents[2]).get(family, "")
  return Info(
    family=family,
    max_turns=MAX_TURNS.get(family, DEFAULT_MAX_TURNS),
    limit_s=int(limit[1]) / 1000 if limit else _DEFAULT_LIMIT_S,
    quick=family in QUICK_FAMILIES,
    oracle=oracle,
    words=words,
  )


@functools.lru_cache(maxsize=None)
def _described(package: pathlib.Path) -> dict[str, str]:
  """Family -> the first sentence of its environment's description."""
  sentences = {}
  for file in sorted((package / "envs").glob("*.py")):
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
      if not isinstance(node, ast.ClassDef):
        continue
      text = ast.get_docstring(node) or ""
      words = re.search(r"## Description\s+(.+)", text)
      for line in node.body:
        if (
          isinstance(line, ast.Assign)
          and isinstance(line.targets[0], ast.Name)
          and line.targets[0].id == "subdomain"
          and isinstance(line.value, ast.Constant)
          and words
        ):
          sentences[str(line.value.value)] = words[1].strip()
  return sentences
