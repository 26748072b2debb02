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

from tunix.rl.multi_turn.agents import presets as agent_presets
from tunix.rl.multi_turn.agents import registry as agents
from tunix.rl.multi_turn.config import checks
from tunix.rl.multi_turn.config import data_sections
from tunix.rl.multi_turn.config import documentation
from tunix.rl.multi_turn.config import evaluate_config
from tunix.rl.multi_turn.config import former_names
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import sealed
from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.core import credentials
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.core import yaml_text
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import registry as gyms
from tunix.rl.multi_turn.learner.algorithms import presets

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
    cls: its root class.
    aliases: short key -> dotted key.
    page: first screen of its `--help`.
    what: a directory that it resumes.
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


def from_dict(
    data: Mapping[str, Any], source: str = "config"
) -> TrainConfig:
  """Builds the configuration from nested or dotted keys; others keep defaults.

  Raises:
    ConfigError: naming every unknown key and wrong or contradictory value.
  """
  problems: list[str] = []
  former: set[str] = set()
  flat = _layer(data, _TRAIN, source, problems, former)
  return _resolve([flat], problems, former=former)


def _layer(
    data: Mapping[str, Any],
    command: _Command,
    source: str,
    problems: list[str],
    former: set[str],
) -> dict[str, Any]:
  """One layer as `loader.flatten` has it; `former` gets its former names."""
  layer = former_names.take(data, problems, former)
  return loader.flatten(
      layer,
      command.cls,
      command.aliases,
      source,
      problems,
      hidden=former_names.SETTINGS,
  )


def from_yaml(text: str, source: str = "config") -> TrainConfig:
  """As `from_dict`, of a YAML text."""
  return from_dict(parse_yaml(text, source), source)


def parse_yaml(text: str, source: str) -> dict[str, Any]:
  """The sections of a YAML text.

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


def _resolve(
    layers: Sequence[Mapping[str, Any]],
    problems: list[str],
    cls: type[TrainConfig] = TrainConfig,
    former: set[str] | None = None,
) -> TrainConfig:
  """Merges the chosen presets, then the layers; builds and checks.

  `former` are former names that the layers had; None for layers that no person
  wrote.

  Raises:
    ConfigError: `problems` and whatever else is found.
  """
  given: dict[str, Any] = {}
  for layer in layers:
    for path, value in layer.items():
      given[path] = loader.merge(given.get(path), value)
  if former is not None:
    of_run = cls is TrainConfig
    defaults = former_names.implied(former, given, of_run)
    for path, value in defaults.items():
      given.setdefault(path, value)
    former_names.announce(former)
    if agent := checkpoint_agent(given):
      _LOG.warning(
          "the checkpoint brings agent.name=%s, its grammar and context; set"
          " agent.name for another, agent.name=tool for the plain one", agent
      )
  _import_modules(given, problems)
  merged = {**_presets(given), **given}
  config = loader.build(cls, merged, [])
  if _can_clone(config):
    merged = {**gyms.get(config.gym.name, "operator").cloning_preset, **merged}
  refused: set[str] = set()
  config = loader.build(cls, merged, problems, refused=refused)
  problems += loader.name_problems(config)
  wrong = {p.partition("=")[0].split(":")[0] for p in problems} | refused
  problems += [
      p
      for p in checks.contradictions(config)
      if not any(key and key in p for key in wrong)
  ]
  # As given: a value that was refused is shown, too.
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


def _import_modules(given: Mapping[str, Any], problems: list[str]) -> None:
  """Imports run.imports: names of the user's own are known from here on."""
  names = loader.coerce(given.get("run.imports", ()), tuple[str, ...])
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
    "learner.row", "policy.", "mesh.", "processes.", "environment.", "agent.",
)  # pyformat: disable
"""Settings that decide what a batch must hold: with one of them given, a gym's
`batch_preset` need not fit."""


def _presets(given: Mapping[str, Any]) -> dict[str, Any]:
  """Defaults that depend on the chosen names, see the module docstring."""

  def chosen(path: str) -> str:
    default = loader.leaves(TrainConfig)[path].default
    return str(loader.unwrap(given.get(path, default)))

  found: dict[str, Any] = {}
  try:
    environment = environment_spec.get(chosen("environment.name"))
    if environment.gym:
      gym = gyms.get(chosen("gym.name"), "operator")
      found |= gym.preset
      if not any(path.startswith(_SHAPES_ROWS) for path in given):
        found |= gym.batch_preset
    found |= environment.preset
  except (ValueError, ImportError, TypeError):
    pass  # An unknown name is reported with all other names.
  agent = checkpoint_agent(given)
  if agent:
    found["agent.name"] = agent
  try:
    found |= agents.get(agent or chosen("agent.name")).preset
  except (ValueError, ImportError):
    pass  # Likewise.
  if name := chosen("algorithm.name"):
    try:
      found |= presets.get(name).settings
    except (ValueError, ImportError):
      pass  # Likewise.
  policy = chosen("policy.name")
  if policy not in checks.SHIPPED:
    found["warm_start.source"] = "none"
  return found | data_sections.presets(chosen)


def checkpoint_agent(given: Mapping[str, Any]) -> str:
  """Returns the agent that a published checkpoint brings, or "".

  Settings of an agent, and environments that are not played on a screen, keep
  their own.

  Args:
    given: Settings by dotted key, without defaults.
  """
  if {"agent.name", "agent.parser"} & set(given):
    return ""
  environment = str(loader.unwrap(given.get("environment.name", "cua")))
  policy = str(loader.unwrap(given.get("policy.name", "")))
  if environment != "cua" or not policy:
    return ""
  return agent_presets.of_checkpoint(policy)


def changed(config: TrainConfig) -> dict[str, Any]:
  """Settings that repeat a configuration -> what they are if left out, plain.

  Those that are not their default, also where a preset or another setting chose
  the value; and those that are, against a preset's choice.
  """
  found = loader.changed(config)
  given = {path: loader.value_of(config, path) for path in found}
  chosen = _presets(given)
  if _can_clone(config):
    chosen = {**gyms.get(config.gym.name, "operator").cloning_preset, **chosen}
  for path, value in chosen.items():
    value = loader.plain(loader.unwrap(value))
    if path not in found and value != loader.value_of(config, path):
      found[path] = value
  return found


def _can_clone(config: TrainConfig) -> bool:
  """Whether demonstrations for the embedded policy can be had."""
  families = config.task_source.families
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
  """`[config.yaml] key=value … [--dry-run]` to a checked configuration.

  `run.name` is filled in when absent. With `run.resume`, that run's
  config.yaml is the base unless a file is given.

  Raises:
    ConfigError: listing every problem.
    SystemExit: after `--help` was printed.
  """
  problems: list[str] = []
  former: set[str] = set()
  overrides, files = _read_arguments(argv, problems, _TRAIN, former)
  layers, resume = _base(overrides, files, problems, _TRAIN, former)
  try:
    return _named(
        _resolved(layers, overrides, problems, resume, _TRAIN, former)
    )
  except ConfigError as error:
    raise ConfigError(_with_flags(error.problems, argv)) from None


def load_evaluation(argv: Sequence[str]) -> EvaluationConfig:
  """As `load_config` for the command `evaluate`; may name a directory first.

  With `evaluate.run`, that run's settings are the lowest layer.

  Raises:
    ConfigError: listing every problem.
    SystemExit: after `--help` was printed.
  """
  problems: list[str] = []
  former: set[str] = set()
  overrides, files = _read_arguments(argv, problems, _EVALUATE, former)
  layers, resume = _base(overrides, files, problems, _EVALUATE, former)
  if not resume:
    layers = [dict(evaluate_config.DEFAULTS), *layers]
    given: dict[str, Any] = {}
    for layer in [*layers, *overrides]:
      given |= layer
    if run := str(loader.unwrap(given.get("evaluate.run", "")) or ""):
      recorded = _recorded(run, "evaluate.run", problems, _TRAIN)
      of_run = evaluate_config.of_run(recorded, given)
      place = {"run.dir": str(pathlib.Path(run) / "evaluations")}
      layers = [layers[0], {**of_run, **place}, *layers[1:]]
    elif loader.unwrap(given.get("task_source.source")) not in (
        None, "generated"
    ):  # pyformat: disable
      layers[0] = {**layers[0], "eval.episodes_per_task": 0}
  config = _resolved(layers, overrides, problems, resume, _EVALUATE, former)
  assert isinstance(config, EvaluationConfig)
  return _named(config)


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


def _base(
    overrides: Sequence[Mapping[str, Any]],
    files: Sequence[str],
    problems: list[str],
    command: _Command,
    former: set[str],
) -> tuple[list[dict[str, Any]], str]:
  """(the layers below the overrides, the directory that is resumed or "")."""
  if len(files) > 1:
    problems.append(
        f"two configuration files, {files[0]} and {files[1]}; give one"
    )
  layers = [
      _read(pathlib.Path(file), problems, command, former)
      for file in files[:1]
  ]
  resume = ""
  for layer in [*layers, *overrides]:
    resume = str(loader.unwrap(layer.get("run.resume", resume)) or "")
  if resume and not files:
    given = {path for layer in overrides for path in layer}
    if elsewhere := sorted(given & {"run.name", "run.dir"}):
      problems.append(
          f"{' and '.join(elsewhere)} together with run.resume={resume}: a"
          " resumed run continues in its own directory; leave out one of them"
      )
    layers = [_recorded(resume, "run.resume", problems, command)]
  return layers, "" if files else resume


def _resolved(
    layers: Sequence[Mapping[str, Any]],
    overrides: Sequence[Mapping[str, Any]],
    problems: list[str],
    resume: str,
    command: _Command,
    former: set[str],
) -> TrainConfig:
  try:
    return _resolve([*layers, *overrides], problems, command.cls, former)
  except ConfigError as error:
    if resume and (hint := _damage(resume)):
      raise ConfigError([hint, *error.problems]) from None
    raise


def _named(config: Any) -> Any:
  if config.run.name:
    return config
  run = dataclasses.replace(config.run, name=_default_name(config))
  return dataclasses.replace(config, run=run)


def _default_name(config: TrainConfig) -> str:
  """A name that no other start chooses, not in the same second either."""
  found = environment_spec.get(config.environment.name)
  what = config.gym.name if found.gym else config.environment.name
  stamp = time.strftime("%Y%m%d-%H%M%S")
  return f"{re.sub('[:/.]', '-', what)}-{stamp}-{secrets.token_hex(3)}"


def _read_arguments(
    argv: Sequence[str],
    problems: list[str],
    command: _Command,
    former: set[str],
) -> tuple[list[dict[str, Any]], list[str]]:
  """(overrides, files) of a command line; `former` gets its former names."""
  written: list[tuple[str, loader.Raw]] = []
  overrides: list[dict[str, Any]] = []
  files: list[str] = []
  taken: set[int] = set()
  for place, argument in enumerate(argv):
    if argument in ("--help", "-h"):
      topic = next(iter(argv[place + 1 : place + 2]), "")
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
    if place in taken:
      continue  # The value of an option before it.
    if argument == "--compare" and command is _EVALUATE:
      taken.add(place + 1)
      other = next(iter(argv[place + 1 : place + 2]), "")
      if not other:
        problems.append("--compare needs the directory of an evaluation")
      overrides.append({"evaluate.compare": loader.Raw(other, other)})
    elif argument == "--dry-run":
      overrides.append({"run.dry_run": True})
    elif command is _TRAIN and (flag := _rollout_flag(argument)):
      used, value = _read_flag(flag, place, argv, overrides, problems)
      taken.update(used)
      if value is not None:
        written.append((argument.partition("=")[0], value))
    elif argument.startswith("-") and former_names.is_token(argument):
      if "=" not in argument:
        taken.add(place + 1)
      problems.append(
          "settings have no dashes: write project_token=…, or set"
          " $TUNIX_MONITOR_TOKEN"
      )
    elif argument.startswith("-"):
      override, took_next = _as_override(
          argument, argv[place + 1 :], command
      )
      taken |= {place + 1} if took_next else set()
      if override:
        problems.append(
            f"unknown option {argument}; settings have no dashes: write"
            f" {override}"
        )
        continue
      hint = loader.nearest(argument, ("--help", "--dry-run"))
      problems.append(
          f"unknown option {argument}{hint or ';'} settings are key=value,"
          " without dashes"
      )
    elif "=" not in argument and argument.endswith((".yaml", ".yml")):
      files.append(argument)
    elif "=" not in argument and command is _EVALUATE and (
        found := _directory(argument)
    ):  # pyformat: disable
      overrides.append(found)
    elif command is _EVALUATE and argument.startswith(("http://", "https://")):
      overrides.append(
          {"evaluate.server": loader.Raw(argument, argument)}
      )
    elif "=" not in argument and command is _EVALUATE and overrides:
      problems.append(
          f"{argument}: a second thing to be measured, or families of tasks?"
          f" Measure one, and write tasks={argument} for families"
      )
    elif "=" not in argument and command is _EVALUATE:
      problems.append(
          f"{argument} is the directory of no run (config.yaml), policy"
          " (config.json) or evaluation (evaluation.json), and no key=value;"
          " give one of them"
      )
    else:
      try:
        key, value = loader.parse_override(argument)
      except ConfigError as error:
        problems += error.problems
        continue
      written.append((key, value))
      overrides.append(_layer({key: value}, command, "", problems, former))
  problems += former_names.conflicts(written, command.aliases)
  return overrides, files


def _directory(argument: str) -> dict[str, Any]:
  """The override that a directory stands for: a run, or a policy."""
  place = pathlib.Path(argument).expanduser()
  if (place / "evaluation.json").is_file():
    return {"run.resume": loader.Raw(argument, argument)}
  if (place / "config.yaml").is_file():
    return {"evaluate.run": loader.Raw(argument, argument)}
  if (place / "config.json").is_file():
    return {"policy.name": loader.Raw(argument, argument)}
  return {}


def _rollout_flag(argument: str) -> str:
  """The short key that an option of `ROLLOUT_FLAGS` means; "" for others."""
  dashes, _, name = argument.partition("=")[0].partition("--")
  name = name.replace("-", "_")
  return name if not dashes and name in data_sections.ROLLOUT_FLAGS else ""


def _read_flag(
    flag: str,
    place: int,
    argv: Sequence[str],
    overrides: list[dict[str, Any]],
    problems: list[str],
) -> tuple[set[int], loader.Raw | None]:
  """Adds the setting that `argv[place]` means to the overrides.

  Returns:
    Places of arguments that are its value, and the value; None where it is
    missing or cannot be read.
  """
  path = data_sections.ROLLOUT_FLAGS[flag]
  _, equals, text = argv[place].partition("=")
  used: set[int] = set()
  if loader.leaves(TrainConfig)[path].type is bool and not equals:
    text = "true"
  elif not equals:
    if place + 1 >= len(argv) or argv[place + 1].startswith("--"):
      problems.append(f"{argv[place]} needs a value, for {path}")
      return used, None
    text, used = argv[place + 1], {place + 1}
  try:
    _, value = loader.parse_override(f"{flag}={text}")
  except ConfigError as error:
    problems += error.problems
    return used, None
  overrides.append(
      loader.flatten({flag: value}, TrainConfig, ALIASES, "", problems)
  )
  return used, value


def _with_flags(problems: Sequence[str], argv: Sequence[str]) -> list[str]:
  """Problems of settings that were given as options begin with these."""
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
    argument: str, rest: Sequence[str], command: _Command
) -> tuple[str, bool]:
  """(the setting that `--key value` or `--key=value` means or "", whether the
  next argument is its value)."""
  key, equals, value = argument.lstrip("-").partition("=")
  known = {*command.aliases, *loader.leaves(command.cls)}
  found = next(
      (k for k in (key, key.replace("-", "_"), key.replace("-", "."))
       if k in known),
      "",
  )  # pyformat: disable
  if not found:
    return "", False
  follows = bool(rest) and not equals and "=" not in rest[0] and (
      not rest[0].startswith("--")
  )
  if follows:
    value = rest[0]
  return f"{found}={shlex.quote(value) if value else '…'}", follows


def _recorded(
    directory: str, key: str, problems: list[str], command: _Command
) -> dict[str, Any]:
  """The settings in the config.yaml of a directory."""
  file = pathlib.Path(directory).expanduser() / "config.yaml"
  if not file.is_file():
    problems.append(
        f"{key}={directory} is not a run directory (no config.yaml in it);"
        f" give {command.what}"
    )
    return {}
  return _read(file, problems, command, set())


def _damage(resume: str) -> str:
  """Tells whether config.yaml of a run may be why its settings are refused."""
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


def _read(
    path: pathlib.Path,
    problems: list[str],
    command: _Command,
    former: set[str],
) -> dict[str, Any]:
  try:
    data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
  except UnicodeDecodeError as error:
    problems.append(f"{path} is not text in UTF-8: {error}")
  except OSError as error:
    problems.append(f"cannot read {path}: {error.strerror}")
  except ConfigError as error:
    problems += error.problems
  else:
    return _layer(data, command, str(path), problems, former)
  return {}


def reference() -> str:
  """The text of docs/configuration.md."""
  return documentation.reference(EvaluationConfig, ALIASES, choices())


def choices() -> dict[str, Mapping[str, Any]]:
  """Settings that are defaults for a choice, by what is chosen."""
  found: dict[str, Mapping[str, Any]] = {}
  for name in environment_spec.ENVIRONMENTS.names():
    found[f"environment={name}"] = environment_spec.get(name).preset
  for name in gyms.names():
    found[f"gym={name}"] = gyms.get(name, "operator").preset
  for name in gyms.names():
    found[
        f"gym={name}, if no setting of "
        + ", ".join(f"`{p}*`" for p in _SHAPES_ROWS) + " is given"
    ] = gyms.get(name, "operator").batch_preset
  for name in gyms.names():
    found[f"gym={name}, if its oracle knows every task"] = gyms.get(
        name, "operator"
    ).cloning_preset
  for name in agents.AGENTS.names():
    found[f"agent={name}"] = agents.get(name).preset
  for name in presets.PRESETS.names():
    found[f"algorithm={name}"] = presets.get(name).settings
  found["a policy without weights in this package"] = {
      "warm_start.source": "none"
  }
  found.update(data_sections.CHOICES)
  return found
