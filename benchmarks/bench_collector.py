"""Measures what collecting costs beside the model and the environment.

Runs many concurrent episodes with a model and an environment that do nothing,
and reports CPU microseconds a turn (all threads of the process, so that other
load on the machine does not count) and wall time:

* `loop`: the same awaits without an engine, the floor;
* `inline`: ours, environment and model declared cheap (`runs_inline`);
* `tasks`: ours, ordinary async environment and model, each call cancellable
  in a task of its own;
* `threads`: ours, a blocking environment in worker threads;
* `tokens`: ours, inline, through a renderer and a token client, with
  training sequences;
* `upstream`: tunix.rl.agentic's engine on the same null classes.

the conversion rate of `SequenceBuilder`, turns into training sequences, and the
milliseconds that the durable queue takes to store an accepted group and to let
it go (`--store FOLDER`, on the disk of which it is measured; by default the
present one): groups of the size of the quickstart's, 8 episodes of 4 turns with
a new screenshot in each of 128 x 96.

  python benchmarks/bench_collector.py --episodes 1000 --turns 20
"""

import argparse
import asyncio
import json
import os
import pathlib
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.queue import group_store

EOT = 1


class NullAgent:
  """Appends to a list and does nothing else."""

  def reset(self):
    self.chat_completions = [{"role": "system", "content": "s"}]
    self.trajectory = trajectory_lib.Trajectory()

  def update_from_env(self, observation, reward, is_last, info):
    self.chat_completions.append({"role": "user", "content": observation})

  def update_from_model(self, response):
    self.chat_completions.append({"role": "assistant", "content": response})
    return trajectory_lib.Action(response)


class NullEnv:
  """Async, cheap and declared so."""

  runs_inline = True

  def __init__(self, turns):
    self.left = turns

  async def reset(self):
    await asyncio.sleep(0)
    return "o", {}

  async def step(self, action):
    await asyncio.sleep(0)
    self.left -= 1
    return "o", 0.0, not self.left, {}

  async def close(self):
    pass


class TaskEnv(NullEnv):
  """Async, not declared cheap."""

  runs_inline = False


class ThreadEnv:
  """Blocking."""

  def __init__(self, turns):
    self.left = turns

  def reset(self):
    return "o", {}

  def step(self, action):
    self.left -= 1
    return "o", 0.0, not self.left, {}

  def close(self):
    pass


async def null_model(messages):
  await asyncio.sleep(0)
  return "x"


async def inline_model(messages):
  await asyncio.sleep(0)
  return "x"


inline_model.runs_inline = True


class NullRenderer:
  """Fixed tokens for any message."""

  stop_token_ids = (EOT,)
  image_token_id = 2

  def __init__(self, tokens=16):
    self._prompt = policy_client.TokenPrompt(np.full(tokens, 7))

  def render(self, messages, add_generation_prompt=True):
    return self._prompt

  def bridge(self, new_messages, *, last_sampled_is_eot):
    return self._prompt

  def decode(self, ids):
    return "x"


class NullClient:
  """The same completion for any prompt."""

  def __init__(self, tokens=16):
    self._completion = policy_client.Completion(
      np.array([9] * (tokens - 1) + [EOT]),
      np.full(tokens, -1.0),
      np.zeros(tokens),
      policy_client.FinishReason.STOP,
    )

  async def generate(self, prompt, sampling, *, session):
    await asyncio.sleep(0)
    return self._completion

  async def release(self, session):
    pass


async def bare(turns):
  """The floor: what the engine awaits, and what agent and trajectory keep."""
  agent, env = NullAgent(), NullEnv(turns)
  observation, info = await env.reset()
  agent.reset()
  agent.update_from_env(observation, 0.0, False, info)
  is_last = False
  while not is_last:
    text = await null_model(agent.chat_completions)
    action = agent.update_from_model(text)
    observation, reward, is_last, info = await env.step(action)
    agent.update_from_env(observation, reward, is_last, info)
  await env.close()


async def ours(turns, env_type, model, seed=0):
  result = await tc.TrajectoryCollectEngine(
    NullAgent(),
    env_type(turns),
    model,
    max_steps=turns,
    timeout=3600.0,
    seed=seed,
  ).collect()
  if result.error or len(result.steps) != turns:
    raise RuntimeError(f"the benchmark's episode failed: {result.error}")


def upstream_episode():
  """(turns) -> coroutine of upstream's engine, or None without it."""
  try:
    from tunix.rl.agentic.agents import agent_types  # pylint: disable=g-import-not-at-top
    from tunix.rl.agentic.agents import base_agent  # pylint: disable=g-import-not-at-top
    from tunix.rl.agentic.environments import base_environment  # pylint: disable=g-import-not-at-top
    from tunix.rl.agentic.trajectory import trajectory_collect_engine  # pylint: disable=g-import-not-at-top
  except ImportError:
    return None

  class Agent(base_agent.ConversationAgentBase):
    def update_from_model(self, response, **kwargs):
      self._messages.append({"role": "assistant", "content": response})
      step = agent_types.Step(model_response=response)
      self._trajectory.steps.append(step)
      return agent_types.Action(action=response)

  class Env(base_environment.BaseTaskEnv):
    def _initial_observation(self):
      return "o"

    def _step_impl(self, action):
      return base_environment.EnvStepResult("o", 0.0, False, {})

  class Output:
    text = ["x"]
    tokens = None
    logprobs = None
    left_padded_prompt_tokens = None

  def model(messages, env, **kwargs):
    return Output

  async def episode(turns):
    engine = trajectory_collect_engine.TrajectoryCollectEngine(
      Agent("s"), Env({}, max_steps=turns), model_call=model, timeout=3600.0
    )
    result = await engine.collect(mode="Trajectory")
    if len(result.steps) != turns:
      raise RuntimeError("upstream's episode failed")

  return episode


def measure(make, episodes, turns, repeats):
  """Best (CPU us, wall us) a turn over `repeats` runs."""

  async def main():
    await asyncio.gather(*(make(i) for i in range(episodes)))

  async def warm_up():
    await asyncio.gather(*(make(i) for i in range(20)))

  asyncio.run(warm_up())
  best = None
  for _ in range(repeats):
    cpu, wall = time.process_time(), time.perf_counter()
    asyncio.run(main())
    cpu = time.process_time() - cpu
    wall = time.perf_counter() - wall
    sample = (cpu / episodes / turns * 1e6, wall / episodes / turns * 1e6)
    best = sample if best is None else min(best, sample)
  return best


def conversion(turns, bridge, sampled):
  """Tokens a second through SequenceBuilder, prompts and final arrays."""
  renderer = NullRenderer(bridge)
  completion = policy_client.Completion(
    np.array([9] * (sampled - 1) + [EOT]),
    np.full(sampled, -1.0),
    np.zeros(sampled),
    policy_client.FinishReason.STOP,
  )
  cpu = time.process_time()
  builder = tc.SequenceBuilder(renderer)
  messages = [{"role": "user", "content": "o"}]
  for _ in range(turns):
    builder.prompt(messages)
    text = builder.append(completion)
    messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": "o"})
  (sequence,) = builder.build()
  return len(sequence) / (time.process_time() - cpu), len(sequence)


def group_of(images, number, episodes=8, turns=4, tokens_a_turn=90):
  """A group with a screenshot of its own in every turn."""
  rng = np.random.default_rng(number)
  vision = 12
  n = turns * tokens_a_turn
  turn_ids = np.repeat(np.arange(turns), tokens_a_turn)
  place = np.arange(n) % tokens_a_turn
  mask = place >= tokens_a_turn - 30
  tokens = np.where(place < vision, 3, 100 + place)
  members = []
  for sample in range(episodes):
    screens = rng.integers(0, 255, (turns, 12, 16, 3), np.uint8)
    refs = [images.put(s.repeat(8, 0).repeat(8, 1)) for s in screens]
    sequence = trajectory_lib.TokenSequence(
      tokens=tokens,
      loss_mask=mask,
      logprobs=np.where(mask, -rng.random(n), 0),
      versions=np.where(mask, 0, -1),
      turn_ids=turn_ids,
      images=[
        trajectory_lib.ImageSpan(ref, turn * tokens_a_turn, vision)
        for turn, ref in enumerate(refs)
      ],
    )
    messages, steps = [], []
    for ref in refs:
      part = {"type": "image", "image": ref}
      messages.append({"role": "user", "content": [part]})
      steps.append(
        trajectory_lib.Step(
          chat_completions=list(messages), model_response="x" * 80
        )
      )
      messages.append({"role": "assistant", "content": "x" * 80})
    members.append(
      trajectory_lib.Trajectory(
        steps=steps,
        status=trajectory_lib.TrajectoryStatus.FAILED,
        sequences=[sequence],
        trajectory_id=f"{number}.{sample}",
      )
    )
  return trajectory_lib.TrajectoryGroup(f"g{number}", "t", tuple(members))


def stored(folder, groups=64, at_once=16):
  """Milliseconds, wall and CPU, of a group's storing and of letting it go."""
  with tempfile.TemporaryDirectory(dir=folder) as path:
    images = images_lib.ImageStore(os.path.join(path, "images"))
    store = group_store.SqliteGroupStore(
      os.path.join(path, "queue.db"), images=images
    )
    batch = [group_of(images, number) for number in range(groups)]
    wall, cpu, remove_s = [], [], 0.0
    for number, group in enumerate(batch):
      w, c = time.perf_counter(), time.thread_time()
      store.append(number, group)
      wall.append(time.perf_counter() - w)
      cpu.append(time.thread_time() - c)
      if number % at_once == at_once - 1:
        w = time.perf_counter()
        store.remove(range(number + 1 - at_once, number + 1))
        remove_s += time.perf_counter() - w
    store.close()
  return {
    "append_ms": 1e3 * float(np.median(wall)),
    "append_cpu_ms": 1e3 * float(np.median(cpu)),
    "remove_ms": 1e3 * remove_s / groups,
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--episodes", type=int, default=1000)
  parser.add_argument("--turns", type=int, default=20)
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--store", default=".", metavar="FOLDER")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  turns = args.turns
  tokens = tc.PolicyModel(NullClient(), NullRenderer(), runs_inline=True)
  variants = {
    "loop": lambda i: bare(turns),
    "inline": lambda i: ours(turns, NullEnv, inline_model),
    "tasks": lambda i: ours(turns, TaskEnv, null_model),
    "threads": lambda i: ours(turns, ThreadEnv, inline_model),
    "tokens": lambda i: ours(turns, NullEnv, tokens, i),
  }
  upstream = upstream_episode()
  if upstream is not None:
    variants["upstream"] = lambda i: upstream(turns)
  results = {"episodes": args.episodes, "turns": turns, "us_per_turn": {}}
  for name, make in variants.items():
    cpu, wall = measure(make, args.episodes, turns, args.repeats)
    results["us_per_turn"][name] = {"cpu": cpu, "wall": wall}
  floor = results["us_per_turn"]["loop"]["cpu"]
  for row in results["us_per_turn"].values():
    row["overhead"] = row["cpu"] - floor
  for shape in ((50, 900, 64), (1000, 32, 16)):
    rate, length = conversion(*shape)
    results[f"conversion_{length}_tokens_per_s"] = rate
  results["durable_queue"] = stored(args.store)
  if args.json:
    args.json.write_text(json.dumps(results, indent=2) + "\n")
  print(f"{args.episodes} concurrent episodes of {turns} turns")
  print(
    f"{'':10} {'CPU us/turn':>12} {'wall':>8} {'over floor':>11} {'x floor':>8}"
  )
  for name, row in results["us_per_turn"].items():
    print(
      f"{name:10} {row['cpu']:12.1f} {row['wall']:8.1f}"
      f" {row['overhead']:11.1f} {row['cpu'] / floor:8.1f}"
    )
  for key, value in results.items():
    if key.startswith("conversion"):
      print(f"{key}: {value:,.0f}")
  for key, value in results["durable_queue"].items():
    print(f"durable queue, a group: {key} {value:.1f}")


if __name__ == "__main__":
  main()
