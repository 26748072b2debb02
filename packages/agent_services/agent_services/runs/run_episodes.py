"""Plays a run's episodes by a run service, and trains on their tokens.

`rollout.agent=run_service`: for each episode, `RunEnvironment` makes an
execution of its task (at a gym server, or as a gym of the service's own),
`RunSession` opens a session at the run's server and starts the service's run
with that session as its model, and the collector follows the run turn by turn.
The gym server, or this package's service, judges the end.

Promises: statuses, deadlines and rewards are those of any other episode; a
service that hangs, dies or answers garbage ends the episode as an error within
its deadlines, and its session, run and execution are ended; training tokens are
the record of the run's own server, or, with `tokens=events`, those that the
service reports, never made up unless `on_missing=fallback` counts them.

Does not reach into the service: with `backend=gbox_mini_agent`, the sampling is
the service's own.
"""

from __future__ import annotations

import time
from typing import Any, Mapping, Sequence

from cua_gyms.genv import execution
from cua_gyms.genv import gym as genv_gym
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.agents import settings as settings_lib
from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import base_env
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.trajectory_collector import model_calls
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

from agent_services.runs import client as client_lib
from agent_services.runs import conversion
from agent_services.runs import event_images
from agent_services.runs import run_agent

Status = trajectory.TrajectoryStatus
_STATUSES = {
  "max_steps": Status.MAX_TURNS,
  "parse_error": Status.PARSE_ERROR,
  "context_limit": Status.CONTEXT_LIMIT,
}


class RunEnvironment(base_env.BaseEnv):
  """The environment of an episode that a run service plays.

  Attributes:
    agent: Agent that follows the run.
    task: Task of the episode.
    payload: The run's `env` after a reset.
    evaluation_seconds: Time of the verdict; None before it.
  """

  runs_inline = True

  def __init__(
    self,
    agent: run_agent.RunAgent,
    task: gym_base.Task,
    gym: tuple[str, Mapping[str, Any], tuple[int, int]],
    extra: Mapping[str, Any] | None = None,
  ):
    """Args:

    agent: Agent that follows the run.
    task: Task of the episode.
    gym: (name, options, (width, height)).
    extra: Further fields of the run's `env`.
    """
    self.agent = agent
    self.task = task
    self.payload: dict[str, Any] = {}
    self._gym = gym
    self._extra = dict(extra or {})
    self._genv: Any = None
    self._context: execution.GenvExecutionContext | None = None
    self._turn = -1
    self.evaluation_seconds: float | None = None

  async def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
    name, options, (width, height) = self._gym
    if name == "genv":
      self._genv = genv_gym.make_client(options)
      self._context = await execution.start_genv_execution(
        self.task, self._genv, resolve=False
      )
      self.payload = {**self._context.agent_env(), **self._extra}
    else:
      self.payload = {
        "type": "gym",
        "gym": name,
        "settings": dict(options),
        "task": self.task.to_json(),
        "width": width,
        "height": height,
        **self._extra,
      }
    return {"instruction": self.task.instruction}, {"task": self.task.to_json()}

  async def step(self, action: object) -> base_env.StepResult:
    del action  # The service has carried it out.
    self._turn += 1
    actions = await self.agent.actions(self._turn)
    info: dict[str, Any] = {
      "gui_actions": [a.get("rawResult") or _brief(a) for a in actions],
      "tool_names": [a.get("toolName") or str(a.get("name")) for a in actions],
    }
    feedback = [str(a["rawFeedback"]) for a in actions if a.get("rawFeedback")]
    observation = {"text": "\n".join(feedback)}
    end = self.agent.ended
    if end is None or await self.agent.output(self._turn + 1) is not None:
      return observation, 0.0, False, info
    if end.reason == "context_limit":  # The next reply raises it.
      return observation, 0.0, False, info
    reward, success, details = await self._judge(end)
    info["evaluation"] = {
      "score": reward,
      "success": success,
      "details": details,
    }
    status = _STATUSES.get(end.reason, Status.FAILED)
    info["success"] = success
    info["status"] = (Status.SUCCEEDED if success else status).value
    if end.answer:
      info["answer"] = end.answer
    return observation, reward, True, info

  async def evaluate(self) -> rewards.RewardOutput:
    """Returns the reward of the run, as it ended."""
    end = self.agent.ended
    if end is None:
      # The collector has ended the episode; the run is to stop as well.
      await self.agent.close()
      end = run_agent.RunEnd("completed", "ended by the collector")
    reward, success, _ = await self._judge(end)
    return rewards.RewardOutput(reward, {"success": success})

  async def close(self) -> None:
    """Ends the run and its execution. Idempotent."""
    try:
      await self.agent.close()
    finally:
      context, self._context = self._context, None
      if context is not None:
        await execution.terminate_execution(context, self._genv)
      if self._genv is not None:
        await self._genv.aclose()

  async def _judge(
    self, end: run_agent.RunEnd
  ) -> tuple[float, bool, dict[str, Any]]:
    """Returns (reward, success, the judge's details).

    Raises:
      RunFailed: there is no verdict.
    """
    if self._context is not None:
      result = {"answer": end.answer} if end.answer else {}
      started = time.perf_counter()
      reward, success, details = await execution.evaluate_execution(
        self._context, self._genv, result
      )
      self.evaluation_seconds = time.perf_counter() - started
      return reward, success, dict(details)
    verdict = end.evaluation or {}
    score = verdict.get("score")
    if not isinstance(score, (int, float)) or isinstance(score, bool):
      raise run_agent.RunFailed(
        f"the service ended the run ({end.reason}) without an evaluation; for"
        " a service that does not judge, use gym=genv"
      )
    seconds = verdict.get("seconds")
    if isinstance(seconds, (int, float)):
      self.evaluation_seconds = float(seconds)
    reward = rewards.as_reward(float(score), "the run's score").reward
    return reward, bool(verdict.get("success")), {}


def _brief(action: Mapping[str, Any]) -> dict[str, Any]:
  return {"kind": str(action.get("name")), "args": action.get("args")}


def make_episode(
  task: gym_base.Task,
  gym: tuple[str, Mapping[str, Any], tuple[int, int]],
  extra: Mapping[str, Any] | None = None,
) -> tuple[run_agent.RunAgent, RunEnvironment]:
  """Returns an agent and its environment; see `RunEnvironment`."""
  agent = run_agent.RunAgent()
  return agent, RunEnvironment(agent, task, gym, extra)


class RunConnection(proxy.ProxyConnection):
  """Connects the run service's episodes to the run's server."""

  def __init__(
    self,
    *args: Any,
    service: settings_lib.RunServiceConfig,
    public_url: str,
    episode_s: float,
    turn_s: float,
    max_turns: int,
    agent_config: Mapping[str, Any],
    renderer: choice.AnyRenderer | None = None,
    **options: Any,
  ):
    """Args:

    *args, **options: see `ProxyConnection`.
    service: Settings of the service.
    public_url: URL of the run's server as the service reaches it.
    episode_s, turn_s: Deadlines of a run and of its steps, in seconds.
    max_turns: Steps of a run, unless its task has its own.
    agent_config: The agent's settings, for this package's service.
    renderer: The policy's renderer, for `tokens=events`.
    """
    super().__init__(*args, **options)
    self.service = service
    self.public_url = public_url.rstrip("/").removesuffix("/v1")
    self.episode_s = episode_s
    self.turn_s = turn_s
    self.max_turns = max_turns
    self.agent_config = dict(agent_config)
    self.renderer = renderer
    self.image_store: images_lib.ImageStore = args[2]
    self.runs = client_lib.RunServiceClient(
      service.url,
      token=service.token,
      timeout_s=service.timeout_s,
      poll_s=service.poll_s,
    )

  def model(self, sampling: policy_client.SamplingParams) -> Any:
    return RunModel(self, sampling)

  async def aclose(self) -> None:
    await self.runs.aclose()
    await super().aclose()


class RunModel(proxy.ProxyModel):
  """Model of a collector whose episodes a run service plays.

  The run service samples; the model makes the sessions of the episodes.
  """

  connection: RunConnection

  def new_session_for(
    self, agent: Any, env: Any, name: str, seed: int | None
  ) -> RunSession:
    """Returns the session of the episode that `agent` follows.

    Raises:
      ValueError: another kind of agent or environment.
    """
    if not isinstance(env, RunEnvironment) or env.agent is not agent:
      raise ValueError(
        "a run service's episode needs a RunEnvironment and its agent, got"
        f" {type(env).__name__} and {type(agent).__name__}"
      )
    return RunSession(self, env, name, seed)


class RunSession(proxy.ProxySession):
  """One episode; see `model_calls.make_session`."""

  _connection: RunConnection

  def __init__(
    self, model: RunModel, env: RunEnvironment, name: str, seed: int | None
  ):
    super().__init__(model, name, seed)
    self._env = env
    self._agent = env.agent
    self._unusable = ""

  async def _reply(
    self,
    messages: Sequence[trajectory.Message],
    turn: int,
    max_new_tokens: int | None = None,
  ) -> model_calls.Reply:
    del messages, max_new_tokens  # The service writes its own requests.
    if turn == 0:
      await self._begin()
    output = await self._agent.output(turn)
    if output is None:
      end = self._agent.ended
      if end is not None and end.reason == "context_limit":
        raise policy_client.ContextLimitError(
          "the model's server has no room for the run's next prompt"
          + (f": {end.message}" if end.message else "")
        )
      raise run_agent.RunFailed(
        f"the run ended ({end.reason if end else 'unknown'}) without an"
        " answer of its model"
      )
    self._answers += 1
    (read,) = conversion.turns_of([output])
    reply = output["modelOutput"]
    usage = reply.get("usage") or {}
    reason = reply["choices"][0].get("finish_reason")
    service = self._connection.service
    return model_calls.Reply(
      read.text,
      truncated=reason == "length",
      cancelled=reason == "abort",
      prompt_tokens=int(usage.get("prompt_tokens") or 0),
      sampled_tokens=int(usage.get("completion_tokens") or 0),
      fallback=service.tokens == "events" and not read.is_exact,
    )

  async def _begin(self) -> None:
    connection = self._connection
    started = await connection.start(self._name, self._sampling)
    self._id = started["session_id"]
    await self._agent.start(
      connection.runs, self._body(started), connection.episode_s
    )

  def _body(self, started: Mapping[str, Any]) -> dict[str, Any]:
    connection, env = self._connection, self._env
    service = connection.service
    by_url = service.key == "url"
    name = started["api_key"] if by_url else started["session_id"]
    model: dict[str, Any] = {
      "baseUrl": f"{connection.public_url}/sessions/{name}/v1",
      "name": service.model or connection.name,
      "provider": "openai",
    }
    if not by_url:
      model["apiKey"] = started["api_key"]
    body: dict[str, Any] = {
      "task": env.task.instruction,
      "agent": service.agent,
      "maxSteps": env.task.max_turns or connection.max_turns,
      "maxRunTimeSec": connection.episode_s,
      "maxStepTimeSec": connection.turn_s,
      "model": model,
      "env": env.payload,
      "standardActionSpace": service.action_space,
    }
    if service.backend == "run_service":
      body["agentConfig"] = connection.agent_config
      body["images"] = "base64" if service.tokens == "events" else "url"
      model["images"] = service.images
      model["sampling"] = self._sampling_fields()
    return body

  def _sampling_fields(self) -> dict[str, Any]:
    sampling = self._sampling
    fields: dict[str, Any] = {
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "top_k": sampling.top_k,
      "max_tokens": sampling.max_new_tokens,
    }
    if sampling.min_p:
      fields["min_p"] = sampling.min_p
    if self._seed is not None:
      fields["seed"] = self._seed
    return fields

  async def release(self, session: str) -> None:
    """Ends the run, then fetches the episode's tokens and drops its session."""
    try:
      await self._agent.close()
    finally:
      await super().release(session)
    if self._connection.service.tokens == "events":
      self._sequences = None
      try:
        self._sequences = await self._of_events()
      except (ValueError, client_lib.RunServiceError) as error:
        # Reported by `build`, which makes it the episode's error.
        self._unusable = str(error)

  def build(self) -> list[trajectory.TokenSequence]:
    """See the base class.

    Raises:
      ValueError: the tokens of the service's answers are not to be had.
    """
    if self._unusable:
      raise ValueError(f"the service's events: {self._unusable}")
    sequences = super().build()
    sampled = self.untrained_tokens + sum(one.num_sampled for one in sequences)
    if self._answers and not sampled:
      raise ValueError(
        "the run's server has no record of the service's"
        f" {self._answers} answers: the service asked another model; let it"
        " use model.baseUrl"
      )
    return sequences

  async def _of_events(self) -> list[trajectory.TokenSequence]:
    """Returns the sequences that the service's events report.

    Raises:
      ValueError: they report none that can be trained on.
    """
    connection = self._connection
    turns = conversion.turns_of(self._agent.events)
    pictures = event_images.EventImages(connection.runs, connection.image_store)
    images = [await pictures.of(turn) for turn in turns]
    renderer = connection.renderer
    placed = dict(zip(map(id, turns), images))
    encode = None
    if renderer is not None:
      encode = lambda turn: event_images.encode_turn(
        turn, placed[id(turn)], renderer
      )
    rule = sampling_rule.SamplingRule(
      **sampling_rule.fields_of(self._sampling), other=connection.other_sampling
    )
    reasons = conversion.untrained_of(turns, rule, self._untrained)
    sequences, _ = conversion.sequences_of(
      turns,
      images,
      None if renderer is None else renderer.image_token_id,
      on_missing=connection.service.on_missing,
      encode=encode,
      untrained=reasons,
    )
    tokens = sum(
      0 if (ids := turns[index].token_ids) is None else len(ids)
      for index in reasons
    )
    self._report_untrained(tokens, reasons.values())
    return sequences
