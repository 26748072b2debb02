"""Changes the labels and notes of rollouts and of their turns, for forms.

Promises: as for tags, a project changes its own rollouts only, and a change
that returns is on the disk; a repeated label is stored once.
"""

from __future__ import annotations

import pydantic

from training_monitor.server import errors
from training_monitor.server import query as query_lib
from training_monitor.server import writer as writer_lib
from training_monitor.server.batches import apply
from training_monitor.server.batches import references

_MOST = 500
"""Labels and notes of a rollout."""


class Annotations:
  """Changes labels and notes."""

  def __init__(self, writer: writer_lib.Writer):
    self._writer = writer

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
