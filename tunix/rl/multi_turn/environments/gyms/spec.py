"""Declares a gym in one frozen `GymSpec`, which the rest of the package reads.

    GYM = GymSpec(
        doc="a dark screen with one lit lamp",
        make="my_lamps.gym:LampGym",
        tasks="my_lamps.gym:LampTasks",
    )

A gym's options are the parameters of `make` and of `tasks`: there is no second
declaration. An unknown option, or one of another type than annotated, is
refused before anything is built. One mapping of options serves both factories;
each gets those that it takes.

Promises: a "module:attribute" path is imported when it is first needed, so that
importing a declaration imports neither a browser, a desktop nor their drivers.

Does not: know its users (runs, the gym server, play), or the other gyms.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Callable, Iterable, Iterator, Literal, Mapping, Sequence

from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import json_models

RunFact = Literal[
  "family", "width", "height", "size", "concurrency", "observation"
]
"""A value that belongs to the whole run, not to the gym alone. `size` is
(width, height), `concurrency` the number of episodes that run at a time,
`observation` what the policy sees of the screen."""

RUN_KEYS: Mapping[RunFact, str] = types.MappingProxyType(
  {
    "family": "task_source.families",
    "width": "gym.width",
    "height": "gym.height",
    "size": "gym.width and gym.height",
    "concurrency": "collect.concurrency",
    "observation": "gym.observation",
  }
)
"""Keys of a run's configuration that set these."""

SIZE: Mapping[str, RunFact] = types.MappingProxyType(
  {"width": "width", "height": "height"}
)
"""`set_by_run` of a gym with options `width` and `height`."""

BOUNDS: Mapping[str, tuple[float, float]] = types.MappingProxyType(
  {
    "width": (1, bounds.MAX_SIDE),
    "height": (1, bounds.MAX_SIDE),
    "size": (1, bounds.MAX_SIDE),
    "difficulty": (0, 2),
    "seed": (0, bounds.LARGEST),
    "scale": (0.1, 4),
    "max_pages": (1, 256),
    "timeouts": (0, 3600),
    "tree_characters": (200, 1_000_000),
  }
)
"""Bounds of the numbers that a client of a service may choose, by the option's
name; those whose name ends in `_s`, seconds, have (0, 3600). `GymSpec.bounds`
adds a gym's own."""
_SECONDS = (0, 3600)

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Oracle:
  """Solves a gym's tasks by looking into it. All may be coroutine functions.

  Attributes:
    act: gym -> the next right action, None at the end. LookupError: this task
      cannot be solved.
    describe: (gym, x, y) -> the phrase for the thing at a pixel, or None.
    families: Families that it solves; None = every family of the gym.
    summarize: gym -> what the policy would write about the turns so far, where
      it is asked for a summary. None: it writes none.
  """

  act: Callable[[Any], Any]
  describe: Callable[[Any, float, float], Any]
  families: tuple[str, ...] | None = None
  summarize: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GymSpec:
  """Declares a gym. All but `make` is optional.

  A field that holds a function may hold its "module:attribute" path instead.

  Attributes:
    make: `(**options) -> Gym`, a class or function.
    doc: one line for lists of gyms.
    tasks: `(**options) -> TaskSet`; one with a parameter `families` gets the
      chosen ones, None for all. None: the gym makes no tasks of its own.
    levels: difficulties that its tasks come in, easiest first:
      `train_task(…, difficulty=level)`; () where there is one only.
    name: the registered one; the registry fills it in.
    preset: configuration keys and their defaults where this gym is chosen;
      files and overrides win over them.
    cloning_preset: more of them, where the run starts from the embedded
      weights and the oracle knows every task of it: those weights have never
      seen the gym.
    batch_preset: learner.patches and learner.targets as the first update of
      the gym's default run would decide them: known beforehand, the learner's
      programs compile beside the first evaluation. Defaults where no setting is
      given that rows or patches follow from.
    oracle, describe: see `Oracle.act` and `Oracle.describe`; None: no oracle.
    oracle_families, summarize: see `Oracle`.
    tree_oracle: an `Oracle` whose actions name elements of the tree by id;
      None: there is none.
    set_by_run: options that a run sets itself, with the fact they are set to;
      `gym.options` must not contain them.
    family_options: `family -> options`, defaults for a family's episodes.
    check: `(options, width, height) -> problems`, an iterator of texts: option
      values that do not go with one another, or with the screen's size.
    needs: `(options) -> problems`, an iterator of texts: programs, packages and
      keys that the gym takes from its machine and that are missing there, each
      with what to do. None: it needs nothing beyond this package.
    lists_tasks: whether the gym itself lists its families, so that a run need
      not name any.
    task_list: `(**options) -> list of CUATask`, for task_source.source=gym;
      None: the gym has no such list.
    starts_by_id: whether a task's id alone is enough for `start`, whatever its
      family.
    size_known_after_start: whether the size of its screen is unknown until it
      has started; a run then starts it once to check the size.
    close_shared: coroutine function that closes what the gyms of an event loop
      share (a browser); called on that loop after the last episode.
    box: Kind of its worlds, a computer ("linux") or a phone ("android").
    bounds: option -> (lowest, highest) number that a client of a service may
      choose, beside `BOUNDS`; a number without bounds is the operator's.
    runs_inline: whether its calls are cheap enough (well under a millisecond)
      for the event loop itself, without a task each.
    digest: `(outcomes, pictures) -> dict`, what an evaluation's episodes say
      beside their success, for evaluation.json. `outcomes` are those of
      episodes.jsonl as dicts, with the `details` of the gym's evaluations;
      `pictures` the folder that it may write to. Its key `lines` is printed and
      shown in the report, `pictures` names the files that the report shows.
    operator_options: Options that name code, programs, files, addresses or
      rights of this machine; a server never lets a client choose them.
  """

  make: Callable[..., base.Gym] | str
  doc: str = ""
  tasks: Callable[..., base.TaskSet] | str | None = None
  levels: tuple[int, ...] = ()
  name: str = ""
  preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  cloning_preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  batch_preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  oracle: Callable[[Any], Any] | str | None = None
  describe: Callable[[Any, float, float], Any] | str | None = None
  oracle_families: tuple[str, ...] | str | None = None
  summarize: Callable[[Any], Any] | str | None = None
  tree_oracle: Oracle | str | None = None
  set_by_run: Mapping[str, RunFact] = dataclasses.field(default_factory=dict)
  family_options: Callable[[str], Mapping[str, Any]] | str | None = None
  check: Callable[[Mapping[str, Any], int, int], Iterator[str]] | str | None = (
    None
  )
  needs: Callable[[Mapping[str, Any]], Iterator[str]] | str | None = None
  lists_tasks: bool = False
  task_list: Callable[..., Sequence[Any]] | str | None = None
  starts_by_id: bool = False
  size_known_after_start: bool = False
  close_shared: Callable[[], Any] | str | None = None
  bounds: Mapping[str, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )
  runs_inline: bool = False
  digest: (
    Callable[[Sequence[Mapping[str, Any]], Any], dict[str, Any]] | str | None
  ) = None
  operator_options: tuple[str, ...] = ()
  box: Literal["linux", "android"] = "linux"

  def __post_init__(self):
    if (self.oracle is None) != (self.describe is None):
      raise ValueError(
        f"gym {self.name!r}: oracle={self.oracle!r} and"
        f" describe={self.describe!r} need each other; set both or none"
      )

  # --- options ---------------------------------------------------------------

  @functools.cached_property
  def options(self) -> Mapping[str, arguments.Option]:
    """The options of the gym and of its tasks, by name.

    Raises:
      ImportError: the gym's package is missing.
    """
    return {**self._tasks_take.options, **self._gym_takes.options}

  def problems(
    self,
    options: Mapping[str, Any],
    width: int,
    height: int,
    families: Sequence[str] | None,
    levels: Sequence[int] = (),
  ) -> Iterator[str]:
    """Finds errors in a run's configuration of this gym, each with its fix.

    Args:
      options: gym.options.
      width, height: Size of the screenshots, in pixels.
      families: Families that the run names; None where a list of tasks names
        them.
      levels: task_source.levels.
    """
    if strange := [level for level in levels if level not in self.levels]:
      offered = f"has levels {list(self.levels)}" if self.levels else "has none"
      yield (
        f"task_source.levels={list(levels)} holds {strange[0]}, and"
        f" gym.name={self.name} {offered}; choose from these, or leave it out"
      )
    if families is not None and not families and not self.lists_tasks:
      yield (
        f"{RUN_KEYS['family']} is empty and gym.name={self.name} has no"
        " default tasks; list at least one, e.g. tasks=[FrozenLake-v1]"
      )
    of_run = [name for name in self.set_by_run if name in options]
    for name in of_run:
      yield (
        f"gym.options.{name}={options[name]}: the whole run has to know"
        f" this; set {RUN_KEYS[self.set_by_run[name]]} instead"
      )
    own = {k: v for k, v in options.items() if k not in of_run}
    try:
      mistakes = dict(self._wrong(own))
    except ImportError:
      return  # Building the gym reports what to install.
    yield from (f"gym.options.{text}" for text in mistakes.values())
    if not mistakes:
      try:
        yield from self.misfits(own, width, height)
      except ImportError as error:  # It says what to install.
        yield f"gym.name={self.name}: {error}"

  def misfits(
    self, options: Mapping[str, Any], width: int, height: int
  ) -> Iterator[str]:
    """Problems of options that are right each by itself; see `check`."""
    if self.check is not None:
      yield from _loaded(self.check)(options, width, height)

  def check_client_settings(self, names: Iterable[str], where: str) -> None:
    """Checks which options a server lets its clients choose.

    Args:
      names: The options.
      where: The server's setting that lists them.

    Raises:
      ValueError: an option is the operator's alone.
    """
    for name in names:
      if name in self.operator_options:
        raise ValueError(
          f"{where}={name!r} would let a client choose code, files or"
          f" addresses of this machine through gym {self.name!r}; leave it"
          " out, and set it yourself"
        )

  def bounds_of(self, name: str) -> tuple[float, float] | None:
    """(lowest, highest) number of an option that a client may choose."""
    default = _SECONDS if name.endswith("_s") else BOUNDS.get(name)
    return self.bounds.get(name, default)

  def unbounded(self, name: str) -> bool:
    """Whether the option is a number for which no bounds are declared."""
    option = self.options.get(name)
    kinds = {option.type, *typing.get_args(option.type)} if option else set()
    return bool(kinds & {int, float}) and self.bounds_of(name) is None

  def out_of_bounds(
    self, options: Mapping[str, Any], prefix: str
  ) -> Iterator[str]:
    """Problems of option values that a client of a service chose.

    Args:
      options: The client's; numbers in objects and lists are checked as well.
      prefix: Put before the fields' names, e.g. "options.gym.".
    """
    for name, value in options.items():
      option = self.options.get(name)
      if option is not None and not option.accepts(value):
        yield (
          f"{prefix}{name}={json_models.short(value)} must be"
          f" {option.annotation}"
        )
      yield from self._numbers_out_of_bounds({name: value}, prefix)
    size = options.get("width"), options.get("height")
    if isinstance(size[0], int) and isinstance(size[1], int):
      if problem := bounds.screen_problem(size[0], size[1], prefix):
        yield problem

  def _numbers_out_of_bounds(
    self, options: Mapping[str, Any], prefix: str
  ) -> Iterator[str]:
    for name, value in options.items():
      if isinstance(value, Mapping):
        yield from self._numbers_out_of_bounds(value, f"{prefix}{name}.")
        continue
      for number in value if isinstance(value, list) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
          continue
        limits = self.bounds_of(name)
        if limits is None:
          yield (
            f"{prefix}{name}={number!r} is a number without bounds, which"
            " only the operator sets (GymSpec.bounds)"
          )
        elif not limits[0] <= number <= limits[1]:
          yield (
            f"{prefix}{name}={json_models.short(number)} must be in"
            f" [{limits[0]}, {limits[1]}]"
          )

  def missing(self, options: Mapping[str, Any] = _NOTHING) -> Iterator[str]:
    """Yields what this machine lacks for the gym, with the fix; see `needs`."""
    if self.needs is not None:
      yield from _loaded(self.needs)(options)

  def options_of(
    self,
    family: str,
    *,
    size: tuple[int, int] | None = None,
    concurrency: int | None = None,
    observation: str | None = None,
  ) -> dict[str, Any]:
    """Options for episodes of a family: its defaults, and the run's facts.

    Args:
      family: Family of the tasks.
      size: (width, height) of the screenshots; None leaves it to the gym.
      concurrency: episodes that run at a time; None leaves it to the gym.
      observation: Parts of the screen that the policy sees; None leaves it to
        the gym.
    """
    facts: dict[str, Any] = {"family": family}
    if size is not None:
      facts |= {"width": size[0], "height": size[1], "size": size}
    if concurrency is not None:
      facts["concurrency"] = concurrency
    if observation is not None:
      facts["observation"] = observation
    defaults = self.family_options and _loaded(self.family_options)(family)
    of_run = {
      option: facts[fact]
      for option, fact in self.set_by_run.items()
      if fact in facts
    }
    return {**(defaults or {}), **of_run}

  # --- what it makes ---------------------------------------------------------

  def make_gym(self, options: Mapping[str, Any] = _NOTHING) -> base.Gym:
    """Builds the gym; options of its tasks alone are left out.

    Raises:
      ValueError: an unknown, missing or wrong option.
      ImportError: the gym's package is missing.
    """
    self._refuse(options, self._gym_takes)
    factory = _loaded(self.make)
    own = self._gym_takes.of(options, self._tasks_take)
    return factory(**own)

  def make_tasks(
    self,
    families: Sequence[str] | None = None,
    options: Mapping[str, Any] = _NOTHING,
  ) -> base.TaskSet:
    """Builds the tasks of the gym; options of the gym alone are left out.

    Args:
      families: Families to offer; None or empty for all.
      options: Options of the gym and its tasks.

    Raises:
      ValueError: a gym without tasks, an unknown family, or an unknown,
        missing or wrong option.
      ImportError: the gym's package is missing.
    """
    if self.tasks is None:
      raise ValueError(
        f"gym.name={self.name} makes no tasks of its own; set"
        " task_source.source=jsonl and task_source.path, or give its GymSpec"
        " `tasks`"
      )
    self._refuse(options, self._tasks_take)
    own = self._tasks_take.of(options, self._gym_takes)
    factory = _loaded(self.tasks)
    if "families" in arguments.takes(factory):
      own["families"] = tuple(families) if families else None
    return factory(**own)

  def list_tasks(self, options: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
    """Returns the `CUATask`s of the gym's own list.

    Raises:
      ValueError: the gym has no list, or a wrong option.
    """
    if self.task_list is None:
      raise ValueError(
        f"task_source.source=gym is the list of a gym server, but"
        f" gym.name={self.name}; set gym.name=genv, or another source"
      )
    factory = _loaded(self.task_list)
    return factory(**arguments.takes(factory).of(options))

  def load_digest(
    self,
  ) -> Callable[[Sequence[Mapping[str, Any]], Any], dict[str, Any]] | None:
    """Returns `digest`, imported; None for a gym without."""
    return None if self.digest is None else _loaded(self.digest)

  def check_screenshots(self, options: Mapping[str, Any]) -> None:
    """Refuses options with which the gym shows trees.

    For callers that pass on screenshots only.

    Raises:
      ValueError: The options show a tree.
    """
    observation = options.get("observation", "screenshot")
    if self.has_trees and observation != "screenshot":
      raise ValueError(
        f"observation={observation!r}: only runs (gym.observation) read"
        f" trees; leave it out for gym {self.name!r} here"
      )

  @property
  def has_trees(self) -> bool:
    """Whether it can show accessibility trees."""
    return "observation" in self.set_by_run.values()

  def load_oracle(self, observation: str = "screenshot") -> Oracle:
    """Returns the oracle, imported.

    Args:
      observation: gym.observation; an oracle of trees names elements by id.

    Raises:
      ValueError: the gym has none.
    """
    if observation != "screenshot" and self.tree_oracle is not None:
      return _loaded(self.tree_oracle)
    if observation != "screenshot":
      raise ValueError(
        f"gym {self.name!r} has no oracle that names elements by id; play it"
        " with gym.observation=screenshot, or give its GymSpec `tree_oracle`"
      )
    if self.oracle is None or self.describe is None:
      raise ValueError(
        f"gym {self.name!r} has no oracle to demonstrate it; play it"
        " yourself, or give its GymSpec `oracle` and `describe`"
      )
    return Oracle(
      _loaded(self.oracle),
      _loaded(self.describe),
      _loaded(self.oracle_families),
      _loaded(self.summarize),
    )

  def load_close_shared(self) -> Callable[[], Any] | None:
    """`close_shared`, imported."""
    return _loaded(self.close_shared)

  # --- inside ----------------------------------------------------------------

  @functools.cached_property
  def _gym_takes(self) -> arguments.Takes:
    return arguments.takes(_loaded(self.make))

  @functools.cached_property
  def _tasks_take(self) -> arguments.Takes:
    takes = arguments.Takes({})
    if self.tasks is not None:
      takes = arguments.takes(_loaded(self.tasks))
    options = {k: v for k, v in takes.options.items() if k != "families"}
    return arguments.Takes(options, takes.anything)

  def _wrong(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(option, message) of each that is unknown or of another type."""
    if not options:
      return  # Nothing is imported for nothing.
    anything = self._gym_takes.anything or self._tasks_take.anything
    takes = arguments.Takes(self.options, anything)
    yield from takes.wrong(options, f"gym {self.name!r}")

  def _refuse(self, options: Mapping[str, Any], takes: arguments.Takes) -> None:
    problems = [text for _, text in self._wrong(options)]
    problems += [
      f"gym {self.name!r} needs option {name!r}"
      f" ({takes.options[name].annotation or 'any value'}); set"
      f" gym.options.{name}"
      for name in takes.required
      if name not in options
    ]
    if problems:
      raise ValueError("\n".join(problems))


def as_spec(value: object, name: str = "") -> GymSpec:
  """`value` as a spec: itself, or a plain gym class or factory with defaults.

  Raises:
    TypeError: `value` is neither a spec nor callable.
  """
  if isinstance(value, GymSpec):
    return value if value.name else dataclasses.replace(value, name=name)
  if callable(value):
    return GymSpec(make=value, name=name)
  raise TypeError(
    f"gym {name!r} must be a GymSpec, or a class or function that makes a"
    f" gym; got {value!r}"
  )


def _loaded(value: object) -> Any:
  return registry.import_path(value) if isinstance(value, str) else value
