"""Tests the bounds of depth and size on JSON, whichever reader parses it."""

import io
import json
import pathlib
import re
import struct
import subprocess
import sys
import zipfile

from agent_services.rollout_buffer import generating
from agent_services.serving import bodies
from cua_gyms import workers
from cua_gyms.osworld import osworld_tasks as osworld
import pytest
from training_monitor.client import spool
from training_monitor.maintenance import archive
from tunix.rl.multi_turn.clients import record_replay
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.environments import conversations
from tunix.rl.multi_turn.environments import recordings
from tunix.rl.multi_turn.environments.play import __main__ as play
from tunix.rl.multi_turn.environments.task_sources import source
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.tool_parser import scanning
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.reporting import files as report_files
from tunix.rl.multi_turn.reporting import summary_writer
from tunix.rl.multi_turn.run.multiprocess import process_layout
from tunix.rl.multi_turn.run.recorded_data import files as recorded
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.tools import tool_base as tools_base
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import (
  assign_instance_id,
)

LEVELS = (900, 200_000)
ROOM = "tunix.rl.multi_turn"


def deep(levels, key="a"):
  return f'{{"{key}": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


# --- the function -------------------------------------------------------------


@pytest.mark.parametrize("kind", (str, str.encode))
def test_the_bound_is_of_depth_and_not_of_width(kind):
  most = json_text.MOST_DEEP
  assert json_text.parse(kind(deep(most)))["a"]
  wide = [[[{}]] * 3] * 5000
  assert json_text.parse(kind(json.dumps(wide))) == wide
  # Brackets in texts nest nothing.
  assert json_text.parse(kind(json.dumps("[{" * 5000))) == "[{" * 5000
  for levels in (most + 1, *LEVELS):
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
      json_text.parse(kind(deep(levels)))


def test_objects_nest_as_lists_do():
  text = '{"a": ' * 201 + "1" + "}" * 201
  with pytest.raises(ValueError, match="nested deeper than 200 levels"):
    json_text.parse(text)
  assert json_text.parse(text[6:-1])


def test_what_parses_can_be_written_and_shown():
  import orjson  # pylint: disable=g-import-not-at-top

  value = json_text.parse(deep(json_text.MOST_DEEP))
  assert orjson.loads(orjson.dumps(value)) == value
  assert json.loads(json.dumps(value)) == value and repr(value)


def test_a_text_or_file_beyond_its_bound_is_not_read(tmp_path):
  file = tmp_path / "f.json"
  file.write_bytes(b'"' + b"x" * 98 + b'"')
  assert json_text.read(file, 100) == "x" * 98
  with pytest.raises(ValueError, match="longer than 99 bytes"):
    json_text.read(file, 99)
  with pytest.raises(ValueError, match="longer than 99 bytes"):
    json_text.parse(file.read_bytes(), 99)
  lines = io.BytesIO(b"ab\n" + b"c" * 50)
  bounded = json_text.lines(lines, 10)
  assert next(bounded) == b"ab\n"
  with pytest.raises(ValueError, match="longer than 10 bytes"):
    next(bounded)


@pytest.mark.parametrize("text", (b"", b"{", b"\xff\xfe\xff", "[1,]", "nul"))
def test_what_is_no_json_is_a_value_error(text):
  with pytest.raises(ValueError):
    json_text.parse(text)


# --- who reads ----------------------------------------------------------------


def in_folder(read, name):
  """A reader of a folder with one bad file."""

  def run(folder, text):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    read(folder)

  return run


def in_file(read, name="f.jsonl"):
  def run(folder, text):
    file = folder / name
    file.write_text(text + "\n")
    value = read(file)
    if value is not None and not isinstance(value, (list, dict)):
      list(value)

  return run


def of_tensors(folder, text):
  header = text.encode()
  file = folder / "model.safetensors"
  file.write_bytes(struct.pack("<Q", len(header)) + header)
  with tensor_files.opened(file):
    pass


def of_archive(folder, text):
  with zipfile.ZipFile(folder / "a.zip", "w") as file:
    file.writestr("manifest.json", text)
  archive.ArchiveReader(folder / "a.zip")


def of_summary(file):
  if problem := summary_writer.problem(file):
    raise ValueError(f"{file}: {problem}")
  raise AssertionError("it was read")


READERS = {
  "config.json": in_folder(policy_files.model_type, "config.json"),
  "tokenizer.json": in_folder(policy_files.load_tokenizer, "tokenizer.json"),
  "tokenizer_config.json": in_folder(
    lambda d: policy_files._json_of(d / "tokenizer_config.json"),
    "tokenizer_config.json",
  ),
  "index.json": in_file(tensor_files.read_json, "m.index.json"),
  "safetensors": of_tensors,
  "vllm": in_folder(lambda d: vllm.config_of(str(d)), "config.json"),
  "layout": in_folder(
    process_layout.read, f"{process_layout.PARTS}/{process_layout._FILE}"
  ),
  "rollout.json": in_folder(player.addresses, player.ADDRESS),
  "summary.json": in_file(of_summary, "summary.json"),
  "spool": in_folder(spool.Header.read, spool.HEADER),
  "archive": of_archive,
  "tasks": in_file(
    lambda f: source.read(source.TaskSourceConfig(source="jsonl", path=str(f)))
  ),
  "osworld": in_file(osworld.read_task, "t.json"),
  "recordings": in_file(recordings.read),
  "conversations": in_file(conversations.read),
  "replay": in_file(record_replay.RecordedCompletions.load),
  "script": in_file(play.read_script),
  "episodes": in_file(
    lambda f: recorded.RecordedGroups(f, None, images.ImageStore())
  ),
  "exported": in_file(
    lambda f: recorded.RecordedGroups(f, None, images.ImageStore()), "f.json"
  ),
  "rollout tasks": in_file(lambda f: generating.rows_of(str(f))),
  "ids": in_file(lambda f: assign_instance_id.rows_of(f.open(), str(f))),
}
PLACES = {
  "spool": spool.HEADER,
  "conversations": "line 1",
  "layout": "",
  "rollout.json": "",
}


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_nests_too_deeply_is_refused(tmp_path, name, levels):
  """As a ValueError (never a RecursionError) that names the file."""
  with pytest.raises(Exception) as failure:
    READERS[name](tmp_path, deep(levels))
  error = failure.value
  is_told = isinstance(error, ValueError) or "Error" in type(error).__name__
  assert is_told and not isinstance(error, (RecursionError, AssertionError))
  assert PLACES.get(name, str(tmp_path)) in str(error)


@pytest.mark.parametrize("levels", LEVELS)
def test_a_report_passes_over_what_is_damaged(tmp_path, levels):
  file = tmp_path / "metrics.jsonl"
  file.write_text('{"step": 1}\n' + deep(levels) + '\n{"step": 2}\n')
  assert [line["step"] for line in report_files.read_lines(file)] == [1, 2]
  file.write_text(deep(levels))
  assert report_files.read_json(file) == {}


@pytest.mark.parametrize("levels", LEVELS)
def test_what_a_policy_writes_is_no_deeper(levels):
  nested = deep(levels)
  with pytest.raises(ValueError, match="'f' are not JSON: .*nested"):
    tools_base.normalize_calls([{"name": "f", "arguments": nested}])
  with pytest.raises(tool_parser.ToolParseError, match="bad JSON"):
    scanning.read_json(nested, 0)


@pytest.mark.parametrize("levels", LEVELS)
def test_a_gyms_process_sends_nothing_deeper(levels):
  body = deep(levels).encode()
  length = workers._LENGTH.pack(len(body))
  with pytest.raises(ValueError, match="nested"):
    workers.decode_message(length + body)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
  "command",
  (
    f"{ROOM}.commands.inspect_policy {{0}}",
    f"{ROOM}.serving {{0}} --port 0",
    f"{ROOM}.train policy={{0}} --dry-run",
  ),
)
def test_a_command_ends_with_one_line(tmp_path, command, levels):
  (tmp_path / "config.json").write_text(deep(levels, "model_type"))
  words = command.format(tmp_path).split()
  process = subprocess.run(
    [sys.executable, "-m", *words],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
    cwd=tmp_path,
  )
  assert process.returncode == 2, process.stderr
  assert f"{tmp_path}/config.json" in process.stderr
  assert "nested deeper than 200 levels" in process.stderr
  assert "Traceback" not in process.stderr and process.stderr.count("\n") == 1


# --- the kind -----------------------------------------------------------------

OWN = {
    "core/json_text.py", "net/peers.py",
    # Written by this package in another process of the same user.
    "doctor/probe.py", "rewards/math_answers.py", "rewards/math_worker.py",
    "environments/verifiers/worker.py", "cua_gyms/sandbox/rooms.py",
    "run/fleet/ray_cluster.py", "run/fleet/collector.py",
    "agent_services/rollout_buffer/generator_process.py",
    "agent_services/rollout_buffer/service.py",  # Its own database.
    # Written by this process a moment before.
    "parser/renderer/base_renderer.py",
    "learner/checkpoint.py",
    "trajectory_collector/loss_mask.py",
    "agent_services/serving/endpoints/messages.py",
    # With `check_depth` beside it.
    "agent_services/serving/bodies.py",
    "training_monitor/server/batches/fields.py",
    "training_monitor/dashboard/views/configuration_page.py",
}  # fmt: skip


def test_json_is_parsed_by_the_one_reader():
  room = pathlib.Path(json_text.__file__).parents[1]
  packages = [
    pathlib.Path(module.__file__).parents[1] for module in (archive, bodies)
  ]
  parsers = set()
  gyms = pathlib.Path(workers.__file__).parent
  for folder, top in (
    (room, room),
    *((p, p.parent) for p in (*packages, gyms)),
  ):
    for file in folder.rglob("*.py"):
      if re.search(r"(?<![a-z_])json\.loads\(", file.read_text()):
        parsers.add(str(file.relative_to(top)))
  assert parsers == OWN


def test_a_message_shows_the_outside_of_any_value():
  deep = []
  for _ in range(100_000):
    deep = [deep]
  assert json_text.short(deep) == "[" * 9 + "..." + "]" * 9
  assert json_text.short([1, "a", {"b": None}]) == "[1, 'a', {'b': None}]"
  assert json_text.short({"kind": "click", "x": 1, "a": {2}}) == (
    "{'kind': 'click', 'x': 1, 'a': {2}}"
  )
  assert len(json_text.short(dict.fromkeys(range(99)))) == 80
  assert len(json_text.short("x" * 1000)) == 80
  assert json_text.short(10**5000).endswith("4,300 digits")
