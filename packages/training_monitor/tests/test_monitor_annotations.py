"""Labels and notes of turns and rollouts: forms, pages, archives."""

import html
import re

import chromium
import monitor_server
import pytest
import sqlalchemy as sa
from training_monitor.maintenance import run_files
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.server import access

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)
HOSTILE = "</textarea><script>alert(1)</script>' OR 1=1; DROP TABLE turn --"


def fill(server, count=3):
  server.post(
    joined(
      base(),
      *(
        episode(f"r{n}", status="completed", task_success=n == 1, reward=n)
        for n in range(1, count + 1)
      ),
    )
  )


def annotate(server, name, status=303, **data):
  """Posts a form as a page does; returns the notes, or the refusal's page."""
  ids = {r["rollout_id"]: r["id"] for r in server.rows("rollout")}
  reply = server.http.post(
    f"/rollouts/{ids.get(name, 99)}/annotations",
    data=data,
    headers={"origin": server.url},
    follow_redirects=False,
  )
  assert reply.status_code == status, reply.text
  return reply.text if status != 303 else notes(server, name)


def notes(server, name):
  return server.get(f"/api/v1/rollouts/{name}")["annotations"]


def short(items):
  return [(one["turn"], one["label"], one["note"]) for one in items]


def test_labels_and_notes_are_added_listed_and_taken_away(server):
  fill(server)
  answer = annotate(server, "r1", turn=2, label=" reward hack ", note="See!")
  assert short(answer) == [(2, "reward hack", None), (2, None, "See!")]
  again = annotate(server, "r1", turn=2, label="reward hack")
  assert again == answer  # Once, however often.
  annotate(server, "r1", label="reward hack")  # The rollout is another one.
  annotate(server, "r2", label="u\u0308", note="a\0b\r\nc" + "x" * 3990)
  names = lambda **q: [
    r["rollout_id"] for r in server.get("/api/v1/rollouts", **q)["items"]
  ]
  assert names(label="reward hack") == ["r1"]
  assert names(label="\u00fc") == ["r2"]
  assert names(label="none") == []
  first, *_, last = notes(server, "r1")
  assert short([last]) == [(None, "reward hack", None)]
  annotate(server, "r2", 404, remove=first["id"])
  assert len(annotate(server, "r1", remove=first["id"])) == 2
  annotate(server, "r1", 404, remove=first["id"])
  assert notes(server, "r2")[1]["note"] == "a\u2400b\nc" + "x" * 3990


@pytest.mark.parametrize(
  "data, says",
  [
    ({}, "label=.*: give a label, a note or both"),
    ({"label": "x" * 51}, "label=.*: a label has 1 to 50 characters"),
    ({"label": "a\u202eb"}, "label=.*: .*not seen"),
    ({"label": " "}, "a label, a note or both"),
    ({"note": "x" * 4001}, "note=.*: a note has 1 to 4000 characters"),
    ({"label": "a", "turn": "second"}, "turn=.*second.*: give its number"),
    ({"label": "a", "turn": -1}, "turn=.*-1.*: give its number"),
    ({"remove": "first"}, "remove=.*first.*: give its id"),
  ],
)
def test_wrong_ones_are_refused_by_name(lite, data, says):
  fill(lite, 1)
  assert re.search(says, annotate(lite, "r1", 400, **data))
  assert lite.rows("monitor_annotation") == []


def test_absent_rollouts_and_turns_are_404_and_there_is_a_most(lite):
  fill(lite, 1)
  annotate(lite, "r9", 404, label="a")
  annotate(lite, "r1", 404, label="a", turn=3)
  with database.writing(lite.engine) as connection:
    connection.execute(
      sa.text(
        "INSERT INTO monitor_annotation (rollout_id, label) VALUES (1, :label)"
      ),
      [{"label": f"l{n}"} for n in range(500)],
    )
  assert "at most 500" in annotate(lite, "r1", 400, label="a")


def test_raw_sql_keeps_to_the_rules(engine):
  run = lambda statement: sa.text(statement)
  with database.writing(engine) as connection:
    for statement in (
      "INSERT INTO training (run_name, log_path, model_name) VALUES ('r',"
      " '', '')",
      "INSERT INTO task (task_id, name, description) VALUES ('t', 'n', 'd')",
      "INSERT INTO step (training_id, step) VALUES (1, 1)",
      "INSERT INTO rollout (source_type, step_id, rollout_id, task_id,"
      " model_path) VALUES ('step', 1, 'x', 1, 'm')",
      "INSERT INTO monitor_annotation (rollout_id, label) VALUES (1, 'a')",
    ):
      connection.execute(run(statement))
    for values in (
      "1, NULL, NULL",
      "1, 'a', 'b'",
      "1, '', NULL",
      "1, ' a', NULL",
      "9, 'a', NULL",
      f"1, NULL, '{'x' * 4001}'",
    ):
      with pytest.raises(sa.exc.IntegrityError), connection.begin_nested():
        connection.execute(
          run(
            "INSERT INTO monitor_annotation (rollout_id, label, note) VALUES"
            f" ({values})"
          )
        )


def test_forms_need_this_servers_page_and_a_token_that_may_send(tmp_path):
  with monitor_server.sqlite_server(tmp_path, token="tm_secret") as server:
    fill(server, 1)
    reading = access.make_token(server.engine, "default", ("read",))
    other = access.make_token(server.engine, "other", ("ingest", "read"))
    own = {"origin": server.url}

    def form(data, token="tm_secret", **headers):
      return server.http.post(
        "/rollouts/1/annotations",
        data=data,
        follow_redirects=False,
        headers={
          "authorization": "",
          "cookie": f"{access.COOKIE}={token}",
          **headers,
        },
      )

    sent = {
      "label": HOSTILE[:50],
      "note": HOSTILE,
      "turn": "1",
      "next": "/rollouts/1?turn=1",
    }
    answer = form(sent, **own)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/rollouts/1?turn=1"
    count = lambda: len(server.rows("monitor_annotation"))
    assert count() == 2
    for headers in (
      {},
      {"origin": "http://evil.example"},
      {"origin": "null"},
      {**own, "sec-fetch-site": "cross-site"},
      {**own, "sec-fetch-site": "same-site"},
    ):
      for data in ({"label": "w"}, {"remove": "1"}):
        assert form(data, **headers).status_code == 403, headers
    assert form({"label": "w"}, reading, **own).status_code == 403
    assert form({"remove": "1"}, reading, **own).status_code == 403
    assert form({"label": "w"}, "tm_wrong", **own).headers["location"] == (
      "/login"
    )
    for data in ({"label": "w"}, {"remove": "1"}):  # Another project's token.
      assert form(data, other, **own).status_code == 404
    for data in ({}, {"turn": "x", "label": "w"}, {"remove": "1 OR 1=1"}):
      assert form(data, **own).status_code == 400
    assert form({"turn": "9", "label": "w"}, **own).status_code == 404
    away = form({"label": "z", "next": "//evil.example/"}, **own)
    assert away.headers["location"] == "/" and count() == 3
    page = lambda token, path="/rollouts/1": (
      server.http.get(
        path,
        headers={"authorization": "", "cookie": f"{access.COOKIE}={token}"},
      ).text
    )
    for path in (
      "/rollouts/1",
      "/rollouts",
      "/runs/1/search?q=hm",
      "/rollouts?label=" + html.escape("z"),
    ):
      shown = page("tm_secret", path)
      assert "<script>alert" not in shown and "</textarea><script" not in shown
    assert html.escape(HOSTILE, quote=False).replace("'", "&#39;") in (
      page("tm_secret").replace("&#x27;", "&#39;")
    )
    assert '/annotations"' in page("tm_secret")
    readers_page = page(reading)  # Who may only look sees them, and no form.
    assert '/annotations"' not in readers_page and "z</a>" in readers_page
    assert (
      server.http.get(
        "/rollouts/1/annotations", follow_redirects=False
      ).status_code
      == 303
    )


def test_lists_and_searches_are_filtered_by_a_label(server):
  fill(server)
  annotate(server, "r2", turn=2, label="stuck", note="Twice.")
  annotate(server, "r3", label="of it all")
  ids = {r["rollout_id"]: r["id"] for r in server.rows("rollout")}
  page = lambda path: server.http.get(path).text
  for path in ("/rollouts?label=stuck", "/runs/1/rollouts?label=stuck"):
    text = page(path)
    assert f'href="/rollouts/{ids["r2"]}"' in text
    assert f'href="/rollouts/{ids["r1"]}"' not in text
  assert f'href="/rollouts/{ids["r3"]}"' in page("/rollouts?label=of+it+all")
  assert "No rollout fits" in page("/rollouts?label=nothing")
  assert server.http.get("/rollouts?label=" + "x" * 51).status_code == 400
  turn = f'href="/rollouts/{ids["r2"]}?turn=2"'
  for path in ("label=stuck", "label=stuck&q=hm", "q=hm"):
    assert turn in page(f"/runs/1/search?{path}"), path
  assert turn not in page("/runs/1/search?label=stuck&q=nowhere")
  only = page("/runs/1/search?label=stuck")
  assert f'href="/rollouts/{ids["r1"]}?turn=1"' not in only
  strip = page(f"/rollouts/{ids['r2']}")
  assert strip.count("stuck") >= 1 and "✎" in strip


def test_they_go_with_their_run_and_come_back(server, tmp_path):
  fill(server)
  annotate(server, "r1", turn=2, label="stuck", note="N\u2028 <b>")
  annotate(server, "r2", label="whole")
  path, files = tmp_path / "run.jsonl", tmp_path / "files"
  run_files.export(server.engine, files, path, "run")
  noted = lambda: [
    short(server.get(f"/api/v1/rollouts/r{n}")["annotations"]) for n in (1, 2)
  ]
  before = noted()
  runs_lib.delete(server.engine, 1)
  assert server.rows("monitor_annotation") == []
  run_files.import_(server.engine, files, path)
  assert noted() == before


@pytest.mark.slow
@pytest.mark.browser
def test_a_person_labels_a_turn_and_finds_it(context, lite):
  shas = []
  for seed in range(3):
    sha, image = monitor_server.screenshot(seed, (160, 120))
    lite.http.put(f"/api/v1/screenshots/{sha}", content=image)
    shas.append(sha)
  body = joined(base(), episode("r1", 2, status="completed"))
  for observation, sha in zip(body["observations"], shas):
    observation["screenshot_uri"] = f"sha256:{sha}"
  lite.post(body)
  page = context.new_page()
  page.goto(f"{lite.url}/rollouts/1?turn=2")
  page.click("#turn .add summary")
  page.fill("#turn .add input[name=label]", "looks stuck")
  page.fill("#turn .add textarea", "It clicks\nbeside the <b>door</b>.")
  page.click("#turn .add button")
  page.wait_for_selector("#turn .called")
  assert page.url.endswith("/rollouts/1?turn=2")
  assert page.locator("#turn .note").inner_text() == (
    "It clicks\nbeside the <b>door</b>."
  )
  assert page.locator("#filmstrip a").nth(1).locator(".called").count() == 1
  assert page.locator("#filmstrip a").nth(0).locator(".called").count() == 0
  page.click("#turn .called")  # All rollouts of the label.
  page.wait_for_selector("#rollouts tbody a[href='/rollouts/1']")
  page.goto(f"{lite.url}/runs/1/search?label=looks+stuck")
  assert page.locator(".found").count() == 1
  page.goto(f"{lite.url}/rollouts/1?turn=2")
  page.click("#turn .annotation:has(.called) button")
  chromium.wait_for(page, "() => !document.querySelector('.called')")
  assert [r["label"] for r in lite.rows("monitor_annotation")] == [None]
  for scheme, width in (("light", 1440), ("dark", 390)):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{lite.url}/rollouts/1?turn=2")
    assert page.evaluate(
      "document.documentElement.scrollWidth <= innerWidth"
    ), width
    assert chromium.faults_of(page) == []
  page.close()
