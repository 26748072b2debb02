"""Plays our taskset by the package verifiers 0.4, and prints what came of it.

    python verifiers_taskset_player.py '{"url", "model", "args", "sampling", …}'

Runs in the environment that `make verifiers4` makes.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils import loaders


async def play(request, args, agent):
  """Plays the rows once; a list of what came of each."""
  env = loaders.load_environment(
    loaders.resolve_env_config(
      {
        "taskset": {"id": "tunix-multi-turn", **args},
        "agent": {"runtime": {"type": "subprocess"}, **agent},
      }
    )
  )
  context = vf.ModelContext(
    request["model"],
    vf.EvalClientConfig(base_url=request["url"], api_key_var="PLAYER_API_KEY"),
    vf.SamplingConfig(**request["sampling"]),
  )
  tasks = list(env.taskset)
  result = []
  async with env.serving():
    for place in request["rows"]:
      episode = await env.run_episode(tasks[place], context)
      (trace,) = episode.traces
      result.append(
        {
          "ok": episode.ok,
          "errors": [error.message for error in trace.errors],
          "reward": trace.reward,
          "metrics": trace.metrics,
          "stop": trace.stop_condition,
          "prompt": trace.task.data.prompt,
          "messages": [
            node.message.model_dump(mode="json", exclude_none=True)
            for node in trace.nodes
          ],
        }
      )
  return result


async def main(request):
  """One start of the package for all of `runs`: what each does otherwise."""
  os.environ["PLAYER_API_KEY"] = request.get("key", "none")
  results = []
  for run in request["runs"]:
    args = dict(request["args"])
    args["settings"] = {**args["settings"], **run.get("settings", {})}
    results += await play(request, args, run.get("agent", {}))
  print(json.dumps(results))


if __name__ == "__main__":
  asyncio.run(main(json.loads(sys.argv[1])))
