"""Finds the commands that pages, docstrings and examples tell one to type."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import shlex

import documented_code

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVICES = "packages/agent_services/agent_services"
_ASSIGNMENTS = r"(?:[A-Z_]+=\S+ )*"
_MAKE = r"(?:sudo )?make [a-z0-9\-]+(?= *$| *#| +&&| +[A-Z]+=|`)"
_PYTHON = "python (?:-m tunix|examples/|benchmarks/|scripts/)"
SCRIPTS = {
  "tunix-gym-server": "environments.gym_server",
  "tunix-monitor": "monitor",
  "tunix-play": "environments.play",
  "tunix-rollout-buffer": "trajectory_collector.buffer_service",
  "tunix-run-service": "agents.run_service",
}
"""Programs that an installation has, beside tunix-mt -> their module."""
_SCRIPT = "(?:" + "|".join(SCRIPTS) + ") "
_COMMAND = rf"{_ASSIGNMENTS}(?:{_PYTHON}|tunix-mt [a-z]+|{_SCRIPT}|{_MAKE})"
_LINE = re.compile(rf"^ *(?:\$ )?({_COMMAND}.*)$")
_INLINE = re.compile(rf"`({_COMMAND}[^`]*)`")
PLACES = {"<name>": "mine", "NAME": "tiny_vl", "DIR": "made"}
"""Placeholders -> what the test puts there."""


@dataclasses.dataclass(frozen=True)
class Command:
  """A command as documented.

  Attributes:
    where: file that documents it.
    text: The command as written, on one line.
  """

  where: str
  text: str

  def words(self) -> list[str]:
    """Its words as a shell splits them, placeholders filled in."""
    text = self.text
    if "[config.yaml]" in text:  # The synopsis.
      text = text.replace("[config.yaml]", "config.yaml")
      text = text.replace("[key=value ...]", "steps=1")
    text = text.replace("[key=value ...]", "")
    text = re.sub(r"\[(--[\w-]+)\]", r"\1", text)
    for placeholder, value in PLACES.items():
      text = re.sub(rf"(?<![\w]){placeholder}(?!\w)", value, text)
    text = re.sub(r"(_TOKEN=\w*)…", r"\1secret", text).replace("…", "")
    words = shlex.split(text, comments=True)
    if ">" in words:
      words = words[: words.index(">")]
    return words


def of_text(text: str, where: str) -> list[Command]:
  """The commands of a page or docstring, in their order."""
  text = re.sub(r" *\\\\?\n +", " ", text)
  found = []
  for line in text.splitlines():
    if match := _LINE.match(line):
      parts = re.split(r" && ", match[1])
      found += [Command(where, part.rstrip()) for part in parts]
  for inline in _INLINE.findall(text):
    found.append(Command(where, " ".join(inline.split())))
  return found


def of_arguments(page: str) -> list[Command]:
  """`make train` with each row of a page's table "add to `ARGS`"."""
  text = (ROOT / page).read_text("utf-8")
  table = text.partition("| to | add to `ARGS` |\n|---|---|\n")[2]
  rows = re.findall(r"^\|[^|]*\| `([^`]*)`", table.partition("\n\n")[0], re.M)
  return [Command(page, f"make train ARGS={shlex.quote(row)}") for row in rows]


def everywhere() -> list[Command]:
  """Every documented command, each once."""
  found = []
  pages = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/*.md"),
    *ROOT.glob("packages/*/*.md"),
  ]
  for page in sorted(pages):
    found += of_text(page.read_text("utf-8"), str(page.relative_to(ROOT)))
  for folder in ("tunix", "examples", "benchmarks", SERVICES):
    for file in sorted((ROOT / folder).rglob("*.py")):
      text = ast.get_docstring(ast.parse(file.read_text("utf-8")), clean=True)
      found += of_text(text or "", str(file.relative_to(ROOT)))
  for file in sorted(ROOT.glob("examples/**/*.yaml")):
    comments = re.findall("^# ?(.*)$", file.read_text("utf-8"), re.M)
    found += of_text("\n".join(comments), str(file.relative_to(ROOT)))
  for file in sorted(ROOT.glob("notebooks/**/*.ipynb")):
    text = file.read_text("utf-8").replace(r"\n", "\n").replace('"!', "\n")
    found += of_text(text, str(file.relative_to(ROOT)))
  return list({one.text: one for one in reversed(found)}.values())[::-1]


@dataclasses.dataclass(frozen=True)
class ShellLine:
  """A logical line of a page's shell block.

  Attributes:
    page, line: where it begins.
    text: joined where it is continued, without its comment.
    marker: (kind, reason) of a block that is not run, else None.
  """

  page: str
  line: int
  text: str
  marker: tuple[str, str] | None


def shell_lines(page: str) -> list[ShellLine]:
  """Lines of a page's indented blocks and of its `sh` fences."""
  lines = (ROOT / page).read_text("utf-8").splitlines()
  found: list[ShellLine] = []
  fence, marker, inside, item = None, None, False, False
  joined, begin = "", 0
  for number, line in enumerate(lines, 1):
    if match := re.match(r" *```(\w*)", line):
      fence = None if fence is not None else match[1]
      inside = False
      if fence == "sh":
        marker = _marker(lines, number - 1)
      continue
    if fence not in (None, "sh"):
      continue
    if fence is None:
      indented = re.match(r"    \S", line) or (inside and line[:4] == "    ")
      if not line.strip():
        continue
      if not indented:
        inside, item = False, bool(re.match(r"[-*] |\d+\. |  \S", line))
        continue
      if not inside:
        if item or lines[number - 2].strip():  # A list's own text.
          continue
        inside, marker = True, _marker(lines, number - 2)
    text = line.strip()
    begin = begin if joined else number
    joined = f"{joined} {text}".strip()
    if joined.endswith("\\"):
      joined = joined[:-1].rstrip()
      continue
    if _open_quote(joined):
      continue
    if not joined.startswith("#"):
      found.append(ShellLine(page, begin, joined, marker))
    joined = ""
  assert not joined, f"{page}:{begin} does not end: {joined}"
  return found


def _open_quote(text: str) -> bool:
  try:
    shlex.split(text, comments=True)
  except ValueError:
    return True
  return False


def _marker(lines: list[str], before: int) -> tuple[str, str] | None:
  """The marker in front of line `before` (from 0), over empty lines."""
  text = "\n".join(lines[:before]).rstrip() + "\n"
  match = documented_code.MARKER.search(text)
  return (match[1], match[2]) if match else None


def is_ours(text: str) -> bool:
  """Whether `of_text` finds it, so that its test runs or parses it."""
  return bool(_LINE.match(text))
