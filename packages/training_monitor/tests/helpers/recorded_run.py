"""A small run of the embedded desktop, played and told to a monitor.

The episodes are real: an oracle with a habit of mistakes plays the desktop
through the collector, so screenshots, actions, tokens and verdicts are what a
training run has. Their log-probs and entropies are drawn, as an oracle's are
all 0.
"""

import asyncio
import concurrent.futures
import dataclasses
import time

import numpy as np
from trainer_core import events
from trainer_core import images as images_lib
from trainer_core import monitor_settings as settings_lib
from trainer_core import success_rates
from trainer_core import trajectory as trajectory_lib
from training_monitor.client import event_log
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs
from tunix.rl.multi_turn.reporting import metrics as metrics_lib
from tunix.rl.multi_turn.run.warm_start import demonstrations

FAMILIES = ("enter-text", "drag-to-target", "scroll-and-click")
GROUP = 4
STEPS = 3
_HABITS = {"enter-text": "skip_focus", "scroll-and-click": "wrong_widget"}


def _demonstrator(store, rate):
  tokenizer = policy_files.load_tokenizer("tiny_vl")
  cells = tiny_vl.config_for(tokenizer, "nano").max_cells
  processor = vision_inputs.TinyVLProcessor(cells)
  return demonstrations.Demonstrator(
    renderer=qwen.QwenRenderer(tokenizer, processor.num_image_tokens),
    make_agent=lambda: tool_agent.ToolAgent(
      prompts.get_prompt("desktop_compact"), "computer_use_compact"
    ),
    make_gym=desktop.DesktopGym,
    oracle=desktop.GYM.load_oracle(),
    image_store=store,
    habits={f: (habit, rate) for f, habit in _HABITS.items()},
    grid=demonstrations.POINT_GRID,
  )


def _sampled(episode, version, rng):
  """The episode as if a policy had sampled it."""
  episode.sequences = [
    dataclasses.replace(
      s,
      logprobs=np.where(
        s.loss_mask, -rng.exponential(0.4, len(s.tokens)), 0.0
      ).astype(np.float32),
      versions=np.where(s.loss_mask, version, -1).astype(np.int32),
      entropies=np.where(
        s.loss_mask, rng.exponential(0.6, len(s.tokens)), 0.0
      ).astype(np.float32),
    )
    for s in episode.sequences
  ]
  return episode


def weighed(groups):
  """Advantages of the groups' valid members, by the learner's estimator."""
  found = {}
  for group in groups:
    valid = group.valid
    each = advantages.ESTIMATORS.get("grpo")(
      advantages.GroupRewards(
        np.array([t.reward for t in valid]),
        tuple(np.zeros(t.num_turns) for t in valid),
      ),
      advantages.AdvantageOptions(),
    )
    for trajectory, values in zip(valid, each):
      found[trajectory.trajectory_id] = tuple(float(v) for v in values)
  return found


class Recorder:
  """Tells a run; `more` goes on where `run` stopped."""

  def __init__(self, url, folder, *, token="", name="desktop-run", steps=10):
    self.store = images_lib.ImageStore()
    self.observer = event_log.EventLog(
        event_log.RunSpec(
            url=url, token=token, spool_dir=str(folder), name=name,
            training_id=f"T-{name}", task_source="desktop", max_turns=6,
            training={
                "model_name": "tiny_vl", "group_size": GROUP,
                "total_steps": steps, "groups_per_batch": len(FAMILIES),
                "temperature": 1.0, "learning_rate": 3e-4,
            },
        ),
        settings_lib.MonitorConfig(close_timeout_s=60.0),
        images=self.store,
    )  # fmt: skip
    self._name = name
    self._tasks = desktop.DesktopTasks(FAMILIES)
    self._players = {
      rate: _demonstrator(self.store, rate) for rate in (0.0, 0.5, 1.0)
    }
    # Tests may have a loop of their own in their thread.
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._rng = np.random.default_rng(0)

  def tell(self, event):
    self.observer.on_event(event)

  def play(self, task, seed, rate):
    """An episode; `rate` is the habit's."""
    coroutine = self._players[rate].episode(task, seed)
    return self._thread.submit(asyncio.run, coroutine).result(60)

  def episode(self, name, family, seed, attempt, version, split="train",
              broken=False, rate=0.5):  # fmt: skip
    group = name.partition(".")[0]
    task = self._tasks.task(family, seed)
    played = self.play(task, seed * 100 + attempt, rate)
    played = _sampled(played, version, self._rng)
    played.trajectory_id = name
    if broken:
      played.status = trajectory_lib.TrajectoryStatus.ENV_ERROR
      played.error = "EnvStepError: the window <is> gone"
    common = dict(group_id=group, task_id=task.task_id, split=split)
    self.tell(events.EpisodeStarted(trajectory_id=name, **common))
    for turn in range(played.num_turns):
      self.tell(events.TurnFinished(name, turn, {"model": 2e-3, "env": 1e-3}))
    if broken:
      self.tell(events.Fault("step", "EnvStepError", "gone", name))
    self.tell(events.EpisodeFinished(played, **common))
    return played

  def measure(self, name, step, rate):
    for mode in ("sampled", "greedy"):
      self.tell(events.EvalStarted(name, mode, 2 * len(FAMILIES), step))
      results = []
      for n, family in enumerate(FAMILIES):
        played = self.episode(
          f"eval-{n:06d}.0",
          family,
          1_000_000_000 + n,
          0,
          step,
          "eval",
          rate=rate,
        )
        results.append(
          success_rates.EpisodeResult.from_trajectory(played, family, mode)
        )
    self.tell(events.EvalFinished(name, success_rates.summarise(results)))

  def step(self, step):
    groups = []
    for n, family in enumerate(FAMILIES):
      index = (step - 1) * len(FAMILIES) + n
      members = tuple(
          self.episode(f"train-{index:06d}.{i}", family, 50 + index, i,
                       step - 1, broken=(step, n, i) == (2, 1, 3))
          for i in range(GROUP)
      )  # fmt: skip
      groups.append(
        trajectory_lib.TrajectoryGroup(f"train-{index:06d}", "t", members)
      )
      self.tell(events.GroupFinished(groups[-1], "accepted"))
    readings = metrics_lib.group_metrics(groups)
    readings |= {
        "loss": 0.2 / step, "entropy": 1.0 / step, "kl": 0.01 * step,
        "grad_norm": 0.3, "clip_fraction": 0.02, "staleness_mean": 0.5,
        "staleness_max": 1.0, "queue_size": 2.0, "model_share": 0.7,
        "engine_busy": 0.8, "rollout_tokens_per_second": 900.0 + step,
        "rollout_calls_per_second": 150.0 + step,
        "learner_tokens_per_second": 4000.0, "time/wait": 1.0,
        "seconds_learn": 0.5, "seconds_publish": 0.1, "seconds_total": 1.6,
        "time": time.time() + step,
    }  # fmt: skip
    self.tell(events.WeightsPublished(step, 0.01))
    zeros = lambda rewards, _: [0 * t for t in rewards.turns]
    per_group, _ = example_lib.from_groups(groups, zeros, None)
    alike = [
      e
      for group, found in zip(groups, per_group)
      for e in found
      if len({m.reward for m in group.valid}) == 1
    ]
    self.tell(events.StepFinished(
        step, step, readings, tuple(groups), weighed(groups),
        left_out=example_lib.left_out(
            groups, [(e, example_lib.ZERO_ADVANTAGE) for e in alike]
        ),
    ))  # fmt: skip

  def run(self):
    self.tell(events.RunStarted(self._name, {
        "algorithm": {"advantage": "grpo", "kl_coef": 0.0},
        "learner": {"learning_rate": 3e-4}, "name": self._name,
    }))  # fmt: skip
    self.measure("initial", 0, 1.0)
    self.tell(events.WeightsPublished(0, 0.01))
    for step in range(1, STEPS + 1):
      self.step(step)
    self.measure("step_3", STEPS, 0.0)
    return self

  def flush(self):
    assert self.observer.drain(30)

  def close(self):
    self._thread.shutdown()
    self.tell(events.RunFinished("completed"))
    assert self.observer.close()
