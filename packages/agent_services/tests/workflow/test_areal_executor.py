"""AReaL, unmodified, plays our workflow against our servers."""

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import tomllib
import types

from agent_services.serving import server as server_lib
from flax import nnx
import gym_servers
import jax
import monitor_server
import numpy as np
import pytest
import run_services
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
import two_paths
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[4]
HELPERS = pathlib.Path(__file__).resolve().parents[1] / "helpers"
PYTHON = pathlib.Path(
  os.environ.get("AREAL_PYTHON", ROOT / ".venv-areal/bin/python")
)
pytestmark = [
  pytest.mark.slow,
  pytest.mark.timeout(600),
  pytest.mark.skipif(
    not PYTHON.exists(), reason="needs the package areal: make areal"
  ),
]
TOKENIZER = ROOT / "tunix/rl/multi_turn/policy/data/tiny_vl"
TOKEN = "s3cret-of-the-monitor"
RATIO = 5e-3
END = run_services.call(action="terminate", status="success")


def every_second_fails(placeholder):
  """A policy's server that ends an episode at once, or answers 500."""
  count = 0

  def answer(method, path, body):
    nonlocal count
    if path.endswith("/models"):
      return 200, {"data": [{"id": "m"}]}
    count += 1
    if count % 2:
      return 500, {"error": "no"}
    return 200, run_services.completion(END, prompt=[1, placeholder, 2])

  return answer


@functools.cache
def entry_points():
  """A folder with what pip notes of this clone's packages, without code."""
  folder = pathlib.Path(tempfile.mkdtemp())
  for path in ROOT.glob("packages/*/pyproject.toml"):
    name = tomllib.loads(path.read_text())["project"]["name"]
    # Of what pip installed, or of the folder that it was installed from.
    noted = importlib.metadata.distribution(name)
    copy = folder / f"{name.replace('-', '_')}-{noted.version}.dist-info"
    copy.mkdir()
    (copy / "METADATA").write_text(f"Name: {name}\nVersion: {noted.version}\n")
    points = noted.read_text("entry_points.txt")
    (copy / "entry_points.txt").write_text(points)
  return folder


def play(*command, seconds=300, **variables):
  """Runs AReaL's Python in the clone; returns what it printed."""
  ran = subprocess.run(
    [PYTHON, *command],
    capture_output=True,
    text=True,
    timeout=seconds,
    cwd=ROOT,
    # Nothing is installed there beside AReaL, and its many modules are
    # compiled once.
    env={
      **os.environ,
      "PYTHONPATH": os.pathsep.join(
        [str(ROOT), *map(str, ROOT.glob("packages/*")), str(entry_points())]
      ),
      "PYTHONDONTWRITEBYTECODE": "",
      **variables,
    },
  )
  assert ran.returncode == 0, ran.stderr[-6000:]
  return ran.stdout


class Weights:
  """In front of a policy's server: AReaL's calls around a hand-over.

  `load(path)` gets the directory of new weights.
  """

  def __init__(self, app, load):
    self.app, self.load = app, load
    self.paths = []

  async def __call__(self, scope, receive, send):
    if not scope.get("path", "").startswith("/areal_"):
      await self.app(scope, receive, send)
      return
    body = b""
    while True:
      message = await receive()
      body += message.get("body", b"")
      if not message.get("more_body"):
        break
    if scope["path"] == "/areal_update_weights":
      path = json.loads(body)["model_path"]
      self.paths.append((path, sorted(os.listdir(path))))
      await asyncio.to_thread(self.load, path)
    await send(
      {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"application/json")],
      }
    )
    content = b'{"success": true, "message": ""}'
    await send({"type": "http.response.body", "body": content})


@contextlib.contextmanager
def serving(*overrides, make_load=lambda paths: None):
  """The servers: run service, gym, and a policy."""
  result = types.SimpleNamespace(log=[])
  with contextlib.ExitStack() as stack:
    serve = lambda app: stack.enter_context(http_server.LoopbackServer(app)).url
    service = run_services.app_lib.App()
    result.service = serve(
      run_services.Logged(service.asgi, "service", result.log)
    )
    result.gym, result.gym_app = stack.enter_context(
      gym_servers.serving(gym_servers.desktop(train_tasks=2, eval_tasks=1))
    )
    paths = stack.enter_context(
      two_paths.Both("rollout.agent=run_service", *overrides)
    )
    policy = paths.policy
    app = server_lib.make_app(
      "policy",
      paths.engine,
      (policy.model, policy.processor, policy.tokenizer),
      paths.images,
      renderer=policy.renderer,
    )
    result.paths = paths
    result.weights = Weights(app.asgi, make_load(paths))
    result.policy = serve(result.weights)
    result.broken = serve(
      run_services.Scripted(every_second_fails(policy.renderer.image_token_id))
    )
    result.options = {
      "gbox_mini_agent_base_url": result.service,
      "gbox_mini_agent_agent": "tool",
      "standard_action_space": "pc",
      "max_turns": 2,
      "poll_s": 0.05,
      "run_options": {
        "agentConfig": paths.proxy.connection.agent_config,
        "sampling": True,
      },
    }
    yield result


@pytest.fixture(scope="module", name="world")
def _world():
  with serving() as result:
    yield result


@pytest.fixture(scope="module", name="played")
def _played(world):
  rows = [
    {
      "task_id": f"{family}-train-0",
      "gym_id": "desktop",
      "gym_base_url": world.gym,
      "description": "Do it.",
    }
    for family in gym_servers.FAMILIES
  ]
  result = play(
    f"{HELPERS}/areal_executor.py",
    json.dumps(
      {
        "model": world.policy.removeprefix("http://"),
        "broken": world.broken,
        "rows": rows,
        "tokenizer": str(TOKENIZER),
        "kwargs": world.options,
      }
    ),
  )
  result = json.loads(result.splitlines()[-1])
  result["runs"] = [
    path
    for _, method, path in world.log
    if method == "POST" and path.endswith("/runs")
  ]
  result["open"] = world.gym_app.store.open
  return result


def test_it_takes_the_class_its_name_and_an_instance(played):
  assert played["resolved"] == [True] * 4
  assert played["needs_proxy"] == [False] * 3
  assert not played["jax"]


def test_each_row_is_one_call_an_episode(played):
  """Two steps of two rows, each played twice, then the failing."""
  named, failing = played["named"], (played["broken"], played["groups"])
  assert (named["accepted"], named["rejected"]) == (4, 0)
  for step in named["steps"]:
    assert [group["shape"][0] for group in step] == [2, 2]
  failing = sum(o["accepted"] + sum(o["rejected"].values()) for o in failing)
  assert len(played["runs"]) == 2 * 2 * 2 + failing
  assert played["open"] == 0


def test_its_tensors_are_those_of_areals_vision_workflow(played):
  for step in played["named"]["steps"]:
    for group in step:
      assert group["dtypes"] == {
        "input_ids": "int32",
        "mm_token_type_ids": "int64",
        "loss_mask": "int32",
        "versions": "int32",
        "attention_mask": "bool",
        "logprobs": "float32",
        "rewards": "float32",
      }
      assert all(1 < n < 49 for n in group["sampled"])
      assert group["versions"] == [-1, 0]
      assert group["logprob"] < 0 and group["unsampled"] == 0
      assert all(reward in (0, 1) for reward in group["rewards"])
      assert all(group["images"])
  rewards = [
    reward
    for step in played["named"]["steps"]
    for group in step
    for reward in group["rewards"]
  ]
  assert played["reward"] == pytest.approx(sum(rewards) / len(rewards))
  both = played["both"]
  assert both["shape"] == [5, 500] and both["lengths"][-1] == 500
  assert both["pictures"] == 5


def test_a_batch_fills_though_episodes_fail(played):
  broken, groups = played["broken"], played["groups"]
  assert broken["batch"] == broken["stats"]["accepted"] == 2
  assert set(broken["rejected"]) == {"RunFailed"}
  assert broken["stats"]["rejected"] == broken["rejected"]["RunFailed"] > 0
  assert not broken["running"]
  assert len(groups["rows"]) == 2 and set(groups["rows"]) <= {1, 2}
  assert sum(groups["rejected"].values()) > 0


def train(world, tmp_path, *, model, processor, actor=()):
  """Runs the example for two steps with AReaL's FSDP actor on this CPU.

  Returns what it printed, and the monitor's rows by table.
  """
  path = ROOT / "examples/cua_agent/config.yaml"
  config = yaml.safe_load(path.read_text(encoding="utf-8"))
  config |= world.options | {
    "gym_base_url": world.gym,
    "processor_path": str(processor),
    "total_train_steps": 2,
  }
  config["cluster"] |= {"fileroot": str(tmp_path / "files")}
  config["cluster"]["name_resolve"]["nfs_record_root"] = str(tmp_path / "names")
  config["actor"] |= {
    "path": str(model),
    "backend": "fsdp:d1",
    "attn_impl": "sdpa",
    "dtype": "float32",
    "gradient_checkpointing": False,
    **dict(actor),
  }
  config["actor"]["optimizer"]["lr"] = 0.01
  config["rollout"]["backend"] = "vllm:d1"
  config["gconfig"] |= {"n_samples": 2, "max_new_tokens": 24}
  config["eval_gconfig"] |= {"max_new_tokens": 24}
  config["train_dataset"]["batch_size"] = 2
  config["valid_dataset"]["batch_size"] = 2
  config["evaluator"]["freq_steps"] = 1
  config["saver"]["freq_epochs"] = None  # Imports triton.
  own = tmp_path / "config.yaml"
  own.write_text(yaml.safe_dump(config), encoding="utf-8")
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  with monitor_server.sqlite_server(tmp_path / "monitor") as monitor:
    output = play(
        "-m", "examples.cua_agent.train", "--config", str(own),
        seconds=500, TORCHDYNAMO_DISABLE="1", AREAL_SPMD_MODE="1",
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        AREAL_LLM_SERVER_ADDRS=world.policy.removeprefix("http://"),
        TUNIX_MONITOR_URL=monitor.url, TUNIX_MONITOR_TOKEN=TOKEN,
        TUNIX_MONITOR_SPOOL=str(tmp_path / "spool"),
    )  # fmt: skip
    rows = {
      name: monitor.rows(name)
      for name in ("training", "step", "baseline", "eval", "rollout", "task")
    }
  return output, rows


def check_monitored(rows):
  """The monitor has the run, its two steps and every episode."""
  (training,) = rows["training"]
  assert training["status"] == "completed", training
  assert len(rows["task"]) == 6
  steps = rows["step"]
  assert [s["step"] for s in steps] == [1, 2]
  assert {s["status"] for s in steps} == {"completed"}
  assert all(s["loss"] is not None and s["metrics_json"] for s in steps)
  (baseline,) = rows["baseline"]
  assert baseline["status"] == "completed"
  assert [e["step"] for e in rows["eval"]] == [1, 2]
  assert all(e["avg_reward"] is not None for e in rows["eval"])
  places = [
    (r["source_type"], r["step_id"], r["eval_id"]) for r in rows["rollout"]
  ]
  assert places.count(("baseline", None, None)) == 2
  for step in steps:
    assert places.count(("step", step["id"], None)) == 4
  for one in rows["eval"]:
    assert places.count(("eval", None, one["id"])) == 2
  assert len(places) == 2 + 2 * 4 + 2 * 2


def test_the_example_trains_the_policy_that_plays(tmp_path):
  """AReaL's FSDP engine computes with our rows' pixels; we load its weights.

  Its log-probs of sampled tokens are those of the server, before the first
  update and after each hand-over.
  """
  weights = []

  def make_load(paths):
    def load(path):
      model, _, _ = checkpoint.load_policy(path)
      weights.append(model)
      paths.engine.update_weights(len(weights), model).result(60)

    return load

  with serving("policy=qwen3_vl_tiny", make_load=make_load) as world:
    weights.append(world.paths.policy.model)
    model = checkpoint.save_policy(tmp_path / "policy", weights[0])
    # The whole processor needs torchvision, for videos.
    processor = tmp_path / "processor"
    processor.mkdir()
    shutil.copy(model / "preprocessor_config.json", processor)
    output, rows = train(
        world, tmp_path, model=model, processor=processor,
        # Sampled tokens become likelier, though no episode succeeds.
        actor={
            "reward_bias": 1.0, "adv_norm": None, "use_decoupled_loss": True,
            # A row each: sdpa lets packed rows of a vision model mix.
            "mb_spec": {"max_tokens_per_mb": 200},
            # AReaL counts the tokens whose ratio of our probability to its
            # own is outside.
            "rejection_sampling": {
                "level": "token", "action": "mask", "metric": "ratio",
                "lower": 1 - RATIO, "upper": 1 + RATIO,
            },
        },
    )  # fmt: skip
  assert "4 tasks to train on, 2 held out" in output
  files = [path for path in tmp_path.rglob("*") if path.is_file()]
  assert any(path.name == "config.yaml" for path in files)
  for path in files:
    assert TOKEN.encode() not in path.read_bytes(), path
  check_monitored(rows)
  handed_over = {pathlib.Path(p).name: str(n) for p, n in world.weights.paths}
  assert list(handed_over) == ["weight_update_v1", "weight_update_v2"]
  assert all("model.safetensors" in names for names in handed_over.values())
  for step in rows["step"]:
    statistics = json.loads(step["metrics_json"])
    assert statistics["ppo_actor/update/n_valid_tokens"] >= 8
    assert statistics["ppo_actor/update/grad_norm"] > 0.01
    assert statistics["ppo_actor/update/rs_filtered_fraction"] == 0, statistics
    for end in ("min", "max"):
      ratio = statistics[f"ppo_actor/update/behave_imp_weight/{end}"]
      assert ratio == pytest.approx(1, abs=RATIO), statistics
  assert len(weights) == 3
  for old, new in zip(weights, weights[1:]):
    for part in ("visual", "language_model"):
      change = jax.tree.map(
        lambda a, b: abs(np.asarray(a) - np.asarray(b)).max(),
        *(
          nnx.to_pure_dict(nnx.state(getattr(m, part), nnx.Param))
          for m in (old, new)
        ),
      )
      assert max(jax.tree.leaves(change)) > 1e-3, part
