"""Finds generators by file, and loads their hooks.

A generator is a Python file with a text constant `TASK_TYPE` and a function
`run_rollout(data)`; it may define hooks (`rules.HOOKS`), and as `READS` the
keys of `rights.GUARDED` that it uses, all of them by default. Files are read,
not run, to find them: only the one that a rollout names is imported, in its own
process (`generator_process`), and here if it has hooks.

Promises: a file that cannot be read hides no other; why it is none is listed.

Does not stop code that is imported; hooks are the operator's own.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pathlib
import sys
from typing import Any, Iterator, Sequence

from tunix.rl.multi_turn.net import concurrency

from agent_services.rollout_buffer import rights
from agent_services.rollout_buffer import rules

BUILT_IN = pathlib.Path(__file__).parent / "generators"
_SUFFIX = "_generator.py"
_LOAD_S = 60.0


@dataclasses.dataclass(frozen=True)
class Generator:
  """A generator's file, and what it declares.

  Attributes:
    task_type: Name in payloads.
    path: The file.
    hooks: Names of the hooks that it defines.
    reads: Keys of `rights.GUARDED` that it uses.
  """

  task_type: str
  path: pathlib.Path
  hooks: tuple[str, ...]
  reads: tuple[str, ...] = rights.GUARDED


@dataclasses.dataclass(frozen=True)
class Found:
  """Generators by task type, and the files that are none, each with why."""

  generators: dict[str, Generator]
  problems: tuple[str, ...]


def discover(folders: Sequence[pathlib.Path]) -> Found:
  """Finds the generators of the package and of folders, later ones first.

  Raises:
    ValueError: a folder that is none.
  """
  generators: dict[str, Generator] = {}
  problems: list[str] = []
  for folder in (BUILT_IN, *folders):
    if not folder.is_dir():
      raise ValueError(f"--generators={folder} is no folder; name one")
    here: dict[str, Generator] = {}
    for path in sorted(folder.glob("*.py")):
      if path.name.startswith("_"):
        continue
      try:
        generator = _read(path)
      except (OSError, ValueError, SyntaxError) as error:
        problems.append(f"{path}: {error}")
        continue
      if generator is None:
        continue
      first = here.setdefault(generator.task_type, generator)
      if first is not generator:
        problems.append(
          f"{path}: TASK_TYPE={generator.task_type!r} is that of"
          f" {first.path.name}, too; give each its own"
        )
    generators.update(here)
  return Found(generators, tuple(problems))


def _read(path: pathlib.Path) -> Generator | None:
  """Returns the generator of a file; None for a helper module."""
  tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
  names = dict(_names(tree))
  is_named_so = path.name.endswith(_SUFFIX)
  if "TASK_TYPE" not in names and "run_rollout" not in names:
    if is_named_so:
      raise ValueError("it defines neither TASK_TYPE nor run_rollout")
    return None
  for name in ("TASK_TYPE", "run_rollout"):
    if name not in names:
      raise ValueError(f"it defines no {name}")
  constant = names["TASK_TYPE"]
  if not isinstance(constant, ast.Constant) or not (
    isinstance(constant.value, str) and constant.value
  ):
    raise ValueError('TASK_TYPE must be a text in quotes, e.g. "math"')
  hooks = tuple(name for name in rules.HOOKS if name in names)
  return Generator(constant.value, path, hooks, _reads(names.get("READS")))


def _reads(value: str | None) -> tuple[str, ...]:
  """Returns the keys that `READS` lists; all where a file declares none."""
  if value is None:
    return rights.GUARDED
  try:
    keys = tuple(ast.literal_eval(value))
  except (TypeError, ValueError):
    keys = (None,)
  if strange := [key for key in keys if key not in rights.GUARDED]:
    raise ValueError(
      f"READS holds {strange[0]!r}; it must be a list of"
      f" {', '.join(rights.GUARDED)}"
    )
  return keys


def _names(tree: ast.Module) -> Iterator[tuple[str, Any]]:
  """Yields (name, expression) of each definition in a module.

  The expression of a function and of an import is None.
  """
  for node in tree.body:
    if isinstance(node, ast.Assign):
      for target in node.targets:
        if isinstance(target, ast.Name):
          yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      yield node.target.id, node.value
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      yield node.name, None
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
      for alias in node.names:
        yield alias.asname or alias.name, None


def load(path: pathlib.Path) -> Any:
  """Imports a generator's file; its folder is on the path meanwhile.

  Raises:
    Exception: the file's own.
  """
  name = f"tunix_buffer_generator_{path.stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # Its own processes unpickle its functions.
  folder = str(path.parent)
  sys.path.insert(0, folder)
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path.remove(folder)
  return module


def hooks_of(generator: Generator) -> rules.Hooks:
  """Returns the generator's hooks; imports its file only if it has any.

  Raises:
    ValueError: the file cannot be imported, or a hook is no function.
  """
  if not generator.hooks:
    return rules.Hooks()
  try:
    module = concurrency.call(
      load, generator.path, seconds=_LOAD_S, what=str(generator.path)
    )
  except Exception as error:  # pylint: disable=broad-except
    raise ValueError(
      f"{generator.path} cannot be imported: {concurrency.describe(error)}"
    ) from error
  hooks = {name: getattr(module, name, None) for name in generator.hooks}
  for name, hook in hooks.items():
    if not callable(hook):
      raise ValueError(f"{generator.path}: {name} must be a function")
  return rules.Hooks(**hooks)
