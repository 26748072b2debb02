"""What TrajectoryCollectEngine promises: order, rewards, statuses, tokens."""

import asyncio
import functools
import json

import collector_fakes as fakes
import numpy as np
import pytest
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.rewards import RewardOutput

Status = trajectory_lib.TrajectoryStatus


def collect(agent, env, model=fakes.say_x, *args, **kwargs):
  engine = tc.TrajectoryCollectEngine(agent, env, model, *args, **kwargs)
  return asyncio.run(engine.collect())


def test_what_cannot_be_written_is_recorded_as_text():
  shot = trajectory_lib.ImageRef("0" * 64, 4, 3)
  loop = {}
  loop["self"] = loop

  class Env(fakes.ScriptEnv):
    async def step(self, action):
      _, reward, done, _ = await super().step(action)
      observation = {"screenshot": shot, "raw": [np.zeros(5000), "text"]}
      info = {
        "frame": object(),
        "names": np.array([object()]),
        "small": np.arange(3),
        "loop": loop,
        "call": trajectory_lib.ToolCall("f", {"x": b"1"}, call_id="c"),
        "calls": (trajectory_lib.ToolCall("f", {"x": 1}, call_id="c"),),
        7: {"nested": {1, 2}},
      }
      return observation, reward, done, info

  seen = []

  def reward(trajectory):
    seen.append(trajectory.steps[-1].info["frame"])
    return RewardOutput(0.5, {"judge": object(), "why": "good"})

  class Agent(fakes.ListAgent):
    def update_from_env(self, observation, reward, done, info=None):
      super().update_from_env(observation, reward, done, info)
      self.trajectory.task = {"page": object(), "name": "t"}

  result = collect(Agent(), Env((0.0, 1.0)), fakes.say_x, reward)
  assert type(seen[0]) is object  # A reward function gets the thing itself.
  back = trajectory_lib.Trajectory.from_json(
    json.loads(json.dumps(result.to_json()))
  )
  for step in (result.steps[-1], back.steps[-1]):
    assert step.observation["screenshot"] == shot
    assert step.observation["raw"] == ["<ndarray>", "text"]
    info = step.info
    assert info["frame"] == "<object>" and info["names"] == "<ndarray>"
    assert info["small"].tolist() == [0, 1, 2]
    assert info["call"] == "<ToolCall>"
    assert info["calls"][0].arguments == {"x": 1}
    assert info["7"] == {"nested": "<set>"}
    assert info["final_reward"] == {"judge": "<object>", "why": "good"}
  assert result.task == {"page": "<object>", "name": "t"}


@pytest.mark.parametrize("env_type", [fakes.ScriptEnv, fakes.SyncScriptEnv])
@pytest.mark.parametrize("sync_model", [False, True])
def test_order_of_calls(env_type, sync_model):
  log = []

  def model(messages):
    log.append("model")
    return "x"

  async def async_model(messages):
    return model(messages)

  def reward(trajectory):
    log.append("final_reward")
    return 0.0

  result = collect(
    fakes.ListAgent(log),
    env_type((0.0, 1.0), log),
    model if sync_model else async_model,
    reward,
  )
  turn = [
    "agent.chat_completions",
    "model",
    "agent.update_from_model",
    "env.step",
    "agent.update_from_env",
  ]
  assert log == [
    "env.reset",
    "agent.reset",
    "agent.update_from_env",
    *turn,
    *turn,
    "final_reward",
    "env.close",
  ]
  assert result.status is Status.SUCCEEDED
  assert [s.done for s in result.steps] == [False, True]
  assert [s.observation for s in result.steps] == ["obs 1", "obs 2"]


def test_returns_are_discounted_and_reward_is_not():
  result = collect(
    fakes.ListAgent(), fakes.ScriptEnv((0.0, 0.0, 1.0)), gamma=0.5
  )
  assert [s.mc_return for s in result.steps] == [0.25, 0.5, 1.0]
  assert result.reward == 1.0


def test_final_reward_joins_the_last_step():
  result = collect(
    fakes.ListAgent(),
    fakes.ScriptEnv((1.0, 2.0)),
    fakes.say_x,
    lambda trajectory: 4.0,
    gamma=0.5,
  )
  assert [s.reward for s in result.steps] == [1.0, 6.0]
  assert [s.mc_return for s in result.steps] == [4.0, 6.0]
  assert result.reward == 7.0


def _by_task_and_action(task, action):
  return float(task == "task" and action == "x")


async def _async_reward(trajectory):
  await asyncio.sleep(0)
  return float(len(trajectory.steps))


@pytest.mark.parametrize(
  "fn, expected",
  [
    (lambda: 3, 3.0),
    (lambda t: len(t.steps), 2.0),
    (lambda episode, *, env: episode.num_turns, None),
    (_by_task_and_action, 1.0),
    (lambda a, b: float((a, b) == ("task", "x")), 1.0),
    (lambda *, answer, **rest: float(answer == "x"), 1.0),
    (functools.partial(_by_task_and_action, action="x"), 1.0),
    (lambda trajectory: np.float32(0.5), 0.5),
    (lambda trajectory: RewardOutput(0.25, {"why": "so"}), 0.25),
    (_async_reward, 2.0),
  ],
)
def test_reward_functions_of_every_shape(fn, expected):
  result = collect(
    fakes.ListAgent(), fakes.ScriptEnv((0.0, 0.0)), fakes.say_x, fn
  )
  if expected is None:
    assert result.status is Status.ENV_ERROR
    assert "episode, env" in result.error
  else:
    assert result.error is None
    assert result.reward == expected


def test_reward_sees_every_turn_and_its_metadata_is_kept():
  seen = []

  def fn(trajectory):
    seen.extend(s.observation for s in trajectory.steps)
    return RewardOutput(1.0, {"matched": 2})

  result = collect(
    fakes.ListAgent(), fakes.ScriptEnv((0.0, 0.0, 0.0)), fakes.say_x, fn
  )
  assert seen == ["obs 1", "obs 2", "obs 3"]
  assert result.steps[-1].info["final_reward"] == {"matched": 2}
  assert result.status is Status.SUCCEEDED


def test_step_reward_may_be_a_reward_output():
  class Env(fakes.ScriptEnv):
    async def step(self, action):
      return "o", RewardOutput(0.5, {"part": 1}), True, {}

  result = collect(fakes.ListAgent(), Env(), gamma=0.9)
  assert result.reward == 0.5
  assert result.steps[0].info["reward_metadata"] == {"part": 1}


@pytest.mark.parametrize(
  "info, reward, status",
  [
    ({}, 1.0, Status.SUCCEEDED),
    ({}, 0.0, Status.FAILED),
    ({"success": False}, 1.0, Status.FAILED),
    ({"success": True}, 0.0, Status.SUCCEEDED),
    ({"parse_error": True}, 0.0, Status.PARSE_ERROR),
    ({"truncated": True}, 0.0, Status.MAX_TURNS),
    ({"status": "parse_error"}, 0.0, Status.PARSE_ERROR),
    ({"status": "max_turns", "success": False}, 0.0, Status.MAX_TURNS),
    ({"status": "env_error"}, 0.0, Status.ENV_ERROR),
    ({"status": "nonsense"}, 0.0, Status.ENV_ERROR),
  ],
)
def test_the_environment_says_how_it_ended(info, reward, status):
  class Env(fakes.ScriptEnv):
    async def step(self, action):
      return "o", reward, True, info

  assert collect(fakes.ListAgent(), Env()).status is status


def test_max_turns_asks_the_environment_for_its_verdict():
  class Env(fakes.ScriptEnv):
    solved = False

    def evaluate(self):
      return gym_base.Evaluation(0.75, self.solved)

  rewards = (0.0,) * 9
  result = collect(fakes.ListAgent(), Env(rewards), max_steps=3)
  assert result.status is Status.MAX_TURNS
  assert len(result.steps) == 3
  assert result.reward == 0.75
  Env.solved = True
  result = collect(fakes.ListAgent(), Env(rewards), max_steps=3)
  assert result.status is Status.SUCCEEDED


def test_agent_parse_error_is_the_policys_doing():
  class ToolParseError(ValueError):
    pass

  class Agent(fakes.ListAgent):
    error = ToolParseError("no call")

    def update_from_model(self, response):
      raise self.error

  result = collect(Agent(), fakes.ScriptEnv())
  assert result.status is Status.PARSE_ERROR
  Agent.error = KeyError("bug")
  result = collect(Agent(), fakes.ScriptEnv())
  assert result.status is Status.ENV_ERROR
  assert result.error == "AgentError: KeyError: 'bug'"


def test_async_agents_and_agents_without_trajectory():
  class Agent:
    chat_completions = [{"role": "user", "content": "go"}]

    async def reset(self):
      pass

    async def update_from_env(self, observation, reward, done, info):
      await asyncio.sleep(0)

    async def update_from_model(self, response):
      return response.upper()

  class Env(fakes.ScriptEnv):
    task = {"id": 7}

    async def step(self, action):
      self.log.append(action)
      return await super().step(action)

  env = Env((0.0, 1.0))
  result = collect(Agent(), env)
  assert env.log.count("X") == 2
  assert [s.action for s in result.steps] == ["X", "X"]
  assert [s.model_response for s in result.steps] == ["x", "x"]
  assert result.task == {"id": 7}
  assert result.reward == 1.0


def test_an_engine_collects_once():
  async def main():
    engine = tc.TrajectoryCollectEngine(
      fakes.ListAgent(), fakes.ScriptEnv(), fakes.say_x
    )
    await engine.collect()
    with pytest.raises(RuntimeError, match="already collected"):
      await engine.collect()

  asyncio.run(main())


@pytest.mark.parametrize(
  "kwargs", [{"max_steps": 0}, {"gamma": 1.5}, {"timeout": 0}]
)
def test_bad_settings_are_refused(kwargs):
  with pytest.raises(ValueError, match=next(iter(kwargs))):
    tc.TrajectoryCollectEngine(
      fakes.ListAgent(), fakes.ScriptEnv(), fakes.say_x, **kwargs
    )


def test_events_tell_the_episode():
  recorder = fakes.Recorder()
  result = collect(
    fakes.ListAgent(),
    fakes.ScriptEnv((0.0, 1.0)),
    observers=[recorder],
    group_id="g",
    task_id="t",
    split="eval",
  )
  kinds = [
    e.stage if isinstance(e, events.StageChanged) else type(e).__name__
    for e in recorder.events
  ]
  turn = ["model", "", "env", "", "TurnFinished"]
  assert kinds == [
      "EpisodeStarted", "env", "", "EnvironmentReady", *turn, *turn, "env",
      "", "EpisodeFinished",
  ]  # fmt: skip
  assert {e.trajectory_id for e in recorder.of(events.StageChanged)} == {
    result.trajectory_id
  }
  last = recorder.events[-1]
  assert last.trajectory is result
  assert (last.group_id, last.task_id, last.split) == ("g", "t", "eval")
  assert [e.turn for e in recorder.of(events.TurnFinished)] == [0, 1]
  first = recorder.of(events.TurnFinished)[0]
  assert set(first.seconds) == {"model", "env", "render"}


# --- With tokens ------------------------------------------------------------


def ids(text, end=True):
  return [ord(c) + 10 for c in text] + ([fakes.EOT] if end else [])


def token_model(script, renderer=None, **kwargs):
  client = fakes.TokenClient(
    script, **{k: kwargs.pop(k) for k in ("version", "limit") if k in kwargs}
  )
  sampling = policy_client.SamplingParams(
    max_new_tokens=kwargs.pop("max_new_tokens", 32)
  )
  model = tc.PolicyModel(
    client, renderer or fakes.CharRenderer(), sampling, **kwargs
  )
  return model, client


def test_next_prompt_begins_with_the_whole_turn():
  model, client = token_model(lambda turn, _: ids(f"turn {turn}"), version=3)
  result = collect(
    fakes.ListAgent(),
    fakes.ScriptEnv((0.0, 0.0, 1.0)),
    model,
    trajectory_id="ep",
  )
  (sequence,) = result.sequences
  for turn in range(2):
    whole = np.concatenate([client.prompts[turn], ids(f"turn {turn}")])
    assert np.array_equal(client.prompts[turn + 1][: len(whole)], whole)
  assert np.array_equal(
    sequence.tokens, np.concatenate([client.prompts[2], ids("turn 2")])
  )
  sampled = sequence.tokens[sequence.loss_mask]
  assert sampled.tolist() == ids("turn 0") + ids("turn 1") + ids("turn 2")
  assert sequence.logprobs[sequence.loss_mask][:3].tolist() == [-1, -2, -3]
  assert result.versions == (3, 3)
  assert sequence.turn_ids.max() == 2
  assert client.opened == client.released == ["ep/0"]
  assert result.metrics["sampled_tokens"] == 21
  assert result.metrics["history_rewrites"] == 0


def test_eot_is_kept_once_and_not_in_the_text():
  model, _ = token_model(lambda turn, _: ids("hi"))
  result = collect(fakes.ListAgent(), fakes.ScriptEnv((0.0, 1.0)), model)
  (sequence,) = result.sequences
  assert [s.model_response for s in result.steps] == ["hi", "hi"]
  text = "".join(
    "|" if t == fakes.EOT else chr(t - 10) for t in sequence.tokens
  )
  assert text == "<s>be brief|<u>task|<a>hi|<u>obs 1|<a>hi|"


def test_truncated_turns_stay_trainable():
  model, client = token_model(
    lambda turn, _: ids("endless", end=False), max_new_tokens=4
  )
  result = collect(fakes.ListAgent(), fakes.ScriptEnv((0.0, 1.0)), model)
  (sequence,) = result.sequences
  assert sequence.num_sampled == 8
  assert result.is_trainable
  assert result.metrics["truncated_turns"] == 2
  assert result.steps[0].info["response_truncated"]
  # The bridge closes the turn that the policy did not close.
  start = len(client.prompts[0]) + 4
  assert client.prompts[1][start] == fakes.EOT
  assert not sequence.loss_mask[start]


def test_ids_that_do_not_survive_retokenising_are_trained_on():
  merged = fakes.CharRenderer.merged
  model, client = token_model(lambda turn, _: [merged, fakes.EOT])
  result = collect(fakes.ListAgent(), fakes.ScriptEnv((0.0, 1.0)), model)
  assert [s.model_response for s in result.steps] == ["ab", "ab"]
  (sequence,) = result.sequences
  assert sequence.tokens[sequence.loss_mask].tolist() == [merged, 1] * 2
  assert merged in client.prompts[1].tolist()


class Forgetful(fakes.ListAgent):
  """Keeps the system message and the newest two."""

  @property
  def chat_completions(self):
    if len(self.messages) > 3:
      return self.messages[:1] + self.messages[-1:]
    return self.messages


class Stripping(fakes.ListAgent):
  """Stores another text than was sampled."""

  def update_from_model(self, response):
    self.messages.append({"role": "assistant", "content": response.strip()})
    return trajectory_lib.Action(response)


class Censor(fakes.ListAgent):
  """Changes an old message in place."""

  def update_from_env(self, observation, reward, done, info=None):
    super().update_from_env(observation, reward, done, info)
    if len(self.messages) > 3:
      self.messages[1]["content"] = "(removed)"


@pytest.mark.parametrize(
  "agent_type, sequences", [(Forgetful, 3), (Stripping, 3), (Censor, 2)]
)
def test_a_rewritten_history_starts_a_new_sequence(agent_type, sequences):
  model, client = token_model(lambda turn, _: ids(f" turn {turn}"))
  result = collect(
    agent_type(), fakes.ScriptEnv((0.0, 0.0, 1.0)), model, trajectory_id="e"
  )
  assert result.error is None
  assert len(result.sequences) == sequences
  assert result.metrics["history_rewrites"] == sequences - 1
  sampled = [s.tokens[s.loss_mask].tolist() for s in result.sequences]
  assert sum(sampled, []) == sum((ids(f" turn {t}") for t in range(3)), [])
  assert client.opened == [f"e/{i}" for i in range(sequences)]
  assert sorted(client.released) == client.opened


def test_context_limit_is_an_outcome_of_the_policy():
  model, client = token_model(lambda turn, _: ids("much text"), limit=60)
  result = collect(fakes.ListAgent(), fakes.ScriptEnv((0.0,) * 9), model)
  assert result.status is Status.CONTEXT_LIMIT
  assert result.error.startswith("ContextLimit: ")
  assert result.is_trainable
  assert len(client.prompts) == len(result.steps)


def test_own_context_limit_cuts_and_then_ends():
  model, client = token_model(
    lambda turn, s: ids("abcdefghij" * 3, end=False)[: s.max_new_tokens],
    max_context_tokens=70,
  )
  result = collect(fakes.ListAgent(), fakes.ScriptEnv((0.0,) * 9), model)
  assert result.status is Status.CONTEXT_LIMIT
  assert len(result.sequences[0]) <= 70
  for prompt, (_, sampling) in zip(client.prompts, client.requests):
    assert len(prompt) + sampling.max_new_tokens <= 70


def test_a_prompt_that_just_fills_the_context_ends_the_episode():
  def play(limit):
    model, client = token_model(
      lambda turn, s: ids("ab")[: s.max_new_tokens], max_context_tokens=limit
    )
    env = fakes.ScriptEnv((0.0,) * 3)
    return collect(fakes.ListAgent(), env, model), client

  _, client = play(10_000)
  second = len(client.prompts[1])
  result, client = play(second)
  assert result.status is Status.CONTEXT_LIMIT and len(client.prompts) == 1
  result, client = play(second + 1)
  assert client.requests[1][1].max_new_tokens == 1


def test_a_client_that_is_dead_from_the_start_is_not_the_gyms_fault():
  model, client = token_model(lambda turn, _: ids("ok"))

  def open_session(name):
    raise RuntimeError("the engine has failed for good")

  client.open_session = open_session
  result = collect(fakes.ListAgent(), fakes.ScriptEnv(), model)
  assert result.status is Status.MODEL_ERROR
  assert "ModelError" in result.error and "for good" in result.error


def test_a_sampled_placeholder_is_a_model_error():
  model, _ = token_model(
    lambda turn, _: ids("ok") if turn == 0 else [fakes.PAD]
  )
  result = collect(fakes.ListAgent(), fakes.ScriptEnv(), model)
  assert result.status is Status.MODEL_ERROR
  assert "placeholder" in result.error
  # The first turn was sound and stays as it was.
  assert result.sequences[0].num_sampled == 3


def test_cancelled_completion_ends_the_episode():
  class Client(fakes.TokenClient):
    async def generate(self, prompt, sampling, *, session):
      done = await super().generate(prompt, sampling, session=session)
      return policy_client.Completion(
        done.tokens,
        done.logprobs,
        done.versions,
        policy_client.FinishReason.CANCELLED,
      )

  model = tc.PolicyModel(
    Client(lambda turn, _: ids("ab", end=False)), fakes.CharRenderer()
  )
  env = fakes.ScriptEnv()
  result = collect(fakes.ListAgent(), env, model)
  assert result.status is Status.CANCELLED
  assert env.closed == 1 and env.count == 0
  assert not result.is_trainable


def test_seeds_differ_by_turn_and_repeat():
  def seeds(seed):
    model, client = token_model(lambda turn, _: ids("x"))
    collect(fakes.ListAgent(), fakes.ScriptEnv(), model, seed=seed)
    return [sampling.seed for _, sampling in client.requests]

  first = seeds(5)
  assert first == seeds(5)
  assert len(set(first)) == 3
  assert not set(first) & set(seeds(6))


def test_work_of_a_turn_does_not_grow_with_the_episode():
  renderer = fakes.CharRenderer()
  model, _ = token_model(lambda turn, _: ids("x"), renderer)
  turns = 50
  collect(
    fakes.ListAgent(), fakes.ScriptEnv((0.0,) * turns), model, max_steps=turns
  )
  # Two messages at first, one a turn from then on: none is rendered again.
  assert renderer.rendered == 2 + (turns - 1)


def test_trajectory_round_trips_through_json():
  model, _ = token_model(lambda turn, _: ids("x"))
  result = collect(fakes.ListAgent(), fakes.ScriptEnv(), model)
  again = trajectory_lib.Trajectory.from_json(result.to_json())
  assert again.sequences == result.sequences
  assert again.status is result.status
  assert [s.mc_return for s in again.steps] == [
    s.mc_return for s in result.steps
  ]
