"""Changes tags of runs, and the pinned baseline, for the dashboard's forms.

Promises: a change that returns is on the disk; a repeated one changes nothing.
A project has at most one pinned baseline: pinning another run takes the first
one's place.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import pydantic

from training_monitor.core import run_tags as tags_lib
from training_monitor.server import errors
from training_monitor.server import query as query_lib
from training_monitor.server import writer as writer_lib
from training_monitor.server.batches import apply


class TagsAndBaseline:
  """Changes tags and the baseline."""

  def __init__(self, writer: writer_lib.Writer):
    self._writer = writer

  async def tag(
    self, project: int, training: int, add: object = (), remove: object = ()
  ) -> None:
    """Adds and removes tags of a run.

    Raises:
      ApiError: 400, one of them can be no tag or they are too many; 404, the
        project has no such run.
    """
    try:
      change = query_lib.TagChange.model_validate(
        {"add": add, "remove": remove}
      )
    except pydantic.ValidationError as error:
      raise query_lib.refusal(query_lib.TagChange, error) from None
    await writer_lib.durable(
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


def _require(t: apply.Transaction, project: int, training: int) -> None:
  if not t.sql.rows(
    "SELECT 1 FROM monitor_training_project WHERE training_id = ? AND"
    " project_id = ?",
    (training, project),
  ):
    raise errors.ApiError(404, f"this project has no training {training}")


def _change_tags(
  t: apply.Transaction,
  project: int,
  training: int,
  add: Sequence[str],
  remove: Iterable[str],
) -> None:
  _require(t, project, training)
  before = {
    row[0]
    for row in t.sql.rows(
      "SELECT tag FROM monitor_training_tag WHERE training_id = ?", (training,)
    )
  }
  after = (before | set(add)) - set(remove)
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
    [(training, tag) for tag in before - after],
  )
  t.tag([(training, tag) for tag in after - before])
  if after != before:
    _changed(t, training)


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
