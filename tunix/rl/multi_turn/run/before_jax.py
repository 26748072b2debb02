"""Refuses, before JAX is imported, what can be told without it.

Commands call `checked…` before their other imports, so that a wrong directory,
task or policy is refused in a second; the run makes the same checks again.

Does not: check what devices or weights tell, see `preflight`; import JAX.
"""

from __future__ import annotations

import asyncio
from importlib import metadata
import importlib.util
import os
import pathlib
import re
import tempfile
from typing import Any, Iterator

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import chat_model
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.policy import factories
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl_config
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import first_episode
from tunix.rl.multi_turn.run import packages
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run_lock
from tunix.rl.multi_turn.run import tasks
from tunix.rl.multi_turn.run.warm_start import recorded
from tunix.rl.queue import admission

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError
ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""Variable of the environment; see `processes.join`."""


def checked(config: TrainConfig) -> tuple[TrainConfig, Any]:
  """Returns (the configuration with its families named, its task source).

  A user's own parts play a first turn. One process of several checks nothing,
  or the others would wait for it; the task source is then None.

  Raises:
    ConfigError: listing what is wrong.
  """
  if config.processes.coordinator or os.environ.get(ADDRESS):
    return config, None
  source: Any = None
  if config.run.resume:
    resuming.check_directory(config)
    resuming.check_file(config)
  if config.plays:
    config, source = tasks.resolve(config)
  wrong = [*problems(config)]
  if config.run.resume:
    resuming.check(config)
  else:
    wrong += _policy(config)
  if wrong:
    raise ConfigError(wrong)
  factory = episodes.EpisodeFactory(config, images_lib.ImageStore())
  if config.plays and config.warm_start.steps and not config.run.resume:
    recorded.for_run(config, source, factory.tool_schemas)
  if config.plays:
    first_episode.try_first_episode(config, factory, source)
  return config, source


def checked_evaluation(
  config: config_lib.EvaluationConfig,
) -> config_lib.EvaluationConfig:
  """Returns the configuration of an evaluation.

  Raises:
    ConfigError: its policy cannot be loaded, or its server does not answer.
  """
  chosen = config.evaluate
  wrong: list[str] = []
  if chosen.server and not config.run.dry_run:
    wrong = asyncio.run(_server(config))
  elif not (chosen.server or chosen.run):
    wrong = [*_policy(config)]
  if wrong:
    raise ConfigError(wrong)
  return config


def problems(config: TrainConfig) -> Iterator[str]:
  """Yields what is wrong with the places and packages that a run needs."""
  yield from _directories(config)
  yield from _own_agent(config)
  yield from _services(config)


def place_of_evaluation(config: TrainConfig) -> None:
  """Checks the directory that an evaluation writes to.

  Raises:
    ConfigError: it cannot be written, or another process has it.
  """
  directory = config.run_dir
  reasons = [run_lock.conflict(directory)]
  if why := _unwritable(directory):
    reasons.append(f"run.dir={config.run.dir}: {why}; choose another directory")
  if problems := [one for one in reasons if one]:
    raise ConfigError(problems)


def taken(config: TrainConfig) -> str:
  """The refusal of a new run whose directory holds one; "" where it is free."""
  if not (config.run_dir / "metrics.jsonl").exists():
    return ""
  return (
    f"run.name={config.run.name}: {config.run_dir} holds a run already;"
    f" choose another name, or continue it with resume={config.run_dir}"
  )


# --- a server's model ---------------------------------------------------------


def chat_connection(
  config: config_lib.EvaluationConfig, images: images_lib.ImageStore
) -> chat_model.ChatConnection:
  """Returns the connection to the server that is evaluated."""
  chosen = config.evaluate
  return chat_model.ChatConnection(
    chosen.server,
    chosen.model,
    images,
    api_key=os.environ.get(chosen.api_key_env, ""),
    key_name=f"${chosen.api_key_env}",
    timeout_s=config.collect.deadlines.model,
    tries=chosen.tries,
    connections=config.collect.concurrency,
  )


async def _server(config: config_lib.EvaluationConfig) -> list[str]:
  connection = chat_connection(config, images_lib.ImageStore())
  try:
    await connection.find_model()
  except chat_model.ServerRefusal as error:
    return [str(error)]
  finally:
    await connection.aclose()
  return []


# --- places -------------------------------------------------------------------


def _directories(config: TrainConfig) -> Iterator[str]:
  """Places that cannot be written, or hold something else."""
  directory = config.run_dir
  if config.run.resume:
    where = f"run.resume={config.run.resume}"
  else:
    where = f"run.dir={config.run.dir}"
    yield from filter(None, [run_lock.conflict(directory) or taken(config)])
  if why := _unwritable(directory):
    yield f"{where}: {why}; choose another directory"
  file = config.queue.path
  if file == admission.AUTO:
    file = ""  # In the run's directory.
  if file and pathlib.Path(file).expanduser().is_dir():
    yield (
      f"queue.path={file} cannot be a queue's file: it is a directory; give a"
      " file that is new, in a folder that can be written"
    )
  recorded = config.warm_start.recordings
  if recorded and not pathlib.Path(recorded).expanduser().exists():
    yield (
      f"warm_start.recordings={recorded}: there is no such file; give one of"
      " conversations, or one that environments.play --out wrote"
    )
  for key, folder in (
    ("queue.path", os.path.dirname(file) if file else ""),
    ("external.weights_dir", config.external.weights_dir),
    ("monitor.database", os.path.dirname(config.monitor.database)),
  ):
    if folder and (why := _unwritable(pathlib.Path(folder).expanduser())):
      yield f"{key}={loader.value_of(config, key)}: {why}; choose another place"


def _unwritable(directory: pathlib.Path) -> str:
  """Why no directory can be made or written there; "" if it can."""
  place = pathlib.Path(os.path.abspath(directory))
  try:
    while not os.path.lexists(place):
      place = place.parent
    if not place.is_dir():
      return f"{place} is a file, not a directory"
    # Without a name: nothing is seen or left behind.
    with tempfile.TemporaryFile(dir=place):
      pass
  except OSError as error:
    return f"{place} cannot be written ({error.strerror or error})"
  except ValueError as error:  # A null character.
    return str(error)
  return ""


# --- an agent of one's own ----------------------------------------------------


def _own_agent(config: TrainConfig) -> Iterator[str]:
  name = config.rollout.agent
  if name in ("", episodes.RUN_SERVICE):
    return
  from tunix.rl.multi_turn.clients import agent_session  # pylint: disable=g-import-not-at-top

  try:
    agent_session.load(name)
  except ValueError as error:
    yield f"rollout.agent={name}: {error}"


def _services(config: TrainConfig) -> Iterator[str]:
  """Looks for the package that serves the policy to other programs."""
  setting = f"rollout.via={config.rollout.via}"
  if config.fleet.away:
    setting = f"fleet.via={config.fleet.via}"
  elif config.rollout.via not in ("proxy", "buffer"):
    return
  try:
    packages.part("services", "policy_server", setting)
  except ConfigError as error:
    yield from error.problems


# --- policy -------------------------------------------------------------------


def policy_problem(config: TrainConfig, source: str, problem: str) -> str:
  """Returns a policy's problem under the setting that it is about.

  Args:
    config: Settings of the run.
    source: Weights that it is about; "" for random ones.
    problem: The text, which begins with the field if it is one's.
  """
  field = problem.partition("=")[0]
  if field in config.policy.config:
    return f"policy.config.{problem} (policy.name={config.policy.name})"
  if source and source != config.policy.name:
    return f"warm start from {source}: {problem}"
  return f"policy.name={config.policy.name}: {problem}"


def no_adapter(config: TrainConfig) -> str:
  """Returns the refusal of an adapter on a policy that takes none."""
  return (
    f"policy.lora_rank={config.policy.lora_rank}:"
    f" policy.name={config.policy.name} takes no adapter; train all its weights"
    " (policy.lora_rank=0), or use a Qwen policy"
  )


def no_image_budget(config: TrainConfig) -> str:
  """Returns the refusal of pixels for a policy that resizes no screenshot."""
  return (
    f"policy.trajectory_pixels={config.policy.trajectory_pixels}:"
    f" policy.name={config.policy.name} resizes no screenshot; leave it at 0,"
    " or use a Qwen-VL policy"
  )


def _cpu_devices() -> int | None:
  """Devices that JAX will see on CPUs; None where only JAX can tell."""
  platform = os.environ.get("JAX_PLATFORMS", "")
  if platform and platform != "cpu":
    return None
  accelerators = ("jax_plugins", "libtpu")
  if not platform and (
    any(map(importlib.util.find_spec, accelerators))
    or metadata.entry_points(group="jax_plugins")
  ):
    return None
  forced = re.findall(
    r"--xla_force_host_platform_device_count=(\d+)",
    os.environ.get("XLA_FLAGS", ""),
  )
  return int(os.environ.get("JAX_NUM_CPU_DEVICES") or [1, *forced][-1])


def _policy(config: TrainConfig) -> Iterator[str]:
  """Directories that hold no policy, and settings that a policy lacks."""
  name, start = config.policy.name, config.warm_start
  devices = _cpu_devices()
  if devices and (why := config.mesh.misfit(devices, "cpu")):
    yield why
  if policy_settings.is_factory(name):
    yield from _factory(config)
  elif not policy_settings.is_gguf(name):
    if config.policy.trajectory_pixels and not policy_files.takes_image_budget(
      name
    ):
      yield no_image_budget(config)
    kind = policy_files.kind_of(name)
    if kind in qwen_shapes.FAMILIES:
      try:
        qwen_shapes.check_changes(kind, config.policy.config)
      except ValueError as error:
        yield policy_problem(config, "", str(error))
  shipped = policy_settings.POLICIES
  tiny = shipped.get(name) if name in shipped else None
  if tiny in tiny_vl_config.SIZES and config.policy.lora_rank:
    yield no_adapter(config)
  if tiny in tiny_vl_config.SIZES and config.policy.config:
    tokenizer = policy_files.load_tokenizer(name)
    try:
      tiny_vl_config.config_for(tokenizer, tiny, **config.policy.config)
    except (ValueError, TypeError) as error:
      yield policy_problem(config, "", str(error))
  sources = [start.path] if start.source == "path" else []
  if tiny is None and not policy_settings.is_factory(name):
    sources.append(name)
  for source in sources:
    try:
      policy_files.check(source, of_factory=source != name)
    except (OSError, ValueError) as error:
      yield policy_problem(config, source, str(error))


def _factory(config: TrainConfig) -> Iterator[str]:
  """Arguments that a user's factory lacks or does not take."""
  try:
    factory = factories.Factory(config.policy.name)
  except ValueError as error:
    yield f"policy.name: {error}"
    return
  if config.policy.trajectory_pixels and not factory.takes_image_budget:
    yield no_image_budget(config)
  try:
    factory.checked(config.policy.changes(1))
  except ValueError as error:
    yield policy_problem(config, "", str(error))
