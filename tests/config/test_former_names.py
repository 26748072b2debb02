"""The former trainer's names of settings still work."""

import logging
import os

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import former_names
from tunix.rl.multi_turn.config import loader

TOKEN = "s3cret-of-the-project"
# As a command line of that trainer has them -> the settings of today.
OLD = {
  "gym_base_url=http://g:5010": ("gym.options", "base_url", "http://g:5010"),
  "gym_id=office": ("gym.options", "gym_id", "office"),
  "eval_tasks=[a,b]": ("task_source.eval_names", None, ("a", "b")),
  "split_type=train": ("gym.name", None, "genv"),
  "learning_rate=3e-5": ("learner.learning_rate", None, 3e-5),
  "lora_rank=4": ("policy.lora_rank", None, 4),
  "consumer_batch_size=6": ("learner.groups_per_step", None, 6),
  "monitor_base_url=http://m:1": ("monitor.url", None, "http://m:1"),
  f"project_token={TOKEN}": ("task_source.source", None, "gym"),
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
  # Set first, so that what a test leaves is undone.
  for name in ("TUNIX_MONITOR_TOKEN", "TUNIX_MONITOR_URL"):
    monkeypatch.setenv(name, "x")
    monkeypatch.delenv(name)


def test_a_former_command_line_is_taken_and_the_log_names_the_settings(caplog):
  with caplog.at_level(logging.DEBUG):
    config = config_lib.load_config([*OLD])
  for words, (path, key, value) in OLD.items():
    got = loader.value_of(config, path)
    got = got if key is None else got[key]
    assert (tuple(got) if isinstance(got, list) else got) == value, words
  for name, path in former_names.SETTINGS.items():
    if any(words.startswith(f"{name}=") for words in OLD):
      assert f"{name} is a former name of {path}" in caplog.text
  assert "project_token is a former name of $TUNIX_MONITOR_TOKEN" in caplog.text


def test_the_token_is_in_the_environment_and_nowhere_else(caplog, capsys):
  with caplog.at_level(logging.DEBUG):
    config = config_lib.load_config([f"project_token={TOKEN}"])
  assert os.environ["TUNIX_MONITOR_TOKEN"] == TOKEN
  assert TOKEN not in config.to_yaml() + repr(config) + caplog.text
  problems = [
    [f"--project_token={TOKEN}"],
    ["--project-token", TOKEN],
    ["project_token=another-one-of-it"],
    [f"project_token=@{TOKEN}"],
    [f"project_token=[{TOKEN}"],
    [f"project_token={TOKEN}", "no_such_key=1"],
  ]
  for argv in problems:
    with pytest.raises(config_lib.ConfigError) as error:
      config_lib.load_config(argv)
    assert TOKEN not in str(error.value) and "another-one" not in str(
      error.value
    )
  assert TOKEN not in "".join(capsys.readouterr())


def test_a_file_of_the_former_trainer_is_taken(tmp_path):
  file = tmp_path / "old.yaml"
  file.write_text(
    "gym_base_url: http://g:1\ngym_id: office\nlearning_rate: 1e-4\n"
    f"project_token: {TOKEN}\nsplit_type: null\n"
  )
  config = config_lib.load_config([str(file), "learner.learning_rate=2e-4"])
  assert config.gym.options == {"base_url": "http://g:1", "gym_id": "office"}
  assert config.gym.name == "genv"
  assert config.learner.learning_rate == 2e-4  # The command line's.


def test_a_token_is_the_text_that_was_written(tmp_path):
  config_lib.load_config(["project_token=0123"])
  assert os.environ.pop("TUNIX_MONITOR_TOKEN") == "0123"
  file = tmp_path / "old.yaml"
  file.write_text("project_token: 0123\n")  # YAML reads the number 83.
  with pytest.raises(config_lib.ConfigError, match="put quotes around") as got:
    config_lib.load_config([str(file)])
  assert "83" not in str(got.value)
  assert "TUNIX_MONITOR_TOKEN" not in os.environ
  file.write_text("project_token: '0123'\n")
  config_lib.load_config([str(file)])
  assert os.environ["TUNIX_MONITOR_TOKEN"] == "0123"


@pytest.mark.parametrize(
  "key", ["num_rollout=3", "rollout_function_path=a.b", "prompt_data=t.jsonl"]
)
def test_an_evaluation_takes_no_names_of_rollouts(key):
  with pytest.raises(config_lib.ConfigError, match="unknown key"):
    config_lib.load_evaluation([key])


@pytest.mark.parametrize("argv, words", [
    (["split_type=eval"], "task_source.eval_names"),
    (["eval_tasks=[a]", "gym_id=x", "task_source.eval_number_range=1-2"],
     "both say what is held out"),
])  # fmt: skip
def test_contradictions_are_refused(argv, words):
  with pytest.raises(config_lib.ConfigError, match=words):
    config_lib.load_config(argv)


def test_a_former_name_leaves_another_gym_as_it_is():
  config = config_lib.load_config(
    ["gym=gbox", "tasks=[a]", "gym_base_url=http://g:1"]
  )
  assert config.gym.name == "gbox"


def test_the_monitor_may_come_from_the_environment_alone(monkeypatch):
  monkeypatch.setenv("TUNIX_MONITOR_URL", "http://m:2")
  assert config_lib.load_config([]).monitor.url == "http://m:2"
  config = config_lib.load_config(["monitor_base_url=http://m:3"])
  assert config.monitor.url == "http://m:3"
  assert not config_lib.load_config(["monitor.embedded=true"]).monitor.url
  assert not config_lib.load_config(["monitor.url="]).monitor.url
