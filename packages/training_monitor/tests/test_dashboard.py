"""The dashboard in a real browser, over a run that was really played."""

import io
import json
import re

import chromium
import monitor_server
from PIL import Image
import pytest

recorded_run = pytest.importorskip(
  "recorded_run", reason="needs the framework, whose desktop is played"
)
pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """A server with a run that goes on, and its recorder."""
  folder = tmp_path_factory.mktemp("dashboard")
  with monitor_server.sqlite_server(folder) as server:
    recorder = recorded_run.Recorder(server.url, folder / "spool").run()
    recorder.flush()
    yield server, recorder
    recorder.close()


@pytest.fixture
def tab(recorded, context):
  opened = chromium.Tab(context, recorded[0].url)
  yield opened
  opened.check()
  opened.page.close()


def ids(server):
  """(training, {step: id}, rollouts) of the recorded run."""
  training = next(
    t["id"] for t in server.rows("training") if t["run_name"] == "desktop-run"
  )
  rollouts = [
    r
    for r in server.rows("rollout")
    if r["rollout_id"].startswith("T-desktop-run/")
  ]
  return training, rollouts


def pages(server):
  training, rollouts = ids(server)
  run = f"/runs/{training}"
  (evaluation,) = server.rows("eval")
  (baseline,) = server.rows("baseline")
  return [
      "/", "/rollouts", run, f"{run}/rollouts", f"{run}/steps",
      f"{run}/steps/2", f"{run}/evals",
      f"{run}/eval/{evaluation['id']}",
      f"{run}/baseline/{baseline['id']}", f"{run}/tasks",
      f"{run}/tasks/{rollouts[0]['task_id']}", f"{run}/health",
      f"{run}/config", f"/rollouts/{rollouts[-1]['id']}",
  ]  # fmt: skip


def test_every_page_is_whole_and_accessible(recorded, tab):
  server, _ = recorded
  for path in pages(server):
    assert tab.go(path) == 200, path
    assert tab.page.locator("main").inner_text().strip(), path
    assert not chromium.faults_of(tab.page), path
    tab.check()


def test_dark_pages_have_contrast_too(recorded, tab):
  server, _ = recorded
  tab.page.emulate_media(color_scheme="dark")
  for path in pages(server)[1:4:2] + pages(server)[-1:]:
    assert tab.go(path) == 200, path
    assert not chromium.faults_of(tab.page, "color-contrast"), path


@pytest.mark.slow
def test_pages_are_whole_without_a_script(recorded):
  server, _ = recorded
  followed = set()
  for path in pages(server):
    answer = server.http.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|style=", answer.text)
    # Everything that is linked to is served.
    for link in re.findall(r'href="(/[^"#]*)"', answer.text):
      shape = re.sub(r"[0-9a-f.]*[0-9][0-9a-f.]*", "0", link)
      if shape not in followed:  # One of the links that differ only in numbers.
        linked = server.http.get(link.replace("&amp;", "&"))
        assert linked.status_code == 200, (path, link)
      followed.add(shape)


def test_the_runs_list_leads_through_the_step_to_the_rollout_by_keys(
  recorded, tab
):
  tab.go("/")
  keys = tab.page.keyboard
  keys.press("j")
  keys.press("Enter")
  tab.page.wait_for_url("**/runs/*")
  tab.page.locator('nav.tabs a:has-text("Steps")').press("Enter")
  tab.page.wait_for_url("**/steps")
  keys.press("j")
  keys.press("Enter")
  tab.page.wait_for_url("**/steps/3")
  keys.press("[")
  tab.page.wait_for_url("**/steps/2")
  keys.press("j")
  keys.press("Enter")
  tab.page.wait_for_url("**/rollouts/*")
  keys.press("u")
  tab.page.wait_for_url("**/steps/2")
  keys.press("?")
  assert tab.page.locator("dialog[open]").is_visible()
  keys.press("Escape")
  before = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
  keys.press("t")
  after = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
  assert before != after
  cookies = {c["name"]: c["value"] for c in tab.page.context.cookies()}
  assert cookies.get("theme")
  tab.page.reload()  # The theme is the server's from the first byte on.
  assert after == tab.page.evaluate(
    "getComputedStyle(document.body).backgroundColor"
  )
  tab.page.context.clear_cookies()


def test_curves_are_drawn_and_their_view_is_in_the_url(recorded, tab):
  server, _ = recorded
  training, _ = ids(server)
  tab.go(f"/runs/{training}?smooth=0.5&log=grad&first=2&more=seconds_total")
  page = tab.page
  chromium.ready(page)
  charts = page.locator(".chart")
  titles = page.locator(".chart figcaption").all_inner_texts()
  for title in ("Reward", "Success by task", "Loss", "KL", "Entropy",
                "Clip fraction", "Gradient norm", "Staleness",
                "Groups waiting", "Tokens per second",
                 "Model, environment, idle",
                 "seconds_total"):  # fmt: skip
    assert any(t.startswith(title) for t in titles), (title, titles)
  assert charts.locator("canvas").count() == charts.count()
  reward = page.locator('.chart[data-key="reward"] .readout b').inner_text()
  steps = {s["step"]: s["reward_mean"] for s in server.rows("step")}
  # From step 2 on, smoothed without the pull of the first value.
  expected = (0.25 * steps[2] + 0.5 * steps[3]) / 0.75
  assert float(reward) == pytest.approx(expected, rel=1e-3)
  assert (
    page.locator('.chart[data-key="grad"] [data-log]').get_attribute(
      "aria-pressed"
    )
    == "true"
  )
  assert page.locator("[data-reset]").is_visible()
  page.locator("[data-reset]").click()
  chromium.ready(page, 2)
  assert "first=" not in page.url and "smooth=0.5" in page.url
  plot = page.locator('.chart[data-key="reward"] .plot')
  plot.focus()
  plot.press("ArrowRight")
  link = page.locator('.chart[data-key="reward"] .readout a')
  assert link.get_attribute("href") == f"/runs/{training}/steps/1"
  plot.press("Enter")
  page.wait_for_url("**/steps/1")


def test_an_axis_of_steps_has_whole_ticks(recorded, tab):
  server, _ = recorded
  training, _ = ids(server)
  tab.page.add_init_script("""
    window.painted = [];
    const fill = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
      window.painted.push([String(text), y / this.canvas.height]);
      return fill.apply(this, arguments);
    };
  """)
  tab.go(f"/runs/{training}")
  chromium.ready(tab.page)
  # The lowest texts of a chart are its steps.
  steps = tab.page.evaluate(
    "window.painted.filter(([, y]) => y > 0.85).map(([text]) => text)"
  )
  assert "1" in steps and not [s for s in steps if not s.isdigit()], steps


def test_a_drag_zooms_and_the_url_says_where(recorded, tab):
  server, _ = recorded
  training, _ = ids(server)
  tab.go(f"/runs/{training}")
  chromium.ready(tab.page)
  plot = tab.page.locator('.chart[data-key="loss"] .u-over')
  plot.scroll_into_view_if_needed()
  box = plot.bounding_box()
  y = box["y"] + box["height"] / 2
  mouse = tab.page.mouse
  mouse.move(box["x"] + box["width"] * 0.55, y)
  mouse.down()
  mouse.move(box["x"] + box["width"] - 2, y, steps=4)
  mouse.up()
  chromium.ready(tab.page, 2)
  assert "first=2" in tab.page.url and "last=3" in tab.page.url
  tab.page.reload()
  chromium.ready(tab.page)
  series = tab.page.locator('.chart[data-key="loss"] .readout b').first
  assert float(series.inner_text()) == pytest.approx(0.2 / 3, rel=1e-3)


def counted(page, selector, condition):
  chromium.wait_for(
    page, f"document.querySelectorAll('{selector}').length {condition}"
  )


def test_a_step_shows_its_groups_and_filters(recorded, tab):
  server, _ = recorded
  training, rollouts = ids(server)
  page = tab.page
  tab.go(f"/runs/{training}/steps/2")
  assert page.locator("section.group").count() == len(recorded_run.FAMILIES)
  assert page.locator(".member").count() == 12
  assert page.locator(".member img.thumb").count() == 12
  page.locator('.choices a:has-text("with errors")').click()
  page.wait_for_url("**outcome=errors*")
  counted(page, ".group", "< 3")
  assert page.locator(".member:not(.dim)").count() >= 1
  page.go_back()
  counted(page, ".group", "=== 3")
  page.locator('.choices a:has-text("reward")').first.click()
  page.wait_for_url("**sort=reward*")
  page.wait_for_selector("#rollouts > .members")
  shown = [float(t) for t in page.locator(".member b").all_inner_texts()]
  assert shown == sorted(shown, reverse=True) and len(shown) == 12
  bars = page.locator(".histogram a")
  count = bars.count()
  assert count >= 2
  bars.nth(count - 1).focus()
  page.keyboard.press("Enter")
  page.wait_for_url("**from=*")
  counted(page, ".member", "< 12")
  wins = [float(t) for t in page.locator(".member b").all_inner_texts()]
  assert wins and set(wins) == {max(shown)}
  assert len(wins) == sum(s == max(shown) for s in shown)
  page.reload()
  assert page.locator(".member").count() == len(wins)


def test_a_step_uses_the_width_of_its_page(recorded, tab):
  server, _ = recorded
  training, _ = ids(server)
  width = lambda: tab.page.evaluate("document.documentElement.scrollWidth")
  try:
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    assert tab.go(f"/runs/{training}/steps/2") == 200
    group = tab.page.locator(".group.pictured").first
    shown = group.locator(".together").bounding_box()
    members = group.locator(".members").bounding_box()
    # Beside one another, to the right edge.
    assert members["y"] == shown["y"]
    assert members["x"] > shown["x"] + shown["width"]
    assert members["x"] + members["width"] > 1380 and width() == 1440
    # On a phone the attempts follow, four in a row.
    tab.page.set_viewport_size({"width": 390, "height": 844})
    shown = group.locator(".together").bounding_box()
    tops = [m.bounding_box()["y"] for m in group.locator(".member").all()[:4]]
    assert len(set(tops)) == 1
    assert tops[0] > shown["y"] + shown["height"] - 1
    assert width() == 390
  finally:
    tab.page.set_viewport_size({"width": 1400, "height": 900})


def test_a_tasks_attempts_have_axes(recorded, tab):
  server, _ = recorded
  training, rollouts = ids(server)
  assert tab.go(f"/runs/{training}/tasks/{rollouts[0]['task_id']}") == 200
  plot = tab.page.locator("svg.plotted")
  labels = plot.locator("text").all_text_contents()
  assert len(labels) == 5 and labels[0] == "0", labels
  assert any(word in labels[3] for word in ("step", "training")), labels
  dots = plot.locator("circle").count()
  assert dots == tab.page.locator("#tries tbody tr").count() > 1


def test_a_step_has_one_account_of_its_time_and_calls_beside_tokens(
  recorded, tab
):
  server, _ = recorded
  training, _ = ids(server)
  assert tab.go(f"/runs/{training}") == 200
  titles = tab.page.locator(".chart figcaption").all_inner_texts()
  titles = [" ".join(title.split()) for title in titles]
  assert sum("Step time" in title for title in titles) == 1, titles
  assert not any("Learner" in title for title in titles)
  tiles = tab.page.locator(".tile .label").all_inner_texts()
  assert tiles.index("model calls/s") == tiles.index("tokens/s") + 1


def test_advantages_are_those_that_the_update_used(recorded, tab):
  server, _ = recorded
  training, rollouts = ids(server)
  steps = {row["id"]: row["step"] for row in server.rows("step")}
  second = [r for r in rollouts if steps.get(r["step_id"]) == 2]
  advantages = {
    r["id"]: json.loads(r["summary_json"]).get("advantage") for r in second
  }
  assert sum(v is None for v in advantages.values()) == 1  # The one that broke.
  assert any(advantages.values())
  tab.go(f"/runs/{training}/steps/2")
  for id_, value in advantages.items():
    card = tab.page.locator(f'a.member[href="/rollouts/{id_}"]')
    shown = card.locator("small.up, small.down, small.faint").all_inner_texts()
    assert shown == ([] if value is None else [f"{value:+.2f}"])
  tab.go(f"/rollouts/{second[0]['id']}")
  assert f"advantage {advantages[second[0]['id']]:+.3f}" in (
    tab.page.locator("main").inner_text()
  )
  assert tab.page.locator('.choice a:text-is("advantage")').count() == 1


def rollout_with(server, kind):
  """A rollout of the recorded run that has an action of this kind."""
  _, rollouts = ids(server)
  with server.engine.connect() as connection:
    pairs = connection.exec_driver_sql(
      "SELECT t.rollout_id, t.turn FROM action a JOIN turn t ON t.id ="
      " a.turn_id WHERE a.action_type = ? ORDER BY a.id",
      (kind,),
    ).fetchall()
  rollout_ids = {r["id"] for r in rollouts}
  return next((r, t) for r, t in pairs if r in rollout_ids)


@pytest.mark.parametrize(
  "kind, drawn", [("click", "circle"), ("drag", "path"), ("scroll", "path")]
)
def test_an_action_is_drawn_where_it_was(recorded, tab, kind, drawn):
  server, _ = recorded
  rollout, turn = rollout_with(server, kind)
  tab.go(f"/rollouts/{rollout}?turn={turn}")
  page = tab.page
  shape = page.locator(f"#turn .overlay .act {drawn}").first
  assert shape.count() == 1
  image = page.locator("#turn .screen img").first
  chromium.wait_for(
    page, "document.querySelector('#turn .screen img').naturalWidth > 0"
  )
  if kind == "click":
    args = server.get(f"/api/v1/rollouts/{rollout}/turns")["items"][turn - 1][
      "actions"
    ][0]["tool_args"]
    width = int(image.get_attribute("width"))
    here, screen = shape.bounding_box(), image.bounding_box()
    x = (here["x"] + here["width"] / 2 - screen["x"]) / screen["width"]
    assert x * width == pytest.approx(args["x"], abs=0.02 * width)


def test_a_rollout_is_played_by_keys_and_its_turn_is_in_the_url(recorded, tab):
  server, _ = recorded
  rollout, _ = rollout_with(server, "type")
  tab.go(f"/rollouts/{rollout}")
  page = tab.page
  last = int(page.locator("#turn").get_attribute("data-last"))
  assert last >= 2
  page.keyboard.press("ArrowRight")
  page.wait_for_selector('#turn[data-number="2"]')
  assert "turn=2" in page.url
  page.keyboard.press("Home")
  page.wait_for_selector('#turn[data-number="1"]')
  page.locator("[data-speed] select").select_option("120")
  page.locator("main").focus()
  page.keyboard.press("Space")
  page.wait_for_selector(f'#turn[data-number="{last}"]')
  page.wait_for_selector('[data-play][aria-pressed="false"]')
  page.reload()
  assert page.locator("#turn").get_attribute("data-number") == str(last)


def test_tokens_are_those_that_were_sampled(recorded, tab):
  server, _ = recorded
  rollout, turn = rollout_with(server, "type")
  turns = server.get(f"/api/v1/rollouts/{rollout}/turns")["items"]
  recorded_turn = turns[turn - 1]
  tab.go(f"/rollouts/{rollout}?turn={turn}")
  page = tab.page
  tokens = page.locator(".tok")
  assert tokens.count() == len(recorded_turn["actions"][0]["tokens"])
  text = "".join(tokens.all_text_contents())
  assert text.removesuffix("<|im_end|>").strip() == (
    recorded_turn["metrics_json"]["model_response"].strip()
  )
  assert (
    page.locator(".typed kbd").inner_text()
    == (recorded_turn["actions"][0]["tool_args"]["text"])
  )
  strip = page.locator("#filmstrip a[aria-current] .line").inner_text()
  assert "type “" in strip
  title = tokens.first.get_attribute("title")
  assert f"id {recorded_turn['actions'][0]['tokens'][0]}" in title
  assert "log-prob" in title and "policy version" in title
  for heat in ("policy version", "entropy", "log-prob"):
    page.locator(f'.choice a:text-is("{heat}")').click()
    page.wait_for_selector(f'.choice a[aria-current]:text-is("{heat}")')
    assert page.locator(".tok.h0, .tok.h4, .tok.h8, .tok[class*=' h']").count()
  assert "heat=log-prob" in page.url
  entropies = recorded_turn["metrics_json"]["entropies"]
  assert f"entropy {entropies[0]:.4g}" in title


def test_the_loss_mask_is_what_updates_learned_from(recorded, tab):
  """Prompt and sampled tokens of rollouts of every kind, with the reason."""
  server, _ = recorded
  by_reason = {}
  for row in server.rows("rollout"):
    summary = json.loads(row["summary_json"])
    reason = summary.get("left_out", ["none said"])[0]
    kind = row["source_type"]
    by_reason.setdefault(reason if kind == "step" else kind, row["id"])
  sentences = {
    "": "trained on",
    "invalid": "ended by infrastructure",
    "zero_advantage": "no token of the sequence has an advantage",
    "baseline": "no update learns from it",
    "eval": "no update learns from it",
  }
  assert set(sentences) <= set(by_reason)
  for reason, words in sentences.items():
    rollout = by_reason[reason]
    recorded_turn = server.get(f"/api/v1/rollouts/{rollout}/turns")["items"][0]
    tab.go(f"/rollouts/{rollout}?heat=loss+mask")
    page = tab.page
    sampled = page.locator(f".tokens .mask-{'out' if reason else 'in'}")
    assert sampled.count() == len(recorded_turn["actions"][0]["tokens"])
    other = page.locator(f".tokens .mask-{'in' if reason else 'out'}")
    assert not other.count()
    legend = page.locator(".mask-key").all_inner_texts()
    assert any(words in text for text in legend)
    # A screenshot's placeholders are one run of many.
    runs = recorded_turn["metrics_json"]["prompt_tokens"]
    prompt = sum(n for _, n in runs)
    assert any(str(prompt) in text and "prompt" in text for text in legend)
    first = page.locator(".tokens .mask-prompt").first
    assert first.inner_text() == "<|im_start|>"
    assert page.locator(".tokens .mask-prompt small").first.inner_text() == (
      f"×{max(n for _, n in runs)}"
    )


def test_a_live_run_shows_what_comes_in(recorded, tab):
  server, recorder = recorded
  training, _ = ids(server)
  tab.go(f"/runs/{training}")
  page = tab.page
  chromium.ready(page)
  page.wait_for_selector(".live.on")
  before = page.locator("#run-head b").first.inner_text()
  recorder.step(recorded_run.STEPS + 1)
  recorder.flush()
  chromium.wait_for(
    page,
    "(b) => document.querySelector('#run-head b').textContent !== b",
    before,
  )
  chromium.ready(page, 2)
  assert page.locator("#run-head b").first.inner_text() == "4"
  assert page.locator("#latest").inner_text().count("step 4") == 12


def test_evaluations_and_who_flipped(recorded, tab):
  server, _ = recorded
  training, rollouts = ids(server)
  tab.go(f"/runs/{training}/evals")
  rows = tab.page.locator("#evals tbody tr")
  assert rows.count() == len(recorded_run.FAMILIES) + 2
  for line, greedy in ((rows.nth(3), False), (rows.nth(4), True)):
    total = line.locator(".rate small").all_inner_texts()
    for kind, text in zip(("baseline", "eval"), total, strict=True):
      completed = [
        r
        for r in rollouts
        if r["source_type"] == kind
        and r["status"] == "completed"
        and (r["temperature"] == 0) == greedy
      ]
      wins = sum(r["task_success"] for r in completed)
      assert text == f"{wins}/{len(completed)}"
  (baseline,), (evaluation,) = server.rows("baseline"), server.rows("eval")
  keys = f"a=baseline-{baseline['id']}&b=eval-{evaluation['id']}"
  flipped = 0
  for greedy, mode in ((False, "sampled"), (True, "greedy")):
    tab.go(f"/compare/tasks?{keys}&mode={mode}")
    before, after = (
      {
        r["task_id"]: r
        for r in rollouts
        if r["source_type"] == kind and (r["temperature"] == 0) == greedy
      }
      for kind in ("baseline", "eval")
    )
    links = tab.page.locator("#by-task td:last-child a")
    hrefs = {links.nth(n).get_attribute("href") for n in range(links.count())}
    assert hrefs == {
      f"/rollouts/{before[task]['id']}/beside?other={r['id']}"
      for task, r in after.items()
      if r["task_success"] != before[task]["task_success"]
    }
    flipped += len(hrefs)
  assert flipped, "the recorded run should have some"


def test_a_rollout_as_a_file(recorded):
  atif = pytest.importorskip("atif")
  server, _ = recorded
  rollout, _ = rollout_with(server, "drag")
  get = lambda name: server.http.get(f"/rollouts/{rollout}/export/{name}")
  document = get("json").json()
  assert document["turns"][0]["actions"] and document["task"]["description"]
  trajectory = atif.Trajectory.model_validate(get("atif").json())
  assert trajectory.schema_version == "ATIF-v1.7"
  assert len(trajectory.steps) == len(document["turns"]) + 1
  step = trajectory.steps[1]
  (action, *_) = document["turns"][0]["actions"]
  assert step.metrics.completion_token_ids == action["tokens"]
  assert step.tool_calls and step.observation.results
  assert trajectory.steps[0].message[1].source.path.startswith("data:image/png")
  page = get("html")
  assert "attachment" in page.headers["content-disposition"]
  assert page.text.count("data:image/png") >= len(document["turns"])
  assert "http" not in re.sub(r'http-equiv|"http://www.w3[^"]*"', "", page.text)
  film = Image.open(io.BytesIO(get("webp").content))
  assert film.format == "WEBP" and film.n_frames >= len(document["turns"])
  assert get("exe").status_code == 404


def test_the_page_that_is_saved_is_seen_without_a_server(
  recorded, context, tmp_path
):
  server, _ = recorded
  rollout, _ = rollout_with(server, "drag")
  path = tmp_path / "rollout.html"
  path.write_bytes(server.http.get(f"/rollouts/{rollout}/export/html").content)
  tab = chromium.Tab(context, "file://")
  tab.page.goto(path.as_uri())
  assert tab.page.locator("section img").count() >= 1
  assert tab.page.locator(".overlay .act path").count() >= 1
  sizes = tab.page.evaluate("[...document.images].map((i) => i.naturalWidth)")
  assert all(sizes)
  tab.check()
  tab.page.close()


def test_compare_shows_differences_and_a_baseline(recorded, tab):
  server, _ = recorded
  training, _ = ids(server)
  server.post({
      "training": {
          "client_id": "other", "run_name": "other", "status": "completed",
          "config_json": {"algorithm": {"advantage": "rloo", "kl_coef": 0.0}},
      },
      "steps": [{"client_id": "o1", "step": 1, "reward_mean": 0.25,
                 "metrics_json": {"entropy": 1.0}}],
  })  # fmt: skip
  other = next(
    t["id"] for t in server.rows("training") if t["run_name"] == "other"
  )
  tab.go("/")
  page = tab.page
  for box in (training, other):
    page.check(f'input[name="run"][value="{box}"]')
  page.click('button:has-text("Compare")')
  page.wait_for_url("**/compare*")
  chromium.ready(page)
  assert page.locator(".config code:text-is('algorithm.advantage')").count()
  assert not page.locator(".config code:text-is('algorithm.kl_coef')").count()
  page.click('a:has-text("everything (4)")')
  page.wait_for_url("**differences=0*")
  assert page.locator(".config tr").count() == 1 + 4
  page.click('a:has-text("differences only")')
  page.wait_for_url(lambda url: "differences" not in url)
  assert not page.locator(".config code:text-is('algorithm.kl_coef')").count()
  page.click('a:has-text("make it the baseline")')
  page.wait_for_url("**base=*")
  assert not chromium.faults_of(page)
  row = page.locator("#compared tbody tr", has_text="baseline").filter(
    has=page.locator("b:text-is('baseline')")
  )
  assert row.count() == 1
