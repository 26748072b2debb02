"""What a page is asked, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Mapping
from urllib import parse

from tunix.rl.multi_turn.core import run_tags as tags_lib
from tunix.rl.multi_turn.monitor.server import errors
from tunix.rl.multi_turn.monitor.server import http_io

_MAX_ID = (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class Asked:
  """A request for a page.

  Attributes:
    project: whose data may be seen.
    where: parameters of the path.
    query: those behind the question mark.
    path: of the request.
    may_edit: whether who asks may change tags and the baseline.
  """

  project: int
  where: Mapping[str, Any]
  query: Any  # Starlette's QueryParams: a mapping with several of a name.
  path: str
  may_edit: bool = False

  def id(self, name: str = "id") -> int:
    value = self.where[name]
    if value > _MAX_ID:
      raise errors.ApiError(404, f"there is no {name} {str(value)[:30]}")
    return value

  def word(self, name: str, choices: Iterable[str], default: str) -> str:
    """One of several words.

    Raises:
      ApiError: 400, another.
    """
    given = self.query.get(name, "")
    if not given:
      return default
    choices = tuple(choices)
    if given not in choices:
      raise errors.ApiError(
          400, f"{name}={given[:30]!r}: give one of {', '.join(choices)}"
      )
    return given

  def integer(self, name: str, default: int | None = None) -> int | None:
    given = self.query.get(name, "")
    if not given:
      return default
    if http_io.is_id(given):
      return int(given)
    raise errors.ApiError(400, f"{name}={given[:30]!r}: give a number")

  def real(self, name: str) -> float | None:
    given = self.query.get(name, "")
    if not given:
      return None
    try:
      found = float(given)
    except ValueError:
      found = float("nan")
    if found != found or abs(found) == float("inf"):
      raise errors.ApiError(400, f"{name}={given[:30]!r}: give a number")
    return found

  def flag(self, name: str) -> bool:
    return self.word(name, ("0", "1"), "0") == "1"

  def tags(self) -> tuple[str, ...]:
    """Every `tag`.

    Raises:
      ApiError: 400, one of them can be none.
    """
    given = [tag for tag in self.query.getlist("tag") if tag]
    try:
      return tags_lib.clean_all(given)
    except ValueError as error:
      raise errors.ApiError(400, f"tag: {error}") from None

  def text(self, name: str) -> str:
    return self.query.get(name, "").replace("\0", "")[:200].strip()


def escaped(word: str) -> str:
  """For LIKE with a backslash as escape."""
  for special in ("\\", "%", "_"):
    word = word.replace(special, "\\" + special)
  return word


@dataclasses.dataclass(frozen=True)
class Page:
  template: str
  values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class File:
  """To be saved by whoever asked for it. `name` is plain ASCII."""

  data: bytes
  media_type: str
  name: str


@dataclasses.dataclass(frozen=True)
class Moved:
  to: str


class Link:
  """Makes the URL of this page with other parameters.

  `link(sort="reward")` changes one, `link(sort=None)` leaves one out; pages
  begin again unless `page` or `after` is among the changes.
  """

  def __init__(self, path: str, query: Any):
    self._path = path
    self._query = query

  def __call__(self, **changes: Any) -> str:
    pairs = [
        (k, v)
        for k, v in self._query.multi_items()
        if k not in changes and k not in ("page", "after")
    ]
    for name, value in changes.items():
      if isinstance(value, (list, tuple)):
        pairs += [(name, str(v)) for v in value]
      elif value is not None and value != "":
        pairs.append((name, str(value)))
    return self._path + ("?" + parse.urlencode(pairs) if pairs else "")
