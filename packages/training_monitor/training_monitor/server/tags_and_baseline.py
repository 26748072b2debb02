"""Changes tags of runs, and the pinned baseline.

    POST        /api/v1/trainings/{id}/tags   {"add": […], "remove": […]}
    PUT, DELETE /api/v1/trainings/{id}/pin

Promises: an answer 200 means that it is on the disk; a repeated change
changes nothing. A project has at most one pinned baseline: pinning another run
takes the first one's place.
"""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

import pydantic
from starlette import requests as starlette_requests
from starlette import responses

from training_monitor.core import run_tags as tags_lib
from training_monitor.server import access as access_lib
from training_monitor.server import errors
from training_monitor.server import http_io
from training_monitor.server import query as query_lib
from training_monitor.server import writer as writer_lib
from training_monitor.server.batches import apply

_MAX_BODY = 64 << 10

Request = starlette_requests.Request
Response = responses.Response


class TagsAndBaseline:
  """Changes tags and the baseline; has the API's handlers, too."""

  def __init__(self, writer: writer_lib.Writer):
    self._writer = writer

  async def tag(
    self, project: int, training: int, add: object = (), remove: object = ()
  ) -> list[str]:
    """Adds and removes tags of a run; returns the tags it then has.

    Raises:
      ApiError: 400, one of them can be no tag or they are too many; 404, the
        project has no such run.
    """
    return await self._change(
      project, training, _tag_change({"add": add, "remove": remove})
    )

  async def _change(
    self, project: int, training: int, change: query_lib.TagChange
  ) -> list[str]:
    return await writer_lib.durable(
      self._writer.run(
        lambda t: _change_tags(t, project, training, change.add, change.remove)
      )
    )

  async def pin(self, project: int, training: int, pinned: bool) -> None:
    """Makes a run its project's baseline, or no longer.

    Raises:
      ApiError: 404, the project has no such run.
    """
    await writer_lib.durable(
      self._writer.run(lambda t: _pin(t, project, training, pinned))
    )

  def add_routes(self, add: Callable[..., None]) -> None:
    """Adds them by `add(method, path, name, summary, handler, ...)`."""
    one = "/api/v1/trainings/{id:int}"
    add(
      "POST",
      f"{one}/tags",
      "tag_training",
      "Adds tags to a training and takes others away.",
      self._tags,
      scope="ingest",
      body="tags",
      answer="tags",
    )
    for method, name, summary in (
      ("PUT", "pin_training", "Makes a training its project's baseline."),
      ("DELETE", "unpin_training", "The training is no baseline any more."),
    ):
      add(method, f"{one}/pin", name, summary, self._pin, scope="ingest")

  async def _tags(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    body = await http_io.read_body(request, _MAX_BODY)
    change = _tag_change(
      http_io.parse_plain(body, '{"add": [tags], "remove": [tags]}')
    )
    tags = await self._change(who.project, http_io.id_of(request), change)
    return http_io.json_answer({"tags": tags})

  async def _pin(self, request: Request, who: access_lib.Principal) -> Response:
    pinned = request.method == "PUT"
    await self.pin(who.project, http_io.id_of(request), pinned)
    return http_io.json_answer({"pinned": pinned})


def _tag_change(body: object) -> query_lib.TagChange:
  try:
    return query_lib.TagChange.model_validate(body)
  except pydantic.ValidationError as error:
    raise query_lib.refusal(query_lib.TagChange, error) from None


def _require(t: apply.Transaction, project: int, training: int) -> None:
  if not t.sql.rows(
    "SELECT 1 FROM monitor_training_project WHERE training_id = ? AND"
    " project_id = ?",
    (training, project),
  ):
    raise errors.ApiError(404, f"this project has no training {training}")


def _tags_of(t: apply.Transaction, training: int) -> list[str]:
  return [
    row[0]
    for row in t.sql.rows(
      "SELECT tag FROM monitor_training_tag WHERE training_id = ? ORDER BY tag",
      (training,),
    )
  ]


def _change_tags(
  t: apply.Transaction,
  project: int,
  training: int,
  add: Sequence[str],
  remove: Iterable[str],
) -> list[str]:
  _require(t, project, training)
  before = _tags_of(t, training)
  after = (set(before) | set(add)) - set(remove)
  if len(after) > max(tags_lib.MOST, len(before)):
    raise errors.wrong(
      [
        errors.fault(
          "add",
          list(add),
          f"a run has at most {tags_lib.MOST} tags; this one would have"
          f" {len(after)}, take some away",
        )
      ]
    )
  t.sql.many(
    "DELETE FROM monitor_training_tag WHERE training_id = ? AND tag = ?",
    [(training, tag) for tag in before if tag not in after],
  )
  t.tag([(training, tag) for tag in after if tag not in before])
  if after != set(before):
    _changed(t, training)
  return sorted(after)


def _pin(
  t: apply.Transaction, project: int, training: int, pinned: bool
) -> None:
  _require(t, project, training)
  before = [
    row[0]
    for row in t.sql.rows(
      "SELECT training_id FROM monitor_pinned_baseline WHERE project_id = ?",
      (project,),
    )
  ]
  if pinned == (training in before):
    return
  t.sql.run(
    "DELETE FROM monitor_pinned_baseline WHERE project_id = ?", (project,)
  )
  if pinned:
    t.sql.run(
      "INSERT INTO monitor_pinned_baseline (project_id, training_id,"
      " pinned_at) VALUES (?, ?, ?)",
      (project, training, t.now),
    )
  for one in {training, *before}:
    _changed(t, one)


def _changed(t: apply.Transaction, training: int) -> None:
  """Records a change of the run, which its listeners receive."""
  t.sql.run(
    "UPDATE training SET updated_at = ? WHERE id = ?", (t.now, training)
  )
  t.changed(training, "training", training)
