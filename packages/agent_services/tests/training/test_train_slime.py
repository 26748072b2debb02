"""slime's own client, unmodified, as the rollout function of a run.

Skipped without a checkout of slime at $TUNIX_SLIME. Its client needs aiohttp
beside this project's test packages.
"""

import json
import os
import pathlib
import subprocess
import sys

import buffer_services
import pytest
import small_runs

SLIME = os.environ.get("TUNIX_SLIME", "")
FUNCTION = (
  "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"
)

pytestmark = [
  pytest.mark.peer("slime"),
  pytest.mark.slow,
  pytest.mark.timeout(900),
  pytest.mark.skipif(
    not SLIME, reason="set TUNIX_SLIME to a checkout of slime"
  ),
]

GENERATOR = """
import json
import time
import urllib.request

TASK_TYPE = "letters"


def post(url, body):
  request = urllib.request.Request(
      url, json.dumps(body).encode(), {"content-type": "application/json"}
  )
  with urllib.request.urlopen(request, timeout=120) as answer:
    return json.load(answer)


def run_rollout(data):
  with open(data["input_file"], encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
  # The client drops what it reads beyond a rollout: later ones need more.
  for number in range(int(data["num_epoch"]) * len(rows)):
    row = rows[number % len(rows)]
    name = f"{row['instance_id']}.{number}"
    time.sleep(0.2)
    for n in range(int(data["num_repeat_per_sample"])):
      answer = post(
          data["remote_engine_url"] + "/v1/chat/completions",
          {"model": "custom", "messages": row["prompt"], "seed": n + 1,
           **data["sampling_params"]},
      )
      choice = answer["choices"][0]
      text = choice["message"]["content"] or ""
      post(data["remote_buffer_url"] + "/buffer/write", {
          "uid": f"{name}-{n}",
          "instance_id": name,
          "messages": [*row["prompt"], {"role": "assistant", "content": text}],
          "reward": sum(c.islower() for c in text) / max(1, len(text)),
          "extra_info": {"timestamp": 1.0,
                         "finish_reason": choice["finish_reason"]},
      })
"""


def test_its_client_feeds_a_run(tmp_path):
  folder = tmp_path / "generators"
  folder.mkdir()
  (folder / "letters_generator.py").write_text(GENERATOR)
  tasks = tmp_path / "tasks.jsonl"
  tasks.write_text(
    "".join(
      json.dumps(
        {
          "instance_id": f"letters_{i}",
          "prompt": [{"role": "user", "content": f"{i}?"}],
        }
      )
      + "\n"
      for i in range(12)
    )
  )
  # slime imports torch, which processes of other tests do without.
  inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  paths = [SLIME, *(p for p in inherited if not p.endswith("children"))]
  with buffer_services.Running(
    tmp_path / "buffer", generators=[folder]
  ) as service:
    # A process of its own: slime's modules stay out of this one.
    process = subprocess.run(
        [
            sys.executable, "-m", "tunix.rl.multi_turn.train",
            f"run.dir={tmp_path}", "name=s", *small_runs.SMALL,
            small_runs.ONE_LAYER, "warm_start.source=none",
            "--rollout-function-path", FUNCTION,
            "--agent-rollout-buffer-url", service.url,
            "--prompt-data", str(tasks), "--loss-mask-type", "qwen",
            "--num-rollout", "2", "--rollout-batch-size", "2",
            "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8",
            "--rollout-temperature", "0.8", "--rollout-task-type", "letters",
            "--num-epoch", "100", "--fetch-trajectory-retry-times", "3",
            "--disable-rewards-normalization",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
  assert process.returncode == 0, process.stderr[-2000:]
  lines = small_runs.metrics_of(pathlib.Path(tmp_path) / "s")
  assert [line["step"] for line in lines] == [1, 2]
  assert all(line["episodes"] == 8 for line in lines)
  assert any(line["grad_norm"] > 0 for line in lines)
