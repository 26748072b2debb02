"""Promises of loading a configuration: layers, types, refusals, help."""

import dataclasses
import functools
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys
import types
import typing

import hypothesis
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
from tunix.rl import multi_turn
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import documentation
from tunix.rl.multi_turn.config import evaluate_config
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import resolution
from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.environments.gyms import registry as gyms
import yaml  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
TrainConfig = config_lib.TrainConfig


def load(*argv: str) -> TrainConfig:
  return config_lib.load_config(argv)


def refusal(*argv: str) -> str:
  with pytest.raises(config_lib.ConfigError) as caught:
    load(*argv)
  return str(caught.value)


# --- layers -----------------------------------------------------------------


def test_defaults_file_overrides_in_this_order(tmp_path):
  file = tmp_path / "c.yaml"
  file.write_text("learner:\n  steps: 7\n  rows: 4\nrun:\n  seed: 3\n")
  config = load(str(file), "learner.steps=9", "seed=5", "seed=6")
  assert config.learner.steps == 9
  assert config.learner.rows == 4
  assert config.run.seed == 6
  assert config.learner.grad_clip == TrainConfig().learner.grad_clip


def test_a_gym_brings_its_preset_and_anything_wins_over_it(tmp_path):
  config = load("gym=miniwob")
  assert config.task_source.families == (
    "click-test-2",
    "click-dialog",
    "focus-text",
  )
  assert (config.gym.width, config.gym.height) == (160, 210)
  file = tmp_path / "c.yaml"
  file.write_text("gym: miniwob\nengine: {slots: 4}\n")
  config = load(str(file), "tasks=[click-test]")
  assert config.task_source.families == ("click-test",)
  assert (config.engine.slots, config.collect.concurrency) == (4, 24)


def test_pages_are_cloned_first_where_the_oracle_knows_every_one():
  assert load("gym=miniwob").warm_start.steps > 0
  assert load("gym=miniwob", "tasks=[click-test]").warm_start.steps > 0
  assert load("gym=miniwob", "tasks=[tic-tac-toe]").warm_start.steps == 0
  assert (
    load("gym=miniwob", "tasks=[click-test, tic-tac-toe]").warm_start.steps == 0
  )
  assert load("gym=miniwob", "warm_start.source=none").warm_start.steps == 0
  assert load("gym=miniwob", "warm_start.steps=3").warm_start.steps == 3
  assert load("gym=desktop").warm_start.steps == 0


def test_a_policy_without_shipped_weights_starts_from_random_ones():
  assert load("policy=qwen2_5_vl_tiny").warm_start.source == "none"
  for name in ("tiny_vl", "qwen3_vl_tiny"):
    assert load(f"policy={name}").warm_start.source == "embedded"


def test_the_gym_of_an_override_decides_the_preset_over_the_file(tmp_path):
  file = tmp_path / "c.yaml"
  file.write_text("gym: miniwob\n")
  desktop = load()
  assert desktop.gym.width != load("gym=miniwob").gym.width
  assert load(str(file), "gym=desktop").gym.width == desktop.gym.width


@pytest.mark.parametrize("written", ["gym: miniwob", "gym:\n  name: miniwob"])
def test_a_section_with_a_short_form_takes_a_plain_value(tmp_path, written):
  file = tmp_path / "c.yaml"
  file.write_text(written + "\n")
  assert load(str(file)).gym.name == "miniwob"


@pytest.mark.parametrize(
  "text, tasks",
  [
    ("tasks=[a,b]", ("a", "b")),
    ("tasks=a,b", ("a", "b")),
    ("task_source.families=a", ("a",)),
    ("task_source={families: [x]}", ("x",)),
  ],
)
def test_lists_may_be_written_as_people_write_them(text, tasks):
  assert load(text).task_source.families == tasks


def test_numbers_as_people_write_them():
  config = load(
    "learner.learning_rate=1e-4", "steps=1e3", "report.images=false"
  )
  assert config.learner.learning_rate == 1e-4
  assert config.learner.steps == 1000
  assert isinstance(config.learner.steps, int)
  assert config.report.images is False


def test_text_stays_text_whatever_yaml_would_make_of_it():
  for name in ("007", "1e3", "2026-01-02", "on", "1_000"):
    assert load(f"run.name={name}").run.name == name


def test_a_mapping_is_merged_key_by_key(tmp_path):
  file = tmp_path / "c.yaml"
  file.write_text("gym: {options: {success_return: 1.0, env_kwargs: {c: 2}}}\n")
  config = load(
    str(file),
    "gym=gymnasium",
    "tasks=[A-v1]",
    "gym.options.score=return",
    "gym.options.success_return=4.0",
  )
  assert config.gym.options == {
    "success_return": 4.0,
    "env_kwargs": {"c": 2},
    "score": "return",
  }


def test_keys_below_a_mapping_merge_deeply():
  config = load(
    "gym=gbox", "tasks=[a]", "gym.options.box.b=1", "gym.options.box.c=2"
  )
  assert config.gym.options == {"box": {"b": 1, "c": 2}}


def test_a_run_gets_a_name_and_a_directory():
  config = load("gym=miniwob", "run.dir=/tmp/x")
  assert re.fullmatch(r"miniwob-\d{8}-\d{6}-[0-9a-f]{6}", config.run.name)
  assert config.run_dir == pathlib.Path("/tmp/x") / config.run.name


def test_resume_starts_from_that_runs_configuration(tmp_path):
  run = tmp_path / "runs" / "first"
  run.mkdir(parents=True)
  (run / "config.yaml").write_text(
    load("name=first", "learner.rows=2", "seed=4").to_yaml()
  )
  config = load(f"resume={run}", "steps=500")
  assert (config.learner.rows, config.run.seed) == (2, 4)
  assert config.learner.steps == 500
  assert config.run_dir == run
  assert "no config.yaml" in refusal(f"resume={tmp_path / 'runs' / 'secnd'}")
  # It would go on in one directory under the name of another.
  for other in ("name=second", f"run.dir={tmp_path}"):
    assert "own directory" in refusal(f"resume={run}", other)


def test_resolved_values():
  assert load().lockstep is True
  assert load("queue.max_staleness=2").lockstep is False
  assert load("engine.lockstep=false").lockstep is False
  config = load("queue.max_staleness=2", "learner.groups_per_step=4")
  assert config.queue.capacity_for(config.learner.groups_per_step) == 12
  assert load("queue.capacity=50").queue.capacity_for(4) == 50


# --- round trip --------------------------------------------------------------


def _values(f: settings_lib.Setting) -> st.SearchStrategy:
  choices = loader.literal_choices(f.type)
  kind = f.type
  if choices:
    one = st.sampled_from(choices)
    is_list = typing.get_origin(kind) is tuple
    return st.lists(one, unique=True, min_size=1).map(tuple) if is_list else one
  low = f.bounds.get("ge", f.bounds.get("gt"))
  high = f.bounds.get("le", f.bounds.get("lt"))
  if kind is bool:
    return st.booleans()
  if kind is int:
    first = int(low or 0) + ("gt" in f.bounds)
    return st.integers(first, int(10**6 if high is None else high))
  if kind is float:
    return st.floats(
      0.0 if low is None else low,
      1e6 if high is None else high,
      exclude_min="gt" in f.bounds,
      exclude_max="lt" in f.bounds,
      allow_subnormal=False,
    )
  if kind is str:
    return st.text(max_size=12)
  if kind == tuple[str, ...]:
    return st.lists(st.text(min_size=1), unique=True).map(tuple)
  if kind == tuple[int, ...]:
    return st.lists(st.integers(1, 4096)).map(tuple)
  if kind == tuple[float, ...]:
    return st.lists(st.floats(0, 1), max_size=8).map(tuple)
  if kind == str | dict[str, typing.Any]:
    return st.text(min_size=1, max_size=8) | st.dictionaries(
      st.text(min_size=1, max_size=8), st.floats(-9, 9)
    )
  if typing.get_origin(kind) in (typing.Union, types.UnionType):
    (inner,) = (k for k in typing.get_args(kind) if k is not type(None))
    return st.none() | _values(dataclasses.replace(f, type=inner))
  leaf = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
  return st.dictionaries(
    st.text(max_size=8),
    st.recursive(
      leaf,
      lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
      ),
      max_leaves=5,
    ),
    max_size=3,
  )


@st.composite
def _instances(draw, cls):
  """An instance; what its own checks refuse is drawn again, field by field."""
  values = {}
  for f in settings_lib.fields(cls):
    if f.nested:
      values[f.name] = draw(_instances(f.nested))
      continue
    value = draw(_values(f))
    try:
      cls(**{**values, f.name: value})
    except ValueError:
      continue
    values[f.name] = value
  return cls(**values)


# Shrinking a hundred fields takes minutes and says no more than the first.
@settings(
  max_examples=30,
  deadline=None,
  phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
@given(_instances(TrainConfig))
def test_yaml_round_trip_of_any_value(config):
  # Below the checks for contradictions: only typing and syntax matter here.
  problems = []
  flat = loader.flatten(
    resolution.parse_yaml(config.to_yaml(), "x"),
    TrainConfig,
    config_lib.ALIASES,
    "x",
    problems,
  )
  again = loader.build(TrainConfig, flat, problems)
  assert not problems
  assert again == config


_NUMBERS = (tuple[int, ...], tuple[float, ...])


def _another(f: settings_lib.Setting):
  """A valid value that is not the default."""
  choices = loader.literal_choices(f.type)
  if choices and typing.get_origin(f.type) is not tuple:
    return next(c for c in choices if c != f.default)
  if choices:
    return [next(c for c in choices if (c,) != f.default)]
  kinds = loader._members(f.type)  # pylint: disable=protected-access
  if bool in kinds:
    return not f.default
  if int in kinds or float in kinds:
    low = f.bounds.get("ge", f.bounds.get("gt"))
    high = f.bounds.get("le", f.bounds.get("lt"))
    for value in (1, 2, 0.5, low, high):
      if (
        value is not None
        and value != f.default
        and not loader.field_problem(*_class_of(f), value, "")
      ):
        return value
  if any(typing.get_origin(k) is dict for k in kinds) and str not in kinds:
    return {"a": 1}
  if any(typing.get_origin(k) is tuple for k in kinds):
    return [7] if kinds[0] in _NUMBERS else ["x"]
  return "x"


def _class_of(f):
  for cls in loader.sections(TrainConfig).values():
    if f in settings_lib.fields(cls):
      return cls, f
  raise AssertionError(f.name)


@pytest.mark.parametrize("path", loader.leaves(TrainConfig))
def test_every_field_is_reached_by_key_value(path):
  """The value arrives in the object that the component itself takes."""
  field = loader.leaves(TrainConfig)[path]
  value = _another(field)
  problems = []
  key, raw = loader.parse_override(
    f"{path}={yaml.safe_dump(value).strip()}".removesuffix("\n...").replace(
      "\n...", ""
    )
  )
  flat = loader.flatten({key: raw}, TrainConfig, {}, "x", problems)
  section, _, name = path.rpartition(".")
  cls = loader.sections(TrainConfig)[section]
  assert not problems
  expected = loader.coerce(raw, field.type)
  assert expected != field.default
  assert loader.field_problem(cls, field, expected, path) is None
  config = loader.build(TrainConfig, flat, problems)
  value_ = functools.reduce(getattr, path.split("."), config)
  # Fields that need others are refused by their section, by name.
  assert value_ == expected or any(name in p for p in problems)


def test_every_settings_class_of_the_package_is_a_section():
  """Every settings class is a section of a run."""
  nested = set(loader.sections(config_lib.EvaluationConfig).values())
  nested |= {TrainConfig, config_lib.EvaluationConfig}
  for module in pkgutil.walk_packages(
    multi_turn.__path__, "tunix.rl.multi_turn."
  ):
    if not re.search(
      r"(settings|config|source|policy_client|admission)$", module.name
    ):
      continue
    for value in vars(importlib.import_module(module.name)).values():
      if settings_lib.is_settings(value) and value not in nested:
        # A request's own part, whose base class is the section; and what the
        # rollout buffer is started with, a program of its own.
        assert value.__name__ in ("SamplingParams", "BufferLimits"), value


def test_from_yaml_is_the_inverse_of_to_yaml_and_checks():
  config = load("gym=miniwob", "gym.options.scale=1", "collect.group_size=4")
  assert config_lib.from_yaml(config.to_yaml()) == config
  with pytest.raises(config_lib.ConfigError, match="min_valid=9"):
    config_lib.from_yaml("collect: {min_valid: 9}")


# Tuning the defaults must not decide which values contradict each other.
BASE = (
  "collect.group_size=8",
  "collect.min_valid=4",
  "sampling.max_new_tokens=32",
  "engine.context_length=512",
  "learner.row_length=512",
  "learner.rows=8",
  "learner.groups_per_step=8",
  "learner.minibatches=1",
  "learner.schedule=constant",
  "learner.warmup_steps=0",
  "learner.publish_every=1",
  "learner.skip_zero_advantage=true",
  "queue.max_staleness=0",
  "warm_start.steps=0",
  "collect.deadlines.turn=180",
  "collect.deadlines.episode=600",
)


# --- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
  "argument, suggestion",
  [
    ("learner.learning_rat=1", "'learner.learning_rate'"),
    ("temperature=0.5", "'sampling.temperature'"),
    ("agent.learning_rate=1", "'learner.learning_rate'"),
    ("lerner.steps=3", "'learner.steps'"),
    ("polic=x", "'policy'"),
    ("sed=3", "'seed'"),
    ("gym=minwob", "'miniwob'"),
    ("algorithm.advantage=GRPO", "'grpo'"),
    ("algorithm.loss_aggregation=token", "'token_mean'"),
    ("eval.modes=[greedi]", "'greedy'"),
    ("--dryrun", "'--dry-run'"),
    ("learner.zzzzqq=1", "learner has steps"),
    ("zzzzqq=1", "--help all lists every key"),
  ],
)
def test_what_is_unknown_is_refused_with_the_nearest_valid_one(
  argument, suggestion
):
  assert suggestion in refusal(argument)


@pytest.mark.parametrize(
  "argument, message",
  [
    ("learner.steps=x", "learner.steps='x' must be a whole number"),
    ("learner.steps=2.5", "must be a whole number"),
    ("learner.steps=true", "must be a whole number"),
    ("learner.learning_rate=0", "must be > 0"),
    ("learner.learning_rate=.inf", "finite"),
    ("sampling.top_p=1.5", "must be > 0, <= 1"),
    ("engine.prefill_buckets=[0]", "must be >= 1"),
    ("report.images=3", "true or false"),
    ("gym.options=3", "a mapping"),
    (
      "task_source.families=[1, [2]]",
      "task_source.families=['1', [2]] must be item 1 text",
    ),
    ("learner=3", "learner is a section"),
    ("steps", "write key=value"),
    ("tasks=[a", "not valid YAML"),
    ("task_source.families=[a,a]", "has one twice"),
  ],
)
def test_what_does_not_fit_is_refused_with_what_would(argument, message):
  assert message in refusal(argument)


@pytest.mark.parametrize(
  "argv, fields",
  [
    (
      ["collect.group_size=1", "collect.min_valid=1"],
      ["collect.group_size=1", ">= 2"],
    ),
    (["collect.min_valid=9"], ["collect.min_valid=9", "group_size=8"]),
    (["collect.min_valid=1"], ["collect.min_valid=1"]),
    (
      ["sampling.max_new_tokens=512"],
      ["sampling.max_new_tokens", "engine.context_length"],
    ),
    (
      ["learner.row_length=100"],
      ["learner.row_length=100", "engine.context_length"],
    ),
    (["engine.prefill_buckets=[64,32]"], ["must ascend"]),
    (["engine.prefill_buckets=[64,9999]"], ["engine.context_length"]),
    (
      ["engine.lockstep=true", "queue.max_staleness=1"],
      ["engine.lockstep", "queue.max_staleness=0"],
    ),
    (["mesh.data=3"], ["learner.rows=8", "mesh.data"]),
    (
      ["learner.minibatches=3"],
      ["learner.groups_per_step=8", "learner.minibatches=3"],
    ),
    (["steps=5", "learner.warmup_steps=6"], ["learner.warmup_steps=6"]),
    (
      ["steps=5", "learner.warmup_steps=5", "learner.schedule=cosine"],
      ["learner.warmup_steps=5"],
    ),
    (["sampling.top_k=5"], ["sampling.top_k=5", "importance=tis"]),
    (
      ["learner.publish_every=2"],
      ["learner.publish_every=2", "queue.max_staleness"],
    ),
    (["queue.capacity=3"], ["queue.capacity=3", ">= 8"]),
    (
      ["algorithm.kl_coef=0.1"],
      ["algorithm.kl_coef=0.1", "learner.skip_zero_advantage=false"],
    ),
    (["warm_start.source=path"], ["warm_start.path"]),
    (["warm_start.path=x"], ["warm_start.source=path"]),
    (
      ["policy=./qwen", "warm_start.source=embedded"],
      ["warm_start.source=embedded", "./qwen"],
    ),
    (
      ["gym=gymnasium", "tasks=[CartPole-v1]", "warm_start.steps=10"],
      ["has no oracle"],
    ),
    (["gym=gymnasium"], ["task_source.families is empty"]),
    (["collect.deadlines.turn=1000"], ["collect.deadlines.episode"]),
    (["collect.deadlines.model=400"], ["collect.deadlines.turn"]),
    (["eval.modes=[]"], ["eval.modes"]),
    (["eval.modes=[greedy,greedy]"], ["eval.modes", "twice"]),
    (["gym=miniwob", "gym.width=64"], ["gym.width=64", "160x210"]),
    (["gym=miniwob", "gym.height=96"], ["gym.height=96", "160x210"]),
    (
      ["gym=miniwob", "gym.options={scale: 2}"],
      ["gym.options.scale=2", "320x420"],
    ),
    (
      ["gym=browser", "gym.options={width: 300}"],
      ["gym.options.width=300", "set gym.width"],
    ),
    (
      ["gym=miniwob", "gym.options.difficulty=1"],
      ["gym.options.difficulty=1", "miniwob"],
    ),
    (
      ["gym=gymnasium", "tasks=[CartPole-v1]", "gym.options.difficulty=2"],
      ["gym.options.difficulty=2", "gymnasium"],
    ),
    (
      ["gym.options.dificulty=2"],
      ["gym.options.dificulty=2", "did you mean 'difficulty'"],
    ),
    (["gym.options.difficulty=x"], ["gym.options.difficulty='x'", "int"]),
    (["gym.options.width=256"], ["gym.options.width=256", "gym.width"]),
    (["gym.options.height=192"], ["gym.options.height=192", "gym.height"]),
    (
      ["gym=gymnasium", "tasks=[CartPole-v1]", "gym.options.env=Other"],
      ["gym.options.env=Other", "task_source.families"],
    ),
    (
      [
        "algorithm.kl_coef=0.1",
        "algorithm.kl_estimator=k1",
        "learner.skip_zero_advantage=false",
      ],
      ["algorithm.kl_estimator=k1", "k3"],
    ),
    (
      ["monitor.embedded=true", f"monitor.tags=[lr, {'x' * 51}]"],
      ["monitor.tags", "50 characters"],
    ),
    (
      ["agent.summary_at=300"],
      ["agent.summary_at=300", "agent.history=summary"],
    ),
    (["agent.summary_images=2"], ["summary_images=2", "history=summary"]),
    *(
      (["agent.history=summary", *argv], fields)
      for argv, fields in (
        (["agent.max_images=3"], ["max_images=3", "max_images=0"]),
        (["agent.older_scale=0.5"], ["older_scale=0.5", "history=window"]),
        (
          ["agent.max_images=2", "agent.summary=true"],
          ["agent.summary=True", "set agent.summary=False"],
        ),
        (["agent.summary_at=0"], ["summary_at=0", "> 0"]),
        (["agent.summary_at=300.5"], ["summary_at=300.5", "whole number"]),
        (
          ["agent.summary_at=600"],
          ["agent.summary_at=600", "set it below 448"],
        ),
        (
          ["agent.summary_at=1"],
          ["agent.summary_at=1 (512 tokens)", "engine.context_length=512"],
        ),
        (
          ["agent.summary_tokens=300"],
          ["agent.summary_at=0.6 (307 tokens)", "agent.summary_tokens=300"],
        ),
        (["agent.summary_images=0"], ["agent.summary_images=0"]),
        (["agent.summary_prompt="], ["summary_prompt is empty"]),
        (
          ["rollout.via=proxy", "rollout.agent=run_service"],
          ["rollout.agent=run_service", "agent.history=window"],
        ),
        (
          ["rollout.via=proxy", "rollout.agent=a.b:play"],
          ["rollout.agent=a.b:play", "agent.history=window"],
        ),
        (
          ["buffer.url=http://127.0.0.1:1", "buffer.start=false"],
          ["rollout.via=buffer", "agent.history=window"],
        ),
        (
          ["environment=gsm8k", "warm_start.steps=1"],
          ["warm_start.steps=1", "no summaries"],
        ),
      )
    ),
  ],
  ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_contradictions_name_the_fields_and_the_fix(argv, fields):
  load(*BASE)
  text = refusal(*BASE, *argv)
  for field in fields:
    assert field in text


def test_where_a_summary_is_asked_is_a_share_or_tokens():
  def bound(*argv):
    return load(*BASE, *argv).agent.summary_bound(512)

  assert bound() == 0
  assert bound("agent.history=summary") == 307
  assert bound("agent.history=summary", "agent.summary_at=0.25") == 128
  assert bound("agent.history=summary", "agent.summary_at=300") == 300


def test_an_evaluation_begins_with_the_runs_context_and_row():
  run = {"engine.context_length": 1280, "learner.row_length": 1280}
  layer = evaluate_config.of_run({**run, "learner.rows": 4}, {})
  assert layer == {**run, **evaluate_config.OF_A_RUN}
  # Those of another policy are its own.
  layer = evaluate_config.of_run(run, {"policy.name": "./other"})
  assert layer == evaluate_config.OF_A_RUN


def test_every_problem_is_reported_at_once():
  text = refusal("learner.stps=3", "gim=desktop")
  assert "2 problems" in text and "learner.steps" in text and "'gym'" in text
  text = refusal("steps=-1", "algorithm.importance=is")
  assert "learner.steps=-1" in text and "'tis'" in text


def test_a_name_of_ones_own_is_known_once_its_module_is_imported(
  tmp_path, monkeypatch
):
  assert "'mine'" in refusal("algorithm.advantage=mine")
  (tmp_path / "my_names.py").write_text(
    "from tunix.rl.multi_turn import rewards\n"
    "from tunix.rl.multi_turn.learner.algorithms import advantages\n"
    "rewards.register('mine_too')(lambda task, action: 0.0)\n"
    "advantages.ESTIMATORS.register('mine', advantages.grpo)\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  named = ("algorithm.advantage=mine", "reward=mine_too")
  config = load(*named, "run.imports=my_names")
  assert config.algorithm.advantage == "mine"
  assert config.environment.reward == "mine_too"
  # Closed choices stay closed.
  assert "cosine" in refusal("learner.schedule=mine", "run.imports=my_names")
  assert "cannot import" in refusal("run.imports=[not_there]")


def test_the_examples_in_the_help_are_accepted():
  """Each `section.field=value` in a text, with what that needs."""
  named = re.compile(r"\b(\w+\.[\w.]+=[^\s,;:]*[^\s,;:.)`])")
  with_its_needs = {
    "policy.config.layers=6": ["warm_start.source=none"],
    "gym.options.seconds_per_action=0.2": ["gym=miniwob"],
    "gym.observation=axtree": ["gym=miniwob"],
  }
  collected = set()
  for field in loader.leaves(TrainConfig).values():
    collected |= set(named.findall(field.doc))
  collected |= set(named.findall(documentation.REFERENCE_HEAD))
  assert {"gym.options.difficulty=1", *with_its_needs} <= collected
  for example in collected:
    load(example, *with_its_needs.get(example, ()))


def test_trees_bring_a_longer_context_and_refuse_recordings():
  for observation in ("axtree", "both"):
    trees = ("gym=miniwob", f"gym.observation={observation}")
    config = load(*trees)
    assert config.engine.context_length == config.learner.row_length == 2048
    problem = refusal(*trees, "warm_start.recordings=d.jsonl")
    assert "warm_start.recordings=d.jsonl" in problem
    assert f"gym.observation={observation}" in problem


def test_a_directory_is_a_policy():
  config = load("policy=./checkpoints/q")
  assert config.policy.name == "./checkpoints/q"
  assert config.warm_start.source == "none"  # It brings its weights.


def test_a_key_twice_in_one_file_under_two_names_is_refused(tmp_path):
  file = tmp_path / "c.yaml"
  file.write_text("seed: 1\nrun: {seed: 2}\n")
  assert "run.seed is given twice" in refusal(str(file))


def test_files_that_cannot_be_read_say_which_and_where(tmp_path):
  assert "cannot read" in refusal(str(tmp_path / "no.yaml"))
  bad = tmp_path / "bad.yaml"
  bad.write_text("a: [1\nb: 2\n")
  assert "bad.yaml is not valid YAML at line 2" in refusal(str(bad))
  bad.write_text("- 1\n")
  assert "must hold sections" in refusal(str(bad))
  bad.write_text("")
  assert "two configuration files" in refusal(str(bad), str(bad))
  assert load(str(bad)).gym.name == "desktop"


# --- documentation -----------------------------------------------------------


def help_of(capsys, *topic: str) -> str:
  with pytest.raises(SystemExit) as caught:
    load("--help", *topic)
  assert caught.value.code == 0
  return capsys.readouterr().out


def test_help_has_a_first_screen_and_every_field_behind_it(capsys):
  first = help_of(capsys)
  assert len(first.splitlines()) <= 64
  for name in loader.sections(TrainConfig):
    assert "." in name or re.search(rf"^  {name} ", first, re.M), name
  text = help_of(capsys, "all")
  joined = re.sub(r"\s+", " ", text)
  for path, field in loader.leaves(TrainConfig).items():
    head = f"  {path}={documentation.default_text(field)}  ("
    assert head + documentation.type_name(field) in text
    assert len(field.doc) > 10
    assert re.sub(r"\s+", " ", field.doc) in joined


def test_help_shows_what_the_default_gym_brings(capsys):
  first = help_of(capsys)
  assert load().learner.steps == 50
  assert re.search(r"^  steps=50 ", first, re.M)


def test_the_help_may_be_left_by_its_reader(tmp_path):
  program = (
    "import tunix_multi_turn; tunix_multi_turn.light()\n"
    "from tunix.rl.multi_turn.core import shell_hints\n"
    "import sys; sys.stdin.read(); shell_hints.show('x' * 200_000)\n"
  )
  child = subprocess.Popen(
    [sys.executable, "-c", program],
    cwd=tmp_path,
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  child.stdout.close()
  child.stdin.close()
  assert child.stderr.read() == "" and child.wait(60) == 0
  child.stderr.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_advice_about_a_groups_size_is_accepted_when_followed(size):
  alone = ["algorithm.advantage=reward"] if size == 1 else []
  problem = refusal(f"collect.group_size={size}", *alone)
  advised = re.search(r"(?:set|or) (collect\.min_valid=\d+) ", problem)[1]
  config = load(f"collect.group_size={size}", advised, *alone)
  assert config.collect.min_valid <= size


def test_a_mesh_names_its_devices_before_the_rows():
  problem = refusal("mesh.fsdp=8")
  assert problem.index("takes 8 devices") < problem.index("learner.rows=4")


def test_an_address_is_the_server_that_is_evaluated():
  config = config_lib.load_evaluation(["http://127.0.0.1:9/v1", "model=m"])
  assert config.evaluate.server == "http://127.0.0.1:9/v1"


def test_help_of_a_section_is_that_section(capsys):
  text = help_of(capsys, "learner")
  assert "learner.learning_rate=" in text
  assert not re.search(r"^  queue\.", text, re.M)
  assert "collect.deadlines.model=" in help_of(capsys, "collect")
  assert "'learner'" in refusal("--help", "lerner")


def test_aliases_and_presets_name_existing_fields_with_valid_values():
  paths = loader.leaves(TrainConfig)
  of_gym = {"gym.options.base_url", "gym.options.gym_id"}  # Of a gym server.
  assert set(config_lib.ALIASES.values()) <= set(paths) | of_gym
  for gym in gyms.names():
    spec = gyms.get(gym)
    presets = (spec.preset, spec.cloning_preset, spec.batch_preset)
    assert set().union(*presets) <= set(paths)
    if spec.lists_tasks or "task_source.families" in spec.preset:
      # As a machine without namespaces takes it.
      walls = "gym.options.isolation=processes"
      settings = [walls] if gym == "xdesktop" else []
      assert load(f"gym={gym}", *settings).gym.name == gym


def test_the_reference_in_docs_is_up_to_date():
  written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
  assert written == config_lib.reference(), (
    "run: python -m tunix.rl.multi_turn.config > docs/configuration.md"
  )


@pytest.mark.parametrize(
  "argv, words",
  [
    (
      ["queue.admission=finished"],
      "queue.admission=finished .*max_staleness=0",
    ),
    (["queue.admission=recent"], "queue.admission=recent .*max_staleness=0"),
    (
      ["collect.part_size=4"],
      "collect.part_size=4 delivers episodes in the order",
    ),
    (
      ["collect.part_size=4", "engine.lockstep=false"],
      "collect.part_size=4 .*queue.max_staleness=0 admits no group",
    ),
    (
      ["collect.part_size=4", "rollout.via=proxy"],
      "collect.part_size=4 .*queue.max_staleness=0 admits no group",
    ),
    (
      [
        "collect.part_size=4",
        "queue.max_staleness=1",
        "algorithm.overlong_tokens=64",
      ],
      "collect.part_size=4 .*algorithm.overlong_tokens=64.*to 0",
    ),
    (
      [
        "collect.part_size=4",
        "queue.max_staleness=1",
        "task_source.order=curriculum",
      ],
      "collect.part_size=4 .*task_source.order=curriculum.*in_turn",
    ),
    (
      ["collect.part_size=3", "queue.max_staleness=1"],
      "part_size=3 must divide collect.group_size=8",
    ),
    (
      [
        "collect.part_size=4",
        "queue.max_staleness=1",
        "algorithm.advantage=gigpo",
      ],
      "collect.part_size=4 splits groups.*gigpo",
    ),
    (
      [
        "collect.part_size=4",
        "queue.max_staleness=1",
        "queue.capacity=8",
        "learner.groups_per_step=8",
      ],
      "queue.capacity=8 can never hold the 16 groups",
    ),
    (
      [
        "rollout.via=hosts",
        "queue.max_staleness=1",
        "queue.admission=finished",
      ],
      "queue.admission=finished .*rollout.via=hosts",
    ),
    (
      ["rollout.via=hosts", "queue.max_staleness=1", "queue.admission=recent"],
      "queue.admission=recent .*rollout.via=hosts",
    ),
    (
      ["rollout.via=hosts", "queue.max_staleness=1", "collect.part_size=4"],
      "part_size=4 splits groups, which rollout.via=hosts lends whole",
    ),
  ],
)
def test_rules_of_asynchrony_that_contradict_each_other(argv, words):
  with pytest.raises(config_lib.ConfigError, match="(?s)" + words):
    load("collect.group_size=8", "collect.min_valid=2", *argv)
