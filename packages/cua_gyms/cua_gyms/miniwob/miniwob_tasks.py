"""Finds the MiniWoB++ task families in the installed `miniwob` package.

Only the package's pages are used; it is located without importing it, so that
its browser driver need not be there.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re
from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds

from cua_gyms import chromium
from cua_gyms.miniwob import catalogue

PAGES_VARIABLE = "TUNIX_MINIWOB_PAGES"
DATA_MODES = ("default", "train", "test")

EVAL_SEEDS_FROM = seeds.EVAL_SEEDS_FROM


class PagesNotFound(RuntimeError):
  """The task pages are not installed."""


@functools.lru_cache(maxsize=None)
def _pages_in(override: str | None) -> pathlib.Path:
  if override:
    directory = pathlib.Path(override)
    if not (directory / "click-test.html").is_file():
      raise PagesNotFound(
        f"${PAGES_VARIABLE} names {override!r}, which has no click-test.html"
      )
    return directory.resolve()
  spec = importlib.util.find_spec("miniwob")
  for location in (spec.submodule_search_locations or ()) if spec else ():
    directory = pathlib.Path(location) / "html" / "miniwob"
    if (directory / "click-test.html").is_file():
      return directory.resolve()
  raise PagesNotFound(
    "the MiniWoB++ pages are not installed: pip install"
    " 'tunix-multi-turn[browser]' (or: pip install miniwob==1.1.0), or set"
    f" ${PAGES_VARIABLE} to a directory that has them"
  )


def pages_directory() -> pathlib.Path:
  """Returns the directory of the pages `<family>.html`.

  Raises:
    PagesNotFound: the pages are not installed; the message names the fix.
  """
  return _pages_in(os.environ.get(PAGES_VARIABLE))


def needs(options: Mapping[str, Any]) -> Iterator[str]:
  """`GymSpec.needs`: a browser, and the pages."""
  yield from chromium.needs(options)
  try:
    pages_directory()
  except PagesNotFound as error:
    yield str(error)


@functools.lru_cache(maxsize=None)
def _families_in(directory: pathlib.Path) -> tuple[str, ...]:
  return tuple(sorted(path.stem for path in directory.glob("*.html")))


def families() -> tuple[str, ...]:
  """Names of all task families, sorted."""
  return _families_in(pages_directory())


def page_url(family: str) -> str:
  """Returns the address of a family's page.

  Raises:
    ValueError: no such family; gives the nearest name.
  """
  if family not in families():
    raise ValueError(
      registry.unknown_name("MiniWoB++ task family", family, families())
    )
  return (pages_directory() / f"{family}.html").as_uri()


def about(family: str, oracle: bool = False) -> catalogue.Info:
  """Returns the description of a family.

  Raises:
    ValueError: no such family; gives the nearest name.
  """
  page_url(family)
  return catalogue.about(family, pages_directory() / f"{family}.html", oracle)


@functools.lru_cache(maxsize=None)
def images(family: str) -> tuple[str, ...]:
  """Addresses of the pictures that a family's page may show at some time."""
  page = pages_directory() / f"{family}.html"
  text = page.read_text(encoding="utf-8", errors="replace")
  html = pages_directory().parent
  directories = {
    html / "common" / "special" / name
    for name in re.findall(r"common/special/([\w-]+)", text)
  }
  if "jquery-ui.min.css" in text:
    directories.add(html / "core" / "jquery-ui")
  return tuple(
    sorted(
      path.as_uri()
      for directory in directories
      for path in directory.rglob("*")
      if path.suffix in (".png", ".gif", ".jpg", ".svg")
    )
  )


class MiniWobTasks(seeds.SeededTasks):
  """Makes tasks: `miniwob/<family>/<seed>`.

  The page's own generator gets the seed. Small families may show the same
  instance in training and in evaluation. A task's instruction is empty: the
  page holds it, and the first observation carries it.
  """

  def __init__(
    self,
    families: tuple[str, ...] | list[str] | None = None,  # pylint: disable=redefined-outer-name
    data_mode: str = "default",
  ):
    """Args:

    families: Families to offer, None for all.
    data_mode: Part of their own split that the few pages with one draw from:
      "default", "train" or "test".
    """
    names = tuple(families) if families else globals()["families"]()
    for name in names:
      page_url(name)
    if data_mode not in DATA_MODES:
      raise ValueError(
        f"data_mode must be one of {', '.join(DATA_MODES)}; got {data_mode!r}"
      )
    self._families = names
    self._data_mode = data_mode

  def task(self, family: str, seed: int) -> base.Task:
    """Returns the instance that a family and a seed >= 0 stand for.

    Raises:
      ValueError: unknown family (gives the nearest) or a negative seed.
    """
    page_url(family)
    if not 0 <= seed < 2 * EVAL_SEEDS_FROM:
      raise ValueError(
        f"seed must be in [0, {2 * EVAL_SEEDS_FROM}), got {seed}"
      )
    suffix = "" if self._data_mode == "default" else f"/{self._data_mode}"
    return base.Task(
      task_id=f"miniwob/{family}/{seed}{suffix}",
      family=family,
      seed=seed,
      max_turns=catalogue.MAX_TURNS.get(family, catalogue.DEFAULT_MAX_TURNS),
      params={} if not suffix else {"data_mode": self._data_mode},
    )
