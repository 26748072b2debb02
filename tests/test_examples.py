"""The examples do what they say, against real servers and real computers."""

import importlib
import json
import pathlib
import subprocess
import sys

from agent_services.serving import server as server_lib
import browsers
import numpy as np
import pytest
from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

pytestmark = pytest.mark.timeout(400)
ROOT = pathlib.Path(__file__).resolve().parents[1]
SCREENS = ((128, 96), (160, 210))


class Served:
  """The shipped policy, for screenshots of both gyms."""

  def __init__(self):
    self.images = images_lib.ImageStore()
    policy = checkpoint.load_policy("tiny_vl", screen=SCREENS[1])
    self.engine = engine_lib.RolloutEngine(
      policy[0],
      policy[1],
      self.images,
      engine_config.EngineConfig(
        slots=4,
        context_length=768,
        window_buckets=(768,),
        prefill_buckets=(256,),
      ),
      image_sizes=SCREENS,
      banned_token_ids=policy[0].config.banned_token_ids,
      version=4,
    )
    self.app = server_lib.make_app(
      "tiny_vl", self.engine, policy, self.images, token="secret"
    )
    self.server = http_server.LoopbackServer(self.app.asgi)

  def __enter__(self):
    self.engine.warm_up()
    self.server.start()
    return self

  def __exit__(self, *exc_info):
    self.server.close()
    self.engine.close()


@pytest.fixture(scope="module", name="served")
def _served():
  with Served() as served:
    yield served


def run_agent(*argv):
  return subprocess.run(
    [sys.executable, str(ROOT / "examples" / "openai_agent.py"), *argv],
    capture_output=True,
    text=True,
    timeout=240,
    cwd=ROOT,
    check=False,
  )


@pytest.mark.parametrize(
  "gym, episodes",
  [
    ("desktop", 12),
    pytest.param("miniwob", 3, marks=[*browsers.needed(), pytest.mark.slow]),
  ],
)
@pytest.mark.slow
def test_an_agent_with_nothing_but_openai_plays_and_is_kept(
  served, tmp_path, gym, episodes
):
  out = tmp_path / "episodes.jsonl"
  process = run_agent(
      "--server", served.server.url, "--token", "secret", "--gym", gym,
      "--episodes", str(episodes), "--out", str(out),
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-2000:]
  rewards = [
    float(line.rpartition(" ")[2])
    for line in process.stdout.splitlines()
    if line.startswith("episode ")
  ]
  assert len(rewards) == episodes
  lines = [json.loads(line) for line in out.read_text().splitlines()]
  assert {line["episode"] for line in lines} == set(range(episodes))
  assert sum(line["reward"] for line in lines) == pytest.approx(sum(rewards))
  if gym == "desktop":  # It has seen how that is done.
    assert 0 < sum(rewards) <= episodes
  turns = []
  for line in lines:
    # What the learner takes: checked when it is made.
    sequence = proxy.sequence_of(line)
    assert isinstance(sequence, trajectory.TokenSequence)
    assert sequence.num_sampled > 0
    assert set(sequence.versions[sequence.loss_mask].tolist()) == {4}
    assert np.all(sequence.logprobs <= 1e-4)
    turns.append(len(sequence.images))
    for span in sequence.images:
      size = (128, 96) if gym == "desktop" else (160, 210)
      assert served.images.get(span.image).shape == (*size[::-1], 3)
  if gym == "desktop":
    assert max(turns) > 1  # Some take several turns, in one sequence.
  assert not len(served.app._service.store)


def test_an_agent_without_a_server_says_which(monkeypatch, capsys):
  monkeypatch.syspath_prepend(str(ROOT / "examples"))
  agent = importlib.import_module("openai_agent")
  assert agent.main(["--server", "http://127.0.0.1:9", "--episodes", "1"]) == 1
  stderr = capsys.readouterr().err
  assert "error: http://127.0.0.1:9" in stderr
  assert "Traceback" not in stderr
