"""The episodes' loop survives exits, and says so when it dies."""

import asyncio
import os
import signal
import threading
import time

import pytest
from tunix.rl.multi_turn.run import loop_thread


@pytest.fixture
def loop():
  thread = loop_thread.LoopThread()
  yield thread
  thread.close(5.0)
  assert not thread._thread.is_alive()  # pylint: disable=protected-access


async def forever():
  await asyncio.sleep(3600)


@pytest.mark.parametrize("exit_", [SystemExit(3), KeyboardInterrupt("no key")])
def test_a_task_that_nobody_awaits_does_not_end_the_loop(loop, exit_):
  async def leave():
    raise exit_

  async def work():
    task = asyncio.create_task(leave())
    while not task.done():
      await asyncio.sleep(0.01)
    return "still here"

  assert loop.wait(work(), threading.Event()) == "still here"


@pytest.mark.parametrize("exit_", [SystemExit(3), GeneratorExit()])
def test_an_exit_of_the_work_itself_is_an_error(loop, exit_):
  async def leave():
    raise exit_

  with pytest.raises(RuntimeError, match=type(exit_).__name__):
    loop.wait(leave(), threading.Event())


def break_selector(loop):
  selector = loop._loop._selector  # pylint: disable=protected-access

  def broken(timeout):
    del selector.select  # Once.
    raise OSError(9, "Bad file descriptor")

  selector.select = broken


@pytest.mark.parametrize(
  "kill, reason",
  [
    (lambda loop: asyncio.get_running_loop().stop(), "loop.stop"),
    (break_selector, "OSError.*Bad file descriptor"),
  ],
)
def test_a_loop_that_dies_ends_the_wait_with_its_reason(loop, kill, reason):
  reports = []
  loop.on_death(reports.append)

  async def work():
    kill(loop)
    await forever()

  began = time.monotonic()
  with pytest.raises(loop_thread.LoopDiedError, match=reason) as died:
    loop.wait(work(), threading.Event())
  assert time.monotonic() - began < 30
  assert reports == [died.value]
  loop.on_death(reports.append)  # It has died already.
  assert reports == [died.value] * 2


def test_what_is_under_way_is_closed_after_the_loop_died(loop):
  closed = threading.Event()

  async def episode():
    try:
      await forever()
    finally:
      await asyncio.sleep(0.01)
      closed.set()

  async def work():
    asyncio.get_running_loop().stop()
    await forever()

  loop.submit(episode())
  with pytest.raises(loop_thread.LoopDiedError):
    loop.wait(work(), threading.Event())
  loop.close(5.0)
  assert closed.is_set()


def test_work_for_a_loop_that_is_gone_fails_at_once(loop):
  loop.close(5.0)
  with pytest.raises(loop_thread.LoopDiedError):
    loop.submit(forever()).result(0)


def test_ctrl_c_ends_the_wait(loop):
  stop = threading.Event()
  before = signal.signal(signal.SIGINT, lambda *unused: stop.set())
  timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
  timer.start()
  try:
    with pytest.raises(loop_thread.Interrupted):
      loop.wait(forever(), stop)
  finally:
    signal.signal(signal.SIGINT, before)
    timer.join()
