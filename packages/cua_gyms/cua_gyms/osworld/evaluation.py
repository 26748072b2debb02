"""Implements the OSWorld evaluators that a machine's server can answer.

An evaluator names metrics (`func`) and where their arguments come from
(`result`, `expected`), each a getter. Those here ask for nothing but the
machine's HTTP server; the others of OSWorld (office files, browsers over
DevTools, gold files from the network) are refused by name before an episode
begins. More are added with `METRICS.register` and `GETTERS.register`.
"""

from __future__ import annotations

from typing import Any, Awaitable, Callable, Mapping, Protocol

from tunix.rl.multi_turn.core import registry


class Machine(Protocol):
  """The calls that getters make to a machine."""

  async def execute(
    self, command: str | list[str], shell: bool = False
  ) -> Mapping[str, Any]:
    """{"output", "error", "returncode"} of a command."""
    ...

  async def file(self, path: str) -> bytes | None:
    """Returns a file's bytes, None when there is none."""
    ...

  async def ask(self, method: str, path: str, **body: Any) -> Any:
    """JSON of any other call."""
    ...


Getter = Callable[[Machine, Mapping[str, Any]], Awaitable[Any]]
Metric = Callable[..., float]
GETTERS: registry.Registry[Getter] = registry.Registry("OSWorld getter")
METRICS: registry.Registry[Metric] = registry.Registry("OSWorld metric")


@GETTERS.register("rule")
async def rule(machine, config):
  del machine
  return config["rules"]


@GETTERS.register("vm_command_line")
async def vm_command_line(machine, config):
  reply = await machine.execute(config["command"], config.get("shell", False))
  return reply.get("output")


@GETTERS.register("vm_command_error")
async def vm_command_error(machine, config):
  reply = await machine.execute(config["command"], config.get("shell", False))
  return reply.get("error")


@GETTERS.register("vm_file")
async def vm_file(machine, config):
  """The file's bytes, where OSWorld gives the path of a copy."""
  return await machine.file(config["path"])


@GETTERS.register("vm_terminal_output")
async def vm_terminal_output(machine, config):
  del config
  return (await machine.ask("GET", "/terminal")).get("output")


@GETTERS.register("vm_screen_size")
async def vm_screen_size(machine, config):
  del config
  return await machine.ask("POST", "/screen_size")


@GETTERS.register("list_directory")
async def list_directory(machine, config):
  reply = await machine.ask("POST", "/list_directory", path=config["path"])
  return reply.get("directory_tree")


@METRICS.register("exact_match")
def exact_match(result, rules):
  return float(result == rules["expected"])


@METRICS.register("match_in_list")
def match_in_list(result, rules):
  return float(result in rules["expected"])


@METRICS.register("is_in_list")
def is_in_list(result, rules):
  return float(rules["expected"] in result)


@METRICS.register("check_include_exclude")
def check_include_exclude(result, rules):
  if result is None:
    return 0.0
  return float(
    all(r in result for r in rules.get("include", ()))
    and all(r not in result for r in rules.get("exclude", ()))
  )


@METRICS.register("literal_match")
def literal_match(result, expected, type="str", ignore_case=False):  # pylint: disable=redefined-builtin
  if type == "list":
    one, other = list(result), list(expected)
  else:
    one, other = [str(result)], [str(expected)]
  if ignore_case:
    one, other = ([str(v).lower() for v in w] for w in (one, other))
  return float(one == other)


@METRICS.register("file_contains")
def file_contains(result, rules):
  if result is None:
    return 0.0
  text = result.decode("utf-8", "replace")
  return float(all(part in text for part in rules["expected"]))


def _listed(value: object, count: int) -> list[Any]:
  return list(value) if isinstance(value, list) else [value] * count


def plan(evaluator: object) -> list[tuple[str, Any, Any, Mapping[str, Any]]]:
  """(metric, result, expected, options) of each part; [] when infeasible.

  Raises:
    ValueError: names the missing field, or the unsupported getter or metric.
  """
  if not isinstance(evaluator, Mapping) or not evaluator.get("func"):
    raise ValueError("evaluator.func is missing")
  func = evaluator["func"]
  if func == "infeasible":
    return []
  conj = evaluator.get("conj", "and")
  if conj not in ("and", "or"):
    raise ValueError(f"evaluator.conj={conj!r} must be 'and' or 'or'")
  many = isinstance(func, list)
  names = func if many else [func]
  columns = [names]
  for key in ("result", "expected", "options"):
    value = evaluator.get(key)
    column = _listed(value, len(names)) if value else [None] * len(names)
    if many and value and not isinstance(value, list):
      raise ValueError(f"evaluator.{key} must be a list, as func is")
    if len(column) != len(names):
      raise ValueError(
        f"evaluator.{key} has {len(column)} parts and func {len(names)}"
      )
    columns.append(column)
  parts = []
  for i, (name, result, expected, options) in enumerate(zip(*columns)):
    if name not in METRICS:
      wrong = registry.unknown_name("OSWorld metric", name, METRICS.names())
      raise ValueError(f"evaluator.func[{i}]: {wrong}")
    for key, getter in (("result", result), ("expected", expected)):
      if getter is None and key == "expected":
        continue
      kind = getter.get("type") if isinstance(getter, Mapping) else None
      if kind not in GETTERS:
        wrong = registry.unknown_name("OSWorld getter", kind, GETTERS.names())
        raise ValueError(f"evaluator.{key}[{i}].type: {wrong}")
      if getter.get("multi"):
        raise ValueError(f"evaluator.{key}[{i}].multi is not served here")
    parts.append((name, result, expected, options or {}))
  return parts


async def judge(
  machine: Machine, evaluator: Mapping[str, Any], failed: bool
) -> tuple[float, dict[str, Any]]:
  """(score, the metrics' values), as OSWorld's `DesktopEnv.evaluate` does.

  Args:
    machine: Machine in the state that the episode left, after `postconfig`.
    evaluator: Evaluator of the task.
    failed: Whether the policy said that the task cannot be done.

  Raises:
    ValueError: a metric does not fit its arguments.
  """
  parts = plan(evaluator)
  if not parts:
    return float(failed), {"infeasible": True}
  if failed:
    return 0.0, {"failed": True}
  either = evaluator.get("conj", "and") == "or"
  values: list[float] = []
  for name, result, expected, options in parts:
    actual = await GETTERS.get(result["type"])(machine, result)
    arguments = [actual]
    if expected is not None:
      arguments.append(await GETTERS.get(expected["type"])(machine, expected))
    try:
      value = float(METRICS.get(name)(*arguments, **options))
    except (TypeError, KeyError, AttributeError) as error:
      raise ValueError(
        f"evaluator.func {name}: {type(error).__name__}: {error}"
      ) from error
    values.append(value)
    if either and value == 1.0:
      break
    if not either and value == 0.0:
      break
  if either and values[-1] == 1.0:
    score = 1.0
  elif not either and values[-1] == 0.0:
    score = 0.0
  else:
    score = max(values) if either else sum(values) / len(values)
  return score, {"metrics": dict(zip((p[0] for p in parts), values))}
