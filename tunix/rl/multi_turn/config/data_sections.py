"""Declares the settings of data that others collect: a buffer, or files.

Does not load anything; imports no JAX.
"""

from __future__ import annotations

from typing import Any, Iterator, Literal

from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.core import settings

setting = settings.setting
_MISSING = (
    "Sampled tokens without a recorded log-prob, and all of an episode that is"
    " text only. refuse: they end the run. recompute: the learner's own, of the"
    " weights that the update begins with, stand in, so that the ratio is 1;"
    " such episodes are counted."
)


@settings.settings
class BufferConfig:
  """The rollout buffer service that rollout.via=buffer trains from."""

  url: str = setting(
      default="",
      doc="Of the service, e.g. http://127.0.0.1:8889. Its bearer token is"
      " $TUNIX_BUFFER_TOKEN.",
  )
  name: str = setting(
      default="", doc='One of the service\'s buffers. "" = its default.'
  )
  start: bool = setting(
      default=True,
      doc="POST /start_rollout with this run's policy server as"
      " remote_engine_url. false: episodes are written by others.",
  )
  task_type: str = setting(
      default="math", doc="TASK_TYPE of the service's generator."
  )
  input_file: str = setting(
      default="",
      doc="jsonl of tasks with instance_id, as the service reaches it."
      ' "" = task_source.path.',
  )
  num_epoch: int = setting(
      default=3, doc="Passes of the generator over its tasks.", ge=1
  )
  options: dict[str, Any] = setting(
      default={}, doc="More keys of the start payload, for the generator."
  )
  lease_s: float = setting(
      default=3600.0,
      doc="Time in which what was read is trained on and in a checkpoint; the"
      " service gives it again afterwards, and it is recognised.",
      unit="s",
      gt=0,
  )
  poll_s: float = setting(
      default=1.0,
      doc="Pause between two reads while no group is ready.",
      unit="s",
      gt=0,
  )
  retries: int = setting(
      default=-1,
      doc="Failed calls in a row after which the run ends. -1 = never.",
      ge=-1,
  )
  loss_mask_type: str = setting(
      default="",
      doc="Format of episodes that are text only. \"\" = the policy's own chat"
      " template, screenshots included.",
  )
  missing_logprobs: Literal["refuse", "recompute"] = setting(
      default="refuse", doc=_MISSING
  )

  def problems(self) -> Iterator[str]:
    if self.url:
      try:
        http.address(self.url, "url", "http://127.0.0.1:8889")
      except ValueError as error:
        yield str(error)
    if self.retries == 0:
      yield "retries=0 would end the run without a try; give -1 or >= 1"


@settings.settings
class OfflineConfig:
  """The recorded episodes that rollout.via=offline trains on."""

  path: str = setting(
      default="",
      doc="File or directory: a run's directory or its trajectories.jsonl, a"
      " buffer's items (.jsonl, or its exported .json), demonstrations as"
      " messages. See docs/offline.md.",
  )
  epochs: int = setting(
      default=0,
      doc="Passes over the groups, each in an order of its own (run.seed); the"
      " run then ends, or with learner.steps if those are made before. 0 ="
      " as many as learner.steps needs.",
      ge=0,
  )
  shuffle: bool = setting(
      default=True, doc="false: the groups in the order of the file."
  )
  split: Literal["train", "all"] = setting(
      default="train",
      doc="Of a run's trajectories.jsonl: the episodes of training, or those of"
      " evaluations as well.",
  )
  oldest_version: int = setting(
      default=0,
      doc="Tokens of recorded versions below this leave the loss and stay as"
      " context.",
      unit="versions",
      ge=0,
  )
  loss_mask_type: str = setting(
      default="",
      doc="Format of episodes that are text only. \"\" = the policy's own chat"
      " template, screenshots included.",
  )
  missing_logprobs: Literal["refuse", "recompute"] = setting(
      default="refuse", doc=_MISSING
  )


def contradictions(c: Any) -> Iterator[str]:
  """Values of a `TrainConfig` that cannot go together, of such episodes."""
  via = c.rollout.via
  if via != "buffer" and c.buffer.url:
    yield (
        f"buffer.url={c.buffer.url} is not read with rollout.via={via}; set"
        " rollout.via=buffer"
    )
  if via != "offline" and c.offline.path:
    yield (
        f"offline.path={c.offline.path} is not read with rollout.via={via}; set"
        " rollout.via=offline"
    )
  if via == "buffer":
    if not c.buffer.url:
      yield (
          "rollout.via=buffer needs buffer.url, where a rollout buffer listens,"
          " e.g. http://127.0.0.1:8889"
      )
    if c.buffer.start and not (c.buffer.input_file or c.task_source.path):
      yield (
          "rollout.via=buffer: the service's generator needs a file of tasks;"
          " set buffer.input_file (or task_source.path), or buffer.start=false"
          " where others write"
      )
    asked = c.buffer.options.get("group_rules")
    if asked == "normalized" and c.algorithm.advantage != "reward":
      yield (
          "buffer.options.group_rules=normalized has the service normalise"
          " rewards, which algorithm.advantage="
          f"{c.algorithm.advantage} would do again; set"
          " algorithm.advantage=reward, or leave group_rules out"
      )
  if via == "offline" and not c.offline.path:
    yield "rollout.via=offline needs offline.path, a file of episodes"
  if via not in ("buffer", "offline"):
    return
  if c.collect.part_size:
    yield (
        f"collect.part_size={c.collect.part_size} splits groups that the run"
        f" plays, and rollout.via={via} plays none; set collect.part_size=0"
    )
  if c.algorithm.advantage == "remax":
    yield (
        "algorithm.advantage=remax plays a greedy episode beside each group,"
        f" and rollout.via={via} plays none; use another"
    )
