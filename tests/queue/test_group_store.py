"""What a group store keeps is enough to train on, or is not given back."""

import asyncio
import sqlite3
import threading

import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

PAD = 9


def picture(value):
  return np.full((8, 8, 3), value, np.uint8)


def group(name, *refs):
  """A group whose one member has seen these images."""
  tokens = [5, *[PAD] * len(refs), 6]
  mask = np.arange(len(tokens)) == len(tokens) - 1
  sequence = trajectory_lib.TokenSequence(
    tokens=tokens,
    loss_mask=mask,
    logprobs=np.where(mask, -0.5, 0.0),
    versions=np.where(mask, 0, -1),
    turn_ids=np.zeros(len(tokens), np.int32),
    images=[
      trajectory_lib.ImageSpan(ref, 1 + i, 1) for i, ref in enumerate(refs)
    ],
  )
  member = trajectory_lib.Trajectory(
    status=trajectory_lib.TrajectoryStatus.SUCCEEDED, sequences=[sequence]
  )
  return trajectory_lib.TrajectoryGroup(name, "t", (member,))


class Parts:
  """A queue with its store and images, as a process has them."""

  def __init__(self, path, **kwargs):
    self.images = images_lib.ImageStore(path / "images")
    self.store = group_store.SqliteGroupStore(
      path / "queue.sqlite", images=self.images
    )
    self.queue = group_queue.GroupQueue(
      1, group_queue.QueueConfig(max_staleness=4), store=self.store, **kwargs
    )


def test_the_images_of_an_accepted_group_survive_the_process(tmp_path):
  before = Parts(tmp_path)
  refs = [before.images.put(picture(i)) for i in range(3)]
  before.queue.put(group("a", *refs), before.queue.acquire_start())
  after = Parts(tmp_path)  # The first one never closed anything.
  restored = after.queue.get(timeout=0)
  spans = restored.valid[0].sequences[0].images
  for i, span in enumerate(spans):
    np.testing.assert_array_equal(after.images.get(span.image), picture(i))
  assert len(spans) == 3 and after.queue.counters()["lost"] == 0


def test_images_are_not_packed_on_the_event_loop(tmp_path):
  readers = []

  class Images(images_lib.ImageStore):
    def get(self, ref):
      readers.append(threading.current_thread())
      return super().get(ref)

  store = Images()
  queue = group_queue.GroupQueue(
    1, store=group_store.SqliteGroupStore(tmp_path / "q.sqlite", images=store)
  )
  ref = store.put(picture(1))
  asyncio.run(queue.push(group("a", ref)))
  assert len(readers) == 1 and readers[0] is not threading.current_thread()


@pytest.mark.parametrize(
  "change",
  [
    "DELETE FROM images WHERE sha256 = ?",
    "UPDATE images SET pixels = x'00' WHERE sha256 = ?",
    "UPDATE images SET pixels = (SELECT pixels FROM images WHERE sha256 !="
    " ?1) WHERE sha256 = ?1",
  ],
)
def test_a_group_without_its_images_is_lost_and_its_task_can_run_again(
  change, tmp_path, caplog
):
  before = Parts(tmp_path)
  refs = [before.images.put(picture(i)) for i in range(2)]
  for name, ref in zip("ab", refs):
    before.queue.put(group(name, ref), before.queue.acquire_start())
  with sqlite3.connect(tmp_path / "queue.sqlite") as db:
    db.execute(change, (refs[0].sha256,))
  after = Parts(tmp_path)
  counters = after.queue.counters()
  assert (counters["restored"], counters["lost"]) == (1, 1)
  assert "group a (index 0)" in caplog.text
  assert after.queue.known() == {1}
  ticket = after.queue.acquire_start(timeout=0, index=0)
  after.queue.put(group("again", after.images.put(picture(0))), ticket)
  assert [g.group_id for g in Parts(tmp_path).queue.get_batch(2, 0)] == [
    "again",
    "b",
  ]


def test_one_row_that_cannot_be_read_costs_one_group(tmp_path):
  before = Parts(tmp_path)
  for name in "abcd":
    before.queue.put(group(name), before.queue.acquire_start())
  database = sqlite3.connect(tmp_path / "queue.sqlite")
  with database:
    for index, payload in enumerate(['{"$type": "x"}', "{", None]):
      database.execute(
        "UPDATE groups SET payload = ? WHERE idx = ?", (payload, index)
      )
  database.close()
  after = Parts(tmp_path)
  assert after.queue.get(timeout=0).group_id == "d"
  assert after.queue.counters()["lost"] == 3
  assert Parts(tmp_path).queue.counters()["lost"] == 0


def test_only_what_is_named_is_acknowledged(tmp_path):
  before = Parts(tmp_path)
  for name in "abc":
    before.queue.put(group(name), before.queue.acquire_start())
  assert before.queue.unacked() == []
  before.queue.get_batch(2)
  assert before.queue.unacked() == [0, 1]
  before.queue.ack([1, 2])  # 2 was not delivered.
  assert before.queue.unacked() == [0]
  assert before.queue.counters()["acked"] == 1
  after = Parts(tmp_path)
  assert [g.group_id for g in after.queue.get_batch(2, 0)] == ["a", "c"]


def test_new_groups_of_a_resumed_run_get_new_indices():
  queue = group_queue.GroupQueue(1, group_queue.QueueConfig(max_staleness=3))
  queue.expect([2], next_index=5)
  assert queue.acquire_start(timeout=0).index == 5
  queue.expect([7])
  assert queue.acquire_start(timeout=0).index == 8


def test_a_stored_group_with_an_unusable_reward_is_run_again(tmp_path):
  """Of a run that accepted it before rewards were bounded."""
  before = Parts(tmp_path)
  for name in "ab":
    before.queue.put(group(name), before.queue.acquire_start())
  with sqlite3.connect(tmp_path / "queue.sqlite") as db:
    db.execute(
      "UPDATE groups SET payload = replace("  # Without its digest.
      "substr(payload, instr(payload, '{')), '\"reward\":0.0',"
      " '\"reward\":1e308') WHERE idx = 0"
    )
  after = Parts(tmp_path)
  assert after.queue.counters()["lost"] == 1
  assert after.queue.known() == {1}
  assert after.queue.get(timeout=0).group_id == "b"


def test_images_are_on_the_disk_as_long_as_a_group_needs_them(tmp_path):
  parts = Parts(tmp_path)
  shared, mine, other = (parts.images.put(picture(i)) for i in range(3))
  parts.store.append(0, group("a", shared, mine, mine))
  parts.store.append(1, group("b", shared, other))

  def kept():
    with sqlite3.connect(tmp_path / "queue.sqlite") as db:
      return {row[0] for row in db.execute("SELECT sha256 FROM images")}

  assert kept() == {r.sha256 for r in (shared, mine, other)}
  parts.store.remove([0])
  assert kept() == {r.sha256 for r in (shared, other)}
  parts.store.remove([0])  # Again: nothing of b's is let go.
  assert kept() == {r.sha256 for r in (shared, other)}
  # A later group with an image that was let go has it written again.
  parts.store.append(2, group("c", mine))
  assert mine.sha256 in kept()
  parts.store.remove([1, 2])
  assert not kept()
  # Whichever of two that share an image ends first.
  for index in (3, 4):
    parts.store.append(index, group("d", shared))
  parts.store.remove([4])
  assert kept() == {shared.sha256}
  parts.store.remove([3])
  assert not kept()


def test_a_group_that_cannot_be_stored_leaves_nothing(tmp_path):
  parts = Parts(tmp_path)
  gone = images_lib.ImageStore().put(picture(2))
  ref = parts.images.put(picture(1))
  with pytest.raises(KeyError):
    parts.store.append(0, group("a", ref, gone))
  assert parts.store.known() == set()
  parts.store.append(0, group("a", ref))
  with pytest.raises(ValueError, match="accepted before"):
    parts.store.append(0, group("again", ref))
  (restored,) = Parts(tmp_path).store.load()
  assert restored[1].group_id == "a"


def test_images_of_a_run_that_kept_them_in_files_are_found(tmp_path):
  before = Parts(tmp_path)
  ref = before.images.put(picture(3))
  before.store.append(0, group("a", ref))
  with sqlite3.connect(tmp_path / "queue.sqlite") as db:
    db.execute("DELETE FROM images")
  (tmp_path / "images").mkdir()
  Image.fromarray(picture(3)).save(tmp_path / "images" / f"{ref.sha256}.png")
  assert Parts(tmp_path).queue.counters()["restored"] == 1


def test_a_group_is_synchronised_before_it_is_accepted(tmp_path):
  """As SQLite promises it for these two settings, through a power loss."""
  parts = Parts(tmp_path)
  db = parts.store._db  # pylint: disable=protected-access
  assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
  assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_group_with_a_flipped_digit_is_lost_and_not_trained_on(tmp_path):
  before = Parts(tmp_path)
  for name in "abc":
    before.queue.put(group(name), before.queue.acquire_start())
  before.store.close()
  db = sqlite3.connect(tmp_path / "queue.sqlite")
  (text,) = db.execute("SELECT payload FROM groups WHERE idx = 0").fetchone()
  assert "-0.5" in text  # A log-prob.
  flip = text.replace("-0.5", "-0.4")
  db.execute("UPDATE groups SET payload = ? WHERE idx = 0", (flip,))
  # As files without digests have it.
  (text,) = db.execute("SELECT payload FROM groups WHERE idx = 1").fetchone()
  plain = text.partition(" ")[2]
  db.execute("UPDATE groups SET payload = ? WHERE idx = 1", (plain,))
  db.commit()
  db.close()
  counters = Parts(tmp_path).queue.counters()
  assert (counters["restored"], counters["lost"]) == (2, 1)
