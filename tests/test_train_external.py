"""A run whose engine is in another process, and gets its weights as files."""

import asyncio
import collections
import json
import signal
import subprocess
import sys
import threading
import time

import fake_engines
import pytest
import trials
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import external_engine

pytestmark = pytest.mark.timeout(400)
POLICY = str(checkpoint.resolve("tiny_vl"))
SMALL = (
  f"policy={POLICY}",
  "rollout.via=external",
  "tasks=[click-button, enter-text]",
  "collect.group_size=4",
  "collect.min_valid=2",
  "learner.groups_per_step=2",
  "learner.rows=2",
  "collect.concurrency=8",
  "eval.episodes_per_task=2",
  "eval.modes=[sampled]",
  "report.progress=none",
  # Also groups of equal rewards are learned from.
  "algorithm.entropy_coef=0.01",
  "learner.skip_zero_advantage=false",
)


def serving(protocol, context=512):
  """The server that the run's own command would start."""
  options = {"size": (128, 96), "slots": 8}
  if protocol == "sglang":
    return fake_engines.FakeSglang(POLICY, context, **options)
  launch = vllm.VllmLaunch(
    POLICY, max_model_len=context, images=9, dtype="float32"
  )
  return fake_engines.FakeVllm(launch.argv(), launch.environment(), **options)


# clients/test_external_engines.py hands weights over by each protocol.
@pytest.mark.parametrize(
  "protocol, steps",
  [("vllm", 2), ("sglang", 2)] if trials.share() == 1 else [("vllm", 2)],
)
@pytest.mark.slow
def test_each_update_is_sampled_with_by_the_other_process(
  tmp_path, protocol, steps
):
  with serving(protocol) as server:
    status = train.main([
        *SMALL, f"run.dir={tmp_path}", "name=e", f"steps={steps}",
        f"external.url={server.url}/v1", f"external.protocol={protocol}",
    ])  # fmt: skip
    assert status == 0
    # The start, before it was evaluated, then every update.
    versions = [path[-1] for path in server.loaded]
    assert versions == ["0", *map(str, range(steps + 1))]
    assert not server.engine.stats()["active"]
  directory = tmp_path / "e"
  lines = (directory / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  assert [m["step"] for m in metrics] == [*range(1, steps + 1)]
  for step in metrics:
    # What it sampled with are the learner's weights of that version: after an
    # update that was lost they would be others.
    assert step["logprob_gap_max"] < 1e-3
    assert step["fallback_turns"] == 0
    assert step["staleness_max"] == 0
  summary = json.loads((directory / "summary.json").read_text())
  assert summary["status"] == "completed" and not summary.get("faults")
  assert set(summary["eval"]) == {"warm_start", "final"}
  names = sorted(p.name[-9:] for p in (directory / "weights").glob("*/*"))
  assert names == [f"v{v:08d}" for v in (steps - 1, steps)]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_engine_loads_without_end(tmp_path):
  """Within seconds; all is saved, and the engine answers again."""
  with serving("vllm") as server:
    real, entered = server.load, threading.Event()

    async def load(path):
      if server.loaded and path[-1] != "0":
        entered.set()
        await asyncio.sleep(120)
      await real(path)

    server.load = load
    process = subprocess.Popen(
        [sys.executable, "-m", "tunix.rl.multi_turn.train", *SMALL,
         f"run.dir={tmp_path}", "name=e", "steps=3", "eval.on=false",
         f"external.url={server.url}/v1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
      assert entered.wait(200), "no update reached the server"
      started = time.monotonic()
      process.send_signal(signal.SIGINT)
      text, _ = process.communicate(timeout=60)
      seconds = time.monotonic() - started
    finally:
      process.kill()
      process.wait()
    assert server.gate.is_set() and server.calls[-1] == "resume"
  assert process.returncode == 130, text[-2000:]
  assert seconds < 15, text[-2000:]
  assert "was ended half-way" in text
  summary = json.loads((tmp_path / "e" / "summary.json").read_text())
  assert summary["status"] == "interrupted" and summary["step"] == 1
  assert (tmp_path / "e" / "policy").is_dir()


@pytest.mark.slow
def test_a_server_that_loads_nothing_ends_the_run(tmp_path, capsys):
  """At the first hand-over that changes weights, and names what to look at.

  clients/test_external_engines.py has it of each protocol.
  """
  with serving("vllm") as server:
    real = server.load

    async def load(path):
      await real(path)
      server.loads_nothing = True  # From the second load on.

    server.load = load
    status = train.main(
      [
        *SMALL,
        f"run.dir={tmp_path}",
        "name=e",
        "steps=3",
        "eval.on=false",
        f"external.url={server.url}/v1",
      ]
    )
    assert status == 1
    text = capsys.readouterr().err
    assert f"{server.url} (transfer=" in text and "version 1)" in text
    assert "in the engine and" in text and "second hand-over" in text
    # The start twice, as every run hands it over; the first update twice.
    assert [path[-1] for path in server.loaded] == ["0", "0", "1", "1"]
  lines = (tmp_path / "e" / "metrics.jsonl").read_text().splitlines()
  assert len(lines) <= 1  # Nothing was trained on what it sampled afterwards.


@pytest.mark.slow
def test_completions_that_cannot_be_are_model_errors_and_the_run_goes_on(
  tmp_path,
):
  with serving("vllm") as server:
    real, counts = server.sample, collections.Counter()
    banned = server.policy[0].config.banned_token_ids[0]

    async def sample(prompt, sampling):
      tokens, logprobs, reason = await real(prompt, sampling)
      if sampling.max_new_tokens <= 2 or sampling.temperature != 1:
        return tokens, logprobs, reason
      counts["all"] += 1
      fault = {5: "banned", 9: "none", 12: "id", 19: "low", 26: "high"}.get(
        counts["all"] % 30
      )
      if fault == "none":
        counts[fault] += 1
        logprobs = None
      elif fault:
        counts[fault] += 1
        tokens[0] = {"banned": banned, "id": 10**6}.get(fault, tokens[0])
        logprobs[0] = {"low": -200.0, "high": 3.0}.get(fault, logprobs[0])
      return tokens, logprobs, reason

    server.sample = sample
    status = train.main(
      [
        *SMALL,
        f"run.dir={tmp_path}",
        "name=e",
        "steps=3",
        "eval.on=false",
        f"external.url={server.url}/v1",
      ]
    )
    assert status == 0
  faults = ("banned", "id", "low", "high", "none")
  assert min(counts[name] for name in faults) >= 1
  directory = tmp_path / "e"
  summary = json.loads((directory / "summary.json").read_text())
  assert summary["status"] == "completed"
  lines = (directory / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  assert len(metrics) == 3
  assert max(m["logprob_gap_max"] for m in metrics) < 1e-3
  assert not any(m["fallback_turns"] for m in metrics)
  episodes = (directory / "trajectories.jsonl").read_text()
  assert f"{server.url}: the answer has no logprobs" in episodes


@pytest.mark.slow
def test_a_server_that_does_not_do_ends_the_run_at_once(tmp_path, capsys):
  with serving("vllm", context=256) as server:
    url = f"external.url={server.url}/v1"
    for name, change, words in (
      ("short", [], "256 tokens, the run's engine.context_length=512"),
      ("other", ["external.model=gpt-5"], "'gpt-5' is not served"),
    ):
      status = train.main(
        [*SMALL, f"run.dir={tmp_path}", f"name={name}", url, *change]
      )
      assert status == 1
      assert words in capsys.readouterr().err
  status = train.main([*SMALL, f"run.dir={tmp_path}", "name=gone", url])
  assert status == 1
  assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
  "change, words",
  [
    (["external.url="], "needs external.url"),
    (["policy=tiny_vl"], "policy.name=tiny_vl is not a directory"),
    (["rollout.via=in_process"], "set rollout.via=external"),
    (["engine.lockstep=true"], "rollout.via=external does not tell"),
    (["external.protocol=telepathy"], "external.protocol"),
    (["external.transfer=disk"], "external.transfer.*reload.*adapter"),
    (
      ["engine.weights=int8", "algorithm.importance=tis"],
      "of the engine in this process",
    ),
  ],
)
def test_what_cannot_be_together_is_refused(change, words):
  url = "external.url=http://127.0.0.1:1/v1"
  with pytest.raises(config_lib.ConfigError, match=words):
    config_lib.load_config([*SMALL, url, *change])


@pytest.mark.parametrize(
  "stored, change, want",
  [
    ({"dtype": "bfloat16"}, [], "bfloat16"),
    ({"text_config": {"torch_dtype": "float16"}}, [], "float16"),
    ({"dtype": "bfloat16"}, ["external.dtype=float32"], "float32"),
    ({}, [], "float32"),
  ],
)
def test_weights_are_written_in_the_type_that_the_server_is_started_with(
  tmp_path, stored, change, want
):
  (tmp_path / "config.json").write_text(json.dumps(stored))
  config = config_lib.load_config(
    [
      "rollout.via=external",
      f"policy.name={tmp_path}",
      *change,
      "external.url=http://127.0.0.1:1/v1",
    ]
  )
  assert external_engine.weights_dtype(config) == want
  if stored and not change:
    words = vllm.VllmLaunch(str(tmp_path), max_model_len=64).argv()
    assert words[words.index("--dtype") + 1] == want


def test_a_url_that_is_none_is_named(capsys, tmp_path):
  status = train.main(
    [*SMALL, f"run.dir={tmp_path}", "external.url=localhost:8000"]
  )
  assert status == 2
  stderr = capsys.readouterr().err
  assert "rollout.via=external" in stderr and "localhost:8000" in stderr
  assert not list(tmp_path.iterdir())
