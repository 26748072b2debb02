"""Tags, the pinned baseline and lists of rollouts, in a real browser."""

import json
import shlex

import chromium
import monitor_server
import pytest

config_lib = pytest.importorskip(
  "tunix.rl.multi_turn.config", reason="needs the framework"
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  """Three runs with curves, the first of them with rollouts."""
  folder = tmp_path_factory.mktemp("runs")
  with monitor_server.sqlite_server(folder) as running:
    for place, name in enumerate(("first", "second", "third")):
      body = {
          "training": {
              "client_id": name, "run_name": name, "status": "completed",
              "current_step": 8, "total_steps": 8, "model_name": "m",
              "config_json": {"learner": {"learning_rate": place}},
              "tags": ["sweep", f"lr={place}"],
          },
          "tasks": [
              {"task_id": f"t{n}", "description": f"Task {n}",
               "app_name": ("mail", "maps")[n % 2]} for n in range(4)
          ],
          "steps": [
              {"client_id": f"{name}-{n}", "step": n, "status": "completed",
               "reward_mean": n / 10 + place / 4,
               "metrics_json": {"entropy": 1 / n + place, "time": n * 60.0,
                                "success_rate": n / 20 + place / 4,
                                "success_rate/mail": n / 16}}
              for n in range(1, 9 - place)
          ],
          "rollouts": [
              {"rollout_id": f"{name}-{n}", "step_id": f"{name}-{n % 6 + 1}",
               "task_id": f"t{n % 4}", "status": ("completed", "failed")[
                   n % 5 == 4], "reward": n % 7 / 6, "task_success": n % 7 > 4,
               "num_turns": n % 9 + 1, "max_turns": 10, "rollout_time": n / 4,
               "parse_errors": int(n % 6 == 0), "status_message": "succeeded"}
              for n in range(60 if not place else 3)
          ],
      }  # fmt: skip
      running.post(body)
    yield running


@pytest.fixture
def tab(server, context):
  opened = chromium.Tab(context, server.url)
  yield opened
  opened.check()
  opened.page.close()


def names(page):
  return page.locator("#runs tbody th a[data-row]").all_inner_texts()


def test_tags_are_given_and_chosen_by(server, tab):
  page = tab.page
  tab.go("/runs/1?smooth=0.5")
  page.fill(".add-tag", "keep, \u03b2=0.1")
  page.keyboard.press("Enter")
  page.wait_for_selector("#run-tags >> text=keep")
  assert "smooth=0.5" in page.url
  assert page.locator("#run-tags .tag a").all_inner_texts() == [
    "keep",
    "lr=0",
    "sweep",
    "\u03b2=0.1",
  ]
  page.click('button[aria-label="remove the tag lr=0"]')
  chromium.wait_for(
    page, "document.querySelectorAll('#run-tags .tag').length === 3"
  )
  assert not chromium.faults_of(page)
  page.click("#run-tags >> text=keep")
  page.wait_for_url("**/?tag=keep")
  assert names(page) == ["first"]
  tab.go("/")
  assert names(page) == ["third", "second", "first"]
  page.select_option('select[name="tag"]', "sweep")
  page.wait_for_url("**tag=sweep")
  page.click("#runs >> text=lr=1")
  page.wait_for_url("**tag=lr*")
  assert names(page) == ["second"]
  page.reload()
  assert names(page) == ["second"]
  assert not chromium.faults_of(page)
  page.click('a.tag.on:has-text("lr=1")')
  chromium.wait_for(
    page, "document.querySelectorAll('#runs tbody tr').length === 3"
  )


def readings(page, key):
  return page.locator(f'.chart[data-key="{key}"] .readout').inner_text()


def test_a_pinned_baseline_stays_and_is_drawn(server, tab):
  page = tab.page
  tab.go("/runs/2")
  page.click('button:has-text("Pin as the baseline")')
  page.wait_for_selector('button:has-text("Unpin")')
  tab.go("/")
  assert names(page)[0] == "second"
  assert page.locator("#runs tr.first .pinned").count() == 1
  tab.go("/runs/1")
  page.click('a:has-text("over second")')
  page.wait_for_url("**against=2")
  chromium.ready(page)
  assert "entropy, baseline" in readings(page, "entropy")
  # The other one's last step is the seventh.
  assert page.locator(".tile .other").first.inner_text() == (
    "\u22120.25 to second at step 7"
  )
  assert not chromium.faults_of(page)
  tab.go("/compare?run=1&run=2")
  assert "base=2" in page.url
  tab.go("/compare?run=1&run=3")
  page.click('a:has-text("With the baseline second")')
  page.wait_for_url("**base=2*")
  assert page.locator("#compared tbody tr").count() == 3
  assert not chromium.faults_of(page)
  tab.go("/runs/2")
  page.click('button:has-text("Unpin")')
  page.wait_for_selector('button:has-text("Pin as the baseline")')


def ids(page):
  return page.locator("#rollouts tbody th a").all_inner_texts()


def test_rollouts_are_narrowed_sorted_and_paged_through(server, tab):
  page = tab.page
  tab.go("/")
  page.click('a:has-text("All rollouts")')
  page.wait_for_url("**/rollouts")
  assert ids(page) == [str(n) for n in range(66, 16, -1)]
  assert not chromium.faults_of(page)
  page.click('a:has-text("More")')
  page.wait_for_url("**after=*")
  page.wait_for_selector('a[data-row]:text-is("1")')
  assert ids(page) == [str(n) for n in range(16, 0, -1)]
  tab.go("/runs/1/rollouts")
  page.select_option('select[name="error"]', "parse")
  page.wait_for_url("**error=parse*")
  chromium.wait_for(
    page, "document.querySelectorAll('#rollouts tbody tr').length === 10"
  )
  page.fill('input[name="from"]', "0.5")
  page.keyboard.press("Enter")
  page.wait_for_url("**from=0.5*")
  page.click('#rollouts a:text-is("reward")')
  page.wait_for_url("**sort=reward*")
  page.wait_for_selector('#rollouts .choice a[aria-current]:has-text("reward")')
  expected = sorted(
    (n for n in range(0, 60, 6) if n % 7 / 6 >= 0.5),
    key=lambda n: (-(n % 7), -n),
  )
  assert ids(page) == [str(n + 1) for n in expected]
  page.reload()
  assert ids(page) == [str(n + 1) for n in expected]
  assert page.input_value('input[name="from"]') == "0.5"
  page.keyboard.press("j")
  page.keyboard.press("Enter")
  page.wait_for_url(f"**/rollouts/{expected[0] + 1}")
  tab.go("/runs/1/rollouts?q=maps&step=2")
  assert len(ids(page)) == sum(n % 4 % 2 and n % 6 == 1 for n in range(60))
  page.locator("#rollouts td a.chip, #rollouts td a .chip").first.click()
  page.wait_for_url("**task=*")


# --- settings -----------------------------------------------------------------


@pytest.fixture(scope="module")
def configured(server):
  """Number of a run whose defaults were recorded, its configuration."""
  config = config_lib.load_config([
      "steps=7", "gym=desktop", "learner.learning_rate=3e-5",
      "sampling.temperature=0.5", "policy.config={layers: 2, width: 32}",
      "run.seed=3", "environment.options={note: 'yes: a $HOME'}",
  ])  # fmt: skip
  server.post({"training": {
      "client_id": "told", "run_name": "told", "status": "completed",
      "config_json": config.to_dict(),
      "changed_settings": json.dumps(config_lib.changed(config)),
  }})  # fmt: skip
  number = 4  # After the three.
  return number, config


def test_settings_that_differ_are_marked(configured, tab):
  number, config = configured
  page = tab.page
  tab.go(f"/runs/{number}/config")
  marked = page.locator("tr.changed th").all_inner_texts()
  assert marked == sorted(config_lib.changed(config))
  assert "learner.learning_rate" in marked and "policy.config" in marked
  every = page.locator("table.config tbody tr").count()
  page.click("text=Show only these")
  assert page.locator("table.config tbody tr").count() == len(marked) < every
  row = page.locator("tr", has_text="run.seed").first
  assert row.locator("td").all_inner_texts() == ["3", "0"]


def test_the_command_repeats_the_run(configured, tab):
  number, config = configured
  page = tab.page
  page.context.grant_permissions(["clipboard-read", "clipboard-write"])
  tab.go(f"/runs/{number}/config")
  page.click("text=Copy the command")
  page.wait_for_selector("text=Copied")
  line = page.evaluate("navigator.clipboard.readText()")
  words = shlex.split(line)
  assert words[:3] == ["python", "-m", "tunix.rl.multi_turn.train"]
  again = config_lib.load_config(words[3:]).to_dict()
  expected = config.to_dict()
  for name in ("dir", "name"):
    again["run"].pop(name), expected["run"].pop(name)
  assert again == expected


@pytest.mark.slow
def test_a_run_of_an_older_client_has_no_defaults(tab):
  page = tab.page
  tab.go("/runs/1/config")
  assert page.locator("tr.changed").count() == 0
  assert page.locator("table.config tbody tr").count() == 1
  assert not page.locator("#run-command").count()
