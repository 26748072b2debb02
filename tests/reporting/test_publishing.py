"""A run's policy and episodes as folders, and pushed to a Hub on loopback.

The Hub's client is huggingface_hub itself, the readers `datasets` and
`transformers`.
"""

import io
import json
import os
import shutil
import subprocess
import sys

import datasets
import hub_server
import huggingface_hub
from huggingface_hub import constants
import numpy as np
from pyarrow import parquet
import pytest
from safetensors import numpy as safetensors_numpy
import synthetic_run
from tunix.rl.multi_turn.api import runs
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.reporting import publishing

CONFIG = """
run: {name: demo, dir: /home/somebody/runs, resume: '', seed: 3}
gym: {name: desktop}
policy: {name: qwen3_vl_tiny}
clients: {url: 'https://user:secretword@host/v1'}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  directory = tmp_path_factory.mktemp("runs") / "demo"
  synthetic_run.write(directory)
  (directory / "config.yaml").write_text(CONFIG, encoding="utf-8")
  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny")
  (directory / "policy").mkdir()
  hf_checkpoint.save_policy(
    directory / "policy", model, "qwen3_vl_tiny", "float32"
  )
  return runs.load(directory)


@pytest.fixture
def server(monkeypatch, tmp_path):
  monkeypatch.setenv("HF_HOME", str(tmp_path))
  with hub_server.HubServer().serving() as result:
    monkeypatch.setattr(constants, "ENDPOINT", result.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield result


def command(*arguments, **env):
  return subprocess.run(
      [sys.executable, "-m", "tunix_multi_turn", "commands.publish",
       *map(str, arguments)],
      capture_output=True, text=True, timeout=120,
      env={**os.environ, **env},
  )  # fmt: skip


def metadata(card, kind=huggingface_hub.ModelCard):
  return kind(card, ignore_metadata_errors=False).data


# --- folders ------------------------------------------------------------------


@pytest.mark.slow
def test_episodes_are_a_data_set(run, tmp_path):
  folder = run.save_for_hub(tmp_path / "data", "episodes", license="cc-by-4.0")
  data = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
  by_id = {e.trajectory.trajectory_id: e for e in run.episodes}
  rows = [row for split in data.values() for row in split]
  assert sorted(r["episode_id"] for r in rows) == sorted(by_id)
  assert set(data) == {e.split for e in run.episodes}
  looked = 0
  for row in rows:
    episode = by_id[row["episode_id"]]
    again = trajectory_lib.Trajectory.from_json(json.loads(row["trajectory"]))
    kept = episode.trajectory.to_json() | {"error": None}
    assert again.to_json() == kept
    assert row["success"] == episode.success
    assert row["reward"] == episode.reward
    assert row["instruction"] == episode.shown.instruction
    assert len(row["turns"]) == episode.turns
    for number, turn in enumerate(row["turns"]):
      frame = episode.shown.frames[number]
      assert turn["response"] == frame.text
      assert json.loads(turn["actions"]) == list(frame.actions)
      if turn["image"] >= 0:
        shown = row["images"][turn["image"]]
        assert np.array_equal(
          np.asarray(shown.convert("RGB")),
          np.asarray(episode.screenshot(number)),
        )
        looked += 1
  assert looked > 10
  card = (folder / "README.md").read_text(encoding="utf-8")
  assert metadata(card, huggingface_hub.DatasetCard).license == "cc-by-4.0"


def test_screenshots_that_were_not_kept_are_told(run, tmp_path):
  copy = tmp_path / "run"
  copy.mkdir()
  for name in ("summary.json", "metrics.jsonl", "trajectories.jsonl"):
    (copy / name).write_bytes((run.directory / name).read_bytes())
  folder = publishing.save(copy, "episodes", tmp_path / "data")
  data = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
  for split in data.values():
    for row in split:
      assert row["images"] == []
      assert all(turn["image"] == -1 for turn in row["turns"])


def test_a_policy_is_a_model_repository(run, tmp_path):
  transformers = pytest.importorskip("transformers")
  folder = run.save_for_hub(
    tmp_path / "model", license="apache-2.0", base_model="Qwen/Qwen3-VL-2B"
  )
  config = transformers.AutoConfig.from_pretrained(folder)
  assert config.model_type == "qwen3_vl"
  own = safetensors_numpy.load_file(run.policy / "model.safetensors")
  other = safetensors_numpy.load_file(folder / "model.safetensors")
  assert all(np.array_equal(own[k], other[k]) for k in own | other)
  data = metadata((folder / "README.md").read_text(encoding="utf-8"))
  assert data.library_name == "transformers"
  assert data.pipeline_tag == "image-text-to-text"
  assert data.base_model == "Qwen/Qwen3-VL-2B"
  (result,) = data.eval_results
  final = list(run.evaluations.values())[-1]
  assert result.metric_value == pytest.approx(final["success_rate"], abs=1e-4)
  for hidden in ("somebody", "secretword"):
    assert not any(
      hidden.encode() in path.read_bytes() for path in folder.iterdir()
    )


@pytest.mark.parametrize(
  "content, missing", [("policy", "policy"), ("episodes", "trajectories.jsonl")]
)
def test_what_a_run_has_not_is_named(run, content, missing, tmp_path):
  copy = tmp_path / "run"
  copy.mkdir()
  (copy / "summary.json").write_bytes(
    (run.directory / "summary.json").read_bytes()
  )
  kind = "no policy yet" if missing == "policy" else "kept no episode"
  with pytest.raises(publishing.PublishError, match=kind):
    publishing.save(copy, content, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_a_folder_in_use_stays(run, tmp_path):
  (tmp_path / "mine.txt").write_text("mine")
  with pytest.raises(publishing.PublishError, match="not an empty folder"):
    run.save_for_hub(tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


# --- the Hub ------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_pushes_both(run, server, tmp_path):
  env = {
    "HF_ENDPOINT": server.url,
    "HF_TOKEN": hub_server.TOKEN,
    "HF_HOME": str(tmp_path),
    "HF_HUB_DISABLE_XET": "1",
  }
  process = command(
    run.directory, "policy", "--to", "me/agent", "--private", **env
  )
  assert process.returncode == 0, process.stderr
  assert process.stdout.strip().endswith("/me/agent")
  repository = server.repos["model", "me/agent"]
  weights = (run.policy / "model.safetensors").read_bytes()
  assert repository["model.safetensors"] == weights
  assert {"README.md", "config.json"} <= set(repository)
  assert server.private["model", "me/agent"] in (True, "private")
  uploads = len(server.uploads)
  process = command(
    run.directory, "policy", "--to", "me/agent", "--message", "again", **env
  )
  assert process.returncode == 0, process.stderr
  assert len(server.uploads) == uploads
  process = command(run.directory, "episodes", "--to", "me/played", **env)
  assert process.returncode == 0, process.stderr
  repository = server.repos["dataset", "me/played"]
  table = parquet.read_table(io.BytesIO(repository["data/train.parquet"]))
  trained = [e.trajectory for e in run.episodes.where(split="train")]
  assert sorted(table["episode_id"].to_pylist()) == sorted(
    episode.trajectory_id for episode in trained
  )
  assert hub_server.TOKEN not in process.stdout + process.stderr
  assert not list(run.directory.glob(".publish-*"))


def test_a_push_from_python(run, server, monkeypatch):
  monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
  url = run.push_to_hub("me/from-python", "episodes")
  assert url == f"{server.url}/datasets/me/from-python"
  assert server.messages == ["episodes of demo"]
  assert server.private["dataset", "me/from-python"] in (None, False)


@pytest.mark.parametrize(
  "status, problem", [(403, "not yours.*may write there"), (500, "not yours")]
)
def test_a_refusal_is_told(run, server, status, problem):
  server.refuse = status
  with pytest.raises(publishing.PublishError, match=problem):
    run.push_to_hub("me/agent", token=hub_server.TOKEN)
  assert not list(run.directory.glob(".publish-*"))


def test_without_a_token_nothing_is_asked(run, server, monkeypatch):
  monkeypatch.delenv("HF_TOKEN", raising=False)
  with pytest.raises(publishing.PublishError, match="set HF_TOKEN"):
    run.push_to_hub("me/agent")
  assert not server.repos


def test_wrong_arguments_of_the_command(run, tmp_path):
  env = {
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_TOKEN": "hf_x",
    "HF_HOME": str(tmp_path),
  }
  for arguments, message in [
    ((run.directory, "policy", "--to", "me/a"), "did not take me/a"),
    ((tmp_path, "policy", "--out", tmp_path / "o"), "not a run directory"),
  ]:
    process = command(*arguments, **env)
    assert process.returncode == 2 and message in process.stderr, process.stderr
    assert "Traceback" not in process.stderr


def test_its_names_are_importable_without_jax():
  code = (
    "import tunix_multi_turn; tunix_multi_turn.light()\n"
    "from tunix.rl.multi_turn.commands import publish\n"
    "import sys; print('jax' in sys.modules, 'datasets' in sys.modules)"
  )
  process = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
  )
  assert process.stdout.split() == ["False", "False"], process.stderr


# --- what must not get out ----------------------------------------------------

PRIVATE = """
run: {name: demo, dir: /home/somebody/runs}
gym: {name: desktop, options: {root: /srv/somebody/gym, at: '10.0.0.7:99'}}
policy: {name: /home/somebody/models/our-agent}
environment: {options: {api_key: secretword}}
monitor: {url: 'http://somebody-box.corp:8000', database: '~somebody/m.db'}
"""


@pytest.fixture
def private_run(run, tmp_path):
  """A copy whose settings and errors name places and secrets."""
  copy = tmp_path / "private"
  shutil.copytree(run.directory, copy)
  (copy / "config.yaml").write_text(PRIVATE, encoding="utf-8")
  path = copy / "trajectories.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[0]["error"] = (
    "FileNotFoundError: '/home/somebody/x/page.html' at"
    " http://me:secretword@somebody-box:9/v1?token=abc"
  )
  path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
  return copy


@pytest.mark.parametrize("content", publishing.CONTENTS)
def test_no_place_and_no_secret_gets_out(private_run, tmp_path, content):
  folder = publishing.save(private_run, content, tmp_path / "out")
  for path in folder.rglob("*"):
    body = path.read_bytes() if path.is_file() else b""
    for hidden in (b"somebody", b"secretword", b"10.0.0.7", b"corp"):
      assert hidden not in body, (path, hidden)


def test_a_policy_s_links_are_refused(private_run, tmp_path):
  (tmp_path / "id_rsa").write_text("secretword")
  (private_run / "policy" / "notes.json").symlink_to(tmp_path / "id_rsa")
  with pytest.raises(publishing.PublishError, match="notes.json is a symbolic"):
    publishing.save(private_run, "policy", tmp_path / "model")
  assert not (tmp_path / "model").exists()


def test_screenshots_that_are_links_are_not_read(private_run, tmp_path):
  (tmp_path / "id_rsa").write_text("secretword")
  linked = sorted((private_run / "images").iterdir())[0]
  linked.unlink()
  linked.symlink_to(tmp_path / "id_rsa")
  folder = publishing.save(private_run, "episodes", tmp_path / "data")
  for path in (folder / "data").iterdir():
    assert b"secretword" not in path.read_bytes()


def test_an_unfinished_run_is_refused(private_run, tmp_path):
  (private_run / "summary.json").write_text('{"status": "running", "step": 3}')
  with pytest.raises(publishing.PublishError, match="is running, or was"):
    publishing.save(private_run, "policy", tmp_path / "out")


def test_files_of_an_earlier_push_do_not_stay(run, server):
  """Else readers would take old weights, or mix old episodes with new ones."""
  token = hub_server.TOKEN
  server.private["model", "me/agent"] = None
  server.repos["model", "me/agent"] = {
    "model-00001-of-00002.safetensors": b"old",
    "model.safetensors.index.json": b"old",
    "notes.md": b"mine",
  }
  run.push_to_hub("me/agent", token=token)
  repository = server.repos["model", "me/agent"]
  assert repository["notes.md"] == b"mine" and b"old" not in repository.values()
  assert "model.safetensors" in repository
  server.private["dataset", "me/played"] = None
  server.repos["dataset", "me/played"] = {"data/train-00007.parquet": b"old"}
  run.push_to_hub("me/played", "episodes", token=token)
  assert b"old" not in server.repos["dataset", "me/played"].values()


def test_nothing_private_goes_to_a_public_repository(run, server):
  server.private["model", "me/agent"] = None
  server.repos["model", "me/agent"] = {}
  with pytest.raises(publishing.PublishError, match="exists and is public"):
    run.push_to_hub("me/agent", token=hub_server.TOKEN, private=True)
  assert not server.repos["model", "me/agent"]


def test_a_password_of_the_hub_s_address_is_not_shown(run, monkeypatch):
  monkeypatch.setattr(constants, "ENDPOINT", "http://me:secretword@127.0.0.1:9")
  with pytest.raises(publishing.PublishError, match="did not take") as error:
    run.push_to_hub("me/agent", token=hub_server.TOKEN)
  assert "secretword" not in str(error.value)


def test_a_wrong_content_is_told(run):
  with pytest.raises(publishing.PublishError, match="policy, episodes"):
    run.push_to_hub("me/agent", "weights", token=hub_server.TOKEN)
