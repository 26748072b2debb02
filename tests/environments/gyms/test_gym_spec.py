"""One declaration of a gym: what it promises, and what it refuses."""

import subprocess
import sys

import numpy as np
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import registry as core_registry
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import gym_registry
from tunix.rl.multi_turn.environments.gyms import spec as spec_lib
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import tasks as run_tasks

HERE = __name__


class LampGym:
  """Shows a screen of its own size."""

  def __init__(
    self, lamps: int = 1, width: int = 128, height: int = 96, pages: int = 0
  ):
    self.lamps, self.size, self.pages = lamps, (width, height), pages

  def start(self, task):
    del task
    return self._show()

  def act(self, action):
    del action
    return self._show()

  def evaluate(self):
    return base.Evaluation(1.0, True)

  def close(self):
    pass

  def _show(self):
    return base.Observation(np.zeros((*self.size[::-1], 3), np.uint8))


class LampTasks:
  """Tasks of any family, each with a colour."""

  def __init__(self, families=None, colour: str = "red", lamps: int = 1):
    self.names, self.colour, self.lamps = families or ("lit",), colour, lamps

  def families(self):
    return self.names

  def train_task(self, family, index, seed=0):
    del seed
    return base.Task(f"{family}/{index}/{self.colour}", family, seed=index)

  def eval_task(self, family, index, seed=0):
    return self.train_task(family, -1 - index, seed)


closed = []


async def close_shared():
  closed.append(True)


GYM = gyms.GymSpec(
  doc="one lit lamp",
  make=LampGym,
  tasks=f"{HERE}:LampTasks",
  set_by_run={**gyms.SIZE, "pages": "concurrency"},
  family_options=lambda family: {"lamps": len(family)},
  check=lambda options, width, height: iter(
    ["gym.options.lamps: too many"] if options.get("lamps", 1) > width else []
  ),
  close_shared=close_shared,
)


@pytest.fixture(name="lamps")
def _lamps():
  gyms.register("lamps", GYM)
  yield gyms.get("lamps")
  assert gyms.unregister("lamps")


# --- the registry -------------------------------------------------------------


@pytest.mark.slow
def test_a_name_costs_its_declaration_and_nothing_else():
  """No gym's code, and none of what it needs, is imported by naming it."""
  code = """if True:
      import sys
      import tunix_multi_turn
      tunix_multi_turn.light()
      from tunix.rl.multi_turn.environments import gyms
      before = set(sys.modules)
      for name in gyms.names():
        spec = gyms.get(name)
        assert spec.name == name and spec.doc, name
      new = {m for m in set(sys.modules) - before
             if m.startswith(("cua_gyms", "tunix"))}
      inside = {"desktop"}
      expected = {f"{gyms.__name__}.{n}" for n in inside} | {"cua_gyms"}
      expected |= {f"cua_gyms.{n}" for n in set(gyms.names()) - inside}
      assert new == expected, new ^ expected
      assert not {"websockets", "xcffib", "gymnasium"} & set(sys.modules)
  """
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_gym_here_is_declared_once_and_builds_what_it_names():
  for name in gyms.names():
    spec = gyms.get(name)
    assert not spec.cloning_preset or spec.oracle, name
    for path in (
      spec.make,
      spec.tasks,
      spec.oracle,
      spec.describe,
      spec.oracle_families,
      spec.family_options,
      spec.task_list,
      spec.close_shared,
    ):
      if isinstance(path, str):
        try:
          assert core_registry.import_path(path) is not None
        except ImportError as error:
          assert error.name and not error.name.startswith("tunix"), path
    try:
      options = spec.options
    except ImportError:
      continue  # A driver is missing here.
    assert set(spec.set_by_run) <= set(options), name


def test_a_gym_is_registered_under_a_name_once(lamps):
  assert gyms.get("lamps") is lamps and lamps.name == "lamps"
  assert isinstance(gyms.make("lamps", lamps=3), LampGym)
  with pytest.raises(ValueError, match="already registered"):
    gyms.register("lamps", GYM)
  with pytest.raises(TypeError, match="must be a GymSpec.*got 3"):
    gyms.register("lamp", 3)
  with pytest.raises(ValueError, match="did you mean 'lamps'"):
    gyms.get("lampz")
  assert "lamps" in gym_registry.GYMS


def test_a_plain_class_is_a_gym_with_defaults():
  spec = gyms.get(f"{HERE}:LampGym", "operator")
  assert spec.make is LampGym and spec.tasks is None
  assert spec.name == f"{HERE}:LampGym"
  assert gyms.get(f"{HERE}:GYM", "operator").doc == GYM.doc
  gym = gyms.from_config({"name": f"{HERE}:GYM", "lamps": 2}, "operator")
  assert gym.lamps == 2
  with pytest.raises(TypeError, match="GymSpec"):
    gyms.get(f"{HERE}:HERE", "operator")
  with pytest.raises(ImportError):
    gyms.get(f"{HERE}:NoGym", "operator")


# --- options ------------------------------------------------------------------


def test_options_are_the_parameters_of_both_factories(lamps):
  assert set(lamps.options) == {"lamps", "width", "height", "pages", "colour"}
  both = {"lamps": 3, "colour": "blue", "width": 200}
  gym, tasks = lamps.make_gym(both), lamps.make_tasks(("a",), both)
  assert (gym.lamps, gym.size) == (3, (200, 96))
  assert (tasks.lamps, tasks.colour, tasks.names) == (3, "blue", ("a",))
  assert lamps.make_tasks().families() == ("lit",)


@pytest.mark.parametrize(
  "options, words",
  [
    ({"lamp": 3}, "'lamp'; did you mean 'lamps'? Known: colour, height"),
    ({"lamps": "x"}, "lamps='x': gym 'lamps' takes int"),
    ({"lamps": True}, "lamps=True"),
    ({"lamps": 1.5}, "lamps=1.5"),
    ({"colour": 3}, "colour=3: gym 'lamps' takes str"),
  ],
)
def test_wrong_options_are_refused_by_whoever_is_made(lamps, options, words):
  for make in (lamps.make_gym, lambda o: lamps.make_tasks((), o)):
    with pytest.raises(ValueError) as caught:
      make(options)
    assert words in str(caught.value)
  (problem,) = lamps.problems(options, 128, 96, ("a",))
  assert problem.startswith("gym.options.") and words in problem


def test_a_missing_option_is_named():
  spec = spec_lib.as_spec(lambda *, pages: LampGym(), "web")
  with pytest.raises(ValueError, match="'web' needs option 'pages'"):
    spec.make_gym({})


@pytest.mark.parametrize(
  "kind, good, bad",
  [
    (int, [3], ["3", 3.5, True, None]),
    (float, [3, 2.5], ["3", True]),
    (bool, [True], [1, "yes"]),
    (str, ["a"], [1]),
    (int | None, [None, 3], ["a"]),
    (tuple[int, int], [[1, 2], (1, 2)], [[1], ["a", 2]]),
    (dict[str, int], [{"a": 1}], [{"a": "b"}, 3]),
  ],
)
def test_annotated_types_are_held_to_as_yaml_gives_values(kind, good, bad):
  def make(value):
    return value

  make.__annotations__["value"] = kind
  spec = spec_lib.GymSpec(make=make, name="typed")
  option = spec.options["value"]
  assert all(option.accepts(v) for v in good)
  assert not any(option.accepts(v) for v in bad)


def test_a_factory_that_takes_anything_is_given_anything():
  spec = spec_lib.GymSpec(make=lambda **options: options, name="any")
  assert spec.make_gym({"a": 1}) == {"a": 1}
  assert not list(spec.problems({"a": 1}, 1, 1, ("f",)))


def test_a_factory_that_takes_anything_is_spared_the_options_of_the_other():
  spec = spec_lib.GymSpec(
    make=lambda **options: options, tasks=LampTasks, name="any"
  )
  both = {"colour": "blue", "a": 1}
  assert spec.make_gym(both) == {"a": 1}
  assert spec.make_tasks((), both).colour == "blue"


# --- what a run sets ----------------------------------------------------------


def test_what_belongs_to_the_run_is_set_by_the_run(lamps):
  options = lamps.options_of("abc", size=(160, 120), concurrency=5)
  assert options == {"lamps": 3, "width": 160, "height": 120, "pages": 5}
  assert lamps.options_of("a") == {"lamps": 1}
  problems = list(
    lamps.problems({"width": 3, "pages": 2, "lamps": 999}, 64, 64, ())
  )
  assert [p.split(":")[0] for p in problems] == [
    "task_source.families is empty and gym.name=lamps has no default tasks;"
    " list at least one, e.g. tasks=[FrozenLake-v1]",
    "gym.options.width=3",
    "gym.options.pages=2",
    "gym.options.lamps",
  ]
  assert "set collect.concurrency instead" in problems[2]
  assert not list(lamps.problems({}, 64, 64, None))


def test_one_registered_object_is_all_that_a_run_needs(lamps):
  del lamps
  config, tasks = run_tasks.resolve(config_lib.load_config([
      "gym=lamps", "tasks=[abc]", "gym.options.colour=blue",
      f"run.imports=[{HERE}]", "collect.concurrency=7",
  ]))  # fmt: skip
  assert tasks.train_task("abc", 2).task_id == "abc/2/blue"
  gym = episodes_lib.make_gym(config, "abc")
  assert (gym.lamps, gym.size, gym.pages) == (3, (128, 96), 7)
  with pytest.raises(config_lib.ConfigError, match="did you mean 'colour'"):
    config_lib.load_config(
      [
        "gym=lamps",
        "tasks=[abc]",
        "gym.options.color=blue",
        f"run.imports=[{HERE}]",
      ]
    )


def test_a_path_names_a_gym_of_a_run():
  path = f"{HERE}:GYM"
  config = config_lib.load_config([f"gym={path}", "tasks=[abc]"])
  assert config.run.name.startswith(HERE.replace(".", "-") + "-GYM-")
  config, tasks = run_tasks.resolve(config)
  assert tasks.families() == ("abc",)
  assert isinstance(episodes_lib.make_gym(config, "abc"), LampGym)
  for wrong in (f"{HERE}:HERE", f"{HERE}:Nothing", "no.such:GYM"):
    with pytest.raises(config_lib.ConfigError, match="gym.name="):
      config_lib.load_config([f"gym={wrong}", "tasks=[abc]"])


# --- oracles and shared parts -------------------------------------------------


def test_an_oracle_needs_both_its_functions():
  with pytest.raises(ValueError, match="need each other"):
    gyms.GymSpec(make=LampGym, oracle=lambda gym: None)
  with pytest.raises(ValueError, match="'lamps' has no oracle"):
    spec_lib.as_spec(GYM, "lamps").load_oracle()
  oracle = gyms.get("miniwob").load_oracle()
  assert "click-test-2" in oracle.families and callable(oracle.act)
  assert gyms.get("desktop").load_oracle().families is None


async def test_what_is_shared_is_closed():
  await GYM.load_close_shared()()
  assert closed == [True]
  assert gyms.get("desktop").load_close_shared() is None
  # Without a browser on this loop there is nothing to close.
  await gyms.get("miniwob").load_close_shared()()


def test_a_check_whose_package_is_absent_is_a_problem_and_no_traceback():
  spec = gyms.GymSpec(
    doc="x", make=LampGym, tasks=LampTasks, check="no_such_package:check"
  )
  (problem,) = spec.problems({}, 64, 64, ("f",))
  assert "no_such_package" in problem
