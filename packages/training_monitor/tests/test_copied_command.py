"""The copied command of a run against the reader of commands."""

import json
import shlex

import pytest
from training_monitor.dashboard import text as text_lib
from training_monitor.dashboard.views import configuration_page

config_lib = pytest.importorskip(
  "tunix.rl.multi_turn.config", reason="needs the framework"
)


def again(config):
  """Returns the configuration that the page's command starts."""
  sent = json.loads(json.dumps(config.to_dict()))
  changed = json.loads(json.dumps(config_lib.changed(config)))
  line = configuration_page.command(configuration_page.whole(sent, changed))
  # The page shows the line without changing a character.
  assert not text_lib.HIDDEN.search(line)
  return config_lib.load_config(shlex.split(line)[3:])


def plain(config):
  data = config.to_dict()
  data["run"].pop("name")
  return data


@pytest.mark.parametrize(
  "name, setting, value",
  [
    ("dapo", "learner.dynamic_sampling", 0),
    ("grpo", "algorithm.kl_coef", 0.0),
    ("gspo", "algorithm.clip_low", 0.2),
    ("grpo", "algorithm.loss_aggregation", "token_mean"),
  ],
)
def test_a_default_against_a_preset_is_repeated(name, setting, value):
  config = config_lib.from_dict({"algorithm.name": name, setting: value})
  preset = config_lib.from_dict({"algorithm.name": name})
  assert plain(config) != plain(preset)
  assert setting in config_lib.changed(config)
  assert plain(again(config)) == plain(config)
  assert plain(again(preset)) == plain(preset)


@pytest.mark.parametrize("text", [
    "a b", "it's $HOME `x` \"y\"", "1e-06", "007", "null", "~", "yes", "a\nb",
    "a\x7fb", "a\x85b", "a\u2028b", "a\u200bb", "\ufeff", "\u202ex", "😀",
    "\U000e0001", "- x", "a: b", "a #b", "{", "\x00", "\\u200b", "",
])  # fmt: skip
def test_texts_of_any_characters_are_repeated(text):
  config = config_lib.from_dict(
    {"environment.options": {"note": text, "list": [text, {text: text}]}}
  )
  assert plain(again(config)) == plain(config)


@pytest.mark.parametrize("options", [
    {"a": 1, "a.b": 2}, {"a": {}}, {"a": None, "b": [], "c": 1e-20}, {"": 1},
    {"a": [1e22, -2e-7, 1.5e300, float("inf"), -float("inf"), -0.0, 3.5, 7]},
])  # fmt: skip
def test_mappings_are_repeated(options):
  config = config_lib.from_dict({"environment.options": options})
  assert plain(again(config)) == plain(config)


def test_names_of_other_clients_are_no_options():
  names = ["--dry-run", "a b", "$(x)", "learner.steps"]
  line = configuration_page.command(dict.fromkeys(names, 1))
  assert line == "python -m tunix.rl.multi_turn.train learner.steps=1"
