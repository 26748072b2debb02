"""Documents the configuration: `--help` and docs/configuration.md.

Both are made from the settings' own documentation, so neither can lag behind.
"""

from __future__ import annotations

import dataclasses
import textwrap
import types
import typing
from typing import Any, Mapping

from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import settings

FIRST_SCREEN = """\
Trains a vision-language policy to use a computer.

usage: python -m tunix.rl.multi_turn.train [config.yaml] [key=value ...]

  --help             this text; --help all: every key; --help SECTION: one
                     section's keys, e.g. --help learner
  --dry-run          build everything, print configuration, shapes and memory

Later wins: defaults, presets of the chosen environment, gym, agent, policy and
algorithm, the file, overrides. Values are YAML (tasks='[a,b]' or tasks=a,b).

Most used keys:
{keys}

Sections:
{sections}

Examples:
  python -m tunix.rl.multi_turn.train steps=20 seed=3
  python -m tunix.rl.multi_turn.train gym=miniwob tasks=click-dialog
  python -m tunix.rl.multi_turn.train environment=gsm8k policy=qwen3_text_tiny
  python -m tunix.rl.multi_turn.train resume=runs/<name> steps=200

Every key with its meaning: --help all, or docs/configuration.md."""

MOST_USED = (
    "gym", "tasks", "policy", "agent", "environment", "reward", "steps",
    "learner.learning_rate", "learner.groups_per_step", "collect.group_size",
    "queue.max_staleness", "name", "resume",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Page:
  """The first screen of a command's `--help`.

  Attributes:
    text: Text with the fields {keys} and {sections}.
    keys: Keys shown with their defaults, in this order.
  """

  text: str
  keys: tuple[str, ...]


TRAIN = Page(FIRST_SCREEN, MOST_USED)
EVALUATE = Page(
  """\
Measures the success of a policy, or of a server's model, on tasks.

usage: python -m tunix.rl.multi_turn.evaluate [DIR] [file.yaml] [key=value ...]

DIR is a run (as run=DIR), a policy's directory (policy=DIR), an evaluation that
is continued (resume=DIR), or a server's address (server=URL, with model).
Without one: policy, or server and model. The word grounding (gym=grounding)
beside it measures where clicks land.

  --help             this text; --help all: every key; --help SECTION: one
                     section's keys, e.g. --help evaluate
  --dry-run          build everything, print configuration, shapes and memory

Later wins: defaults, presets of the chosen names, the run's settings, the file,
overrides. Values are YAML (tasks='[a,b]' or tasks=a,b).

Most used keys:
{keys}

Sections:
{sections}

Examples:
  python -m tunix.rl.multi_turn.evaluate runs/<name> checkpoint=best attempts=8
  python -m tunix.rl.multi_turn.evaluate policy=DIR gym=miniwob tasks=click-link
  python -m tunix.rl.multi_turn.evaluate server=http://127.0.0.1:8000/v1 \\
      model=NAME gym=desktop agent=qwen3_vl_computer_use

Exit status: 0 complete, 1 failed, 2 refused, 130 interrupted (and resumable).
Every key with its meaning: --help all, or docs/configuration.md.""",
  (
    "run",
    "checkpoint",
    "server",
    "model",
    "gym",
    "tasks",
    "policy",
    "agent",
    "modes",
    "attempts",
    "eval.episodes_per_task",
    "split",
    "collect.concurrency",
    "name",
    "resume",
  ),
)

REFERENCE_HEAD = """\
# Configuration

Written by `python -m tunix.rl.multi_turn.config > docs/configuration.md`.

    python -m tunix.rl.multi_turn.train [config.yaml] [key=value ...]

Later wins: the defaults below, the presets of the chosen environment, gym,
agent, policy and algorithm, the YAML file, overrides from left to right. Values
of overrides are YAML, so lists are written `tasks='[a,b]'` (or `tasks=a,b`). A
mapping is merged key by key, and `gym.options.time_decay=0.1` sets one key of
it. Unknown keys, values out of range and values that contradict each other are
refused before anything is built, all of them at once; a run's directories, the
size of its prompt and its memory are checked next, before anything is compiled,
and `--dry-run` prints that memory part by part. No setting may hold a password
or a token, in an address or by itself: they belong into environment variables
and files, which the error names. The resolved configuration is kept as
`config.yaml` in the run directory and is itself a valid file.

Where a name is expected (`environment`, `gym`, `agent`, `policy`, `algorithm`,
`reward`, `agent.parser`, the parts of `algorithm`), `package.module:attribute`
is one as well.

| short key | means |
|---|---|
{short}

| choice | preset |
|---|---|
{presets}

"""


def help_text(
  cls: type,
  aliases: Mapping[str, str],
  presets: Mapping[str, Mapping[str, Any]],
  topic: str = "",
  page: Page = TRAIN,
  chosen: Mapping[str, Any] | None = None,
) -> str:
  """Writes the text of `--help`: a first screen, or the keys of `topic`.

  Args:
    cls: the root class.
    aliases: short keys and the dotted keys they mean.
    presets: defaults that depend on a choice, by "section=name".
    topic: "" for the first screen, "all", or a section.
    page: the first screen.
    chosen: Values on it that the default choices bring, by dotted key.

  Raises:
    ConfigError: no such section.
  """
  all_sections = loader.sections(cls)
  if topic == "all":
    return describe(cls)
  if topic and "=" not in topic:
    section = topic.rstrip(".")
    if section not in all_sections:
      raise loader.ConfigError(
        [
          f"--help {topic}: no such section"
          f"{registry.did_you_mean(topic, [*all_sections, 'all'])} There are"
          f" {', '.join(all_sections)}, and all"
        ]
      )
    return describe(cls, section) + _choices(section, presets)
  keys = loader.leaves(cls)
  lines = []
  for key in page.keys:
    path = aliases.get(key, key)
    field = keys[path]
    if chosen and path in chosen:
      head = f"{key}={_plain(chosen[path])}"
    else:
      head = f"{key}={default_text(field)}"
    lines.append(f"  {head:<32} {_first_sentence(field.doc)}")
  names = [
    f"  {name:<12} {_summary(section)}"
    for name, section in all_sections.items()
    if "." not in name
  ]
  return page.text.format(keys="\n".join(lines), sections="\n".join(names))


def _choices(section: str, presets: Mapping[str, Mapping[str, Any]]) -> str:
  """The names that bring settings of their own, and these."""
  lines = []
  for choice, values in presets.items():
    if choice.startswith(f"{section}=") and values:
      lines.append(f"  {choice}")
      lines += textwrap.wrap(
        ", ".join(f"{k}={_plain(v)}" for k, v in values.items()),
        width=78,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
      )
  if not lines:
    return ""
  return "\n".join(["", "", "names that bring their own defaults:", *lines])


def reference(
  cls: type,
  aliases: Mapping[str, str],
  presets: Mapping[str, Mapping[str, Any]],
) -> str:
  """Writes docs/configuration.md: every section as a table.

  Args:
    cls: the root class.
    aliases: short keys and the dotted keys they mean.
    presets: defaults that depend on a choice, by what is chosen.
  """
  short = "\n".join(f"| `{a}` | `{p}` |" for a, p in aliases.items())
  rows = "\n".join(
    f"| {_code(choice)} | "
    + ", ".join(f"`{k}={_plain(v)}`" for k, v in values.items())
    + " |"
    for choice, values in presets.items()
    if values
  )
  return REFERENCE_HEAD.format(short=short, presets=rows) + (
    describe_markdown(cls).rstrip() + "\n"
  )


def _summary(section: type) -> str:
  return (section.__doc__ or "").strip().splitlines()[0]


def _first_sentence(text: str, width: int = 44) -> str:
  return textwrap.shorten(text.split(". ")[0], width, placeholder=" …")


def _code(choice: str) -> str:
  """Writes `section=name` as code, and what follows a comma as text."""
  name, comma, note = choice.partition(",")
  return f"`{name}`{comma}{note}" if "=" in name else choice


def _plain(value: object) -> str:
  if isinstance(value, (tuple, list)):
    return "[" + ",".join(map(str, value)) + "]"
  return str(value)


def type_name(field: settings.Setting) -> str:
  """Names the field's type, or its choices."""
  choices = loader.literal_choices(field.type)
  if choices and typing.get_origin(field.type) is not tuple:
    return "|".join(choices)
  return _type_name(field.type)


def _type_name(kind: Any) -> str:
  origin = typing.get_origin(kind)
  if origin in (typing.Union, types.UnionType):
    names = [
      "null" if member is type(None) else _type_name(member)
      for member in typing.get_args(kind)
    ]
    return " or ".join(names)
  if origin is tuple:
    return f"list of {_type_name(typing.get_args(kind)[0])}"
  if origin is typing.Literal:
    return "|".join(map(str, typing.get_args(kind)))
  if origin is dict:
    return "mapping"
  return kind.__name__


def default_text(field: settings.Setting) -> str:
  """Writes the default as an override would."""
  value = field.default
  if isinstance(value, tuple):
    return "[" + ", ".join(str(v) for v in value) + "]"
  if isinstance(value, bool) or value is None:
    return {True: "true", False: "false", None: "null"}[value]
  return '""' if value == "" else str(value)


def describe(cls: type, only: str = "") -> str:
  """Describes every field in plain text: type, default and meaning.

  Args:
    cls: the root class.
    only: a section; "" for all.
  """
  lines = []
  for section, section_cls in loader.sections(cls).items():
    if only and section != only and not section.startswith(only + "."):
      continue
    lines += ["", f"{section}: {_summary(section_cls)}"]
    for field in settings.fields(section_cls):
      if field.nested:
        continue
      notes = ", ".join(x for x in (field.unit, field.range) if x)
      head = (
        f"  {section}.{field.name}={default_text(field)}  ({type_name(field)}"
      )
      lines.append(head + (f"; {notes})" if notes else ")"))
      lines += textwrap.wrap(
        field.doc,
        width=78,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
      )
  return "\n".join(lines).lstrip("\n")


def describe_markdown(cls: type) -> str:
  """Writes the settings in Markdown, a table for each section."""
  lines = []
  for section, section_cls in loader.sections(cls).items():
    fields = [f for f in settings.fields(section_cls) if not f.nested]
    lines += [f"## {section}", "", _summary(section_cls), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
      kind = type_name(field).replace("|", " \\| ")
      notes = ", ".join(x for x in (field.unit, field.range) if x)
      meaning = field.doc.replace("|", "\\|")
      lines.append(
        f"| `{section}.{field.name}` | {kind}"
        f" | `{default_text(field)}` | {meaning}"
        + (f" ({notes})" if notes else "")
        + " |"
      )
    lines.append("")
  return "\n".join(lines)
