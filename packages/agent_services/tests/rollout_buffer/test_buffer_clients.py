"""The rollout buffer service with a trainer that knows its protocol only."""

import collections
import json
import pathlib
import subprocess
import sys

import buffer_services
import buffer_trainer
import chat_server
import pytest
import run_services

TERMINATE = run_services.call(action="terminate", status="success")


def rounds_of(tmp_path, **options):
  """The rounds of a trainer in a process of its own."""
  settings = tmp_path / "settings.json"
  settings.write_text(json.dumps({
      "state": str(tmp_path / "state.json"), "group_size": 2, "groups": 2,
      **options,
  }))  # fmt: skip
  process = subprocess.run(
    [sys.executable, "-I", buffer_trainer.__file__, str(settings)],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert not process.returncode, process.stderr
  return [json.loads(line) for line in process.stdout.splitlines()]


def write_tasks(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def two_rounds_and_a_third(tmp_path, running, **options):
  """The items of two rounds, and of a third one after a restart."""
  options = {"url": running.url, **options}
  first = rounds_of(tmp_path, rounds=2, **options)
  state = json.loads((tmp_path / "state.json").read_text())
  second = rounds_of(tmp_path, rounds=3, **options)
  assert [r["round"] for r in first + second] == [0, 1, 2]
  finished = {name for names in state.values() for name in names}
  again = {item["instance_id"] for item in second[0]["items"]}
  assert again and not again & finished
  items = [item for r in first + second for item in r["items"]]
  counts = collections.Counter(item["instance_id"] for item in items)
  assert len(counts) == 6 and set(counts.values()) == {2}
  return items


@pytest.mark.timeout(300)
def test_mathematics(tmp_path):
  tasks = write_tasks(tmp_path / "tasks.jsonl", [
      {"instance_id": f"math_{i}", "prompt": f"What is {i} + 1?",
       "label": str(i + 1)}
      for i in range(400)
  ])  # fmt: skip
  with (
    chat_server.serving() as (engine, server),
    buffer_services.Running(tmp_path / "buffer") as running,
  ):
    server.wrong = lambda a, b, seed: seed % 2
    items = two_rounds_and_a_third(
      tmp_path,
      running,
      engine=engine,
      task_type="math",
      input_file=tasks,
      more={"reward": "numeric_match"},
    )
  for item in items:
    assert item["messages"][-1]["role"] == "assistant"
    assert item["raw_reward"] in (0.0, 1.0)
  groups = collections.defaultdict(float)
  for item in items:
    groups[item["instance_id"]] += item["reward"]
  assert all(abs(total) < 1e-6 for total in groups.values())  # Normalised.


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_desktop(tmp_path):
  tasks = write_tasks(
    tmp_path / "tasks.jsonl",
    [
      {"instance_id": f"gui_{i}", "family": "click-button", "index": i}
      for i in range(120)
    ],
  )

  def answer(method, path, body):
    if path.endswith("/models"):
      return 200, {"data": [{"id": "m"}]}
    return 200, run_services.completion(TERMINATE)

  with (
    run_services.scripted(answer) as (engine, _),
    buffer_services.Running(tmp_path / "buffer") as running,
  ):
    # A policy that always does the same: its groups would be dropped.
    items = two_rounds_and_a_third(
      tmp_path,
      running,
      engine=engine,
      task_type="desktop",
      input_file=tasks,
      more={"group_rules": "raw"},
    )
  assert all(0 <= item["reward"] <= 1 for item in items)
  assert all(item["extra_info"]["round_number"] == 1 for item in items)


def test_the_trainer_knows_nothing_of_this_package():
  text = pathlib.Path(buffer_trainer.__file__).read_text()
  assert "tunix" not in text
