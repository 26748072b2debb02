"""Lists of tasks: reading, splitting, choosing; which one comes next."""

import collections
import json

from cua_gyms import genv
import gym_servers
import hypothesis
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import task_sources
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.task_sources import source

Config = task_sources.TaskSourceConfig


def write(path, rows):
  path.write_text("\n\n".join(json.dumps(row) for row in rows))
  return str(path)


@pytest.fixture(name="path")
def _path(tmp_path):
  """Forty tasks of four families."""
  return write(
    tmp_path / "tasks.jsonl",
    [
      {
        "task_id": f"t{i}",
        "task_name": f"name {i}",
        "task_number": f"{i:03d}",
        "tags": [f"Tag{i % 4}"],
        "description": f"Do {i}.",
      }
      for i in range(1, 41)
    ],
  )


def load(path, **changes):
  split = changes.pop("split", None)
  config = Config(source="jsonl", path=path, **changes)
  return [t.id for t in task_sources.load_tasks_from_config(config, split)]


def test_the_split_is_seeded_complete_and_without_overlap(path):
  train, held_out = load(path, split="train"), load(path, split="eval")
  assert (len(train), len(held_out)) == (32, 8)
  assert not set(train) & set(held_out)
  assert set(train) | set(held_out) == set(load(path))
  assert train == load(path, split="train")
  assert held_out != load(path, split="eval", seed=7)
  assert len(load(path, split="train", train_ratio=0.51)) == 20


_LIMITS = {"train": "limit", "eval": "eval_limit"}


@hypothesis.settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[
    hypothesis.HealthCheck.function_scoped_fixture,
    hypothesis.HealthCheck.too_slow,
  ],
)
@hypothesis.given(
    seed=st.integers(0, 99),
    ratio=st.floats(0.1, 0.9),
    choices=st.tuples(*[
        st.fixed_dictionaries({}, optional={
            "limit": st.integers(1, 9),
            "tags": st.lists(
                st.sampled_from(["tag0", "TAG1", "Tag2"]), min_size=1
            ),
        })
    ] * 2),
)  # fmt: skip
def test_no_choice_of_tags_and_limits_trains_on_what_is_held_out(
  path, seed, ratio, choices
):
  ids = []
  for split, chosen in zip(("train", "eval"), choices):
    try:
      ids.append(set(load(
          path, split=split, seed=seed, train_ratio=ratio,
          **{_LIMITS[split] if k == "limit" else k: v
             for k, v in chosen.items()},
      )))  # fmt: skip
    except ValueError as error:
      assert "none of 40 tasks is left" in str(error)
      ids.append(set())
    if "limit" in chosen:
      assert len(ids[-1]) <= chosen["limit"]
  assert not ids[0] & ids[1]


def test_a_range_of_numbers_is_held_out_whatever_the_ratio(path):
  held_out = load(path, split="eval", eval_number_range="005-008")
  assert held_out == ["t5", "t6", "t7", "t8"]
  train = load(path, split="train", eval_number_range="005-008")
  assert len(train) == 36 and not set(train) & set(held_out)


def test_named_tasks_are_held_out_and_never_trained_on(path):
  names = ["name 7", "3"]
  assert load(path, split="eval", eval_names=names) == ["t3", "t7"]
  train = load(path, split="train", eval_names=names, names=["5", "9"])
  assert train == ["t5", "t9"]
  with pytest.raises(ValueError, match="both say what is held out"):
    Config(source="jsonl", path="x", eval_names=("a",), eval_number_range="1-2")


def test_tags_names_and_limits_choose(path):
  assert load(path, tags=["tag1"]) == [f"t{i}" for i in range(1, 41, 4)]
  assert load(path, names=["name 7", "3", "t9"]) == ["t3", "t7", "t9"]
  some = load(path, limit=5)
  assert len(some) == 5 and some == load(path, limit=5)
  assert some == sorted(some, key=lambda t: int(t[1:]))
  assert some != load(path, limit=5, seed=1)


def test_a_split_that_the_list_tells_is_kept(tmp_path):
  path = write(
    tmp_path / "t.jsonl",
    [
      {"task_id": f"t{i}", "split": "eval" if i < 3 else "train"}
      for i in range(10)
    ],
  )
  assert load(path, split="eval") == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"source": "json"}, "source(.|\n)*'json'"),
    ({"train_ratio": 1.5}, "train_ratio(.|\n)*1.5"),
    ({"limit": -1}, "limit(.|\n)*-1"),
    ({"eval_number_range": "9-3"}, "eval_number_range='9-3'"),
    ({"eval_number_range": "a"}, "eval_number_range='a'"),
    ({"tags": "x"}, "tags(.|\n)*'x'"),
    ({"path": ""}, "needs path"),
    ({"source": "generated"}, "path=x is not read"),
    ({"source": "gym"}, "path=x is not read"),
    ({"source": "generated", "path": "", "limit": 3}, "limit=3 chooses"),
    ({"families": ["a", "a"]}, "families.*twice"),
  ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes, words):
  with pytest.raises(ValueError, match=words):
    Config(**{"source": "jsonl", "path": "x", **changes})


def test_a_split_that_cannot_be_is_refused(path):
  with pytest.raises(ValueError, match="split='test'"):
    load(path, split="test")


def test_what_is_no_list_is_not_read():
  with pytest.raises(ValueError, match="source=generated is not a list"):
    task_sources.load_tasks_from_config(Config())
  with pytest.raises(ValueError, match="gym.name=desktop; set gym.name=genv"):
    task_sources.load_tasks_from_config(Config(source="gym"), gym="desktop")


@pytest.mark.parametrize(
  "text, words",
  [
    ('{"task_id": "a"}\n{"task_id": "a"}', "tasks 1 and 2 have one id"),
    ('{"task_id": "a"}\n{', "line 2 is not JSON"),
    ('{"task_id": "a"}\n\n{"name": 5.5}', "line 3: name must be"),
    ('{"tasks": [{"task_id": "a"}]}', "write a row for each"),
    ("", "none of 0 tasks"),
  ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, words):
  (tmp_path / "t.jsonl").write_text(text)
  with pytest.raises(ValueError, match=words):
    load(str(tmp_path / "t.jsonl"))


def test_a_name_that_nothing_has_is_an_error(path):
  with pytest.raises(task_sources.UnknownTaskError, match="'nobody'"):
    load(path, names=["t1", "nobody"])


def test_a_dataset_has_the_rows_of_its_tasks(tmp_path, path):
  datasets = pytest.importorskip("datasets")
  tasks = task_sources.load_tasks_from_config(
    Config(source="jsonl", path=path, limit=6)
  )
  dataset = task_sources.to_dataset(tasks)
  assert {
      "task_id", "name", "description", "instruction", "task_number", "tags",
      "gym_base_url", "gym_id", "difficulty", "category",
  } <= set(dataset.column_names)  # fmt: skip
  dataset.save_to_disk(str(tmp_path / "plain"))
  datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "dict"))
  for name in ("plain", "dict"):
    again = task_sources.load_tasks_from_config(
      Config(source="huggingface", path=str(tmp_path / name))
    )
    assert [t.to_task() for t in again] == [t.to_task() for t in tasks]
  with pytest.raises(ValueError, match="dataset_split='test'"):
    task_sources.load_tasks_from_config(
      Config(
        source="huggingface", path=str(tmp_path / "dict"), dataset_split="test"
      )
    )


def test_several_sources_are_one_list_in_their_order(tmp_path, path):
  other = write(tmp_path / "o.jsonl", [{"task_id": "t2"}, {"task_id": "new"}])
  with gym_servers.serving(
    gym_servers.desktop(train_tasks=2, eval_tasks=1)
  ) as (url, _):
    tasks = task_sources.load_tasks_from_multiple_sources(
      [
        Config(source="jsonl", path=path),
        Config(source="jsonl", path=other),
        (Config(source="gym", tags=["train"]), {"base_url": url}),
      ]
    )
  ids = [t.id for t in tasks]
  assert ids[:40] == [f"t{i}" for i in range(1, 41)]
  assert ids[40] == "new" and len(ids) == 45  # t2 is taken from the first.
  assert tasks[-1].gym_base_url == url and tasks[-1].description
  clash = write(tmp_path / "c.jsonl", [{"task_id": "t1", "gym_id": "b"}])
  with pytest.raises(ValueError, match="two sources have a task 't1'"):
    task_sources.load_tasks_from_multiple_sources(
      [Config(source="jsonl", path=path), Config(source="jsonl", path=clash)]
    )


def test_a_server_that_is_not_there_is_given_up_in_time():
  with pytest.raises(genv.GenvError):
    task_sources.load_tasks_from_config(
      Config(source="gym"),
      options={"base_url": "http://127.0.0.1:9", "timeouts": {"tasks": 1.0}},
    )


def test_batches_of_groups_have_an_end(path):
  tasks = task_sources.load_tasks_from_config(
    Config(source="jsonl", path=path, limit=6)
  )
  batches = task_sources.TaskBatches(tasks, groups_per_batch=4, group_size=3)
  assert len(batches) == 2
  assert [len(b) for b in batches] == [4, 2]
  for group in batches[0]:
    assert len(group) == 3 and len({t.id for t in group}) == 1
  for index in (2, -1):
    with pytest.raises(IndexError):
      batches[index]


# --- task sets ----------------------------------------------------------------


def cua(i, family="f"):
  return task_sources.CUATask(f"{family}{i}", family=family)


def test_a_list_is_gone_through_again_and_again():
  tasks = task_sources.ListedTasks(
    [cua(i) for i in range(5)], [cua(i) for i in range(5, 8)]
  )
  for epoch in range(3):
    pass_ = [tasks.train_task("f", epoch * 5 + i, 0).task_id for i in range(5)]
    assert sorted(pass_) == [f"f{i}" for i in range(5)]
  passes = {
    tuple(tasks.train_task("f", e * 5 + i, 0).task_id for i in range(5))
    for e in range(6)
  }
  assert len(passes) > 1  # Shuffled anew.
  held_out = [tasks.eval_task("f", i, 0).task_id for i in range(4)]
  assert held_out == ["f5", "f6", "f7", "f5"]


@pytest.mark.parametrize(
  "train, held_out, families, words",
  [
    ([0, 1], [1], (), "'f1' is for training and held out"),
    ([0], [], (), "no family has both"),
    ([0], [1], ("g",), "known: f"),
  ],
)
def test_lists_that_make_no_run_are_refused(train, held_out, families, words):
  with pytest.raises(ValueError, match=words):
    task_sources.ListedTasks(
      [cua(i) for i in train], [cua(i) for i in held_out], families
    )


def test_a_server_without_instances_is_played_by_its_list():
  """The documented protocol only: no address of its gyms."""
  with gym_servers.serving(
    gym_servers.desktop(train_tasks=3, eval_tasks=2)
  ) as (url, app):
    make = lambda: gyms.get("genv").make_tasks((), {"base_url": url})
    assert isinstance(make(), genv.GenvTasks)
    described = app._catalogs["desktop"].describe  # pylint: disable=protected-access
    app._catalogs["desktop"].describe = lambda: {  # pylint: disable=protected-access
      k: v for k, v in described().items() if k != "instances"
    }
    tasks = make()
  assert isinstance(tasks, task_sources.ListedTasks)
  assert sorted(tasks.families()) == list(gym_servers.FAMILIES)
  assert "eval" in source.SPLITS


# --- curriculum ---------------------------------------------------------------


def sampler(rates, **changes):
  """(sampler, a function that tells how a drawn task's group went)."""
  curriculum = task_sources.CurriculumSampler(
    tuple(rates),
    lambda arm, index: base.Task(f"{arm}/{index}", arm),
    **{"round_size": 4, **changes},
  )
  return curriculum


def group(task, rate, size=4):
  won = round(rate * size)
  members = [
    trajectory.Trajectory(
      trajectory_id=f"{task.task_id}-{i}",
      status=trajectory.TrajectoryStatus("succeeded" if i < won else "failed"),
    )
    for i in range(size)
  ]
  return trajectory.TrajectoryGroup("train-0", task.task_id, tuple(members))


def tell(curriculum, task, rate, outcome="accepted"):
  curriculum.on_event(events.GroupFinished(group(task, rate), outcome))


def run(curriculum, rates, draws):
  drawn = []
  for _ in range(draws):
    task = next(curriculum)
    drawn.append(task.task_id)
    tell(curriculum, task, rates[task.family])
  return drawn


RATES = {"won": 1.0, "hopeless": 0.0, "half": 0.5}


def test_what_is_half_solved_comes_most_often():
  curriculum = sampler(RATES)
  drawn = run(curriculum, RATES, 400)
  late = collections.Counter(t.split("/")[0] for t in drawn[100:])
  assert late["half"] > 3 * max(late["won"], late["hopeless"])
  assert min(late["won"], late["hopeless"]) > 5  # The floor.
  assert curriculum.rates["half"] == pytest.approx(0.5)
  assert curriculum.rates["won"] > 0.9 > 0.1 > curriculum.rates["hopeless"]


def test_equal_seeds_draw_equally_and_each_draw_is_a_new_task():
  first, again = (run(sampler(RATES), RATES, 60) for _ in range(2))
  assert first == again and len(set(first)) == 60
  assert first != run(sampler(RATES, seed=1), RATES, 60)


def test_when_results_come_within_a_round_changes_nothing():
  """Of a synchronous run: all of a round are in before the next but one."""
  drawn = []
  for late in (False, True):
    curriculum, tasks = sampler(RATES), []
    for _ in range(10):
      of_round = [next(curriculum) for _ in range(4)]
      tasks += [t.task_id for t in of_round]
      for task in reversed(of_round) if late else of_round:
        tell(curriculum, task, RATES[task.family])
    drawn.append(tasks)
  assert drawn[0] == drawn[1]


@pytest.mark.parametrize("stop", [1, 7, 30])
def test_a_curriculum_goes_on_from_its_state(stop):
  uninterrupted = run(sampler(RATES), RATES, 60)
  before = sampler(RATES)
  drawn = run(before, RATES, stop)
  pending = next(before)
  state = json.loads(json.dumps(before.state_dict()))
  after = sampler(RATES)
  after.load_state_dict(state)
  # What was under way ends in the run that goes on.
  tell(after, pending, RATES[pending.family])
  drawn += [pending.task_id] + run(after, RATES, 59 - stop)
  assert drawn == uninterrupted


def test_broken_groups_and_evaluations_teach_nothing():
  curriculum = sampler(RATES)
  for outcome in ("dropped", "requeued"):
    for _ in range(8):
      tell(curriculum, next(curriculum), 1.0, outcome)
  tell(curriculum, base.Task("strange", "won"), 1.0)
  for _ in range(16):
    next(curriculum)
  assert set(curriculum.rates.values()) == {0.5}


def test_the_state_of_another_curriculum_is_refused():
  state = sampler(RATES).state_dict()
  with pytest.raises(ValueError, match="same task_source.families"):
    sampler({"a": 1}).load_state_dict(state)
