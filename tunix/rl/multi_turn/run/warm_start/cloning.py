"""Clones demonstrations into a policy, as a run may do before GRPO.

Demonstrations are played during learning, up to a number of distinct ones;
each step learns from a batch of the demonstrations played so far.

Promises: the batches are a function of the seed and the tasks, also where
cloning resumes after a stop.

Does not: play episodes (`demonstrations` does), or build or save anything.
"""

from __future__ import annotations

from typing import Callable, Iterator, Sequence

import numpy as np
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import peers as peers_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.learner import learner as learner_lib

Play = Callable[
    [Sequence[tuple[gym_base.Task, int]]], list[trajectory_lib.Trajectory]
]
"""(task, seed) pairs -> their demonstrations, in order. Tasks without a
solution, which some pages draw now and then, are left out."""

_LEFT_OUT_AT_MOST = 0.2


def clone(
    learner: learner_lib.Learner,
    play: Play,
    tasks: Iterator[gym_base.Task],
    config: run_sections.WarmStartConfig,
    *,
    longest: int,
    seed: int,
    observers: events.Observer,
    first_step: int = 0,
    after_update: Callable[[], None] = lambda: None,
    processes: peers_lib.Peers = peers_lib.ALONE,
) -> None:
  """Updates `learner` from `first_step` to `config.steps`.

  Args:
    learner: Learner with the objective behaviour_cloning.
    play: called once a step, also with nothing to play; its errors end the
      cloning.
    tasks: Tasks to demonstrate, without end.
    config: steps, batch size and number of demonstrations.
    longest: tokens of a sequence; a demonstration with a longer one, which
      the policy itself could not play, is left out.
    seed: Seed of the batches.
    observers: receive the progress.
    first_step: Updates that the learner has made before; their demonstrations
      are
      played again, which takes a fraction of the time.
    after_update: called after each update.
    processes: Processes that learn together; each plays all demonstrations, and
      learns
      from its share of a batch.

  Raises:
    RuntimeError: too many tasks have no solution to be shown, or too long a
      one.
  """
  played: list[trajectory_lib.Trajectory] = []
  tried = too_long = 0
  rng = np.random.default_rng(seed)
  for step in range(config.steps):
    target = min(config.demonstrations, config.batch_size * (step + 1))
    pairs = [(next(tasks), i) for i in range(tried, max(tried, target))]
    shown = play(pairs)
    fitting = [
        e for e in shown if all(len(s) <= longest for s in e.sequences)
    ]
    played += fitting
    too_long += len(shown) - len(fitting)
    tried += len(pairs)
    if len(played) < (1 - _LEFT_OUT_AT_MOST) * tried:
      raise RuntimeError(_too_few(len(played), tried, too_long, longest))
    chosen = rng.choice(len(played), config.batch_size)
    if step < first_step:
      observers.on_event(
          events.Progress("playing demonstrations again", step + 1, first_step)
      )
      continue
    metrics = learner.update_on_sequences(
        [s for i in processes.share(chosen) for s in played[i].sequences]
    )
    observers.on_event(
        events.Progress(
            "cloning demonstrations",
            step + 1,
            config.steps,
            f"loss {metrics['loss']:.3f}"
            + (f", {too_long} too long" if too_long else ""),
        )
    )
    after_update()


def _too_few(played: int, tried: int, too_long: int, longest: int) -> str:
  if too_long > tried - played - too_long:
    return (
        f"{too_long} of {tried} demonstrations have sequences of more than"
        f" {longest} tokens; raise engine.context_length and"
        " learner.row_length, or set warm_start.steps=0"
    )
  return (
      f"the oracle could demonstrate only {played + too_long} of {tried} tasks,"
      " the others offer it nothing to act on; leave out such"
      " task_source.families or set warm_start.steps=0"
  )
