"""Borrows groups from a learner, and returns them collected.

What rollout hosts, which sample with devices of their own, and the fleet's
collectors, which ask the learner's engine, have in common. A subclass of
`GroupPlayer` collects a group, and reacts to what a beat answers.

Promises: when the learner is gone a player waits for it, `patience_s` at most,
and joins it again at its new address; groups that were taken back are
cancelled, and their gyms closed, before one that is lent again begins. Of
several learners' processes each is asked, and one that has nothing to lend, or
is slow to answer, holds up none of the others' groups.

Does not: import JAX, or keep anything that must survive: a player can be
killed at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import copy
import functools
import logging
import pathlib
import signal
import sys
import time
from typing import Any, Callable, Iterable, Mapping
import uuid

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.run.rollout_hosts import messages
from tunix.rl.multi_turn.trajectory_collector import groups

_LOG = logging.getLogger(__name__)
ADDRESS = "rollout.json"
"""File of a run's directory from which its players take URL and token."""
LEARNERS = "learners"
"""Key of that file: the addresses of all processes that learn, if several."""
_ANSWER_S = 60.0
TRANSFER_S = 1800.0
"""For what may be large: groups and weights."""
_BEAT_S = 0.5
_SILENCE_S = 10.0
"""A connection that is cut for so long is given up, and the call made again."""
_LEAVE_S = 5.0
_SHORT_S = 0.5  # That one of several is asked for a lease, before the next is.


class LearnerGone(RuntimeError):
  """The learner was not there for longer than the player's patience."""


class RunEnded(Exception):
  """The run has taken its address away."""


class Moved(Exception):
  """The run's learners are others, or at other addresses, than before."""


def addresses(directory: str | pathlib.Path) -> list[dict[str, str]]:
  """Of the processes that learn in a run, from its `ADDRESS`.

  Raises:
    FileNotFoundError: there is none.
    ValueError, KeyError, OSError: it is not whole yet.
  """
  file = pathlib.Path(directory) / ADDRESS
  address = json_text.read(file)
  return address.get(LEARNERS) or [address]


class Learner:
  """HTTP calls of the learner at its present address.

  Attributes:
    name: Name of this player, as the learner knows it.
    known: the address of the latest call: `url` and `token`.
  """

  def __init__(
    self,
    address: Callable[[], Mapping[str, str]],
    where: str,
    patience_s: float,
    name: str = "",
  ):
    """Args:

    address: the learner's present `url` and `token`; a FileNotFoundError
      once there was one is the run's end.
    where: Place of the address, for errors.
    patience_s: longest wait for a learner that is not there.
    name: Name of this player; "" makes one.
    """
    self._address = address
    self._where = where
    self._patience_s = patience_s
    self.name = name or f"host-{uuid.uuid4().hex[:8]}"
    self.known: dict[str, str] = {}
    self._http = http.Http(connect_s=_SILENCE_S, silence_s=_SILENCE_S)
    self._joined = False

  @classmethod
  def of_directory(
    cls,
    directory: str | pathlib.Path,
    patience_s: float,
    name: str = "",
    process: int = 0,
  ) -> Learner:
    """The learner whose `ADDRESS` is or will be in a directory.

    Calls raise `Moved` where the run has no such process any more.
    """

    def read() -> Mapping[str, str]:
      learners = addresses(directory)
      if process >= len(learners):
        raise Moved
      return learners[process]

    where = str(pathlib.Path(directory) / ADDRESS)
    return cls(read, where, patience_s, name)

  async def call(
    self,
    method: str,
    path: str,
    seconds: float = _ANSWER_S,
    headers: Mapping[str, str] | None = None,
    **request: Any,
  ) -> bytes:
    """Returns the answer's body; waits for a learner that is not there.

    Raises:
      LearnerGone: It did not answer for `patience_s`.
      RunEnded: the run has ended since this player joined it.
      CallError: the learner refuses the request.
    """
    due = time.monotonic() + self._patience_s
    while True:
      try:
        address = dict(self._address())
        answer = await self._http.call(
          method,
          address["url"] + path,
          seconds,
          headers={
            **(headers or {}),
            "Authorization": f"Bearer {address['token']}",
          },
          **request,
        )
        self._joined, self.known = True, address
        return answer
      except http.CallError as error:
        # 401: of a learner that has just begun anew.
        if error.status not in (0, 401):
          raise
        reason: Exception = error
      except FileNotFoundError as error:
        if self._joined:  # A learner that is killed leaves it.
          raise RunEnded from None
        reason = error
      except (OSError, ValueError, KeyError) as error:
        reason = error  # Not yet whole.
      if time.monotonic() > due:
        raise LearnerGone(
          f"no learner for {self._patience_s:g} s at {self._where}: {reason}"
        ) from None
      await asyncio.sleep(_BEAT_S)

  async def ask(self, path: str, **body: Any) -> dict[str, Any]:
    """The JSON that answers a POST."""
    answer = await self.call(
      "POST", path, TRANSFER_S, body={"host": self.name, **body}
    )
    return json_text.parse(answer)

  async def aclose(self) -> None:
    await self._http.aclose()


class Faults:
  """Observer that keeps the faults of a group's episodes."""

  def __init__(self):
    self.found: list[list[str]] = []

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.Fault):
      self.found.append(
        [event.stage, event.kind, event.message, event.trajectory_id or ""]
      )


def overrides_of(texts: Iterable[str], example: str) -> dict[str, str]:
  """Reads a player's own settings, section.key=value, by dotted key.

  Raises:
    ConfigError: a text is none; shows `example`.
  """
  overrides = {}
  for text in texts:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
      raise config_lib.ConfigError(
        [f"{text!r} is no section.key=value, e.g. {example}"]
      )
    overrides[key] = value
  return overrides


def add_arguments(parser: argparse.ArgumentParser, example: str) -> None:
  """Adds a player's own settings and its patience."""
  parser.add_argument(
    "overrides",
    nargs="*",
    metavar="key=value",
    help=f"settings here in place of the run's, e.g. {example}",
  )
  parser.add_argument(
    "--patience",
    type=float,
    default=600.0,
    metavar="S",
    help="seconds to wait for a learner that is not there (%(default)s)",
  )


def exit_status(play: Callable[[], tuple[GroupPlayer, str]]) -> int:
  """Runs a player's command; returns its exit status.

  Args:
    play: Plays to the end; returns the player, and why it has ended.
  """
  try:
    played, why = play()
  except (LearnerGone, http.CallError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2 if isinstance(error, config_lib.ConfigError) else 1
  except KeyboardInterrupt:
    return 130
  print(f"{why}; {played.collected} groups were collected here")
  return 0


async def collect_order(
  collector: groups.GroupCollector, order: Mapping[str, Any]
) -> trajectory_lib.TrajectoryGroup:
  """Collects the group that a learner's order describes."""
  return await collector.collect(
    gym_base.Task.from_json(order["task"]),
    index=order["index"],
    attempt=order["attempt"],
    start_version=order["start_version"],
    group_size=order["group_size"],
    samples=order["samples"],
  )


def config_of(
  settings: Mapping[str, Any],
  overrides: Mapping[str, Any],
  folder: pathlib.Path,
) -> config_lib.TrainConfig:
  """The configuration of a player.

  Args:
    settings: The run's settings by section, as the learner sends them.
    overrides: the player's own, by dotted key.
    folder: Folder in place of the run's directory.

  Raises:
    ConfigError: the run cannot be rolled out with these.
  """
  data = copy.deepcopy(dict(settings))
  agent = data["rollout"].get("agent")
  data["rollout"] = {"via": "in_process"}
  if agent:
    data["rollout"] = {"via": "proxy", "agent": agent}
  # Groups come when they come; lockstep would wait for those to come.
  data["engine"]["lockstep"] = "false"
  data["run"] |= {"dir": str(folder), "resume": "", "dry_run": False}

  def size(axis: str) -> int:
    text = str(overrides.get(f"mesh.{axis}", 1))
    return max(1, int(text)) if text.isdecimal() else 1

  # Rows are the learner's: here they need only suit a mesh of another size.
  learner, shards = data["learner"], size("sequence")
  learner["rows"] = size("data") * size("fsdp")
  learner["row_length"] = -(-learner["row_length"] // shards) * shards
  for key, value in overrides.items():
    *above, name = key.split(".")
    place = data
    for part in above:
      place = place.setdefault(part, {})
      if not isinstance(place, dict):
        raise config_lib.ConfigError(
          [f"{key}={value}: {part} has no fields; set {key.rpartition('.')[0]}"]
        )
    place[name] = value
  return config_lib.from_dict(data, "the run's settings")


_Key = tuple[Learner, int]
"""A lease: the learner that has lent it, and its number."""


class GroupPlayer:
  """Plays the groups that learners lend; see the module docstring."""

  def __init__(self, learner: Learner):
    self._learner = learner
    self._learners = [learner]
    """The processes that learn; `_learner`, the first, has the weights."""
    self._work: dict[_Key, asyncio.Task[None]] = {}
    self._episodes_of: dict[_Key, int] = {}
    self.collected = 0
    """Groups that a learner took."""

  async def until_terminated(self) -> str:
    """Plays until the run ends, or SIGTERM comes; returns which."""
    work = asyncio.ensure_future(self.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    try:
      await work
      return "the run has ended"
    except asyncio.CancelledError:
      if not work.cancelled():
        raise
      return "told to end"

  async def _leave(self) -> None:
    """Gives groups back at once, if the learners answer; closes connections."""
    leaving: dict[str, Any] = dict(leases=[], stats={}, leaving=True)
    calls = [learner.ask("/beat", **leaving) for learner in self._learners]
    beats = asyncio.gather(*calls, return_exceptions=True)
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(beats, _LEAVE_S)
    await asyncio.gather(*(learner.aclose() for learner in self._learners))

  # --- of a subclass ---------------------------------------------------------

  async def run(self) -> None:
    """Plays until the run ends."""
    raise NotImplementedError

  _config: config_lib.TrainConfig
  _images: images_lib.ImageStore

  def _numbers(self) -> dict[str, float]:
    """Counters of the player's own engine, if it has one."""
    return {}

  async def _heard(self, answer: Mapping[str, Any]) -> None:
    """Reacts to a beat's answer, of any learner."""

  async def _play(
    self, order: Mapping[str, Any], faults: Faults
  ) -> trajectory_lib.TrajectoryGroup:
    """Collects the group of an order."""
    raise NotImplementedError

  # --- the loop --------------------------------------------------------------

  async def _serve(self, most: int) -> None:
    """Borrows groups, of `most` episodes together, until the run ends.

    Raises:
      RunEnded, LearnerGone, Moved, CallError: as of `Learner.call`.
    """
    beats = {asyncio.ensure_future(self._beat(l)) for l in self._learners}
    asking: dict[asyncio.Future[dict[str, Any]], Learner] = {}
    turns = collections.deque(self._learners)
    try:
      while not any(beat.done() for beat in beats):
        # No more are asked than groups find room: each may lend one.
        room = most - sum(self._episodes_of.values())
        while (
          room > 0
          and len(asking) < len(turns)
          and (not asking or len(asking) * self._usual < room)
        ):
          turns.rotate(-1)
          if turns[-1] not in asking.values():
            asking[asyncio.ensure_future(self._ask(turns[-1]))] = turns[-1]
        awaited: set[asyncio.Future[Any]] = {
          *beats,
          *asking,
          *self._work.values(),
        }
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for request in [request for request in asking if request.done()]:
          learner = asking.pop(request)
          if lease := request.result():
            await self._begin(learner, lease, beats)
      for beat in beats:
        if beat.done():
          beat.result()
    finally:
      loose: set[asyncio.Future[Any]] = {*beats, *asking}
      for task in loose:
        task.cancel()
      await asyncio.gather(*loose, return_exceptions=True)

  @property
  def _usual(self) -> int:
    """Episodes of a group of training."""
    return self._config.collect.group_size

  async def _ask(self, learner: Learner) -> dict[str, Any]:
    """A lease of a learner; {} if it has none."""
    if len(self._learners) == 1:
      return await learner.ask("/lease")
    return await learner.ask("/lease", wait_s=_SHORT_S)

  async def _begin(
    self,
    learner: Learner,
    lease: Mapping[str, Any],
    beats: Iterable[asyncio.Task[None]],
  ) -> None:
    """Begins a group, unless a beat ends first."""
    key = learner, int(lease["number"])
    if (before := self._work.get(key)) is not None:
      # Taken back while it was played, and what it asked of is gone.
      _LOG.warning("lease %d is lent again and begun anew", key[1])
      before.cancel()
      while not before.done():
        ended, _ = await asyncio.wait(
          [*beats, before], return_when=asyncio.FIRST_COMPLETED
        )
        if before not in ended:
          return
    order = lease["order"]
    self._episodes_of[key] = self._size(order)
    task = asyncio.ensure_future(self._collect(*key, order))
    self._work[key] = task
    task.add_done_callback(functools.partial(self._ended, key))

  async def _abandon(self) -> None:
    """Cancels the groups under way; their gyms are closed."""
    work = list(self._work.values())
    for task in work:
      task.cancel()
    await asyncio.gather(*work, return_exceptions=True)

  def _size(self, order: Mapping[str, Any]) -> int:
    """Episodes of a group."""
    if order["samples"] is not None:
      return len(order["samples"])
    if order["mode"] != "train":
      return 1
    return order["group_size"] or self._config.collect.group_size

  def _ended(self, key: _Key, task: asyncio.Task[None]) -> None:
    if self._work.get(key) is task:
      del self._work[key], self._episodes_of[key]
    if not task.cancelled() and (error := task.exception()) is not None:
      # The learner takes the lease back; other groups go on.
      _LOG.warning("group of lease %d was not collected: %r", key[1], error)

  async def _beat(self, learner: Learner) -> None:
    """Ends when the run has."""
    # Counters of the one engine are for one of the learners: they add them up.
    first = learner is self._learner
    while True:
      answer = await learner.ask(
        "/beat",
        leases=[number for of, number in self._work if of is learner],
        stats=self._numbers() if first else {},
      )
      if answer["ended"]:
        return
      for number in answer["withdrawn"]:
        if (task := self._work.get((learner, number))) is not None:
          task.cancel()
      await self._heard(answer)
      await asyncio.sleep(float(answer["pause_s"]))

  async def _collect(
    self, learner: Learner, number: int, order: Mapping[str, Any]
  ) -> None:
    faults = Faults()
    group = await self._play(order, faults)
    collected = await asyncio.to_thread(
      messages.write_group, group, self._images
    )
    answer = await learner.ask(
      f"/leases/{number}", collected=collected, faults=faults.found
    )
    self.collected += bool(answer["taken"])
