"""Whatever an environment, model or reward does, the episode is data."""

import asyncio
import dataclasses
import gc
import random
import threading

import collected
import collector_fakes as fakes
import pytest
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import concurrency

pytestmark = pytest.mark.timeout(240)
Status = trajectory_lib.TrajectoryStatus
LONGER = tc.Deadlines(reset=4.0, model=4.0, step=4.0, evaluate=4.0, close=4.0)
PATIENT = tc.Deadlines(reset=20, model=20, step=20, evaluate=20, close=20)


def soon(stage):
  """Deadlines that give up this stage soon, as it hangs, and no other."""
  return dataclasses.replace(PATIENT, **{stage: 0.3})


@pytest.fixture
def runner():
  made = tc.CallRunner(tc.WorkerPool(max_threads=8, idle=0.2), grace=0.05)
  yield made
  assert fakes.wait_until(lambda: not made.stuck), made.stuck
  assert made.close()
  assert made.pool.threads == 0 and made.pool.lost == 0


def run(agent, env, model=fakes.say_x, reward=None, *, runner, **kwargs):
  recorder = fakes.Recorder()
  kwargs.setdefault("deadlines", PATIENT)

  async def main():
    result = await tc.TrajectoryCollectEngine(
      agent, env, model, reward, observers=recorder, runner=runner, **kwargs
    ).collect()
    leftover = asyncio.all_tasks() - {asyncio.current_task()}
    return result, leftover

  result, leftover = asyncio.run(main())
  assert not leftover
  return result, recorder.of(events.Fault)


@pytest.mark.parametrize("env_type", [fakes.ScriptEnv, fakes.SyncScriptEnv])
@pytest.mark.parametrize(
  "stage, fault, status, kind",
  [
    ("reset", "raise", Status.ENV_ERROR, "EnvResetError"),
    ("reset", "hang", Status.TIMEOUT, "EnvResetTimeout"),
    ("reset", "garbage", Status.ENV_ERROR, "EnvResetError"),
    ("step", "raise", Status.ENV_ERROR, "EnvStepError"),
    ("step", "hang", Status.TIMEOUT, "EnvStepTimeout"),
    ("step", "garbage", Status.ENV_ERROR, "EnvStepError"),
    ("close", "raise", Status.SUCCEEDED, "EnvCloseError"),
    ("close", "hang", Status.SUCCEEDED, "EnvCloseTimeout"),
  ],
)
def test_environment_faults(env_type, stage, fault, status, kind, runner):
  env = env_type(faults={stage: fault})
  deadlines = soon(stage) if fault == "hang" else PATIENT
  result, faults = run(
    fakes.ListAgent(), env, runner=runner, deadlines=deadlines
  )
  assert result.status is status
  if (stage, fault, env_type) == ("step", "garbage", fakes.ScriptEnv):
    kind = "RewardError"  # Its reward is NaN.
  assert kind in [f.kind for f in faults]
  assert {f.trajectory_id for f in faults} == {result.trajectory_id}
  if stage == "close":
    assert result.error is None
    assert result.metrics["close_failed"] == 1
  else:
    assert result.error.startswith(f"{kind}: ")
    assert not result.is_trainable
  if env_type is fakes.SyncScriptEnv:
    env.release.set()
    assert fakes.wait_until(lambda: not runner.stuck)
  assert fakes.wait_until(lambda: env.closed == 1)


async def _hang(*args):
  await asyncio.sleep(3600)


async def _raise(*args):
  raise ZeroDivisionError("no")


def test_waiting_for_an_engine_s_weights_costs_an_episode_no_time(runner):
  """Neither its model call nor its turn nor itself."""

  async def model(messages):
    with concurrency.off_the_clock():
      await asyncio.sleep(0.6)
    return await fakes.say_x(messages)

  deadlines = dataclasses.replace(PATIENT, model=0.5, step=0.5, turn=0.55)
  for timeout in (1.0, 0.0001):
    result, faults = run(
      fakes.ListAgent(),
      fakes.ScriptEnv(),
      model,
      runner=runner,
      deadlines=deadlines,
      timeout=timeout,
    )
    if timeout == 1.0:  # Three turns, which wait for 1.8 s.
      assert result.status is Status.SUCCEEDED and not faults
      assert len(result.steps) == 3
    else:
      assert result.status is Status.TIMEOUT


@pytest.mark.parametrize(
  "model, status, kind",
  [
    (_hang, Status.TIMEOUT, "ModelTimeout"),
    (_raise, Status.MODEL_ERROR, "ModelError"),
    (lambda messages: 7, Status.MODEL_ERROR, "ModelError"),
  ],
)
def test_model_faults(model, status, kind, runner):
  env = fakes.ScriptEnv()
  deadlines = soon("model") if model is _hang else PATIENT
  result, faults = run(
    fakes.ListAgent(), env, model, runner=runner, deadlines=deadlines
  )
  assert result.status is status
  assert result.error.startswith(kind)
  assert [f.stage for f in faults] == ["model"]
  assert env.closed == 1


async def _nan(trajectory):
  return float("nan")


@pytest.mark.parametrize(
  "reward, status, kind",
  [
    (_hang, Status.TIMEOUT, "RewardTimeout"),
    (_raise, Status.ENV_ERROR, "RewardError"),
    (_nan, Status.ENV_ERROR, "RewardError"),
    (lambda trajectory: "much", Status.ENV_ERROR, "RewardError"),
  ],
)
def test_reward_faults(reward, status, kind, runner):
  env = fakes.ScriptEnv()
  deadlines = soon("evaluate") if reward is _hang else PATIENT
  if reward is _hang:
    reward = lambda trajectory: _hang()
  if reward is _raise:
    reward = lambda trajectory: _raise()
  result, _ = run(
    fakes.ListAgent(), env, reward=reward, runner=runner, deadlines=deadlines
  )
  assert result.status is status
  assert result.error.startswith(kind)
  assert env.closed == 1
  # What the environment itself gave is kept.
  assert result.reward == 1.0


def test_a_verdict_that_hangs_is_contained(runner):
  class Env(fakes.ScriptEnv):
    async def evaluate(self):
      await asyncio.sleep(3600)

  env = Env((0.0,) * 5)
  result, _ = run(
    fakes.ListAgent(),
    env,
    runner=runner,
    max_steps=2,
    deadlines=soon("evaluate"),
  )
  assert result.status is Status.TIMEOUT
  assert result.error.startswith("RewardTimeout")
  assert env.closed == 1


def test_episode_timeout_reaches_into_a_call(runner):
  result, _ = run(
    fakes.ListAgent(),
    fakes.ScriptEnv(),
    _hang,
    runner=runner,
    deadlines=tc.Deadlines(),
    timeout=0.1,
  )
  assert result.status is Status.TIMEOUT
  assert result.error.startswith("EpisodeTimeout")


def test_episode_timeout_between_turns_marks_the_last_step(runner):
  async def slow(messages):
    await asyncio.sleep(0.03)
    return "x"

  result, _ = run(
    fakes.ListAgent(),
    fakes.ScriptEnv((0.0,) * 100),
    slow,
    runner=runner,
    max_steps=100,
    timeout=0.1,
  )
  assert result.status is Status.TIMEOUT
  assert 1 <= len(result.steps) < 100
  assert result.steps[-1].done


def test_turn_timeout(runner):
  env = fakes.ScriptEnv(faults={"step": "hang"})
  result, _ = run(
    fakes.ListAgent(),
    env,
    runner=runner,
    deadlines=tc.Deadlines(turn=0.1, model=0.1, step=0.1),
  )
  assert result.error.startswith("TurnTimeout")
  assert env.closed == 1


def test_a_hanging_inline_environment_is_cancelled(runner):
  env = fakes.ScriptEnv(faults={"step": "hang"})
  env.runs_inline = True
  result, _ = run(fakes.ListAgent(), env, runner=runner, deadlines=soon("step"))
  assert result.error.startswith("EnvStepTimeout")
  assert env.closed == 1


def test_the_environments_own_timeout_error_is_an_error(runner):
  for inline in (False, True):

    class Env(fakes.ScriptEnv):
      runs_inline = inline

      async def step(self, action):
        raise TimeoutError("device is busy")

    result, _ = run(fakes.ListAgent(), Env(), runner=runner)
    assert result.error == "EnvStepError: TimeoutError: device is busy"


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("sync", [False, True])
def test_code_that_cancels_itself_does_not_cancel_the_episode(
  inline, sync, runner
):
  def leave(*args):
    raise asyncio.CancelledError("inner")

  async def aleave(*args):
    leave()

  env = fakes.ScriptEnv()
  env.runs_inline = inline
  env.step = leave if sync else aleave
  result, faults = run(fakes.ListAgent(), env, runner=runner)
  assert result.status is Status.ENV_ERROR
  said = f"{env.step.__qualname__} cancelled itself"
  if sync and not inline:  # In a thread it is an exception like any other.
    said = "CancelledError: inner"
  assert result.error == f"EnvStepError: {said}"
  assert env.closed == 1
  env = fakes.ScriptEnv()
  env.runs_inline = inline
  env.close = leave if sync else aleave
  result, faults = run(fakes.ListAgent(), env, runner=runner)
  assert result.status is Status.SUCCEEDED
  assert [f.kind for f in faults] == ["EnvCloseError"]
  agent = fakes.ListAgent()
  agent.update_from_model = leave if sync else aleave
  env = fakes.ScriptEnv()
  result, _ = run(agent, env, runner=runner)
  assert result.status is Status.ENV_ERROR
  assert env.closed == 1


@pytest.mark.parametrize(
  "method, limits, error",
  [
    ("update_from_model", {"timeout": 0.2}, "EpisodeTimeout: "),
    (
      "update_from_model",
      {"deadlines": tc.Deadlines(turn=0.2, model=0.2, step=0.2)},
      "TurnTimeout: ",
    ),
    (
      "update_from_env",
      {"deadlines": tc.Deadlines(reset=0.2)},
      "AgentTimeout: ListAgent took longer than 0.2 s",
    ),
  ],
)
def test_an_async_agent_that_hangs(method, limits, error, runner):
  agent, env = fakes.ListAgent(), fakes.ScriptEnv()
  setattr(agent, method, _hang)
  result, faults = run(agent, env, runner=runner, **limits)
  assert result.status is Status.TIMEOUT
  assert result.error.startswith(error)
  assert [f.stage for f in faults] == ["agent"]
  assert env.closed == 1


def test_close_never_runs_beside_a_stuck_step(runner):
  env = fakes.SyncScriptEnv(faults={"step": "hang"})
  result, faults = run(
    fakes.ListAgent(), env, runner=runner, deadlines=soon("step")
  )
  assert result.status is Status.TIMEOUT
  assert result.metrics["quarantined"] == 1
  assert "Quarantined" in [f.kind for f in faults]
  assert env.closed == 0
  assert len(runner.stuck) == 1
  env.release.set()
  # The event loop has ended: the environment is closed where it returned.
  assert fakes.wait_until(lambda: env.closed == 1)
  assert env.overlaps == 0


def test_close_follows_a_stuck_step_while_the_loop_lives(runner):
  env = fakes.SyncScriptEnv(faults={"step": "hang"})

  async def main():
    result = await tc.TrajectoryCollectEngine(
      fakes.ListAgent(), env, fakes.say_x, deadlines=soon("step"), runner=runner
    ).collect()
    assert env.closed == 0
    env.release.set()
    while not env.closed or len(asyncio.all_tasks()) > 2:
      await asyncio.sleep(0.01)
    return result

  result = asyncio.run(asyncio.wait_for(main(), 20))
  assert result.status is Status.TIMEOUT
  assert env.closed == 1 and env.overlaps == 0


def test_a_coroutine_that_refuses_to_be_cancelled_is_left(runner):
  class Env(fakes.ScriptEnv):
    stop = False

    async def step(self, action):
      while not self.stop:
        try:
          await asyncio.sleep(0.02)
        except asyncio.CancelledError:
          pass

    async def close(self):
      assert self.stop
      await super().close()

  env = Env()

  async def main():
    result = await tc.TrajectoryCollectEngine(
      fakes.ListAgent(), env, fakes.say_x, deadlines=soon("step"), runner=runner
    ).collect()
    assert env.closed == 0 and len(runner.stuck) == 1
    env.stop = True
    while not env.closed or len(asyncio.all_tasks()) > 2:
      await asyncio.sleep(0.01)
    return result

  result = asyncio.run(asyncio.wait_for(main(), 20))
  assert result.status is Status.TIMEOUT
  assert result.metrics["quarantined"] == 1


@pytest.mark.parametrize("env_type", [fakes.ScriptEnv, fakes.SyncScriptEnv])
@pytest.mark.parametrize("stage", ["reset", "step"])
def test_cancellation_cleans_up_and_goes_through(env_type, stage, runner):
  env = env_type(faults={stage: "hang"})
  recorder = fakes.Recorder()

  async def main():
    engine = tc.TrajectoryCollectEngine(
      fakes.ListAgent(), env, fakes.say_x, observers=recorder, runner=runner
    )
    task = asyncio.ensure_future(engine.collect())
    while f"env.{stage}" not in env.log:
      await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert task.cancelled()
    return engine.trajectory

  result = asyncio.run(main())
  assert result.status is Status.CANCELLED
  assert recorder.of(events.EpisodeFinished)[0].trajectory is result
  if env_type is fakes.SyncScriptEnv:
    assert env.closed == 0
    env.release.set()
  assert fakes.wait_until(lambda: env.closed == 1)
  if env_type is fakes.SyncScriptEnv:
    assert env.overlaps == 0


def test_a_second_cancellation_does_not_cut_the_cleanup_short(runner):
  class Env(fakes.ScriptEnv):
    closing = False
    closed_well = False

    async def close(self):
      self.closing = True
      await asyncio.sleep(0.05)
      self.closed_well = True

  env = Env(faults={"step": "hang"})

  async def main():
    engine = tc.TrajectoryCollectEngine(
      fakes.ListAgent(),
      env,
      fakes.say_x,
      runner=runner,
      deadlines=tc.Deadlines(),
    )
    task = asyncio.ensure_future(engine.collect())
    while "env.step" not in env.log:
      await asyncio.sleep(0.005)
    task.cancel()
    while not env.closing:
      await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert engine.trajectory.status is Status.CANCELLED
    while not env.closed_well:
      await asyncio.sleep(0.005)

  asyncio.run(asyncio.wait_for(main(), 20))


def test_many_lost_threads_are_replaced_and_bounded():
  pool = tc.WorkerPool(max_threads=2, max_lost=3, idle=0.2)
  runner = tc.CallRunner(pool, grace=0.0)
  hung = threading.Event()

  async def call(fn, **kwargs):
    return await runner.call(fn, **kwargs)

  async def main():
    for lost in range(1, 5):
      with pytest.raises(concurrency.CallTimeout) as caught:
        await call(lambda: hung.wait(30), seconds=0.02)
      assert caught.value.stuck is not None
      assert pool.lost == lost
      if lost < 5:
        assert await call(lambda: 7) == 7
    with pytest.raises(concurrency.CallTimeout):
      await call(lambda: hung.wait(30), seconds=0.02)
    # Five are lost, two more than allowed: the two threads are gone.
    with pytest.raises(concurrency.PoolExhaustedError, match="max_lost=3"):
      await call(lambda: 1)
    hung.set()
    while pool.lost:
      await asyncio.sleep(0.01)
    assert await call(lambda: 2) == 2

  asyncio.run(main())
  assert pool.close()


def test_waiting_for_a_thread_does_not_count_as_running(runner):
  pool = tc.WorkerPool(max_threads=1)
  runner = tc.CallRunner(pool)
  done = []

  def work(i):
    threading.Event().wait(0.4)
    done.append(i)

  async def main():
    await asyncio.gather(*(runner.call(work, i, seconds=2.0) for i in range(8)))

  asyncio.run(main())
  assert done == list(range(8))
  assert pool.close()


def test_faults_in_a_fifth_of_all_episodes(runner):
  """Groups keep completing; nothing leaks; the counts add up."""
  rng = random.Random(0)
  stages = ["create", "reset", "step", "model", "reward", "close"]
  kinds = ["raise", "hang", "garbage"]
  plans = {}
  released = threading.Event()

  def make(task):
    number = len(plans)
    fault = None
    if rng.random() < 0.2:
      fault = (rng.choice(stages), rng.choice(kinds))
    plans[number] = fault
    if fault and fault[0] == "create":
      raise OSError("no machine left")
    env_type = rng.choice([fakes.ScriptEnv, fakes.SyncScriptEnv])
    env = env_type((0.0, 1.0), faults={fault[0]: fault[1]} if fault else None)
    if env_type is fakes.SyncScriptEnv:
      env.release = released
    agent = fakes.ListAgent()
    agent.fault = fault
    agent.messages_of = fault
    env.fault = fault
    envs.append(env)
    agents.append(agent)
    return agent, env

  envs, agents = [], []

  async def model(messages):
    await asyncio.sleep(0)
    owner = next(a for a in agents if a.messages is messages)
    if owner.fault and owner.fault[0] == "model":
      if owner.fault[1] == "raise":
        raise OSError("server went away")
      if owner.fault[1] == "hang":
        await asyncio.sleep(3600)
      return None
    return "x"

  async def reward(trajectory, env):
    if env.fault and env.fault[0] == "reward":
      if env.fault[1] == "raise":
        raise OSError("no judge")
      if env.fault[1] == "hang":
        await asyncio.sleep(3600)
      return None
    return 0.0

  before = threading.active_count()
  recorder = fakes.Recorder()
  collector = tc.GroupCollector(
    make,
    model,
    tc.CollectConfig(group_size=4, deadlines=LONGER, concurrency=64),
    max_turns=4,
    final_reward_fn=reward,
    observers=recorder,
    runner=runner,
  )

  async def main():
    result = await collected.groups(collector, [f"t{i}" for i in range(40)])
    released.set()
    while runner.stuck or len(asyncio.all_tasks()) > 2:
      await asyncio.sleep(0.01)
    return result

  groups = asyncio.run(asyncio.wait_for(main(), 110))
  assert len(groups) == 40
  ended = [t for group in groups for t in group]
  assert len(ended) == 160 and len(plans) == 160
  planned = sum(1 for fault in plans.values() if fault and fault[0] != "close")
  broken = [t for t in ended if not t.status.is_policy_outcome]
  assert planned > 15
  assert len(broken) == planned
  assert all(t.error for t in broken)
  assert all(
    t.status is Status.SUCCEEDED and t.reward == 1.0
    for t in ended
    if t not in broken
  )
  assert len(recorder.of(events.EpisodeFinished)) == 160
  assert all(env.closed == 1 for env in envs)
  assert sum(getattr(env, "overlaps", 0) for env in envs) == 0
  assert fakes.wait_until(lambda: threading.active_count() <= before)
  gc.collect()  # An exception nobody retrieved would be reported here.


@pytest.mark.parametrize("done", [2, -1, "yes", None, 0.0])
def test_done_must_be_a_bool(done, runner):
  class Env(fakes.ScriptEnv):
    async def step(self, action):
      return "observation", 0.0, done, {}

  result, _ = run(fakes.ListAgent(), Env(), runner=runner)
  assert result.status is Status.ENV_ERROR
  assert "must return done as a bool" in result.error


def test_an_evaluation_that_needs_arguments_is_not_the_engines_to_ask(runner):
  class Env(fakes.ScriptEnv):
    async def evaluate(self, answer):
      raise AssertionError("not asked")

  result, faults = run(fakes.ListAgent(), Env(), runner=runner, max_steps=1)
  assert result.status is Status.MAX_TURNS and not faults
