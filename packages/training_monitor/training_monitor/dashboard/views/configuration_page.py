"""Renders a run's settings: those that are not their default, the command."""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import Any, Literal, Mapping

import sqlalchemy as sa

from training_monitor.dashboard import page_request
from training_monitor.dashboard import text as text_lib
from training_monitor.dashboard.views import run_pages
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import query as query_lib

_PLACES = ("run.dir", "run.resume", "run.name", "run.dry_run")
"""Settings of one start, not of what it does."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
"""Of a setting, and no option of the command."""
_PLAIN = re.compile(r"[A-Za-z_/][\w./:@%+-]*")
_WORDS = frozenset("true false null yes no on off y n".split())
"""Words that YAML reads as another value than their text."""


class ConfigurationQuery(query_lib.PageQuery):
  """`only=changed` leaves out settings that have their default."""

  only: Literal["changed"] | None = None


class ConfigurationPage(page_request.RunTab):
  """The tab Configuration of a run."""

  def page(self, request: page_request.PageRequest) -> page_request.Page:
    asks = request.read(ConfigurationQuery)
    run = self._head(request.project, request.id())
    config, defaults = run["config_json"], self._defaults(run["id"])
    settings = run_pages.flat(config) if config else {}
    has_defaults = defaults is not None
    changed = whole(config, defaults or {})
    rows = [
      (name, value, name in changed, (defaults or {}).get(name))
      for name, value in (inner(settings, changed) | changed).items()
      if asks.only is None or name in changed
    ]
    rows.sort(key=lambda row: (not row[2], row[0]))  # What differs comes first.
    return page_request.Page("config.html", {
        "run": run, "tab": "config", "rows": rows, "known": has_defaults,
        "changed": len(changed), "only": asks.only,
        "command": command(changed) if has_defaults and settings and (
            not any(name.startswith("evaluate.") for name in settings)
        ) else "",
    })  # fmt: skip

  def _defaults(self, training: int) -> dict[str, Any] | None:
    """Returns the defaults of changed settings; None if not recorded."""
    raw = tables.raw_value
    with database.reading(self._engine) as connection:
      value = connection.execute(
        sa.select(raw.c.value).where(
          raw.c.kind == "training",
          raw.c.entity_id == training,
          raw.c.field == "changed_settings",
        )
      ).scalar()
    try:
      defaults = json.loads(value or "null")
    except (ValueError, RecursionError):  # Of another client.
      return None
    return defaults if isinstance(defaults, dict) else None


def whole(config: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of the settings named in `defaults`."""
  complete: dict[str, Any] = {}
  for name in defaults:
    value = config
    for part in name.split("."):
      if not isinstance(value, Mapping) or part not in value:
        break
      value = value[part]
    else:
      complete[name] = value
  return complete


def inner(
  settings: Mapping[str, Any], changed: Mapping[str, Any]
) -> dict[str, Any]:
  """Settings without the parts of mappings that `changed` shows whole."""
  return {
    name: value
    for name, value in settings.items()
    if not any(name.startswith(f"{mapping}.") for mapping in changed)
  }


def command(changed: Mapping[str, Any]) -> str:
  """Returns the line that starts a run with these settings.

  Args:
    changed: dotted key -> value, of settings that are not their default.
  """
  words = [
    shlex.quote(f"{name}={_text(value)}")
    for name, value in sorted(changed.items())
    if name not in _PLACES and _NAME.fullmatch(name)
  ]
  return " ".join(["python -m tunix.rl.multi_turn.train", *words])


def _text(value: object) -> str:
  """Returns the value as YAML, for an override."""
  if (
    isinstance(value, str)
    and _PLAIN.fullmatch(value)
    and (value.lower() not in _WORDS and not value.endswith(":"))
  ):
    return value
  # YAML refuses or folds some characters that JSON takes, and a page shows
  # names for invisible ones: escapes can be copied from the page.
  return text_lib.HIDDEN.sub(_escaped, _flow(value))


def _escaped(match: re.Match[str]) -> str:
  code = ord(match[0])
  return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _flow(value: object) -> str:
  """Returns JSON, but for numbers that YAML would read as text."""
  if isinstance(value, Mapping):
    parts = (
      f"{json.dumps(k, ensure_ascii=False)}: {_flow(v)}"
      for k, v in value.items()
    )
    return "{" + ", ".join(parts) + "}"
  if isinstance(value, list):
    return "[" + ", ".join(map(_flow, value)) + "]"
  if isinstance(value, float):
    if not math.isfinite(value):
      return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    digits, exponent, power = repr(value).partition("e")
    dot = ".0" if exponent and "." not in digits else ""
    return f"{digits}{dot}{exponent}{power}"
  return json.dumps(value, ensure_ascii=False)
