"""Makes tasks of the `browser` gym from a YAML list of pages.

    buy-lamp:
      url: http://127.0.0.1:8000/shop?seed={seed}
      instruction: Buy the green lamp.
      max_turns: 12

`{seed}` in the address becomes the instance's seed, so that a site can show
another instance each time. Seeds below `EVAL_SEEDS_FROM` are for training and
those from it on for evaluation: the two never share one. A page whose
instruction depends on the seed carries it in
`<meta name="instruction" content="…">`, and has none here.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import yaml_text
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds

from cua_gyms.browser import hosts as hosts_lib

EVAL_SEEDS_FROM = seeds.EVAL_SEEDS_FROM
DEFAULT_MAX_TURNS = 15
_SEED = "{seed}"


@dataclasses.dataclass(frozen=True)
class Page:
  """A family: its start page and its instruction.

  Attributes:
    url: http or https; may hold "{seed}".
    instruction: "" where the page carries it.
    max_turns: Turns that an episode may take.
  """

  url: str
  instruction: str = ""
  max_turns: int = DEFAULT_MAX_TURNS


def read_pages(pages: str | Mapping[str, Any]) -> dict[str, Page]:
  """Reads the pages of a YAML file, or of its parsed contents.

  Raises:
    ValueError: naming the file, or the page and the field.
  """
  where = "pages"
  if isinstance(pages, str):
    where = f"pages={pages}"
    pages = yaml_text.read(pathlib.Path(pages))
  if not isinstance(pages, Mapping) or not pages:
    raise ValueError(f"{where} must hold names with a url each, got {pages!r}")
  field_types = {f.name: f.type for f in dataclasses.fields(Page)}
  parsed = {}
  for name, fields in pages.items():
    if isinstance(fields, str):
      fields = {"url": fields}
    if not isinstance(fields, Mapping) or "url" not in fields:
      raise ValueError(f"{where}, {name!r}: needs a url, got {fields!r}")
    for field, value in fields.items():
      if field not in field_types:
        raise ValueError(
          f"{where}, {name!r}: takes no {field!r}; known:"
          f" {', '.join(field_types)}"
        )
      expected = int if field == "max_turns" else str
      wrong = not isinstance(value, expected) or isinstance(value, bool)
      if wrong or (expected is int and value < 1):
        what = "a whole number >= 1" if expected is int else "text"
        raise ValueError(f"{where}, {name!r}: {field}={value!r} must be {what}")
    page = Page(**fields)
    try:
      hosts_lib.split(page.url.replace(_SEED, "0"))
    except hosts_lib.UrlRefused as error:
      raise ValueError(f"{where}, {name!r}: {error}") from None
    parsed[str(name)] = page
  return parsed


def start_urls(pages: str | Mapping[str, Any]) -> tuple[str, ...]:
  """Start addresses of the pages, each cut before its `{seed}`."""
  urls = []
  for page in read_pages(pages).values():
    path, _, _ = page.url.partition("?")
    before, seed, _ = path.partition(_SEED)
    if seed:
      before = before[: before.rindex("/") + 1]
      if before.count("/") < 3:
        raise ValueError(
          f"pages: url={page.url!r} has {_SEED} in its host; list start_urls"
        )
    urls.append(before.partition("#")[0])
  return tuple(dict.fromkeys(urls))


class WebTasks(seeds.SeededTasks):
  """Makes tasks: `browser/<family>/<seed>`. See the module docstring."""

  def __init__(
    self,
    families: Sequence[str] | None = None,
    *,
    pages: str | Mapping[str, Any] | None = None,
  ):
    """Args:

      families: Families to offer, None for all.
      pages: name -> page, or the YAML file that holds them.

    Raises:
      ValueError: no pages, a wrong one, or an unknown family.
    """
    if pages is None:
      raise ValueError(
        "the browser gym needs pages: a YAML file with a name and a url for"
        " each task; gym.options.pages=FILE in a run, --settings"
        " '{pages: FILE}' elsewhere"
      )
    try:
      self._pages = read_pages(pages)
    except OSError as error:
      raise ValueError(f"pages={pages}: {error.strerror}") from None
    for name in families or ():
      self._page(name)
    self._families = tuple(families or self._pages)

  def task(self, family: str, seed: int) -> base.Task:
    """Returns the instance that a family and a seed stand for.

    Raises:
      ValueError: unknown family (gives the nearest), or a seed outside
        [0, 2 * EVAL_SEEDS_FROM).
    """
    if not 0 <= seed < 2 * EVAL_SEEDS_FROM:
      raise ValueError(f"seed={seed} must be in [0, {2 * EVAL_SEEDS_FROM})")
    page = self._page(family)
    return base.Task(
      task_id=f"browser/{family}/{seed}",
      family=family,
      instruction=page.instruction,
      seed=seed,
      max_turns=page.max_turns,
      params={"url": page.url.replace(_SEED, str(seed))},
    )

  def _page(self, family: str) -> Page:
    if family not in self._pages:
      raise ValueError(
        registry.unknown_name("browser task family", family, self._pages)
      )
    return self._pages[family]
