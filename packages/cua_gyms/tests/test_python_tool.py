"""The policy's Python: what it can do, and everything that it cannot."""

import asyncio
import pathlib
import threading
import time

from cua_gyms.sandbox import python_tool
from cua_gyms.sandbox import rooms
import pytest
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.tools import tool_registry

sandboxed = pytest.mark.skipif(
  bool(rooms.no_namespaces()), reason="no namespaces here"
)


def run(*codes, **options):
  """Texts of calls in one episode."""
  tools = tool_registry.ToolSet(
    [{"python": options}] if options else ["python"]
  )

  async def play():
    env = environments.ToolEnvironment(
      "q", tools.for_task({}), max_steps=99, tool_timeout=60.0
    )
    env.reset()
    texts = []
    try:
      for code in codes:
        call = trajectory.ToolCall("python", {"code": code})
        texts += (await env.step([call]))[0]["tool_outputs"].values()
    finally:
      await env.close()
    return texts

  return asyncio.run(play())


@sandboxed
def test_code_runs_files_stay_and_failures_are_errors():
  first, second, third, fourth = run(
    "print(6 * 7); open('x', 'w').write('kept')",
    "print(open('x').read())",
    "1 / 0",
    "raise SystemExit(3)",
  )
  assert (first, second) == ("42\n", "kept\n")
  assert third.startswith("Error") and "ZeroDivisionError" in third
  assert "status 3" in fourth


@sandboxed
def test_nothing_of_the_machine_is_reached(tmp_path):
  secret = tmp_path / "secret"
  secret.write_text("x")
  network, file, outside = run(
    "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
    f"print(open({str(secret)!r}).read())",
    "open('/usr/x', 'w')",
  )
  assert "OSError" in network or "unreachable" in network
  assert "FileNotFoundError" in file
  assert "Read-only" in outside or "Permission" in outside


@sandboxed
def test_limits():
  start = time.monotonic()
  slow, memory, disk, forks, long_, after = run(
    "while True: pass",
    "x = bytearray(1 << 30)",
    "open('big', 'wb').write(b'x' * (40 << 20))",
    "import os, time\nfor _ in range(200): os.fork() or time.sleep(5) or"
    " os._exit(0)",
    "print('x' * 100000)",
    "print('fine')",
    seconds=2.0,
    memory_mb=256,
    disk_mb=16,
    processes=16,
    output_chars=500,
  )
  assert "longer than 2 s" in slow
  assert "MemoryError" in memory
  assert disk.startswith("Error")
  assert "BlockingIOError" in forks or "longer" in forks
  assert len(long_) < 600 and "cut off" in long_
  assert after == "fine\n"
  assert time.monotonic() - start < 60


@sandboxed
def test_nothing_is_left_after_a_call_or_an_episode():
  start = (
    "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'],"
    " start_new_session=True)\nprint('started')"
  )
  look = (
    "import pathlib\nfor path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):"
    "\n  try:\n    line = path.read_bytes()\n  except OSError:\n    continue"
    "\n  assert b'time.sleep(99)' not in line, path"
  )
  assert run(start, look, start) == ["started\n", "", "started\n"]
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      assert b"time.sleep(99)" not in path.read_bytes()
    except OSError:
      pass


def test_no_sandbox_is_refused_unless_asked_for_by_name(monkeypatch):
  monkeypatch.setattr(rooms, "no_namespaces", lambda: "not here")
  for options in ({}, {"isolation": "auto"}):
    with pytest.raises(ValueError, match="isolation='processes'"):
      python_tool.PythonTool(options)
  assert run("print(1)", isolation="processes") == ["1\n"]


@pytest.mark.parametrize(
  "options, says",
  [
    ({"second": 1}, "did you mean 'seconds'"),
    ({"seconds": "long"}, "float"),
    ({"memory_mb": 0}, "> 0"),
    ({"isolation": "none"}, "isolation"),
  ],
)
def test_options(options, says):
  with pytest.raises(ValueError, match=says):
    tool_registry.ToolSet([{"python": options}])


def test_tool_success_rewards_code_that_runs():
  fn = rewards.get_reward_fn("tool_success")
  step = trajectory.Step(info={"tool_calls": 4, "tool_errors": 1})
  assert fn({}, step) == 0.75


@sandboxed
def test_episodes_at_once_do_not_mix():
  tools = tool_registry.ToolSet(["python"])
  outputs = {}

  async def play(i):
    env = environments.ToolEnvironment(
      "q", tools.for_task({}), tool_timeout=60.0
    )
    env.reset()
    code = f"open('x', 'a').write('{i} '); print(open('x').read())"
    for _ in range(2):
      call = trajectory.ToolCall("python", {"code": code})
      text = (await env.step([call]))[0]["tool_outputs"][call.call_id]
    outputs[i] = text.split()
    await env.close()

  async def all_():
    await asyncio.gather(*(play(i) for i in range(12)))

  before = threading.active_count()
  asyncio.run(all_())
  assert outputs == {i: [str(i)] * 2 for i in range(12)}
  assert threading.active_count() < before + 100
