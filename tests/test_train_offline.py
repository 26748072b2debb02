"""Training on recorded episodes: no gym, no engine, the same learner."""

import base64
import dataclasses
import io
import json
import shutil

import jax
import numpy as np
from PIL import Image
import pytest
import small_runs
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.recorded_data import files
from tunix.rl.multi_turn.run.recorded_data import offline_feed
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.run.recorded_data import sources
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.queue import group_queue

pytestmark = pytest.mark.timeout(400)

COMMON = (
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "eval.on=false",
  "checkpoint.every=1",
  "algorithm.importance=none",
)


@pytest.fixture(name="recorded", scope="module")
def _recorded(tmp_path_factory):
  """A directory of a run whose episodes have rewards that differ."""
  base = tmp_path_factory.mktemp("recorded")
  assert small_runs.run_train(base, *COMMON, "name=r", "steps=3") == 0
  path = base / "r" / "trajectories.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  for number, line in enumerate(lines):
    line["reward"] = float(number % 3 == 0)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return base / "r"


@pytest.fixture(name="items", scope="module")
def _items(recorded, tmp_path_factory):
  """The same episodes as items of a rollout buffer."""
  store = images_lib.ImageStore()
  for file in (recorded / "images").iterdir():
    store.put(images_lib.decode(file.read_bytes()))
  groups = {}
  for line in (recorded / "trajectories.jsonl").read_text().splitlines():
    line = json.loads(line)
    episode = trajectory_lib.Trajectory.from_json(line)
    if line["split"] == "train" and episode.status.is_policy_outcome:
      groups.setdefault((line["group_id"], line["task_id"]), []).append(episode)
  path = tmp_path_factory.mktemp("items") / "items.jsonl"
  with path.open("w") as file:
    for (name, task), members in groups.items():
      group = trajectory_lib.TrajectoryGroup(name, task, tuple(members))
      for item in records.write_group(group, store):
        file.write(json.dumps(item) + "\n")
  return path


@pytest.fixture(autouse=True)
def _no_gym(monkeypatch, recorded):
  del recorded  # It was played in one.

  def refuse(*args, **kwargs):
    raise AssertionError("a gym or an engine was made")

  monkeypatch.setattr(gyms.GymSpec, "make_gym", refuse)
  monkeypatch.setattr(engine_lib.RolloutEngine, "__init__", refuse)


def _train(tmp_path, name, path, *overrides):
  return small_runs.run_train(
    tmp_path,
    *COMMON,
    f"name={name}",
    "rollout.via=offline",
    f"offline.path={path}",
    *overrides,
  )


CURVE = ("loss", "grad_norm", "reward_mean", "ratio_max", "sampled_tokens")


def _curve(directory):
  return [
    {k: line[k] for k in CURVE if k in line}
    for line in small_runs.metrics_of(directory)
  ]


def _weights(directory):
  (file,) = (directory / "policy").glob("*.safetensors")
  return file.read_bytes()


@pytest.mark.slow
def test_a_run_and_a_buffers_items_teach_the_same(
  recorded, items, tmp_path, capsys
):
  assert _train(tmp_path, "a", recorded, "steps=2") == 0
  assert _train(tmp_path, "b", items, "steps=2") == 0
  curve = _curve(tmp_path / "a")
  assert len(curve) == 2 and all(line["grad_norm"] > 0 for line in curve)
  # Recorded log-probs count: the first weights are not those that sampled.
  assert all(line["ratio_max"] != 1 for line in curve)
  assert curve == _curve(tmp_path / "b")
  assert _weights(tmp_path / "a") == _weights(tmp_path / "b")
  assert "success" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_has_the_same_curve_over_epochs(recorded, tmp_path):
  assert _train(
      tmp_path, "r", recorded, "steps=4", "learner.groups_per_step=4",
      "checkpoint.keep=9",
  ) == 0  # fmt: skip
  directory = tmp_path / "r"
  curve, weights = _curve(directory), _weights(directory)
  assert len(curve) == 4
  # More than an epoch; what followed the second update is made again.
  assert train.main([f"resume={directory}", "checkpoint.resume_from=2"]) == 0
  assert _curve(directory) == curve
  assert _weights(directory) == weights


@pytest.mark.slow
def test_epochs_end_the_run_and_each_group_is_seen_once_in_each(
  recorded, tmp_path
):
  groups = []
  with pytest.MonkeyPatch.context() as patch:
    group = offline_feed.OfflineFeed.group

    def spied(self, index):
      recorded = group(self, index)
      groups.append(recorded.group_id)
      return recorded

    patch.setattr(offline_feed.OfflineFeed, "group", spied)
    assert _train(
        tmp_path, "e", recorded, "offline.epochs=2", "steps=1000",
        "learner.groups_per_step=2",
    ) == 0  # fmt: skip
  first = [name for name in groups if "@" not in name]
  second = [name for name in groups if "@" in name]
  assert len(set(first)) == len(first) == len(second)
  assert {name.partition("@")[0] for name in second} == set(first)
  # Another order.
  assert [name.partition("@")[0] for name in second] != first


# --- data without log-probs ---------------------------------------------------


def _png():
  file = io.BytesIO()
  shade = np.full((64, 96, 3), 90, np.uint8)
  Image.fromarray(shade).save(file, "PNG")
  return file.getvalue()


def _demonstrations(path):
  """One with a data URL, one with a file, one former sample of training."""
  url = "data:image/png;base64," + base64.b64encode(_png()).decode()
  (path.parent / "shots").mkdir()
  (path.parent / "shots" / "a.png").write_bytes(_png())
  user = {"type": "text", "text": "Click."}
  rows = [
    {
      "messages": [
        {
          "role": "user",
          "content": [{"type": "image_url", "image_url": {"url": url}}, user],
        },
        {"role": "assistant", "content": "click(1)"},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "click(2)"},
      ]
    },
    {
      "task_id": "b",
      "messages": [
        {
          "role": "user",
          "content": [{"type": "image", "image": "shots/a.png"}, user],
        },
        {"role": "assistant", "content": "click(3)"},
      ],
    },
    {
      "messages": [{"role": "user", "content": "Go."}],
      "response_text": "done",
      "weight": 0.25,
    },
  ]
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_text_is_refused_by_default_with_what_to_set(tmp_path, capsys):
  _demonstrations(tmp_path / "d.jsonl")
  assert _train(tmp_path, "x", tmp_path / "d.jsonl", "steps=1") == 2
  error = capsys.readouterr().err
  assert "missing_logprobs=recompute" in error and "line 1" in error
  assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "weighted_cloning",
    pytest.param("filtered_cloning", marks=pytest.mark.slow),
  ],
)
def test_demonstrations_with_screenshots_are_cloned(name, tmp_path):
  _demonstrations(tmp_path / "d.jsonl")
  assert _train(
      tmp_path, "c", tmp_path / "d.jsonl", "steps=12", f"algorithm={name}",
      "offline.missing_logprobs=recompute", "learner.groups_per_step=3",
      "learner.learning_rate=0.01",
  ) == 0  # fmt: skip
  lines = small_runs.metrics_of(tmp_path / "c")
  # Of four replies: two of the first demonstration; the third is left out of
  # filtered cloning.
  assert lines[0]["sequences"] == (3 if name == "weighted_cloning" else 2)
  losses = [line["loss"] for line in lines]
  assert losses[-1] < 0.5 * losses[0]


@pytest.fixture(name="run")
def _run(recorded, tmp_path):
  with small_runs.make_run(
    tmp_path,
    *COMMON,
    "name=u",
    "rollout.via=offline",
    f"offline.path={recorded}",
    "algorithm=weighted_cloning",
  ) as run:
    yield run


def _learner(run, **algorithm):
  config = dataclasses.replace(
    run.config, algorithm=dataclasses.replace(run.config.algorithm, **algorithm)
  )
  return models.make_learner(config, run.policy, run.images, run.mesh)


@pytest.mark.slow
def test_cloning_with_weight_one_is_behaviour_cloning(run):
  group = run.recorded[0]
  group = dataclasses.replace(
    group,
    trajectories=tuple(
      dataclasses.replace(
        t,
        reward=1.0,
        steps=[dataclasses.replace(s, reward=0.0) for s in t.steps],
      )
      for t in group.trajectories
    ),
  )
  weighted, cloning = (
    _learner(run),
    _learner(run, objective="behaviour_cloning"),
  )
  weighted.update([group])
  cloning.update_on_sequences([s for t in group for s in t.sequences])
  for one, other in zip(
    jax.tree.leaves(weighted.parameters()),
    jax.tree.leaves(cloning.parameters()),
    strict=True,
  ):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_recomputed_log_probs_are_the_learners_and_recorded_ones_stay(run):
  learner = _learner(run)
  exact = run.recorded[0]
  first, *further = exact.trajectories
  blank = dataclasses.replace(
    first,
    metrics={**first.metrics, records.LOGPROBS_MISSING: 1.0},
    sequences=[
      dataclasses.replace(s, logprobs=np.zeros(len(s), np.float32))
      for s in first.sequences
    ],
  )
  mixed = dataclasses.replace(exact, trajectories=(blank, *further))
  (filled,) = sources.fill_logprobs(learner, [mixed])
  assert filled.trajectories[1:] == tuple(further)
  member = filled.trajectories[0]
  assert reader_lib.RECOMPUTED in member.metrics
  for one in filled:
    assert records.LOGPROBS_MISSING not in one.metrics
  expected = learner.sequence_logprobs(first.sequences)
  for sequence, scored in zip(member.sequences, expected, strict=True):
    np.testing.assert_allclose(sequence.logprobs, scored, atol=1e-6)
    assert set(sequence.versions[sequence.loss_mask]) == {learner.version}
  # An update with them has ratio 1 there.
  readings = learner.update(
    [
      dataclasses.replace(
        filled,
        trajectories=tuple(
          dataclasses.replace(t, reward=1.0) for t in filled.trajectories[:1]
        ),
      )
    ]
  )
  assert readings["ratio_max"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_tokens_of_old_versions_leave_the_loss(recorded, tmp_path):
  assert _train(
      tmp_path, "v", recorded, "steps=1", "offline.oldest_version=1",
      "learner.groups_per_step=16", "offline.shuffle=false",
  ) == 0  # fmt: skip
  (line,) = small_runs.metrics_of(tmp_path / "v")
  assert line["stale_token_share"] > 0


# --- bad data -----------------------------------------------------------------


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "holds no episode"),
        ("{\n", "line 1: no JSON"),
        ("[]\n", "line 1: an object is needed"),
        ('{"a": 1}\n', "line 1: no episode"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n',
         "line 1: nothing to learn"),
        ('{"messages": [{"role": "assistant", "content": "x"}],'
         ' "weight": "y"}\n', "line 1: reward='y' must be a finite number"),
        ('{"messages": [{"role": "user", "content": [{"type": "image",'
         ' "image": "../x.png"}]}, {"role": "assistant", "content": "x"}]}\n',
         "is outside of"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url",'
         ' "image_url": {"url": "http://a/x.png"}}]},'
         ' {"role": "assistant", "content": "x"}]}\n', "is not fetched"),
    ],
)  # fmt: skip
def test_a_bad_line_is_one_clear_line(text, problem, tmp_path, capsys):
  path = tmp_path / "d.jsonl"
  path.write_text(text)
  assert _train(tmp_path, "x", path, "offline.missing_logprobs=recompute") == 2
  error = capsys.readouterr().err
  assert problem in error and "offline.path=" in error
  assert "Traceback" not in error


@pytest.mark.parametrize(
  "overrides, problem",
  [
    (("rollout.via=offline",), "needs offline.path"),
    (("offline.path=x",), "set rollout.via=offline"),
    (("rollout.via=offline", "offline.path=/nowhere"), "/nowhere"),
    (("rollout.via=buffer",), "needs buffer.url"),
    (("buffer.url=http://b:1",), "set buffer.input_file"),
    (("rollout.via=buffer", "buffer.url=http://b:1"), "buffer.input_file"),
    (("rollout.via=buffer", "buffer.url=b"), "must be an address"),
  ],
)
def test_a_contradiction_is_named(overrides, problem, tmp_path, capsys):
  assert small_runs.run_train(tmp_path, *COMMON, "name=x", *overrides) == 2
  assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_other_data_is_refused_on_resuming(recorded, tmp_path, capsys):
  copy = tmp_path / "copy"
  copy.mkdir()
  shutil.copytree(recorded / "images", copy / "images")
  shutil.copy(recorded / "trajectories.jsonl", copy)
  assert _train(tmp_path, "o", copy, "steps=1") == 0
  lines = (copy / "trajectories.jsonl").read_text().splitlines()
  short = [x for x in lines if '"train-000000"' not in x]
  (copy / "trajectories.jsonl").write_text("\n".join(short) + "\n")
  assert train.main([f"resume={tmp_path / 'o'}", "steps=2"]) != 0
  assert "recorded groups" in capsys.readouterr().err


class Names:
  """Groups of which only number and digest are asked for."""

  def __init__(self, digest):
    self.digest = digest

  def __len__(self):
    return 3


def test_as_many_groups_of_another_file_are_refused_on_resuming():
  def feed(digest):
    return offline_feed.OfflineFeed(Names(digest), group_queue.GroupQueue(1))

  state = feed("a").state_dict()
  feed("a").load_state_dict(state)
  with pytest.raises(ValueError, match="other names or sizes"):
    feed("b").load_state_dict(state)
  with pytest.raises(ValueError, match="rollout.via"):
    feed("a").load_state_dict({"tasks": {}})
  del state["digest"]  # Of an older checkpoint.
  feed("b").load_state_dict(state)


def test_the_digest_is_of_names_sizes_and_order(items, run, tmp_path):
  def digest(*lines):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return files.RecordedGroups(path, None, run.images).digest

  lines = items.read_text().splitlines()
  assert digest(*lines) == digest(*lines)
  renamed = lines[0].replace('"instance_id": "', '"instance_id": "x')
  assert renamed != lines[0]
  further = (lines[1:], lines[::-1], [renamed, *lines[1:]])
  digests = {digest(*lines), *(digest(*other) for other in further)}
  assert len(digests) == 4
