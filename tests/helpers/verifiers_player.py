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


async def play(request):
  """Plays the rows of one environment; a list of what came of each."""
  env = vf.load_environment("tunix-multi-turn", **request["args"])
  client = vf.OpenAIChatCompletionsClient(
    openai.AsyncOpenAI(
      base_url=request["url"], api_key=request.get("key", "none"), max_retries=0
    )
  )
  result = []
  if request.get("kill"):
    process = env._host.worker()._process
    process.kill()
    process.wait(10)
  for split, index in request["rows"]:
    rows = env.get_dataset() if split == "train" else env.get_eval_dataset()
    out = await env.run_rollout(
      dict(rows[index]),
      client,
      request["model"],
      request["sampling"],
      state_columns=["trajectory"],
    )
    result.append(
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
  return result


async def main(request):
  """One start of the package for all of `runs`: what each does otherwise."""
  played = [await play({**request, **run}) for run in request["runs"]]
  refused = refusals(request["refused"])
  print(json.dumps({"played": played, "refused": refused}))


def plain(messages):
  return [
    m if isinstance(m, dict) else m.model_dump(mode="json", exclude_none=True)
    for m in messages
  ]


if __name__ == "__main__":
  asyncio.run(main(json.loads(sys.argv[1])))
