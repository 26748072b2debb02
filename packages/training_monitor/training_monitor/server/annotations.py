"""Changes the labels and notes of rollouts and of their turns.

    GET, POST /api/v1/rollouts/{name}/annotations
    DELETE    /api/v1/rollouts/{name}/annotations/{id}
    GET       /api/v1/labels

Promises: as for tags, a project changes its own rollouts only, and an answer
means that the change is on the disk; a repeated label is stored once.
"""

from __future__ import annotations

from typing import Callable

import pydantic
from starlette import requests as starlette_requests
from starlette import responses

from training_monitor.server import access as access_lib
from training_monitor.server import errors
from training_monitor.server import http_io
from training_monitor.server import queries as queries_lib
from training_monitor.server import query as query_lib
from training_monitor.server import writer as writer_lib
from training_monitor.server.batches import apply
from training_monitor.server.batches import references

_MAX_BODY = 64 << 10
_MOST = 500
"""Labels and notes of a rollout."""

Request = starlette_requests.Request
Response = responses.Response


class Annotations:
  """Changes labels and notes; has the API's handlers, too."""

  def __init__(self, writer: writer_lib.Writer, queries: queries_lib.Queries):
    self._writer = writer
    self._queries = queries

  async def add(self, project: int, rollout: int, body: object) -> None:
    """Adds a label, a note or both.

    Args:
      project: Project that the rollout belongs to.
      rollout: its id.
      body: fields of `query.Annotation`.

    Raises:
      ApiError: 400, wrong values, or too many; 404, there is no such rollout
        or turn.
    """
    try:
      annotation = query_lib.Annotation.model_validate(body)
    except pydantic.ValidationError as error:
      raise query_lib.refusal(query_lib.Annotation, error) from None
    if annotation.label is None and annotation.note is None:
      raise errors.wrong(
        [errors.fault("label", None, "give a label, a note or both")]
      )
    await writer_lib.durable(
      self._writer.run(lambda t: add(t, project, rollout, annotation))
    )

  async def remove(self, project: int, rollout: int, id_: int) -> None:
    """Takes a label or a note away.

    Raises:
      ApiError: 404, the rollout has no such one.
    """
    await writer_lib.durable(
      self._writer.run(lambda t: _remove(t, project, rollout, id_))
    )

  def add_routes(
    self, add: Callable[..., None], get: Callable[..., None]
  ) -> None:
    """Adds them; see `app.MonitorApp`."""
    path = "/api/v1/rollouts/{name}/annotations"
    get(
      path,
      "annotations",
      "Labels and notes of a rollout and its turns.",
      lambda p, r: self._queries.annotations(p, http_io.name_of(r)),
    )
    get(
      "/api/v1/labels",
      "labels",
      "Labels, with how many rollouts have them.",
      lambda p, r: self._queries.labels(p),
    )
    add(
      "POST",
      path,
      "annotate",
      "Adds a label or a note.",
      self._post,
      scope="ingest",
      body="annotation",
    )
    add(
      "DELETE",
      f"{path}/{{id:int}}",
      "remove_annotation",
      "Takes a label or a note away.",
      self._delete,
      scope="ingest",
    )

  async def _post(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    body = await http_io.read_body(request, _MAX_BODY)
    fields = http_io.parse_plain(body, '{"turn": 3, "label": "…", "note": "…"}')
    rollout = await self._rollout(request, who)
    await self.add(who.project, rollout, fields)
    return await self._answer(request, who)

  async def _delete(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    rollout = await self._rollout(request, who)
    await self.remove(who.project, rollout, http_io.id_of(request))
    return await self._answer(request, who)

  async def _rollout(self, request: Request, who: access_lib.Principal) -> int:
    return await http_io.in_thread(
      self._queries.rollout_id, who.project, http_io.name_of(request)
    )

  async def _answer(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    return http_io.json_answer(
      await http_io.in_thread(
        self._queries.annotations, who.project, http_io.name_of(request)
      )
    )


def _require(t: apply.Transaction, project: int, rollout: int) -> int:
  """Returns the training of a rollout, which must be the project's."""
  checker = references.References(t.sql, project)
  checker.check_numbers("rollout", [rollout])
  if ("rollout", rollout) not in checker.mine:
    raise errors.ApiError(404, f"this project has no rollout {rollout}")
  ((training,),) = t.sql.rows(
    "SELECT COALESCE(s.training_id, e.training_id, b.training_id) FROM"
    " rollout r LEFT JOIN step s ON s.id = r.step_id LEFT JOIN eval e ON"
    " e.id = r.eval_id LEFT JOIN baseline b ON b.id = r.baseline_id WHERE"
    " r.id = ?",
    (rollout,),
  )
  return training


def add(
  t: apply.Transaction,
  project: int,
  rollout: int,
  annotation: query_lib.Annotation,
) -> None:
  """Adds a label, a note or both, in the transaction that is open.

  Raises:
    ApiError: 400, too many; 404, the project has no such rollout or turn.
  """
  training = _require(t, project, rollout)
  turn = None
  if annotation.turn is not None:
    rows = t.sql.rows(
      "SELECT id FROM turn WHERE rollout_id = ? AND turn = ?",
      (rollout, annotation.turn),
    )
    if not rows:
      raise errors.ApiError(
        404, f"rollout {rollout} has no turn {annotation.turn}"
      )
    turn = rows[0][0]
  before = t.sql.rows(
    "SELECT turn_id, label FROM monitor_annotation WHERE rollout_id = ?",
    (rollout,),
  )
  fresh = [
    (rollout, turn, label, note, t.now)
    for label, note in ((annotation.label, None), (None, annotation.note))
    if (label or note) and (label is None or (turn, label) not in before)
  ]
  if len(before) + len(fresh) > _MOST:
    raise errors.wrong(
      [
        errors.fault(
          "label",
          annotation.label,
          f"a rollout has at most {_MOST} labels and notes; take some away",
        )
      ]
    )
  t.sql.many(
    "INSERT INTO monitor_annotation (rollout_id, turn_id, label, note,"
    " created_at) VALUES (?, ?, ?, ?, ?)",
    fresh,
  )
  if fresh:
    t.changed(training, "rollout", rollout)


def _remove(t: apply.Transaction, project: int, rollout: int, id_: int) -> None:
  training = _require(t, project, rollout)
  if not t.sql.run(
    "DELETE FROM monitor_annotation WHERE id = ? AND rollout_id = ?",
    (id_, rollout),
  ):
    raise errors.ApiError(404, f"rollout {rollout} has no label or note {id_}")
  t.changed(training, "rollout", rollout)
