"""Wraps any object with `screenshot()` and `act(action)` as a gym.

    class MyComputer:
      def screenshot(self): ...   # uint8[H, W, 3], a PIL image, a file's bytes
      def act(self, action): ...  # a GuiAction, in pixels of the screenshot

A file is a PNG, a JPEG or a WebP. Optional methods: `start(task)`, called
first, may return the instruction; `evaluate(task)` returns an `Evaluation`, a
bool or a number in [0, 1]; `done()`; `close()`. All may be sync or async. `act`
may return True (the episode is over), a str (text for the policy) or None.

Promises: each call has a deadline; a sync one that misses it keeps its thread
until it returns, and the computer is closed then.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Mapping

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http

_ENDS = (gui_action.GuiActionKind.ANSWER, gui_action.GuiActionKind.TERMINATE)


class ComputerGym:
  """A gym around an object with `screenshot` and `act`.

  Attributes:
    computer: the object, made at the first start.
    answer: the policy's answer, "" for none.
  """

  def __init__(
    self,
    computer: Any,
    *,
    options: Mapping[str, Any] | None = None,
    evaluator: Any = None,
    timeout_s: float = 60.0,
  ):
    """Args:

      computer: the object; or what makes one, a class or function or
        "package.module:name" of it.
      options: arguments of that.
      evaluator: `(computer, task, answer) -> verdict`, or its path; without
        one the computer's own `evaluate(task)` decides.
      timeout_s: deadline of each call.

    Raises:
      ValueError: no such path, a wrong deadline, or nothing that decides.
    """
    if isinstance(computer, str):
      computer = _imported("computer", computer)
    if isinstance(evaluator, str):
      evaluator = _imported("evaluator", evaluator)
    options_lib.check_seconds({"timeout_s": timeout_s})
    has_screen = hasattr(computer, "screenshot")
    is_factory = inspect.isclass(computer) or not has_screen
    if is_factory and not callable(computer):
      raise ValueError(
        f"computer={computer!r} has no screenshot() and makes none"
      )
    if options and not is_factory:
      raise ValueError("options are for what makes a computer; it is there")
    self._make: Callable[[], Any] | None = None
    self.computer: Any = None
    if is_factory:
      self._make = lambda: computer(**(options or {}))
    else:
      self.computer = computer
    self._evaluator = evaluator
    self._seconds = timeout_s
    self._task: base.Task | None = None
    self._calls = concurrency.Guarded(self.computer, name="the computer")
    self.answer = ""

  async def start(self, task: base.Task) -> base.Observation:
    if self.computer is None:
      self.computer = await self._call(self._make, "making the computer")
      self._calls = concurrency.Guarded(self.computer, name="the computer")
      for name in ("screenshot", "act"):
        if not callable(getattr(self.computer, name, None)):
          raise TypeError(f"{type(self.computer).__name__} has no {name}()")
    if self._evaluator is None and not hasattr(self.computer, "evaluate"):
      raise TypeError(
        f"{type(self.computer).__name__} has no evaluate(task), and the gym"
        " no evaluator: nothing decides whether a task is solved"
      )
    self._task, self.answer = task, ""
    result = None
    if hasattr(self.computer, "start"):
      result = await self._method("start", task)
    instruction = result if isinstance(result, str) else ""
    return await self._look(instruction=instruction)

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    if self._task is None:
      raise RuntimeError("no episode is running; call start(task) first")
    if action.kind in _ENDS:
      self.answer = action.text or self.answer
      return await self._look(done=True)
    result = None
    if action.kind is not gui_action.GuiActionKind.SCREENSHOT:
      result = await self._method("act", action)
    ended = result is True
    if not ended and hasattr(self.computer, "done"):
      ended = bool(await self._method("done"))
    text = result if isinstance(result, str) else ""
    return await self._look(text=text, done=ended)

  async def evaluate(self) -> base.Evaluation:
    if self._task is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    if self._evaluator is not None:
      verdict = await self._call(
        self._evaluator, "the evaluator", self.computer, self._task, self.answer
      )
    else:
      verdict = await self._method("evaluate", self._task)
    return base.as_evaluation(verdict)

  async def close(self) -> None:
    """Closes the computer if it can be; idempotent."""
    self._task = None
    computer = self.computer
    if self._make is not None:
      self.computer = None  # A next start makes a new one.
    if computer is None:
      return
    try:
      await self._calls.close(seconds=self._seconds)
    except concurrency.StillRunningError:
      pass  # It is closed when its call returns.

  async def _look(self, **more: Any) -> base.Observation:
    shot = await self._method("screenshot")
    if isinstance(shot, (bytes, bytearray)):
      pixels = await http.read(
        lambda: wire.from_png(bytes(shot)),
        len(shot),
        self._seconds,
        "a screenshot",
      )
    else:
      if hasattr(shot, "convert"):  # A PIL image.
        shot = shot.convert("RGB")
      pixels = np.asarray(shot)
      if pixels.ndim == 3 and pixels.shape[2] == 4:
        pixels = np.ascontiguousarray(pixels[:, :, :3])
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
      raise TypeError(
        "screenshot() must give uint8[H, W, 3], a PIL image or a file's"
        f" bytes, got {pixels.dtype}{list(pixels.shape)}"
      )
    return base.Observation(pixels, **more)

  async def _method(self, name: str, *args: Any) -> Any:
    return await self._call(
      getattr(self.computer, name), f"the computer's {name}", *args
    )

  async def _call(self, fn: Any, what: str, *args: Any) -> Any:
    return await self._calls.run(fn, *args, seconds=self._seconds, what=what)


def _imported(name: str, path: str) -> Any:
  try:
    return registry.import_path(path)
  except ImportError as error:
    raise ValueError(f"{name}={path}: {error}") from None
