"""A run samples with the real vLLM, and learns."""

import json

import pytest
from tunix.rl.multi_turn import train
import vllm_server

pytestmark = pytest.mark.usefixtures("first_weights_again")


def arguments(policy, server, tmp_path, *changes):
  return [
      f"policy={policy.directory}", "gym=two_sides:GYM",
      f"gym.width={vllm_server.SIZE[0]}", f"gym.height={vllm_server.SIZE[1]}",
      "environment.max_turns=2", "engine.context_length=512",
      "learner.row_length=512", "collect.group_size=8",
      "learner.groups_per_step=4", "collect.concurrency=16",
      "rollout.via=external", f"external.url={server.url}/v1",
      f"external.model={vllm_server.NAME}", "report.progress=none",
      f"run.dir={tmp_path}", "name=e", *changes,
  ]  # fmt: skip


def test_three_steps_raise_the_success_of_a_cloned_policy(
  policy, server, tmp_path
):
  """Cloning leaves the side of a click to chance, and half of it is right."""
  status = train.main(
      arguments(
          policy, server, tmp_path,
          "warm_start.source=none", "warm_start.steps=30",
          "warm_start.batch_size=16", "warm_start.demonstrations=64",
          "warm_start.learning_rate=0.003", "learner.learning_rate=0.003",
          "steps=3", "eval.episodes_per_task=24", "eval.modes=[sampled]",
      )
  )  # fmt: skip
  assert status == 0
  directory = tmp_path / "e"
  summary = json.loads((directory / "summary.json").read_text())
  assert summary["status"] == "completed" and not summary.get("faults")
  before, after = (
    summary["eval"][stage]["sampled"]["success_rate"]
    for stage in ("warm_start", "final")
  )
  assert after >= before + 0.2, (before, after)
  lines = (directory / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  assert [m["step"] for m in metrics] == [1, 2, 3]
  assert "logprob_gap_max" in metrics[0]
  for step in metrics:
    if "logprob_gap_max" not in step:  # All succeeded: nothing was learned.
      continue
    # It sampled with the learner's weights of that version.
    assert step["logprob_gap_max"] < 1e-4, step["logprob_gap_max"]
    assert step["fallback_turns"] == 0 and step["staleness_max"] == 0


def test_a_run_that_the_server_cannot_serve_ends_before_it_compiles(
  policy, server, tmp_path, capsys
):
  status = train.main(
    arguments(
      policy,
      server,
      tmp_path,
      "environment.max_turns=100",
      "engine.context_length=2000",
      "learner.row_length=2048",
      "steps=1",
      "warm_start.source=none",
    )
  )
  assert status == 1
  errors = capsys.readouterr().err
  assert "101 images" in errors
  assert "--limit-mm-per-prompt '{\"image\":101}'" in errors
  assert not (tmp_path / "e" / "metrics.jsonl").read_text()
