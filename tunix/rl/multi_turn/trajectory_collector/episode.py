"""Plays one episode of an agent in an environment, from reset to close.

`TrajectoryCollectEngine(agent, env, model_call).collect()` always returns a
finished `Trajectory`. Failures are its status and error, never an exception;
only the cancellation of the caller's task is passed on, after the
cleanup, with the trajectory left in `engine.trajectory`.

Order of calls: env.reset, agent.reset, agent.update_from_env; then each turn
agent.chat_completions, model_call, agent.update_from_model, env.step,
agent.update_from_env; before a turn, where agent.summary_request wants one, a
model_call and agent.update_from_summary, which count as a turn of their own
but not of `max_steps`; at the end the final reward, the returns and env.close.

Promises: every call into the environment, the model and the reward function
has a deadline; the environment is closed exactly once, and never while one of
its own calls still runs; training sequences are token-exact; what a finished
trajectory holds of the environment can be written as JSON (see
`adapters.writable`).

Does not: call an agent in a thread. Its methods are string handling and run
on the event loop; async ones are awaited within the turn's deadline, those
before the first turn within that of reset.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from typing import Any, Callable, Sequence
import uuid

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import reward_equality
from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.trajectory_collector import adapters
from tunix.rl.multi_turn.trajectory_collector import model_calls
from tunix.rl.multi_turn.trajectory_collector import settings
from tunix.rl.multi_turn.trajectory_collector import stage_timer
from tunix.rl.multi_turn.trajectory_collector import teardown

Status = trajectory_lib.TrajectoryStatus
Trajectory = trajectory_lib.Trajectory
CallTimeout = concurrency.CallTimeout
describe = concurrency.describe
_REWARD_ERRORS = (adapters.NoRewardError, reward_range.RewardRangeError)


class _Stop(Exception):
  """Ends the episode early, as data."""

  def __init__(self, status: Status, stage: str, kind: str, text: str):
    super().__init__(text)
    self.status = status
    self.stage = stage
    self.kind = kind
    self.text = text


class TrajectoryCollectEngine:
  """Collects one episode; see the module docstring.

  Attributes:
    failure: The exception that ended the episode; None where none did.
    failed_stage: The stage that raised it, e.g. "reset", "step" or "reward";
      "" where none failed.
  """

  def __init__(
    self,
    agent: adapters.Agent,
    env: adapters.Env,
    model_call: model_calls.PolicyModel | Callable[..., Any],
    final_reward_fn: Callable[..., Any] | None = None,
    max_steps: int = 10,
    gamma: float = 1.0,
    timeout: float = 30.0,
    *,
    deadlines: settings.Deadlines = settings.Deadlines(),
    seed: int | None = None,
    task: object = None,
    success_reward: float = 0.0,
    max_reward: float = reward_range.MAX_REWARD,
    observers: events.Observer | Sequence[events.Observer] | None = None,
    runner: concurrency.CallRunner | None = None,
    trajectory_id: str | None = None,
    group_id: str = "",
    task_id: str = "",
    split: str = "train",
  ):
    """Args:

    agent: a BaseAgent; upstream `tunix.rl.agentic` agents work too.
    env: a BaseEnv whose reset, step and close are sync or async. With
      `runs_inline = True` they are called on the event loop itself (they
      must be cheap then); otherwise sync ones run in threads.
    model_call: a `PolicyModel` or another with `new_session` (see
      `model_calls.make_session`), or a sync or async callable from messages
      to text (no training sequences then).
    final_reward_fn: called once the policy has ended the episode, returns a
      number or a RewardOutput that is added to the last step's reward, its
      `turns` to theirs; in place of the environment's, or in addition to it
      where it has a true `beside_environment`. Its
      arguments go by name: `trajectory`, `task`, `env`, and `action`,
      `response` or `answer` for the last response; other names get the
      trajectory if there is one, else (task, last response). None uses
      `env.final_reward_fn` if it has one.
    max_steps: turns an episode may take.
    gamma: discount of `Step.mc_return`, in [0, 1].
    timeout: seconds an episode may take, counted from the end of reset; in
      a group `deadlines.episode`, which is not read here.
    deadlines: Deadlines of the single calls.
    seed: Seed of this episode's sampling.
    task: recorded as the trajectory's when the agent records none.
    success_reward: an episode that ended by itself counts as succeeded when
      the environment's info has a true `success`, or, without that key, when
      its reward is above this.
    max_reward: largest absolute reward of a turn, and of the episode; one
      beyond it ends the episode as a failure of the environment.
    observers: receive the events of the episode, its turns and its faults.
    runner: runs calls under deadlines; the process's own by default.
    trajectory_id: a fresh one by default.
    group_id, task_id, split: passed on in events.
    """
    if max_steps < 1:
      raise ValueError(f"max_steps must be >= 1, got {max_steps}")
    if not 0.0 <= gamma <= 1.0:
      raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    if not timeout > 0:
      raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
    self.agent = agent
    self.env = env
    self.model_call = model_call
    self.final_reward_fn = final_reward_fn
    self.max_steps = max_steps
    self.gamma = gamma
    self.timeout = timeout
    self.deadlines = deadlines
    self.trajectory: Trajectory | None = None  # None while it runs.
    self.failure: BaseException | None = None
    self.failed_stage = ""
    self._task = task
    self._seed = seed
    self._success_reward = success_reward
    self._max_reward = max_reward
    if observers is not None and not hasattr(observers, "on_event"):
      observers = events.Observers(observers)
    self._observers = observers
    self._runner = runner or concurrency.EPISODE_RUNNER
    self._id = trajectory_id or uuid.uuid4().hex
    self._ids = {"group_id": group_id, "task_id": task_id, "split": split}
    self._guarded = concurrency.Guarded(
      env, runner=self._runner, inline=concurrency.runs_inline(env)
    )
    self._session: Any = None
    self._started = False
    self._steps: list[Any] = []
    self._context_tokens = 0  # Of the last turn, its reply included.
    self._rewards: list[float] = []  # As the environment gave them.
    self._refused_reward: str | None = None
    self._agent_trajectory: Any = None
    self._done = False
    self._info: dict[str, Any] = {}
    self._hint: dict[str, Any] = {}
    self._metrics: dict[str, float] = {}
    self._stages = stage_timer.StageTimer(self._id, observers)
    self._episode_at = math.inf
    self._turn_at = math.inf

  async def collect(self) -> Trajectory:
    """Runs the episode, once, and returns its trajectory.

    Raises:
      asyncio.CancelledError: the calling task was cancelled; cleaned up.
    """
    if self._started:
      raise RuntimeError(
        "this engine has already collected its episode; make a new one with"
        " a new environment"
      )
    self._started = True
    started = time.perf_counter()
    self._emit(events.EpisodeStarted, trajectory_id=self._id, **self._ids)
    status, error, cancelled = Status.FAILED, None, None
    try:
      with concurrency.contained():
        status = await self._episode()
    except _Stop as stop:
      status, error = stop.status, f"{stop.kind}: {stop.text}"
      self.failure, self.failed_stage = stop.__cause__, stop.stage
      if not status.is_policy_outcome:
        self._fault(stop.stage, stop.kind, stop.text)
    except asyncio.CancelledError as e:
      status, error, cancelled = Status.CANCELLED, "Cancelled: by caller", e
    except Exception as e:  # pylint: disable=broad-except
      # Nothing that an episode does may end training.
      status = Status.ENV_ERROR
      error = f"CollectError: {describe(e)}"
      self.failure, self.failed_stage = e, "collect"
      self._fault("collect", "CollectError", describe(e))
    try:
      with self._stages("env", "setup", "close"):
        self._metrics.update(await self._teardown())
    except asyncio.CancelledError as e:
      cancelled = e
    self._metrics["seconds"] = time.perf_counter() - started
    self._metrics.update(self._stages.metrics())
    inside = getattr(self.env, "evaluation_seconds", None)
    if isinstance(inside, float):  # Within its last step.
      self._metrics["seconds_evaluate"] = inside
    self.trajectory = self._finish(status, error)
    self._emit(events.EpisodeFinished, trajectory=self.trajectory, **self._ids)
    if cancelled is not None:
      raise cancelled
    return self.trajectory

  # --- The episode ----------------------------------------------------------

  async def _episode(self) -> Status:
    loop = asyncio.get_running_loop()
    try:
      with concurrency.contained():
        self._session = model_calls.make_session(
          self.model_call, self._id, self._seed, self.agent, self.env
        )
    except Exception as e:
      raise _Stop(Status.MODEL_ERROR, "model", "ModelError", describe(e)) from e
    await self._reset()
    self._episode_at = loop.time() + self.timeout
    status = Status.MAX_TURNS
    for _ in range(self.max_steps):
      if loop.time() >= self._episode_at:
        self._mark_done()
        raise self._timeout_stop("episode")
      try:
        is_done = await self._turn()
      except policy_client.ContextLimitError as e:
        status = Status.CONTEXT_LIMIT
        self._hint["error"] = f"ContextLimit: {e}"
        break
      if is_done:
        status = Status.SUCCEEDED
        break
    await self._final_reward(ended_by_env=status is Status.SUCCEEDED)
    return self._outcome(status)

  async def _reset(self) -> None:
    result = await self._env_call("reset", self.env.reset)
    try:
      observation, info = adapters.reset_result(result)
    except (TypeError, ValueError) as e:
      raise _Stop(
        Status.ENV_ERROR, "reset", "EnvResetError", describe(e)
      ) from e
    self._info = info
    self._emit(events.EnvironmentReady, trajectory_id=self._id)
    limit, ready = self.deadlines.reset, time.perf_counter()
    await self._agent_call(self.agent.reset, limit=limit)
    self._steps = []
    self._agent_trajectory = getattr(self.agent, "trajectory", None)
    await self._agent_call(
      self.agent.update_from_env, observation, 0.0, False, info, limit=limit
    )
    self._metrics["seconds_agent_init"] = time.perf_counter() - ready

  async def _turn(self) -> bool:
    """Plays a turn; True when the environment has ended the episode."""
    loop = asyncio.get_running_loop()
    self._turn_at = min(self._episode_at, loop.time() + self.deadlines.turn)
    await self._summarize()
    turn, t0 = len(self._steps), loop.time()
    try:
      with concurrency.contained("the agent"):
        messages = self.agent.chat_completions
    except Exception as e:
      raise self._agent_stop(e) from e
    reply = await self._reply(messages, turn)
    t1 = loop.time()
    action = await self._agent_call(self.agent.update_from_model, reply.text)
    step = self._step_of(turn, messages, reply, action)
    t2 = loop.time()
    try:
      result = await self._env_call(
        "step", self.env.step, adapters.env_action(action)
      )
      t3 = loop.time()
      with concurrency.contained("the environment's result"):
        observation, reward, done, info = adapters.step_result(
          result, self._max_reward
        )
        adapters.total((reward, *self._rewards), self._max_reward)
    except _Stop:
      self._mark_done()
      raise
    except _REWARD_ERRORS as e:
      self._mark_done()
      raise self._reward_stop("step", describe(e)) from e
    except (TypeError, ValueError) as e:
      self._mark_done()
      raise _Stop(Status.ENV_ERROR, "step", "EnvStepError", describe(e)) from e
    self._info = info
    self._rewards.append(reward)
    await self._agent_call(
      self.agent.update_from_env, observation, reward, done, info
    )
    step.reward = reward
    step.done = self._done = done
    if step.observation is None:
      step.observation = observation
    if not step.info:
      step.info = dict(info)
    self._end_turn(turn, reply, step, t1 - t0, t3 - t2)
    return done

  async def _summarize(self) -> None:
    """Asks for a summary, if the agent wants one: a turn without an action."""
    agent: Any = self.agent  # Upstream's have no such methods.
    if not hasattr(agent, "summary_request"):
      return
    messages = await self._agent_call(
      agent.summary_request, self._context_tokens
    )
    if messages is None:
      return
    turn, started = len(self._steps), time.perf_counter()
    reply = await self._reply(
      messages, turn, max_new_tokens=agent.summary_tokens
    )
    seconds = time.perf_counter() - started
    action = await self._agent_call(agent.update_from_summary, reply.text)
    step = self._step_of(turn, messages, reply, action)
    self._rewards.append(0.0)
    counted = self._metrics.get("summary_turns", 0)
    self._metrics["summary_turns"] = counted + 1
    self._end_turn(turn, reply, step, seconds, 0.0)

  async def _reply(self, messages, turn: int, **limits) -> model_calls.Reply:
    try:
      with self._stages("model", "model"), concurrency.contained("the model"):
        reply = await self._session.reply(
          messages, turn, self._model_call, **limits
        )
    except policy_client.ContextLimitError:
      raise
    except CallTimeout as e:
      if self._expired():
        self._mark_done()
        raise self._timeout_stop("model") from e
      raise _Stop(
        Status.TIMEOUT,
        "model",
        "ModelTimeout",
        f"no reply within {self.deadlines.model:g} s (deadlines.model)",
      ) from e
    except Exception as e:
      raise _Stop(Status.MODEL_ERROR, "model", "ModelError", describe(e)) from e
    metrics = self._metrics
    for name in ("truncated", "fallback"):
      if getattr(reply, name):
        metrics[f"{name}_turns"] = metrics.get(f"{name}_turns", 0) + 1
    metrics["prompt_tokens"] = reply.prompt_tokens
    self._context_tokens = reply.prompt_tokens + reply.sampled_tokens
    return reply

  async def _model_call(self, fn, *args, inline=False):
    with concurrency.clocked() as clock:
      try:
        return await self._runner.call(
          fn,
          *args,
          seconds=self.deadlines.model,
          at=self._turn_at,
          inline=inline,
        )
      finally:
        # Waiting for an engine's new weights costs the episode no time.
        self._turn_at += clock.stopped_s
        self._episode_at += clock.stopped_s

  async def _final_reward(self, ended_by_env: bool) -> None:
    """Adds the episode's own reward; evaluates what the engine has ended."""
    fn = self.final_reward_fn
    if fn is None or getattr(fn, "beside_environment", False):
      own = getattr(self.env, "final_reward_fn", None)
      if own is None and not ended_by_env:
        # The engine ended the episode, so it has not been evaluated yet.
        own = adapters.env_evaluation(self.env)
      await self._add_reward(own)
    await self._add_reward(fn)

  async def _add_reward(self, fn: Callable[..., Any] | None) -> None:
    if fn is None or not self._steps:
      return
    last = self._steps[-1]
    try:
      with concurrency.contained("the reward"):
        args = adapters.reward_arguments(fn, self._draft(), last, self.env)
      with self._stages("env", "setup", "evaluate"):
        value = await self._guarded.run(
          lambda: fn(*args[0], **args[1]),
          seconds=self.deadlines.evaluate,
          inline=concurrency.runs_inline(fn),
        )
      with concurrency.contained("the reward"):
        details = adapters.credit(self._steps, value, self._max_reward)
    except _REWARD_ERRORS as e:
      raise self._reward_stop("reward", describe(e)) from e
    except CallTimeout as e:
      raise _Stop(
        Status.TIMEOUT,
        "reward",
        "RewardTimeout",
        f"no reward within {self.deadlines.evaluate:g} s (deadlines.evaluate)",
      ) from e
    except Exception as e:
      raise _Stop(Status.ENV_ERROR, "reward", "RewardError", describe(e)) from e
    if details.keys() - {"parts"}:  # A sum's parts are for logs.
      self._hint["final_reward"] = True
      self._hint.update(
        {k: details[k] for k in ("success", "parse_error") if k in details}
      )

  def _outcome(self, status: Status) -> Status:
    """Decides the final status, by how the episode ended and env's hints."""
    hints = {**self._info, **self._hint}
    rewards = [float(s.reward) for s in self._steps]
    success = hints.get("success")
    if status is not Status.SUCCEEDED:
      return Status.SUCCEEDED if success else status
    hint = hints.get("status")
    if hint is not None and hint != Status.RUNNING:
      hint = Status(hint)
      if not hint.is_policy_outcome:
        raise _Stop(
          hint, "step", "EnvReported", f"the environment reported {hint.value}"
        )
      if "final_reward" not in self._hint or hint is Status.SUCCEEDED:
        return hint
    if success is None:
      success = reward_equality.exceeds(
        math.fsum(rewards), self._success_reward, math.fsum(map(abs, rewards))
      )
    if success:
      return Status.SUCCEEDED
    if hint is not None:
      return hint
    if hints.get("parse_error") or self._steps[-1].info.get("parse_errors"):
      return Status.PARSE_ERROR
    if hints.get("truncated"):
      return Status.MAX_TURNS
    return Status.FAILED

  # --- Calls ----------------------------------------------------------------

  async def _env_call(self, stage: str, fn, *args) -> Any:
    limit = getattr(self.deadlines, stage)
    at = self._turn_at if stage == "step" else math.inf
    try:
      counted = ("env",) if stage == "step" else ("setup", stage)
      with self._stages("env", *counted):
        return await self._guarded.run(fn, *args, seconds=limit, at=at)
    except CallTimeout as e:
      if stage == "step" and self._expired():
        raise self._timeout_stop(stage) from e
      raise _Stop(
        Status.TIMEOUT,
        stage,
        f"Env{stage.capitalize()}Timeout",
        f"{type(self.env).__name__}.{stage} took longer than {limit:g} s"
        f" (deadlines.{stage})",
      ) from e
    except Exception as e:
      kind = f"Env{stage.capitalize()}Error"
      raise _Stop(Status.ENV_ERROR, stage, kind, describe(e)) from e

  async def _agent_call(self, fn, *args, limit: float | None = None) -> Any:
    try:
      with concurrency.contained("the agent"):
        result = fn(*args)
      if inspect.isawaitable(result):
        result = await self._runner.run(result, seconds=limit, at=self._turn_at)
      return result
    except CallTimeout as e:
      self._mark_done()
      if limit is None:
        raise self._timeout_stop("agent") from e
      raise _Stop(
        Status.TIMEOUT,
        "agent",
        "AgentTimeout",
        f"{type(self.agent).__name__} took longer than {limit:g} s before the"
        " first turn (deadlines.reset)",
      ) from e
    except Exception as e:
      raise self._agent_stop(e) from e

  def _teardown(self):
    return teardown.run(
      self._guarded,
      self._session,
      runner=self._runner,
      seconds=self.deadlines.close,
      fault=self._fault,
    )

  def _expired(self) -> bool:
    return asyncio.get_running_loop().time() >= self._turn_at

  def _timeout_stop(self, stage: str) -> _Stop:
    now = asyncio.get_running_loop().time()
    if now >= self._episode_at:
      return _Stop(
        Status.TIMEOUT,
        stage,
        "EpisodeTimeout",
        f"the episode took longer than {self.timeout:g} s (deadlines.episode)",
      )
    return _Stop(
      Status.TIMEOUT,
      stage,
      "TurnTimeout",
      f"the turn took longer than {self.deadlines.turn:g} s (deadlines.turn)",
    )

  def _agent_stop(self, e: BaseException) -> _Stop:
    if adapters.is_parse_error(e):
      status, kind = Status.PARSE_ERROR, "ParseError"
    else:
      status, kind = Status.ENV_ERROR, "AgentError"
    return _Stop(status, "agent", kind, describe(e))

  def _reward_stop(self, stage: str, text: str) -> _Stop:
    self._metrics["refused_rewards"] = 1
    return _Stop(Status.ENV_ERROR, stage, "RewardError", text)

  def _mark_done(self) -> None:
    if self._steps:
      self._steps[-1].done = True

  # --- Records --------------------------------------------------------------

  def _step_of(self, turn, messages, reply, action) -> Any:
    """Returns the agent's Step of this turn, or makes one for it."""
    recorded = getattr(self._agent_trajectory, "steps", None)
    if recorded is not None and len(recorded) == turn + 1:
      step = recorded[turn]
    else:
      step = trajectory_lib.Step(
        chat_completions=list(messages),
        action=action,
        model_response=reply.text,
      )
    if not step.model_response:
      step.model_response = reply.text
    self._steps.append(step)
    if reply.cancelled:
      raise _Stop(
        Status.CANCELLED, "model", "Cancelled", "the client stopped sampling"
      )
    return step

  def _draft(self) -> Trajectory:
    """Returns the episode so far, as reward functions see it."""
    self._refused_reward = self._refused_reward or adapters.mend_rewards(
      self._steps, self._rewards, self._max_reward
    )
    draft = self._agent_trajectory
    if not isinstance(draft, Trajectory):
      draft = Trajectory(
        steps=[adapters.convert_step(s) for s in self._steps],
        trajectory_id=self._id,
      )
      draft.task = getattr(self._agent_trajectory, "task", None)
    elif len(draft.steps) != len(self._steps):
      draft.steps = list(self._steps)
    if draft.task is None:
      draft.task = (
        self._task
        if self._task is not None
        else getattr(self.env, "task", None)
      )
    draft.reward = reward_equality.total(float(s.reward) for s in self._steps)
    return draft

  def _finish(self, status: Status, error: str | None) -> Trajectory:
    result = self._draft()
    result.trajectory_id = self._id
    if self._refused_reward is not None and status.is_policy_outcome:
      stop = self._reward_stop("agent", self._refused_reward)
      status, error = stop.status, f"{stop.kind}: {stop.text}"
      self._fault("agent", stop.kind, stop.text)
    discounted = 0.0
    for step in reversed(result.steps):
      discounted = step.reward + self.gamma * discounted
      step.mc_return = discounted
      step.action = adapters.writable(step.action)
      step.observation = adapters.writable(step.observation)
      if step.info:
        step.info = adapters.writable(step.info)
    result.task = adapters.writable(result.task)
    if self._session is not None:
      try:
        result.sequences = self._session.build()
      except ValueError as e:
        status, error = Status.MODEL_ERROR, f"SequenceError: {e}"
        self._fault("model", "SequenceError", str(e))
      self._metrics["history_rewrites"] = self._session.num_rewrites
      if untrained := getattr(self._session, "untrained_tokens", 0):
        self._metrics["untrained_tokens"] = untrained
    result.status = status
    result.error = error if error is not None else self._hint.get("error")
    self._metrics["turns"] = len(result.steps)
    self._metrics["sampled_tokens"] = result.num_sampled
    result.metrics = {**result.metrics, **self._metrics}
    return result

  # --- Events ---------------------------------------------------------------

  def _emit(self, event_type, **fields) -> None:
    if self._observers is not None:
      self._observers.on_event(event_type(**fields))

  def _end_turn(
    self,
    turn: int,
    reply: model_calls.Reply,
    step: Any,
    model: float,
    env: float,
  ) -> None:
    if reply.truncated:
      step.info = {**step.info, "response_truncated": True}
    if self._observers is not None:
      render = self._session.render_seconds
      self._emit(
        events.TurnFinished,
        trajectory_id=self._id,
        turn=turn,
        seconds={"model": model - render, "env": env, "render": render},
        step=step,
      )

  def _fault(self, stage: str, kind: str, message: str) -> None:
    self._emit(
      events.Fault,
      stage=stage,
      kind=kind,
      message=message,
      trajectory_id=self._id,
    )
