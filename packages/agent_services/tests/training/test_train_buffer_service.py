"""This project's trainer and its rollout buffer, as separate processes."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request

import buffer_peer
import pytest
import small_runs
import trials
from tunix.rl.multi_turn import train

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

COMMON = (
  small_runs.NANO,
  "warm_start.source=none",
  "rollout.via=buffer",
  "buffer.poll_s=0.1",
  "checkpoint.every=1",
  "queue.max_staleness=8",
  "buffer.missing_logprobs=recompute",
  "collect.concurrency=4",
)


@contextlib.contextmanager
def _service(directory, port=0):
  process = subprocess.Popen(
    [sys.executable, "-m", "agent_services.rollout_buffer",
     "--dir", str(directory), "--port", str(port),
     "--input-roots", str(directory.parent)],
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
  )  # fmt: skip
  try:
    line = process.stdout.readline()
    assert " at http://" in line, line
    yield line.split(" at ")[1].strip(), process
  finally:
    process.terminate()
    process.wait(30)


def _stats(url):
  with urllib.request.urlopen(f"{url}/buffer/stats", timeout=20) as answer:
    return json.load(answer)


def _episodes(directory):
  text = (directory / "trajectories.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def _write_desktop(tmp_path, family):
  buffer_peer.write_tasks(
    tmp_path,
    [
      {"instance_id": f"gui_{i}", "family": family, "index": i}
      for i in range(40)
    ],
  )


def _three_rounds(tmp_path, *overrides):
  """Two rounds, a restart, a third one; the episodes."""
  directory = tmp_path / "b"
  with _service(tmp_path / "buffer") as (url, _):
    assert small_runs.run_train(
        tmp_path, *COMMON, "name=b", f"buffer.url={url}", "steps=2",
        f"buffer.input_file={tmp_path / 'tasks.jsonl'}", *overrides,
    ) == 0  # fmt: skip
    assert train.main([f"resume={directory}", "steps=3"]) == 0
    stats = _stats(url)
  assert [x["step"] for x in small_runs.metrics_of(directory)] == [1, 2, 3]
  episodes = _episodes(directory)
  assert len(episodes) >= 24
  uids = [line["trajectory_id"] for line in episodes]
  assert len(set(uids)) == len(uids)
  return episodes, stats


@trials.in_full("the desktop's three rounds, and rollout_buffer's mathematics")
def test_mathematics(tmp_path):
  buffer_peer.write_sums(tmp_path, 60)
  episodes, _ = _three_rounds(
    tmp_path,
    "environment.name=gsm8k",
    "sampling.max_new_tokens=4",
    "buffer.num_epoch=1",
  )
  # Each instance once: the restarted run had the service skip those before.
  groups = [line["group_id"].partition("@")[0] for line in episodes]
  assert all(groups.count(name) == 4 for name in groups)


def test_the_desktop_with_screenshots_token_by_token(tmp_path):
  _write_desktop(tmp_path, "click-color")
  episodes, _ = _three_rounds(
    tmp_path,
    "buffer.task_type=desktop",
    "sampling.max_new_tokens=8",
    "buffer.options={max_turns: 1,"
    " agent_config: {parser: computer_use_compact}}",
    "buffer.num_epoch=1",
  )
  sequences = [s for line in episodes for s in line["sequences"]]
  assert all(s["images"] for s in sequences)
  # The run's own server returns what was sampled: nothing is rewritten.
  assert not any("text_only" in line["metrics"] for line in episodes)
  assert any(x < 0 for s in sequences for x in s["logprobs"])


def test_every_update_learns_from_its_own_weights_episodes(tmp_path):
  """The protocol's flags and the shipped policy, and no stale token."""
  _write_desktop(tmp_path, "open-icon")
  with _service(tmp_path / "buffer") as (url, _):
    assert small_runs.run_train(
        tmp_path, "name=b", "seed=1",
        "--agent-rollout-buffer-url", url, "--rollout-task-type", "desktop",
        "--prompt-data", str(tmp_path / "tasks.jsonl"), "--num-rollout", "3",
        "--rollout-batch-size", "2", "--n-samples-per-prompt", "4",
        "--num-epoch", "1", "buffer.poll_s=0.1", "buffer.options.agent=compact",
    ) == 0  # fmt: skip
    stats = _stats(url)["data"]["data"][0]
  lines = small_runs.metrics_of(tmp_path / "b")
  assert [line["step"] for line in lines] == [1, 2, 3]
  assert all(line["staleness_max"] == 0 for line in lines)
  assert not any(line["dropped_stale"] for line in lines)
  # Three steps' groups, and at most the next one's.
  assert 24 <= stats["total_written"] <= 32
  episodes = _episodes(tmp_path / "b")[:24]
  versions = [
    {v for s in line["sequences"] for v in s["versions"] if v >= 0}
    for line in episodes
  ]
  assert versions == [{i // 8} for i in range(24)]
  # Every sampled token of a group whose rewards differ is trained on.
  rewards = collections.defaultdict(set)
  for episode in episodes:
    rewards[episode["group_id"]].add(episode["reward"])
  for step, line in enumerate(lines):
    assert line["episodes"] == 8
    assert line["sampled_tokens"] == sum(
      sum(sum(s["loss_mask"]) for s in episode["sequences"])
      for episode in episodes[8 * step : 8 * step + 8]
      if len(rewards[episode["group_id"]]) > 1
    )
  assert any(line["sampled_tokens"] for line in lines)


def test_a_killed_service_goes_on_where_it_was(tmp_path):
  buffer_peer.write_sums(tmp_path, 60)
  with _service(tmp_path / "buffer") as (url, process):
    port = int(url.rpartition(":")[2])
    again = contextlib.ExitStack()

    def kill_and_restart():
      while not (tmp_path / "b" / "checkpoints" / "1").exists():
        if ended.wait(0.2):
          return
      os.kill(process.pid, signal.SIGKILL)
      process.wait(30)
      again.enter_context(_service(tmp_path / "buffer", port))

    ended = threading.Event()
    thread = threading.Thread(target=kill_and_restart)
    thread.start()
    with again:
      try:
        status = small_runs.run_train(
          tmp_path,
          *COMMON,
          "name=b",
          f"buffer.url={url}",
          "steps=4",
          f"buffer.input_file={tmp_path / 'tasks.jsonl'}",
          "environment.name=gsm8k",
          "sampling.max_new_tokens=4",
          "buffer.num_epoch=1",
        )
      finally:
        ended.set()
        thread.join()
  assert status == 0
  episodes = _episodes(tmp_path / "b")
  groups = [line["group_id"].partition("@")[0] for line in episodes]
  assert all(groups.count(name) == 4 for name in groups)
