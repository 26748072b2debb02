"""Items of one batch that concern the same rows."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import monitor_server
import pytest

FIELDS = {
  "current_turn": st.integers(0, 9),
  "status": st.sampled_from(
    ("agent_init", "running", "completed", "failed", "cancelled")
  ),
  "reward": st.sampled_from((0.0, 0.5, 1.0)),
}
CHANGES = st.lists(
  st.tuples(st.sampled_from("ab"), st.fixed_dictionaries({}, optional=FIELDS)),
  min_size=1,
  max_size=16,
)
TIMES = ("created_at", "updated_at")


def stored(server, prefix):
  """name -> (its row, its history), of rollouts of this prefix."""
  by_name = {}
  for row in server.rows("rollout", where=f"rollout_id LIKE '{prefix}%'"):
    history = [
      (h["old_status"], h["new_status"], h["progress_percent"])
      for h in server.rows(
        "status_history",
        where=f"entity_type = 'rollout' AND entity_id = {row['id']}",
      )
    ]
    name = row["rollout_id"].removeprefix(prefix)
    for field in ("id", "rollout_id", *TIMES):
      del row[field]
    by_name[name] = (row, history)
  return by_name


@pytest.mark.slow
def test_changes_of_one_batch_come_in_their_order(lite):
  """As if each were a batch of its own, whatever columns the others change."""
  lite.post(monitor_server.base())
  runs = 0

  @settings(max_examples=100)
  @given(CHANGES)
  def check(changes):
    nonlocal runs
    runs += 1
    for way in ("one", "each"):
      prefix = f"{way}-{runs}-"
      rows = [
        {
          "client_id": f"{prefix}{name}",
          "step_id": "S",
          "task_id": "open-door",
          "model_path": "m",
          **fields,
        }
        for name, fields in changes
      ]
      for batch in [rows] if way == "one" else [[row] for row in rows]:
        lite.post({"rollouts": batch})
    assert stored(lite, f"one-{runs}-") == stored(lite, f"each-{runs}-")

  check()


def test_an_environment_that_waited_is_the_one_that_comes_with_its_rollout(
  server,
):
  """Told before its rollout, and without a name once more beside it."""
  server.post(monitor_server.base())
  (waits,) = server.post(
    {
      "environments": [
        {"client_id": "w", "env_type": "android", "status": "creating"}
      ]
    }
  )["environments"]
  reply = server.post({
      "rollouts": [{
          "client_id": "r", "step_id": "S", "task_id": "open-door",
          "env_id": "w",
      }],
      "environments": [{
          "rollout_id": "r", "env_type": "android", "status": "running",
      }],
  })  # fmt: skip
  (environment,) = server.rows("environment")
  assert environment["id"] == waits["id"] == reply["environments"][0]["id"]
  assert environment["status"] == "running"


def test_a_turn_said_twice_of_a_new_rollout_is_one(server):
  server.post(monitor_server.base())
  turn = {"rollout_id": "r", "turn": 1}
  server.post(
    {
      "rollouts": [{"client_id": "r", "step_id": "S", "task_id": "open-door"}],
      "turns": [{**turn, "reward": 0.5}, {**turn, "turn_time": 2.0}],
    }
  )
  server.post({"turns": [{**turn, "episode_done": True}]})
  (row,) = server.rows("turn")
  assert (row["reward"], row["turn_time"]) == (0.5, 2.0)
  assert row["episode_done"]


def test_environments_that_wait_are_told_apart(server):
  """One batch each: no row has their ids before their rollouts come."""
  server.post(monitor_server.base())
  ids = []
  for name in ("v", "w"):
    (waits,) = server.post(
      {
        "environments": [
          {"client_id": name, "env_type": "android", "gbox_id": f"box {name}"}
        ]
      }
    )["environments"]
    ids.append(waits["id"])
  server.post({"rollouts": [
      {"client_id": f"r{name}", "step_id": "S", "task_id": "open-door",
       "env_id": id_}
      for name, id_ in zip("vw", ids)
  ]})  # fmt: skip
  assert [(e["id"], e["gbox_id"]) for e in server.rows("environment")] == [
    (ids[0], "box v"),
    (ids[1], "box w"),
  ]
