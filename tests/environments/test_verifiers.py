"""Environments of the package verifiers, played by the package itself.

It lives in an environment of its own, made by `make verifiers`. Skipped where
there is none.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from agent_services.serving import answers
from agent_services.serving import app as app_lib
from agent_services.serving import media
from agent_services.serving import prompts
from agent_services.serving import service as service_lib
from agent_services.serving.sessions import session_store
import httpx
import numpy as np
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.clients import scripted_client
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.environments.verifiers import environment
from tunix.rl.multi_turn.environments.verifiers import worker
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import line_process
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

_ROOT = pathlib.Path(__file__).parents[2]
PYTHON = pathlib.Path(
  os.environ.get("VERIFIERS_PYTHON", _ROOT / ".venv-verifiers/bin/python")
)
PYTHON4 = pathlib.Path(
  os.environ.get("VERIFIERS4_PYTHON", _ROOT / ".venv-verifiers4/bin/python")
)
MODULES = _ROOT / "tests/helpers/verifiers_environments"
CALL = (
  '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
)
needed = pytest.mark.skipif(
  not PYTHON.exists(), reason="no verifiers: make verifiers"
)
slow = pytest.mark.slow  # Importing the package takes seconds.


def installed(test):
  return pytest.mark.peer("verifiers")(needed(test))


def installed4(test):
  """Marks a test that needs verifiers 0.4, with its tasksets."""
  absent = pytest.mark.skipif(
    not PYTHON4.exists(), reason="no verifiers 0.4: make verifiers4"
  )
  return pytest.mark.peer("verifiers4")(absent(test))


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", name="server")
def _server():
  """A server whose policy calls `add` first, and reads back the sum."""
  _, processor, tokenizer = checkpoint.create_policy("nano", screen=(32, 32))
  renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)

  def answer(prompt, session):
    del session
    text = tokenizer.decode(prompt.tokens)
    answered = "It is 7." if "sum 7" in text else CALL
    if "no tool" in text.lower() or "unknown tool" in text.lower():
      answered = "There is none."  # Asking again would have no end.
    return [*renderer.encode(answered), renderer.end_of_turn_id]

  service = service_lib.Service(
    prompts.ServedPolicy(
      name="nano",
      client=scripted_client.ScriptedClient(answer),
      renderer=renderer,
      parser=tool_parser.make_tool_parser("qwen"),
      decoder=answers.TokenDecoder(
        renderer.decode, tokenizer, renderer.end_of_turn_id
      ),
      context_length=1 << 16,
    ),
    session_store.SessionStore(renderer),
    media.MediaLoader(images_lib.ImageStore()),
  )
  with http_server.LoopbackServer(app_lib.OpenAIApp(service).asgi) as server:
    yield server.url
  environment.close_workers()


def make(index=0, split="train", episode_s=60.0, start_s=120.0, **args):
  return environment.VerifiersEnvironment(
    {"split": split, "index": index, "seed": 0},
    module="counting-tools",
    args=args,
    path=str(MODULES),
    python=str(PYTHON),
    episode_s=episode_s,
    start_s=start_s,
  )


def make_task(kind="", episode_s=240.0, **args):
  return environment.VerifiersEnvironment(
    {"split": "train", "index": 0, "seed": 0},
    module="counting-taskset",
    args={"taskset": {"task": {"kind": kind}}, **args},
    path=str(MODULES),
    python=str(PYTHON4),
    episode_s=episode_s,
  )


async def episode(env, url):
  """(the step's result, the session's sequences)."""
  async with httpx.AsyncClient(base_url=url, timeout=30) as client:
    response = await client.post("/rl/start_session", json={"task_id": "t"})
    started = response.json()
    session = environment.PolicySession(
      started["base_url"],
      started["api_key"],
      "nano",
      {"max_tokens": 64, "temperature": 1.0, "extra_body": {"top_k": 0}},
      30.0,
    )
    await env.reset()
    result = await env.step(environment.hand_over(session))
    exported = await client.post(
      "/export_trajectories",
      json={
        "session_id": started["session_id"],
        "style": "concat",
        "drop": True,
      },
    )
  return result, list(exported.json()["interactions"].values())


@installed
@slow
def test_its_tools_turns_and_rubric_are_the_packages_own(server):
  (observation, reward, ended, info), sequences = asyncio.run(
    episode(make(kind="tool"), server)
  )
  assert observation == {} and ended and reward == 1.0 and info["success"]
  assert info["metrics"]["has_sum"] == 1.0
  roles = [m["role"] for m in info["completion"]]
  assert roles == ["assistant", "tool", "assistant"]
  assert info["completion"][1]["content"] == "sum 7"
  [sequence] = sequences  # The second turn extends the first.
  mask = np.asarray(sequence["tensor_dict"]["loss_mask"][0])
  starts = np.flatnonzero(np.diff(mask.astype(int)) == 1)
  assert len(starts) == 2


@installed
@slow
def test_rows_are_drawn_once_a_pass_and_held_out_ones_never(server):
  async def play_all():
    draws = [("train", i) for i in range(16)] + [("eval", i) for i in (0, 1)]
    return await asyncio.gather(
      *(episode(make(i, split, kind="tool"), server) for split, i in draws)
    )

  started = time.monotonic()
  rows = [info["example_id"] for (_, _, _, info), _ in asyncio.run(play_all())]
  # Ten rows, every fifth of which is held out; two passes of eight.
  assert sorted(rows[:8]) == sorted(rows[8:16]) == [1, 2, 3, 4, 6, 7, 8, 9]
  assert rows[:8] != rows[8:16]
  assert sorted(rows[16:]) == [0, 5]
  assert time.monotonic() - started < 60  # At once, in one process.


FAULTS = {
  "raises": "no such answer",
  "nan": "returned the reward nan",
  "waits": "not over after 2 s; raise environment.options.episode_s",
  "dies": "ended with status 3.*the last words",
}


@installed
@slow
def test_what_fails_is_an_error_and_no_reward_of_0(server, monkeypatch):
  """One process outlives each of its episodes' errors but the last."""
  monkeypatch.setattr(line_process, "CANCEL_S", 60.0)
  workers = set()
  for fault, words in FAULTS.items():
    env = make(
      kind=",".join(FAULTS),
      seconds=60.0,
      episode_s=2.0 if fault == "waits" else 60,
    )
    with pytest.raises(environment.VerifiersError, match=words):
      asyncio.run(episode(env, server))
    workers.add(env._worker)
  assert len(workers) == 1


@installed
@slow
def test_rewards_of_a_whole_group_are_refused(server):
  words = "rewards of a whole group"
  with pytest.raises(environment.VerifiersError, match=words):
    asyncio.run(episode(make(kind="group"), server))


@installed
@slow
def test_a_process_that_hangs_is_ended_and_the_next_episode_plays(
  server, monkeypatch
):
  monkeypatch.setattr(line_process, "CANCEL_S", 0.5)
  env = make(kind="blocks", seconds=60.0, episode_s=2.0)
  with pytest.raises(environment.VerifiersError, match="not over after 2 s"):
    asyncio.run(episode(env, server))
  process = env._worker
  until = time.monotonic() + 10
  while process.alive and time.monotonic() < until:
    time.sleep(0.05)
  assert not process.alive and "blocks its event loop" in process._end
  # Killed from outside between two episodes, it is started anew.
  again = make(kind="tool")
  asyncio.run(episode(again, server))
  os.kill(again._worker._process.pid, signal.SIGKILL)
  again._worker._process.wait(10)
  (_, reward, _, _), _ = asyncio.run(episode(make(kind="tool"), server))
  assert reward == 1.0


def one_update(folder, *settings):
  """Trains one update; (the episodes trained on, the row of metrics)."""
  status = train.main([
      "environment=verifiers", f"environment.options.path={MODULES}",
      f"run.dir={folder}", "name=a", "steps=1", "collect.group_size=4",
      "learner.groups_per_step=1", "engine.slots=4", "collect.concurrency=8",
      "learner.rows=2", "learner.skip_zero_advantage=false",
      "report.progress=none", "sampling.max_new_tokens=16",
      "eval.episodes_per_task=1", "eval.modes=[sampled]", *settings,
  ])  # fmt: skip
  environment.close_workers()
  assert status == 0
  lines = (folder / "a" / "trajectories.jsonl").read_text().splitlines()
  trained = [t for t in map(json.loads, lines) if t["split"] == "train"]
  assert len(trained) >= 4
  summary = json.loads((folder / "a" / "summary.json").read_text())
  assert not summary.get("faults")
  [metrics] = map(
    json.loads, (folder / "a" / "metrics.jsonl").read_text().splitlines()
  )
  assert metrics["logprob_gap_max"] < 1e-3
  return trained, metrics


@installed
@slow
def test_a_run_trains_on_such_an_environment(tmp_path):
  trained, _ = one_update(
    tmp_path,
    "environment.options.module=counting-tools",
    f"environment.options.python={PYTHON}",
    "environment.options.args.kind=talk",
  )
  for row in trained:
    [sequence] = row["sequences"]
    [step] = row["steps"]
    assert step["info"]["metrics"]["num_turns"] == 2
    # The rubric's reward, recomputed from the reply.
    output = step["info"]["completion"][-1].get("content") or ""
    assert row["reward"] == pytest.approx(len(output) / 100)
    assert max(sequence["turn_ids"]) == 1


@installed4
@slow
def test_a_run_trains_on_a_taskset(tmp_path):
  trained, metrics = one_update(
    tmp_path,
    "environment.options.module=counting-taskset",
    f"environment.options.python={PYTHON4}",
    "environment.options.args.taskset.task.kind=chat",
    "sampling.temperature=3",  # The tiny policy is sure of its words.
    "environment.options.start_s=240",
    "environment.options.episode_s=240",
    "collect.deadlines.reset=250",
    "collect.deadlines.step=250",
    "collect.deadlines.turn=260",
  )
  for row in trained:
    assert len(row["sequences"]) == 1
    [step] = row["steps"]
    output = step["info"]["completion"][-1].get("content") or ""
    assert row["reward"] == pytest.approx(len(output) / 100)
  assert metrics["grad_norm"] > 0


@installed4
@slow
def test_a_taskset_is_played_with_its_tools_and_rewards(server):
  (observation, reward, ended, info), sequences = asyncio.run(
    episode(make_task(), server)
  )
  assert observation == {} and ended and reward == 1.0 and info["success"]
  roles = [m["role"] for m in info["completion"]]
  assert roles == ["system", "user", "assistant", "tool", "assistant"]
  assert "sum 7" in str(info["completion"][3]["content"])
  assert info["example_id"] % 5  # Every fifth is held out.
  [sequence] = sequences  # The second turn extends the first.
  mask = np.asarray(sequence["tensor_dict"]["loss_mask"][0])
  starts = np.flatnonzero(np.diff(mask.astype(int)) == 1)
  assert len(starts) == 2


@installed4
@slow
@pytest.mark.parametrize(
  "kind, words",
  [
    ("raises", "the rollout failed: TaskError: .*no such answer"),
    ("nan", "returned the reward nan"),
  ],
)
def test_a_taskset_that_fails_is_an_error_and_no_reward_of_0(
  server, kind, words
):
  with pytest.raises(environment.VerifiersError, match=words):
    asyncio.run(episode(make_task(kind=kind), server))
  environment.close_workers()


def test_a_start_that_failed_stops_what_the_taskset_shares():
  events = []

  class Env:
    """The calls of `Tasksets` to an environment of verifiers 0.4."""

    @contextlib.asynccontextmanager
    async def shared_tools(self):
      events.append("tools")
      yield {}
      events.append("no tools")

    async def start(self):
      events.append("start")
      raise OSError("no disk")

    async def stop(self):
      events.append("stop")

  tasksets = object.__new__(worker.Tasksets)
  tasksets._env, tasksets._stack = Env(), None
  tasksets._start = asyncio.Lock()

  async def twice():
    for _ in range(2):  # The second one starts anew.
      with pytest.raises(OSError, match="no disk"):
        await tasksets._serve()

  asyncio.run(twice())
  assert events == ["tools", "start", "stop", "no tools"] * 2


def test_choosing_it_chooses_the_way_to_the_policy():
  config = config_lib.load_config(["environment=verifiers"])
  assert config.rollout.via == "proxy"
  assert config.rollout.agent.endswith("verifiers_agent:play")
  assert config.collect.deadlines.step > 280  # Longer than episode_s.


@pytest.mark.parametrize(
  "options, words",
  [
    ({"module": ""}, "module='' must name a module"),
    ({"python": "/no/python"}, "no such file; run `make verifiers`"),
    ({"path": "/no/folder"}, "path=/no/folder is no directory"),
    ({"episode_s": 0}, "episode_s=0 must be a number of seconds"),
    ({"args": {"a": {1}}}, "must be JSON"),
  ],
)
def test_an_option_that_is_wrong_is_named(options, words):
  arguments = {"module": "counting-tools", "python": __file__, **options}
  with pytest.raises(ValueError, match=words):
    environment.VerifiersEnvironment(
      {"split": "train", "index": 0, "seed": 0}, **arguments
    )


def test_a_step_without_a_session_says_which_agent_makes_one():
  env = environment.VerifiersEnvironment(
    {"split": "train", "index": 0, "seed": 0}, module="m", python=__file__
  )
  with pytest.raises(ValueError, match="set rollout.via=proxy"):
    asyncio.run(env.step("nothing"))


def test_an_interpreter_without_the_package_is_reported():
  env = environment.VerifiersEnvironment(
    {"split": "train", "index": 0, "seed": 0}, module="m", python=sys.executable
  )
  missing = "No module named 'verif"
  with pytest.raises(environment.VerifiersError, match=missing):
    asyncio.run(env.reset())


@pytest.mark.parametrize("version", ["0.2.0", "0.5.0"])
def test_a_later_version_is_refused_by_name(tmp_path, monkeypatch, version):
  """Before it is imported: 0.2 and 0.3 then fail for a package of theirs."""
  info = tmp_path / f"verifiers-{version}.dist-info"
  info.mkdir()
  (info / "METADATA").write_text(f"Name: verifiers\nVersion: {version}\n")
  (tmp_path / "verifiers.py").write_text("import datasets_of_theirs\n")
  monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{_ROOT}")
  python = tmp_path / "python"  # A worker inherits no PYTHONPATH.
  python.write_text(
    f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n'
  )
  python.chmod(0o755)
  environment_ = environment.VerifiersEnvironment(
    {"split": "train", "index": 0, "seed": 0},
    module="counting-tools",
    python=str(python),
  )
  words = rf"verifiers {version} is not supported.*install 'verifiers<0\.2'"
  with pytest.raises(environment.VerifiersError, match=words):
    asyncio.run(environment_.reset())
  ran = subprocess.run(
    [
      sys.executable,
      "-c",
      "import tunix_multi_turn; tunix_multi_turn.load_environment()",
    ],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert re.search(words, ran.stderr), ran.stderr


def test_a_start_that_failed_is_not_tried_at_each_episode(monkeypatch):
  env = environment.VerifiersEnvironment(
    {"split": "train", "index": 0, "seed": 0},
    module="another",
    python=sys.executable,
  )
  starts = []
  start = environment.Worker.__init__

  def counted(*args):
    starts.append(args)
    start(*args)

  monkeypatch.setattr(environment.Worker, "__init__", counted)
  for expected in (1, 1, 2):
    if expected == 2:
      monkeypatch.setattr(environment, "_RETRY_S", 0.0)
    missing = "No module named 'verif"
    with pytest.raises(environment.VerifiersError, match=missing):
      asyncio.run(env.reset())
    assert len(starts) == expected
