"""Names of the former trainer's command line, and the settings they mean.

A command line or a file of it still works: each name is an alias of a setting
here, and the log says which. `project_token` is no setting: it goes to
the environment, where every token is read from, and is never written anywhere.

Does not: take names of the former agents' loops, which had no setting here.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Mapping

from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import monitor_settings as monitor_settings

_LOG = logging.getLogger(__name__)
SETTINGS: dict[str, str] = {
  "gym_base_url": "gym.options.base_url",
  "gym_id": "gym.options.gym_id",
  "eval_tasks": "task_source.eval_names",
  "learning_rate": "learner.learning_rate",
  "lora_rank": "policy.lora_rank",
  "consumer_batch_size": "learner.groups_per_step",
  "rollout_backend": "run_service.backend",
  "gbox_mini_agent_base_url": "run_service.base_url",
  "gbox_mini_agent_agent": "run_service.agent",
  "gbox_mini_agent_model": "run_service.model",
  "gbox_mini_agent_env": "run_service.env",
  "max_turns": "environment.max_turns",
  "max_task_time_seconds": "collect.deadlines.episode",
  "max_turn_time_seconds": "collect.deadlines.turn",
  "max_concurrent_rollouts": "collect.concurrency",
  "group_size": "collect.group_size",
  "groups_per_batch": "learner.groups_per_step",
  "monitor_base_url": "monitor.url",
}
"""Former name -> the setting that it means."""
TOKEN = loader.TOKEN
SPLIT = "split_type"
URL_VARIABLE = "TUNIX_MONITOR_URL"
_TOKEN_VARIABLE = monitor_settings.TOKEN_VARIABLE
_OF_GYM = ("gym_base_url", "gym_id")
_GYM_SERVER = {"gym.name": "genv", "task_source.source": "gym"}


def take(
  data: Mapping[str, Any], problems: list[str], former: set[str]
) -> dict[str, Any]:
  """A layer without the former names that are no settings.

  Args:
    data: The layer, keys as they were written.
    problems: Receives the reasons of a refused value.
    former: Receives the former names that the layer has.
  """
  layer = dict(data)
  former |= set(layer) & {*SETTINGS, TOKEN, SPLIT}
  if SPLIT in layer:
    split = loader.unwrap(layer.pop(SPLIT))
    if split not in ("train", "", None):
      problems.append(
        f"{SPLIT}={split}: a run trains on the training split of its list and"
        " is evaluated on the held-out one; leave it out, and name held-out"
        " tasks by task_source.eval_names"
      )
  if TOKEN in layer:
    value = layer.pop(TOKEN)
    if not isinstance(value := loader.unwrap(value), str | None):
      problems.append(
        f"{TOKEN} is read as a {type(value).__name__}, not as text; put"
        " quotes around it"
      )
      value = ""
    token = value or ""
    present = os.environ.get(_TOKEN_VARIABLE, "")
    if token and present and token != present:
      problems.append(
        f"{TOKEN} is another token than ${_TOKEN_VARIABLE}; give one of them"
      )
    elif token:
      os.environ[_TOKEN_VARIABLE] = token
  return layer


def implied(
  former: set[str], settings: Mapping[str, Any], records: bool
) -> dict[str, Any]:
  """Defaults that the names and the environment bring, below all layers.

  Args:
    former: Former names that were used.
    settings: Settings by dotted key.
    records: Whether the command sends what it does to a monitor.
  """
  defaults: dict[str, Any] = {}
  if former & set(_OF_GYM) and "gym.name" not in settings:
    defaults |= _GYM_SERVER
  url = os.environ.get(URL_VARIABLE, "")
  embedded = loader.unwrap(settings.get("monitor.embedded", False))
  if url and records and "monitor.url" not in settings and not embedded:
    defaults["monitor.url"] = url
  return defaults


def announce(former: set[str]) -> None:
  """Logs the present name of each former one, values left out."""
  for name in sorted(former):
    if name == SPLIT:
      _LOG.warning("%s is a former name; a run needs none", name)
      continue
    present = SETTINGS.get(name, f"${_TOKEN_VARIABLE}")
    _LOG.warning("%s is a former name of %s", name, present)


def is_token(argument: str) -> bool:
  """Whether an argument with dashes holds the token: it is not repeated."""
  name = argument.lstrip("-").partition("=")[0]
  return name.replace("-", "_") == TOKEN
