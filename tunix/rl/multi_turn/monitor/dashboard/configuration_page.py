"""Renders a run's settings: those that are not their default, the command."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Literal, Mapping

import sqlalchemy as sa
from tunix.rl.multi_turn.monitor.dashboard import page_request
from tunix.rl.multi_turn.monitor.dashboard import run_pages
from tunix.rl.multi_turn.monitor.schema import database
from tunix.rl.multi_turn.monitor.schema import tables
from tunix.rl.multi_turn.monitor.server import query as query_lib

_PLACES = ("run.dir", "run.resume", "run.name", "run.dry_run")
"""Settings of one start, not of what it does."""
_PLAIN = re.compile(r"[A-Za-z_/][\w./:@%+-]*")
_WORDS = frozenset("true false null yes no on off y n".split())
"""Words that YAML reads as another value than their text."""


class ConfigurationQuery(query_lib.PageQuery):
  """`only=changed` leaves out settings that have their default."""

  only: Literal["changed"] | None = None


class ConfigurationPage:
  """The tab Configuration of a run."""

  def __init__(self, engine: sa.Engine, head: Any):
    """Args:

      engine: of the database.
      head: finds a run of a project, see `run_pages.RunPages.head`.
    """
    self._engine = engine
    self._head = head

  def page(self, request: page_request.PageRequest) -> page_request.Page:
    asks = request.read(ConfigurationQuery)
    run = self._head(request.project, request.id())
    config, defaults = run["config_json"], self._defaults(run["id"])
    settings = run_pages.flat(config) if config else {}
    known = defaults is not None
    changed = whole(settings, defaults or {})
    rows = [
        (name, value, name in changed, (defaults or {}).get(name))
        for name, value in (inner(settings, changed) | changed).items()
        if asks.only is None or name in changed
    ]
    rows.sort(key=lambda row: (not row[2], row[0]))  # What differs comes first.
    return page_request.Page("config.html", {
        "run": run, "tab": "config", "rows": rows, "known": known,
        "changed": len(changed), "only": asks.only,
        "command": command(changed) if known and settings and (
            not any(name.startswith("evaluate.") for name in settings)
        ) else "",
    })  # pyformat: disable

  def _defaults(self, training: int) -> dict[str, Any] | None:
    """Of the settings that have another value; None if the client told none."""
    raw = tables.raw_value
    with database.reading(self._engine) as connection:
      value = connection.execute(
          sa.select(raw.c.value).where(
              raw.c.kind == "training", raw.c.entity_id == training,
              raw.c.field == "changed_settings",
          )
      ).scalar()  # pyformat: disable
    try:
      found = json.loads(value or "null")
    except ValueError:  # Of another client.
      return None
    return found if isinstance(found, dict) else None


def whole(
    settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """Values of the settings in `defaults`; mappings are put together again."""
  found: dict[str, Any] = {}
  for name in defaults:
    if name in settings:
      found[name] = settings[name]
      continue
    parts: dict[str, Any] = {}
    for key, value in settings.items():
      if key.startswith(f"{name}."):
        place = parts
        *outer, last = key[len(name) + 1 :].split(".")
        for step in outer:
          place = place.setdefault(step, {})
        place[last] = value
    found[name] = parts
  return found


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
  """The line that starts a run with these settings.

  Args:
    changed: dotted key -> value, of settings that are not their default.
  """
  words = [
      shlex.quote(f"{name}={_text(value)}")
      for name, value in sorted(changed.items())
      if name not in _PLACES
  ]
  return " ".join(["python -m tunix.rl.multi_turn.train", *words])


def _text(value: Any) -> str:
  """The value as an override says it: YAML."""
  if isinstance(value, str) and _PLAIN.fullmatch(value) and (
      value.lower() not in _WORDS and not value.endswith(":")
  ):
    return value
  return json.dumps(value, ensure_ascii=False)
