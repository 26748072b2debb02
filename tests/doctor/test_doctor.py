"""The doctor: each fault of a machine is found, with what to do about it."""

import collections
import contextlib
import importlib.metadata as metadata
import json
import pathlib
import shutil
import socket
import sys
import time

from cua_gyms.sandbox import rooms
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.doctor import __main__ as doctor
from tunix.rl.multi_turn.doctor import devices
from tunix.rl.multi_turn.doctor import finding
from tunix.rl.multi_turn.doctor import machine
from tunix.rl.multi_turn.doctor import outside
from tunix.rl.multi_turn.run import addresses

Finding = finding.Finding
FACTS = {
  "jax": "0.10.2",
  "platform": "cpu",
  "problems": [],
  "weights": 7 << 20,
  "devices": [{"kind": "cpu", "memory": None}],
}


@pytest.fixture(name="answered")
def _answered(monkeypatch):
  """JAX's process is replaced where it is not what is tested."""
  monkeypatch.setattr(doctor.devices, "ask", lambda *_: (FACTS, ""))


def config(*words):
  return config_lib.load_config(words)


def one(findings):
  (only,) = list(findings)
  return only


def test_a_machine_that_runs_the_tests_runs_the_quickstart(tmp_path, capsys):
  """All of it, with JAX's own process."""
  status = doctor.main(["--json", f"run.dir={tmp_path}", "steps=1"])
  shown = json.loads(capsys.readouterr().out)
  checks = {one["check"]: one for one in shown["findings"]}
  assert list(checks) == [
    "cores",
    "memory",
    "disk",
    "versions",
    "devices",
    "preflight",
    "gym desktop",
  ]
  failed = [c for c in checks.values() if c["status"] == "fail"]
  assert status == bool(failed) and shown["ok"] == (not failed), failed
  assert checks["devices"]["status"] == "ok"
  assert "x cpu (cpu), JAX 0." in checks["devices"]["found"]
  assert checks["preflight"]["status"] == "ok"
  assert "weights of 6.8 MiB" in checks["memory"]["found"]


@pytest.mark.slow
def test_the_preflight_of_a_run_is_the_doctors(tmp_path):
  (tmp_path / "file").write_text("")
  facts, why = devices.ask([f"run.dir={tmp_path}/file/runs"], 100)
  assert not why
  check = one(devices.preflight(facts, why))
  assert check.status == "fail" and "is a file, not a directory" in check.found
  assert check.fix == "choose another directory"


# --- devices ------------------------------------------------------------------


def test_a_driver_that_hangs_is_ended_at_the_deadline():
  begun = time.monotonic()
  facts, why = devices.ask(
    [], 0.5, [sys.executable, "-c", "import time; time.sleep(600)"]
  )
  assert time.monotonic() - begun < 30 and not facts
  result = one(devices.devices(config(), facts, why))
  assert result.status == "fail" and "0.5 s" in result.found
  assert "fuser" in result.fix and "JAX_PLATFORMS=cpu" in result.fix
  assert one(devices.preflight(facts, why)).status == "warn"


@pytest.mark.parametrize(
  "program, wrong",
  [
    ("import sys; sys.exit('libtpu: no lock')", "libtpu: no lock"),
    ('print(\'{"fatal": "no driver"}\', flush=True); input()', "no driver"),
  ],
)
def test_a_driver_that_fails_is_quoted(program, wrong):
  facts, why = devices.ask([], 60, [sys.executable, "-c", program])
  assert not facts and wrong in why


def test_what_the_probe_imports_may_print(tmp_path, monkeypatch):
  (tmp_path / "loud.py").write_text("print('hello from a module')\n")
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
  facts, why = devices.ask(["run.imports=[loud]"], 100)
  assert not facts and "no_such_platform" in why


@pytest.mark.parametrize(
  "words, changed, status, says",
  [
    ((), {}, "ok", "1 x cpu"),
    (("mesh.fsdp=4",), {}, "fail", "the mesh has 4"),
    (("mesh.fsdp=4", "processes.coordinator=auto"), {}, "ok", "1 x cpu"),
    (
      ("mesh.fsdp=4",),
      {
        "platform": "tpu",
        "devices": [{"kind": "TPU v5 lite", "memory": 16 << 30}] * 4,
      },
      "ok",
      "4 x TPU v5 lite (tpu), JAX 0.10.2, 16.0 GiB each",
    ),
  ],
)
def test_devices_against_the_mesh(words, changed, status, says):
  result = one(devices.devices(config(*words), FACTS | changed, ""))
  assert result.status == status and says in result.found


def test_an_accelerator_that_jax_does_not_use_is_a_warning(
  tmp_path, monkeypatch
):
  (tmp_path / "accel0").touch()
  patterns = {"tpu": (f"{tmp_path}/accel*",), "gpu": (f"{tmp_path}/nv*",)}
  monkeypatch.setattr(devices, "ACCELERATORS", patterns)
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  result = one(devices.devices(config(), FACTS, ""))
  assert result.status == "warn" and "has a TPU" in result.found
  assert "tunix-multi-turn[tpu]" in result.fix
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # As asked for.
  assert one(devices.devices(config(), FACTS, "")).status == "ok"


# --- the machine --------------------------------------------------------------


@pytest.mark.parametrize(
  "quota, allowed, status",
  [
    ("max 100000", 8, "ok"),
    ("150000 100000", 8, "warn"),
    ("400000 100000", 8, "ok"),
    ("max 100000", 1, "warn"),
    (None, 2, "ok"),
  ],
)
def test_cores_of_the_cgroup_count(
  tmp_path, monkeypatch, quota, allowed, status
):
  file = tmp_path / "cpu.max"
  if quota:
    file.write_text(quota + "\n")
  monkeypatch.setattr(machine, "_CPU_MAX", file)
  monkeypatch.setattr(machine.worker_pool, "usable_cores", lambda: allowed)
  assert one(machine.cores()).status == status


@pytest.mark.parametrize(
  "free, weights, on_cpu, status",
  [
    (16 << 30, 1 << 30, True, "ok"),
    (4 << 30, 1 << 30, True, "fail"),
    (4 << 30, 1 << 30, False, "ok"),
    (1 << 30, None, True, "warn"),
    (3 << 30, 4 << 30, False, "warn"),
  ],
)
def test_memory_is_held_against_the_weights(
  monkeypatch, free, weights, on_cpu, status
):
  monkeypatch.setattr(machine, "available_bytes", lambda: free)
  assert one(machine.memory(weights, on_cpu)).status == status


@pytest.mark.parametrize(
  "free, weights, status, fix",
  [
    (100 << 30, 1 << 30, "ok", ""),
    (100 << 20, None, "fail", "run.dir"),
    (3 << 30, None, "warn", "run.dir"),
    (8 << 30, 4 << 30, "warn", "with checkpoint.keep="),
  ],
)
def test_disk_at_the_runs_directory(
  tmp_path, monkeypatch, free, weights, status, fix
):
  usage = collections.namedtuple("usage", "total used free")
  requests = []
  monkeypatch.setattr(
    shutil, "disk_usage", lambda p: requests.append(p) or usage(0, 0, free)
  )
  result = one(machine.disk(config(f"run.dir={tmp_path}/a/b"), weights))
  assert result.status == status and fix in result.fix
  assert requests == [pathlib.Path(tmp_path)]  # The nearest existing one.


def test_versions_are_those_of_the_packages_metadata(monkeypatch):
  there = metadata.version
  assert one(machine.versions(())).status in ("ok", "warn")
  monkeypatch.setattr(
    metadata, "version", lambda n: "0.3.1" if n == "jax" else there(n)
  )
  monkeypatch.setattr(
    metadata,
    "requires",
    lambda _: [
      "jax<0.11.1,>=0.10",
      "numpy>=2.0",
      'nosuch>=1; extra == "monitor"',
    ],
  )
  result = one(machine.versions(()))
  assert result.status == "fail" and "jax 0.3.1, which must be" in result.found
  assert "nosuch" not in result.found and "pip install" in result.fix
  result = one(machine.versions(("monitor",)))
  assert "not installed: nosuch" in result.found and "[monitor]" in result.fix


def test_versions_other_than_tested_are_named(tmp_path, monkeypatch):
  file = tmp_path / "constraints.txt"
  file.write_text("numpy==1.0.0\nnot-needed==3\n")
  monkeypatch.setattr(machine, "_CONSTRAINTS", file)
  monkeypatch.setattr(metadata, "requires", lambda _: ["numpy>=1.0"])
  result = one(machine.versions(()))
  assert result.status == "warn" and "(tested: 1.0.0)" in result.found
  assert str(file) in result.fix and "not-needed" not in result.found


def test_a_clone_that_is_not_installed_is_a_warning(monkeypatch):
  def absent(name):
    raise metadata.PackageNotFoundError(name)

  monkeypatch.setattr(metadata, "requires", absent)
  assert one(machine.versions(())).status == "warn"


@pytest.mark.parametrize(
  "words, extras",
  [
    ((), ()),
    (("monitor.embedded=true",), ("monitor",)),
    (("rollout.via=proxy",), ("client", "serve", "services")),
    (("tracking.wandb=offline",), ("tracking",)),
    (("policy=./model.gguf",), ("pretrained",)),
    (("policy=smollm2_135m",), ("pretrained",)),
  ],
)
def test_settings_that_need_extras(words, extras):
  assert machine.extras_of(config(*words)) == extras


# --- outside ------------------------------------------------------------------


def test_a_missing_browser_is_named_with_its_fix(monkeypatch):
  monkeypatch.setenv("TUNIX_CHROMIUM", "/no/such/chromium")
  result = list(outside.gym(config("gym=miniwob")))
  assert result[0].status == "fail" and result[0].check == "gym miniwob"
  assert "/no/such/chromium" in result[0].found
  monkeypatch.setenv("TUNIX_CHROMIUM", sys.executable)
  assert all(
    "chromium" not in f.found for f in outside.gym(config("gym=miniwob"))
  )


def test_a_missing_desktop_is_named_with_its_fix(monkeypatch, tmp_path):
  monkeypatch.setattr(rooms, "SEARCH", str(tmp_path))
  result = next(iter(outside.gym(config("gym=xdesktop"))))
  assert result.status == "fail" and "Xvfb" in result.found
  assert result.fix == "install them: sudo make desktop"


def test_a_gym_that_needs_nothing_and_an_environment_without_one():
  assert one(outside.gym(config())).found == "needs nothing"
  assert not list(outside.gym(config("environment=gsm8k")))


def test_servers_that_settings_name_are_connected_to():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    url = f"monitor.url=http://127.0.0.1:{port}"
    result = one(outside.servers(config(url)))
    assert result.status == "ok" and url in result.found
  result = one(outside.servers(config(url)))
  assert result.status == "fail" and "Connection refused" in result.found
  assert "start it, or correct monitor.url" in result.fix


def test_servers_that_do_not_answer_take_three_seconds_together():
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server.listen(0)
    port = server.getsockname()[1]
    for _ in range(4):  # Its queue is full: the next connection waits.
      waiting = stack.enter_context(socket.socket())
      waiting.setblocking(False)
      waiting.connect_ex(("127.0.0.1", port))
    url = f"http://127.0.0.1:{port}"
    settings = config(
      f"monitor.url={url}",
      f"tracking.mlflow={url}",
      "gym=genv",
      "tasks=[x]",
      f"gym.options.base_url={url}",
    )
    began = time.monotonic()
    lines = addresses.unreachable(settings).strip().split("\n")
    assert time.monotonic() - began < 4
  keys = ("monitor.url", "tracking.mlflow", "gym.options.base_url")
  assert len(lines) == 3
  for key in keys:
    assert any(f"cannot be reached: {key}={url}" in one for one in lines), key


def test_the_server_of_a_gym_is_its_option_or_that_ones_default():
  key = "gym.options.base_url"
  words = ["gym=genv", "task_source.families=[a]"]
  result = addresses.addresses(config(*words))
  assert result[key] == "http://127.0.0.1:5010"
  assert not addresses.addresses(config())


def test_a_port_that_is_taken_is_found():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    words = config("rollout.via=proxy", f"rollout.port={port}")
    result = one(outside.ports(words))
    assert result.status == "fail" and "in use" in result.found
    assert "change rollout.port" in result.fix
  assert one(outside.ports(words)).status == "ok"
  assert not list(outside.ports(config()))


def test_tokens_are_looked_for_and_not_shown(monkeypatch, tmp_path):
  words = config("monitor.url=http://127.0.0.1:1", "tracking.wandb=online")
  for name in (
    "TUNIX_MONITOR_TOKEN",
    "WANDB_API_KEY",
    "WANDB_IDENTITY_TOKEN_FILE",
  ):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("NETRC", str(tmp_path / "none"))
  result = list(outside.tokens(words))
  assert [f.status for f in result] == ["warn", "fail"]
  assert "WANDB_API_KEY" in result[1].fix
  monkeypatch.setenv("TUNIX_MONITOR_TOKEN", "hush")
  monkeypatch.setenv("WANDB_API_KEY", "hush")
  result = list(outside.tokens(words))
  assert [f.status for f in result] == ["ok", "ok"]
  assert "hush" not in finding.text_of(result)


# --- the command --------------------------------------------------------------


def test_the_table_shows_faults_and_fixes_in_80_columns():
  text = finding.text_of(
    [
      Finding("cores", "ok", "8 cores"),
      Finding("devices", "fail", "word " * 40, "do " * 40),
      Finding("disk", "warn", "little", "free some"),
    ]
  )
  assert text.splitlines()[0] == "ok    cores    8 cores"
  assert "               -> free some" in text.splitlines()
  assert max(map(len, text.splitlines())) <= 80
  assert text.endswith("3 checks, 1 failed, 1 with a warning")


def test_a_finding_has_a_fix_unless_it_is_ok():
  for status, fix in (("ok", "do"), ("fail", ""), ("warn", "")):
    with pytest.raises(ValueError, match="a fix is of"):
      Finding("x", status, "found", fix)


def test_the_exit_status_and_the_json_agree(answered, capsys, tmp_path):
  del answered
  words = [f"run.dir={tmp_path}"]
  assert doctor.main(words) == 0
  assert "0 failed" in capsys.readouterr().out
  assert doctor.main([*words, "mesh.fsdp=4", "--json"]) == 1
  shown = json.loads(capsys.readouterr().out)
  assert not shown["ok"]
  failed = [f for f in shown["findings"] if f["status"] == "fail"]
  assert [f["check"] for f in failed] == ["devices"] and failed[0]["fix"]


@pytest.mark.parametrize(
  "words, wrong",
  [
    (["stepz=2"], "unknown key 'stepz'"),
    (["--timeout"], "--timeout="),
    (["--timeout=-1"], "--timeout=-1"),
    (["--jsno"], "unknown option --jsno"),
  ],
)
def test_wrong_arguments_end_with_status_2(words, wrong, capsys):
  assert doctor.main(words) == 2
  shown = capsys.readouterr()
  assert wrong in shown.err and not shown.out
