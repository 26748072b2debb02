"""Registers `math`: answers equal to the truth as mathematics.

The package math-verify (the extra `math`) reads LaTeX and plain expressions and
compares them. It runs in processes of its own; one that an answer keeps busy
too long is ended, and started again at the next one: an expression such as
9^(9^(9^9)) cannot hold up the run.

Promises: an answer is judged within `deadline_s`, starting the process apart;
an answer that takes longer is worth 0, and the metadata say `timed_out`.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import queue
import select
import subprocess
import sys
import time
from typing import Any
import weakref

from tunix.rl.multi_turn.rewards import functions
from tunix.rl.multi_turn.rewards import reward_registry

_WORKER = pathlib.Path(__file__).parent / "math_worker.py"
_START_S = 60.0


class MathReward:
  """1 when the answer is mathematically equal to the truth, else 0.

  Thread-safe.
  """

  def __init__(
    self,
    *,
    precision: int = 6,
    strict: bool = True,
    deadline_s: float = 5.0,
    memory_mb: int = 2048,
    workers: int = 2,
  ):
    """Args:

      precision: decimal places that numbers are compared to.
      strict: variables must have the same names, and sets are no tuples.
      deadline_s: Seconds for one answer.
      memory_mb: Address space of a process, in MiB.
      workers: processes, started as answers come at once.

    Raises:
      ValueError: math-verify is not installed; or a limit out of range.
    """
    if importlib.util.find_spec("math_verify") is None:
      raise ValueError(
        "reward 'math' needs math-verify; pip install 'tunix-multi-turn[math]'"
      )
    for name, value, low in (
      ("precision", precision, 0),
      ("deadline_s", deadline_s, 1e-3),
      ("memory_mb", memory_mb, 256),
      ("workers", workers, 1),
    ):
      if value < low:
        raise ValueError(f"{name}={value} must be >= {low}")
    self._options = {"precision": precision, "strict": strict}
    self.deadline_s = deadline_s
    # The last one used first: the others need not be started.
    self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
    for _ in range(workers):
      self._idle.put(Worker(memory_mb << 20))

  def __call__(
    self, task: object, action: object
  ) -> reward_registry.RewardOutput:
    """See the class.

    Raises:
      ValueError: the task has no truth, or none that reads as mathematics.
      RuntimeError: a process cannot be started.
    """
    truth = str(functions.ground_truth(task))
    request = {**self._options, "truth": truth, "answer": str(action)}
    worker = self._idle.get()
    try:
      answer = worker.ask(request, self.deadline_s)
    finally:
      self._idle.put(worker)
    if answer is None:
      return reward_registry.RewardOutput(0.0, {"timed_out": True})
    if "error" in answer:
      raise ValueError(f"ground truth {truth!r:.80}: {answer['error']}")
    return reward_registry.RewardOutput(
      float(answer["equal"]), {"read_as": answer["read_as"]}
    )


class Worker:
  """One process, started at the first request and after it was ended."""

  def __init__(self, memory: int):
    """`memory`: bytes of address space."""
    self._memory = memory
    self._process: subprocess.Popen[bytes] | None = None
    self._finalizer: weakref.finalize | None = None

  def close(self) -> None:
    """Ends the process. Idempotent; the next request starts another."""
    if self._finalizer is not None:
      self._finalizer()
    self._process = self._finalizer = None

  def ask(
    self, request: dict[str, Any], seconds: float
  ) -> dict[str, Any] | None:
    """Returns the process's answer; None when it took too long or broke down.

    Raises:
      RuntimeError: the process cannot be started.
    """
    process = self._started()
    assert process.stdin is not None
    try:
      process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
      process.stdin.flush()
    except OSError:
      self.close()
      return None
    line = _read_line(process, seconds)
    if line is None:
      self.close()
      return None
    return json.loads(line)

  def _started(self) -> subprocess.Popen[bytes]:
    process = self._process
    if process is not None and process.poll() is None:
      return process
    self.close()
    # Not its stderr: sympy writes what it thinks of an answer.
    process = subprocess.Popen(
      [sys.executable, str(_WORKER), str(self._memory), *sys.path],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
    )
    self._process = process
    self._finalizer = weakref.finalize(self, _end, process)
    if _read_line(process, _START_S) is None:
      self.close()
      raise RuntimeError(
        f"the process of reward 'math' did not start in {_START_S:g} s"
      )
    return process


def _read_line(
  process: subprocess.Popen[bytes], seconds: float
) -> bytes | None:
  """Returns a line that the process writes; None at its end or the deadline."""
  assert process.stdout is not None
  due, line = time.monotonic() + seconds, b""
  while not line.endswith(b"\n"):
    remaining = due - time.monotonic()
    pipes = [process.stdout]
    if remaining <= 0 or not select.select(pipes, [], [], remaining)[0]:
      return None
    # Unbuffered: what `select` does not see would be waited for in vain.
    part = process.stdout.raw.read(65536)  # type: ignore[attr-defined]
    if not part:
      return None
    line += part
  return line


def _end(process: subprocess.Popen[bytes]) -> None:
  process.kill()
  for pipe in (process.stdin, process.stdout):
    if pipe is not None:
      try:
        pipe.close()
      except OSError:
        pass  # It has ended, and what was left to write with it.
  process.wait(10)
