"""AReaL's proxy workflow plays against this server.

`make areal` installs areal 1.0.4, or `$AREAL_PYTHON` names an interpreter that
imports it; what it reads is checked without, too, by its published format.
"""

import base64
import json
import os
import pathlib
import subprocess

from agent_services.serving import app as app_lib
from agent_services.serving.endpoints import session_routes
import numpy as np
import pytest
import rollout_server
import trials
from tunix.rl.multi_turn.net import http_server

ROOT = pathlib.Path(__file__).resolve().parents[4]
HELPERS = pathlib.Path(__file__).resolve().parents[1] / "helpers"
PYTHON = pathlib.Path(
  os.environ.get("AREAL_PYTHON", ROOT / ".venv-areal/bin/python")
)


def array(tensor):
  """A `SerializedTensor`, as AReaL reads it."""
  assert set(tensor) == {"type", "data", "shape", "dtype"}
  assert tensor["type"] == "tensor" and tensor["dtype"].startswith("torch.")
  kind = np.dtype(tensor["dtype"].removeprefix("torch."))
  data = base64.b64decode(tensor["data"].encode(), validate=True)
  return np.frombuffer(data, kind).reshape(tensor["shape"])


@pytest.mark.slow
def test_tensors_hold_the_numbers_of_the_lists(running):
  session = rollout_server.start(running)
  own = {"Authorization": f"Bearer {session['api_key']}"}
  for text in ("go", "on"):
    messages = [rollout_server.screenshot(0, text)]
    body = {"model": "default", "max_tokens": 4, "messages": messages}
    assert running.post("/chat/completions", body, **own).status_code == 200
  body = {"session_id": session["session_id"]}
  lists = rollout_server.export(running, session, discount=0.5)
  tensors = rollout_server.export(
    running, session, discount=0.5, arrays="tensors"
  )
  assert list(lists) == list(tensors) and len(lists) == 2
  kinds = {
    "input_ids": "int32",
    "attention_mask": "bool",
    "loss_mask": "int32",
    "logprobs": "float32",
    "versions": "int32",
    "rewards": "float32",
  }
  for name, one in lists.items():
    other = tensors[name]
    for key, kind in kinds.items():
      tensor = array(other["tensor_dict"][key])
      assert tensor.dtype == kind
      np.testing.assert_array_equal(
        tensor, np.array(one["tensor_dict"][key], kind)
      )
    assert set(other["tensor_dict"]) == set(kinds) == set(one["tensor_dict"])
    assert other["images"] == one["images"] and one["images"]
    assert other["turn_ids"] == one["turn_ids"]
  refused = running.post("/export_trajectories", body | {"arrays": "torch"})
  assert refused.status_code == 400
  assert "must be one of lists, tensors" in refused.json()["error"]["message"]


def test_a_server_writes_one_of_the_two():
  with pytest.raises(ValueError, match="lists, tensors; got 'torch'"):
    session_routes.SessionRoutes(None, None, None, "torch")


@pytest.mark.skipif(
  not PYTHON.exists(), reason="needs the package areal: make areal"
)
@pytest.mark.slow
# The server sees the same requests of both.
@pytest.mark.parametrize(
  "mode", ["inline", "subproc"] if trials.share() == 1 else ["subproc"]
)
def test_areals_own_workflow_plays(running, mode):
  app = app_lib.OpenAIApp(running.app._service, export_arrays="tensors")
  with http_server.LoopbackServer(app.asgi) as server:
    ran = subprocess.run(
      [PYTHON, HELPERS / "areal_workflow.py", server.url, mode],
      capture_output=True,
      text=True,
      timeout=240,
      env={**os.environ, "TESTS_SEE_TORCH": "1", "PYTHONDONTWRITEBYTECODE": ""},
    )
  assert ran.returncode == 0, ran.stderr[-3000:]
  report = json.loads(ran.stdout.splitlines()[-1])
  assert report == {"rewards": [0.5, 1.0], "rows": 3}
