"""Checks the words of docstrings and names against three rules.

    python scripts/lint_words.py [--list] [FOLDER ...]

Three rules, for Python files that git tracks:

* fragment: an argument or attribute is described by a noun phrase or a
  sentence ("config: Settings of the run."), never from a preposition or
  relative word on ("config: of the run.");
* opening: a docstring begins with a verb or a noun, not with a pronoun or a
  question word;
* name: a variable or parameter is a noun that says what it holds, not a bare
  participle ("found", "given").

Exits with 1 where a folder has more findings than `[tool.words]` of
pyproject.toml allows it; an allowance is lowered when its folder improves.
"""

import argparse
import ast
import collections
import pathlib
import re
import subprocess
import sys
import tomllib
from typing import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARTICIPLES = frozenset(
  "asked done found gone given held kept known left made meant rest said seen"
  " taken told wanted whole".split()
)
_FRAGMENT = re.compile(
  r"\s+\*{0,2}\w+: (as|behind|beside|between|by|for|from|in|of|since|that|to"
  r"|until|what|when|where|which|who|whose|with)\b"
)
_OPENING = re.compile(
  r"(How|It|Nobody|That|Them|The ones?|Those|What|Where|Which|Who|Whom"
  r"|Whose)\b"
)
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def findings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
  """Yields line, rule and text of each finding in a module."""
  for node in ast.walk(tree):
    if isinstance(node, _OWNERS) and node.body:
      yield from _in_docstring(node.body[0])
    if isinstance(node, ast.arg):
      names = [node.arg]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names = [node.id]
    else:
      continue
    for name in names:
      if name.strip("_") in PARTICIPLES:
        yield node.lineno, "name", name


def _in_docstring(first: ast.stmt) -> Iterator[tuple[int, str, str]]:
  if not isinstance(first, ast.Expr) or not isinstance(
    first.value, ast.Constant
  ):
    return
  text = first.value.value
  if not isinstance(text, str):
    return
  for i, line in enumerate(text.splitlines()):
    if i == 0 and _OPENING.match(line):
      yield first.lineno, "opening", line
    elif _FRAGMENT.match(line):
      yield first.lineno + i, "fragment", line.strip()


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folders", nargs="*", help="default: all of [tool.words]")
  parser.add_argument("--list", action="store_true", help="print each finding")
  arguments = parser.parse_args()
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
  allowed = settings["tool"]["words"]
  tracked = subprocess.run(
    ["git", "ls-files", "*.py"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout.split()
  counts: collections.Counter[str] = collections.Counter()
  lines: collections.Counter[str] = collections.Counter()
  for name in tracked:
    folder = max(
      (f for f in allowed if name.startswith(f + "/")), key=len, default=""
    )
    if not folder or not (ROOT / name).exists():
      continue
    text = (ROOT / name).read_text(encoding="utf-8")
    lines[folder] += text.count("\n")
    for line, rule, what in findings(ast.parse(text)):
      counts[folder] += 1
      if arguments.list and folder in (arguments.folders or allowed):
        print(f"{name}:{line} {rule}: {what}")
  failed = False
  for folder, most in allowed.items():
    if counts[folder] > most:
      failed = True
      print(
        f"{folder}: {counts[folder]} findings in {lines[folder]:,} lines,"
        f" {most} allowed; see them with"
        f" scripts/lint_words.py --list {folder}"
      )
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
