"""State of a run's processes, dealt to another number of processes."""

import itertools
import sqlite3

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import queue_groups
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import token_sequence
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.multiprocess import process_layout
from tunix.rl.multi_turn.trajectory_collector import collect_loop
from tunix.rl.multi_turn.trajectory_collector import groups as groups_lib
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

SYNCHRONOUS = config_lib.load_config([])


class Numbers:
  """A source whose tasks are their own numbers in the run."""

  def train_task(self, family, index, seed):
    del family, seed
    return index


class Process(peers_lib.Peers):
  def __init__(self, index, count):
    self.index, self.count = index, count


def sampler(process):
  """The run's own, as `Training` makes it."""
  tasks = run_tasks.TrainTasks(Numbers(), ["f"], seed=0)
  return tasks if process.count == 1 else run_tasks.DealtTasks(tasks, process)


def loop_of(process, store):
  return collect_loop.CollectLoop(
    groups_lib.GroupCollector(lambda task: None, lambda *_: None),
    sampler(process),
    group_queue.GroupQueue(1, store=store),
    number=process.number,
  )


def write(directory, old, fates):
  """A run of `old` processes as a checkpoint and a kill would leave it.

  Args:
    fates: For each process and each of its groups 0, 1, …: "done" before the
      checkpoint, "consumed" by it and not acknowledged, "stored", "running",
      or "late": stored after the checkpoint was made.

  Returns:
    The checkpoint's extras, each process's.
  """
  parts = []
  for i in range(old):
    process = Process(i, old)
    begun = list(itertools.takewhile(lambda f: f != "late", fates[i]))
    tasks = sampler(process)
    for _ in begun:
      next(tasks)
    folder = process_layout.directory_of(directory, i)
    folder.mkdir(parents=True, exist_ok=True)
    store = group_store.SqliteGroupStore(folder / "queue.db")
    for k, fate in enumerate(fates[i]):
      if fate != "running":
        name = f"train-{process.number(k):06d}"
        store.append(k, queue_groups.group(name))
    store.remove(k for k, fate in enumerate(fates[i]) if fate == "done")
    store.close()
    named = {
      fate: [k for k, f in enumerate(begun) if f == fate]
      for fate in ("done", "consumed", "stored", "running")
    }
    parts.append(
      {
        "collect": {
          "sampler": tasks.state_dict(),
          "next_index": len(begun),
          "unfinished": [
            {"index": k, "task": process.number(k)} for k in named["running"]
          ],
        },
        "counts": {
          "settled": {"groups": {"accepted": len(named["done"]) + i}},
          "accepted": {
            f"train-{process.number(k):06d}": {"groups": {"accepted": 1}}
            for k in named["stored"]
          },
        },
        loop_lib.CONSUMED: named["consumed"],
      }
    )
  return parts


_FATES = st.lists(
  st.sampled_from(["done", "consumed", "stored", "running"]), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(_FATES, st.integers(0, 2)).map(lambda t: t[0] + ["late"] * t[1]),
    min_size=1,
    max_size=4,
  ),
  st.integers(1, 4),
)
def test_each_number_is_trained_on_waits_or_runs_once(
  tmp_path_factory, fates, new
):
  directory, old = tmp_path_factory.mktemp("run"), len(fates)
  extras = {loop_lib.PROCESSES: write(directory, old, fates)}
  layout = process_layout.adopt(directory, new)
  assert process_layout.read(directory) == layout
  assert layout.processes == new
  fate_of = {
    k * old + i: fate
    for i, of_process in enumerate(fates)
    for k, fate in enumerate(of_process)
  }
  run_again, waiting, settled = [], [], 0
  for i in range(new):
    process = Process(i, new)
    own = process_layout.own_extras(extras, process, SYNCHRONOUS)
    store = group_store.SqliteGroupStore(
      process_layout.directory_of(directory, i) / layout.queue
    )
    store.remove(own[loop_lib.CONSUMED])
    stored = store.load()
    waiting += [process.number(k) for k, _ in stored]
    assert [g.group_id for _, g in stored] == [
      f"train-{process.number(k):06d}" for k, _ in stored
    ]
    loop = loop_of(process, store)
    loop.load_state_dict(own["collect"])
    state = loop.state_dict()
    # The next tasks are those of the numbers that the loop gives them.
    for item in state["unfinished"]:
      assert item["task"] == process.number(item["index"])
    run_again += [item["task"] for item in state["unfinished"]]
    tasks = sampler(process)
    tasks.load_state_dict(state["sampler"])
    assert next(tasks) == process.number(state["next_index"])
    ends = process.number(state["next_index"])
    run_again += range(ends, 40, new)
    accepted = own["counts"].get("accepted", {})
    if old != new:
      assert {int(g.rpartition("-")[2]) % new for g in accepted} <= {i}
    settled += sum(own["counts"]["settled"].get("groups", {}).values())
    store.close()
  trained = {n for n, f in fate_of.items() if f in ("done", "consumed")}
  assert sorted(waiting) == sorted(
    n for n, f in fate_of.items() if f in ("stored", "late")
  )
  # Every other number runs, once.
  assert sorted(run_again) == sorted(set(range(40)) - trained - set(waiting))
  assert settled == sum(f.count("done") + i for i, f in enumerate(fates))


def test_screenshots_move_with_their_groups(tmp_path):
  images = images_lib.ImageStore()
  refs = [images.put(np.full((4, 4, 3), i, np.uint8)) for i in range(3)]

  def seen(name, *those):
    (member,) = queue_groups.group(name).trajectories
    sequence = trajectory_lib.TokenSequence(
      tokens=[9] * len(those) + [5, 6],
      loss_mask=[False] * (len(those) + 1) + [True],
      logprobs=[0.0] * (len(those) + 1) + [-0.5],
      versions=[-1] * (len(those) + 1) + [0],
      turn_ids=[0] * (len(those) + 2),
      images=[
        token_sequence.ImageSpan(refs[i], at, 1) for at, i in enumerate(those)
      ],
    )
    member.sequences = [sequence]
    return trajectory_lib.TrajectoryGroup(name, "t", [member])

  olds = [tmp_path / f"old{i}.db" for i in range(2)]
  for i, file in enumerate(olds):
    store = group_store.SqliteGroupStore(file, images=images)
    store.append(0, seen(f"g{i}", 0, i))
    store.append(1, seen(f"g{2 + i}", 2))
    store.remove([1] if i else [])
    store.close()
  target = tmp_path / "new.db"
  group_store.redeal([*olds, tmp_path / "absent.db"][:2], [target])
  elsewhere = images_lib.ImageStore()
  store = group_store.SqliteGroupStore(target, images=elsewhere)
  stored = store.load()
  assert [(i, g.group_id) for i, g in stored] == [
    (0, "g0"),
    (1, "g1"),
    (2, "g2"),
  ]
  assert store.known() == {0, 1, 2, 3}
  assert all(ref in elsewhere for ref in refs) and store.lost == 0
  store.close()


def test_a_kill_while_groups_move_leaves_the_old_layout(tmp_path, monkeypatch):
  write(tmp_path, 2, [["stored", "done"], ["stored"]])
  before = process_layout.adopt(tmp_path, 2)

  def die(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as broken:
    broken.setattr(process_layout.durable, "write_text", die)
    with pytest.raises(KeyboardInterrupt):
      process_layout.adopt(tmp_path, 1)
  assert process_layout.read(tmp_path) == before
  after = process_layout.adopt(tmp_path, 1)
  assert after == process_layout.Layout(1, 1)
  store = group_store.SqliteGroupStore(tmp_path / after.queue)
  assert [g.group_id for _, g in store.load()] == [
    "train-000000",
    "train-000001",
  ]
  store.close()
  assert not list(tmp_path.rglob("queue.db*"))
  # And on to two again.
  process_layout.adopt(tmp_path, 2)
  with sqlite3.connect(tmp_path / "processes/1/queue-2.db") as db:
    assert db.execute("SELECT idx, done FROM groups").fetchall() == [(0, 0)]


PARTS = ("collect.group_size=8", "collect.part_size=4", "queue.max_staleness=1")


def test_queues_of_parts_are_refused_before_they_are_dealt(tmp_path):
  config = config_lib.load_config(PARTS)
  process_layout.check(tmp_path, 2, config)  # A new run.
  write(tmp_path, 2, [["stored"], ["stored"]])
  before = sorted(tmp_path.rglob("*"))
  process_layout.check(tmp_path, 2, config)
  process_layout.check(tmp_path, 3, SYNCHRONOUS)
  for count in (1, 3):
    with pytest.raises(config_lib.ConfigError) as caught:
      process_layout.check(tmp_path, count, config)
    (line,) = caught.value.problems
    assert f"has {count}: collect.part_size=4" in line
    assert line.endswith("resume with 2")
  assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_dealt_is_refused_with_the_reason(tmp_path):
  extras = {loop_lib.PROCESSES: write(tmp_path, 2, [["done"], ["done"]])}
  for changes, words in (
    (["task_source.order=curriculum"], "by what that process has seen"),
    (['queue.path=""', "queue.max_staleness=1"], "out of their order"),
    (PARTS, "collect.part_size=4 queues each part"),
  ):
    config = config_lib.load_config(changes)
    with pytest.raises(config_lib.ConfigError, match=words) as caught:
      process_layout.own_extras(extras, Process(0, 3), config)
    assert "resume with 2" in str(caught.value)
    assert process_layout.own_extras(extras, Process(1, 2), config)
  (tmp_path / "processes" / "layout.json").write_text('{"processes": "x", 1')
  with pytest.raises(config_lib.ConfigError, match="layout.json cannot be"):
    process_layout.read(tmp_path)
