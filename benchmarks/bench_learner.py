"""Seconds of one GRPO update, and what they are spent on.

Makes groups as the quickstart does (each turn a prompt, one screenshot and a
few sampled tokens; a group's first turn is shared), updates TinyVL on them,
and compares the arithmetic done with this machine's matmul speed. CPU seconds
are printed beside wall seconds: on a shared machine only they repeat.

  python benchmarks/bench_learner.py --groups 16 --members 8 --turns 2
  python benchmarks/bench_learner.py --row-length 288 --rows 14 --tree false

With `--history`, a turn's prompt holds the turns before it: `full` is one
sequence an episode, `turns` one a turn (as servers record agents that keep
their own history), `window` one for each rewrite of a history that keeps the
newest `--window` screenshots.

  python benchmarks/bench_learner.py --groups 1 --turns 12 --history turns \
      --rows 1 --row-length 4096 --tree false

With `--beside torch` it trains a Qwen3-VL of a CPU's size in turns with
transformers' on torch, eager, on the same packed batch; each side is a process
of its own, both find the same log-probs before the clock starts.

  python benchmarks/bench_learner.py --beside torch --size tiny
  python benchmarks/bench_learner.py --beside torch --size small

A GPU holds one side of `--size 2b --dtype bfloat16` at a time: `--only ours`,
then `--only torch`, with the same `--handover FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from peers import learner_workload
from peers import policies
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

SIDES = ("ours", "torch")
HISTORIES = ("none", "full", "turns", "window")
NOTE = 6  # Tokens in place of a screenshot that a window left.
TOLERANCE = 1e-4  # Nats, of log-probs of both sides.


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--groups", type=int, default=16)
  parser.add_argument("--members", type=int, default=8, help="of a group")
  parser.add_argument("--turns", type=int, default=2)
  parser.add_argument("--text", type=int, default=60, help="prompt tokens")
  parser.add_argument("--sampled", type=int, default=9, help="a turn")
  parser.add_argument("--width", type=int, default=224, help="px")
  parser.add_argument("--height", type=int, default=160, help="px")
  parser.add_argument("--rows", type=int, default=8)
  parser.add_argument("--row-length", type=int, default=None)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--policy", default="tiny", help="size of TinyVL")
  parser.add_argument("--tree", default="auto", help="learner.tree")
  parser.add_argument("--history", choices=HISTORIES, default="none")
  parser.add_argument("--window", type=int, default=3, help="screenshots")
  parser.add_argument("--bridge", type=int, default=12, help="tokens a turn")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  parser.add_argument("--updates", type=int, default=4)
  torch_options = parser.add_argument_group("--beside torch")
  torch_options.add_argument("--beside", choices=("torch",))
  torch_options.add_argument("--size", choices=policies.SIZES)
  torch_options.add_argument("--lora", type=int, default=0, help="rank")
  torch_options.add_argument("--images", type=int, default=4, help="a row")
  torch_options.add_argument("--rounds", type=int, default=5)
  torch_options.add_argument("--remat", default="", help="none, dots or block")
  torch_options.add_argument("--only", choices=SIDES, help="a side by itself")
  torch_options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
  torch_options.add_argument(
    "--handover",
    type=pathlib.Path,
    metavar="FOLDER",
    help="--only ours leaves its policy and batch there for --only torch",
  )
  torch_options.add_argument(
    "--profile",
    type=pathlib.Path,
    metavar="FOLDER",
    help="trace one more update of ours; gpu/kernels.py reads it",
  )
  args = parser.parse_args()
  if args.beside and not args.size:
    parser.error("--beside torch needs --size")
  group = min(args.rows, learner_workload.GROUP)
  if args.beside and (group < 2 or args.rows % group):
    parser.error(
      f"--rows {args.rows}: episodes are rows in groups of"
      f" {learner_workload.GROUP}; give a multiple of it, or 2"
    )
  if args.row_length is None:
    args.row_length = 784 if args.beside else 512
  return args


class Episodes:
  """Made-up groups of the asked-for sizes."""

  def __init__(self, args, model, processor, store):
    self._args, self._processor, self._store = args, processor, store
    self._rng = np.random.default_rng(0)
    self._placeholder = model.config.image_token_id
    banned = set(model.config.banned_token_ids)
    self._ids = np.array(
      [i for i in range(model.config.vocab_size) if i not in banned]
    )
    self._note = self._text(NOTE)

  def _text(self, length):
    return self._rng.choice(self._ids, length)

  def _image(self):
    shape = (self._args.height // 8 + 1, self._args.width // 8 + 1, 3)
    small = self._rng.integers(0, 256, shape, dtype=np.uint8)
    pixels = small.repeat(8, axis=0).repeat(8, axis=1)
    return self._store.put(pixels[: self._args.height, : self._args.width])

  def _sequence(self, parts, turn, version):
    """Of tokens, screenshots, and tokens in a tuple, which are sampled."""
    tokens, mask, spans = [], [], []
    for part in parts:
      sampled = isinstance(part, tuple)
      if isinstance(part, trajectory.ImageRef):
        count = self._processor.num_image_tokens(part.width, part.height)
        spans.append(trajectory.ImageSpan(part, len(tokens), count))
        part = [self._placeholder] * count
      part = part[0] if sampled else part
      tokens += list(part)
      mask += [sampled] * len(part)
    mask = np.array(mask)
    return trajectory.TokenSequence(
      tokens,
      mask,
      np.where(mask, -7.0, 0),
      np.where(mask, version, -1),
      np.full(len(tokens), turn),
      tuple(spans),
    )

  def _member(self, before, after, image, version):
    """Sequences of an episode; its first screenshot is the group's."""
    args = self._args
    action = lambda: self._text(args.sampled)
    if args.history == "none":
      prompts = [[before, image, after]] + [
        [before, self._image(), self._text(len(after))]
        for _ in range(1, args.turns)
      ]
      return [
        self._sequence([*prompt, (action(),)], turn, version)
        for turn, prompt in enumerate(prompts)
      ]
    turns = [(image, after, action())] + [
      (self._image(), self._text(args.bridge), action())
      for _ in range(1, args.turns)
    ]
    # 1. Each sequence samples the actions of some turns, and its prompt shows
    #    the screenshots from a turn on.
    spans = [(turn, turn + 1, 0) for turn in range(args.turns)]
    if args.history == "full":
      spans = [(0, args.turns, 0)]
    elif args.history == "window":
      first = min(args.window, args.turns)
      spans = [(0, first, 0)] + [
        (turn, turn + 1, turn + 1 - args.window)
        for turn in range(first, args.turns)
      ]
    sequences = []
    for start, end, shown in spans:
      parts = [before]
      for turn, (screen, text, tokens) in enumerate(turns[:end]):
        parts += [screen if turn >= shown else self._note, text]
        parts.append((tokens,) if turn >= start else tokens)
      sequences.append(self._sequence(parts, start, version))
    return sequences

  def groups(self, version):
    out = []
    half = self._args.text // 2
    for number in range(self._args.groups):
      before, after = self._text(half), self._text(self._args.text - half)
      image = self._image()
      members = [
        trajectory.Trajectory(
          steps=[trajectory.Step() for _ in range(self._args.turns)],
          reward=float(member % 2),
          status=trajectory.TrajectoryStatus.SUCCEEDED,
          sequences=self._member(before, after, image, version),
        )
        for member in range(self._args.members)
      ]
      out.append(trajectory.TrajectoryGroup(f"g{number}", "t", tuple(members)))
    return out


def matmul_peak(dtype: str) -> float:
  """Best of several 1024^3 products with float32 results, in FLOP/s."""
  n = 1024
  a = jax.random.normal(jax.random.key(0), (n, n), jnp.dtype(dtype))
  product = jax.jit(
    lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32)
  )
  product(a).block_until_ready()
  best = float("inf")
  for _ in range(20):
    started = time.perf_counter()
    product(a).block_until_ready()
    best = min(best, time.perf_counter() - started)
  return 2 * n**3 / best


# --- beside torch ----------------------------------------------------------


class Side:
  """A process that prints what it is about, then works for each line it reads
  and prints what that took."""

  def __init__(self, name: str, argv: Sequence[Any], env: dict[str, str]):
    self.name = name
    self._process = subprocess.Popen(
      argv,
      env=os.environ | env,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    assert self._process.stdin and self._process.stdout
    self._in, self._out = self._process.stdin, self._process.stdout
    self.about = self._read()
    self.rounds: list[dict[str, Any]] = []

  def _read(self) -> dict[str, Any]:
    line = self._out.readline()
    if not line:
      raise SystemExit(f"the side {self.name} ended: see its output above")
    return json.loads(line)

  def round(self, line: object = "") -> dict[str, Any]:
    self._in.write(f"{line}\n")
    self._in.flush()
    self.rounds.append(self._read())
    return self.rounds[-1]

  def median(self, key: str) -> float:
    return statistics.median(round_[key] for round_ in self.rounds)

  def end(self) -> None:
    self._in.close()
    self._process.wait(120)


def beside_torch(args: argparse.Namespace) -> None:
  # JAX would take the GPU's memory from torch: beside it, it runs on a CPU.
  envs = {"torch": {"JAX_PLATFORMS": "cpu"}}
  sides = [
    Side(name, [sys.executable, *sys.argv, "--side", name], envs.get(name, {}))
    for name in SIDES
    if args.only in (None, name)
  ]
  report: dict[str, Any] = {"cores": os.cpu_count(), "size": args.size}
  if len(sides) == 2:
    scores = [np.array(side.about["scores"]) for side in sides]
    gap = float(np.abs(scores[0] - scores[1]).max())
    if args.dtype == "float32" and gap > TOLERANCE:
      raise SystemExit(f"log-probs differ by {gap:.1e}: no comparison")
    report["logprob_gap"] = gap
    norms = [side.about["grad_norm"] for side in sides]
    report["grad_norm_gap"] = abs(norms[0] / norms[1] - 1)
  for _ in range(args.rounds):
    for side in sides:
      side.round()
  for side in sides:
    side.end()
  tokens = args.rows * args.row_length
  for side in sides:
    about = dict(side.about)
    if not args.only:  # With --only, gpu/page.py compares the two files.
      del about["scores"]
    report[side.name] = about | {
      "wall_s": round(side.median("wall"), 3),
      "cpu_s": round(side.median("cpu"), 3),
      "tokens_per_s": round(tokens / side.median("wall")),
      "tokens_per_cpu_s": round(tokens / side.median("cpu")),
      "memory_before_mb": round(side.median("before")),
      "peak_mb": round(max(r["peak"] for r in side.rounds)),
      "model_gflop": round(side.median("model_gflop"), 1),
      "device_peak_mb": round(max(r["device_peak_mb"] for r in side.rounds)),
    }
    if side.name == "ours":
      peak = matmul_peak(args.dtype)
      flops = side.median("gflop") * 1e9
      report["ours"] |= {
        "gflop": round(flops / 1e9, 1),
        "temporary_mb": round(side.median("temporary_mb")),
        "matmul_gflops": round(peak / 1e9, 1),
        "share_of_matmul_peak": round(flops / side.median("wall") / peak, 3),
      }
  if len(sides) == 2:
    jax_side, torch = sides
    for key in ("wall", "cpu"):
      report[f"{key}_ratio"] = round(
        statistics.median(
          t[key] / o[key] for o, t in zip(jax_side.rounds, torch.rounds)
        ),
        2,
      )
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")
  for side in sides:
    report[side.name].pop("scores", None)
  print(json.dumps(report, indent=2))


def main() -> None:
  args = parse_args()
  if args.side:
    learner_workload.serve(args)
    return
  if args.beside:
    beside_torch(args)
    return
  model, processor, _ = checkpoint.create_policy(
    args.policy, compute_dtype=args.dtype
  )
  store = image_lib.ImageStore()
  learner = learner_lib.Learner(
    model,
    processor,
    store,
    learner_lib.LearnerConfig(
      rows=args.rows, row_length=args.row_length, tree=args.tree
    ),
  )
  episodes = Episodes(args, model, processor, store)
  walls, cpus, metrics = [], [], {}
  for update in range(args.updates + 1):
    groups = episodes.groups(learner.version)
    wall, cpu = time.perf_counter(), time.process_time()
    metrics = learner.update(groups)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if update == 0:
      print(f"first update, with compiling: {wall:.1f} s, {cpu:.1f} CPU s")
    else:
      walls.append(wall)
      cpus.append(cpu)
  (compiled,) = learner._programs.accumulate.compiled  # pylint: disable=protected-access
  flops = compiled.cost_analysis()["flops"] * metrics["micro_batches"]
  peak = matmul_peak("float32")
  wall, cpu = statistics.median(walls), statistics.median(cpus)
  print(
    json.dumps(
      {
        "cores": os.cpu_count(),
        "parameters": sum(x.size for x in learner.parameters().values()),
        "episodes": args.groups * args.members,
        "tokens": metrics["tokens"],
        "row_tokens": metrics["tokens"] - metrics["shared_tokens"],
        "trained_over_computed": round(
          metrics["tokens"] / (metrics["tokens"] - metrics["shared_tokens"]), 2
        ),
        "temporary_mb": round(
          compiled.memory_analysis().temp_size_in_bytes / 1e6
        ),
        "micro_batches": metrics["micro_batches"],
        "packing_efficiency": round(metrics["packing_efficiency"], 3),
        "patch_efficiency": round(metrics["patch_efficiency"], 3),
        "update_wall_s": round(wall, 3),
        "update_cpu_s": round(cpu, 3),
        "pack_wall_s": round(metrics["seconds_pack"], 3),
        "tokens_per_wall_s": round(metrics["tokens"] / wall),
        "tokens_per_cpu_s": round(metrics["tokens"] / cpu),
        "update_gflop": round(flops / 1e9, 1),
        "gflops": round(flops / wall / 1e9, 1),
        "matmul_gflops_f32": round(peak / 1e9, 1),
        "share_of_matmul_peak": round(flops / wall / peak, 3),
        "compiles": learner.compiles,
      },
      indent=2,
    )
  )


if __name__ == "__main__":
  main()
