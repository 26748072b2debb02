"""Groups that failed borrow a success, for a while, and across a crash."""

import dataclasses

import numpy as np
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.batches import replay
from tunix.rl.queue import group_store


def group(case, rewards, name, task="task", version=0):
  fresh = case.group(rewards, name, version=version)
  return dataclasses.replace(fresh, task_id=task)


def test_a_failed_group_borrows_its_tasks_newest_success(case):
  successes = replay.SuccessReplay(2)
  first = group(case, [1.0, 0.0], "a", version=0)
  second = group(case, [0.0, 1.0], "b", version=1)
  assert successes.lend([first], 0) == ([first], frozenset())
  assert successes.lend([second], 1) == ([second], frozenset())
  failed = group(case, [0.0, 0.0], "c", version=2)
  other = group(case, [0.0, 0.0], "d", task="another", version=2)
  (lent, alone), names = successes.lend([failed, other], 2)
  assert alone is other
  (name,) = names
  assert len(lent) == 3 and lent.trajectories[:2] == failed.trajectories
  last = lent.trajectories[2]
  assert last.trajectory_id == name
  want = second.trajectories[1]
  assert last.sequences == want.sequences and last.reward == want.reward
  # Too old by now.
  assert successes.lend([failed], 4) == ([failed], frozenset())
  assert len(successes) == 0


def test_a_success_of_the_same_update_is_not_lent(case):
  """Its groups are compared as they came; the next update may borrow."""
  successes = replay.SuccessReplay(1)
  won, lost = group(case, [1.0], "a"), group(case, [0.0], "b")
  assert successes.lend([lost, won], 0)[1] == frozenset()
  assert len(successes.lend([lost], 1)[1]) == 1


def test_what_is_kept_is_bounded(case, monkeypatch):
  monkeypatch.setattr(replay, "MOST", 3)
  successes = replay.SuccessReplay(99)
  for i in range(5):
    successes.lend([group(case, [1.0, 1.0], f"g{i}", task=f"t{i}")], 0)
  assert len(successes) == 3
  borrows = lambda task: successes.lend(
    [group(case, [0.0], "x", task=task)], 0
  )[1]
  assert not borrows("t0") and not borrows("t1") and borrows("t4")


def test_successes_survive_a_crash_with_their_images(case, tmp_path):
  store = group_store.SqliteGroupStore(tmp_path / "r.db", images=case.store)
  successes = replay.SuccessReplay(3, store)
  successes.lend([group(case, [1.0, 0.0], "a")], 0)
  successes.lend([group(case, [0.0, 1.0], "b", version=2)], 2)
  store.close()  # Nothing else is written at an end.
  again = type(case)(programs=case.programs)
  store = group_store.SqliteGroupStore(tmp_path / "r.db", images=again.store)
  successes = replay.SuccessReplay(3, store)
  assert len(successes) == 2
  # Restored to version 1: the success of version 2 is yet to come.
  (lent,), names = successes.lend([group(again, [0.0], "c")], 1)
  assert len(names) == 1 and lent.oldest_version == 0
  for sequence in lent.trajectories[-1].sequences:
    for span in sequence.images:
      assert again.store.get(span.image).shape == (32, 32, 3)
  (lent,), _ = successes.lend([group(again, [0.0], "d")], 2)
  assert lent.trajectories[-1].versions == (2, 2)
  store.close()


def test_an_update_learns_from_it_and_reports_the_groups_own(case):
  learner = case.learner()
  successes = replay.SuccessReplay(1)
  successes.lend([group(case, [1.0], "a")], 0)
  failed = group(case, [0.0, 0.0], "b")
  assert learner.update([failed])["optimizer_steps"] == 0
  lent, borrowed = successes.lend([failed], 1)
  metrics = learner.update(lent, borrowed=borrowed)
  assert metrics["optimizer_steps"] == 1
  assert metrics["success_rate"] == metrics["reward_mean"] == 0
  assert metrics["episodes"] == metrics["valid_episodes"] == 2
  own = {m.trajectory_id for m in failed}
  assert set(learner.advantages) == set(learner.left_out) == own
  values = [learner.advantages[name] for name in own]
  assert all(np.all(v < 0) for v in values)


@pytest.mark.parametrize(
  "settings, message",
  [
    (["learner.success_replay=2"], "max_staleness=0"),
    (
      ["learner.success_replay=1", "algorithm=ppo", "queue.max_staleness=1"],
      "compares none",
    ),
  ],
)
def test_what_cannot_be_corrected_is_refused(settings, message):
  with pytest.raises(config_lib.ConfigError, match=message):
    config_lib.load_config(["name=x", *settings])
  config_lib.load_config(
    ["name=x", "learner.success_replay=2", "algorithm.importance=tis"]
  )


def test_tokens_that_an_oracle_wrote_get_the_learners_log_probs(case):
  learner = case.learner(learning_rate=1e-2)
  (won,) = group(case, [1.0], "a").trajectories
  mixed = [
    dataclasses.replace(
      s, logprobs=np.where(s.loss_mask & (np.arange(len(s)) % 2 == 0), -0.5, 0)
    )
    for s in won.sequences
  ]
  expert = dataclasses.replace(
    won, sequences=mixed, trajectory_id=f"b.{trajectory.EXPERT}"
  )
  plain = group(case, [0.0], "c")
  failed = dataclasses.replace(group(case, [0.0, 0.0], "b"), extra=expert)
  before = learner.sequence_logprobs(expert.sequences)
  joined, names = replay.with_experts(
    [plain, failed], learner.sequence_logprobs
  )
  assert joined[0] is plain and names == {expert.trajectory_id}
  assert joined[1].extra is None and len(joined[1]) == 3
  for own, scored, want in zip(
    mixed, joined[1].trajectories[-1].sequences, before
  ):
    kept = own.loss_mask & (own.logprobs != 0)
    assert kept.any() and (own.loss_mask & ~kept).any()
    assert np.array_equal(scored.logprobs[kept], own.logprobs[kept])
    assert np.allclose(scored.logprobs[~kept], want[~kept])
  metrics = learner.update(joined, borrowed=names)
  assert metrics["success_rate"] == 0 and metrics["episodes"] == 3
  after = learner.sequence_logprobs(expert.sequences)
  assert sum(map(np.sum, after)) > sum(map(np.sum, before))
