"""What an evaluation's or baseline's rollouts come to."""

from __future__ import annotations

from tunix.rl.multi_turn.monitor.schema import progress
from tunix.rl.multi_turn.monitor.server import sql as sql_lib


def update(sql: sql_lib.Sql, kind: str, id_: int, now: str) -> None:
  """Brings the figures of a row in line with its rollouts.

  Rates are over the rollouts that are completed: one that failed says nothing
  of the policy. Every one that has ended counts as done.
  """
  ((ended, valid, successes, reward, turns),) = sql.rows(
      "SELECT COUNT(CASE WHEN status IN ('completed', 'failed', 'cancelled')"
      " THEN 1 END), COUNT(CASE WHEN status = 'completed' THEN 1 END),"
      " COUNT(CASE WHEN status = 'completed' AND task_success = 1 THEN 1 END),"
      " AVG(CASE WHEN status = 'completed' THEN reward END), AVG(CASE WHEN"
      " status = 'completed' THEN num_turns END) FROM rollout WHERE"
      f" source_type = '{kind}' AND {kind}_id = ?",
      (id_,),
  )
  ((status, total, percent),) = sql.rows(
      f'SELECT status, total_tasks, progress_percent FROM "{kind}" WHERE id ='
      " ?",
      (id_,),
  )
  if total:
    percent = progress.measuring(status, ended, total)
  sql.run(
      f'UPDATE "{kind}" SET success_rate = ?, avg_reward = ?, avg_turns = ?,'
      " successful_tasks = ?, completed_tasks = ?, progress_percent = ?,"
      " updated_at = ? WHERE id = ?",
      (
          successes / valid if valid else None, reward,
          None if turns is None else float(turns), successes, ended, percent,
          now, id_,
      ),
  )  # pyformat: disable
