"""Tools of a real MCP server, by pipes and by HTTP, and what goes wrong."""

import asyncio
import functools
import gc
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from tunix.rl.multi_turn import agents
from tunix.rl.multi_turn import environments
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.tools import tool_registry

pytest.importorskip("mcp")
HELPERS = pathlib.Path(__file__).parents[1] / "helpers"
COMMAND = [sys.executable, str(HELPERS / "mcp_server.py")]
ENV = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def toolset(**options):
  if "url" not in options:
    options = {"command": COMMAND, "env": ENV, **options}
  options = {"start_s": 60.0, **options}
  return tool_registry.ToolSet(["calculator", {"mcp": options}])


@pytest.fixture(name="of_run", scope="module")
def fixture_of_run():
  return toolset(call_s=20.0)


def environment(tool_set, **kwargs):
  tool_map = tool_set.for_task({})
  kwargs.setdefault("tool_timeout", 60.0)
  return environments.ToolEnvironment("q", tool_map, max_steps=20, **kwargs)


def call(name, **arguments):
  return trajectory.ToolCall(name, arguments)


async def outputs(env, *calls):
  observation, _, _, info = await env.step(list(calls))
  return list(observation["tool_outputs"].values()), info


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_second_version_of_the_package(tmp_path):
  """Tests that talk to a server pass with that version on both sides."""
  root = pathlib.Path(__file__).parents[2]
  sites = [*root.glob(".venv-agent-clients/lib/python3*/site-packages")]
  if not sites:
    pytest.skip("no second version of mcp: make agent-clients")
  for pattern in ("mcp", "mcp_types", "mcp-2*.dist-info"):
    (path,) = sites[0].glob(pattern)
    (tmp_path / path.name).symlink_to(path)
  environ = os.environ | {"PYTHONPATH": str(tmp_path)}
  version = "from importlib import metadata; print(metadata.version('mcp'))"
  run = functools.partial(
    subprocess.run,
    cwd=root,
    env=environ,
    capture_output=True,
    text=True,
    timeout=380,
  )
  assert run([sys.executable, "-c", version]).stdout.startswith("2.")
  ran = run([
      sys.executable, "-m", "pytest", "-q", "-n", "0", __file__,
      "-m", "slow or not slow",
      "-k", "not second_version and not two_tools and not this_interpreter",
  ])  # fmt: skip
  assert ran.returncode == 0, ran.stdout[-3000:]


def test_schemas_reach_the_prompt(of_run):
  names = ["calculator", "add", "count", "fail", "die", "hang", "picture"]
  assert list(of_run.classes) == names
  agent = agents.ToolAgent("", "qwen", of_run.for_task({}))
  prompt = agent.chat_completions[0]["content"]
  assert "Adds two numbers." in prompt and '"required": ["a", "b"]' in prompt


def test_calls_of_one_turn_and_errors_for_the_policy(of_run):
  async def run():
    env = environment(of_run)
    env.reset()
    try:
      return await outputs(
        env,
        call("add", a=2, b=3),
        call("calculator", expression="6*7"),
        call("fail", why="because"),
        call("add", a="x", b=1),
        call("add"),
      )
    finally:
      await env.close()

  texts, info = asyncio.run(run())
  assert texts[:2] == ["5", "42"] and info == {
    "tool_calls": 5,
    "tool_errors": 3,
    "invalid_kinds": ["tool_arguments"],
  }
  assert texts[2].startswith("Error") and "because" in texts[2]
  assert texts[3].startswith("Error") and "missing argument" in texts[4]


def test_images_reach_the_policy(of_run):
  store = images.ImageStore()

  async def run(**kwargs):
    env = environment(of_run, **kwargs)
    env.reset()
    return (await env.step([call("picture"), call("picture", good=False)]))[0]

  observation = asyncio.run(run(screenshot_tool=tools.ScreenshotTool(store)))
  (refs,) = observation["tool_images"].values()
  assert store.get(refs[0]).shape == (6, 8, 3)
  assert store.get(refs[0])[0, 0].tolist() == [255, 0, 0]
  assert "cannot be read" in list(observation["tool_outputs"].values())[1]
  agent = agents.ToolAgent("", "qwen", of_run.for_task({}))
  agent.update_from_env(observation)
  first = agent.chat_completions[1]["content"]
  assert first[0] == {"type": "image", "image": refs[0]}
  assert "a square" in first[1]["text"]
  observation = asyncio.run(run())
  assert "tool_images" not in observation
  assert "not shown" in list(observation["tool_outputs"].values())[0]


@pytest.mark.slow
def test_a_run_shares_a_session_and_an_episode_has_its_own(of_run):
  async def episodes(tool_set, n):
    async def play():
      env = environment(tool_set)
      env.reset()
      first = (await outputs(env, call("count")))[0]
      second = (await outputs(env, call("count")))[0]
      await env.step("done")
      return int(first[0]), int(second[0])

    return await asyncio.gather(*(play() for _ in range(n)))

  shared = asyncio.run(episodes(of_run, 2))
  assert len({n for pair in shared for n in pair}) == 4
  own = toolset(per="episode", prefix="my_", only=["count"])
  assert list(own.classes) == ["calculator", "my_count"]
  env = environment(own)

  async def twice():
    counts = []
    for _ in range(2):
      env.reset()
      for _ in range(2):
        counts += (await outputs(env, call("my_count")))[0]
    await env.close()
    return counts

  assert asyncio.run(twice()) == ["1", "2", "1", "2"]


def test_python_is_this_interpreter(tmp_path):
  """Also where a shell's `python` is another one, or none."""
  tool_set = toolset(
    command=["python", COMMAND[1]], env={**ENV, "PATH": str(tmp_path)}
  )
  names = tool_set.for_task({})
  assert "calculator" in names and len(names) > 1


def test_a_hang_ends_at_its_deadline_and_a_death_is_mended():
  tool_set = toolset(call_s=1.0, only=["hang", "die", "add"])

  async def run():
    env = environment(tool_set)
    env.reset()
    start = time.monotonic()
    (late,), _ = await outputs(env, call("hang", seconds=3))
    seconds = time.monotonic() - start
    (died,), _ = await outputs(env, call("die"))
    for _ in range(10):
      (after,), _ = await outputs(env, call("add", a=1, b=1))
      if after == "2":
        break
    return late, seconds, died, after

  late, seconds, died, after = asyncio.run(run())
  assert "in 1 s" in late and seconds < 5
  assert died.startswith("Error") and after == "2"


def test_streamable_http():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  server = subprocess.Popen(
    [*COMMAND, "http", str(port)],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    for _ in range(300):
      with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
          break
      time.sleep(0.1)
    tool_set = toolset(url=f"http://127.0.0.1:{port}/mcp", per="episode")

    async def run():
      env = environment(tool_set)
      env.reset()
      first, _ = await outputs(env, call("add", a=20, b=22))
      server.kill()
      server.wait(10)
      second, _ = await outputs(env, call("add", a=20, b=22))
      await env.close()
      return first + second

    first, second = asyncio.run(run())
    assert first == "42" and second.startswith("Error")
  finally:
    server.kill()
    server.wait(10)


@pytest.mark.parametrize(
  "options, says",
  [
    ({}, "a command or a url"),
    ({"command": ["x"], "url": "http://h/mcp"}, "a command or a url"),
    ({"command": ["/no/such/program"]}, "did not start"),
    ({"command": [sys.executable, "-c", "0"]}, "did not start"),
    (
      {"command": [sys.executable, "-c", "import nothing_of_it"]},
      "it wrote.*nothing_of_it",
    ),
    ({"command": ["sleep", "60"], "start_s": 0.3}, "no answer in 0.3 s"),
    ({"url": "http://127.0.0.1:9/mcp", "start_s": 5.0}, "mcp"),
    ({"url": "ftp://h"}, "mcp.url"),
    ({"command": ["x"], "call_s": 0.0}, "call_s"),
    ({"command": ["x"], "token_env": "NO_SUCH"}, "NO_SUCH"),
    ({"command": ["x"], "comand": 1}, "comand"),
    ({"command": ["x"], "per": "turn"}, "per"),
  ],
)
def test_what_is_wrong_is_named_before_the_run(options, says):
  with pytest.raises(ValueError, match=f"(?s){says}"):
    tool_registry.ToolSet([{"mcp": options}])


def test_two_tools_of_one_name(of_run):
  del of_run
  with pytest.raises(ValueError, match="two tools 'add'.*prefix"):
    tool_registry.ToolSet([
        {"mcp": {"command": COMMAND, "env": ENV, "only": ["add"]}},
        {"other": {
            "tool": "mcp", "command": COMMAND, "env": ENV, "only": ["add"]
        }},
    ])  # fmt: skip


@pytest.mark.slow
def test_processes_end_with_their_session():
  own = toolset(per="episode", only=["add"])

  async def run():
    env = environment(own)
    env.reset()
    await outputs(env, call("add", a=1, b=1))
    before = servers()
    await env.close()
    return before

  before = asyncio.run(run())
  assert before and not before & servers()


@pytest.mark.slow
def test_a_runs_session_ends_with_its_tools():
  tool_set = toolset(only=["add"])
  before = servers()
  assert before
  del tool_set
  gc.collect()
  due = time.monotonic() + 20
  while before & servers() and time.monotonic() < due:
    time.sleep(0.05)
  assert not before & servers()


def servers():
  """Ids of the test servers that this process has started."""
  pids = set()
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      command = (path / "cmdline").read_bytes()
      parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
      continue
    if b"mcp_server.py" in command and int(parent) == os.getpid():
      pids.add(int(path.name))
  return pids - SHARED


SHARED: set[int] = set()


@pytest.fixture(autouse=True)
def _shared_servers(of_run):
  del of_run
  SHARED.update(servers())
