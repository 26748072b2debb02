"""Our gyms as an environment of verifiers, played by the package itself.

It lies in environments of its own, 0.1 made by `make verifiers` and 0.4 by
`make verifiers4`. Skipped where there is none.
"""

import json
import os
import pathlib
import subprocess
import sys

from agent_services.serving import server as server_lib
import httpx
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

_ROOT = pathlib.Path(__file__).parents[2]
PYTHON = pathlib.Path(
  os.environ.get("VERIFIERS_PYTHON", _ROOT / ".venv-verifiers/bin/python")
)
PLAYER = _ROOT / "tests/helpers/verifiers_player.py"
PYTHON4 = pathlib.Path(
  os.environ.get("VERIFIERS4_PYTHON", _ROOT / ".venv-verifiers4/bin/python")
)
PLAYER4 = _ROOT / "tests/helpers/verifiers_taskset_player.py"
SCREEN = (128, 96)
pytestmark = [
  pytest.mark.slow,  # Importing the package takes seconds.
  pytest.mark.timeout(500),
]


def peer(name, python):
  """Marks a test that needs a version of the package."""
  absent = pytest.mark.skipif(
    not python.exists(), reason=f"no {name}: make {name}"
  )
  return lambda test: pytest.mark.peer(name)(absent(test))


with_0_1 = peer("verifiers", PYTHON)
with_0_4 = peer("verifiers4", PYTHON4)


@pytest.fixture(scope="module", name="server")
def _server():
  """A tiny policy behind the real engine and server."""
  policy = checkpoint.create_policy("nano", seed=0, screen=SCREEN)
  images = images_lib.ImageStore()
  engine = engine_lib.RolloutEngine(
    policy[0],
    policy[1],
    images,
    engine_config.EngineConfig(slots=2, context_length=2048),
    image_sizes=(SCREEN,),
    banned_token_ids=policy[0].config.banned_token_ids,
  )
  app = server_lib.make_app("nano", engine, policy, images)
  with http_server.LoopbackServer(app.asgi) as server:
    yield server.url
  engine.close()


def play(url, rows, settings, *, python=PYTHON, player=PLAYER, **more):
  """Starts the package, which takes seconds, once for all of `runs`."""
  request = {
      "url": f"{url}/v1", "model": "nano", "rows": rows,
      "args": arguments(settings), **more,
      "sampling": {"max_tokens": 16, "temperature": 1.0, "seed": 3},
  }  # fmt: skip
  process = subprocess.run(
    [str(python), str(player), json.dumps(request)],
    cwd=_ROOT,
    env={**os.environ, "PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert not process.returncode, process.stderr
  return json.loads(process.stdout.splitlines()[-1])


def arguments(settings):
  return {
    "settings": settings, "train": 3, "eval": 2, "python": sys.executable
  }  # fmt: skip


def images_of(messages):
  return [
    part["image_url"]["url"]
    for message in messages
    if isinstance(message["content"], list)
    for part in message["content"]
    if part["type"] == "image_url"
  ]


DESKTOP = {
  "gym": "desktop",
  "tasks": ["click-button"],
  "agent.on_parse_error": "retry",
  "environment.max_turns": 3,
}
GSM8K = arguments({"environment": "gsm8k"})
REFUSED = [
  ({"settings": {"gym": "desktopp"}}, "'desktopp'"),
  ({"train": 0}, "train=0 must be a number"),
  ({"python": "/no/python"}, "python=/no/python: no such file"),
  ({"start_s": -1}, "start_s=-1 must be"),
  ({"turn_s": 0}, "turn_s=0 must be"),
]


@pytest.fixture(scope="module", name="played")
def _played(server):
  """Episodes by the name of their run, refusals, and a session's tokens."""
  late = {"gym": "desktop", "collect.deadlines.model": 0.001}
  with httpx.Client(base_url=server, timeout=60) as client:
    started = client.post("/rl/start_session", json={"task_id": "t"}).json()
    runs = {
      "desktop": {
        "url": started["base_url"],
        "key": started["api_key"],
        "rows": [("train", 1)],
      },
      "text": {"rows": [("train", 0), ("eval", 1)], "args": GSM8K},
      "killed": {"args": GSM8K, "kill": True},
      "late": {"args": arguments(late)},
    }
    result = play(
      server,
      [("train", 0)],
      DESKTOP,
      runs=list(runs.values()),
      refused=[{"python": sys.executable, **wrong} for wrong, _ in REFUSED],
    )
    result["played"] = dict(zip(runs, result["played"], strict=True))
    result["exported"] = client.post(
      "/export_trajectories",
      json={"session_id": started["session_id"], "style": "concat"},
    ).json()["interactions"]
  return result


@with_0_1
def test_a_policy_plays_the_desktop_and_its_session_has_the_tokens(played):
  (result,) = played["played"]["desktop"]
  assert result["error"] is None, result
  assert result["stop"] == "has_final_env_response"
  turns = result["turns"]
  assert len(turns) >= 2
  for number, (prompt, completion) in enumerate(turns):
    urls = images_of(prompt)
    assert len(urls) == number + 1
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    assert [m["role"] for m in completion] == ["assistant"]
  assert prompt[0]["role"] == "system" and "left_click" in str(prompt[0])
  assert result["info"]["instruction"] in str(result["prompt"])
  # Every turn once, and what the environment showed between them.
  roles = [m["role"] for m in result["completion"]]
  assert roles == ["assistant", "user"] * (len(turns) - 1) + ["assistant"]
  assert result["metrics"]["num_turns"] == len(turns)
  assert result["reward"] == result["metrics"]["reward"]
  assert result["metrics"]["parse_errors"] <= len(turns)
  # The history was only extended, so the session is one token sequence.
  (sequence,) = played["exported"].values()
  mask = sequence["tensor_dict"]["loss_mask"][0]
  runs = sum(b and not a for a, b in zip([0, *mask], mask))
  assert runs == len(turns) and len(sequence["images"]) == len(turns)


@with_0_1
def test_vf_eval_finds_it_by_its_name(server, tmp_path):
  args = {
    "settings": {"gym": "desktop", "environment.max_turns": 1},
    "train": 2,
    "eval": 2,
    "python": sys.executable,
  }
  process = subprocess.run(
      # The command vf-eval; a venv that was moved has no scripts.
      [str(PYTHON), "-m", "verifiers.scripts.eval", "tunix-multi-turn",
       "-m", "nano",
       "-b", f"{server}/v1", "-k", "NO_KEY", "-n", "2", "-r", "1", "-t", "8",
       "-a", json.dumps(args), "--disable-tui"],
      cwd=tmp_path,
      env={**os.environ, "PYTHONPATH": str(_ROOT), "NO_KEY": "none"},
      capture_output=True,
      text=True,
      timeout=400,
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-2000:]
  assert "reward" in process.stdout and "parse_errors" in process.stdout


@with_0_1
def test_text_tasks_and_a_process_that_died_are_played(played):
  for one in played["played"]["text"]:
    assert one["error"] is None and one["metrics"]["num_turns"] == 1
  (after,) = played["played"]["killed"]
  assert after["error"] is None  # It was started again.


@with_0_1
def test_an_environment_that_fails_is_an_error_and_no_reward(played):
  (result,) = played["played"]["late"]
  assert "status=timeout" in result["error"] or (
    "status=model_error" in result["error"]
  )


@with_0_1
def test_a_wrong_argument_is_named(played):
  for message, (_, words) in zip(played["refused"], REFUSED, strict=True):
    assert words in message, (words, message)


@with_0_4
def test_a_policy_plays_the_desktop_as_a_taskset(server):
  """To its end, and up to a limit of verifiers'."""
  results = play(
      server, [1], DESKTOP, python=PYTHON4, player=PLAYER4,
      runs=[{}, {"agent": {"max_turns": 1}},
            {"settings": {"collect.deadlines.model": 0.001}}],
  )  # fmt: skip
  result, cut, failed = results
  assert result["ok"] and not result["errors"], result
  turns = [m for m in result["messages"] if m["role"] == "assistant"]
  assert len(turns) == 3
  urls = images_of(result["messages"])
  assert len(urls) == 3
  assert result["messages"][0]["role"] == "system"
  assert "left_click" in str(result["messages"][0])
  assert result["prompt"] in str(result["messages"])
  assert result["metrics"]["parse_errors"] <= 3
  assert result["reward"] == result["metrics"]["success"] in (0, 1)
  assert cut["ok"] and cut["stop"] == "max_turns" and cut["reward"] == 0
  assert not failed["ok"]
  assert "status=timeout" in str(failed["errors"]) or (
    "status=model_error" in str(failed["errors"])
  )
