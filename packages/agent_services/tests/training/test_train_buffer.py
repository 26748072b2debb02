"""A run fed by a rollout buffer: protocol peer, real engine, real learner."""

import json
import random
import threading
import time

import buffer_peer
import buffer_services
import pytest
import small_runs
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms

pytestmark = pytest.mark.timeout(400)

COMMON = (
  small_runs.NANO,
  "warm_start.source=none",
  "rollout.via=buffer",
  "environment.name=gsm8k",
  "buffer.poll_s=0.05",
  "checkpoint.every=1",
  "algorithm.importance=none",
  "queue.max_staleness=4",
  "sampling.max_new_tokens=4",
)


@pytest.fixture(autouse=True)
def _no_gym(monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError("a gym was made")

  monkeypatch.setattr(gyms.GymSpec, "make_gym", refuse)


@pytest.fixture(name="tasks")
def _tasks(tmp_path):
  return buffer_peer.write_sums(tmp_path, 40)


def _train(tmp_path, peer, tasks, *overrides):
  return small_runs.run_train(
    tmp_path,
    *COMMON,
    f"buffer.url={peer.url}",
    f"buffer.input_file={tasks}",
    "name=b",
    *overrides,
  )


def exact(payload, write, stop):
  """Token-exact items of the weights of version 0, made without a server."""
  chance = random.Random(0)
  for name, row in buffer_peer.tasks_of(payload):
    for n in range(int(payload["num_repeat_per_sample"])):
      if stop.is_set():
        return
      tokens = [chance.randrange(20, 60) for _ in range(8)]
      write(
        {
          "uid": f"{name}-{n}",
          "instance_id": name,
          "messages": buffer_peer.said(row, "?"),
          "reward": float(n % 2),
          "extra_info": {"timestamp": time.time(), "finish_reason": "stop"},
          "tokens": tokens,
          "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1],
          "logprobs": [None] * 4 + [-1.5] * 4,
          "versions": [None] * 4 + [0] * 4,
        }
      )


def _groups_of(directory):
  collected = []
  for line in (directory / "trajectories.jsonl").read_text().splitlines():
    line = json.loads(line)
    collected.append(line["group_id"].partition("@")[0])
  return collected


@pytest.mark.slow
def test_three_rounds_from_generators_that_ask_the_policy(tasks, tmp_path):
  with buffer_peer.BufferPeer({"math": buffer_peer.asking}) as peer:
    assert (
      _train(
        tmp_path, peer, tasks, "steps=3", "buffer.missing_logprobs=recompute"
      )
      == 0
    )
    (payload,) = peer.payloads
  assert payload["remote_engine_url"].endswith("/v1")
  assert payload["remote_buffer_url"] == peer.url
  assert payload["num_repeat_per_sample"] == "4"
  assert payload["trainer"]["learner"]["steps"] == 3
  lines = small_runs.metrics_of(tmp_path / "b")
  assert [line["step"] for line in lines] == [1, 2, 3]
  assert all(line["episodes"] == 8 for line in lines)
  # Text only: the learner's own log-probs stand in.
  assert all(line["ratio_max"] < 1.01 for line in lines if "ratio_max" in line)
  assert any(line["grad_norm"] > 0 for line in lines)


@pytest.mark.slow
def test_token_exact_items_are_gated_by_their_versions(tasks, tmp_path):
  with buffer_peer.BufferPeer({"math": exact}) as peer:
    assert (
      _train(tmp_path, peer, tasks, "steps=2", "queue.max_staleness=1") == 0
    )
    lines = small_runs.metrics_of(tmp_path / "b")
    assert [line["staleness_max"] for line in lines] == [0, 1]
    # The recorded log-probs count, and they are of other weights.
    assert all(line["ratio_min"] < 0.9 for line in lines)


def colder(payload, write, stop):
  """Of `exact`'s items, those of reward 0 were sampled at temperature 0.5."""

  def write_with_params(item):
    temperature = payload["sampling_params"]["temperature"]
    params = {"temperature": temperature if item["reward"] else 0.5}
    write({**item, "sampling_params": params})

  exact(payload, write_with_params, stop)


@pytest.mark.slow
def test_items_of_another_sampling_are_counted(tasks, tmp_path):
  with buffer_peer.BufferPeer({"math": colder}) as peer:
    assert _train(tmp_path, peer, tasks, "steps=1") == 0
  (line,) = small_runs.metrics_of(tmp_path / "b")
  assert line["episodes"] == 8
  assert line["untrained_tokens"] == 2.0  # Half of the episodes, 4 tokens each.


@pytest.mark.slow
def test_a_resumed_run_skips_what_it_was_trained_on(tasks, tmp_path):
  directory = tmp_path / "b"
  with buffer_peer.BufferPeer({"math": exact}) as peer:
    assert _train(tmp_path, peer, tasks, "steps=2", "buffer.num_epoch=1") == 0
    assert train.main([f"resume={directory}", "steps=4"]) == 0
    first, second = peer.payloads
  assert not first["skip_instance_ids"]
  skipped = second["skip_instance_ids"]
  # What was trained on, and what waited in the durable queue.
  assert len(skipped) >= 4 and len(set(skipped)) == len(skipped)
  names = _groups_of(directory)
  trained = {n for n in names if names.count(n)}
  assert all(names.count(n) == 4 for n in trained), "an instance came twice"


class LeasingPeer(buffer_peer.BufferPeer):
  """With leases, as this project's service has them; repeats what is late."""

  def __init__(self, *args, **kwargs):
    self.leases = {}
    self.acked = []
    self.repeats = self.unavailable = 0
    super().__init__(*args, **kwargs)

  def answer(self, path, body, authorization=""):
    if path == "/buffer/ack":
      if self.unavailable:
        self.unavailable -= 1
        return 503, {"detail": "restarts"}
      if body["lease"] not in self.leases:
        return 404, {"detail": "unknown"}
      self.acked.append(self.leases.pop(body["lease"]))
      return 200, {"success": True}
    status, answer = super().answer(path, body, authorization)
    if path == "/get_rollout_data":
      assert body["lease_s"] > 0
      if not answer["success"] and self.leases and self.repeats:
        self.repeats -= 1
        old = next(iter(self.leases))
        answer = self.leases.pop(old)
      if answer["success"]:
        lease = f"lease-{len(self.acked)}-{time.monotonic()}"
        self.leases[lease] = answer
        return 200, {**answer, "data": {**answer["data"], "lease": lease}}
    return status, answer


@pytest.mark.slow
def test_leases_end_with_the_checkpoint_and_repeats_are_recognised(
  tasks, tmp_path
):
  lines = tasks.read_text().splitlines()[:8]
  tasks.write_text("\n".join(lines) + "\n")
  with LeasingPeer({"math": exact}) as peer:
    peer.repeats = peer.unavailable = 3
    assert _train(
        tmp_path, peer, tasks, "steps=4", "buffer.num_epoch=1",
        "checkpoint.every=2",
    ) == 0  # fmt: skip
    acked = [
      item["uid"] for answer in peer.acked for item in answer["data"]["data"]
    ]
    assert not peer.leases
  # All eight groups: each trained on once and acknowledged once.
  assert len(set(acked)) == len(acked) == 32
  names = _groups_of(tmp_path / "b")
  assert len(names) == 32 and all(names.count(n) == 4 for n in names)


@pytest.mark.slow
def test_failed_calls_are_repeated_or_end_the_run(tasks, tmp_path, capsys):
  with buffer_peer.BufferPeer({"math": exact}) as peer:
    peer.failing = 3
    assert _train(tmp_path, peer, tasks, "steps=1") == 0
    assert not peer.failing
    peer.failing = 100
    assert (
      _train(tmp_path, peer, tasks, "steps=1", "name=c", "buffer.retries=2")
      == 1
    )
    assert peer.failing == 98
  assert "it fails as it was asked to" in capsys.readouterr().err


@pytest.mark.slow
def test_text_without_log_probs_is_refused_unless_it_is_chosen(
  tasks, tmp_path, capsys
):
  with buffer_peer.BufferPeer() as peer:
    assert _train(tmp_path, peer, tasks, "steps=1") == 1
  assert "buffer.missing_logprobs=recompute" in capsys.readouterr().err


def test_an_interrupt_ends_a_run_that_waits_for_the_service(tasks, tmp_path):
  blocked = threading.Event()

  def silent(payload, write, stop):
    del payload, write, stop
    blocked.set()

  with buffer_peer.BufferPeer({"math": silent}) as peer:
    run = small_runs.make_run(
      tmp_path,
      *COMMON,
      f"buffer.url={peer.url}",
      f"buffer.input_file={tasks}",
      "name=b",
      "steps=1",
    )

    def interrupt():
      blocked.wait(60)
      run.stop.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert train.run_to_end(run) in (0, 130)
    thread.join()


GENERATOR = """
import json
import urllib.request

TASK_TYPE = "few"


def run_rollout(data):
  for n in range(12):
    item = {
        "uid": str(n),
        "instance_id": f"g{n // 4}",
        "messages": [{"role": "user", "content": "?"},
                     {"role": "assistant", "content": "!"}],
        "reward": n % 2,
        "extra_info": {"timestamp": 1.0},
        "tokens": list(range(20, 28)),
        "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1],
        "logprobs": [None] * 4 + [-1.5] * 4,
        "versions": [None] * 4 + [0] * 4,
    }
    urllib.request.urlopen(urllib.request.Request(
        data["remote_buffer_url"] + "/buffer/write",
        json.dumps(item).encode(),
    ), timeout=20).close()
"""


@pytest.mark.slow
def test_a_run_ends_in_order_when_its_generator_is_over(tasks, tmp_path):
  (tmp_path / "few_generator.py").write_text(GENERATOR)
  with buffer_services.Running(
    tmp_path / "buffer", generators=[tmp_path]
  ) as service:
    assert (
      _train(tmp_path, service, tasks, "steps=5", "buffer.task_type=few") == 0
    )
  # Three groups make a step of two, and one of what is left.
  lines = small_runs.metrics_of(tmp_path / "b")
  assert [line["step"] for line in lines] == [1, 2]
