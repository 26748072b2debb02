"""The command with the rollout protocol's flags: each reaches the learner."""

import time

import buffer_peer
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.trajectory_collector import agent_rollout
from tunix.rl.multi_turn.trajectory_collector import loss_mask

pytestmark = pytest.mark.timeout(400)

MODULE = __name__
OWN = (
  "tunix.rl.multi_turn.trajectory_collector.agent_rollout"
  ".generate_agent_rollout"
)
REWARDS = (1.0, 0.25, 0.5, 0.0)


@pytest.fixture(name="tasks")
def _tasks(tmp_path):
  return buffer_peer.write_sums(tmp_path, 12)


@pytest.fixture(name="batches")
def _batches(monkeypatch):
  """Of each update: (groups, advantage of each member's first turn)."""
  batches = []
  update = learner_lib.Learner.update

  def seen(learner, groups, **more):
    result = update(learner, groups, **more)
    batches.append(
      [
        (
          group.group_id.partition("@")[0],
          [t.reward for t in group],
          [float(learner.advantages[t.trajectory_id][0]) for t in group],
          group,
        )
        for group in groups
      ]
    )
    return result

  monkeypatch.setattr(learner_lib.Learner, "update", seen)
  return batches


def text(payload, write, stop):
  """Text items without an engine, the last instances first."""
  for name, row in reversed(list(buffer_peer.tasks_of(payload))):
    for n in range(int(payload["num_repeat_per_sample"])):
      write(
        {
          "uid": f"{name}-{n}",
          "instance_id": name,
          "messages": buffer_peer.said(row, "ab" * (n + 1)),
          "reward": REWARDS[n],
          "extra_info": {"timestamp": time.time(), "finish_reason": "stop"},
        }
      )


def _train(tmp_path, peer, tasks, *flags):
  """A run of one layer whose settings are the protocol's flags."""
  return small_runs.run_train(
      tmp_path, small_runs.ONE_LAYER, "warm_start.source=none", "name=b",
      "buffer.poll_s=0.02", "checkpoint.every=1",
      "--agent-rollout-buffer-url", peer.url, "--prompt-data", str(tasks),
      "--loss-mask-type", "qwen", "--num-epoch", "1", *flags,
  )  # fmt: skip


# --- flags and settings -------------------------------------------------------

FLAGS = {
  "--agent-rollout-buffer-url": "http://127.0.0.1:1",
  "--prompt-data": "tasks.jsonl",
  "--rollout-function-path": OWN,
  "--loss-mask-type": "distill_qwen",
  "--num-rollout": "7",
  "--rollout-batch-size": "3",
  "--rollout-max-response-len": "9",
  "--rollout-temperature": "0.8",
  "--n-samples-per-prompt": "5",
  "--buffer-filter-path": f"{MODULE}.newest",
  "--fetch-trajectory-retry-times": "2",
}


def test_flags_and_a_file_of_them_are_the_same_settings(tmp_path):
  words = [word for pair in FLAGS.items() for word in pair]
  by_flags = config_lib.load_config(
    ["name=a", *words, "--disable-rewards-normalization"]
  )
  file = tmp_path / "flags.yaml"
  file.write_text(
    "".join(
      f"{name[2:].replace('-', '_')}: {value}\n"
      for name, value in FLAGS.items()
    )
    + "disable_rewards_normalization: true\n"
  )
  assert config_lib.load_config([str(file), "name=a"]) == by_flags
  c = by_flags
  assert (c.rollout.via, c.buffer.url) == ("buffer", "http://127.0.0.1:1")
  assert (c.buffer.input_file, c.buffer.function) == ("tasks.jsonl", OWN)
  assert c.buffer.loss_mask_type == "distill_qwen"
  assert c.buffer.missing_logprobs == "recompute"
  assert (c.learner.steps, c.learner.groups_per_step) == (7, 3)
  assert (c.sampling.max_new_tokens, c.sampling.temperature) == (9, 0.8)
  assert (c.collect.group_size, c.buffer.retries) == (5, 2)
  assert c.buffer.filter == f"{MODULE}.newest"
  assert c.buffer.normalized and c.algorithm.advantage == "reward"


@pytest.mark.parametrize(
  "flag, value, says",
  [
    ("--agent-rollout-buffer-url", "nowhere", "http://127.0.0.1:8889"),
    ("--prompt-data", "", "buffer.input_file"),
    ("--rollout-function-path", "slime.rollout.generate", OWN),
    ("--rollout-function-path", f"{MODULE}.REWARDS", "tuple, no function"),
    ("--loss-mask-type", "qwen9", "did you mean 'qwen'"),
    ("--num-rollout", "-1", ">= 0"),
    ("--num-rollout", "many", "a whole number"),
    ("--rollout-batch-size", "0", ">= 1"),
    ("--rollout-max-response-len", "0", ">= 1"),
    ("--rollout-temperature", "-0.5", ">= 0"),
    ("--n-samples-per-prompt", "0", ">= 1"),
    ("--buffer-filter-path", f"{MODULE}.missing", "has no 'missing'"),
    ("--fetch-trajectory-retry-times", "0", "give -1 or >= 1"),
    ("--disable-rewards-normalization=perhaps", None, "true or false"),
  ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag(
  flag, value, says, capsys
):
  words = {**FLAGS, **({} if value is None else {flag: value})}
  argv = [word for pair in words.items() for word in pair]
  if value is None:
    argv.append(flag)
  assert train.main(argv) == 2
  (line,) = capsys.readouterr().err.splitlines()
  if value != "":
    assert flag.partition("=")[0] in line
  assert says in line


def test_a_flag_without_its_value_is_named(capsys):
  assert train.main(["--num-rollout", "--prompt-data", "t.jsonl"]) == 2
  assert "--num-rollout needs a value" in capsys.readouterr().err


# --- what the learner takes ---------------------------------------------------


@pytest.mark.slow
def test_the_flags_are_the_learners_batch(tasks, tmp_path, batches):
  with buffer_peer.BufferPeer({"math": text}) as peer:
    assert _train(
        tmp_path, peer, tasks, "--num-rollout", "2", "--rollout-batch-size",
        "3", "--n-samples-per-prompt", "3", "--rollout-max-response-len", "5",
        "--rollout-temperature", "0.8",
    ) == 0  # fmt: skip
    (payload,) = peer.payloads
  assert payload["sampling_params"]["max_tokens"] == 5
  assert payload["sampling_params"]["temperature"] == 0.8
  assert payload["group_rules"] == "raw"
  assert len(batches) == 2
  for batch in batches:
    names = [int(name.removeprefix("math_")) for name, *_ in batch]
    # The service gives the last instances first.
    assert names == sorted(names) and len(names) == 3
    for _, rewards, advantages, group in batch:
      assert rewards == list(REWARDS[:3])
      assert sum(advantages) == pytest.approx(0, abs=1e-6)
      assert advantages[0] > 0 > min(advantages)
      for member, count in zip(group, (1, 2, 3)):
        (sequence,) = member.sequences
        assert sequence.num_sampled > count  # The reply and its end token.
  extras = [
    checkpoint_lib.LearnerCheckpoints(
      tmp_path / "b" / "checkpoints", read_only=True
    ).extras(step)
    for step in (1, 2)
  ]
  assert [e["rollout_id"] for e in extras] == [0, 1]


@pytest.mark.slow
def test_rewards_of_a_service_that_normalises_are_untouched(
  tasks, tmp_path, batches
):
  with buffer_peer.BufferPeer({"math": text}, normalise=True) as peer:
    assert _train(
        tmp_path, peer, tasks, "--num-rollout", "1",
        "--disable-rewards-normalization",
    ) == 0  # fmt: skip
    assert peer.payloads[0]["group_rules"] == "normalized"
  mean = sum(REWARDS) / 4
  spread = (sum((r - mean) ** 2 for r in REWARDS) / 4) ** 0.5
  normalised = [(r - mean) / spread for r in REWARDS]
  for _, rewards, advantages, group in batches[0]:
    assert rewards == pytest.approx(normalised)
    assert advantages == pytest.approx(normalised)
    assert [t.metrics["raw_reward"] for t in group] == list(REWARDS)


class Shouted(loss_mask.MultiTurnLossMaskGenerator):
  """A task's own format, by the document's recipe."""

  def get_shouted_loss_mask(self, messages):
    text = messages[-1]["content"].upper()
    ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [7, *ids], [0] + [1] * len(ids)

  def get_loss_mask(self, messages):
    if self.tokenizer_type == "shouted":
      return self.get_shouted_loss_mask(messages)
    return super().get_loss_mask(messages)


# --- functions by path --------------------------------------------------------


def newest(args, rollout_id, buffer, num_groups):
  """A filter: the groups that were added last."""
  del args, rollout_id
  chosen = buffer[-num_groups:]
  del buffer[-num_groups:]
  return chosen


@pytest.mark.slow
def test_a_filter_and_a_loss_mask_type_by_their_names(tasks, tmp_path, batches):
  def at_once(payload, write, stop):
    items = []
    text(payload, items.append, stop)
    for item in items:
      write(item)

  loss_mask.LOSS_MASK_TYPES.register("shouted", Shouted, replace=True)
  try:
    with buffer_peer.BufferPeer({"math": at_once}) as peer:
      assert _train(
          tmp_path, peer, tasks, "--num-rollout", "1", "--loss-mask-type",
          "shouted", "--buffer-filter-path", f"{MODULE}.newest",
      ) == 0  # fmt: skip
  finally:
    loss_mask.LOSS_MASK_TYPES.unregister("shouted")
  # Of the twelve groups, newest first, the last two: the oldest ones.
  assert [name for name, *_ in batches[0]] == ["math_10", "math_11"]
  for _, _, _, group in batches[0]:
    for member in group:
      (sequence,) = member.sequences
      assert sequence.tokens[0] == 7
      assert sequence.loss_mask.tolist() == [False] + [True] * (
        len(sequence.tokens) - 1
      )


CALLS = []


def own(args, rollout_id, data_buffer):
  """A rollout function without a service."""
  CALLS.append((rollout_id, dict(data_buffer.metadata)))
  data_buffer.update_metadata({str(rollout_id): [f"own_{rollout_id}"]})
  return [
    agent_rollout.Sample(
      f"own_{rollout_id}_{group}",
      f"{rollout_id}-{group}-{n}",
      [20, 21, 30 + n, 31],
      2,
      float(n == 0),
      [1, 1],
    )
    for group in range(args.rollout_batch_size)
    for n in range(args.n_samples_per_prompt)
  ]


async def awaited(args, rollout_id, data_buffer):
  return own(args, rollout_id, data_buffer)


def too_few(args, rollout_id, data_buffer):
  return own(args, rollout_id, data_buffer)[:3]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_next_rollout(tasks, tmp_path, batches):
  CALLS.clear()
  with buffer_peer.BufferPeer() as peer:
    assert _train(
        tmp_path, peer, tasks, "--num-rollout", "2", "--rollout-function-path",
        f"{MODULE}.own",
    ) == 0  # fmt: skip
    assert train.main([
        f"resume={tmp_path / 'b'}", "--num-rollout", "3",
        "--rollout-function-path", f"{MODULE}.awaited",
    ]) == 0  # fmt: skip
  assert [number for number, _ in CALLS] == [0, 1, 2]
  assert CALLS[2][1] == {"0": ["own_0"], "1": ["own_1"]}
  names = [n for batch in batches for n, *_ in batch]
  assert names == [f"own_{i}_{j}" for i in range(3) for j in range(2)]
  assert not peer.payloads  # It is the function that would start the service.


@pytest.mark.slow
def test_a_rollout_of_another_size_ends_the_run(tasks, tmp_path, capsys):
  with buffer_peer.BufferPeer() as peer:
    assert _train(
        tmp_path, peer, tasks, "--num-rollout", "1", "--rollout-function-path",
        f"{MODULE}.too_few",
    ) == 1  # fmt: skip
  assert "returned 1 groups for rollout 0" in capsys.readouterr().err
