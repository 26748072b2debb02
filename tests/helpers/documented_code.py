"""Finds and runs the Python of the pages.

A page's blocks run in their order, in one namespace. A block that cannot run
here has a line before it that says why:

    <!-- not run: KIND, REASON -->
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import pathlib
import re
from typing import Any, Callable, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = ("hardware", "network", "package", "placeholder")
MARKER = re.compile(r"<!-- not run: (\w+), (.+?) -->\n\Z", re.S)
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block.

  Attributes:
    page: its file, from the root.
    line: Number of its first line of text.
    language: Language that the fence names.
    text: without the fence's indent.
    marker: (kind, reason) of a block that is not run, else None.
  """

  page: str
  line: int
  language: str
  text: str
  marker: tuple[str, str] | None


def pages() -> list[str]:
  found = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/*.md"),
    *ROOT.glob("packages/*/*.md"),
  ]
  return sorted(str(p.relative_to(ROOT)) for p in found)


def blocks(page: str, language: str | None = "python") -> list[Block]:
  """The page's fenced blocks of a language; of all with None."""
  text = (ROOT / page).read_text("utf-8")
  found = []
  for match in _BLOCK.finditer(text):
    if language is not None and match[2] != language:
      continue
    marker = MARKER.search(text[: match.start()])
    found.append(
      Block(
        page,
        text.count("\n", 0, match.start(3)) + 1,
        match[2],
        re.sub(rf"^{match[1]}", "", match[3], flags=re.M),
        (marker[1], marker[2]) if marker else None,
      )
    )
  return found


def run(
  page: str,
  namespace: dict[str, Any] | None = None,
  replace: Mapping[str, str] | None = None,
  before: Mapping[int, Callable[[dict[str, Any]], None]] | None = None,
) -> dict[str, Any]:
  """Runs a page's Python; returns the names that it made.

  Args:
    page: "docs/serving.md".
    namespace: names that the page expects to be there.
    replace: text of the page -> what stands for it here, such as an address.
    before: number of a block that is run, from 0 -> what happens before it;
      it receives the namespace.
  """
  names = {"__name__": "a_page"} if namespace is None else namespace
  replace, used = dict(replace or {}), set()
  chosen = [b for b in blocks(page) if b.marker is None]
  for number, block in enumerate(chosen):
    if before and number in before:
      before[number](names)
    text = block.text
    for old, new in replace.items():
      used.update({old} if old in text else ())
      text = text.replace(old, new)
    # A traceback then has the page's own line.
    code = compile(
      "\n" * (block.line - 1) + text,
      page,
      "exec",
      flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )
    result = eval(code, names)  # pylint: disable=eval-used
    if inspect.iscoroutine(result):
      asyncio.run(result)
  missing = replace.keys() - used
  assert not missing, f"{page} has no {sorted(missing)}"
  return names
