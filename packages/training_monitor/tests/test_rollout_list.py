"""The list of rollouts: what it holds, in what order, and by which index."""

import dataclasses
import itertools
import random
import re

import pytest
from starlette import datastructures
from training_monitor.dashboard import rollout_list
from training_monitor.schema import database
from training_monitor.schema import tables
import trials

FAULTS = tables.FAULTS


def fill(server, runs=("a", "b"), episodes=12):
  """Rollouts of every source, some without a reward; returns their rows."""
  rng = random.Random(0)
  for run in runs:
    body = {
      "training": {"client_id": run, "run_name": run},
      "tasks": [
        {
          "task_id": f"task-{n}",
          "description": f"Do 100% of {n}",
          "app_name": ("mail", "maps")[n % 2],
        }
        for n in range(4)
      ],
      "steps": [{"client_id": f"{run}-S{n}", "step": n} for n in (1, 2, 3)],
      "evals": [{"client_id": f"{run}-E", "step": 2}],
      "baselines": [{"client_id": f"{run}-B", "model_path": "m"}],
      "rollouts": [],
    }
    for n in range(episodes):
      source = rng.choice(
        [
          {"step_id": f"{run}-S{rng.randint(1, 3)}"},
          {"step_id": f"{run}-S{rng.randint(1, 3)}"},
          {"eval_id": f"{run}-E"},
          {"baseline_id": f"{run}-B"},
        ]
      )
      status = rng.choice(("completed", "completed", "failed", "running"))
      body["rollouts"].append(
        {
          "rollout_id": f"{run}-{n}",
          "task_id": f"task-{rng.randint(0, 3)}",
          "status": status,
          **source,
          "reward": rng.choice((None, 0.0, 0.1, 0.5, 1.0)),
          "task_success": rng.choice((True, False, None)),
          "num_turns": rng.choice((None, 1, 5, 5, 9)),
          "rollout_time": rng.choice((None, 0.25, 8.0)),
          rng.choice(FAULTS): rng.choice((0, 1, 2)),
          "error_message": "it broke" if status == "failed" else None,
          "status_message": rng.choice(
            (None, "failed", "max_turns", "succeeded", "env_error", "tired")
          ),
          "group": rng.randint(0, 2),
          "agent_reported_success": rng.choice((None, True, False)),
          "consecutive_repeated_actions": rng.choice((None, 0, 3, 4)),
        }
      )
    server.post(body)


def wanted(query):
  params = datastructures.QueryParams(query)
  return rollout_list.selection(rollout_list.RolloutListQuery.read(params))


def every(server):
  """All rollouts, with their training, step and task beside their columns."""
  parents = {
    kind: {row["id"]: row for row in server.rows(kind)}
    for kind in ("step", "eval", "baseline")
  }
  tasks = {row["id"]: row for row in server.rows("task")}
  rows = []
  for row in server.rows("rollout"):
    parent = parents[row["source_type"]][row[f"{row['source_type']}_id"]]
    rows.append(
      {
        **row,
        "training": parent["training_id"],
        "at": parent.get("step"),
        "app": tasks[row["task_id"]]["app_name"],
        "faults": sum(row[name] or 0 for name in FAULTS),
      }
    )
  return rows


def lost(row):
  return row["status"] == "completed" and row["task_success"] == 0


FILTERS = {
  "": lambda r: True,
  "status=completed": lambda r: r["status"] == "completed",
  "outcome=success": lambda r: r["task_success"] == 1,
  "outcome=failure": lambda r: (
    r["status"] == "completed" and r["task_success"] == 0
  ),
  "error=any": lambda r: r["faults"] or r["status"] == "failed",
  "error=broken": lambda r: r["status"] == "failed",
  "error=tool+name": lambda r: (r["tool_name_errors"] or 0) > 0,
  "from=0.1&to=0.5": lambda r: r["reward"] in (0.1, 0.5),
  "step=2": lambda r: r["at"] == 2,
  "source=eval": lambda r: r["source_type"] == "eval",
  "q=mail+100%25": lambda r: r["app"] == "mail",
  "q=1000": lambda r: False,
  "task=2": lambda r: r["task_id"] == 2,
  "group=1": lambda r: r["group"] == 1,
  "end=succeeded": lambda r: (
    r["status"] == "completed" and r["task_success"] == 1
  ),
  "end=failed": lambda r: lost(r) and r["status_message"] == "failed",
  "end=max_turns": lambda r: lost(r) and r["status_message"] == "max_turns",
  "end=env_error": lambda r: (
    r["status"] == "failed" and r["status_message"] == "env_error"
  ),
  "odd=claims+success": lambda r: lost(r) and r["agent_reported_success"] == 1,
  "odd=repeats+itself": lambda r: (r["consecutive_repeated_actions"] or 0) >= 3,
  "status=completed&from=0.5&step=3&error=any": lambda r: (
    r["status"] == "completed"
    and (r["reward"] or 0) >= 0.5
    and r["at"] == 3
    and r["faults"]
  ),
}
KEYS = {
  "newest": "id",
  "reward": "reward",
  "turns": "num_turns",
  "seconds": "rollout_time",
  "errors": "faults",
}


def test_every_filter_in_every_order_page_by_page(server, monkeypatch):
  fill(server)
  rows = every(server)
  combinations = trials.some(
    itertools.product(FILTERS, KEYS, ("up", "down"), (None, 1, 2))
  )
  with database.reading(server.engine) as connection:
    for query, sort, order, training in combinations:
      # Short, so that both ways to the newest ones are taken.
      monkeypatch.setattr(rollout_list, "_NEAR", 5 + len(query) % 20)
      asks = wanted(f"{query}&sort={sort}&order={order}")
      sign = 1 if order == "up" else -1
      expected = [
        r
        for r in rows
        if FILTERS[query](r) and training in (None, r["training"])
      ]
      expected.sort(
        key=lambda r: (
          r[KEYS[sort]] is None,
          sign * (r[KEYS[sort]] or 0),
          -r["id"],
        )
      )
      ids = []
      while page := rollout_list.pick(connection, 1, training, asks, 5):
        assert len(page) == min(5, len(expected) - len(ids)), query
        ids += [id_ for _, id_ in page]
        asks = dataclasses.replace(asks, after=page[-1])
      assert ids == [r["id"] for r in expected], (query, sort, order)
    assert rollout_list.pick(connection, 99, None, wanted("")) == []


EXTREMES = {
  "reward": (None, 1.7e308, -1.7e308, 1e308, *(n / 99 for n in range(9))),
  "rollout_time": (None, None, None, 1.7e308, -1.7e308),
  "num_turns": (None, 3, 1 << 53, (1 << 53) + 1, (1 << 63) - 1),
  "parse_errors": (None, 0, 1, -3, (1 << 63) - 1),
  "runtime_errors": (None, 0, 1, (1 << 53) + 1),
}


@pytest.mark.slow
def test_no_page_loses_or_repeats_what_is_beyond_all_reason(server):
  rng = random.Random(0)
  server.post(
    {
      "training": {"client_id": "a", "run_name": "a"},
      "tasks": [{"task_id": "t", "description": "d"}],
      "steps": [{"client_id": f"S{n}", "step": n} for n in range(1, 8)],
      "rollouts": [
        {
          "rollout_id": f"r{n}",
          "task_id": "t",
          "step_id": f"S{rng.randint(1, 7)}",
          **{name: rng.choice(v) for name, v in EXTREMES.items()},
        }
        for n in range(120)
      ],
    }
  )
  ids = {row["id"] for row in server.rows("rollout")}
  assert len(ids) == 120
  for sort, order, training, count in trials.some(
    itertools.product(KEYS, ("up", "down"), (None, 1), (3, 51))
  ):
    asks = wanted(f"sort={sort}&order={order}")
    with database.reading(server.engine) as connection:
      at_once = rollout_list.pick(connection, 1, training, asks, 200)
      assert {id_ for _, id_ in at_once} == ids and len(at_once) == 120
      paged = []
      while page := rollout_list.pick(connection, 1, training, asks, count):
        assert len(page) == min(count, 120 - len(paged)), (sort, order, count)
        paged += page
        asks = dataclasses.replace(asks, after=page[-1])
      assert paged == at_once, (sort, order, training, count)


def test_the_pages_lead_to_each_other(server, monkeypatch):
  fill(server)
  monkeypatch.setattr(rollout_list, "_PAGE", 7)
  shown_ids, path = [], "/rollouts?sort=reward&status=completed"
  while path:
    answer = server.http.get(path)
    assert answer.status_code == 200, answer.text
    shown_ids += re.findall(r'href="/rollouts/(\d+)" data-row', answer.text)
    more = re.search(r'class="button" href="([^"]*after=[^"]*)"', answer.text)
    path = more and more[1].replace("&amp;", "&")
  completed = [r for r in every(server) if r["status"] == "completed"]
  assert len(shown_ids) == len(set(shown_ids)) == len(completed) > 7
  run = server.http.get("/runs/2/rollouts?source=baseline&order=up").text
  ids = [int(i) for i in re.findall(r'href="/rollouts/(\d+)" data-row', run)]
  assert ids == [
    r["id"]
    for r in every(server)
    if (r["training"], r["source_type"]) == (2, "baseline")
  ]
  for wrong in ("sort=nothing", "status=odd", "error=x", "from=a", "step=-1",
                "after=1", "after=nan,1", "after=1,x", "source=z", "task=x",
                f"after=1,{1 << 62}", "outcome=maybe"):  # fmt: skip
    answer = server.http.get(f"/rollouts?{wrong}")
    assert answer.status_code == 400, wrong
    assert wrong.split("=")[0] in answer.text
  for last in ("", "sort=reward&", "order=up&", "sort=errors&"):
    answer = server.http.get(f"/rollouts?{last}after=1,{(1 << 62) - 1}")
    assert answer.status_code == 200, (last, answer.text)
  assert server.http.get("/runs/9/rollouts").status_code == 404


def test_lists_read_indices_and_no_rollout(server):
  """Rows of two kilobytes are read for the page that is shown, only."""
  if server.engine.dialect.name != "sqlite":
    pytest.skip("a small table is read whole on PostgreSQL, index or not")
  plans = []
  with database.reading(server.engine) as connection:

    class Explained:
      """Notes the plan of each statement, and runs it."""

      def execute(self, query):
        text = str(
          query.compile(server.engine, compile_kwargs={"literal_binds": True})
        )
        plans.append(
          [
            row[3]
            for row in connection.exec_driver_sql(
              "EXPLAIN QUERY PLAN " + text.replace("%%", "%")
            )
          ]
        )
        return connection.execute(query)

      def scalars(self, query):
        return self.execute(query).scalars()

    for query in (
      "sort=errors",
      "sort=reward",
      "sort=errors&order=up",
      "from=0.5",
      "error=any",
      "sort=newest&order=up",
      "status=failed",
      "task=1",
      "q=mail&sort=turns",
      "step=2&outcome=failure",
      "group=1",
      *(f"odd={o}" for o in rollout_list.ODD),
      *(f"end={e}&sort=turns" for e in rollout_list.ENDS),
    ):
      for training in (None, 1):
        rollout_list.pick(Explained(), 1, training, wanted(query))
  assert len(plans) > 14
  assert "idx_rollout_step_faulty" in str(plans[0])
  for plan in plans:
    for part in plan:
      if re.search(r"(SCAN|SEARCH) rollout", part):
        assert (
          re.search(
            r"COVERING INDEX idx_rollout_\w+_(listed|faulty|ended)", part
          )
          # The newest are looked for among the last few thousand.
          or part.endswith("PRIMARY KEY (rowid>? AND rowid<?)")
          or part == "SEARCH rollout"  # The last id.
        ), plan


def test_few_turns_are_few_for_the_task_in_the_run(server):
  body = {
    "tasks": [{"task_id": t, "description": t} for t in ("long", "short")],
    "steps": [{"client_id": "S1", "step": 1}],
    "training": {"client_id": "a", "run_name": "a"},
    "rollouts": [],
  }
  # Half of the other successes' mean is 5 of the long one, 1.5 of the short.
  for task, turns in (("long", (10, 10, 5, 6, 14)), ("short", (3, 3, 2))):
    body["rollouts"] += [
        {"rollout_id": f"{task}{n}", "task_id": task, "step_id": "S1",
         "status": "completed", "task_success": True, "num_turns": n_turns}
        for n, n_turns in enumerate(turns)
    ]  # fmt: skip
  body["rollouts"][-1] |= {"rollout_id": "lost", "task_success": False}
  server.post(body)
  other = {
    **body,
    "training": {"client_id": "b", "run_name": "b"},
    "steps": [{"client_id": "S9", "step": 1}],
  }
  other["rollouts"] = [
      {"rollout_id": f"b{n}", "task_id": "long", "step_id": "S9",
       "status": "completed", "task_success": True, "num_turns": 100}
      for n in range(3)
  ]  # fmt: skip
  server.post(other)
  names = {row["id"]: row["rollout_id"] for row in server.rows("rollout")}
  # Of all runs, five of the long one are few.
  every = ["long4", "long3", "long2", "long1", "long0"]
  for path, expected in (
    ("/runs/1/rollouts?", ["long2"]),
    ("/runs/2/rollouts?", []),
    ("/rollouts?", every),
    ("/rollouts?step=2&", []),
    ("/rollouts?source=eval&", []),
    ("/rollouts?order=up&", every[::-1]),
    ("/rollouts?q=short&", []),
  ):
    text = server.http.get(f"{path}odd=success+in+few+turns").text
    shown = re.findall(r'href="/rollouts/(\d+)" data-row', text)
    assert [names[int(i)] for i in shown] == expected, path
