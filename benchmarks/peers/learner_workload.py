"""The two sides of `bench_learner --beside torch`, each a process of its own.

A side makes the same policy, episodes and packed batch from the same seed,
then makes one update for each line it reads, and prints what it took. Peak
memory is thereby a side's own; and sides take turns on the same processor.

Episodes are rows of `row_length` tokens with `images` screenshots each, in
groups of at most four with alternating rewards. A text policy's have none,
and a single turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
import types
from typing import Any, Callable

import jax
import numpy as np
from peers import policies
from tunix.rl.multi_turn.core import images as image_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.planning import planned_run
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import lora_files

GROUP = 4
SAMPLED = 24  # Tokens a turn.


class Workload:
  """A learner, and groups of which every update is made."""

  def __init__(self, args: argparse.Namespace):
    changes = {"compute_dtype": args.dtype}
    if args.remat:
      changes["remat"] = args.remat
    self.model, processor = policies.make_policy(args.size, **changes)
    if args.lora:
      lora.add(self.model, args.lora)
    self.store = image_lib.ImageStore()
    self.learner = learner_lib.Learner(
      self.model,
      processor,
      self.store,
      learner_lib.LearnerConfig(
        rows=args.rows,
        row_length=args.row_length,
        learning_rate=1e-5,
        weight_decay=0.0,
      ),
    )
    self.groups = _groups(args, self.model.config, processor, self.store)
    self._record_scores()

  def _record_scores(self) -> None:
    """Gives sampled tokens the log-probs that the first weights give them, so
    that the first update's ratios are 1."""
    batch = self.batch()
    scores, mask = self.scores(batch), np.asarray(batch.mask)
    tokens, at = np.asarray(batch.inputs.tokens), np.asarray(batch.index)[mask]
    rows, places = np.divmod(at, tokens.shape[1])
    for group in self.groups:
      for member in group.trajectories:
        for i, sequence in enumerate(member.sequences):
          (row,) = np.flatnonzero((tokens == sequence.tokens[:-1]).all(axis=1))
          logprobs = np.zeros(len(sequence.tokens), np.float32)
          logprobs[places[rows == row] + 1] = scores[mask][rows == row]
          member.sequences[i] = dataclasses.replace(sequence, logprobs=logprobs)

  def scores(self, batch: Any) -> np.ndarray:
    """Returns the log-probs of a batch's targets, padding included."""
    learner = self.learner
    params, frozen = learner._params, learner._frozen  # pylint: disable=protected-access
    return np.asarray(learner._programs.score(params, frozen, batch))  # pylint: disable=protected-access

  def flops(self, batch: Any) -> float:
    """Returns the products of an update without recomputation, two a term."""
    inputs = batch.inputs
    rows, length = inputs.tokens.shape
    patches = int((np.asarray(inputs.patch_segments) >= 0).sum())
    images = sum(
      len(s.images)
      for g in self.groups
      for m in g.trajectories
      for s in m.sequences
    )
    return 3 * planned_run.forward_flops(
      self.model,
      rows * length,
      length / 2,
      int(np.sum(batch.mask)),
      patches,
      patches // max(1, images),
    )

  def batch(self) -> Any:
    """Returns the single packed batch of an update."""
    sequences = [
      s for g in self.groups for m in g.trajectories for s in m.sequences
    ]
    examples = example_lib.from_sequences(sequences)
    # As the learner's: a reward less the mean, over the standard deviation.
    rewards = np.arange(len(self.groups[0].trajectories)) % 2
    scale = 0.5 / rewards.std(ddof=1)
    examples = [
      dataclasses.replace(
        example,
        advantages=np.where(
          example.sequence.loss_mask, scale * (-1.0) ** (i + 1), 0.0
        ).astype(np.float32),
      )
      for i, example in enumerate(examples)
    ]
    tokens = sum(s.num_sampled for s in sequences)
    packed = self.learner._minibatches.pack(  # pylint: disable=protected-access
      examples, np.full(len(examples), 1 / tokens)
    )
    (batch,) = packed.batches
    return batch


def _groups(args, config, processor, store) -> list[Any]:
  rng = np.random.default_rng(0)
  width, height = args.width, args.height
  text = args.size == policies.TEXT
  count = 0 if text else processor.num_image_tokens(width, height)
  turns_ = 1 if text else args.images
  sampled = args.row_length // 2 if text else SAMPLED
  size = min(GROUP, args.rows)
  # The last sampled token predicts nothing and takes no place in a row.
  words = args.row_length + 1 - turns_ * (count + sampled)
  if words < turns_:
    raise SystemExit(
      f"--row-length {args.row_length} holds no {turns_} turns of"
      f" {count + sampled} tokens; raise it or lower --images"
    )
  lengths = np.full(turns_, words // turns_)
  lengths[: words % turns_] += 1

  def member(number: int) -> Any:
    tokens, mask, turns, spans, at = [], [], [], [], 0
    for turn, length in enumerate(lengths):
      if count:
        pixels = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        image = store.put(pixels.repeat(8, axis=0).repeat(8, axis=1))
        spans.append(trajectory.ImageSpan(image, at, count))
      new = np.concatenate(
        [
          np.full(count, config.image_token_id if count else 0),
          rng.integers(300, 1300, length + sampled),
        ]
      )
      tokens.append(new)
      mask.append(np.arange(len(new)) >= count + length)
      turns.append(np.full(len(new), turn))
      at += len(new)
    mask = np.concatenate(mask)
    sequence = trajectory.TokenSequence(
      np.concatenate(tokens).astype(np.int32),
      mask,
      np.where(mask, -7.0, 0),
      np.where(mask, 0, -1),
      np.concatenate(turns),
      tuple(spans),
    )
    return trajectory.Trajectory(
      steps=[trajectory.Step() for _ in lengths],
      reward=float(number % 2),
      status=trajectory.TrajectoryStatus.SUCCEEDED,
      sequences=[sequence],
    )

  return [
    trajectory.TrajectoryGroup(
      f"g{i}", "t", tuple(member(j) for j in range(size))
    )
    for i in range(-(-args.rows // size))
  ]


# --- sides -------------------------------------------------------------------


def _memory() -> dict[str, float]:
  """MB resident now, and at most so far."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  read = lambda key: next(
    int(line.split()[1]) / 1024 for line in lines if line.startswith(key)
  )
  return {"rss": read("VmRSS"), "peak": read("VmHWM")}


_Side = tuple[Callable[[], Any], Any, dict[str, Any], Callable[[], int]]
"""An update, log-probs, facts, and the most bytes of the device so far."""


def _ours(load: Workload) -> _Side:
  batch = load.batch()
  learner = load.learner
  scores = load.scores(batch)
  about = {"parameters": sum(x.size for x in learner.parameters().values())}
  return (
    lambda: learner.update(load.groups),
    scores[np.asarray(batch.mask)],
    about,
    _device_peak,
  )


def _device_peak() -> int:
  """Most bytes of the first device so far; 0 where it does not tell."""
  stats = jax.local_devices()[0].memory_stats() or {}
  return stats.get("peak_bytes_in_use", 0)


_BATCH = ("mask", "advantages", "weights", "index", "targets")
_INPUTS = ("tokens", "vision_index", "positions", "patch_segments", "patches",
           "patch_positions")  # fmt: skip


def save(load: Workload, folder: pathlib.Path) -> None:
  """Writes what the side torch needs: weights, the packed batch, its FLOPs."""
  batch = load.batch()
  with contextlib.ExitStack() as stack:
    if lora.has_adapter(load.model):
      lora_files.save(folder / "adapter", load.model)
      stack.enter_context(lora.disabled(load.model))
    dtype = load.model.config.compute_dtype
    checkpoint.save_policy(folder / "policy", load.model, dtype=dtype)
  np.savez(
    folder / "batch.npz",
    flops=load.flops(batch),
    **{name: np.asarray(getattr(batch, name)) for name in _BATCH},
    **{name: np.asarray(getattr(batch.inputs, name)) for name in _INPUTS},
  )


def _torch(args: argparse.Namespace, folder: pathlib.Path) -> tuple[Any, ...]:
  """Returns the side, and an update's FLOPs."""
  from peers import learner_torch  # pylint: disable=g-import-not-at-top

  with np.load(folder / "batch.npz") as arrays:
    flops = float(arrays["flops"])
    batch = types.SimpleNamespace(
      **{name: arrays[name] for name in _BATCH},
      inputs=types.SimpleNamespace(**{name: arrays[name] for name in _INPUTS}),
    )
  config = policies.config_of(args.size)
  trainer = learner_torch.Trainer(
    folder / "policy",
    getattr(config, "vision", None),
    1e-5,
    args.dtype,
    args.remat or config.remat,
  )
  scores = trainer.logprobs(batch)
  about = {"version": trainer.version}
  run = lambda: trainer.update(batch)
  return run, scores, about, trainer.device_peak, flops


def _start(args: argparse.Namespace) -> tuple[Any, ...]:
  """Returns a side, an update's FLOPs, and the learner of ours."""
  folder = args.handover
  if args.side == "torch" and folder:
    return *_torch(args, folder), None
  load = Workload(args)
  if args.side == "torch":
    with tempfile.TemporaryDirectory() as directory:
      save(load, pathlib.Path(directory))
      del load
      return *_torch(args, pathlib.Path(directory)), None
  if folder:
    folder.mkdir(parents=True, exist_ok=True)
    save(load, folder)
  return *_ours(load), load.flops(load.batch()), load.learner


def serve(args: argparse.Namespace) -> None:
  """A side: prints its log-probs, then an update's cost for each line read."""
  run, scores, about, device_peak, flops, learner = _start(args)
  before = _memory()
  started = time.perf_counter()
  readings = run()
  about |= {
    "first_update_s": time.perf_counter() - started,
    "grad_norm": readings["grad_norm"],
    "scores": np.float64(scores).tolist(),
  }
  print(json.dumps(about), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    cost = {"wall": wall, "cpu": cpu} | _memory() | {"before": before["rss"]}
    cost["device_peak_mb"] = device_peak() / 2**20
    cost["model_gflop"] = flops / 1e9
    if args.side == "ours":
      cost |= _analysis(learner)
    print(json.dumps(cost), flush=True)
  if args.profile and args.side == "ours":
    with jax.profiler.trace(str(args.profile)):
      run()


def _analysis(learner: Any) -> dict[str, float]:
  (compiled,) = learner._programs.accumulate.compiled  # pylint: disable=protected-access
  memory = compiled.memory_analysis()
  return {
    # Of products by libraries a GPU's compiler knows no count.
    "gflop": compiled.cost_analysis()["flops"] / 1e9,
    "temporary_mb": memory.temp_size_in_bytes / 2**20,
  }
