"""Tasks of a run: its own, with its own attempts, and what can be learned."""

import html
import re

import monitor_server
import pytest

STEPS = 8
# task -> success of its four attempts at each step, of the first run.
HABITS = {
  "stuck": lambda step, member: False,
  "solved": lambda step, member: True,
  "mixed": lambda step, member: member % 2 == 0,
  "learned": lambda step, member: step > STEPS // 2,
}


def body(run, tasks, habit=None):
  """A run with a group of each task at each step, and its measurements."""
  rollouts = [
      {"rollout_id": f"{run}/{step}.{n}.{member}", "task_id": task,
       "model_path": "m", "step_id": f"{run}{step}", "group": n,
       "env_index": member, "status": "completed",
       "reward": float(won), "task_success": won, "num_turns": 1,
       "temperature": 1.0}
      for step in range(1, STEPS + 1)
      for n, task in enumerate(tasks)
      for member in range(4)
      for won in [(habit or HABITS[task])(step, member)]
  ]  # fmt: skip
  return {
    "training": {"client_id": run, "run_name": run, "status": "running"},
    "tasks": [{"task_id": t, "description": f"Do {t}."} for t in tasks],
    "steps": [
      {"client_id": f"{run}{n}", "step": n} for n in range(1, STEPS + 1)
    ],
    "rollouts": rollouts,
  }


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
  with monitor_server.sqlite_server(tmp_path_factory.mktemp("t")) as server:
    first = body("first", list(HABITS))
    first["tasks"].append({"task_id": "exam", "description": "Do exam."})
    first["baselines"] = [{"client_id": "first/b", "status_message": "initial"}]
    first["evals"] = [{"client_id": "first/e", "step": STEPS}]
    for place, wins in (("b", 1), ("e", 3)):
      source = {"b": "baseline_id", "e": "eval_id"}[place]
      first["rollouts"] += [
          {"rollout_id": f"first/{place}.{n}", "task_id": "exam",
           "model_path": "m", source: f"first/{place}",
           "status": "completed", "task_success": n < wins,
           "reward": float(n < wins), "temperature": 1.0}
          for n in range(4)
      ] + [
          {"rollout_id": f"first/{place}.g", "task_id": "exam",
           "model_path": "m", source: f"first/{place}",
           "status": "completed", "task_success": True, "reward": 1.0,
           "temperature": 0.0}
      ]  # fmt: skip
    server.post(first)
    # A later run has the task `mixed`, too, and others of its own.
    foreign = [f"foreign-{n}" for n in range(30)]
    for _ in range(2):
      server.post(body("second", ["mixed", *foreign], lambda *_: True))
    yield server


def rows(server, path):
  """Task -> its line's words."""
  page = server.http.get(path)
  assert page.status_code == 200, page.text
  table = page.text.rpartition("<tbody>")[2].partition("</tbody>")[0]
  by_task = {}
  for line in table.split("</tr>")[:-1]:
    words = re.sub(r"<svg.*?</svg>|<[^>]*>", " ", line, flags=re.S)
    words = " ".join(html.unescape(words).split())
    by_task[words.split()[0]] = words
  return by_task


def test_a_run_lists_its_own_tasks_alone(two_runs):
  listed = rows(two_runs, "/runs/1/tasks")
  assert set(listed) == {*HABITS, "exam"}
  assert len(rows(two_runs, "/runs/2/tasks")) == 25  # The first page of 31.
  assert len(rows(two_runs, "/runs/2/tasks?page=1")) == 6


def test_a_task_is_learnable_or_not(two_runs):
  listed = rows(two_runs, "/runs/1/tasks")
  for task, word, rate, change in (
    ("stuck", "never", "0.0 % 0/32", "+0 points"),
    ("solved", "always", "100.0 % 32/32", "+0 points"),
    ("mixed", "sometimes", "50.0 % 16/32", "+0 points"),
    ("learned", "always", "50.0 % 16/32", "+100 points"),
  ):
    assert f" {word} {rate} {change}" in listed[task], listed[task]
  assert " 4 of 4 " in listed["mixed"] and " 0 of 4 " in listed["stuck"]
  # Held-out: sampled attempts of the first and last measurement, not added.
  assert "held-out sometimes – – – 25.0 % 1/4 75.0 % 3/4" in listed["exam"]
  assert list(listed)[0] == "mixed"  # The most to learn comes first.
  assert set(rows(two_runs, "/runs/1/tasks?solved=always")) == {
    "solved",
    "learned",
  }
  assert set(rows(two_runs, "/runs/1/tasks?split=held-out")) == {"exam"}
  assert list(rows(two_runs, "/runs/1/tasks?sort=change"))[0] == "learned"
  assert set(rows(two_runs, "/runs/1/tasks?q=do+mix")) == {"mixed"}


def test_attempts_of_later_runs_hide_none_of_an_earlier_one(two_runs):
  """A later run made many attempts at the same task."""
  (task,) = [t["id"] for t in two_runs.rows("task") if t["task_id"] == "mixed"]
  own_rollouts = {
    r["id"]
    for r in two_runs.rows("rollout")
    if r["task_id"] == task and r["rollout_id"].startswith("first/")
  }
  page = two_runs.http.get(f"/runs/1/tasks/{task}").text
  table = page.rpartition("<tbody>")[2]
  shown = {int(n) for n in re.findall(r'href="/rollouts/(\d+)"', table)}
  assert shown == own_rollouts and len(own_rollouts) == 32
  assert (
    "No attempt of this run"
    in two_runs.http.get(f"/runs/2/tasks/{two_runs.rows('task')[0]['id']}").text
  )


def test_a_task_whose_attempts_all_broke_off_has_a_page(two_runs):
  """Without an attempt that was decided there is none to draw."""
  broken = body("third", ["broken"], lambda *_: False)
  for rollout in broken["rollouts"]:
    rollout |= {"status": "failed", "task_success": None, "reward": None}
  two_runs.post(broken)
  (task,) = [t["id"] for t in two_runs.rows("task") if t["task_id"] == "broken"]
  page = two_runs.http.get(f"/runs/3/tasks/{task}")
  assert page.status_code == 200, page.text
  assert "Do broken." in page.text and 'class="checkpoints"' not in page.text


def test_a_wrong_filter_is_named(two_runs):
  answer = two_runs.http.get("/runs/1/tasks?solved=often")
  assert answer.status_code == 400
  assert "never" in answer.text and "sometimes" in answer.text
