"""Finds the commands that pages, docstrings and examples tell one to type."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parents[2]
_ASSIGNMENTS = r"(?:[A-Z_]+=\S+ )*"
_MAKE = r"(?:sudo )?make [a-z\-]+(?= *$| *#| +&&| +[A-Z]+=|`)"
_PYTHON = "python (?:-m tunix|examples/)"
_COMMAND = rf"{_ASSIGNMENTS}(?:{_PYTHON}|tunix-mt [a-z]+|{_MAKE})"
_LINE = re.compile(rf"^ *(?:\$ )?({_COMMAND}.*)$")
_INLINE = re.compile(rf"`({_COMMAND}[^`]*)`")
PLACES = {"<name>": "mine", "NAME": "tiny_vl", "DIR": "made"}
"""Placeholders -> what the test puts there."""


@dataclasses.dataclass(frozen=True)
class Command:
  """A command as documented.

  Attributes:
    where: file that documents it.
    text: as written, on one line.
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
  pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"),
           *ROOT.glob("examples/*.md")]  # pyformat: disable
  for page in sorted(pages):
    found += of_text(page.read_text("utf-8"), str(page.relative_to(ROOT)))
  for folder in ("tunix", "examples", "benchmarks"):
    for file in sorted((ROOT / folder).rglob("*.py")):
      text = ast.get_docstring(ast.parse(file.read_text("utf-8")), clean=True)
      found += of_text(text or "", str(file.relative_to(ROOT)))
  for file in sorted(ROOT.glob("examples/**/*.yaml")):
    comments = re.findall("^# ?(.*)$", file.read_text("utf-8"), re.M)
    found += of_text("\n".join(comments), str(file.relative_to(ROOT)))
  for file in sorted(ROOT.glob("notebooks/**/*.ipynb")):
    text = file.read_text("utf-8").replace(r"\n", "\n").replace('"!', '\n')
    found += of_text(text, str(file.relative_to(ROOT)))
  return list({one.text: one for one in reversed(found)}.values())[::-1]
