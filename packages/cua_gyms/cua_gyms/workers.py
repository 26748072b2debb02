"""Runs gyms in worker processes, behind the `Gym` protocol.

`GymWorkers` keeps a number of processes; each gym that it makes lives in the
least busy one.

Promises: when a process dies, whatever the cause, the calls into its gyms raise
`WorkerDiedError` at once, gyms of other processes keep running, and a new
process takes its place; a process ends with its parent.

Does not protect the machine from a gym: a process is a wall against crashes
and memory, not against malice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import itertools
import json
import logging
import multiprocessing
import signal
import struct
import sys
import threading
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency

_LOG = logging.getLogger(__name__)


class WorkerDiedError(RuntimeError):
  """The worker process of the gym has ended."""

  code = "worker_died"


class WorkerGymError(RuntimeError):
  """The gym raised, in its process; the message holds the exception.

  Attributes:
    code: Code of the gym's exception, None when it has none.
  """

  def __init__(self, message: str, code: str | None = None):
    super().__init__(message)
    self.code = code


class WorkerGym:
  """A gym in a worker process; `GymWorkers.make` returns it."""

  def __init__(self, worker: _Worker, settings: Mapping[str, Any]):
    self._worker = worker
    self._settings = dict(settings)
    self._id = next(worker.ids)
    self._made = False
    worker.gyms.add(self._id)

  @property
  def lost(self) -> bool:
    """Whether its process has ended."""
    return not self._worker.alive

  async def start(self, task: base.Task) -> base.Observation:
    if not self._made:
      await self._worker.call(self._id, "make", self._settings)
      self._made = True
    return await self._worker.call(self._id, "start", task)

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    return await self._worker.call(self._id, "act", action)

  async def evaluate(self) -> base.Evaluation:
    return await self._worker.call(self._id, "evaluate")

  async def close(self) -> None:
    """Closes the gym; idempotent, a no-op when the process has ended."""
    if self._id not in self._worker.gyms:
      return
    self._worker.gyms.discard(self._id)
    try:
      await self._worker.call(self._id, "close")
    except WorkerDiedError:
      pass


class GymWorkers:
  """A pool of gym processes; belongs to one event loop."""

  def __init__(self, count: int, *, imports: Sequence[str] = ()):
    """Args:

      count: number of processes.
      imports: modules that each imports first, e.g. to register gyms.

    Raises:
      ValueError: count < 1.
    """
    if count < 1:
      raise ValueError(f"workers={count} must be >= 1")
    self._imports = tuple(imports)
    # The fork server has imported the gyms' packages and has no threads: a
    # fork of it starts at once, importing takes seconds.
    self._context = multiprocessing.get_context("forkserver")
    preload = [__name__, *self._imports]
    launcher = sys.modules.get("tunix_multi_turn")
    if launcher is not None and launcher.is_light():
      preload.insert(0, "tunix_multi_turn.preload")  # So are the processes.
    self._context.set_forkserver_preload(preload)
    self._workers: list[_Worker | None] = [None] * count
    self._closed = False
    self.deaths = 0

  @property
  def pids(self) -> tuple[int, ...]:
    """Process ids of the live workers, unordered."""
    return tuple(w.pid for w in self._workers if w is not None and w.alive)

  async def make(self, settings: Mapping[str, Any]) -> WorkerGym:
    """Makes a gym in the least busy process; `settings` include its name.

    Raises:
      RuntimeError: closed, or no process starts.
    """
    if self._closed:
      raise RuntimeError("the gym workers are closed; make new ones")
    for i, worker in enumerate(self._workers):
      if worker is None or not worker.alive:
        self.deaths += worker is not None
        self._workers[i] = _Worker(self._context, self._imports)
    live = [worker for worker in self._workers if worker is not None]
    return WorkerGym(min(live, key=lambda w: len(w.gyms)), settings)

  async def aclose(self) -> None:
    """Ends the processes; kills them after a few seconds."""
    self._closed = True
    workers = [w for w in self._workers if w is not None]
    await asyncio.gather(
      *(concurrency.acall(w.close, seconds=15.0) for w in workers),
      return_exceptions=True,
    )


class _Worker:
  """One process, seen from its parent."""

  def __init__(self, context: Any, imports: tuple[str, ...]):
    self._loop = asyncio.get_running_loop()
    self._pipe, child_end = context.Pipe()
    self._calls: dict[int, asyncio.Future[Any]] = {}
    self._numbers = itertools.count()
    self.ids = itertools.count()
    self.gyms: set[int] = set()
    self._process = context.Process(
      target=_serve, args=(child_end, imports), daemon=True, name="tunix-gyms"
    )
    self._process.start()
    child_end.close()
    self.pid = self._process.pid
    self.alive = True
    threading.Thread(
      target=self._read, name="tunix-gym-worker", daemon=True
    ).start()

  async def call(self, gym: int, name: str, argument: object = None) -> Any:
    if not self.alive:
      raise self._died()
    number = next(self._numbers)
    message = {"number": number, "gym": gym, "name": name}
    sent = encode_message(message, argument)
    future = self._calls[number] = self._loop.create_future()
    try:
      self._pipe.send_bytes(sent)
      return await future
    except (OSError, ValueError) as error:
      self._lost()
      raise self._died() from error
    except asyncio.CancelledError:
      if self.alive:
        try:
          self._pipe.send_bytes(encode_message({**message, "name": "cancel"}))
        except (OSError, ValueError):
          pass
      raise
    finally:
      self._calls.pop(number, None)

  def _read(self) -> None:
    """Thread: hands answers to their callers until the process ends."""
    try:
      while True:
        message, value = decode_message(self._pipe.recv_bytes())
        self._loop.call_soon_threadsafe(
          self._answer, message["number"], value, message["error"]
        )
    except Exception as error:  # pylint: disable=broad-except
      # End of the pipe, or half a message from a killed process.
      if not isinstance(error, (EOFError, OSError)):
        _LOG.error("worker %s sent an unreadable message: %r", self.pid, error)
    try:
      self._loop.call_soon_threadsafe(self._lost)
    except RuntimeError:
      pass  # The loop is closed: no caller waits.

  def _answer(self, number: int, value: Any, error: Any) -> None:
    future = self._calls.get(number)
    if future is None or future.done():
      return
    if error is None:
      future.set_result(value)
    else:
      future.set_exception(WorkerGymError(error[0], error[1] or None))

  def _lost(self) -> None:
    self.alive = False
    self.gyms.clear()
    for future in self._calls.values():
      if not future.done():
        future.set_exception(self._died())

  def _died(self) -> WorkerDiedError:
    code = self._process.exitcode
    how = f"with exit code {code}" if code is not None else "unexpectedly"
    return WorkerDiedError(
      f"the gym's process {self.pid} has ended {how}; its episodes are lost"
    )

  def close(self) -> None:
    """Ends the process; blocks for up to 10 seconds."""
    try:
      self._pipe.send_bytes(encode_message({"name": "end"}))
    except (OSError, ValueError):
      pass
    self._process.join(5.0)
    if self._process.is_alive():
      self._process.kill()
      self._process.join(5.0)
    # The loop that `_read` reports to may have ended before.
    self.alive = self._process.is_alive()
    self._pipe.close()


# --- messages: JSON and raw pixels -------------------------------------------
#
# A message is the length of its JSON (4 bytes, big-endian), the JSON, and the
# bytes of the screenshot whose shape the JSON gives, if there is one. Decoding
# never evaluates or imports any part of a message.

_LENGTH = struct.Struct(">I")
_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
  "task": base.Task.from_json,
  "action": gui_action.GuiAction.from_json,
  "evaluation": lambda data: base.Evaluation(**data),
}


def encode_message(message: dict[str, Any], value: object = None) -> bytes:
  """Encodes a message.

  Args:
    message: JSON values.
    value: sent with it: None, JSON, or a Task, GuiAction, Observation or
      Evaluation.

  Raises:
    TypeError: `value` holds an object that JSON does not have.
  """
  pixels = b""
  kind = "json"
  if isinstance(value, base.Task):
    kind, value = "task", value.to_json()
  elif isinstance(value, gui_action.GuiAction):
    kind, value = "action", value.to_json()
  elif isinstance(value, base.Evaluation):
    kind, value = "evaluation", dataclasses.asdict(value)
  elif isinstance(value, base.Observation):
    kind = "observation"
    shape = None
    if value.screenshot is not None:
      screenshot = np.ascontiguousarray(value.screenshot, np.uint8)
      shape, pixels = screenshot.shape, screenshot.tobytes()
    value = {
      "shape": shape,
      "instruction": value.instruction,
      "text": value.text,
      "done": value.done,
      "info": dict(value.info),
      "axtree": value.axtree,
    }
  header = json.dumps(
    {**message, "kind": kind, "value": value}, default=_plain
  ).encode()
  return _LENGTH.pack(len(header)) + header + pixels


def decode_message(data: bytes) -> tuple[dict[str, Any], Any]:
  """Returns the (message, value) that `encode_message` got.

  Raises:
    ValueError: `data` is not such a message.
  """
  try:
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    message = json_text.parse(data[_LENGTH.size : start])
    kind, value = message.pop("kind"), message.pop("value")
    if kind == "observation":
      screenshot = None
      if (shape := value.pop("shape")) is not None:
        screenshot = np.frombuffer(data, np.uint8, offset=start).reshape(shape)
      return message, base.Observation(screenshot, **value)
    return message, value if kind == "json" else _DECODERS[kind](value)
  except (KeyError, TypeError, AttributeError, struct.error) as error:
    raise ValueError(f"{type(error).__name__}: {error}") from error


def _plain(value: object) -> Any:
  """JSON of the arrays that gyms put into `info`."""
  if isinstance(value, (np.ndarray, np.generic)):
    return value.tolist()
  raise TypeError(
    f"{type(value).__name__} {value!r:.80} has no JSON; a gym in a worker"
    " process receives and returns JSON values only"
  )


# --- in the process -----------------------------------------------------------


def _serve(pipe: object, imports: tuple[str, ...]) -> None:
  """The process's main function."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it.
  for name in imports:
    importlib.import_module(name)
  asyncio.run(_answer_calls(pipe))


async def _answer_calls(pipe: Any) -> None:
  from tunix.rl.multi_turn.environments.gyms import gym_registry  # pylint: disable=g-import-not-at-top

  loop = asyncio.get_running_loop()
  ended = asyncio.Event()
  gyms: dict[int, Any] = {}
  running: dict[int, asyncio.Task[None]] = {}

  def send(number: int, value: Any, error: Any) -> None:
    message = {"number": number, "error": error}
    sent = encode_message(message, value)
    try:
      pipe.send_bytes(sent)
    except OSError:
      ended.set()

  async def run(number: int, gym: int, name: str, argument: Any) -> None:
    try:
      if name == "make":
        with concurrency.contained("making the gym"):
          gyms[gym] = gym_registry.from_config(argument, "operator")
        value = None
      else:
        target = gyms.pop(gym, None) if name == "close" else gyms[gym]
        value = None
        if target is not None:
          arguments = () if argument is None else (argument,)
          value = await concurrency.acall(getattr(target, name), *arguments)
      send(number, value, None)
    except Exception as error:  # pylint: disable=broad-except
      code = getattr(error, "code", "")
      text = concurrency.describe(error)
      send(number, None, (text, code if isinstance(code, str) else ""))
    finally:
      running.pop(number, None)

  def readable() -> None:
    try:
      message, argument = decode_message(pipe.recv_bytes())
    except (EOFError, OSError):
      message = {"name": "end"}  # The parent has ended.
    if message["name"] == "end":
      loop.remove_reader(pipe.fileno())
      ended.set()
      return
    number = message["number"]
    if message["name"] == "cancel":
      if number in running:
        running[number].cancel()
      return
    running[number] = asyncio.ensure_future(
      run(number, message["gym"], message["name"], argument)
    )

  loop.add_reader(pipe.fileno(), readable)
  await ended.wait()
  for task in list(running.values()):
    task.cancel()
  for gym in list(gyms.values()):
    try:
      await concurrency.acall(gym.close, seconds=2.0)
    except Exception:  # pylint: disable=broad-except
      pass  # The process ends anyway.
