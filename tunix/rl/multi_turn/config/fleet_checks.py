"""Finds settings that collectors in other processes do not go together with."""

from __future__ import annotations

from typing import Iterator

from tunix.rl.multi_turn.config import train_config

_HERE = ("127.0.0.1", "localhost", "::1")


def problems(c: train_config.TrainConfig) -> Iterator[str]:
  """The contradictions of the section `fleet` with others."""
  if not c.fleet.away:
    return
  fleet = f"fleet.via={c.fleet.via}"
  if getattr(c, "evaluate", None) is not None:
    yield (
      f"{fleet}: an evaluation plays its episodes in its own process; leave"
      " it out"
    )
    return
  if c.rollout.via not in ("in_process", "proxy"):
    yield (
      f"{fleet}: collectors ask the engine of the run's process, and"
      f" rollout.via={c.rollout.via} has none there; set"
      " rollout.via=in_process, or fleet.via=local"
    )
  if c.rollout.agent == "run_service":
    yield (
      f"{fleet} with rollout.agent=run_service: that service plays the"
      " episodes elsewhere already; set fleet.via=local"
    )
  if c.engine.lockstep == "true":
    yield (
      f"engine.lockstep=true waits for sessions in the order in which they"
      f" open, which {fleet} does not tell the engine; set"
      " engine.lockstep=auto (equal seeds still give equal tokens, up to"
      " rounding)"
    )
  if c.eval.beside:
    yield (
      f"eval.beside=true plays with a second engine in this process, which"
      f" {fleet} does not ask; leave it out, or set fleet.via=local"
    )
  if c.collect.part_size:
    yield (
      f"collect.part_size={c.collect.part_size} splits groups, which {fleet}"
      " lends whole; set collect.part_size=0"
    )
  if not c.queue.bounds_running:
    yield (
      f"queue.admission={c.queue.admission} starts groups when this process"
      f" has room for episodes, and with {fleet} it plays none; set"
      " queue.admission=started, and queue.max_staleness as high as"
      " collectors are to be kept busy"
    )
  if c.algorithm.keep_sampling_mask:
    yield (
      "algorithm.keep_sampling_mask=true: what collectors sample through the"
      f" engine's server ({fleet}) has no mask; use algorithm.importance=tis"
    )
  reached = c.rollout.public_url or c.rollout.host not in _HERE
  if c.fleet.address not in ("", "auto") and not reached:
    yield (
      f"fleet.address={c.fleet.address}: nodes of a cluster cannot reach"
      f" rollout.host={c.rollout.host}; set it to this machine's address, and"
      " rollout.public_url if they reach it by another one"
    )
