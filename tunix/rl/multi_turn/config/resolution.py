"""Resolves layers of settings to one checked configuration.

`load_config(argv)` merges, later wins: the defaults of the settings classes,
the presets of the chosen environment, gym, agent, policy and algorithm, a YAML
file, `key=value` overrides.

Promises: all problems of a command line and its file are reported at once:
unknown keys, values of a wrong type or range, unknown names, contradictions.
A contradiction with a value that is wrong by itself is not reported beside it.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
import secrets
import shlex
import sys
import time
from typing import Any, Callable, Mapping, Sequence, TypeVar

from tunix.rl.multi_turn.agents import agent_registry as agents
from tunix.rl.multi_turn.agents import presets as agent_presets
from tunix.rl.multi_turn.config import checks
from tunix.rl.multi_turn.config import data_sections
from tunix.rl.multi_turn.config import documentation
from tunix.rl.multi_turn.config import evaluate_config
from tunix.rl.multi_turn.config import former_names
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import sealed
from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.core import yaml_text
from tunix.rl.multi_turn.environments import environment_settings
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.learner.algorithms import presets
from tunix.rl.multi_turn.net import credentials

TrainConfig = train_config.TrainConfig
EvaluationConfig = evaluate_config.EvaluationConfig
ConfigError = loader.ConfigError
ALIASES = train_config.ALIASES
T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Command:
  """A command's configuration.

  Attributes:
    cls: Root class of its settings.
    aliases: Short key -> dotted key.
    page: First screen of its `--help`.
    what: Description of a directory that it resumes.
  """

  cls: type
  aliases: Mapping[str, str]
  page: documentation.Page
  what: str


_TRAIN = _Command(TrainConfig, ALIASES, documentation.TRAIN, "runs/<name>")
_EVALUATE = _Command(
  EvaluationConfig,
  evaluate_config.ALIASES,
  documentation.EVALUATE,
  "an evaluation's directory",
)


def from_dict(data: Mapping[str, Any], source: str = "config") -> TrainConfig:
  """Builds the configuration from nested or dotted keys; others keep defaults.

  Raises:
    ConfigError: naming every unknown key and wrong or contradictory value.
  """
  reader = _Reader(_TRAIN)
  return reader.resolve([reader.layer(data, source)])


def from_yaml(text: str, source: str = "config") -> TrainConfig:
  """Builds the configuration from a YAML text; see `from_dict`."""
  return from_dict(parse_yaml(text, source), source)


def parse_yaml(text: str, source: str) -> dict[str, Any]:
  """Returns the sections of a YAML text.

  Raises:
    ConfigError: not YAML, or no sections.
  """
  try:
    data = yaml_text.parse(text)
  except yaml_text.YamlError as error:
    raise ConfigError([f"{source} {error}"]) from None
  if data is None:
    return {}
  if not isinstance(data, dict):
    raise ConfigError(
      [f"{source} must hold sections, got a {type(data).__name__}"]
    )
  return data


def _import_modules(settings: Mapping[str, Any], problems: list[str]) -> None:
  """Imports run.imports, which may register names of the user's own."""
  names = loader.coerce(settings.get("run.imports", ()), tuple[str, ...])
  for name in names if isinstance(names, tuple) else ():
    try:
      registry.import_module(str(name))
    except (ImportError, ValueError) as error:
      problems.append(
        f"run.imports={name}: cannot import it: {error}; name a module as"
        " Python imports it, of an installed package or a folder of"
        " PYTHONPATH"
      )


_SHAPES_ROWS = (
  "learner.row",
  "policy.",
  "mesh.",
  "processes.",
  "environment.",
  "agent.",
)
"""Settings that decide what a batch must hold: with one of them given, a gym's
`batch_preset` need not fit."""


def _presets(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the chosen names' defaults; see the module docstring."""

  def chosen(path: str) -> str:
    default = loader.leaves(TrainConfig)[path].default
    return str(loader.unwrap(settings.get(path, default)))

  defaults: dict[str, Any] = {}
  try:
    environment = environment_spec.get(chosen("environment.name"))
    if environment.gym:
      gym = gyms.get(chosen("gym.name"), "operator")
      defaults |= gym.preset
      if not any(path.startswith(_SHAPES_ROWS) for path in settings):
        defaults |= gym.batch_preset
      if chosen("gym.observation") != "screenshot":
        defaults |= environment_settings.TREE_PRESET
    defaults |= environment.preset
  except (ValueError, ImportError, TypeError):
    pass  # Reported with all other names.
  agent = checkpoint_agent(settings)
  if agent:
    defaults["agent.name"] = agent
  try:
    defaults |= agents.get(agent or chosen("agent.name")).preset
    if agent and "learner.row_length" in settings:
      defaults["engine.context_length"] = settings["learner.row_length"]
  except (ValueError, ImportError):
    pass  # Reported with all other names.
  if name := chosen("algorithm.name"):
    try:
      defaults |= presets.get(name).settings
    except (ValueError, ImportError):
      pass  # Reported with all other names.
  policy = chosen("policy.name")
  if policy not in checks.SHIPPED:
    defaults["warm_start.source"] = "none"
  return defaults | data_sections.presets(chosen)


def checkpoint_agent(settings: Mapping[str, Any]) -> str:
  """Returns the agent that a published checkpoint brings, or "".

  Settings of an agent, and environments that are not played on a screen, keep
  their own.

  Args:
    settings: Settings by dotted key, without defaults.
  """
  if {"agent.name", "agent.parser"} & set(settings):
    return ""
  environment = str(loader.unwrap(settings.get("environment.name", "cua")))
  policy = str(loader.unwrap(settings.get("policy.name", "")))
  if environment != "cua" or not policy:
    return ""
  gym = str(loader.unwrap(settings.get("gym.name", "desktop")))
  try:
    phone = gyms.get(gym, "operator").box == "android"
  except (ValueError, ImportError, TypeError):
    phone = False  # Reported with all other names.
  return agent_presets.of_checkpoint(policy, phone)


def changed(config: TrainConfig) -> dict[str, Any]:
  """Returns the settings that repeat a configuration -> their defaults, plain.

  Each differs from the default of its class, a value chosen by a preset
  included, or has that default although a preset chooses another value.
  """
  defaults = loader.changed(config)
  chosen = _presets({key: loader.value_of(config, key) for key in defaults})
  if _can_clone(config):
    chosen = {**gyms.get(config.gym.name, "operator").cloning_preset, **chosen}
  for path, value in chosen.items():
    value = loader.plain(loader.unwrap(value))
    if path not in defaults and value != loader.value_of(config, path):
      defaults[path] = value
  return defaults


def _can_clone(config: TrainConfig) -> bool:
  """Whether the gym's oracle can demonstrate every task of the run."""
  families = config.warm_start.families or config.task_source.families
  if config.warm_start.source != "embedded" or not families:
    return False
  try:
    if not environment_spec.get(config.environment.name).gym:
      return False
    solved = gyms.get(config.gym.name, "operator").load_oracle().families
  except (ValueError, ImportError, TypeError):
    return False
  return solved is None or all(family in solved for family in families)


def load_config(argv: Sequence[str]) -> TrainConfig:
  """Reads `[config.yaml] key=value … [--dry-run]` to a checked configuration.

  `run.name` is filled in when absent. With `run.resume`, that run's
  config.yaml is the base unless a file is given.

  Raises:
    ConfigError: listing every problem.
    SystemExit: after `--help` was printed.
  """
  reader = _Reader(_TRAIN)
  reader.arguments(argv)
  reader.read_base()
  try:
    return reader.finished()
  except ConfigError as error:
    raise ConfigError(_with_flags(error.problems, argv)) from None


def load_evaluation(argv: Sequence[str]) -> EvaluationConfig:
  """As `load_config` for the command `evaluate`; may name a directory first.

  With `evaluate.run`, that run's settings are the lowest layer.

  Raises:
    ConfigError: listing every problem.
    SystemExit: after `--help` was printed.
  """
  reader = _Reader(_EVALUATE)
  reader.arguments(argv)
  reader.read_base()
  if not reader.resume:
    layers = reader.layers = [dict(evaluate_config.DEFAULTS), *reader.layers]
    settings: dict[str, Any] = {}
    for layer in [*layers, *reader.overrides]:
      settings |= layer
    if run := str(loader.unwrap(settings.get("evaluate.run", "")) or ""):
      recorded = reader.recorded(run, "evaluate.run", _TRAIN)
      of_run = evaluate_config.of_run(recorded, settings)
      place = {"run.dir": str(pathlib.Path(run) / "evaluations")}
      layers.insert(1, {**of_run, **place})
    elif loader.unwrap(settings.get("task_source.source")) not in (
      None,
      "generated",
    ):
      layers[0]["eval.episodes_per_task"] = 0
  config = reader.finished()
  assert isinstance(config, EvaluationConfig)
  return config


def load_first(argv: Sequence[str], load: Callable[[Sequence[str]], T]) -> T:
  """Loads a program's configuration before it imports what needs JAX.

  A wrong setting is refused, and the help printed, without those seconds.

  Args:
    argv: Arguments of the command.
    load: `load_config` or `load_evaluation`.

  Raises:
    SystemExit: After the help or the problems were printed (status 2), or at an
      interrupt (130).
  """
  try:
    return load(argv)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print("interrupted before the run began", file=sys.stderr)
    sys.exit(130)


class _Reader:
  """Reads one configuration of a command, and collects its problems.

  Attributes:
    overrides: Layers of the command line.
    layers: Layers below the overrides, the lowest first.
    resume: Directory whose config.yaml is the base; "" for none.
    problems: Problems of all layers.
  """

  def __init__(self, command: _Command):
    self._command = command
    self._files: list[str] = []
    self._former: set[str] = set()
    self.overrides: list[dict[str, Any]] = []
    self.layers: list[dict[str, Any]] = []
    self.resume = ""
    self.problems: list[str] = []

  # --- layers ----------------------------------------------------------------

  def layer(self, data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns one layer as `loader.flatten` has it; notes its former names."""
    layer = former_names.take(data, self.problems, self._former)
    return loader.flatten(
      layer,
      self._command.cls,
      self._command.aliases,
      source,
      self.problems,
      hidden=former_names.SETTINGS,
    )

  def _read(self, path: pathlib.Path) -> dict[str, Any]:
    try:
      data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
      self.problems.append(f"{path} is not text in UTF-8: {error}")
    except OSError as error:
      self.problems.append(f"cannot read {path}: {error.strerror}")
    except ConfigError as error:
      self.problems += error.problems
    else:
      return self.layer(data, str(path))
    return {}

  def recorded(
    self, directory: str, key: str, command: _Command
  ) -> dict[str, Any]:
    """Returns the settings in the config.yaml of a directory.

    Args:
      directory: Run or evaluation directory.
      key: Setting that names it.
      command: Command that wrote it.
    """
    file = pathlib.Path(directory).expanduser() / "config.yaml"
    if not file.is_file():
      self.problems.append(
        f"{key}={directory} is not a run directory (no config.yaml in it);"
        f" give {command.what}"
      )
      return {}
    writer = _Reader(command)  # Its former names are not the user's.
    layer = writer._read(file)
    self.problems += writer.problems
    return layer

  def read_base(self) -> None:
    """Reads the layer below the overrides: a file, or a resumed directory's."""
    files = self._files
    if len(files) > 1:
      self.problems.append(
        f"two configuration files, {files[0]} and {files[1]}; give one"
      )
    self.layers = [self._read(pathlib.Path(file)) for file in files[:1]]
    resume = ""
    for layer in [*self.layers, *self.overrides]:
      resume = str(loader.unwrap(layer.get("run.resume", resume)) or "")
    if not resume or files:
      return
    self.resume = resume
    keys = {path for layer in self.overrides for path in layer}
    if elsewhere := sorted(keys & {"run.name", "run.dir"}):
      self.problems.append(
        f"{' and '.join(elsewhere)} together with run.resume={resume}: a"
        " resumed run continues in its own directory; leave out one of them"
      )
    self.layers = [self.recorded(resume, "run.resume", self._command)]

  # --- the command line ------------------------------------------------------

  def arguments(self, argv: Sequence[str]) -> None:
    """Reads a command line's overrides and files."""
    evaluates = self._command is _EVALUATE
    used: set[int] = set()  # Places of values of options before them.
    for place, argument in enumerate(argv):
      following = next(iter(argv[place + 1 : place + 2]), "")
      if argument in ("--help", "-h"):
        self._show_help(following)
      if place in used:
        continue
      if argument == "--dry-run":
        self.overrides.append({"run.dry_run": True})
      elif not evaluates and (flag := _rollout_flag(argument)):
        used |= self._read_flag(flag, place, argv)
      elif argument.startswith("-"):
        if self._refuse_option(argument, argv[place + 1 :]):
          used.add(place + 1)
      elif "=" not in argument and argument.endswith((".yaml", ".yml")):
        self._files.append(argument)
      elif evaluates and self._read_subject(argument):
        continue
      else:
        try:
          key, value = loader.parse_override(argument)
        except ConfigError as error:
          self.problems += error.problems
          continue
        self.overrides.append(self.layer({key: value}, ""))

  def _override(self, key: str, text: str) -> None:
    self.overrides.append({key: loader.Raw(text, text)})

  def _show_help(self, topic: str) -> None:
    command = self._command
    shell_hints.show(
      documentation.help_text(
        command.cls,
        command.aliases,
        choices(),
        topic,
        command.page,
        _presets({}) if command is _TRAIN else evaluate_config.DEFAULTS,
      )
    )
    raise SystemExit(0)

  def _read_subject(self, argument: str) -> bool:
    """Reads a word of `evaluate` that names its subject; False for others."""
    if argument.startswith(("http://", "https://")):
      self._override("evaluate.server", argument)
    elif "=" in argument:
      return False
    elif argument == "grounding":
      self._override("gym.name", argument)
    elif key := _directory_key(argument):
      self._override(key, argument)
    elif self.overrides:
      self.problems.append(
        f"{argument}: a second thing to be measured, or families of tasks?"
        f" Measure one, and write tasks={argument} for families"
      )
    else:
      self.problems.append(
        f"{argument} is the directory of no run (config.yaml), policy"
        " (config.json) or evaluation (evaluation.json), and no key=value;"
        " give one of them"
      )
    return True

  def _read_flag(self, flag: str, place: int, argv: Sequence[str]) -> set[int]:
    """Adds the setting that `argv[place]` means to the overrides.

    Returns:
      Places of arguments that are its value.
    """
    path = data_sections.ROLLOUT_FLAGS[flag]
    _, equals, text = argv[place].partition("=")
    used: set[int] = set()
    if loader.leaves(TrainConfig)[path].type is bool and not equals:
      text = "true"
    elif not equals:
      if place + 1 >= len(argv) or argv[place + 1].startswith("--"):
        self.problems.append(f"{argv[place]} needs a value, for {path}")
        return used
      text, used = argv[place + 1], {place + 1}
    try:
      _, value = loader.parse_override(f"{flag}={text}")
    except ConfigError as error:
      self.problems += error.problems
      return used
    self.overrides.append(
      loader.flatten({flag: value}, TrainConfig, ALIASES, "", self.problems)
    )
    return used

  def _refuse_option(self, argument: str, following: Sequence[str]) -> bool:
    """Refuses an option with dashes; whether the next argument is its value."""
    if former_names.is_token(argument):
      self.problems.append(
        "settings have no dashes: write project_token=…, or set"
        " $TUNIX_MONITOR_TOKEN"
      )
      return "=" not in argument
    override, has_value = _as_override(argument, following, self._command)
    if override:
      self.problems.append(
        f"unknown option {argument}; settings have no dashes: write {override}"
      )
    else:
      hint = registry.did_you_mean(argument, ("--help", "--dry-run"))
      self.problems.append(
        f"unknown option {argument}{hint or ';'} settings are key=value,"
        " without dashes"
      )
    return has_value

  # --- the configuration -----------------------------------------------------

  def finished(self) -> Any:
    """Returns the checked configuration, with a name.

    Raises:
      ConfigError: listing every problem.
    """
    try:
      config = self.resolve([*self.layers, *self.overrides])
    except ConfigError as error:
      if self.resume and (hint := _damage(self.resume)):
        raise ConfigError([hint, *error.problems]) from None
      raise
    if config.run.name:
      return config
    run = dataclasses.replace(config.run, name=_default_name(config))
    return dataclasses.replace(config, run=run)

  def resolve(self, layers: Sequence[Mapping[str, Any]]) -> Any:
    """Merges the chosen presets, then the layers; builds and checks.

    Raises:
      ConfigError: listing `problems` and every other one.
    """
    cls, problems = self._command.cls, self.problems
    settings: dict[str, Any] = {}
    for layer in layers:
      for path, value in layer.items():
        settings[path] = loader.merge(settings.get(path), value)
    defaults = former_names.implied(
      self._former, settings, self._command is _TRAIN
    )
    settings = {**defaults, **settings}
    former_names.announce(self._former)
    if agent := checkpoint_agent(settings):
      _LOG.warning(
        "the checkpoint brings agent.name=%s: %s; set agent.name for another,"
        " agent.name=tool for the plain one",
        agent,
        agent_presets.reason(agent),
      )
    _import_modules(settings, problems)
    merged = _presets(settings)
    for path, value in settings.items():
      merged[path] = loader.merge(merged.get(path), value)
    config = loader.build(cls, merged, [])
    if _can_clone(config):
      gym = gyms.get(config.gym.name, "operator")
      merged = {**gym.cloning_preset, **merged}
    refused: set[str] = set()
    config = loader.build(cls, merged, problems, refused=refused)
    problems += loader.name_problems(config)
    wrong = {p.partition("=")[0].split(":")[0] for p in problems} | refused
    problems += [
      p
      for p in checks.contradictions(config)
      if not any(key and key in p for key in wrong)
    ]
    # Of the values as they were written: a refused one is shown, too.
    secret = [
      one
      for path, value in merged.items()
      for one in credentials.of_settings(loader.unwrap(value), path)
    ]
    for one in secret:
      for text in one.secrets:
        if len(text) > 3:  # No secret, and part of many words.
          problems = [p.replace(text, credentials.MASK) for p in problems]
    problems += checks.secrets(secret)
    if problems:
      raise ConfigError(list(dict.fromkeys(problems)))
    return config


def _default_name(config: TrainConfig) -> str:
  """Returns a name that no other start chooses, in the same second either."""
  environment = environment_spec.get(config.environment.name)
  what = config.gym.name if environment.gym else config.environment.name
  stamp = time.strftime("%Y%m%d-%H%M%S")
  return f"{re.sub('[:/.]', '-', what)}-{stamp}-{secrets.token_hex(3)}"


def _directory_key(argument: str) -> str:
  """Returns the setting that a directory is the value of; "" for others."""
  place = pathlib.Path(argument).expanduser()
  for file, key in (
    ("evaluation.json", "run.resume"),
    ("config.yaml", "evaluate.run"),
    ("config.json", "policy.name"),
  ):
    if (place / file).is_file():
      return key
  return ""


def _rollout_flag(argument: str) -> str:
  """Returns the short key that an option of `ROLLOUT_FLAGS` means, or ""."""
  dashes, _, name = argument.partition("=")[0].partition("--")
  name = name.replace("-", "_")
  return name if not dashes and name in data_sections.ROLLOUT_FLAGS else ""


def _with_flags(problems: Sequence[str], argv: Sequence[str]) -> list[str]:
  """Puts an option's name before each problem of the setting it stands for."""
  options = {
    data_sections.ROLLOUT_FLAGS[flag]: argument.partition("=")[0]
    for argument in argv
    if (flag := _rollout_flag(argument))
  }
  named = []
  for problem in problems:
    key = re.match(r"[\w.]*", problem)[0]  # type: ignore[index]
    named.append(f"{options[key]}: {problem}" if key in options else problem)
  return named


def _as_override(
  argument: str, following: Sequence[str], command: _Command
) -> tuple[str, bool]:
  """Reads `--key value` or `--key=value` as a setting.

  Returns:
    The override, "" where it is none, and whether the next argument is its
    value.
  """
  key, equals, value = argument.lstrip("-").partition("=")
  keys = {*command.aliases, *loader.leaves(command.cls)}
  spellings = (key, key.replace("-", "_"), key.replace("-", "."))
  setting = next((k for k in spellings if k in keys), "")
  if not setting:
    return "", False
  follows = (
    bool(following)
    and not equals
    and "=" not in following[0]
    and (not following[0].startswith("--"))
  )
  if follows:
    value = following[0]
  return f"{setting}={shlex.quote(value) if value else '…'}", follows


def _damage(resume: str) -> str:
  """Returns a hint if a run's config.yaml was changed since, else ""."""
  file = pathlib.Path(resume).expanduser() / "config.yaml"
  try:
    text = file.read_text(encoding="utf-8", errors="replace")
  except OSError:
    return ""
  if sealed.is_sealed(text):
    return ""
  return (
    f"{file} is not as the run wrote it (its last line is no digest of the"
    " others); restore it from a copy, or correct these values in it"
  )


def reference() -> str:
  """The text of docs/configuration.md."""
  return documentation.reference(EvaluationConfig, ALIASES, choices())


def choices() -> dict[str, Mapping[str, Any]]:
  """Settings that are defaults for a choice, by what is chosen."""
  presets_of: dict[str, Mapping[str, Any]] = {}
  for name in environment_spec.ENVIRONMENTS.names():
    presets_of[f"environment={name}"] = environment_spec.get(name).preset
  all_gyms = {name: gyms.get(name, "operator") for name in gyms.names()}
  shapes = ", ".join(f"`{p}*`" for p in _SHAPES_ROWS)
  for name, gym in all_gyms.items():
    presets_of[f"gym={name}"] = gym.preset
  for name, gym in all_gyms.items():
    presets_of[f"gym={name}, if no setting of {shapes} is given"] = (
      gym.batch_preset
    )
  for name, gym in all_gyms.items():
    presets_of[f"gym={name}, if its oracle knows every task"] = (
      gym.cloning_preset
    )
  for name in agents.AGENTS.names():
    presets_of[f"agent={name}"] = agents.get(name).preset
  for name in presets.PRESETS.names():
    presets_of[f"algorithm={name}"] = presets.get(name).settings
  presets_of["a policy without weights in this package"] = {
    "warm_start.source": "none"
  }
  return presets_of | data_sections.CHOICES
