"""Compiled programs are kept, and found by the next process."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
import quick_compiles
from tunix.rl.multi_turn.policy import compile_cache

# The file alone: importing its package takes seconds.
_PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("compile_cache", sys.argv[2])
compile_cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compile_cache)
import jax, jax.numpy as jnp
print(compile_cache.enable(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
print(float(jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((3, 3)))[0, 0]))
print(sum(name.endswith("/cache_hits") for name in seen))
"""


def run(choice, **environment):
  env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_C")}
  process = subprocess.run(
    [sys.executable, "-c", _PROGRAM, choice, compile_cache.__file__],
    env=env | environment,
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  where, value, hits = process.stdout.split()
  return where, value, int(hits), process.stderr


def test_a_second_process_compiles_nothing_again(tmp_path):
  where, value, hits, _ = run(str(tmp_path))
  assert pathlib.Path(where).parent == tmp_path and not hits
  assert list(pathlib.Path(where).iterdir())
  again = run(str(tmp_path))
  assert again[:2] == (where, value) and again[2] > 0


@pytest.mark.slow
def test_off_keeps_nothing(tmp_path):
  for _ in range(2):
    where, _, hits, _ = run("off", XDG_CACHE_HOME=str(tmp_path))
    assert where == "None" and not hits
  assert not list(tmp_path.iterdir())


def test_auto_is_the_users_cache_or_what_jax_was_told(tmp_path, monkeypatch):
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
  folder = compile_cache.directory()
  assert folder.parent == tmp_path / "user" / "tunix-multi-turn" / "xla"
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
  assert compile_cache.directory() == tmp_path / "jax"


def test_other_processors_have_another_directory(tmp_path, monkeypatch):
  here = compile_cache.directory(str(tmp_path))
  facts = tmp_path / "cpuinfo"
  facts.write_text("flags: another one\n\n")
  monkeypatch.setattr(compile_cache, "_CPU_FACTS", facts)
  assert compile_cache.directory(str(tmp_path)) != here


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, caplog):
  (tmp_path / "file").write_text("")
  before = jax.config.jax_compilation_cache_dir
  assert compile_cache.enable(str(tmp_path / "file")) is None
  assert jax.config.jax_compilation_cache_dir == before
  assert "run.compile_cache" in caplog.text


@pytest.mark.parametrize("choice", ("off", "auto"))
def test_the_config_knows_it(choice):
  from tunix.rl.multi_turn import config as config_lib  # pylint: disable=g-import-not-at-top

  loaded = config_lib.load_config([f"run.compile_cache={choice}"])
  assert loaded.run.compile_cache == choice


@pytest.mark.parametrize("before", [False, True])
def test_quick_compiles_of_tests_leave_the_setting_as_it_was(before):
  name = "jax_disable_most_optimizations"
  chosen = jax.config.read(name)
  try:
    jax.config.update(name, before)
    with pytest.raises(RuntimeError), quick_compiles.quick_compiles():
      assert jax.config.read(name)
      raise RuntimeError
    assert jax.config.read(name) == before
  finally:
    jax.config.update(name, chosen)
