"""Collects rollouts from a rollout buffer into a file.

    python -m tunix.rl.multi_turn.trajectory_collector.agent_rollout \\
        --agent-rollout-buffer-url http://127.0.0.1:8889 \\
        --remote-engine-url http://127.0.0.1:8000/v1 \\
        --prompt-data tasks.jsonl --num-rollout 3 --save samples.jsonl

Each line is a sample with its rollout_id. The instance ids that were collected
lie beside, in <file>.state.json: a second start skips them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import inspect
import json
import pathlib
import sys
from typing import Any, Sequence

from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import arguments
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples


async def collect(args: Any, path: pathlib.Path) -> int:
  """Makes `args.num_rollout` rollouts; returns the samples written."""
  generate = samples.load_function(
      args.rollout_function_path, "--rollout-function-path"
  )
  buffer = samples.DataBuffer(args)
  state = path.with_name(path.name + ".state.json")
  first = 0
  if state.exists():
    kept = json.loads(state.read_text(encoding="utf-8"))
    buffer.load_state_dict(kept["buffer"])
    first = int(kept["next_rollout"])
  written = 0
  for rollout_id in range(first, args.num_rollout):
    found = generate(args, rollout_id, buffer)
    if inspect.isawaitable(found):
      found = await found
    with path.open("a", encoding="utf-8") as file:
      for sample in found:
        line = {**dataclasses.asdict(sample), "status": sample.status.value}
        file.write(json.dumps({"rollout_id": rollout_id, **line}) + "\n")
        written += 1
    kept = {"next_rollout": rollout_id + 1, "buffer": buffer.state_dict()}
    durable.write_text(state, json.dumps(kept))
  return written


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
      prog="agent_rollout", description=(__doc__ or "").partition("\n")[0]
  )
  arguments.add_arguments(out)
  out.add_argument("--save", required=True, metavar="FILE", type=pathlib.Path)
  return out


def main(argv: Sequence[str] | None = None) -> int:
  args = parser().parse_args(argv)
  try:
    written = asyncio.run(collect(args, args.save))
  except (http.CallError, ValueError, TimeoutError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    return 130
  print(f"{written} samples in {args.save}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
