"""The engine's settings: what is refused, and what is decided later."""

import dataclasses
import subprocess
import sys

import pytest
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.engine import config as config_lib

EngineConfig = config_lib.EngineConfig


def test_every_setting_has_its_meaning_and_numbers_their_range():
  for field in settings.fields(EngineConfig):
    assert field.doc.endswith("."), field.name
    if field.type in (int, float) or field.name.endswith(("rows", "buckets")):
      assert field.range, field.name
    if field.type in (int, float) and field.name != "slots":
      assert field.unit, field.name


@pytest.mark.parametrize(
  "options, message",
  (
    ({"slots": 0}, "slots\n.*greater than or equal to 1"),
    ({"slots": 2.5}, "slots\n.*valid integer"),
    ({"context_length": 1}, "context_length\n.*equal to 2"),
    ({"decode_rows": (4, 2)}, r"decode_rows=\[4, 2\] must ascend"),
    ({"patch_buckets": (8, 8)}, "must ascend without repeats"),
    ({"prefill_rows": (0,)}, "prefill_rows: 0 must be >= 1"),
    ({"image_buckets": ()}, "image_buckets=.* at least one"),
    (
      {"context_length": 64, "window_buckets": (65,)},
      r"window_buckets=\[65\] go beyond context_length=64",
    ),
    (
      {"context_length": 64, "prefill_buckets": (32, 128)},
      r"prefill_buckets=\[32, 128\] go beyond context_length=64",
    ),
    (
      {"context_length": 64, "cache_tokens": 63},
      "cache_tokens=63 is below context_length=64",
    ),
    ({"lockstep": True}, "lockstep\n.*'auto', 'true' or 'false'"),
    ({"features": ("telepathy",)}, "features.*\n.*'grammar' or 'penalties'"),
    ({"slot": 3}, "slot\n.*[Uu]nexpected"),
  ),
)
def test_bad_settings_are_refused_by_name(options, message):
  with pytest.raises(ValueError, match=message):
    EngineConfig(**options)


def test_all_contradictions_are_reported_at_once():
  with pytest.raises(ValueError) as caught:
    EngineConfig(context_length=64, cache_tokens=3, decode_rows=(2, 2))
  assert "cache_tokens=3" in str(caught.value)
  assert "decode_rows=[2, 2]" in str(caught.value)


def test_a_run_decides_what_is_left_to_it():
  config = EngineConfig()
  assert not config.is_lockstep and config.shares_prefixes
  steady = config.resolved(lockstep=True)
  assert steady.is_lockstep and steady.shares_prefixes
  assert not EngineConfig(share_prefixes="false").shares_prefixes
  assert not config.resolved(lockstep=False).is_lockstep
  own = EngineConfig(lockstep="false")
  assert own.resolved(lockstep=True) is own
  with pytest.raises(ValueError, match="slots"):
    dataclasses.replace(config, slots=0)


def test_settings_load_no_jax_of_their_own():
  """google-tunix's package imports it; this module must not."""
  process = subprocess.run(
      [
          sys.executable,
          "-c",
          "import sys, types\n"
          "sys.modules['jax'] = None\n"
          "for name in ('tunix', 'tunix.rl'):\n"
          "  module = types.ModuleType(name)\n"
          "  module.__path__ = [name.replace('.', '/')]\n"
          "  sys.modules[name] = module\n"
          "from tunix.rl.multi_turn.engine import EngineConfig\n"
          "print(EngineConfig().slots)\n",
      ],
      capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert process.stdout == "96\n", process.stderr
