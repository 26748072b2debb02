"""An agent that writes its own summaries is trained, resumed and evaluated."""

import json
import shutil

import pytest
import small_runs
from tunix.rl.multi_turn import evaluate
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.reporting import run_data

pytestmark = pytest.mark.timeout(500)
SUMMARIES = (
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "tasks=[recall-place]",
  "agent.history=summary",
  "agent.summary_at=420",
  "agent.summary_tokens=12",
  "agent.on_parse_error=retry",
  "engine.context_length=640",
  "learner.row_length=640",
  # Untrained, it says little; what it says is a turn all the same.
  "sampling.max_new_tokens=24",
)


def last_words(task, action, trajectory):
  """A reward in which members of a group differ."""
  del task, action
  return len(trajectory.steps[-1].model_response) % 7 / 7


@pytest.mark.slow
def test_a_run_by_name_learns_from_its_summaries(tmp_path, capsys):
  status = small_runs.run_train(
    tmp_path,
    *SUMMARIES,
    "name=s",
    "warm_start.steps=2",
    "warm_start.batch_size=2",
    "steps=2",
    # Nearly untrained, it solves nothing.
    f"environment.reward={__name__}:last_words",
    "checkpoint.every=1",
  )
  assert status == 0, capsys.readouterr().err
  directory = tmp_path / "s"
  for metrics in small_runs.metrics_of(directory):
    assert metrics["summary_turns"] >= 1
    assert metrics["history_rewrites"] == metrics["summary_turns"]
    assert metrics["sampled_tokens"] > 0
  # 1. What was played: summaries end sequences and are recorded as turns.
  lines = (directory / "trajectories.jsonl").read_text().splitlines()
  played = [json.loads(line) for line in lines]
  assert any("summary" in line for line in lines) and played
  labels = {
    frame.label
    for episode in run_data.load(directory).episodes
    for frame in episode.frames
  }
  assert any(label.endswith(", a summary") for label in labels)

  # 2. A run that was cut off after its first update repeats its second.
  want = small_runs.metrics_of(directory)[1]
  copy = tmp_path / "copy"
  shutil.copytree(directory, copy)
  shutil.rmtree(copy / "checkpoints" / "2")
  lines = (copy / "metrics.jsonl").read_text().splitlines()
  (copy / "metrics.jsonl").write_text(lines[0] + "\n")
  assert train.main([f"resume={copy}"]) == 0, capsys.readouterr().err
  got = small_runs.metrics_of(copy)[1]
  assert got["summary_turns"] >= 1 and got["step"] == want["step"] == 2
  assert train.main([f"resume={copy}", "agent.summary_tokens=16"]) == 2
  assert "agent.summary_tokens" in capsys.readouterr().err

  # 3. Its policy is evaluated with its context, which is no default one.
  status = evaluate.main(
    [f"run={directory}", "dir=" + str(tmp_path / "e"), "name=e"]
  )
  assert status == 0, capsys.readouterr().err
  config = (tmp_path / "e" / "e" / "config.yaml").read_text()
  assert "history: summary" in config and "row_length: 640" in config
