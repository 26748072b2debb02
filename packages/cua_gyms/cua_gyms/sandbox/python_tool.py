"""The tool `python`: runs the policy's code in a sandbox, one an episode.

Each call is a Python process of its own; files in its working directory stay
until the episode ends. The sandbox is that of the desktop gym
(`rooms`): with `isolation: namespaces` (bubblewrap) the code
has no network, sees nothing of the machine but programs, and writes a bounded
amount of memory only. `isolation: processes` separates nothing but the process,
and is for containers that hold nothing else; it is never chosen by itself.

Promises: a call ends within `seconds`, and with it all programs that its code
has started, so that they take nothing from the next one. Code that takes longer
is killed, and the directory is empty then. Instances share nothing.

Does not: install packages; the code has the standard library of the system's
Python.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import threading
import time
from typing import Any, Mapping
import uuid

from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.tools import stateful

from cua_gyms.sandbox import files
from cua_gyms.sandbox import rooms
from cua_gyms.sandbox import sandbox_errors

PYTHON_SCHEMA: dict[str, Any] = {
  "type": "function",
  "function": {
    "name": "python",
    "description": (
      "Runs Python code and returns what it prints. Files in the working"
      " directory are kept between calls, variables are not."
    ),
    "parameters": {
      "type": "object",
      "properties": {"code": {"type": "string", "description": "A program."}},
      "required": ["code"],
    },
  },
}
_START_S = 20.0
_KILLED = 137


class CodeError(RuntimeError):
  """The code failed; the text is what it printed."""


@dataclasses.dataclass(frozen=True)
class PythonLimits:
  """Options of the tool.

  Attributes:
    seconds: Seconds that a call may take.
    memory_mb: Address space of each process, in MiB.
    processes: Most processes and threads of an episode.
    disk_mb: Size of the files of an episode, in memory, in MiB.
    output_chars: Length of a call's output; the rest is cut off.
    calls_at_once: Calls of all episodes that run at a time; others wait.
    isolation: "namespaces", or by name "processes"; see the module docstring.
  """

  seconds: float = 5.0
  memory_mb: int = 512
  processes: int = 32
  disk_mb: int = 64
  output_chars: int = 10000
  calls_at_once: int = 8
  isolation: str = "namespaces"

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not isinstance(value, str) and not value > 0:
        raise ValueError(f"python.{field.name}={value} must be > 0")


class PythonTool(stateful.BaseTool):
  """See the module docstring. An instance is a sandbox, made when needed."""

  def __init__(
    self,
    config: Mapping[str, Any] | None = None,
    tool_schema: Mapping[str, Any] | None = None,
  ):
    """Args:

      config: Fields of `PythonLimits`.
      tool_schema: Schema to use instead of `PYTHON_SCHEMA`.

    Raises:
      ValueError: an unknown or wrong option; or there is no Python, or no
        sandbox of that isolation on this machine.
    """
    super().__init__(config, tool_schema or PYTHON_SCHEMA)
    takes = arguments.takes(PythonLimits)
    where = "environment.options.tools.python"
    wrong = [text for _, text in takes.wrong(self.config, "the tool python")]
    if wrong:
      raise ValueError("\n".join(f"{where}.{text}" for text in wrong))
    self.limits = PythonLimits(**self.config)
    interpreter = shutil.which("python3", path=rooms.SEARCH)
    if interpreter is None:
      raise ValueError(f"{where}: there is no python3 in {rooms.SEARCH}")
    self._python = interpreter
    try:
      self._isolation = rooms.resolve_isolation(self.limits.isolation)
    except sandbox_errors.IsolationUnavailable as error:
      raise ValueError(f"{where}: {error}") from None
    self._turnstile = threading.BoundedSemaphore(self.limits.calls_at_once)
    self._instances: dict[str, _Instance] = {}

  async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
    del kwargs
    instance_id = instance_id or str(uuid.uuid4())
    if instance_id in self._instances:
      raise ValueError(f"instance {instance_id!r} exists already")
    self._instances[instance_id] = _Instance()
    return instance_id

  async def execute(
    self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
  ) -> tuple[str, float, dict[str, Any]]:
    """Runs `parameters["code"]`.

    Raises:
      CodeError: the code failed, or took too long.
      UnknownInstanceError: no such instance.
    """
    del kwargs
    instance = self._instances.get(instance_id)
    if instance is None:
      raise stateful.UnknownInstanceError(
        f"tool python has no instance {instance_id!r}"
      )
    code = parameters.get("code")
    if not isinstance(code, str):
      raise ValueError("python takes its code as a str")
    return await concurrency.acall(self._run, instance, code), 0.0, {}

  async def release(self, instance_id: str, **kwargs: Any) -> None:
    del kwargs
    instance = self._instances.pop(instance_id, None)
    if instance is not None:
      await concurrency.acall(instance.close)

  def _run(self, instance: _Instance, code: str) -> str:
    with self._turnstile, instance.lock:
      if instance.closed:
        raise CodeError("the episode is over")
      room = instance.room
      if room is None or not room.alive:
        instance.drop()
        room = instance.room = self._make_room()
      status, text = self._call(room, instance, code)
      limit = self.limits.output_chars
      if len(text) > limit:
        text = f"{text[:limit]}\n(cut off)"
      # Programs that the code left running count against the next call.
      if status in (None, _KILLED) or not room.end_programs():
        instance.drop()
        raise CodeError(
          f"{text}\nkilled: it took longer than {self.limits.seconds:g} s or"
          " too much memory, or kept starting programs; the working directory"
          " is empty now".strip()
        )
      if status != 0:
        raise CodeError(text.strip() or f"it ended with status {status}")
      return text

  def _make_room(self) -> rooms.Room:
    limits = self.limits
    return rooms.Room(
      isolation=self._isolation,
      limits=rooms.Limits(
        memory=limits.memory_mb << 20,
        files=128,
        file_size=(limits.disk_mb << 20) // 2,
        processes=limits.processes,
        disk=limits.disk_mb << 20,
      ),
      deadline_s=_START_S,
    )

  def _call(
    self, room: rooms.Room, instance: _Instance, code: str
  ) -> tuple[int | None, str]:
    """(exit status, None past the deadline; output) of one program."""
    for end in _ENDS if instance.last else ():
      (room.tmp / f"{instance.last}{end}").unlink(missing_ok=True)
    # Earlier code cannot know the name, nor lead this out of the room by it.
    name = instance.last = f"call-{secrets.token_hex(8)}"
    fd = os.open(
      room.tmp / f"{name}.py",
      os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
      0o600,
    )
    with open(fd, "wb") as file:
      file.write(code.encode("utf-8", "replace"))
    inside = f"{room.inside_tmp}/{name}"
    script = (
      f'cd "$HOME"; timeout -s KILL {self.limits.seconds:g}'
      f" {self._python} -IB {inside}.py; echo $? >{inside}.status.part;"
      f" mv {inside}.status.part {inside}.status"
    )
    room.run(["sh", "-c", script], log=f"{name}.out")
    due = time.monotonic() + self.limits.seconds + 2.0
    status, pause = "", 0.002
    while not status and room.alive and time.monotonic() < due:
      time.sleep(pause)
      pause = min(pause * 1.5, 0.05)
      status = files.read_text(room.tmp, f"{name}.status", "").strip()
    text = files.read_text(room.tmp, f"{name}.out", "")
    return (int(status) if status.isdigit() else None), text


_ENDS = (".py", ".out", ".status")


class _Instance:
  """An episode's sandbox."""

  def __init__(self):
    self.lock = threading.Lock()
    self.room: rooms.Room | None = None
    self.last = ""  # Name of the last call's files.
    self.closed = False

  def drop(self) -> None:
    room, self.room = self.room, None
    if room is not None:
      room.close()

  def close(self) -> None:
    self.closed = True
    room = self.room
    if room is not None:
      room.kill()  # A call that runs ends by that.
    with self.lock:
      self.drop()
