"""Questions about a run, and the clicks to the page that answers each.

A run of two tasks that learned one of them: its groups differ, an evaluation
before and after, an episode out of turns, one whose gym broke, one that is paid
without success. Each question is walked in a browser, by the links that are
there, and each page that the walk ends on is looked at by axe.
"""

import re

import chromium
import monitor_server
import numpy as np
import pytest
from training_monitor.dashboard import advice
from training_monitor.dashboard import curves
from training_monitor.dashboard.views import search_page

W, H = 160, 120
STEPS = 24
CLICK = {"action_type": "click", "tool_args": {"x": 40, "y": 60}}
OTHER = {"action_type": "click", "tool_args": {"x": 120, "y": 20}}
DOUBLE = {"action_type": "click", "tool_args": {"x": 40, "y": 60, "count": 2}}
TYPE = {"action_type": "type", "tool_args": {"text": "Secret farm"}}


def attempt(body, name, shas, won, did, thought="I look.", **fields):
  """Adds an episode's rows; its screen changes with each action."""
  status = "succeeded" if won else "failed"
  body["rollouts"].append({
      "rollout_id": name, "model_path": "m", "status": "completed",
      "status_message": status, "reward": float(won), "task_success": won,
      "num_turns": len(did), "max_turns": 6, "temperature": 1.0, **fields,
  })  # fmt: skip
  for place, action in enumerate(did, 1):
    turn = f"{name}:{place}"
    body["turns"].append({
        "client_id": turn, "rollout_id": name, "turn": place, "turn_time": 1.5,
        "metrics_json": {"thought": thought, "model_response": f"<{place}>",
                         "seconds": {"model": 1.0, "env": 0.5}},
    })  # fmt: skip
    body["actions"].append(
      {"client_id": f"{turn}:a", "turn_id": turn, **action}
    )
    body["observations"] += [
      {
        "client_id": f"{turn}:{n}",
        "turn_id": turn,
        "obs_type": kind,
        "screenshot_uri": f"sha256:{shas[place - 1 + n]}",
      }
      for n, kind in enumerate(("screenshot_before", "screenshot_after"))
    ]


def metrics(step):
  late = step > STEPS // 2
  return {
      "reward_mean": 0.9 if late else 0.3, "loss": 0.1, "grad_norm": 0.2,
      "success_rate": 0.9 if late else 0.3, "entropy": 1.0 - step / 50,
      "success_rate/open-door": 0.95, "success_rate/shut-door": 0.4,
      "informative_groups": 0.5, "turns_mean": 4.0 - 2.0 * late,
      "seconds_total": 10.0, "seconds_wait": 7.0, "seconds_learn": 2.0,
      "seconds_publish": 0.5, "model_share": 0.2, "env_share": 0.75,
      "status/max_turns": 0.3, "status/succeeded": 0.7, "time": 1e9 + step,
  }  # fmt: skip


def run(name, shas):
  body = {
      "training": {
          "client_id": name, "run_name": name, "status": "running",
          "total_steps": STEPS, "current_step": STEPS,
          "config_json": {"learner": {"learning_rate": len(name) / 1e5}},
      },
      "tasks": [{"task_id": t, "description": f"Do {t}.", "app_name": t}
                for t in ("open-door", "shut-door")],
      "steps": [
          {"client_id": f"{name}{n}", "step": n, "status": "completed",
           "reward_mean": metrics(n)["reward_mean"],
           "metrics_json": metrics(n)} for n in range(1, STEPS + 1)
      ],
      "baselines": [{"client_id": f"{name}b", "status_message": "initial"}],
      "evals": [{"client_id": f"{name}e", "step": STEPS}],
      "rollouts": [], "turns": [], "actions": [], "observations": [],
  }  # fmt: skip
  for step in (STEPS - 1, STEPS):
    for n, task in enumerate(("open-door", "shut-door")):
      for member in range(4):
        won = n == 0 and member < 3
        attempt(
            body, f"{name}/{step}.{n}.{member}", shas, won,
            (CLICK, TYPE) if won else (CLICK, DOUBLE), task_id=task,
            step_id=f"{name}{step}", group=n, env_index=member, batch=step,
        )  # fmt: skip
  lone = dict(task_id="shut-door", step_id=f"{name}{STEPS}", group=5)
  attempt(body, f"{name}/wander", shas, False, (OTHER,) * 4, **lone)
  body["rollouts"][-1] |= {
    "status_message": "max_turns",
    "consecutive_repeated_actions": 3,
  }
  attempt(
    body, f"{name}/paid", shas, False, (CLICK,), "The grader sleeps.", **lone
  )
  body["rollouts"][-1]["reward"] = 0.8
  attempt(body, f"{name}/broke", shas, False, (), **lone)
  body["rollouts"][-1] |= {
    "status": "failed",
    "status_message": "env_error",
    "runtime_errors": 1,
    "task_success": None,
    "error_message": "EnvStepError: the door fell",
  }
  for source, won in (("b", False), ("e", True)):
    key = {"b": "baseline_id", "e": "eval_id"}[source]
    for n in range(6):
      attempt(body, f"{name}/{source}{n}", shas, won,
              (CLICK, TYPE if won else DOUBLE), task_id="open-door",
              **{key: f"{name}{source}"})  # fmt: skip
  return body


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  with monitor_server.sqlite_server(tmp_path_factory.mktemp("q")) as running:
    shas = []
    for seed in range(5):
      sha, image = monitor_server.screenshot(seed, (W, H))
      running.http.put(f"/api/v1/screenshots/{sha}", content=image)
      shas.append(sha)
    for name in ("first", "second"):
      running.post(run(name, shas))
    yield running


def page(server, path):
  answer = server.http.get(path)
  assert answer.status_code == 200, answer.text
  return answer.text


def id_of(server, name):
  (row,) = server.rows("rollout", where=f"rollout_id = '{name}'")
  return row["id"]


def rollouts(server, query):
  """Names of the rollouts that a list of the first run shows."""
  text = page(server, f"/runs/1/rollouts?{query}")
  return {
    r["rollout_id"].removeprefix("first/")
    for r in server.rows("rollout")
    if f'href="/rollouts/{r["id"]}" data-row' in text
  }


def test_two_attempts_are_aligned_and_their_first_difference_is_marked(server):
  lost = id_of(server, f"first/{STEPS}.0.3")
  won = id_of(server, f"first/{STEPS}.0.2")
  text = page(server, f"/rollouts/{lost}/beside?other={won}")
  assert "They first differ in <b>turn 2</b>" in text
  assert "the first double click, the second type “Secret farm”" in text
  assert text.count("first difference") == 1
  # Without another one it is of the group, and ended otherwise.
  text = page(server, f"/rollouts/{lost}/beside")
  assert "They first differ in <b>turn 2</b>" in text
  assert f"step {STEPS}" in text and "mark won" in text
  group = page(server, f"/runs/1/steps/{STEPS}")
  assert f'href="/rollouts/{lost}/beside?other=' in group
  assert f'href="/rollouts/{lost}/beside?other=' in page(
    server, f"/rollouts/{lost}"
  )


def test_attempts_of_two_runs_and_of_different_length_are_compared(server):
  first = id_of(server, f"first/{STEPS}.0.0")
  second = id_of(server, f"second/{STEPS}.0.0")
  text = page(server, f"/rollouts/{first}/beside?other={second}")
  assert "They did the same in every turn." in text
  assert ">second</a>" in text
  wander = id_of(server, "first/wander")
  paid = id_of(server, "first/paid")
  text = page(server, f"/rollouts/{wander}/beside?other={paid}")
  assert "<b>turn 1</b>" in text and text.count("ended before") == 3
  same = server.http.get(f"/rollouts/{first}/beside?other={first}")
  assert same.status_code == 400 and "another rollout" in same.text
  assert (
    server.http.get(f"/rollouts/{first}/beside?other=99999").status_code == 404
  )


def test_a_task_is_shown_at_one_checkpoint_after_another(server):
  (task,) = server.rows("task", where="task_id = 'open-door'")
  text = page(server, f"/runs/1/tasks/{task['id']}")
  strips = text.partition('class="checkpoints"')[2].partition("</ol></li></ol>")
  before, _, later = strips[0].partition("evaluation at")
  assert "before training" in before and "double click" in before
  assert "type “Secret farm”" in later and "type “Secret" not in before
  first, last = id_of(server, "first/b0"), id_of(server, "first/e0")
  assert f'href="/rollouts/{first}/beside?other={last}"' in later
  # One that is only trained on is shown at the steps.
  (task,) = server.rows("task", where="task_id = 'shut-door'")
  text = page(server, f"/runs/1/tasks/{task['id']}")
  assert f"<b>step {STEPS - 1}</b>" in text and f"<b>step {STEPS}</b>" in text


def test_rollouts_are_found_by_how_they_ended_and_by_what_is_odd(server):
  assert rollouts(server, "end=max_turns") == {"wander"}
  assert rollouts(server, "end=env_error") == {"broke"}
  assert "wander" not in rollouts(server, "end=failed")
  assert rollouts(server, "odd=repeats+itself") == {"wander"}
  assert rollouts(server, "odd=reward+without+success") == {"paid"}
  assert rollouts(server, "odd=success+without+reward") == set()
  assert rollouts(server, "group=5") == {"wander", "paid", "broke"}
  answer = server.http.get("/runs/1/rollouts?end=asleep")
  assert answer.status_code == 400 and "max_turns" in answer.text


def test_a_success_in_few_turns_is_one_of_its_task(server):
  name = f"first/{STEPS}.0.0"
  server.post(
    {
      "training": {"client_id": "first"},
      "rollouts": [{"client_id": name, "rollout_id": name, "num_turns": 1}],
    }
  )
  assert rollouts(server, "odd=success+in+few+turns") == {f"{STEPS}.0.0"}
  server.post(
    {
      "training": {"client_id": "first"},
      "rollouts": [{"client_id": name, "rollout_id": name, "num_turns": 2}],
    }
  )


def test_the_first_sentence_compares_what_updates_began_and_ended_with():
  point = {"low": 0.0, "high": 0.0}
  evals = [
    {"name": "initial", "kind": "baseline", "rate": 0.0, **point},
    {"name": "warm_start", "kind": "baseline", "rate": 0.4, **point},
    {"name": "step 25", "kind": "eval", "rate": 0.8, **point},
    {"name": "step 50", "kind": "eval", "rate": 0.9, "low": 0.8, "high": 1.0},
  ]
  columns = curves.Columns(np.arange(0), {})
  for measured, sentence in (
    (evals, "40.0 % (warm_start) to 90.0 % (step 50)."),
    (evals[:2], "0.0 % (initial) to 40.0 % (warm_start), within"),
    (evals[2:], "80.0 % (step 25) to 90.0 % (step 50)."),
  ):
    (line,) = advice.lines(columns, measured)
    assert line["about"] == "learning"
    assert f"Evaluations: {sentence}" in line["text"]


@pytest.mark.parametrize(
  "shares, words, absent",
  [
    ((0.8, 0.1, 0.63), "idle 37 %", "more engine.slots or"),
    ((0.8, 0.1, 0.99), "more engine.slots or", "idle"),
    ((0.8, 0.1, None), "more engine.slots or", "idle"),
    ((0.2, 0.7, 0.3), "more environments at once", "engine.slots"),
  ],
)
def test_what_speeds_up_collecting_fits_the_engine(shares, words, absent):
  names = ("model_share", "env_share", "engine_busy")
  readings = {"seconds_total": 10.0, "seconds_wait": 7.0, "seconds_learn": 2.0}
  readings |= {n: v for n, v in zip(names, shares) if v is not None}
  values = {n: np.full(12, v) for n, v in readings.items()}
  lines = advice.lines(curves.Columns(np.arange(12), values), [])
  (line,) = [line for line in lines if line["about"] == "throughput"]
  assert words in line["text"] and absent not in line["text"]


def test_a_passage_that_is_cut_says_so(server):
  text = page(server, "/runs/1/search?q=sleeps")
  assert ">The grader <mark>sleeps</mark>.<" in text
  thought = "word " * 40 + "needle" + " word" * 40
  server.post({
      "training": {"client_id": "first"},
      "turns": [{"client_id": "first/wander:1", "rollout_id": "first/wander",
                 "turn": 1, "metrics_json": {"thought": thought}}],
  })  # fmt: skip
  text = page(server, "/runs/1/search?q=needle")
  assert re.search(">…(word )+<mark>needle</mark>( word)+…<", text)


def test_thoughts_responses_and_typed_text_are_searched(server, monkeypatch):
  text = page(server, "/runs/1/search?q=GRADER")
  assert "The <mark>grader</mark> sleeps." in text
  assert text.count("data-row") == 1 and "All turns were searched" in text
  typed = page(server, "/runs/1/search?q=secret+farm&outcome=failed")
  assert "data-row" not in typed
  typed = page(server, "/runs/1/search?q=secret+farm")
  assert typed.count("<mark>Secret</mark> farm") == 12
  # Names of fields and other runs' turns are no text of this run.
  assert "data-row" not in page(server, "/runs/1/search?q=model_response")
  assert "data-row" not in page(server, "/runs/1/search?q=100%25")
  # Out of time it says how far it came, and goes on from there.
  monkeypatch.setattr(search_page, "_BUDGET_S", 0.0)
  monkeypatch.setattr(search_page, "_CHUNK", 30)
  count, path = 0, "/runs/1/search?q=secret"
  for _ in range(20):
    text = page(server, path)
    count += text.count("data-row")
    if "All turns" in text:
      break
    path = text.partition('class="button" href="')[2].partition('"')[0]
    path = path.replace("&amp;", "&")
  assert count == 12 and "All turns" in text


def test_a_failed_run_shows_its_traceback(server):
  server.post({"training": {
      "client_id": "third", "run_name": "third", "status": "failed",
      "error_message": "ValueError: no door", "traceback": "Traceback: <a>\n b",
  }})  # fmt: skip
  (third,) = server.rows("training", where="run_name = 'third'")
  text = page(server, f"/runs/{third['id']}/log")
  assert "ValueError: no door" in text and "Traceback: &lt;a&gt;\n b" in text
  assert "Traceback" not in page(server, "/runs/1/log")


# question: where it is asked, the links that are followed, what answers it.
QUESTIONS = {
    "does it learn?": ("/runs/1", [], "Success in training rose from 30 %"),
    "why did this group fail?": ("/runs/1", [], "double click"),
    "which turn?": (
        "/runs/1", [".pairing >> nth=0"], "They first differ in turn 2"
    ),
    "is it reward hacking?": (
        "/runs/1", [".tabs >> text=Rollouts", "select:odd:reward without"
                    " success"], "0.8",
    ),
    "what did it think?": (
        "/runs/1", [".tabs >> text=Search", "fill:grader"],
        "The grader sleeps.",
    ),
    "which tasks can be learned?": (
        "/runs/1", [".tabs >> text=Tasks"], "sometimes"
    ),
    "shorter or longer?": ("/runs/1", [], "Turns of an episode"),
    "what bounds it?": (
        "/runs/1", [], "75 % in the environment: more environments at once"
    ),
    "what differs from another run?": (
        "/compare?run=1&run=2", [], "learner.learning_rate"
    ),
    "what changed between two checkpoints?": (
        "/runs/1/evals",
        ["#evals >> text=changed >> nth=0", "text=side by side >> nth=0"],
        "They first differ in turn 2",
    ),
    "the same task between checkpoints?": (
        "/runs/1/tasks", ["#tasks [data-row] >> nth=0"], "Over the checkpoints"
    ),
    "who ran out of turns?": (
        "/runs/1", [".advice >> text=run out of turns"], "max_turns"
    ),
    "what did the update train on?": (
        f"/runs/1/steps/{STEPS}", ["text=were learned from"], "of 8 rollouts"
    ),
    "what broke?": (
        "/runs/1", [".tabs >> text=Health"], "EnvStepError: the door fell"
    ),
}  # fmt: skip
CLICKS = 2


@pytest.fixture(scope="module", params=[(1440, "light"), (390, "dark")])
def tab(request, server):
  width, scheme = request.param
  with chromium.browser() as browser:
    context = browser.new_context(
      viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    yield chromium.Tab(context, server.url)
    context.close()


def follow(page, link):
  how, _, argument = link.partition(":")
  if how == "select":
    name, _, value = argument.partition(":")
    page.select_option(f'select[name="{name}"]', value)
  elif how == "fill":
    page.fill("#search", argument)
    page.press("#search", "Enter")
  else:
    page.click(link)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_question_is_answered_in_a_click_or_two(tab):
  page = tab.page
  for question, (start, links, answer) in QUESTIONS.items():
    assert tab.go(start) == 200, question
    assert len(links) <= CLICKS, question
    for link in links:
      follow(page, link)
      page.wait_for_load_state("load")
    chromium.wait_for(
      page,
      "(text) => document.querySelector('main').innerText.includes(text)",
      answer,
    )
    width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0, question
    assert not chromium.faults_of(page), question
  tab.check()
