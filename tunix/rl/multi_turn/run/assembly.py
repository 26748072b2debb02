"""Builds the parts of a run from its configuration.

Each function makes one part; `train.py` connects them. Nothing here runs,
waits or owns a thread, except that an engine starts its own at the first
request. A gym with a task source of its own is made known by
`register_tasks`, beside `environments.register_gym`; see `run_tasks`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sqlite3
from typing import Any

from flax import nnx
import jax
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import gym_facts
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments import registry as env_registry
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy import checkpoint as policy_checkpoint
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy import policy_files
from tunix.rl.multi_turn.policy import qwen_vl
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy import tiny_vl
from tunix.rl.multi_turn.run import external_engine
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.multi_turn.trajectory_collector import deadlines
from tunix.rl.multi_turn.trajectory_collector import groups
from tunix.rl.multi_turn.trajectory_collector import model_calls
from tunix.rl.queue import group_store

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError


# --- tasks and gyms ----------------------------------------------------------

register_tasks = run_tasks.register_tasks
make_tasks = run_tasks.make_tasks
eval_tasks = run_tasks.eval_tasks
TrainTasks = run_tasks.TrainTasks


def make_gym(config: TrainConfig, family: str) -> Any:
  """A gym for one episode of `family`."""
  gym = config.gym
  settings: dict[str, Any] = dict(gym.options)
  facts = gym_facts.of(gym.name)
  if "max_pages" in facts.own_keys:
    settings["max_pages"] = config.rollout.concurrency
  if facts.sized:
    settings = {"width": gym.width, "height": gym.height, **settings}
  elif gym.name == "gymnasium":
    from tunix.rl.multi_turn.environments.gyms.gymnasium import (
      gym as gymnasium_gym,  # pylint: disable=g-import-not-at-top
    )

    settings = {
        "env": family,
        "size": (gym.width, gym.height),
        **gymnasium_gym.default_settings(family),
        **settings,
    }
  try:
    return env_registry.gym_from_config({"name": gym.name, **settings})
  except (TypeError, ValueError) as error:
    raise ConfigError([f"gym.options={gym.options}: {error}"]) from None


def try_gym(config: TrainConfig, source: Any) -> None:
  """Refuses now what would fail in every episode: settings, and the screen.

  Gyms whose screens nobody knows before they start (objects and machines of
  others) are started once, with a training task, and closed; not for a dry run.

  Raises:
    ConfigError: naming the setting, or the size that the screen has.
  """
  gym = make_gym(config, config.gym.tasks[0])
  facts = gym_facts.of(config.gym.name)
  if not facts.started_to_see or config.run.dry_run:
    return
  task = source.train_task(config.gym.tasks[0], 0, config.run.seed)

  async def look() -> gym_base.Observation:
    try:
      return await gym.start(task)
    finally:
      await concurrency.with_deadline(
          gym.close(), config.collect.close_timeout_s, "closing the gym"
      )

  seconds = config.collect.reset_timeout_s
  try:
    seen = concurrency.call(
        lambda: concurrency.with_deadline(
            look(), seconds, f"the first start of gym.name={config.gym.name}"
        ),
        seconds=seconds + config.collect.close_timeout_s + 5.0,
        what="trying the gym",
    )
  except Exception as error:  # pylint: disable=broad-except
    # Whatever a gym of others raises: no run can be made of it.
    raise ConfigError([
        f"gym.name={config.gym.name} does not start task {task.task_id}:"
        f" {type(error).__name__}: {error}"
    ]) from error
  height, width = seen.screenshot.shape[:2]
  if (width, height) != (config.gym.width, config.gym.height):
    raise ConfigError([
        f"gym.width={config.gym.width}, gym.height={config.gym.height}: the"
        f" screen of gym.name={config.gym.name} is {width}x{height}; set"
        f" gym.width={width} gym.height={height}, or the screen's size"
    ])


# --- agents and episodes -----------------------------------------------------


def make_agent(config: TrainConfig) -> tool_agent.ToolAgent:
  """An agent for one episode."""
  return tool_agent.ToolAgent(
      system_prompt(config.agent.system_prompt),
      config.agent.parser,
      on_parse_error=config.agent.on_parse_error,
      max_images=config.agent.max_images or None,
  )


def system_prompt(name: str) -> str:
  """Text of a named prompt, or of the file at that path."""
  if not name:
    return ""
  if os.path.isfile(name):
    with open(name, encoding="utf-8") as file:
      return file.read()
  try:
    return prompts.get_prompt(name)
  except ValueError as error:
    raise ConfigError([f"agent.system_prompt: {error}, or a file"]) from None


class EpisodeFactory:
  """task -> (agent, environment), a fresh pair for each episode."""

  def __init__(self, config: TrainConfig, image_store: images_lib.ImageStore):
    self._config = config
    self._screenshots = screenshot.ScreenshotTool(image_store)
    # The embedded desktop needs no thread and well under a millisecond.
    self._inline = config.gym.name == "desktop"
    if config.gym.reward != "score":
      try:
        rewards.get_reward_fn(config.gym.reward)
      except ValueError as error:
        raise ConfigError([f"gym.reward: {error}"]) from None
    parser = tool_parser.make_tool_parser(config.agent.parser)
    if not isinstance(parser, tool_parser.GuiActionParser):
      raise ConfigError([
          f"agent.parser={config.agent.parser} has no GUI actions; use"
          " computer_use_compact, computer_use or another GUI grammar"
      ])

  def __call__(self, task: gym_base.Task) -> tuple[Any, Any]:
    agent = make_agent(self._config)
    retry = self._config.agent.on_parse_error == "retry"
    env = cua_env.CUAEnv(
        make_gym(self._config, task.family),
        self._screenshots,
        task,
        action_parser=agent.tool_parser,
        max_steps=task.max_turns or self._config.gym.max_turns,
        reward=self._config.gym.reward,
        on_text="retry" if retry else "end",
        on_invalid="observe" if retry else "end",
    )
    env.runs_inline = self._inline
    return agent, env


def make_collector(
    config: TrainConfig,
    episodes: EpisodeFactory,
    client: policy_client.PolicyClient,
    renderer: qwen.QwenRenderer,
    *,
    observers: Any,
    mode: str = "train",
    connection: proxy.ProxyConnection | None = None,
) -> groups.GroupCollector:
  """Collects groups; `mode` is "train", "sampled" or "greedy" (evaluation).

  Episodes reach the policy through `connection` if there is one.
  """
  collect = config.collect
  training = mode == "train"
  sampling = policy_client.SamplingParams(
      max_new_tokens=config.sampling.max_new_tokens,
      temperature=0.0 if mode == "greedy" else config.sampling.temperature,
      top_p=config.sampling.top_p,
      top_k=config.sampling.top_k,
  )
  if connection is not None:
    model: Any = connection.model(sampling)
  else:
    model = model_calls.PolicyModel(
        client,
        renderer,
        sampling,
        max_context_tokens=config.rollout.context_length,
        runs_inline=True,
    )
  return groups.GroupCollector(
      episodes,
      model,
      groups.GroupSettings(
          group_size=collect.group_size if training else 1,
          min_valid=collect.min_valid if training else 1,
          max_steps=config.gym.max_turns,
          gamma=collect.gamma,
          timeout=collect.episode_timeout_s,
          deadlines=deadlines.Deadlines(
              reset=collect.reset_timeout_s,
              model=collect.model_timeout_s,
              step=collect.step_timeout_s,
              reward=collect.evaluate_timeout_s,
              close=collect.close_timeout_s,
              turn=collect.turn_timeout_s,
          ),
          seed=config.run.seed,
          max_episodes=config.rollout.concurrency,
          split="train" if training else "eval",
      ),
      observers=observers,
  )


# --- policy, engine, learner --------------------------------------------------


BUILT_IN = {
    "tiny_vl": "tiny",
    "qwen3_vl_tiny": "qwen3_vl_tiny",
    "qwen2_5_vl_tiny": "qwen2_5_vl_tiny",
}
"""policy.name of what needs no directory -> its size."""


@dataclasses.dataclass
class Policy:
  """A policy with what belongs to it.

  Attributes:
    model: flax nnx module, on the mesh if there is one.
    processor: its host side.
    tokenizer: `tokenizers.Tokenizer`.
    renderer: messages to its tokens.
  """

  model: Any
  processor: Any
  tokenizer: Any
  renderer: qwen.QwenRenderer


def make_mesh(config: TrainConfig) -> jax.sharding.Mesh | None:
  """The configured mesh; None for a single device."""
  shape = config.mesh
  count = shape.data * shape.fsdp * shape.sequence * shape.tensor
  if count == 1:
    return None
  if count != jax.device_count():
    raise ConfigError([
        f"mesh.data * mesh.fsdp * mesh.sequence * mesh.tensor = {count}, but"
        f" JAX sees {jax.device_count()} {jax.default_backend()} devices"
    ])
  return sharding.make_mesh(
      shape.data, shape.fsdp, shape.tensor, sequence=shape.sequence
  )


def make_policy(
    config: TrainConfig, mesh: jax.sharding.Mesh | None, source: str
) -> Policy:
  """A policy with random weights (`source=""`) or those of a directory.

  Args:
    config: names the architecture and its changes.
    mesh: where weights lie.
    source: directory or shipped name whose weights are loaded.

  Raises:
    ConfigError: no such directory, or weights of another shape.
  """
  changes = _policy_changes(config)
  name = config.policy.name
  screen = (config.gym.width, config.gym.height)
  try:
    if source:
      loaded = policy_checkpoint.load_policy(source, mesh, screen, **changes)
    else:
      seed = config.run.seed
      if name in BUILT_IN:
        loaded = policy_checkpoint.create_policy(
            BUILT_IN[name], seed, tokenizer_source(config), mesh, screen,
            **changes,
        )  # pyformat: disable
      else:  # A directory: its sizes, without its weights.
        loaded = policy_checkpoint.create_like(
            name, seed, mesh, screen, **changes
        )
  except (FileNotFoundError, ValueError, TypeError) as error:
    raise ConfigError([f"policy {source or name}: {error}"]) from None
  model, processor, tokenizer = loaded
  if config.mesh.sequence > 1 and not isinstance(model, qwen_vl.QwenVL):
    raise ConfigError([
        f"mesh.sequence={config.mesh.sequence}: {name} cannot split its rows;"
        " use mesh.fsdp, or a Qwen-VL policy"
    ])
  add_adapter(config, model)
  renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)
  return Policy(model, processor, tokenizer, renderer)


def add_adapter(config: TrainConfig, model: Any) -> None:
  """Gives the model the adapter that GRPO trains, if one is configured.

  Raises:
    ConfigError: the policy cannot have one.
  """
  rank = config.policy.lora_rank
  if not rank:
    return
  if not isinstance(model, qwen_vl.QwenVL):
    raise ConfigError([
        f"policy.lora_rank={rank}: policy.name={config.policy.name} takes no"
        " adapter; train all its weights (policy.lora_rank=0), or use a"
        " Qwen-VL policy"
    ])
  lora.add(
      model,
      rank=rank,
      alpha=config.policy.lora_alpha or 2.0 * rank,
      seed=config.run.seed,
  )


def without_adapter(policy: Policy) -> Policy:
  """The policy that the adapter was put on; weights are shared."""
  model = policy.model
  if isinstance(model, qwen_vl.QwenVL) and lora.has_adapter(model):
    base = nnx.clone(model)
    lora.remove(base)
    policy = dataclasses.replace(policy, model=base)
  return policy


def save_policy(
    config: TrainConfig, directory: pathlib.Path, model: Any
) -> None:
  """Writes a policy directory: an adapter merged, and by itself beside it."""
  if isinstance(model, qwen_vl.QwenVL) and lora.has_adapter(model):
    lora.save(
        directory / "adapter", model, base_model_name=config.policy.name
    )
    lora.merge(model)
  policy_checkpoint.save_policy(directory, model, tokenizer_source(config))


def tokenizer_file(config: TrainConfig) -> pathlib.Path | None:
  """The policy's tokenizer.json; None where its directory has none."""
  path = policy_files.resolve(tokenizer_source(config)) / "tokenizer.json"
  return path if path.is_file() else None


def tokenizer_source(config: TrainConfig) -> str:
  """Directory or shipped name whose tokenizer the policy uses."""
  return "tiny_vl" if config.policy.name in BUILT_IN else config.policy.name


def _policy_changes(config: TrainConfig) -> dict[str, Any]:
  policy = config.policy
  changes = {"compute_dtype": policy.dtype, **policy.config}
  if "image_budget" in changes:
    raise ConfigError([
        "policy.config.image_budget is no field of a policy; use"
        " policy.trajectory_pixels"
    ])
  if policy.trajectory_pixels:
    if _is_tiny_vl(policy.name):
      raise ConfigError([
          f"policy.trajectory_pixels={policy.trajectory_pixels}: tiny_vl sees"
          " every screenshot at its own size; leave it at 0, or use a Qwen-VL"
          " policy"
      ])
    # A screenshot comes before the first turn and after each but the last.
    images = config.agent.max_images or config.gym.max_turns
    changes["image_budget"] = policy.trajectory_pixels, images
  return changes


def _is_tiny_vl(name: str) -> bool:
  if name in BUILT_IN:
    return name == "tiny_vl"
  try:
    found = policy_checkpoint.load_config(name)
  except (OSError, ValueError):
    return False  # Loading it will say what is wrong.
  return isinstance(found, tiny_vl.TinyVLConfig)


def warm_start_source(config: TrainConfig) -> str:
  """Directory or shipped name of the weights a run starts from; "" = none."""
  warm, name = config.warm_start, config.policy.name
  if warm.source == "path":
    return warm.path
  # A directory brings its weights.
  if name in BUILT_IN:
    return name if warm.source == "embedded" else ""
  return name


def check_weights(config: TrainConfig, policy: Policy, source: str) -> None:
  """Refuses weights that cannot take the place of `policy`'s; reads none.

  Raises:
    ConfigError: no policy directory, or one of another architecture.
  """
  try:
    policy_checkpoint.check(source, policy.model, **_policy_changes(config))
  except (OSError, ValueError, TypeError) as error:
    raise ConfigError([
        f"warm start from {source}: {error}; policy.name and policy.config must"
        " describe the weights, or start from random ones with"
        " warm_start.source=none"
    ]) from None


def make_engine(
    config: TrainConfig, policy: Policy, image_store: images_lib.ImageStore
) -> engine_lib.RolloutEngine | remote_engine.RemoteEngine:
  """The rollout engine; not warmed up yet."""
  rollout = config.rollout
  if rollout.via == "external":
    return external_engine.make_engine(
        config, policy, image_store, tokenizer_source(config)
    )
  try:
    return engine_lib.RolloutEngine(
        policy.model,
        policy.processor,
        image_store,
        engine_config.EngineConfig(
            slots=rollout.slots,
            context_length=rollout.context_length,
            cache_tokens=rollout.cache_tokens,
            prefill_buckets=rollout.prefill_buckets,
            lockstep="true" if config.lockstep else "false",
            on_update=rollout.on_update,
            update_policy=rollout.update_policy,
            weights=rollout.weights,
            entropies=config.monitor.on and config.monitor.entropies,
        ),
        image_sizes=((config.gym.width, config.gym.height),),
        banned_token_ids=policy.model.config.banned_token_ids,
        seed=config.run.seed,
    )
  except ValueError as error:
    raise ConfigError([f"rollout: {error}"]) from None


def make_learner(
    config: TrainConfig,
    policy: Policy,
    image_store: images_lib.ImageStore,
    mesh: jax.sharding.Mesh | None,
    *,
    cloning: bool = False,
) -> learner_lib.Learner:
  """The learner of the run, or (`cloning`) of its warm start.

  The KL term of a run is measured to `policy`.
  """
  changes: dict[str, Any] = {
      "seed": config.run.seed,
      "gamma": config.collect.gamma,
  }
  if cloning:
    changes |= {
        "objective": "behaviour_cloning",
        # Fast from nothing, but it would overwrite what is there already.
        "optimizer": "adamw" if warm_start_source(config) else "muon",
        "learning_rate": config.warm_start.learning_rate,
        "schedule": "cosine",
        "total_steps": config.warm_start.steps,
        "warmup_steps": min(20, config.warm_start.steps // 2),
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
        "minibatches": 1,
        "epochs": 1,
    }
  else:
    optimizer_steps = (
        config.learner.steps * config.learner.minibatches
        * config.learner.epochs
    )
    changes["total_steps"] = max(1, optimizer_steps)
  try:
    learner_config = learner_lib.LearnerConfig.from_sections(
        config.algorithm, config.learner, config.sampling, **changes
    )
  except ValueError as error:
    raise ConfigError([f"learner: {error}"]) from None
  reference = policy.model if learner_config.kl_coef else None
  return learner_lib.Learner(
      policy.model,
      policy.processor,
      image_store,
      learner_config,
      mesh=mesh,
      reference=reference,
  )


def make_store(
    config: TrainConfig, images: images_lib.ImageStore
) -> group_store.SqliteGroupStore | None:
  """Where the queue's groups survive a crash; None without `queue.path`.

  Raises:
    ConfigError: the file cannot be one, or holds another run's groups.
  """
  path = config.queue.path
  if not path:
    return None
  try:
    store = group_store.SqliteGroupStore(
        pathlib.Path(path).expanduser(), images=images
    )
    known = store.known()
  except (OSError, sqlite3.Error) as error:
    raise ConfigError([
        f"queue.path={path} cannot be a queue's file: {error}; give a file"
        " that is new, in a folder that can be written"
    ]) from error
  if known and not config.run.resume:
    store.close()
    raise ConfigError([
        f"queue.path={path} holds the {len(known)} groups of another run;"
        " give a file that is new, or go on with that run by resume="
    ])
  return store
