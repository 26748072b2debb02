"""Prints the lines of code of each room beside its budget.

    python scripts/budgets.py

A line of code holds a token that is neither a comment nor a docstring. Exits
with 1 where a room of `[tool.budgets]` in pyproject.toml has more lines than
its budget. A budget is lowered when its room shrinks.
"""

import ast
import io
import pathlib
import sys
import tokenize
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
_EMPTY = frozenset({
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
    tokenize.DEDENT, tokenize.ENDMARKER,
})  # fmt: skip


def code_lines(text: str) -> int:
  """Counts lines of Python that hold code."""
  documented: set[int] = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      if isinstance(node.value.value, str):
        documented.update(range(node.lineno, (node.end_lineno or 0) + 1))
  lines: set[int] = set()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type not in _EMPTY:
      lines.update(range(token.start[0], token.end[0] + 1))
  return len(lines - documented)


def main() -> int:
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
  over, total = [], 0
  for folder, most in settings["tool"]["budgets"].items():
    files = [
      p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts
    ]
    count = sum(code_lines(p.read_text(encoding="utf-8")) for p in files)
    total += count
    over += [folder] if count > most else []
    mark = "  over budget" if count > most else ""
    print(f"{folder:42}{len(files):5} files{count:8,} of {most:7,}{mark}")
  print(f"{'all':42}{total:19,}")
  if over:
    print(f"error: over budget: {', '.join(over)}", file=sys.stderr)
  return int(bool(over))


if __name__ == "__main__":
  sys.exit(main())
