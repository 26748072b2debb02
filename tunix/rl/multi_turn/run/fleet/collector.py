"""Plays episodes for a run whose engine is elsewhere.

Borrows groups from the learner, plays them with gyms of this machine, asks the
learner's engine for each turn through its OpenAI-compatible server, and returns
the groups. The tokens of an episode are the server's record, as with
`rollout.via=proxy`.

Promises: those of `player`; at most as many episodes at a time as the run
wants; what gyms share is closed at the end; a collector that SIGTERM ends
gives its groups back at once.

Does not: import JAX, tokenise, render, or use pickle: settings, groups and
orders are JSON over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pathlib
import tempfile
from typing import Any, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import agent_session
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import refusals
from tunix.rl.multi_turn.run.rollout_hosts import player

_LOG = logging.getLogger(__name__)
_CLOSE_S = 30.0
SECTION = "collector"
"""Of the run's settings: what only collectors take."""


class Collector(player.GroupPlayer):
  """One collector; call `run` on an event loop of its own."""

  def __init__(
    self,
    learner: player.Learner,
    overrides: Mapping[str, Any] | None = None,
    episodes_at_a_time: int = 0,
  ):
    """Args:

    learner: Learner whose address has `policy` beside `url`: the root of its
      OpenAI-compatible server.
    overrides: settings of this collector in place of the run's, by dotted
      key, e.g. gym.options.
    episodes_at_a_time: 0 = as many as the run wants.
    """
    super().__init__(learner)
    self._overrides = dict(overrides or {})
    self._most = episodes_at_a_time
    self._asked: dict[str, str] = {}

  async def run(self) -> None:
    """Collects until the run ends.

    Raises:
      ConfigError: the run cannot be collected for here.
      LearnerGone: the learner did not come, or come back.
    """
    try:
      while True:
        try:
          await self._until_it_moves()
          return
        except player.RunEnded:
          return
        except player.Moved:
          continue
    finally:
      await self._leave()

  async def _until_it_moves(self) -> None:
    settings = json_text.parse(await self._learner.call("GET", "/run"))
    own = settings.pop(SECTION, None)
    if own is None:
      raise config_lib.ConfigError(
        [
          "the run takes rollout hosts and no collectors; start"
          " commands.rollout here, or the run with fleet=join"
        ]
      )
    self._asked = address = dict(self._learner.known)
    with tempfile.TemporaryDirectory(prefix="tunix-collector-") as folder:
      self._build(settings, own, address, pathlib.Path(folder))
      try:
        await self._serve(self._most or int(own["episodes"]))
      finally:
        await self._abandon()
        await self._close()

  def _build(
    self,
    settings: Mapping[str, Any],
    own: Mapping[str, Any],
    address: Mapping[str, str],
    folder: pathlib.Path,
  ) -> None:
    self._config = config = player.config_of(settings, self._overrides, folder)
    self._images = images_lib.ImageStore(folder / "images")
    self._episodes = episodes.EpisodeFactory(config, self._images)
    agent, bad = config.rollout.agent, (ImportError, ValueError, KeyError)
    with refusals.refused("a collector cannot begin", *bad):
      self._connection = agent_session.AgentConnection(
        address["policy"],
        own["model"],
        self._images,
        play=agent_session.load(agent) if agent else None,
        token=address["token"],
        timeout_s=config.collect.deadlines.model,
        other_sampling=config.rollout.other_sampling,
      )

  async def _heard(self, answer: Mapping[str, Any]) -> None:
    del answer
    if self._learner.known != self._asked:
      raise player.Moved

  async def _play(
    self, order: Mapping[str, Any], faults: player.Faults
  ) -> trajectory_lib.TrajectoryGroup:
    collector = episodes.make_collector(
      self._config,
      self._episodes,
      None,
      None,
      observers=faults,
      mode=order["mode"],
      connection=self._connection,
      greedy=order["greedy"],
    )
    return await player.collect_order(collector, order)

  async def _close(self) -> None:
    try:
      await concurrency.with_deadline(
        self._connection.aclose(), _CLOSE_S, "closing connections"
      )
      await concurrency.with_deadline(
        self._episodes.close_shared(), _CLOSE_S, "closing what gyms share"
      )
    except Exception as error:  # pylint: disable=broad-except
      # A gym's; the learner is yet to be told.
      _LOG.warning("a collector did not close all of its parts: %r", error)


def collect(address: str, name: str, patience_s: float) -> str:
  """Collects for the run at an address, in a process of its own.

  Args:
    address: JSON with `url`, `policy` and `token`.
    name: Name of the collector.
    patience_s: longest wait for a learner that is not there.

  Returns:
    JSON: `collected` groups, and `error`, "" if the run has ended.
  """
  target = json.loads(address)
  learner = player.Learner(lambda: target, target["url"], patience_s, name)
  collector = Collector(learner)
  error = ""
  try:
    asyncio.run(collector.run())
  except Exception as failure:  # pylint: disable=broad-except
    # Only text crosses to the process that started this one.
    error = f"{type(failure).__name__}: {failure}"
    _LOG.exception("a collector has failed")
  return json.dumps({"collected": collector.collected, "error": error})
