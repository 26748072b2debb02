"""Shows a run's progress in the notebook cell that started it.

Promises: the cell holds one piece of output, which is replaced at most twice a
second; a run of a day leaves a cell of a few lines.

Does not: import IPython where no notebook runs.
"""

from __future__ import annotations

import collections
import html
import sys
import threading
import time
from typing import Any, TYPE_CHECKING

from tunix.rl.multi_turn import train as train_lib
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.reporting import progress
from tunix.rl.multi_turn.reporting import reporting_settings

if TYPE_CHECKING:  # It needs JAX.
  from tunix.rl.multi_turn.run.evaluations import evaluator

_INTERVAL_S = 0.5
_LINES = 8  # Evaluations and the like above the present line.


_lock = threading.Lock()
_holders: list[Place] = []


class BusyError(RuntimeError):
  """This process still trains or plays; the text names what."""

  def _render_traceback_(self) -> list[str]:
    """Returns what a notebook shows: the text without a traceback."""
    return [f"BusyError: {self}"]


class Place:
  """The right to use the process; `release` is idempotent.

  Attributes:
    what: Description of the holder, for refusals.
  """

  def __init__(self, what: str):
    self.what = what

  def release(self) -> None:
    with _lock:
      if self in _holders:
        _holders.remove(self)


def take(what: str) -> Place:
  """Raises:

  BusyError: another has it.
  """
  place = Place(what)
  with _lock:
    if _holders:
      raise BusyError(
        f"{_holders[0].what} in this process; wait for its end, or stop() a"
        " run and wait() for it, then start another"
      )
    _holders.append(place)
  return place


def current() -> Cell | None:
  """The cell that runs; None outside a notebook."""
  interactive = sys.modules.get("IPython")
  shell = interactive and interactive.get_ipython()
  if shell is None or getattr(shell, "kernel", None) is None:
    return None
  return Cell()


class Cell:
  """The output of a cell; a text stream and an observer."""

  receives = (events.StepFinished, events.Progress, events.RunFinished)

  def __init__(self) -> None:
    self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
    self._present = ""
    self._share: float | None = None
    self._total = 0
    self._drawn = 0.0
    self._handle: Any = None

  def follow(self, run: train_lib.Run | evaluator.Evaluation) -> None:
    """Shows the progress of a run or evaluation that is about to start."""
    from IPython import display  # pylint: disable=g-import-not-at-top

    self._total = run.config.learner.steps
    self._present = f"starting {run.config.run.name} in {run.directory}"
    self._handle = display.display(display.HTML(self._html()), display_id=True)
    lines = reporting_settings.ReportConfig(
      progress="lines", progress_s=_INTERVAL_S
    )
    run.observers.add(
      progress.ProgressBar(self._total, lines, stream=self)  # type: ignore[arg-type]
    )
    run.observers.add(self)

  # --- as the stream of a progress line ---------------------------------------

  def write(self, text: str) -> int:
    line = text.strip("\n")
    if line:
      if self._present.startswith(("evaluation", "run ")):
        self._lines.append(self._present)
      self._present = line
    return len(text)

  def flush(self) -> None:
    self._draw(force=False)

  def isatty(self) -> bool:
    return False

  # --- as an observer ---------------------------------------------------------

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.StepFinished):
      self._share = event.step / self._total if self._total else None
    elif isinstance(event, events.Progress):
      self._share = event.done / event.total if event.total else None
    self._draw(force=isinstance(event, events.RunFinished))

  def _draw(self, force: bool) -> None:
    now = time.monotonic()
    if self._handle is None or not (force or now - self._drawn > _INTERVAL_S):
      return
    self._drawn = now
    from IPython import display  # pylint: disable=g-import-not-at-top

    self._handle.update(display.HTML(self._html()))

  def _html(self) -> str:
    lines = html.escape("\n".join([*self._lines, self._present]))
    bar = ""
    if self._share is not None:
      bar = (
        f'<progress value="{self._share:.4f}" max="1" style="width:100%">'
        "</progress>"
      )
    return f'<pre style="white-space:pre-wrap">{lines}</pre>{bar}'
