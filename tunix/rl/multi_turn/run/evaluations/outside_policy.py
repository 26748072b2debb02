"""Plays episodes for a program that has the policy, over stdin and stdout.

The other way round of `rollout.agent`: agents, environments, rewards and
deadlines are those of a run of the same settings, and each turn's messages go
to the other program, which returns the policy's text. The environment of
verifiers in `tunix_multi_turn.verifiers_env` is such a program. Lines are those
of `net.line_process`: the first one has `settings` (as of train), and the
numbers of tasks, `train` and `eval`; the answer lists the tasks. A request has
one of

- `start` {split, index}: `{episode, kept, messages}`
- `reply` {episode, text, truncated}: `{kept, messages}`, or at the end
  `{outcome}` with reward, success, status, turns and metrics
- `close` {episode}: `{}`

`messages` have OpenAI's form, screenshots as data URLs; they follow the first
`kept` ones of the turn before.

Promises: an episode that no policy decided (an environment that failed, a
deadline) is an error, not a reward of 0; what an episode holds is freed however
it ends.

Does not import JAX, sample, or train.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from typing import Any, cast, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments.verifiers import worker
from tunix.rl.multi_turn.net import data_urls
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import first_episode
from tunix.rl.multi_turn.run import tasks as tasks_lib
from tunix.rl.multi_turn.trajectory_collector import groups
from tunix.rl.multi_turn.trajectory_collector import model_calls

_SPLITS = ("train", "eval")


class Outside:
  """The model of one episode: the collector asks, the other program answers."""

  def __init__(self, urls: data_urls.DataUrls):
    self._urls = urls
    self._sent: list[trajectory.Message] = []
    self._asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    self._said: asyncio.Queue[model_calls.Reply] = asyncio.Queue()
    self.num_rewrites = 0
    self.render_seconds = 0.0

  def new_session(self, name: str, seed: int | None) -> Outside:
    del name, seed
    return self

  async def reply(
    self,
    messages: Sequence[trajectory.Message],
    turn: int,
    call: model_calls.GuardedCall,
  ) -> model_calls.Reply:
    """See `model_calls.TextSession`."""
    return await call(self._reply, messages, turn, inline=True)

  async def _reply(
    self, messages: Sequence[trajectory.Message], turn: int
  ) -> model_calls.Reply:
    del turn
    length = 0
    for message, old in zip(messages, self._sent):
      if message is not old:
        break
      length += 1
    self.num_rewrites += length < len(self._sent)
    self._sent = list(messages)
    written = [await self._write(message) for message in messages[length:]]
    self._asked.put_nowait({"kept": length, "messages": written})
    return await self._said.get()

  async def _write(self, message: trajectory.Message) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
      content = [
        {
          "type": "image_url",
          "image_url": {"url": await self._urls.of(part["image"])},
        }
        if part.get("type") == "image"
        else dict(part)
        for part in content
      ]
    # Agents mark outputs of tools with an id; OpenAI's users have none.
    return {"role": message["role"], "content": content}

  async def asked(self) -> dict[str, Any]:
    """The next turn's messages."""
    return await self._asked.get()

  def say(self, text: str, truncated: bool) -> None:
    self._said.put_nowait(model_calls.Reply(text, truncated=truncated))

  def build(self) -> list[trajectory.TokenSequence]:
    return []

  def sessions(self) -> list[str]:
    return []


class Episodes:
  """The episodes that are being played, by name. One event loop."""

  def __init__(self, settings: Sequence[str]):
    """Raises:

    ConfigError: naming each setting that is wrong.
    """
    config, source = tasks_lib.resolve(config_lib.load_config(list(settings)))
    if config.agent.history == "summary":
      raise config_lib.ConfigError(
        [
          "agent.history=summary counts the tokens of a context, which the"
          " program that samples does not report; set agent.history=window"
        ]
      )
    self._config, self._source = config, source
    self._images = images_lib.ImageStore()
    self._factory = episodes_lib.EpisodeFactory(config, self._images)
    first_episode.try_first_episode(config, self._factory, source)
    self._urls = data_urls.DataUrls(self._images)
    self._names = itertools.count(1)
    self._playing: dict[int, tuple[Outside, asyncio.Task[Any]]] = {}

  def task(self, split: str, index: int) -> Any:
    """The families by turns, each with its own tasks in order."""
    config = self._config
    training = split == "train"
    families = (
      config.task_source.families if training else config.evaluated_families
    )
    place, family = divmod(index, len(families))
    if training:
      return self._source.train_task(families[family], place, config.run.seed)
    return self._source.eval_task(families[family], place, config.eval.seed)

  def listed(self, split: str, count: int) -> list[dict[str, Any]]:
    """Describes the first `count` tasks of a split."""
    return [
      {
        "task_id": groups.task_id_of(task),
        "family": str(getattr(task, "family", "")),
        "instruction": str(getattr(task, "instruction", "") or ""),
      }
      for task in (self.task(split, index) for index in range(count))
    ]

  async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a request; see the module docstring.

    Raises:
      RuntimeError: the episode ended without an outcome of the policy.
      ValueError: no such request.
    """
    if started := request.get("start"):
      return await self._start(started["split"], started["index"])
    if reply := request.get("reply"):
      name = reply["episode"]
      outside, _ = self._episode(name)
      outside.say(str(reply["text"]), bool(reply.get("truncated")))
      return await self._next(name)
    if closed := request.get("close"):
      await self._close(closed["episode"])
      return {}
    raise ValueError(f"a request starts, replies or closes; got {request!r}")

  async def _start(self, split: str, index: int) -> dict[str, Any]:
    if split not in _SPLITS:
      raise ValueError(f"split={split!r} must be train or eval")
    name, outside = next(self._names), Outside(self._urls)
    config = self._config
    collector = groups.GroupCollector(
      self._factory,
      cast(Any, outside),  # Its sessions are made as a PolicyModel's.
      config.collect,
      max_turns=config.environment.max_turns,
      seed=config.run.seed,
      split=split,
      final_reward_fn=self._factory.episode_reward,
    )
    playing = asyncio.ensure_future(
      collector.collect(self.task(split, index), index=index, group_size=1)
    )
    self._playing[name] = outside, playing
    return {"episode": name, **await self._next(name)}

  def _episode(self, name: object) -> tuple[Outside, asyncio.Task[Any]]:
    if name not in self._playing:
      raise ValueError(f"no episode {name!r} is being played; start another")
    return self._playing[name]

  async def _next(self, name: int) -> dict[str, Any]:
    """The next turn, or the outcome."""
    outside, playing = self._episode(name)
    request = asyncio.ensure_future(outside.asked())
    try:
      await asyncio.wait({request, playing}, return_when="FIRST_COMPLETED")
      if request.done():
        return request.result()
      del self._playing[name]
      return {"outcome": _outcome(playing.result().trajectories[0])}
    except asyncio.CancelledError:
      await self._close(name)
      raise
    finally:
      request.cancel()

  async def _close(self, name: Any) -> None:
    _, playing = self._playing.pop(name, (None, None))
    if playing is not None:
      playing.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await playing


def _outcome(episode: trajectory.Trajectory) -> dict[str, Any]:
  """Returns the outcome of an episode as JSON.

  Raises:
    RuntimeError: A failure of the environment or the engine ended it.
  """
  status = episode.status
  if not status.is_policy_outcome:
    raise RuntimeError(
      f"the episode ended with status={status.value}: {episode.error or '?'}"
    )
  info = episode.steps[-1].info if episode.steps else {}
  return {
    "reward": float(episode.reward),
    "success": status is trajectory.TrajectoryStatus.SUCCEEDED,
    "status": status.value,
    "turns": len(episode.steps),
    "parse_errors": sum(
      bool(step.info.get("parse_errors")) for step in episode.steps
    ),
    "answer": str(info.get("answer", "")),
  }


def prepare(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
  """For `worker.serve`."""
  episodes = Episodes(setup["settings"])
  facts = {split: episodes.listed(split, setup[split]) for split in _SPLITS}
  return facts, episodes.play


if __name__ == "__main__":
  sys.exit(worker.serve(prepare))
