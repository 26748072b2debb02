"""Plays a generator's tasks: order, repetitions, skips, writing.

    async def play(job: generating.Job) -> dict: ...   # {messages, reward, …}

    def run_rollout(data):
      generating.run(data, play)

Promises: each task of the input is played `num_repeat_per_sample` times in each
of `num_epoch` passes, `num_process` episodes at a time, the members of a group
one after another. An entry of `skip_instance_ids` leaves out one group of that
task. An episode's uid and seed follow from the rollout, the pass, the task and
its number, so that a rollout that is resumed plays what is missing only. An
episode that fails is played again twice; many failures in a row end the
rollout with the last one's reason. Under `allowed_items` a group begins only
while fewer items are written or running than the trainer allows, dropped ones
not counted: the policy of the trainer is then never far ahead of its data.

Does not know models or gyms.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import pathlib
import random
import sys
import time
from typing import (
  Any,
  AsyncIterator,
  Awaitable,
  Callable,
  Iterator,
  Mapping,
  Sequence,
)

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.trajectory_collector import seeds

from agent_services.rollout_buffer import client

_TRIES = 3
_PAUSE_S = 1.0
_EPISODE_S = 3600.0
_MOST_FAILURES = 32
_LOOK_S = 0.2
"""Pause between two looks at the bound while no group may begin."""
_BATCH = 10_000
"""Episodes that are looked up, and kept, at a time."""
PRIVATE = "private: "
"""Begins a line for the service's log, which clients do not see."""
_SAMPLING = {
  "max_tokens": int,
  "max_completion_tokens": int,
  "top_k": int,
  "temperature": float,
  "top_p": float,
  "min_p": float,
  "presence_penalty": float,
  "frequency_penalty": float,
  "repetition_penalty": float,
}


class GeneratorError(ValueError):
  """A payload or an input that cannot be; shown without a traceback."""

  is_for_users = True


@dataclasses.dataclass(frozen=True)
class Job:
  """One episode to play.

  Attributes:
    row: Object of the input.
    instance_id: The row's.
    epoch, number: Pass, and member of the group, from 0.
    uid: Id of the episode.
    seed: Seed of its random choices, in [0, 2**31).
  """

  row: Mapping[str, Any]
  instance_id: str
  epoch: int
  number: int
  uid: str
  seed: int


Play = Callable[[Job], Awaitable[dict[str, Any]]]


def rows_of(path: object) -> list[dict[str, Any]]:
  """The objects of a file of JSON lines, each with its `instance_id` as text.

  Raises:
    GeneratorError: naming the file, the line and the fault.
  """
  if not isinstance(path, str) or not path:
    raise GeneratorError(
      f"input_file={path!r} must be a file that the service can read"
    )
  try:
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise GeneratorError(
      f"input_file={path} cannot be read by the service: {error}"
    ) from None
  rows = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = json_text.parse(line)
    except ValueError as error:
      raise GeneratorError(f"{path}, line {number}: no JSON: {error}") from None
    name = row.get("instance_id") if isinstance(row, dict) else None
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
      raise GeneratorError(
        f"{path}, line {number}: it has no instance_id; give each task one,"
        " or let agent_rollout.assign_instance_id write them"
      )
    rows.append({**row, "instance_id": str(name)})
  if not rows:
    raise GeneratorError(f"input_file={path} holds no task")
  return rows


def jobs(
  rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]
) -> Iterator[Job]:
  """The episodes of a rollout, in order.

  Args:
    rows: Objects of the input.
    data: The payload.
  """
  rollout = str(data.get("rollout_id", ""))
  size = int(data["num_repeat_per_sample"])
  skip = collections.Counter(map(str, data.get("skip_instance_ids") or ()))
  order = list(rows)
  random.Random(seeds.derive_seed("order", rollout)).shuffle(order)
  for epoch in range(int(data.get("num_epoch", 1))):
    for row in order:
      name = str(row["instance_id"])
      if skip[name] > 0:
        skip[name] -= 1
        continue
      for number in range(size):
        yield Job(
          row,
          name,
          epoch,
          number,
          f"{rollout[:12]}-{epoch}-{name}-{number}",
          seeds.derive_seed(rollout, epoch, name, number),
        )


def sampling_of(data: Mapping[str, Any]) -> dict[str, Any]:
  """The payload's sampling parameters, as an OpenAI server takes them.

  Raises:
    GeneratorError: a value that is no number.
  """
  values = {**(data.get("sampling_params") or {})}
  if "max_tokens" not in values and data.get("max_tokens") is not None:
    values["max_tokens"] = data["max_tokens"]
  numbers = {}
  for key, value in values.items():
    kind = _SAMPLING.get(key)
    if value is None:
      continue
    try:
      numbers[key] = kind(value) if kind else value
    except (TypeError, ValueError):
      raise GeneratorError(
        f"sampling_params.{key}={value!r} must be a number"
      ) from None
  return numbers


def engine_url(data: Mapping[str, Any]) -> str:
  """`remote_engine_url`, ending in /v1.

  Raises:
    GeneratorError: there is none.
  """
  url = str(data.get("remote_engine_url") or "").rstrip("/")
  if not url:
    raise GeneratorError(
      "remote_engine_url is missing; give the OpenAI-compatible server that"
      " is to be sampled from"
    )
  return url if url.endswith("/v1") else f"{url}/v1"


def run(data: Mapping[str, Any], play: Play) -> None:
  """Plays a whole rollout; see the module docstring.

  Raises:
    GeneratorError: The input is wrong, or too many episodes failed.
    client.BufferError: the buffer refuses an item.
  """
  asyncio.run(generate(data, play))


async def generate(data: Mapping[str, Any], play: Play) -> int:
  """`run`, in an event loop; returns the number of episodes written."""
  rows = await asyncio.to_thread(rows_of, data.get("input_file"))
  async with client.BufferClient(
    str(data["remote_buffer_url"]), buffer=str(data.get("buffer") or "")
  ) as buffer:
    todo = _missing(jobs(rows, data), buffer)
    advancing = asyncio.Lock()
    state = _State()
    places = None
    if data.get("allowed_items") is not None:
      places = _Places(buffer, state)

    async def worker() -> None:
      while True:
        async with advancing:
          job = await anext(todo, None)
          if job is None:
            return
          if places is not None:
            await places.take(job)
          state.running += 1
        item = await _played(job, play, state)
        if item is not None:
          await buffer.push(item)
          state.written += 1
        state.running -= 1

    async with asyncio.TaskGroup() as group:
      for _ in range(int(data.get("num_process", 100))):
        group.create_task(worker())
    say(f"{state.written} episodes written, {state.failed} failed")
    return state.written


async def _missing(
  every: Iterator[Job], buffer: client.BufferClient
) -> AsyncIterator[Job]:
  """Yields the episodes of which the buffer has no item."""
  while batch := list(itertools.islice(every, _BATCH)):
    written = await buffer.known([job.uid for job in batch])
    for job in batch:
      if job.uid not in written:
        yield job


@dataclasses.dataclass
class _State:
  written: int = 0
  failed: int = 0
  running: int = 0
  in_a_row: int = 0


class _Places:
  """Bounds the items that are begun by what the buffer's trainer allows."""

  def __init__(self, buffer: client.BufferClient, state: _State):
    self._buffer, self._state = buffer, state
    self._room = 0

  async def take(self, job: Job) -> None:
    """Waits until the job's group may begin; its later members never wait."""
    while job.number == 0 and self._room <= 0:
      # Counted before the figures: what ends meanwhile is counted twice, so the
      # bound is kept.
      running = self._state.running
      stats = await self._buffer.stats()
      allowed = stats["allowed_items"] + stats["total_dropped"]
      self._room = allowed - stats["total_written"] - running
      if self._room <= 0:
        await asyncio.sleep(_LOOK_S)
    self._room -= 1


async def _played(job: Job, play: Play, state: _State) -> dict[str, Any] | None:
  """The item of an episode; None where every try failed."""
  for attempt in range(_TRIES):
    try:
      got = await concurrency.with_deadline(
        play(job), _EPISODE_S, f"episode {job.uid}"
      )
    except GeneratorError:
      raise
    except Exception as error:  # pylint: disable=broad-except
      reason = concurrency.describe(error)
      what = f"episode {job.uid} failed (try {attempt + 1})"
      if quotes_server(error):
        say(f"{what}: {reason}", private=True)
      if isinstance(error, http.CallError):
        reason = error.summary  # Clients read it.
      say(f"{what}: {reason}")
      state.in_a_row += 1
      if state.in_a_row >= _MOST_FAILURES * _TRIES:
        raise GeneratorError(
          f"{state.in_a_row} tries in a row failed, the last with: {reason}"
        ) from error
      if attempt + 1 < _TRIES:
        await asyncio.sleep(_PAUSE_S * 5**attempt)
      continue
    state.in_a_row = 0
    return _item(job, got)
  state.failed += 1
  return None


def _item(job: Job, got: Mapping[str, Any]) -> dict[str, Any]:
  turns = [m for m in got["messages"] if m.get("role") == "assistant"]
  return {
    **got,
    "uid": job.uid,
    "instance_id": job.instance_id,
    "extra_info": {
      "timestamp": str(time.time()),
      "round_number": len(turns),
      "epoch": job.epoch,
      **got.get("extra_info", {}),
    },
  }


def quotes_server(error: BaseException) -> bool:
  """Whether an error, or one that it came from, holds a server's words."""
  inner = [
    error.__cause__,
    error.__context__,
    *getattr(error, "exceptions", ()),
  ]
  return isinstance(error, http.CallError) or any(
    quotes_server(one) for one in inner if one is not None
  )


def say(text: str, private: bool = False) -> None:
  """Writes to the service's log and, unless private, to what clients see."""
  mark = PRIVATE if private else ""
  lines = "".join(f"{mark}{line}\n" for line in text.splitlines())
  sys.stderr.write(lines)
  sys.stderr.flush()
