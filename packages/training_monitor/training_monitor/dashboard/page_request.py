"""A request for a page of the dashboard, and a page's possible answers."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping, TypeVar
from urllib import parse

import sqlalchemy as sa
from starlette import datastructures

from training_monitor.dashboard import curves as curves_lib
from training_monitor.server import errors
from training_monitor.server import queries as queries_lib
from training_monitor.server import query as query_lib

Q = TypeVar("Q", bound=query_lib.PageQuery)


@dataclasses.dataclass(frozen=True)
class PageRequest:
  """A request for a page.

  Attributes:
    project: Project whose data may be shown.
    where: parameters of the path.
    query: parameters behind the question mark; pages `read` them.
    path: Path of the request.
    may_edit: whether the client may change tags and the baseline.
  """

  project: int
  where: Mapping[str, Any]
  query: datastructures.QueryParams
  path: str
  may_edit: bool = False

  def id(self, name: str = "id") -> int:
    value = self.where[name]
    if value > query_lib.MAX_ID:
      raise errors.ApiError(404, f"there is no {name} {str(value)[:30]}")
    return value

  def read(self, model: type[Q]) -> Q:
    """Returns the query as an instance of `model`.

    Raises:
      ApiError: 400, with every wrong parameter.
    """
    return model.read(self.query)


def escaped(word: str) -> str:
  """Escapes a word for LIKE, with a backslash as escape."""
  for special in ("\\", "%", "_"):
    word = word.replace(special, "\\" + special)
  return word


@dataclasses.dataclass(frozen=True)
class Page:
  """A template and its values."""

  template: str
  values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class File:
  """A download. `name` is plain ASCII."""

  data: bytes
  media_type: str
  name: str


@dataclasses.dataclass(frozen=True)
class Redirect:
  """Another address of this server."""

  to: str


class RunTab:
  """Base of the classes that render tabs of a run."""

  def __init__(
    self,
    engine: sa.Engine,
    queries: queries_lib.Queries,
    curves: curves_lib.Curves,
    head: Callable[[int, int], dict[str, Any]],
  ):
    """Keeps what the tabs read.

    Args:
      engine: Engine of the upgraded database.
      queries: Queries on that database.
      curves: Columns of runs.
      head: Returns the header of a run, see `run_pages.RunPages.head`.
    """
    self._engine = engine
    self._queries = queries
    self._curves = curves
    self._head = head


class Link:
  """Makes the URL of this page with other parameters.

  `link(sort="reward")` changes one, `link(sort=None)` leaves one out; pages
  begin again unless `page` or `after` is among the changes.
  """

  def __init__(self, path: str, query: datastructures.QueryParams):
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
