"""A group's attempts on one screen, and the episodes of a run's first page."""

import re

import monitor_server
import pytest

W, H = 160, 120
# attempt -> (succeeded, what it did turn by turn).
CLICK = {"action_type": "click", "tool_args": {"x": 40, "y": 60}}
NEAR = {"action_type": "click", "tool_args": {"x": 43, "y": 58}}
DOUBLE = {"action_type": "click", "tool_args": {"x": 40, "y": 60, "count": 2}}
TYPE = {"action_type": "type", "tool_args": {"text": "farm"}}
ATTEMPTS = (
  (True, (CLICK, TYPE)),
  (True, (NEAR, TYPE)),
  (False, (CLICK, DOUBLE)),
)


def body(sha):
  rollouts, turns, actions, shown = [], [], [], []
  for n, (won, did) in enumerate(ATTEMPTS):
    rollouts.append({
        "rollout_id": f"r{n}", "task_id": "open-door", "model_path": "m",
        "step_id": "S", "group": 7, "env_index": n, "status": "completed",
        "reward": float(won), "task_success": won, "num_turns": len(did),
    })  # fmt: skip
    for place, action in enumerate(did, 1):
      turn = f"r{n}:turn:{place}"
      turns.append({"client_id": turn, "rollout_id": f"r{n}", "turn": place})
      actions.append({"client_id": f"{turn}:a", "turn_id": turn, **action})
      shown.append(
        {
          "client_id": f"{turn}:o",
          "turn_id": turn,
          "obs_type": "screenshot_before",
          "screenshot_uri": f"sha256:{sha}",
        }
      )
  # They begin later, and nothing of them can be seen yet.
  rollouts += [
      {"rollout_id": f"w{n}", "task_id": "open-door", "model_path": "m",
       "step_id": "S", "group": 8, "env_index": n, "status": "running"}
      for n in range(20)
  ]  # fmt: skip
  return monitor_server.joined(
    monitor_server.base(),
    {
      "rollouts": rollouts,
      "turns": turns,
      "actions": actions,
      "observations": shown,
    },
  )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  with monitor_server.sqlite_server(tmp_path_factory.mktemp("g")) as running:
    sha, image = monitor_server.screenshot(3, (W, H))
    running.http.put(f"/api/v1/screenshots/{sha}", content=image)
    running.post(body(sha))
    yield running


def drawn(page):
  """(label of the turn, succeeded rings, failed rings, captions)."""
  picture = page[page.index('class="together"') :]
  picture = picture.partition("</ul>")[0]
  turn = re.search(r"<li class=\"faint\">(turn \d)", picture).group(1)
  rings = [
    sum(
      part.count('class="ring"')
      for part in re.findall(rf'<g class="act {kind}">(.*?)</g>', picture)
    )
    for kind in ("won", "lost")
  ]
  captions = re.findall(r"</span> ([^<]*)</a>", picture)
  return turn, *rings, captions


@pytest.mark.parametrize("path", ["/runs/1", "/runs/1/steps/1"])
def test_attempts_are_drawn_where_a_failed_one_first_differs(server, path):
  page = server.http.get(path)
  assert page.status_code == 200, page.text
  # In the first turn all click at one place, a few pixels apart.
  assert drawn(page.text) == (
    "turn 2",
    0,
    2,
    ["type “farm”", "type “farm”", "double click"],
  )
  assert 'viewBox="0 0 160 120"' in page.text


def test_the_turn_that_is_asked_for_is_drawn(server):
  page = server.http.get("/runs/1/steps/1?turn=1").text
  assert drawn(page) == ("turn 1", 2, 1, ["click"] * 3)
  # A turn that no attempt took has no picture; the page has the rest.
  assert "together" not in server.http.get("/runs/1/steps/1?turn=9").text


def test_finished_episodes_with_a_screen_come_first(server):
  page = server.http.get("/runs/1").text
  latest = page[page.index('id="latest"') :].partition("</ol>")[0]
  assert latest.count("<li>") == 12
  first = latest.split("<li>")[1:4]
  assert all(
    "/thumbnail" in one and 'class="mark open"' not in one for one in first
  )
  assert latest.count("no screen") == 9


def test_a_measurement_speaks_of_no_gradients(server):
  evaluation = server.rows("eval")[0]["id"]
  page = server.http.get(f"/runs/1/eval/{evaluation}").text
  assert "gradient" not in page
