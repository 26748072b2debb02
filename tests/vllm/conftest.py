"""One vLLM and one policy for all files of this folder."""

import pathlib

import pytest
from tunix.rl.multi_turn.clients import disk_weights
import vllm_server

_HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  for item in items:
    if _HERE in item.path.parents:
      item.add_marker(pytest.mark.vllm)
      item.add_marker(pytest.mark.slow)
      item.add_marker(pytest.mark.timeout(vllm_server.START_S + 400))
      if not (vllm_server.BIN / "vllm").exists():
        item.add_marker(pytest.mark.skip(reason="no vLLM; run make vllm"))


@pytest.fixture(scope="session", name="policy")
def _policy(tmp_path_factory):
  return vllm_server.Policy(tmp_path_factory.mktemp("policy") / "first")


@pytest.fixture(scope="package", name="server")
def _server(policy, tmp_path_factory):
  launch = vllm_server.launch_of(policy.directory, lora_rank=4)
  log = tmp_path_factory.mktemp("vllm") / "log"
  with vllm_server.VllmServer(launch, log) as server:
    yield server


@pytest.fixture(name="first_weights_again")
def _first_weights_again(policy, server, tmp_path):
  """The next test finds the server as it began."""
  yield
  weights = disk_weights.DiskWeights(
    tmp_path / "first_weights",
    disk_weights.policy_saver(policy.model, policy.directory, untied=True),
    [disk_weights.VllmEngine(server.url)],
  )
  weights.publish(0, policy.model).result(300)
  weights.close()
