"""Shows parts of a run in a notebook.

Promises: what is shown cannot change the notebook's own style, nor be changed
by it: a page stands in a frame of its own, which Jupyter, Colab and VS Code
show alike; it loads nothing and runs no script.
"""

from __future__ import annotations

import html
from typing import Sequence

from tunix.rl.multi_turn.reporting import report


class Shown:
  """HTML that a notebook draws as a cell's value; `html` is its text."""

  def __init__(self, text: str, plain: str = ""):
    """Args:

    text: HTML of a whole page or a fragment, escaped where it needs it.
    plain: Text for a terminal.
    """
    self.html = text
    self._plain = plain

  def _repr_html_(self) -> str:
    return self.html

  def __repr__(self) -> str:
    return self._plain or f"<{len(self.html)} characters of HTML>"


def framed(title: str, parts: Sequence[str], height: int) -> str:
  """The parts as a page in a frame `height` px high; "" without parts."""
  parts = [p for p in parts if p]
  if not parts:
    return ""
  # A frame has the margins of its notebook, not those of a page.
  parts.insert(0, "<style>body{padding:4px;max-width:none}</style>")
  page = html.escape(report.page(title, parts), quote=True)
  return (
    f'<iframe srcdoc="{page}" title="{html.escape(title, quote=True)}"'
    f' style="border:0;width:100%;height:{height}px"></iframe>'
  )
