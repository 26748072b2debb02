"""Every figure of a page, worked out again from what was sent."""

import datetime
import html
import re

import monitor_server
import numpy as np
import pytest
from scipy import stats

pytestmark = pytest.mark.timeout(400)
FAMILIES = ("click", "drag", "type")
TOTAL, DONE = 40, 20


class Told:
  """A run of random outcomes; arrays are the test's own record of it."""

  def __init__(self, server):
    rng = np.random.default_rng(5)
    self.server = server
    self.times_N = 1.7e9 + np.cumsum(rng.uniform(5.0, 9.0, DONE))
    self.rewards_N = rng.random(DONE)
    names = [f"{f}-{n}" for f in FAMILIES for n in range(4)]
    # place -> [(task, greedy, broke, won)]
    self.tries = {
      place: [
        (task, greedy, rng.random() < 0.2, rng.random() < chance)
        for task in names
        for greedy in (False, True)
        for _ in range(2)
      ]
      for place, chance in (("B", 0.2), ("E5", 0.5), ("E15", 0.8), ("E16", 0))
    }
    self.groups = [
      [
        (rng.random() < 0.25, float(rng.choice([0.0, 0.25, 1.0])))
        for _ in range(4)
      ]
      for _ in range(6)
    ] + [[(False, 1.0)] * 4]
    self.advantages = rng.normal(size=(len(self.groups), 4)).round(4)
    rollouts = [
        {"rollout_id": f"{place}-{n}", "task_id": task, "model_path": "m",
         "baseline_id" if place == "B" else "eval_id": place,
         "temperature": 0.0 if greedy else 1.0, "num_turns": 1 + n % 5,
         "status": "failed" if broke else "completed", "reward": float(won),
         "task_success": bool(won and not broke)}
        for place, tries in self.tries.items()
        for n, (task, greedy, broke, won) in enumerate(tries)
    ]  # fmt: skip
    rollouts += [
        {"rollout_id": f"g{group}-{n}", "task_id": names[group],
         "model_path": "m", "step_id": "S20", "group": group, "env_index": n,
         "status": "failed" if broke else "completed",
         # A broken rollout has a reward, too, which the policy did not decide.
         "reward": 0.0 if broke else reward,
         "task_success": not broke and reward == 1.0,
         "summary_json": {} if broke else {
             "advantages": [self.advantages[group, n]],
             "advantage": self.advantages[group, n],
         }}
        for group, members in enumerate(self.groups)
        for n, (broke, reward) in enumerate(members)
    ]  # fmt: skip
    server.post({
        "training": {"client_id": "T", "run_name": "r", "status": "running",
                     "total_steps": TOTAL, "current_step": DONE},
        "tasks": [{"task_id": n, "app_name": n.split("-")[0],
                   "description": n} for n in names],
        "steps": [
            {"client_id": f"S{n}", "step": n, "reward_mean": reward,
             "metrics_json": {"time": time, "reward_mean": reward}}
            for n, (time, reward) in enumerate(
                zip(self.times_N.tolist(), self.rewards_N.tolist()), 1)
        ],
        "evals": [{"client_id": f"E{n}", "step": n, "total_tasks": 60}
                  for n in (5, 15, 16)],
        "baselines": [{"client_id": "B", "model_path": "m"}],
        "rollouts": rollouts,
    })  # fmt: skip

  def text(self, path):
    """A page's words, one blank between them."""
    reply = self.server.http.get(path)
    assert reply.status_code == 200, reply.text
    words = re.sub(r"<svg.*?</svg>|<[^>]*>", " ", reply.text, flags=re.S)
    return " ".join(html.unescape(words).split())

  def counted(self, place, family=None, mode=None):
    """(successes, completed) of a measurement."""
    own = [
      won
      for task, greedy, broke, won in self.tries[place]
      if not broke
      and (family is None or task.startswith(family))
      and (mode is None or greedy == (mode == "greedy"))
    ]
    return sum(own), len(own)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  with monitor_server.sqlite_server(tmp_path_factory.mktemp("f")) as server:
    yield Told(server)


def percent(value):
  return f"{100 * value:.1f} %"


def seconds(text):
  """Returns the seconds of a duration on a page."""
  units = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
  return sum(
    float(n) * units[u]
    for n, u in re.findall(r"([\d.]+) (ms|s|min|h|d)\b", text)
  )


@pytest.mark.parametrize("mode", [None, "sampled", "greedy"])
def test_the_success_table_is_what_was_tried(recorded, mode):
  page = recorded.text("/runs/1/evals" + (f"?mode={mode}" if mode else ""))
  for family in (*FAMILIES, "all"):
    if family == "all":
      family = f"all, {mode or 'sampled'}"
    line = page[page.index(f" {family} ", page.index("step 16")) :]
    family = family.partition(",")[0]
    cells = re.findall(r"([\d.]+ %) (\d+)/(\d+)", line)[:4]
    for place, shown in zip(("B", "E5", "E15", "E16"), cells, strict=True):
      wins, tries = recorded.counted(
        place, None if family == "all" else family, mode or "sampled"
      )
      assert shown == (percent(wins / tries), str(wins), str(tries)), (
        family,
        place,
      )


def test_a_measurements_interval_counts_what_counts(recorded):
  """Also where nothing succeeded: what broke is no failure of the policy."""
  points = recorded.server.get("/api/v1/trainings/1/curves", names="x")["evals"]
  assert [e["step"] for e in points] == [0, 5, 15, 16]
  for point, place in zip(points, ("B", "E5", "E15", "E16")):
    wins, tries = recorded.counted(place, mode="sampled")
    assert sum(t[2] for t in recorded.tries[place]) > 0
    assert (point["n"], point["rate"]) == (tries, wins / tries), place
    interval = stats.binomtest(wins, tries).proportion_ci(method="wilson")
    assert point["low"] == pytest.approx(interval.low, abs=1e-4)
    assert point["high"] == pytest.approx(interval.high, abs=1e-4)
  tile = recorded.text("/runs/1")
  low, high = percent(interval.low), percent(interval.high)
  assert f"evaluation, step 16 0.0 % {low} … {high}, n={tries}" in tile
  assert "the evaluation is sampled, with its 95 % interval" in tile


def test_headlines_are_means_of_the_last_ten_steps(recorded):
  """Of the run's page and of the runs list alike, as in the terminal."""
  mean = recorded.rewards_N[-10:].mean()
  run = re.search(r"reward ([\d.]+)", recorded.text("/runs/1")).group(1)
  row = recorded.server.http.get("/").text.partition("<tbody>")[2]
  listed = re.search(r"</svg> <b>([\d.]+)</b>", row).group(1)
  assert float(run) == float(listed) == pytest.approx(mean, rel=0.006)
  assert abs(mean - recorded.rewards_N[-1]) > 0.05


def test_a_steps_figures_are_of_the_members_that_count(recorded):
  page = recorded.text("/runs/1/steps/20")
  valid = [[r for broke, r in group if not broke] for group in recorded.groups]
  flat = np.array([r for rewards in valid for r in rewards])
  assert sum(b for group in recorded.groups for b, _ in group) > 0
  head = re.search(
    r"reward ([\d.]+) success ([\d.]+ %) (\d+)/(\d+) groups with a gradient"
    r" (\d+) of"
    r" (\d+) (\d+) broke",
    page,
  )
  assert float(head.group(1)) == pytest.approx(flat.mean(), rel=0.006)
  wins = int((flat == 1.0).sum())
  informative = sum(len(set(rewards)) > 1 for rewards in valid)
  assert head.groups()[1:] == (
    percent(wins / len(flat)),
    str(wins),
    str(len(flat)),
    str(informative),
    "7",
    str(28 - len(flat)),
  )
  for group, rewards in enumerate(valid):
    line = page[page.index(f" group {group} ") :]
    mean = float(re.search(r"mean ([\d.]+)", line).group(1))
    assert mean == pytest.approx(np.mean(rewards), rel=0.006)
    line = line.partition(f" group {group + 1} ")[0]
    shown = [float(x) for x in re.findall(r"([+-]\d\.\d\d)", line)]
    expected = [
      advantage
      for advantage, (broke, _) in zip(
        recorded.advantages[group], recorded.groups[group]
      )
      if not broke
    ]
    assert shown == pytest.approx(expected, abs=0.006), group


def test_time_left_progress_and_silence(recorded):
  page = recorded.server.http.get("/runs/1").text
  remaining = seconds(re.search(r"about <b>(.*?)</b> left", page).group(1))
  pace = np.diff(recorded.times_N).mean()
  assert remaining == pytest.approx(pace * (TOTAL - DONE), abs=1.0)
  shown = re.search(r'<progress max="100" value="([\d.]+)"', page).group(1)
  assert float(shown) == pytest.approx(100 * DONE / TOTAL)
  assert f"step {DONE} of {TOTAL}" in recorded.text("/runs/1")
  heard = recorded.server.rows("training")[0]["last_heartbeat"]
  now = datetime.datetime.now(datetime.timezone.utc)
  last_time = datetime.datetime.fromisoformat(str(heard).replace("Z", "+00:00"))
  assert abs((now - last_time.replace(tzinfo=now.tzinfo)).total_seconds()) < 300
  for ago, silent in ((20, False), (75, True), (100_000, True), (-50, False)):
    then = (now - datetime.timedelta(seconds=ago)).strftime(
      "%Y-%m-%d %H:%M:%S.%f"
    )
    with recorded.server.engine.begin() as connection:
      connection.exec_driver_sql(
        "UPDATE training SET last_heartbeat = ?", (then,)
      )
    for path in ("/", "/runs/1"):
      page = recorded.text(path)
      assert (" silent " in page.partition("Live")[0]) == silent or path == "/"
    assert ("nothing heard since" in page) == silent, ago


def test_curves_are_the_readings(recorded):
  curves = recorded.server.get(
    "/api/v1/trainings/1/curves", names="reward_mean", points=10_000
  )
  assert curves["step"] == list(range(1, DONE + 1))
  np.testing.assert_allclose(
    curves["series"]["reward_mean"], recorded.rewards_N, rtol=1e-6
  )
  halves = recorded.server.get(
    "/api/v1/trainings/1/curves", names="reward_mean", points=10
  )
  assert halves["bucket"] == 2
  np.testing.assert_allclose(
    halves["series"]["reward_mean"],
    recorded.rewards_N.reshape(-1, 2).mean(1),
    rtol=1e-6,
  )
