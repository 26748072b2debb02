"""The shipped policy, reached in process and through a run's own server."""

import asyncio

import collected
import numpy as np
import shared_programs
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import proxy
from tunix.rl.multi_turn.run import tasks as run_tasks

# Equal sizes are compiled once, with those of other small runs.
SMALL = (*small_runs.SMALL, "tasks=[click-button, enter-text]")


class Both:
  """Both ways to one engine, whose programs are compiled once a process."""

  def __init__(self, *overrides):
    self.loop = asyncio.new_event_loop()  # Connections belong to one.
    self.config = config_lib.load_config(
      [*SMALL, "rollout.via=proxy", *overrides]
    )
    config = self.config
    self.images = images_lib.ImageStore()
    self.policy = models.make_policy(
      config, None, models.warm_start_source(config)
    )
    self.engine = models.make_engine(config, self.policy, self.images)
    self.proxy = proxy.RunProxy(config, self.policy, self.engine, self.images)

  def __enter__(self):
    config = self.config
    shared_programs.warm_up(
      self.engine, config.engine, config.gym, config.policy, config.mesh
    )
    self.proxy.start()
    return self

  def __exit__(self, *exc_info):
    self.proxy.close(self.run)
    self.loop.close()
    self.engine.close()

  def run(self, work):
    return self.loop.run_until_complete(asyncio.wait_for(work, 120))

  def collector(self, mode, connection):
    config = self.config
    return episodes_lib.make_collector(
      config,
      episodes_lib.EpisodeFactory(config, self.images),
      self.engine,
      self.policy.renderer,
      observers=None,
      mode=mode,
      connection=connection,
    )

  def collect(self, mode, through_proxy, number=4):
    source = run_tasks.make_tasks(self.config)
    tasks = run_tasks.TrainTasks(source, self.config.task_source.families, 3)
    connection = self.proxy.connection if through_proxy else None
    collector = self.collector(mode, connection)

    async def run():
      return await collected.groups(
        collector, [next(tasks) for _ in range(number)]
      )

    return run()


def assert_equal(got, want):
  assert got.status is want.status
  kinds = [e and e.partition(":")[0] for e in (got.error, want.error)]
  assert kinds[0] == kinds[1]
  assert got.reward == want.reward
  assert [s.reward for s in got.steps] == [s.reward for s in want.steps]
  assert [s.model_response for s in got.steps] == [
    s.model_response for s in want.steps
  ]
  assert got.task == want.task
  assert len(got.sequences) == len(want.sequences) > 0
  for one, other in zip(got.sequences, want.sequences):
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.loss_mask.tolist() == other.loss_mask.tolist()
    assert one.versions.tolist() == other.versions.tolist()
    assert one.turn_ids.tolist() == other.turn_ids.tolist()
    assert one.images == other.images
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
  for name in (
    "turns",
    "sampled_tokens",
    "truncated_turns",
    "history_rewrites",
    "summary_turns",
    "prompt_tokens",
  ):
    assert got.metrics.get(name) == want.metrics.get(name), name
