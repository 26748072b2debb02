"""Builds the environments of runs: what an agent service acts on.

A run's `env` names its kind by `type`: `genv` is an execution of a gym server
that the caller has made and will judge, `gym` a gym in the service's own
process, which judges itself.

Promises: an `env` that cannot be is a ValueError that names its field; only
gyms that the operator has allowed are built, with the settings that the
operator lets clients choose and numbers within their bounds.
"""

from __future__ import annotations

from typing import Any, Collection, Mapping

from cua_gyms.genv import genv_gym
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.parser.tool_parser import base as base_parser
from tunix.rl.multi_turn.tools import screenshot


def make_environment(
  env: Mapping[str, Any],
  *,
  instruction: str,
  parser: base_parser.ToolParser,
  max_steps: int,
  on_parse_error: str,
  images: images_lib.ImageStore,
  allowed_gyms: Collection[str],
  client_settings: Collection[str] = (),
) -> cua_env.CUAEnv:
  """Returns the environment of one run.

  Args:
    env: Environment that the request names.
    instruction: the task's text; "" leaves it to the gym.
    parser: the agent's grammar.
    max_steps: Turns that the run may take.
    on_parse_error: the agent's mode, "end", "retry" or "answer".
    images: stores the screenshots.
    allowed_gyms: Names for `type: gym`, the operator's.
    client_settings: Options of a gym that `env.settings` may hold.

  Raises:
    ValueError: naming the field.
    ImportError: a gym's package is missing.
  """
  kind = env["type"]
  if kind == "genv":
    gym, task = _genv(env, instruction)
  else:
    gym, task = _gym(env, instruction, allowed_gyms, client_settings)
  retry = on_parse_error == "retry"
  environment = cua_env.CUAEnv(
    gym,
    screenshot.ScreenshotTool(images),
    task,
    action_parser=parser,
    max_steps=max_steps,
    on_text="retry" if retry else "end",
    on_invalid="observe" if retry else "end",
  )
  environment.runs_inline = (
    kind == "genv" or gyms.get(env["gym"], "operator").runs_inline
  )
  return environment


def judges_itself(env: Mapping[str, Any]) -> bool:
  """Whether the run's own evaluation counts, and not its caller's."""
  return env.get("type") == "gym"


def _text(env: Mapping[str, Any], name: str) -> str:
  value = env.get(name)
  if not isinstance(value, str) or not value:
    raise ValueError(f"env.{name} must be a text, got {value!r}")
  return value


def _genv(env: Mapping[str, Any], instruction: str) -> tuple[Any, base.Task]:
  if not instruction:
    raise ValueError("task must be the instruction, got ''")
  gym = genv_gym.AttachedGym(
    _text(env, "gymBaseUrl"), _text(env, "gymId"), _text(env, "executionId")
  )
  return gym, base.Task(_text(env, "executionId"), "runs", instruction)


def _gym(
  env: Mapping[str, Any],
  instruction: str,
  allowed: Collection[str],
  client_settings: Collection[str],
) -> tuple[Any, base.Task]:
  name = _text(env, "gym")
  if name not in allowed:
    raise ValueError(
      f"env.gym={name!r} is not played here; known:"
      f" {', '.join(sorted(allowed)) or 'none, see --gyms'}"
    )
  data = env.get("task")
  if not isinstance(data, Mapping):
    raise ValueError(f"env.task must be a task's object, got {data!r}")
  settings = env.get("settings") or {}
  spec = gyms.get(name, "operator")
  spec.check_client_settings(client_settings, "--client-settings")
  for setting in settings:
    if setting in spec.set_by_run:
      raise ValueError(
        f"env.settings.{setting}={settings[setting]!r} is not an option here;"
        " env.width, env.height and env.task decide it"
      )
    if setting not in client_settings:
      raise ValueError(
        f"env.settings.{setting} is not a client's to set; choose from"
        f" {', '.join(client_settings) or 'none'}, or start the service with"
        " --client-settings to list it"
      )
  if problems := list(spec.out_of_bounds(settings, "env.settings.")):
    raise ValueError(problems[0])
  try:
    task = base.Task.from_json(data)
  except TypeError as error:
    raise ValueError(f"env.task: {error}") from None
  if instruction and not task.instruction:
    task = base.Task.from_json({**task.to_json(), "instruction": instruction})
  width, height = env.get("width"), env.get("height")
  if width is None or height is None:
    raise ValueError(
      f"env.width and env.height must be pixels, got {(width, height)}"
    )
  if "family" in spec.set_by_run.values() and ":" in task.family:
    raise ValueError(
      f"env.task.family={task.family!r} is a path to code, which a request"
      " may not name; use one that is registered"
    )
  facts = spec.options_of(task.family, size=(width, height), concurrency=1)
  try:
    return spec.make_gym({**facts, **settings}), task
  except TypeError as error:
    raise ValueError(f"env.settings: {error}") from None
