"""Groups complete; the loop feeds the queue, and ends where it can be seen."""

import asyncio
import itertools
import json

import collected
import collector_fakes as fakes
import loop_cases as cases
import numpy as np
import pytest
import threaded_loop
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.learner.batches import examples
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

Status = trajectory_lib.TrajectoryStatus


def tokens_of(group):
  return [t.sequences[0].tokens.tolist() for t in group]


def test_members_differ_and_a_run_repeats():
  async def main(**kwargs):
    client = cases.SeededClient(jitter=0.01)
    collector = cases.make_collector(client, seed=kwargs["seed"])
    return await collected.groups(collector, ["a", "b", "a"])

  first, again, other = (asyncio.run(main(seed=seed)) for seed in (1, 1, 2))
  assert [tokens_of(g) for g in first] == [tokens_of(g) for g in again]
  everything = sum((tokens_of(g) for g in first + other), [])
  assert len({tuple(t) for t in everything}) == len(everything) == 24
  # Turns of an episode differ, too.
  sequence = first[0].trajectories[0].sequences[0]
  sampled = sequence.tokens[sequence.loss_mask]
  assert sampled[:5].tolist() != sampled[5:].tolist()


def test_another_attempt_at_a_task_samples_anew():
  collector = cases.make_collector(seed=1)

  async def main():
    return [
      tokens_of(await collector.collect("a", index=3, attempt=attempt))
      for attempt in (0, 1, 0)
    ]

  first, retried, again = asyncio.run(main())
  assert first == again
  assert not {tuple(t) for t in first} & {tuple(t) for t in retried}


def test_failures_with_a_success_between_them_do_not_end_the_loop():
  def pair(task):
    if task % 2:
      raise ConnectionError("down")
    return cases.good_pair(task)

  client = cases.SeededClient()
  queue = group_queue.GroupQueue(1)  # Which admits one group at a time.
  loop = tc.CollectLoop(
    cases.make_collector(client, pair=pair, max_requeues=0),
    tc.TaskSampler(range(8), shuffle=False, epochs=1),
    queue,
    max_failed_groups=2,
  )

  async def main():
    running = asyncio.ensure_future(loop.run())
    for version in range(1, 5):
      assert await queue.lease(1, timeout=20)
      client.version = version
      queue.set_version(version)
    await running

  asyncio.run(main())
  assert loop.counts["accepted"] == loop.counts["given_up"] == 4


def test_group_ids_tasks_and_events():
  recorder = fakes.Recorder()
  task = gym_base.Task("click/3", "click", max_turns=1)
  collector = cases.make_collector(observers=recorder, split="eval")
  (group,) = asyncio.run(collected.groups(collector, [task], group_size=2))
  assert group.task_id == "click/3"
  assert [t.status for t in group] == [Status.MAX_TURNS] * 2
  assert len({t.trajectory_id for t in group}) == 2
  started = recorder.of(events.EpisodeStarted)
  assert {(e.group_id, e.task_id, e.split) for e in started} == {
    (group.group_id, "click/3", "eval")
  }


def test_task_ids():
  assert tc.groups.task_id_of({"task_id": 5}) == "5"
  one, two = tc.groups.task_id_of({"q": 1}), tc.groups.task_id_of({"q": 2})
  assert one != two
  assert tc.groups.task_id_of({"q": 1}) == one


def test_a_task_that_cannot_be_written_gets_an_id_and_its_group():
  class Opaque:
    def __repr__(self):
      return "Opaque(3)"

  itself = []
  itself.append(itself)
  assert tc.groups.task_id_of(Opaque()) == tc.groups.task_id_of(Opaque())
  assert tc.groups.task_id_of(Opaque()) != tc.groups.task_id_of(itself)
  queue = group_queue.GroupQueue(1)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(), iter([Opaque()]), queue
  )
  asyncio.run(loop.run())
  assert len(queue.get(timeout=0).valid) == 4


@pytest.mark.parametrize("fault", [None, "raise"])
@pytest.mark.parametrize("kind", [fakes.ScriptEnv, fakes.SyncScriptEnv])
def test_an_episode_that_cannot_begin_is_data_and_closes_its_env(kind, fault):
  envs = []

  def pair(task):
    envs.append(kind((0.0, 1.0), faults={"close": fault} if fault else {}))
    return fakes.ListAgent(), envs[-1]

  recorder = fakes.Recorder()
  collector = cases.make_collector(pair=pair, observers=recorder)
  tasks = [
    gym_base.Task("bad", "f", max_turns=-1),
    gym_base.Task("good", "f", max_turns=2),
  ]
  bad, good = asyncio.run(collected.groups(collector, tasks))
  assert {t.status for t in bad} == {Status.ENV_ERROR}
  assert all("max_steps must be >= 1, got -1" in t.error for t in bad)
  assert len(good.valid) == 4
  assert [env.closed for env in envs] == [1] * 8
  faults = {f.kind for f in recorder.of(events.Fault)}
  assert faults == {"EnvCreateError", *(["EnvCloseError"] if fault else [])}


def test_episodes_in_flight_are_bounded():
  client = cases.SeededClient(jitter=0.005)
  collector = cases.make_collector(client, concurrency=3)
  asyncio.run(collected.groups(collector, range(6)))
  assert client.peak == 3


def test_cancelling_a_group_closes_its_episodes():
  envs = []

  def pair(task):
    envs.append(fakes.ScriptEnv(faults={"step": "hang"}))
    return fakes.ListAgent(), envs[-1]

  async def main():
    collector = cases.make_collector(pair=pair)
    task = asyncio.ensure_future(collector.collect("t"))
    while sum("env.step" in env.log for env in envs) < 4:
      await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert len(asyncio.all_tasks()) == 1

  asyncio.run(main())
  assert [env.closed for env in envs] == [1] * 4


def test_async_factories_and_factories_that_fail():
  async def pair(task):
    await asyncio.sleep(0)
    if task == "bad":
      raise OSError("no display")
    if task == "odd":
      return "no pair"
    return cases.good_pair(task)

  collector = cases.make_collector(pair=pair)
  good, bad, odd = asyncio.run(
    collected.groups(collector, ["good", "bad", "odd"])
  )
  assert len(good.valid) == 4
  assert {t.error for t in bad} == {"EnvCreateError: OSError: no display"}
  assert {t.status for t in odd} == {Status.ENV_ERROR}


@pytest.mark.parametrize(
  "kwargs, name",
  [({"group_size": 0}, "group_size"), ({"min_valid": 5}, "min_valid")],
)
def test_bad_settings_are_refused(kwargs, name):
  with pytest.raises(ValueError, match=name):
    tc.CollectConfig(**{"group_size": 4, "min_valid": 2, **kwargs})


@pytest.mark.parametrize(
  "kwargs, words",
  [
    ({"turn": 700.0}, "turn=700.0 s exceeds episode=600.0 s"),
    ({"model": 200.0}, r"turn=180.0 s is shorter .* \(200.0 s"),
    ({"close": 0.0}, "close"),
  ],
)
def test_deadlines_that_cannot_go_together_are_refused(kwargs, words):
  with pytest.raises(ValueError, match=words):
    tc.Deadlines(**kwargs)


# --- The sampler ------------------------------------------------------------


def test_sampler_shuffles_by_seed_and_resumes():
  def take(sampler, n):
    return [next(sampler) for _ in range(n)]

  sampler = tc.TaskSampler(range(5), seed=3)
  epochs = take(sampler, 10)
  assert sorted(epochs[:5]) == sorted(epochs[5:]) == list(range(5))
  assert epochs[:5] != epochs[5:]
  assert take(tc.TaskSampler(range(5), seed=3), 10) == epochs
  sampler = tc.TaskSampler(range(5), seed=3)
  take(sampler, 7)
  state = json.loads(json.dumps(sampler.state_dict()))
  again = tc.TaskSampler(range(5), seed=3)
  again.load_state_dict(state)
  assert take(again, 3) == epochs[7:]
  assert list(tc.TaskSampler("ab", shuffle=False, epochs=2)) == list("abab")
  with pytest.raises(ValueError, match="6"):
    tc.TaskSampler(range(6)).load_state_dict(state)


# --- The loop ---------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_loop_and_learner(max_staleness):
  client = cases.SeededClient(jitter=0.004)
  queue = group_queue.GroupQueue(
    2, group_queue.QueueConfig(max_staleness=max_staleness)
  )
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(client), tc.TaskSampler(range(5)), queue
  )
  loop.start()
  batches = cases.learn(queue, client, 12)
  loop.stop()
  assert loop.join(20)
  assert [len(b) for b in batches] == [2] * 12
  for step, batch in enumerate(batches):
    for group in batch:
      assert step - group.oldest_version <= max_staleness
  assert queue.closed
  assert queue.counters()["running"] == 0


def test_two_synchronous_runs_are_equal():
  """Also when groups are retried and tasks given up on the way."""

  def run():
    attempts = {}

    def pair(task):
      attempts[task] = attempts.get(task, 0) + 1
      agent, env = cases.good_pair(task)
      # Task 3 never works; task 1 works at its second attempt.
      if task == 3 or (task == 1 and attempts[task] <= 4):
        env.faults = {"step": "raise"}
      return agent, env

    client = cases.SeededClient(jitter=0.01)
    queue = group_queue.GroupQueue(3)
    loop = threaded_loop.ThreadedLoop(
      cases.make_collector(client, pair, seed=7, max_requeues=1),
      tc.TaskSampler(range(7), seed=1),
      queue,
      backoff=0,
    )
    loop.start()
    batches = cases.learn(queue, client, 4)
    loop.stop()
    assert loop.join(20)
    assert loop.counts["requeued"] >= 2 and loop.counts["given_up"] >= 1
    return [
      [(g.task_id, g.group_id, g.attempt, tokens_of(g)) for g in batch]
      for batch in batches
    ]

  first = run()
  assert first == run()
  attempted = {(task, attempt) for b in first for task, _, attempt, _ in b}
  assert (tc.groups.task_id_of(1), 1) in attempted


def test_dropped_groups_are_tried_again_and_then_given_up():
  recorder = fakes.Recorder()

  def pair(task):
    agent, env = cases.good_pair(task)
    if task == "broken":
      env.faults = {"reset": "raise"}
    return agent, env

  queue = group_queue.GroupQueue(2)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(pair=pair, observers=recorder),
    tc.TaskSampler(["broken", "a", "b"], shuffle=False, epochs=1),
    queue,
    backoff=0,
  )
  asyncio.run(loop.run())
  outcomes = [
    (e.group.task_id != "", e.outcome, e.group.attempt)
    for e in recorder.of(events.GroupFinished)
    if e.outcome != "accepted"
  ]
  assert outcomes == [
    (True, "requeued", 0),
    (True, "requeued", 1),
    (True, "dropped", 2),
  ]
  last = [e for e in recorder.of(events.GroupFinished) if e.reason][-1]
  assert "0 of 4 episodes are valid" in last.reason
  assert "ConnectionError: reset broke" in last.reason
  # The permission of the dropped group went to the next task.
  assert len(queue.get_batch(timeout=0)) == 2
  with pytest.raises(group_queue.QueueClosed):
    queue.get()
  assert loop.counts["given_up"] == 1
  assert loop.counts["episodes_env_error"] == 12


def test_groups_with_enough_valid_members_are_kept():
  count = iter(range(100))

  def pair(task):
    agent, env = cases.good_pair(task)
    if next(count) % 4 < 2:
      env.faults = {"step": "raise"}
    return agent, env

  queue = group_queue.GroupQueue(1)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(pair=pair, min_valid=2), iter(["a"]), queue
  )
  asyncio.run(loop.run())
  group = queue.get(timeout=0)
  assert len(group) == 4 and len(group.valid) == 2
  assert group.attempt == 0


def test_a_masked_episode_counts_in_a_group_that_has_another():
  def group(*members):
    return trajectory_lib.TrajectoryGroup("g", "t", members)

  def ended(reward, trained):
    mask = (np.arange(4) > 1) & trained
    one = trajectory_lib.TokenSequence(
      np.arange(4), mask, np.zeros(4), np.where(mask, 0, -1), np.zeros(4)
    )
    metrics = {} if trained else {"untrained_tokens": 2}
    return trajectory_lib.Trajectory(
      reward=reward, status=Status.FAILED, sequences=[one], metrics=metrics
    )

  mixed = group(ended(0.0, False), ended(1.0, True))
  assert mixed.rewards == (0.0, 1.0) and mixed.varies
  values = {m.trajectory_id: np.ones(1, np.float32) for m in mixed}
  (rows,), stats = examples.from_advantages([mixed], values)
  assert [e.trajectory_id for e in rows] == [
    mixed.trajectories[1].trajectory_id
  ]
  assert stats.valid == 2 and stats.reward_mean == 0.5
  left_out = examples.left_out([mixed], [])
  assert list(left_out.values()) == [("untrained",), ("",)]
  masked = group(ended(0.0, False), ended(1.0, False))
  assert masked.valid == ()
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(), iter([]), group_queue.GroupQueue(1)
  )
  assert loop._refusal(mixed) is None
  assert loop._refusal(masked) == (
    "0 of 2 episodes are valid, 2 are needed; 4 sampled tokens are not"
    " trained on; see rollout.other_sampling"
  )


def test_a_world_in_which_nothing_works_is_reported():
  def pair(task):
    raise OSError("no gym server")

  queue = group_queue.GroupQueue(2)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(pair=pair, max_requeues=1),
    tc.TaskSampler(range(3)),
    queue,
    backoff=0,
    max_failed_groups=6,
  )
  loop.start()
  with pytest.raises(group_queue.QueueFailed, match="no gym server") as e:
    queue.get_batch(timeout=30)
  assert isinstance(e.value.__cause__, tc.CollectError)
  assert loop.join(20)


@pytest.mark.parametrize("where", ["sampler", "queue", "factory result"])
def test_a_crash_of_the_loop_surfaces_at_the_consumer(where):
  def tasks():
    yield "a"
    raise ZeroDivisionError("sampler")

  class Store(group_store.MemoryGroupStore):
    def append(self, index, group):
      raise ZeroDivisionError("queue")

  class Collector(tc.GroupCollector):
    async def collect(self, *args, **kwargs):
      raise ZeroDivisionError("factory result")

  queue = group_queue.GroupQueue(2, store=Store() if where == "queue" else None)
  kind = Collector if where == "factory result" else tc.GroupCollector
  loop = threaded_loop.ThreadedLoop(
    kind(cases.good_pair, cases.model_of(cases.SeededClient())),
    tasks() if where == "sampler" else tc.TaskSampler(range(9)),
    queue,
  )
  loop.start()
  with pytest.raises(group_queue.QueueFailed, match=where) as e:
    queue.get_batch(timeout=30)
  assert isinstance(e.value.__cause__, ZeroDivisionError)
  assert loop.join(20)


def test_stop():
  envs = []

  class Env(fakes.ScriptEnv):
    async def step(self, action):
      await asyncio.sleep(60)

  def pair(task):
    envs.append(Env((0.0, 1.0)))
    return fakes.ListAgent(), envs[-1]

  queue = group_queue.GroupQueue(2)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(pair=pair), tc.TaskSampler(range(9)), queue
  )
  loop.start()
  assert fakes.wait_until(lambda: len(envs) == 8)
  loop.stop()
  assert loop.join(20)
  assert all(env.closed == 1 for env in envs)
  unfinished = [i["index"] for i in loop.state_dict()["unfinished"]]
  assert unfinished == [0, 1, None]  # The last was drawn, never admitted.
  with pytest.raises(group_queue.QueueClosed):
    queue.get()


def test_no_group_starts_during_a_hold():
  started = []

  def pair(task):
    started.append(task)
    return cases.good_pair(task)

  queue = group_queue.GroupQueue(1)
  client = cases.SeededClient()
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(client, pair=pair, group_size=2),
    tc.TaskSampler(range(9), shuffle=False),
    queue,
  )
  loop.start()
  queue.get_batch(timeout=30)
  loop.hold()
  client.version = 1
  queue.set_version(1)
  assert fakes.wait_until(lambda: queue.counters()["running"] == 1)
  assert not fakes.wait_until(lambda: len(started) > 2, 0.3)
  state = loop.state_dict()
  assert [i["task"] for i in state["unfinished"]] == [1]
  client.version = 2  # Published while it is held.
  queue.set_version(2)
  loop.release()
  assert [queue.get(timeout=30).start_version for _ in range(2)] == [2, 2]
  loop.hold()
  queue.set_version(3)
  assert fakes.wait_until(lambda: queue.counters()["running"] == 1)
  loop.stop()
  assert loop.join(20)
  counts = queue.counters()
  assert (counts["running"], counts["released"]) == (0, 1)
  assert [i["task"] for i in loop.state_dict()["unfinished"]] == [3]
  loop.release()


def test_stop_before_the_start_and_closing_the_queue_end_the_loop():
  queue = group_queue.GroupQueue(1)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(), tc.TaskSampler([1]), queue
  )
  loop.stop()
  asyncio.run(loop.run())
  assert queue.closed
  queue = group_queue.GroupQueue(1)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(), tc.TaskSampler([1]), queue
  )
  loop.start()
  queue.get(timeout=20)
  queue.close()
  assert loop.join(20)


def test_a_group_cancelled_before_its_first_step_gives_its_ticket_back():
  class Loop(tc.CollectLoop):
    def _group(self, task, ticket):
      # Runs after the task was made and before its first step.
      asyncio.get_running_loop().call_soon(lambda: self.stop())
      asyncio.get_running_loop().call_soon(self._stop_now)
      return super()._group(task, ticket)

  envs = []

  def pair(task):
    envs.append(fakes.ScriptEnv((0.0, 1.0)))
    return fakes.ListAgent(), envs[-1]

  queue = group_queue.GroupQueue(1)
  loop = Loop(cases.make_collector(pair=pair), tc.TaskSampler(range(9)), queue)
  asyncio.run(loop.run())
  assert not envs
  counts = queue.counters()
  assert (counts["started"], counts["running"]) == (1, 0)
  assert counts["released"] == 1
  assert loop.state_dict()["unfinished"][0]["index"] == 0


def test_cancelling_the_loop_closes_the_queue():
  async def main():
    queue = group_queue.GroupQueue(1)
    loop = threaded_loop.ThreadedLoop(
      cases.make_collector(), tc.TaskSampler([1]), queue
    )
    task = asyncio.ensure_future(loop.run())
    assert await queue.lease(1, timeout=20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    with pytest.raises(group_queue.QueueClosed):
      await queue.lease(1)
    assert len(asyncio.all_tasks()) == 1

  asyncio.run(main())


# --- Groups in parts ---------------------------------------------------------


class _Paced(fakes.ScriptEnv):
  """Ends when the test lets it; its reward is its number."""

  gates: dict[int, asyncio.Event] = {}
  made = 0

  def __init__(self, number):
    super().__init__((float(number),))
    self.gate = self.gates.setdefault(number, asyncio.Event())

  async def step(self, action):
    await self.gate.wait()
    return await super().step(action)


def _paced_pair(fails=()):
  """Episodes numbered in the order of their start; some cannot begin."""
  count = itertools.count()

  def make(task):
    number = next(count)
    if number in fails:
      raise ConnectionError("no browser")
    return fakes.ListAgent(), _Paced(number)

  return make


async def _until(condition):
  for _ in range(2000):
    if condition():
      return
    await asyncio.sleep(0.005)
  raise AssertionError("it did not come true")


def test_a_group_comes_in_parts_in_the_order_of_its_ends():
  async def main():
    _Paced.gates = {}
    config = group_queue.QueueConfig(max_staleness=1)
    queue = group_queue.GroupQueue(2, config)
    collector = cases.make_collector(pair=_paced_pair(), part_size=2)
    loop = threaded_loop.ThreadedLoop(
      collector, tc.TaskSampler(["a"], epochs=1), queue
    )
    running = asyncio.ensure_future(loop.run())
    await _until(lambda: len(_Paced.gates) == 4)
    assert queue.counters()["running"] == 2  # A ticket a part.
    for number in (3, 0):
      _Paced.gates[number].set()
      await asyncio.sleep(0.05)
    await _until(lambda: queue.qsize() == 1)
    assert len(loop.state_dict()["unfinished"]) == 1
    for number in (1, 2):
      _Paced.gates[number].set()
    await running
    return queue.get_batch(timeout=0), queue.counters(), loop.state_dict()

  (first, second), counters, state = asyncio.run(main())
  assert [m.reward for m in first] == [3.0, 0.0]
  assert sorted(m.reward for m in second) == [1.0, 2.0]
  assert first.peer_rewards == ()
  assert second.peer_rewards == (3.0, 0.0)
  assert first.group_id == second.group_id
  assert len({m.trajectory_id for g in (first, second) for m in g}) == 4
  assert (counters["running"], counters["put"]) == (0, 2)
  assert state["unfinished"] == []


def test_a_part_that_never_comes_gives_its_ticket_back():
  """One of four cannot begin: the last part is smaller."""

  async def main():
    _Paced.gates = {}
    config = group_queue.QueueConfig(max_staleness=2)
    queue = group_queue.GroupQueue(2, config)
    collector = cases.make_collector(
      pair=_paced_pair({0, 1, 2}), part_size=2, max_requeues=1
    )
    for number in range(3, 12):
      _Paced.gates[number] = asyncio.Event()
      _Paced.gates[number].set()
    loop = threaded_loop.ThreadedLoop(
      collector, tc.TaskSampler(["a"], epochs=1), queue, backoff=0
    )
    await loop.run()
    return queue.counters(), loop

  counters, loop = asyncio.run(main())
  # The first attempt has one valid episode and is made anew, in two parts.
  assert loop.counts["requeued"] == 1
  assert (counters["put"], counters["running"]) == (2, 0)


def test_a_resumed_run_collects_the_parts_that_are_wanting():
  config = group_queue.QueueConfig(max_staleness=2)
  queue = group_queue.GroupQueue(2, config)
  sampler = tc.TaskSampler(["a", "b", "c"], shuffle=False, epochs=1)
  loop = threaded_loop.ThreadedLoop(
    cases.make_collector(part_size=2), sampler, queue
  )
  queue.known = lambda: {0, 2, 3}  # As of a store: one part of "a", all of "b".
  loop.load_state_dict(
    {"sampler": sampler.state_dict(), "next_index": 0, "unfinished": []}
  )
  asyncio.run(loop.run())
  tasks = [g.trajectories[0].task for g in queue.get_batch(3, timeout=0)]
  counters = queue.counters()
  assert (counters["put"], counters["running"], len(tasks)) == (3, 0, 3)


def test_finished_admission_starts_a_group_when_episodes_have_room():
  async def main():
    _Paced.gates = {}
    queue = group_queue.GroupQueue(
      1, group_queue.QueueConfig(max_staleness=1, admission="finished")
    )
    collector = cases.make_collector(pair=_paced_pair(), concurrency=6)
    loop = threaded_loop.ThreadedLoop(collector, tc.TaskSampler(["a"]), queue)
    running = asyncio.ensure_future(loop.run())
    await _until(lambda: len(_Paced.gates) == 6)
    await asyncio.sleep(0.05)
    # Two of the second group's members run; no third group has been started.
    assert queue.counters()["running"] == 2
    for number in range(3):
      _Paced.gates[number].set()
    await _until(lambda: len(_Paced.gates) == 9)
    assert queue.counters()["running"] == 3
    for number in range(9):
      _Paced.gates[number].set()
    # Two groups wait: no more are admitted, whatever room there is.
    await _until(lambda: queue.qsize() == 2)
    loop.stop()
    await running
    return queue

  queue = asyncio.run(main())
  assert queue.qsize() >= 2
