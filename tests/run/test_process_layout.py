"""A run resumes with as many processes as it was begun with."""

import json

import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run.multiprocess import process_layout


def begun_with(directory, count):
  process_layout.claim(directory, count, resuming=False)
  return directory


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_run_keeps_its_number_of_processes(tmp_path, count):
  begun_with(tmp_path, count)
  assert process_layout.read(tmp_path) == count
  process_layout.claim(tmp_path, count, resuming=True)
  for other in {1, 2, 3, 4} - {count}:
    with pytest.raises(
      config_lib.ConfigError, match=f"run of {count}.*resume with {count}"
    ):
      process_layout.claim(tmp_path, other, resuming=True)
  assert process_layout.read(tmp_path) == count


@pytest.mark.parametrize("text", ["{", "[]", '{"processes": "many"}', "{}"])
def test_a_damaged_file_is_named(tmp_path, text):
  begun_with(tmp_path, 2)
  file = tmp_path / "processes" / "layout.json"
  assert json.loads(file.read_text()) == {"processes": 2}
  file.write_text(text)
  with pytest.raises(config_lib.ConfigError, match="layout.json cannot be"):
    process_layout.claim(tmp_path, 2, resuming=True)


def test_each_process_takes_its_part_of_a_checkpoint():
  class Process:
    index = 1

  extras = {"config": 1, "processes": [{"collect": "a"}, {"collect": "b"}]}
  own = process_layout.own_extras(extras, Process())
  assert own["collect"] == "b" and own["config"] == 1
