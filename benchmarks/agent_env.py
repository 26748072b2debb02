"""Measures a turn beside the model and the gym: agent, parser, environment.

Run: JAX_PLATFORMS=cpu python benchmarks/agent_env.py [turns]

Prints CPU microseconds a turn of a `ToolAgent` and a `CUAEnv` on a gym that
does nothing, at 224x160; the hash of the screenshot is part of the
environment's and is also shown alone.
"""

import asyncio
import sys
import time

import numpy as np
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments.gyms import base

PIXELS = np.zeros((160, 224, 3), np.uint8)


class NullGym:
  """Shows the same picture for ever."""

  async def start(self, task):
    return base.Observation(PIXELS)

  async def act(self, action):
    return base.Observation(PIXELS)

  async def evaluate(self):
    return base.Evaluation(0.0, False)

  async def close(self):
    pass


async def episode(turns: int) -> tuple[float, float]:
  """(agent, environment) CPU seconds a turn."""
  env = cua_env.CUAEnv(
    NullGym(),
    tools.ScreenshotTool(images.ImageStore()),
    base.Task("t", "null", "press the button"),
    action_parser="computer_use_compact",
    max_steps=turns + 1,
  )
  agent = agents.ToolAgent(
    prompts.get_prompt("desktop_compact"), env.action_parser
  )
  observation, info = await env.reset()
  agent.update_from_env(observation, 0.0, False, info)
  text = env.action_parser.format_gui_action(
    gui_action.GuiAction("click", x=100, y=50), 224, 160
  )
  of_agent = of_env = 0.0
  for _ in range(turns):
    t0 = time.process_time()
    agent.chat_completions  # pylint: disable=pointless-statement  # noqa: B018
    action = agent.update_from_model(text)
    t1 = time.process_time()
    result = await env.step(action)
    t2 = time.process_time()
    agent.update_from_env(*result)
    t3 = time.process_time()
    of_agent += t1 - t0 + t3 - t2
    of_env += t2 - t1
  return of_agent / turns, of_env / turns


def main():
  longest = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
  start = time.process_time()
  for _ in range(1000):
    images.hash_pixels(PIXELS)
  print(f"hash of a screenshot: {(time.process_time() - start) * 1e3:.0f} us")
  turns = 10
  while turns <= longest:
    agent, env = asyncio.run(episode(turns))
    print(
      f"{turns:6d} turns: agent {agent * 1e6:.0f} us a turn, environment"
      f" {env * 1e6:.0f} us a turn"
    )
    turns *= 10


if __name__ == "__main__":
  main()
