"""Other people's code under a deadline: what it may and may not cost us."""

import asyncio
import threading
import time

import pytest
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency

SHORT = 0.05


def wait_until(condition):
  pause = threading.Event()
  for _ in range(1000):
    if condition():
      return True
    pause.wait(0.01)
  return False


class TestOffTheClock:
  @pytest.mark.parametrize("inline", [False, True])
  async def test_waiting_for_others_costs_a_call_no_time(self, inline):
    runner = concurrency.CallRunner(grace=0.05)

    async def call(waits, works):
      with concurrency.off_the_clock():
        await asyncio.sleep(waits)
      await asyncio.sleep(works)
      return "done"

    loop = asyncio.get_running_loop()
    with concurrency.clocked() as clock:
      result = await runner.call(
        call, 0.4, 0.01, seconds=0.2, at=loop.time() + 0.25, inline=inline
      )
    assert result == "done"
    assert 0.4 <= clock.stopped_s < 1
    started = time.monotonic()
    with pytest.raises(concurrency.CallTimeout):
      await runner.call(call, 0.2, 30, seconds=0.1, inline=inline)
    assert 0.3 <= time.monotonic() - started < 2

  async def test_a_task_may_outlive_the_call_that_began_it(self):
    tasks = []

    async def waiting():
      await asyncio.sleep(0.2)
      with concurrency.off_the_clock():
        await asyncio.sleep(0)

    async def begins():
      tasks.append(asyncio.create_task(waiting()))

    await concurrency.inline_deadline(begins(), 0.1)
    await tasks[0]

  async def test_every_deadline_around_it_stands_still(self):

    async def innermost():
      await asyncio.sleep(0.05)
      # Two at a time, of which one ends first.
      await asyncio.gather(waiting(0.1), waiting(0.5))
      return 3

    async def waiting(seconds):
      with concurrency.off_the_clock():
        await asyncio.sleep(seconds)

    async def middle():
      return await concurrency.inline_deadline(innermost(), 0.2)

    assert await concurrency.with_deadline(middle(), 0.25) == 3
    with concurrency.off_the_clock():  # Without a call around it.
      pass


class TestWorkerPool:
  def test_result_and_exception(self):
    pool = concurrency.WorkerPool(max_threads=2)
    assert pool.run(lambda: 3, 5.0) == 3
    with pytest.raises(KeyError, match="x"):
      pool.run(lambda: {}["x"], 5.0)

  def test_hung_call_is_abandoned_and_its_slot_is_free_again(self):
    pool = concurrency.WorkerPool(max_threads=1)
    gate = threading.Event()
    with pytest.raises(concurrency.DeadlineExceeded, match="tool 'f'.*0.05 s"):
      pool.run(gate.wait, SHORT, "tool 'f'")
    assert pool.lost == 1
    assert pool.run(lambda: "served", 5.0) == "served"
    gate.set()
    assert wait_until(lambda: pool.lost == 0)

  def test_one_whose_thread_was_starting_at_a_ctrl_c_closes(self, monkeypatch):
    pool = concurrency.WorkerPool(max_threads=1)
    go, begin = threading.Semaphore(0), threading.Thread._bootstrap_inner

    def late(thread):
      go.acquire()
      begin(thread)

    def interrupted(event, timeout=None):
      raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", late)
    with monkeypatch.context() as patch:
      patch.setattr(threading.Event, "wait", interrupted)
      with pytest.raises(KeyboardInterrupt):
        pool.submit(lambda: None)
    assert not pool.close(timeout=0.05)
    go.release()
    assert pool.close(timeout=5)

  def test_threads_are_bounded(self):
    pool = concurrency.WorkerPool(max_threads=3)
    gate = threading.Event()
    jobs = [pool.submit(gate.wait) for _ in range(20)]
    assert pool.threads == 3
    gate.set()
    assert [pool.wait(job, 5.0) for job in jobs] == [True] * 20
    assert pool.threads == 3

  def test_deadline_counts_from_the_start_of_the_call(self):
    # With one thread the second call waits for the first one's deadline.
    runner = concurrency.CallRunner(concurrency.WorkerPool(max_threads=1))
    gate = threading.Event()

    async def both():
      return await asyncio.gather(
        runner.call(gate.wait, seconds=2.5),
        runner.call(lambda: "in time", seconds=1.5),
        return_exceptions=True,
      )

    first, second = asyncio.run(both())
    gate.set()
    assert isinstance(first, concurrency.DeadlineExceeded)
    assert second == "in time"

  def test_too_many_hung_calls_are_refused(self):
    pool = concurrency.WorkerPool(max_threads=1, max_lost=1)
    gate = threading.Event()
    for _ in range(2):
      with pytest.raises(concurrency.DeadlineExceeded):
        pool.run(gate.wait, SHORT)
    with pytest.raises(concurrency.PoolExhaustedError, match="max_lost=1"):
      pool.submit(lambda: 1)
    gate.set()
    assert wait_until(lambda: pool.lost == 0)
    assert pool.run(lambda: 1, 5.0) == 1

  def test_queued_call_that_is_abandoned_never_runs(self):
    pool = concurrency.WorkerPool(max_threads=1)
    gate, ran = threading.Event(), []
    first = pool.submit(gate.wait)
    second = pool.submit(lambda: ran.append(1))
    pool.abandon(second)
    gate.set()
    pool.wait(first, 5.0)
    assert pool.run(lambda: 1, 5.0) == 1
    assert not ran

  def test_cancelled_waiter_abandons_its_call(self):
    pool = concurrency.WorkerPool(max_threads=1)
    gate, started = threading.Event(), threading.Event()

    def hang():
      started.set()
      gate.wait()

    async def main():
      runner = concurrency.CallRunner(pool, grace=0.0)
      task = asyncio.create_task(runner.call(hang))
      await asyncio.to_thread(started.wait)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task

    asyncio.run(main())
    assert pool.lost == 1
    gate.set()

  @pytest.mark.parametrize("error", [SystemExit(3), StopIteration(3)])
  def test_exits_of_user_code_become_errors(self, error):
    def leave():
      raise error

    pool = concurrency.WorkerPool(max_threads=1)
    runner = concurrency.CallRunner(pool)
    for run in (pool.run, lambda f, s: asyncio.run(runner.call(f, seconds=s))):
      with pytest.raises(RuntimeError, match=type(error).__name__):
        run(leave, 5.0)

  def test_own_timeout_error_is_not_taken_for_the_deadline(self):
    def slow_socket():
      raise TimeoutError("socket")

    pool = concurrency.WorkerPool()
    with pytest.raises(TimeoutError, match="socket"):
      pool.run(slow_socket, 5.0)

  def test_a_thread_that_cannot_be_started_costs_its_own_call_only(
    self, monkeypatch
  ):
    pool = concurrency.WorkerPool(max_threads=2)
    ran = []

    def refuse(thread):
      raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
      patch.setattr(threading.Thread, "start", refuse)
      for _ in range(3):
        with pytest.raises(RuntimeError, match="can't start"):
          pool.submit(lambda: ran.append(1))
    assert pool.threads == 0
    assert pool.run(lambda: "served", 5.0) == "served"
    assert not ran and pool.close()

  def test_a_replacement_that_cannot_be_started_fails_the_queue(
    self, monkeypatch
  ):
    pool = concurrency.WorkerPool(max_threads=1)
    gate = threading.Event()
    first = pool.submit(gate.wait)
    assert first.started.wait(5.0)
    second = pool.submit(lambda: 1)

    def refuse(thread):
      raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
      patch.setattr(threading.Thread, "start", refuse)
      assert pool.abandon(first) is not None
    with pytest.raises(RuntimeError, match="can't start"):
      pool.wait(second, 5.0)
    gate.set()
    assert wait_until(lambda: pool.lost == 0)
    assert pool.run(lambda: 2, 5.0) == 2

  def test_who_gives_up_is_told_what_is_stuck(self):
    pool = concurrency.WorkerPool(max_threads=1)
    gate, stuck = threading.Event(), []

    async def main():
      with pytest.raises(concurrency.DeadlineExceeded):
        await concurrency.CallRunner(pool, grace=0.0).call(
          gate.wait, seconds=SHORT, what="f", on_stuck=stuck.append
        )

    asyncio.run(main())
    assert [s.description for s in stuck] == ["f"] and not stuck[0].returned
    gate.set()
    assert wait_until(lambda: stuck[0].returned)


class TestWithDeadline:
  def test_code_that_swallows_cancellation_is_left_behind(self):
    async def stubborn(stop):
      while not stop.is_set():
        try:
          await stop.wait()
        except asyncio.CancelledError:
          pass

    async def main():
      stop = asyncio.Event()
      with pytest.raises(concurrency.DeadlineExceeded, match="env.step"):
        await concurrency.with_deadline(stubborn(stop), SHORT, "env.step")
      stop.set()
      await asyncio.sleep(0.01)

    asyncio.run(main())

  def test_exceptions_and_results_pass(self):
    async def fail():
      raise ValueError("no")

    async def fine():
      return 7

    assert asyncio.run(concurrency.with_deadline(fine(), 5.0)) == 7
    with pytest.raises(ValueError, match="no"):
      asyncio.run(concurrency.with_deadline(fail(), 5.0))

  @pytest.mark.parametrize("seconds", [None, 5.0])
  def test_code_that_cancels_itself_does_not_cancel_the_caller(self, seconds):
    async def leave():
      raise asyncio.CancelledError("inner")

    async def main():
      with pytest.raises(RuntimeError, match="env.step cancelled itself"):
        await concurrency.with_deadline(leave(), seconds, "env.step")

    asyncio.run(main())

  @pytest.mark.parametrize("seconds", [None, 5.0])
  def test_the_callers_cancellation_goes_through(self, seconds):
    async def main():
      task = asyncio.create_task(
        concurrency.with_deadline(asyncio.sleep(60), seconds)
      )
      await asyncio.sleep(0.01)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task

    asyncio.run(main())

  def test_a_tool_that_cancels_itself_is_an_error_output(self):
    class Leaves(tools.BaseTool):
      json = {"function": {"name": "leaves"}}

      async def async_forward(self):
        raise asyncio.CancelledError("inner")

    manager = tools.ToolManager({"leaves": Leaves})
    calls = [trajectory.ToolCall("leaves"), trajectory.ToolCall("leaves")]
    outputs = asyncio.run(manager.outputs_async(calls))
    assert len(outputs) == 2
    assert all("cancelled itself" in o.error for o in outputs.values())


class TestEitherKind:
  @staticmethod
  def sync(x):
    return x + 1

  @staticmethod
  async def coroutine(x):
    return x + 1

  @staticmethod
  def returns_awaitable(x):
    return TestEitherKind.coroutine(x)

  @pytest.mark.parametrize("name", ["sync", "coroutine", "returns_awaitable"])
  def test_call_and_acall(self, name):
    fn = getattr(self, name)
    assert concurrency.call(fn, 1) == 2

    async def inside_a_loop():
      assert await concurrency.maybe_await(fn(1)) == 2
      assert concurrency.call(fn, 1) == 2
      return await concurrency.acall(fn, 1, seconds=5.0)

    assert asyncio.run(inside_a_loop()) == 2

  def test_sync_code_does_not_block_the_loop(self):
    gate = threading.Event()

    async def main():
      task = asyncio.create_task(concurrency.acall(gate.wait, seconds=5.0))
      await asyncio.sleep(0)
      gate.set()  # Only reached when the loop is free.
      return await task

    assert asyncio.run(main())


class TestCallRunner:
  def test_a_deadline_inside_a_call_is_not_the_calls_own(self):
    runner = concurrency.CallRunner(grace=0.0)

    async def impatient():
      await runner.run(asyncio.sleep(60), seconds=SHORT, what="inner")

    async def main():
      for inline in (False, True):
        with pytest.raises(concurrency.DeadlineExceeded, match="inner") as got:
          await runner.call(impatient, seconds=5.0, inline=inline)
        assert not isinstance(got.value, concurrency.CallTimeout)
      with pytest.raises(concurrency.CallTimeout, match="outer"):
        await runner.run(asyncio.sleep(60), seconds=SHORT, what="outer")

    asyncio.run(main())


class TestGuarded:
  @staticmethod
  def make():
    gate = threading.Event()

    class Door:
      closed = 0

      def knock(self):
        gate.wait(30)

      def close(self):
        self.closed += 1

    door = Door()
    runner = concurrency.CallRunner(grace=0.0)
    return gate, door, concurrency.Guarded(door, runner=runner, name="the door")

  def test_a_stuck_call_keeps_the_object_and_close_follows_it(self):
    gate, door, guarded = self.make()
    late = []

    async def main():
      with pytest.raises(concurrency.CallTimeout):
        await guarded.call("knock", seconds=SHORT)
      with pytest.raises(concurrency.StillRunningError, match="Door.knock"):
        await guarded.call("knock", seconds=SHORT)
      for _ in range(2):  # Closed once, however often it is asked for.
        with pytest.raises(concurrency.StillRunningError, match="the door"):
          await guarded.close(closed_late=late.append)
      assert not door.closed
      gate.set()
      while not late:
        await asyncio.sleep(0.01)
      assert late == [None] and door.closed == 1
      await guarded.call("knock", seconds=5.0)

    asyncio.run(main())

  def test_close_follows_a_stuck_call_without_its_loop(self):
    gate, door, guarded = self.make()

    async def main():
      with pytest.raises(concurrency.CallTimeout):
        await guarded.call("knock", seconds=SHORT)
      with pytest.raises(concurrency.StillRunningError):
        await guarded.close()

    asyncio.run(main())
    gate.set()
    assert wait_until(lambda: door.closed == 1)


@pytest.mark.parametrize("inline", [False, True])
def test_the_earlier_of_two_deadlines_ends_an_async_call(inline):
  async def main():
    runner = concurrency.CallRunner(grace=0.05)
    now = asyncio.get_running_loop().time()
    for limits in (
      {"seconds": 3600.0, "at": now + 0.1},
      {"seconds": 0.1, "at": now + 3600.0},
    ):
      with pytest.raises(concurrency.CallTimeout):
        await runner.call(asyncio.sleep, 3600, inline=inline, **limits)

  asyncio.run(main())


def test_an_object_that_gets_stuck_again_is_closed_again():
  gates = threading.Event(), threading.Event()
  closes = []

  class Thing:
    def step(self):
      gates[0].wait(30)

    def close(self):
      closes.append(1)
      if len(closes) == 1:
        gates[1].wait(30)

  async def until(condition):
    while not condition():
      await asyncio.sleep(0.01)

  async def main():
    pool = concurrency.WorkerPool(max_threads=4)
    guarded = concurrency.Guarded(
      Thing(), runner=concurrency.CallRunner(pool, grace=0.0)
    )
    with pytest.raises(concurrency.CallTimeout):
      await guarded.call("step", seconds=0.1)
    with pytest.raises(concurrency.StillRunningError):
      await guarded.close(seconds=0.1)
    gates[0].set()  # The late close begins, and hangs in its turn.
    await until(lambda: closes and guarded.stuck is not None)
    with pytest.raises(concurrency.StillRunningError):
      await guarded.close(seconds=20.0)
    gates[1].set()
    await until(lambda: len(closes) == 2)

  asyncio.run(main())


def test_calls_that_end_together_wake_the_loop_together():
  count, wakes = 8, []
  pool = concurrency.WorkerPool(max_threads=count)

  async def main():
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: (wakes.append(1), wake(*args))
    go = threading.Event()
    jobs = [pool.submit(lambda: go.wait(30)) for _ in range(count)]
    waits = [asyncio.ensure_future(pool.finished(job)) for job in jobs]
    await asyncio.sleep(0)
    go.set()
    while not all(job.future.done() for job in jobs):
      time.sleep(0.01)  # The loop cannot look meanwhile.
    time.sleep(0.05)  # For the last one's callbacks.
    assert await asyncio.gather(*waits) == [True] * count

  asyncio.run(main())
  assert pool.close()
  assert len(wakes) < count // 2
