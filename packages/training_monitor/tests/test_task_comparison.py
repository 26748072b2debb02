"""Two evaluations task by task, of one run and of two."""

import math
import re

import chromium
import monitor_server
import pytest
from training_monitor.server import access

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)
# Task -> successes of two attempts, of the runs "first" and "second".
OUTCOMES = {
    "both": (2, 2), "neither": (0, 0), "half": (1, 2), "gained": (0, 2),
    "lost": (2, 0), "won": (0, 1), "again": (0, 2), "<b>x</b>": (0, 1),
}  # fmt: skip


def run(name, place, extra=()):
  body = {
    "training": {"client_id": name, "run_name": name, "status": "running"},
    "tasks": [
      {"task_id": t, "description": f"Do {t}."} for t in (*OUTCOMES, *extra)
    ],
    "baselines": [{"client_id": f"{name}b", "status_message": "initial"}],
    "evals": [{"client_id": f"{name}e", "step": 4}],
  }
  parts = []
  for task in (*OUTCOMES, *extra):
    wins = OUTCOMES.get(task, (0, 0))[place]
    for n in range(2):
      parts.append(episode(
          f"{name}/{task}/{n}", 1, eval_id=f"{name}e", task_id=task,
          status="completed", task_success=n < wins, temperature=1.0,
      ))  # fmt: skip
    parts.append(episode(
        f"{name}/{task}/b", 1, baseline_id=f"{name}b", task_id=task,
        status="completed", task_success=False, temperature=1.0,
    ))  # fmt: skip
    parts.append(episode(
        f"{name}/{task}/greedy", 1, eval_id=f"{name}e", task_id=task,
        status="completed", task_success=task == "both", temperature=0.0,
    ))  # fmt: skip
    parts.append(episode(
        f"{name}/{task}/broke", 1, eval_id=f"{name}e", task_id=task,
        status="failed", task_success=True, temperature=1.0,
    ))  # fmt: skip
  return joined(body, *parts)


def fill(server):
  return [
    server.post(run(name, place, extra))["training_id"]
    for place, (name, extra) in enumerate(
      (("first", ("only-here",)), ("second", ()))
    )
  ]


def words(page):
  text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
  return re.sub(r" ([%,;])", r"\1", text)


def test_the_paired_difference_and_its_interval_are_the_tasks(server):
  first, second = fill(server)
  page = server.http.get(f"/compare?run={first}&run={second}&base={first}").text
  text = words(page)
  rates = [(a / 2, b / 2) for a, b in OUTCOMES.values()]
  by = [b - a for a, b in rates]
  n = len(by)
  mean = sum(by) / n
  half = 1.96 * math.sqrt(sum((d - mean) ** 2 for d in by) / (n - 1) / n)
  assert mean == pytest.approx(0.3125)
  assert f"{n} common tasks, sampled attempts" in text
  assert "+31.2 points" in text or "+31.25 points" in text, text
  shown = re.search(
    r"95% interval ([+−][\d.]+) points to ([+−][\d.]+) points", text
  )
  low, high = (float(v.replace("−", "-")) for v in shown.groups())
  assert low == pytest.approx(100 * (mean - half), abs=0.1)
  assert high == pytest.approx(100 * (mean + half), abs=0.1)
  assert "5 better" in text and "1 worse" in text and "2 equal" in text
  assert "1 of one side only" in text
  # Exact: six changes, at most one of them the other way.
  p = 2 * (math.comb(6, 0) + math.comb(6, 1)) / 2**6
  assert f"p = {p:.2g}" in text
  part = page[page.index("By task") : page.index('id="charts"')]
  assert "Do gained." in part and "Do both." not in part
  assert "<b>x</b>" not in part and "&lt;b&gt;x" in part


def test_only_changed_tasks_are_shown_unless_all_are_asked_for(server):
  fill(server)
  page = lambda query: server.http.get(f"/compare/tasks?{query}").text
  changed = page("a=eval-1&b=eval-2")
  rows = re.findall(r"data-row>([^<]+)<", changed)
  assert len(rows) == 6 and {"gained", "lost", "half"} <= set(rows)
  assert rows[:3] == ["again", "gained", "lost"]  # By the size of the change.
  everything = page("a=eval-1&b=eval-2&all=1")
  assert len(re.findall("data-row>", everything)) == 8
  greedy = page("a=eval-1&b=eval-2&mode=greedy")
  assert "No task changed" in greedy and "12.5% → 12.5% +0" in words(greedy)
  # Two evaluations of a run: the same page.
  own = page("a=baseline-1&b=eval-1")
  assert "9 common tasks" in words(own) and "3 better" in words(own)
  assert "/compare?run" not in own  # Of one run there is nothing to compare.
  # The attempts beside each other ended otherwise.
  pair = re.search(r"/rollouts/(\d+)/beside\?other=(\d+)", changed)
  won = {r["id"]: r["task_success"] for r in server.rows("rollout")}
  assert won[int(pair[1])] == 0 and won[int(pair[2])] == 1
  assert server.http.get(pair[0]).status_code == 200
  assert (
    "/compare/tasks?a=baseline-1&amp;b=eval-1"
    in server.http.get("/runs/1/evals").text
  )


def test_what_is_no_evaluation_of_the_project_is_refused(server, monkeypatch):
  fill(server)
  for query in ("", "a=eval-1", "a=eval-1&b=eval-99", "a=step-1&b=eval-1",
                "a=eval-1&b=eval-1%27", "a=eval-1&b=eval-" + "9" * 30,
                "a=eval-1&b=eval-2&mode=loud"):  # fmt: skip
    assert server.http.get(f"/compare/tasks?{query}").status_code == 400, query
  monkeypatch.setattr(access, "_ASKED_S", 0.0)
  token = access.make_token(server.engine, "other", ("read",))
  assert (
    server.http.get(
      "/compare/tasks?a=eval-1&b=eval-2",
      headers={"authorization": f"Bearer {token}"},
    ).status_code
    == 400
  )


def test_runs_without_common_tasks_are_compared_by_their_curves(lite):
  lite.post(run("first", 0))
  lite.post(base(run_name="bare", client_id="T2"))
  page = lite.http.get("/compare?run=1&run=2").text
  assert "By task" not in page
  apart = lite.http.get("/compare/tasks?a=eval-1&b=eval-2").text
  assert "no common task" in apart


@pytest.mark.slow
@pytest.mark.browser
def test_it_is_three_clicks_from_the_list_of_runs(context, lite):
  fill(lite)
  page = context.new_page()
  page.goto(lite.url + "/")
  page.click("input[name=run][value='1']")
  page.click("input[name=run][value='2']")
  page.click("text=Compare the chosen")
  page.wait_for_selector("text=By task: second")
  assert page.locator("text=Do gained.").is_visible()
  page.click("text=All common tasks")
  page.wait_for_selector("#by-task")
  page.click("#by-task >> text=all (8)")
  chromium.wait_for(
    page, "() => document.querySelectorAll('#by-task tbody tr').length === 8"
  )
  address = page.url
  for scheme, width in (("light", 1440), ("dark", 390)):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    for path in (address, f"{lite.url}/compare?run=1&run=2"):
      page.goto(path)
      assert page.evaluate(
        "document.documentElement.scrollWidth <= innerWidth"
      ), (path, width)
      assert chromium.faults_of(page) == []
  page.close()
