"""One SGLang and one policy for all files of this folder."""

import pathlib

import pytest
import sglang_server
import vllm_server

_HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  for item in items:
    if _HERE in item.path.parents:
      item.add_marker(pytest.mark.sglang)
      item.add_marker(pytest.mark.slow)
      item.add_marker(pytest.mark.timeout(vllm_server.START_S + 400))
      if not (sglang_server.BIN / "python").exists():
        item.add_marker(pytest.mark.skip(reason="no SGLang; run make sglang"))


@pytest.fixture(scope="session", name="policy")
def _policy(tmp_path_factory):
  return vllm_server.Policy(tmp_path_factory.mktemp("policy") / "first")


@pytest.fixture(scope="package", name="server")
def _server(policy, tmp_path_factory):
  launch = sglang_server.SglangLaunch(
    str(policy.directory), vllm_server.free_port()
  )
  log = tmp_path_factory.mktemp("sglang") / "log"
  with sglang_server.SglangServer(launch, log) as server:
    yield server
