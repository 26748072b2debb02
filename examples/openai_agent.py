"""An agent that knows the policy as an OpenAI-compatible server only.

    python -m tunix.rl.multi_turn.serving tiny_vl --screen 128x96
    python examples/openai_agent.py --gym desktop --episodes 8

It plays episodes on a computer, embedded (`desktop`) or a real browser
(`miniwob`), with the `openai` package and nothing else of the policy. Each
episode is a session of the server, which keeps what was sampled in it; at the
end the script gives the session its reward, and with --out fetches it: one
training sequence a line, token by token, with log-probs, the policy's versions
and the images by their SHA-256.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
from typing import Any, Sequence

from cua_gyms import miniwob
import httpx
import openai
from PIL import Image
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.tools import screenshot

# What the shipped policy has learned to read and to write.
PARSER, PROMPT = "computer_use_compact", "desktop_compact"
TASKS = {
  "desktop": ("click-button", "close-dialog", "enter-text", "open-icon"),
  "miniwob": ("click-test-2", "click-dialog", "focus-text"),
}
TIMEOUT_S = 60.0


class Computer:
  """Computer that the agent acts on: screenshots out, text in.

  Attributes:
    reward: Reward of the episode, once it has ended.
  """

  def __init__(self, gym: str, family: str, index: int, seed: int):
    if gym == "desktop":
      machine: Any = desktop.DesktopGym(width=128, height=96)
      task = desktop.DesktopTasks((family,)).train_task(family, index, seed)
    else:
      machine = miniwob.MiniWobGym()
      task = miniwob.MiniWobTasks((family,)).train_task(family, index, seed)
    self.reward = 0.0
    self._images = images.ImageStore()
    self._parser = tool_parser.make_tool_parser(PARSER)
    self._env = cua_env.CUAEnv(
      machine,
      screenshot.ScreenshotTool(self._images),
      task,
      action_parser=self._parser,
      max_steps=task.max_turns or 8,
      reward="success",
    )

  async def reset(self) -> dict[str, Any]:
    observation, _ = await self._env.reset()
    return self._message(observation)

  async def act(self, text: str) -> dict[str, Any] | None:
    """The next user message; None once the episode has ended."""
    calls = self._parser.parse_result(text).calls
    observation, reward, is_last, _ = await self._env.step(list(calls) or text)
    self.reward += reward
    return None if is_last else self._message(observation)

  async def close(self) -> None:
    await self._env.close()

  def _message(self, observation: dict[str, Any]) -> dict[str, Any]:
    out = io.BytesIO()
    pixels = self._images.get(observation["screenshot"])
    Image.fromarray(pixels).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    texts = [observation.get(k) for k in ("instruction", "text")]
    text = "\n".join(filter(None, texts))
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    if text:
      parts.append({"type": "text", "text": text})
    return {"role": "user", "content": parts}


async def play(
  client: openai.AsyncOpenAI, model: str, computer: Any, **options: Any
) -> None:
  """One episode. A run trains on it with rollout.agent=openai_agent:play."""
  parser = tool_parser.make_tool_parser(PARSER)
  system = prompts.insert_tools(
    prompts.get_prompt(PROMPT), parser.get_tool_prompt(None)
  )
  messages = [{"role": "system", "content": system}]
  try:
    messages.append(await computer.reset())
    while True:
      answer = await client.chat.completions.create(
        model=model, messages=messages, **options
      )
      text = answer.choices[0].message.content or ""
      message = await computer.act(text)
      if message is None:
        return
      messages += [{"role": "assistant", "content": text}, message]
  finally:
    await computer.close()


async def episode(
  http: httpx.AsyncClient, model: str, computer: Computer, **options: Any
) -> tuple[float, dict[str, Any]]:
  """An episode in a session of its own: (reward, what was sampled in it)."""
  session = await _post(http, "/rl/start_session", {})
  async with openai.AsyncOpenAI(
    base_url=session["base_url"], api_key=session["api_key"], timeout=TIMEOUT_S
  ) as client:
    await play(client, model, computer, **options)
  reward = computer.reward
  name = session["session_id"]
  path = f"/sessions/{name}/rl"
  await _post(http, f"{path}/set_reward", {"reward": reward})
  await _post(http, f"{path}/end_session", {})
  exported = await _post(
    http,
    "/export_trajectories",
    {"session_id": name, "style": "concat", "drop": True},
  )
  return reward, exported["interactions"]


async def _post(
  http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> dict[str, Any]:
  answer = await http.post(path, json=body)
  if answer.is_error:
    raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text}")
  return answer.json()


async def run(args: argparse.Namespace) -> list[float]:
  """All episodes; returns their rewards."""
  tasks = args.tasks.split(",") if args.tasks else TASKS[args.gym]
  headers = {"Authorization": f"Bearer {args.token}"} if args.token else {}
  gate = asyncio.Semaphore(args.at_once)
  lines: list[str] = []

  async def one(number: int) -> float:
    index, family = divmod(number, len(tasks))
    async with gate:
      computer = Computer(args.gym, tasks[family], index, args.seed)
      reward, sequences = await episode(
        http,
        model,
        computer,
        max_tokens=32,
        temperature=args.temperature,
        seed=args.seed * 1000 + number,
      )
    print(f"episode {number} {tasks[family]}: reward {reward:g}", flush=True)
    for sequence in sequences.values():
      line = {"episode": number, "task": tasks[family], **sequence}
      lines.append(json.dumps(line))
    return reward

  async with httpx.AsyncClient(
    base_url=args.server, headers=headers, timeout=TIMEOUT_S
  ) as http:
    served = await http.get("/v1/models")
    served.raise_for_status()
    model = args.model or served.json()["data"][0]["id"]
    try:
      rewards = await asyncio.gather(*map(one, range(args.episodes)))
    finally:
      if args.gym == "miniwob":
        await miniwob.shared_browser().close()
  if args.out:
    with open(args.out, "w", encoding="utf-8") as file:
      file.writelines(f"{line}\n" for line in lines)
  print(f"mean reward {sum(rewards) / len(rewards):.3f}")
  return list(rewards)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = parser.add_argument
  add("--server", default="http://127.0.0.1:8000", help="without /v1")
  add("--token", default="", help="that the server asks for")
  add("--model", default="", help="its name (what the server serves)")
  add("--gym", default="desktop", choices=sorted(TASKS))
  add("--tasks", default="", help="families, with commas (the usual ones)")
  add("--episodes", type=int, default=8)
  add("--at-once", type=int, default=4)
  add("--temperature", type=float, default=1.0)
  add("--seed", type=int, default=0)
  add("--out", default="", help="JSON lines of what was sampled")
  args = parser.parse_args(argv)
  if args.episodes < 1 or args.at_once < 1:
    parser.error("--episodes and --at-once must be >= 1")
  try:
    asyncio.run(run(args))
  except (httpx.HTTPError, openai.OpenAIError, RuntimeError) as error:
    print(f"error: {args.server}: {error!r}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
