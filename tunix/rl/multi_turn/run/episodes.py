"""Builds the episodes of a run: agents, environments, and their collector.

An episode is (task, agent, environment), each by name; see
`environments.spec` and `agents.agent_registry`. Does not play any;
`first_episode` tries one.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from typing import Any, cast, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.agents import agent_registry
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.run import experts
from tunix.rl.multi_turn.run import packages
from tunix.rl.multi_turn.tools import manager
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.multi_turn.trajectory_collector import groups
from tunix.rl.multi_turn.trajectory_collector import model_calls

RUN_SERVICE = "run_service"
"""The value of rollout.agent for episodes that a run service plays."""
TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError


def run_service() -> Any:
  """Returns the module that plays episodes by a run service.

  Raises:
    ConfigError: The package agent_services is not installed.
  """
  setting = f"rollout.agent={RUN_SERVICE}"
  return packages.part("services", "run_episodes", setting).load()


def system_prompt(name: str) -> str:
  """Text of a named prompt, or of the file at that path.

  Raises:
    ConfigError: neither.
  """
  if not name:
    return ""
  try:
    if os.path.isfile(name):
      with open(name, encoding="utf-8") as file:
        return file.read()
    return prompts.get_prompt(name)
  except (OSError, ValueError) as error:
    raise ConfigError(
      [
        f"agent.system_prompt={name}: {error}; give a prompt's name or a text"
        " file"
      ]
    ) from None


def make_gym(config: TrainConfig, family: str) -> gym_base.Gym:
  """A gym for one episode of `family`.

  Raises:
    ConfigError: an option that the gym does not take.
  """
  spec = gyms.get(config.gym.name, "operator")
  facts = spec.options_of(
    family,
    size=(config.gym.width, config.gym.height),
    concurrency=config.collect.concurrency + evaluated_beside(config),
    observation=config.gym.observation,
  )
  try:
    return spec.make_gym({**facts, **config.gym.options})
  except (TypeError, ValueError) as error:
    raise ConfigError(
      [
        f"gym.width={config.gym.width}, gym.height={config.gym.height},"
        f" gym.options={config.gym.options}: {error}"
      ]
    ) from None
  except Exception as error:  # pylint: disable=broad-except
    # A user's own, which may raise anything.
    raise ConfigError(
      [
        f"gym.name={config.gym.name} cannot be made with"
        f" gym.options={config.gym.options}: {error_text(error)}"
      ]
    ) from error


def evaluated_beside(config: TrainConfig) -> int:
  """Episodes of an evaluation that are played while others train."""
  if not config.eval.beside:
    return 0
  return config.eval.slots or config.collect.concurrency


def error_text(error: BaseException) -> str:
  """An error for people; with its kind and place if it is of other code."""
  if isinstance(error, (ValueError, TypeError)):
    return str(error)
  frames = traceback.extract_tb(error.__traceback__)
  where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
  return f"{type(error).__name__}: {error}{where}"


def screen_size(config: TrainConfig) -> tuple[int, int]:
  """(width, height) of the screenshots that the policy sees."""
  return agent_registry.screenshot_size(
    config.agent, config.gym.width, config.gym.height
  )


class EpisodeFactory:
  """task -> (agent, environment), a fresh pair for each episode.

  Attributes:
    episode_reward: part of the reward that the collector computes, or None.
  """

  def __init__(self, config: TrainConfig, image_store: images_lib.ImageStore):
    """Raises:

    ConfigError: lists each setting whose object cannot be built.
    """
    self._config = config
    try:
      self._screenshots = screenshot.ScreenshotTool(
        image_store, **agent_registry.screenshot_options(config.agent)
      )
      reward = rewards.plan(config.environment.reward)
      self.episode_reward = reward.episode
      self._make_environment = environment_spec.Builder(
        config.environment, reward=reward.environment
      )
      if self._by_service and not self._make_environment.spec.gym:
        raise ConfigError(
          [
            f"rollout.agent={RUN_SERVICE} plays on a computer, not on"
            f" environment.name={config.environment.name}; set"
            " environment.name=cua, or leave rollout.agent empty"
          ]
        )
      tools = self._make_environment.tools
      self.make_agent = agent_registry.Builder(
        config.agent,
        system_prompt=system_prompt(config.agent.system_prompt),
        tools=tools.for_task({}) if tools is not None else None,
        screen=screen_size(config) if self.acts_on_gym else None,
        observation=config.gym.observation,
        image_store=image_store,
        context_length=config.engine.context_length,
      )
    except (ValueError, ImportError) as error:
      if isinstance(error, ConfigError):
        raise
      raise ConfigError(str(error).splitlines()) from None

  @property
  def acts_on_gym(self) -> bool:
    """Whether its environments act on the gym of the section `gym`."""
    return self._make_environment.spec.gym and not self._by_service

  async def close_shared(self) -> None:
    """Closes what the episodes' gyms share, such as a browser."""
    if self.acts_on_gym:
      spec = gyms.get(self._config.gym.name, "operator")
      if (close := spec.load_close_shared()) is not None:
        await close()

  @property
  def tool_schemas(self) -> list[dict[str, Any]]:
    """OpenAI schemas of the tools by name that demonstrations may call.

    Raises:
      ConfigError: demonstrations cannot be played with such tools.
    """
    tools, steps = self._make_environment.tools, self._config.warm_start.steps
    if tools is None or not steps:
      return []
    try:
      return manager.ToolManager(tools.for_task({})).json
    except TypeError as error:  # google-tunix's, which have other methods.
      raise config_lib.ConfigError(
        [f"warm_start.steps={steps}: {error}; set warm_start.steps=0"]
      ) from None

  @property
  def _by_service(self) -> bool:
    return self._config.rollout.agent == RUN_SERVICE

  def __call__(self, task: gym_base.Task) -> tuple[Any, Any]:
    if self._by_service:
      gym = self._config.gym
      return run_service().make_episode(
        task,
        (gym.name, gym.options, (gym.width, gym.height)),
        self._config.run_service.env,
      )
    agent = self.make_agent()
    if not self.acts_on_gym:
      env: Any = self._make_environment(task, screenshot_tool=self._screenshots)
      return agent, env
    config = self._config
    mode = config.agent.on_parse_error
    env = self._make_environment(
      task,
      gym=make_gym(config, task.family),
      screenshot_tool=self._screenshots,
      action_parser=getattr(agent, "tool_parser", config.agent.parser),
      on_text=mode,
      on_invalid="observe" if mode == "retry" else "end",
    )
    env.runs_inline = gyms.get(config.gym.name, "operator").runs_inline
    return agent, env


def sampling_of(config: TrainConfig, mode: str) -> policy_client.SamplingParams:
  """Parameters of a mode's requests; see `make_collector`."""
  sampled = dataclasses.asdict(config.sampling)
  if mode == "greedy":
    sampled["temperature"] = 0.0
  return policy_client.SamplingParams(**sampled)


def make_collector(
  config: TrainConfig,
  episodes: EpisodeFactory,
  client: policy_client.PolicyClient | Any | None,
  renderer: choice.AnyRenderer | None,
  *,
  observers: events.Observer | None,
  mode: str = "train",
  connection: Any = None,
  concurrency: int = 0,
  greedy: bool | None = None,
) -> groups.GroupCollector:
  """Collects groups; `mode` is "train", "sampled" or "greedy" (evaluation).

  Episodes reach the policy through `connection` if there is one, a
  `proxy.ProxyConnection` or `chat_model.ChatConnection`; `client` and
  `renderer` are not used then. Where one of the two has a `remote_collector`,
  episodes are played elsewhere. An evaluation plays `concurrency` at a time;
  0 = collect.concurrency. `greedy` tells whether a greedy episode is played
  beside each group; None: as the algorithm needs it.
  """
  training = mode == "train"
  sampling = sampling_of(config, mode)

  remote = getattr(connection or client, "remote_collector", None)

  def model_of(sampling: policy_client.SamplingParams) -> Any:
    if remote is not None:
      return _played_elsewhere
    if connection is not None:
      return connection.model(sampling)
    return model_calls.PolicyModel(
      cast(policy_client.PolicyClient, client),
      cast(choice.AnyRenderer, renderer),
      sampling,
      max_context_tokens=config.engine.context_length,
      runs_inline=True,
      keeps_support=training and config.algorithm.keep_sampling_mask,
    )

  greedy_call = None
  if greedy is None:
    greedy = training and _needs_greedy(config)
  if greedy:
    greedy_call = model_of(dataclasses.replace(sampling, temperature=0.0))
  expert_call = None
  if training and remote is None:
    expert_call = experts.model_for(config, lambda: model_of(sampling))
  collect = config.collect
  if not training:
    collect = dataclasses.replace(
      collect,
      group_size=1,
      min_valid=1,
      part_size=0,
      concurrency=concurrency or collect.concurrency,
    )
  make = groups.GroupCollector if remote is None else remote(mode)
  return make(
    episodes,
    model_of(sampling),
    collect,
    max_turns=config.environment.max_turns,
    seed=config.run.seed,
    split="train" if training else "eval",
    observers=observers,
    final_reward_fn=episodes.episode_reward,
    greedy_call=greedy_call,
    expert_call=expert_call,
  )


def _needs_greedy(config: TrainConfig) -> bool:
  # Imports JAX, which who plays episodes for others must not need.
  from tunix.rl.multi_turn.learner.algorithms import parts  # pylint: disable=g-import-not-at-top

  return parts.Algorithm.of(config.algorithm).needs_greedy


def _played_elsewhere(messages: Sequence[Mapping[str, Any]]) -> str:
  raise RuntimeError(f"{len(messages)} messages: no policy is asked here")
