"""Plays our environment by the package verifiers, and prints what it found.

    python verifiers_player.py '{"url", "model", "args", "sampling", …}'

Runs in the environment that `make verifiers` makes.
"""

import asyncio
import json
import sys

import openai
import verifiers as vf


def refusals(arguments):
  """The error of each set of arguments."""
  lines = []
  for one in arguments:
    try:
      vf.load_environment("tunix-multi-turn", **one)
    except Exception as error:  # pylint: disable=broad-except
      lines.append(str(error).splitlines()[-1])
    else:
      lines.append("")
  return lines


async def main(asked):
  if "refused" in asked:
    print(json.dumps(refusals(asked["refused"])))
    return
  env = vf.load_environment("tunix-multi-turn", **asked["args"])
  client = vf.OpenAIChatCompletionsClient(
    openai.AsyncOpenAI(
      base_url=asked["url"], api_key=asked.get("key", "none"), max_retries=0
    )
  )
  found = []
  if asked.get("kill"):
    process = env._host.worker()._process
    process.kill()
    process.wait(10)
  for split, index in asked["rows"]:
    rows = env.get_dataset() if split == "train" else env.get_eval_dataset()
    out = await env.run_rollout(
      dict(rows[index]),
      client,
      asked["model"],
      asked["sampling"],
      state_columns=["trajectory"],
    )
    found.append(
      {
        "reward": out["reward"],
        "metrics": out.get("metrics"),
        "error": str(out["error"]) if out.get("error") else None,
        "stop": out.get("stop_condition"),
        "prompt": plain(out["prompt"]),
        "completion": plain(out["completion"]),
        "turns": [
          (plain(step["prompt"]), plain(step["completion"]))
          for step in out["trajectory"]
        ],
        "info": out.get("info"),
      }
    )
  env._host.end()
  print(json.dumps(found))


def plain(messages):
  return [
    m if isinstance(m, dict) else m.model_dump(mode="json", exclude_none=True)
    for m in messages
  ]


if __name__ == "__main__":
  asyncio.run(main(json.loads(sys.argv[1])))
