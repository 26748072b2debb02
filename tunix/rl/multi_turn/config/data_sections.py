"""Declares the settings of data that others collect: a buffer, or files.

Does not load anything; imports no JAX.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Literal, TYPE_CHECKING

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.trajectory_collector import loss_mask

if TYPE_CHECKING:
  from tunix.rl.multi_turn.config import train_config

setting = settings.setting
OWN_FUNCTION = (
  "tunix.rl.multi_turn.trajectory_collector.agent_rollout"
  ".generate_agent_rollout"
)
"""The rollout function that this package has."""
ROLLOUT_FLAGS = {
  "agent_rollout_buffer_url": "buffer.url",
  "rollout_buffer_url": "buffer.url",
  "rollout_function_path": "buffer.function",
  "rollout_task_type": "buffer.task_type",
  "prompt_data": "buffer.input_file",
  "num_epoch": "buffer.num_epoch",
  "loss_mask_type": "buffer.loss_mask_type",
  "buffer_filter_path": "buffer.filter",
  "disable_rewards_normalization": "buffer.normalized",
  "fetch_trajectory_retry_times": "buffer.retries",
  "num_rollout": "learner.steps",
  "rollout_batch_size": "learner.groups_per_step",
  "n_samples_per_prompt": "collect.group_size",
  "rollout_num_process": "collect.concurrency",
  "rollout_max_response_len": "sampling.max_new_tokens",
  "rollout_temperature": "sampling.temperature",
  "rollout_top_p": "sampling.top_p",
  "hf_checkpoint": "policy.name",
}
"""Arguments of the rollout buffer protocol's trainer -> the settings they mean.
They are short keys, and options of the command: `--num-rollout 3`."""
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
  function: str = setting(
    default="",
    doc="package.module.function of (args, rollout_id, data_buffer), plain or"
    " async, that makes each rollout: it returns the samples of"
    ' learner.groups_per_step groups. "" = the run reads the service'
    " itself, under leases; with buffer.filter, this package's"
    " agent_rollout.generate_agent_rollout.",
  )
  filter: str = setting(
    default="",
    doc="package.module.function of (args, rollout_id, buffer, num_groups)"
    " that takes a rollout's groups out of the list `buffer` of groups, for"
    ' a function that asks its data buffer for samples. "" = in the order'
    " in which they were added.",
  )
  normalized: bool = setting(
    default=False,
    doc="The service filters, normalises and pads groups, and the learner"
    " takes rewards as they come (algorithm.advantage=reward). false: groups"
    " come with the rewards of their episodes, which algorithm.advantage"
    " compares.",
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
    doc='Format of episodes that are text only. "" = the policy\'s own chat'
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
    if "group_rules" in self.options:
      yield (
        f"options.group_rules={self.options['group_rules']} is chosen by"
        " normalized; set buffer.normalized=true or false"
      )
    if self.makes_rollouts and not self.start:
      yield (
        "start=false is of a run that reads the service itself, and a rollout"
        " function starts it; leave out function and filter, or start"
      )
    if self.makes_rollouts and self.name:
      yield (
        f"name={self.name} is of a run that reads the service itself; for a"
        f" rollout function set url={self.url}/b/{self.name}"
      )

  @property
  def makes_rollouts(self) -> bool:
    """Whether a rollout function stands in the place of the run's reading."""
    return bool(self.function or self.filter)


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
    doc='Format of episodes that are text only. "" = the policy\'s own chat'
    " template, screenshots included.",
  )
  missing_logprobs: Literal["refuse", "recompute"] = setting(
    default="refuse", doc=_MISSING
  )


def presets(chosen: Callable[[str], Any]) -> dict[str, Any]:
  """Defaults of settings that a buffer's other settings imply, by dotted key.

  Args:
    chosen: The value of a dotted key, its default where none is given.
  """
  return {
    key: value
    for choice, values in CHOICES.items()
    for key, value in values.items()
    if chosen(choice) not in (False, None, "", "None", "False", "false")
  }


CHOICES: dict[str, dict[str, Any]] = {
  "buffer.url": {"rollout.via": "buffer"},
  "buffer.normalized": {"algorithm.advantage": "reward"},
  # Text has no log-probs.
  "buffer.loss_mask_type": {"buffer.missing_logprobs": "recompute"},
}
"""What a setting of the section implies where it is given."""


def contradictions(c: train_config.TrainConfig) -> Iterator[str]:
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
    if c.buffer.normalized and c.algorithm.advantage != "reward":
      yield (
        "buffer.normalized=true (--disable-rewards-normalization) leaves the"
        f" rewards as the service gives them, and algorithm.advantage="
        f"{c.algorithm.advantage} compares them again; leave out one of them"
      )
    for field, or_else in (
      (
        "function",
        f", {OWN_FUNCTION}, or leave it out: the run then reads"
        " the service itself",
      ),
      ("filter", ""),
    ):
      if path := getattr(c.buffer, field):
        try:
          registry.import_function(path)
        except (ValueError, ImportError) as error:
          yield (
            f"buffer.{field}={path}: {error}; give package.module.function"
            + or_else
          )
    if kind := c.buffer.loss_mask_type:
      try:
        loss_mask.LOSS_MASK_TYPES.get(kind, "operator")
      except (ValueError, ImportError) as error:
        yield f"buffer.loss_mask_type={kind}: {error}"
    if c.buffer.makes_rollouts and c.learner.dynamic_sampling:
      yield (
        f"learner.dynamic_sampling={c.learner.dynamic_sampling} asks for more"
        " groups than the learner.steps rollouts of buffer.function (or"
        " buffer.filter) have; set learner.dynamic_sampling=0, and filter"
        " groups in the function"
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
