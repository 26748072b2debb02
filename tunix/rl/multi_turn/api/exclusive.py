"""Lets one run, evaluation or played episode at a time use this process.

They share the engine's devices and what gyms share, which the first to end
would close for the others.

Promises: of two that start at once one begins, and the other is refused at
once, before anything of it is built.
"""

from __future__ import annotations

import threading

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
