"""Accidents and abuse of the server, the client and its spool."""

import collections
import concurrent.futures
import contextlib
import html
import http.client
import json
import logging
import re
import shutil
import socket
import threading
import time

import httpx
import monitor_server
import pytest
from training_monitor.client import ingest_client
from training_monitor.client import spool as spool_lib
from training_monitor.core import monitor_settings as settings_lib
from training_monitor.net import request_bodies
from training_monitor.schema import database
from training_monitor.server import access
from training_monitor.server import errors
from training_monitor.server.batches import fields
from training_monitor.server.batches import items

Config = settings_lib.MonitorConfig
SMALL = Config(spool_mb=20_000 / (1 << 20))
base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)
client_of, wait_for = monitor_server.client_of, monitor_server.wait_for


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
  """One server for the tests that do not change it."""
  folder = tmp_path_factory.mktemp("server")
  with monitor_server.sqlite_server(folder) as running:
    running.post(joined(base(), episode("r1")))
    yield running


# --- the server -------------------------------------------------------------


DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
  "body",
  [
    '{"turns": [{"text": %s}]}',
    '{"actions": [{"tool_args": %s}]}',
    '{"actions": [{"action_json": %s}]}',
    '{"delivery": {"spool": "s", "first": 1, "last": 1, "health": %s}}',
    '{"tasks": [{"task_id": "x", "tags": %s}]}',
  ],
)
def test_json_that_is_nested_too_deeply_is_the_senders_fault(lite, body):
  """A 500 would be retried for ever, and block the batches behind it."""
  reply = lite.http.post("/api/ingest/batch", content=body % DEEP)
  assert reply.status_code == 400, reply.text
  assert "nested" in reply.text or "Recursion" in reply.text


def everywhere(value):
  """A batch that has the value in each field that is JSON."""
  body = joined(base(config_json=value), episode("deep"))
  for kind, *names in (
    ("turns", "metrics_json"),
    ("actions", "tool_args"),
    ("validations", "details_json"),
    ("steps", "metrics_json"),
    ("environments", "config_json"),
    ("tasks", "tags"),
  ):
    for row in body[kind]:
      row.update(dict.fromkeys(names, value))
  return body


def pages(server):
  """The answers of all pages that are linked, and of the API's lists."""
  paths = ["/", *(f"/api/v1/{path}" for path in (
      "trainings", "trainings/1", "trainings/1/steps", "tasks", "rollouts",
      "rollouts/deep", "rollouts/deep/turns", "rollouts/deep/turns/1",
  ))]  # fmt: skip
  kinds = collections.Counter()
  while paths:
    path = paths.pop()
    kind = re.sub(r"\d+|=[^&]*", "", path)
    kinds[kind] += 1
    if kinds[kind] > 1:
      continue
    reply = server.http.get(path)
    yield path, reply
    if reply.headers["content-type"].startswith("text/html"):
      links = re.findall(r'(?:href|src)="(/[^"#]*)', reply.text)
      paths += [html.unescape(link) for link in links]


def test_json_that_is_accepted_is_shown(tmp_path):
  """On all pages, in all lists and exports: an item ends no other's."""
  deepest = "[" * fields.DEEPEST + "]" * fields.DEEPEST
  with monitor_server.sqlite_server(tmp_path) as server:
    for value in (f"[{deepest}]", [json.loads(deepest)]):
      wrong = server.post(everywhere(value))["ignored"]
      assert len(wrong) > 6
      assert f"more than {fields.DEEPEST} levels" in wrong[0]["message"]
    for value in (json.loads(deepest), deepest):
      server.post(everywhere(value))
    answers = dict(pages(server))
    assert len(answers) > 50
    assert {"/rollouts/1/export/json", "/rollouts/1/export/atif"} <= set(
      answers
    )
    assert not {p: r for p, r in answers.items() if r.status_code >= 500}
    turns = server.get("/api/v1/rollouts/deep/turns")["items"]
    assert turns[0]["metrics_json"] == json.loads(deepest)


def test_deep_json_of_another_writer_is_shown_as_text(tmp_path):
  deep = "[" * 900 + "]" * 900
  with monitor_server.sqlite_server(tmp_path) as server:
    server.post(everywhere([]))
    with server.engine.begin() as connection:
      for table, column in (
        ("turn", "metrics_json"),
        ("action", "tool_args"),
        ("validation", "details_json"),
        ("step", "metrics_json"),
        ("environment", "config_json"),
        ("training", "config_json"),
      ):
        connection.exec_driver_sql(
          f'UPDATE "{table}" SET {column} = ?', (deep,)
        )
    assert not [p for p, r in pages(server) if r.status_code >= 500]
    turns = server.get("/api/v1/rollouts/deep/turns")["items"]
    assert turns[0]["metrics_json"] == deep


@pytest.mark.parametrize(
  "path",
  [
    "/api/v1/rollouts?limit=" + "9" * 5000,
    "/api/v1/trainings/" + "9" * 5000,
    "/api/v1/rollouts/r1/turns/" + "1" * 5000,
    "/api/v1/rollouts/" + "1" * 5000,
    "/api/v1/trainings?after=" + "9" * 6000,
  ],
)
def test_numbers_of_any_length_are_answered(lite, path):
  reply = lite.http.get(path)
  assert 400 <= reply.status_code < 500 and reply.json()["detail"]


def test_an_event_id_of_any_length_is_answered(lite):
  reply = lite.http.get("/api/v1/events", headers={"last-event-id": "9" * 5000})
  assert reply.status_code == 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "-1e400"])
def test_numbers_that_are_none_are_refused_or_null(lite, number):
  body = '{"steps": [{"client_id": "S", "loss": %s}]}' % number
  reply = lite.http.post("/api/ingest/batch", content=body)
  if number[0] in "NI":  # As Python's json writes them.
    assert reply.status_code == 200 and "ignored" not in reply.json()
  else:
    assert reply.status_code in (200, 400), reply.text
    assert reply.json().get("ignored") or reply.json()["detail"]
  assert lite.rows("step")[-1]["loss"] is None


def test_a_number_of_very_many_digits_is_refused_at_once():
  for text in ("1" * 500_000 + "x", "1" * 500_000, "." + "1" * 500_000 + "x"):
    start = time.monotonic()
    with pytest.raises(fields.WrongValue, match="give a number"):
      fields.real(text)
    assert time.monotonic() - start < 5
  texts = ("1", "-1.5", ".5", "+2e-3", "1" * 300, "1" * 390)
  assert [fields.real(text) for text in texts[:5]] == [
    1.0,
    -1.5,
    0.5,
    0.002,
    float("1" * 300),
  ]
  with pytest.raises(fields.WrongValue, match="finite"):
    fields.real(texts[5])


def test_very_many_unknown_fields_cost_few_suggestions(monkeypatch):
  calls = []
  suggest = items._unknown
  monkeypatch.setattr(
    items, "_unknown", lambda *args: calls.append(args) or suggest(*args)
  )
  task = {"task_id": "t"} | {f"strange_{n}": n for n in range(5000)}
  batch = items.read(json.dumps({"tasks": [task] * 2}).encode())
  assert len(calls) == 20
  assert len(batch.ignored) == 21 and len(batch.items["task"][0].raw) == 5000
  last = batch.ignored[-1]
  assert last["times"] == 2 * 4980 and last["kept"] == "a raw value"


def test_lone_surrogates_are_never_stored(lite):
  body = '{"tasks": [{"task_id": "lone\\ud800", "name": "x"}]}'
  reply = lite.http.post("/api/ingest/batch", content=body)
  assert reply.status_code == 200
  names = [
    r["task_id"]
    for r in lite.rows("task")
    if (r["task_id"] or "").startswith("lone")
  ]
  assert names and not any("\ud800" in name for name in names)
  lite.get("/api/v1/rollouts/%ED%A0%80", status=404)


def test_steps_below_zero_have_pages_too(lite):
  lite.post(
    {
      "training": {"client_id": "minus", "run_name": "minus"},
      "steps": [{"client_id": f"m{n}", "step": n} for n in (-2, -1, 0)],
    }
  )
  (id_,) = [r["id"] for r in lite.rows("training") if r["run_name"] == "minus"]
  steps, after = [], None
  for _ in range(3):
    page = lite.get(
      f"/api/v1/trainings/{id_}/steps", limit=1, after=after or ""
    )
    steps += [s["step"] for s in page["items"]]
    after = page["next"]
  assert steps == [-2, -1, 0] and after is None


def test_a_screenshot_whose_file_is_gone_is_missing_and_can_come_again(lite):
  sha, image = monitor_server.screenshot(5)
  lite.http.put(f"/api/v1/screenshots/{sha}", content=image)
  lite.app._screenshots.path(sha, "image/png").unlink()
  reply = lite.http.get(f"/api/v1/screenshots/{sha}")
  assert reply.status_code == 404 and "doctor" in reply.json()["detail"]
  ask = lambda: lite.http.post(
    "/api/v1/screenshots/missing", json={"sha256": [sha]}
  ).json()
  assert ask() == {"missing": [sha]}
  reply = lite.http.put(f"/api/v1/screenshots/{sha}", content=image)
  assert reply.json() == {"sha256": sha, "stored": True}
  assert ask() == {"missing": []}
  assert lite.http.get(f"/api/v1/screenshots/{sha}").content == image


@pytest.mark.parametrize(
  "body, says",
  [
    (b"", "begins with a line"),
    (b"[]\n", "begins with a line"),
    (b'{"images": [{}]}\n', "begins with a line"),
    (b'{"images": [1]}\n', "begins with a line"),
    (b'{"images": {"a": 1}}\n', "begins with a line"),
    (b'{"images": [{"sha256": "x", "bytes": -1}]}\n', "begins with"),
    (b'{"images": [{"sha256": "x", "bytes": true}]}\n1', "begins with"),
    (b'{"images": [{"sha256": "x", "bytes": 1}]}\n1', "64 hexadecimal"),
    (
      b'{"images": [{"sha256": "%b", "bytes": 2}]}\n1' % (b"0" * 64),
      "the images have 2 bytes, and 1 follow",
    ),
    (
      b'{"images": [{"sha256": "%b", "bytes": 1}]}' % (b"0" * 64),
      "the images have 1 bytes, and 0 follow",
    ),
  ],
)
def test_screenshots_that_are_none_are_refused_by_name(lite, body, says):
  reply = lite.http.post("/api/v1/screenshots", content=body)
  assert reply.status_code == 400 and says in reply.json()["detail"]


def test_screenshots_that_come_together_and_twice(lite):
  shas, files = zip(*(monitor_server.screenshot(n) for n in range(70, 73)))

  def post(names, files):
    listed = [{"sha256": s, "bytes": len(f)} for s, f in zip(names, files)]
    reply = lite.http.post(
      "/api/v1/screenshots",
      content=b"\n".join(
        (json.dumps({"images": listed}).encode(), b"".join(files))
      ),
    )
    assert reply.status_code == 200, reply.text
    return reply.json()

  assert post((), ()) == {"stored": [], "refused": {}}
  first = post((shas[0], shas[0], shas[1]), (files[0], files[0], files[2]))
  assert first["stored"] == [shas[0]]
  assert list(first["refused"]) == [shas[1]]
  assert "neither the bytes nor" in first["refused"][shas[1]]
  assert set(post(shas, files)["stored"]) == set(shas[1:])
  for sha, file in zip(shas, files):
    assert lite.http.get(f"/api/v1/screenshots/{sha}").content == file


def test_readers_that_take_long_do_not_keep_a_batch_waiting(tmp_path):
  with monitor_server.sqlite_server(tmp_path) as server:
    server.post(base())
    with contextlib.ExitStack() as stack:
      pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(12))
      finished = threading.Event()
      stack.callback(finished.set)

      def read():
        with database.reading(server.engine) as connection:
          connection.exec_driver_sql("SELECT count(*) FROM training").scalar()
          finished.wait(25)

      for _ in range(12):
        pool.submit(read)
      time.sleep(0.3)
      began = time.monotonic()
      server.post(episode("r1"), headers={"connection": "close"})
      assert time.monotonic() - began < 8


def test_a_body_that_never_ends_is_given_up(tmp_path):
  connections = request_bodies.ConnectionLimits(body_timeout=0.5)
  with monitor_server.sqlite_server(
    tmp_path, connections=connections
  ) as server:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
      line.sendall(
        b"POST /api/ingest/batch HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 1000\r\n\r\n{"
      )
      reply = http.client.HTTPResponse(line)
      reply.begin()
      assert reply.status == 408
      assert "0.5 s" in json.loads(reply.read())["detail"]


def test_one_projects_names_mean_nothing_in_another(tmp_path):
  """The same client ids everywhere, and not one row is the other's."""
  with monitor_server.sqlite_server(tmp_path, token="owner") as server:
    ids = {}
    for project in ("A", "B"):
      token = access.make_token(server.engine, project, ("ingest", "read"))
      with httpx.Client(
        base_url=server.url,
        timeout=30,
        verify=False,
        headers={"authorization": f"Bearer {token}"},
      ) as http_:
        body = joined(base(), episode("e", rollout_id=f"e-{project}"))
        for key in ("environments", "turns", "validations"):
          for item in body[key]:
            item["rollout_id"] = f"e-{project}"
        reply = http_.post("/api/ingest/batch", json=body)
        assert reply.status_code == 200, reply.text
        ids[project] = {
          kind: [p["id"] for p in pairs]
          for kind, pairs in reply.json().items()
          if isinstance(pairs, list) and kind != "tasks"
        }
        rollouts = http_.get("/api/v1/rollouts").json()["items"]
        assert [r["rollout_id"] for r in rollouts] == [f"e-{project}"]
        # Nothing of B's can be hung onto A's by its number.
        if project == "B":
          for field, kind, array in (
            ("turn_id", "turns", "actions"),
            ("rollout_id", "rollouts", "validations"),
            ("rollout_id", "rollouts", "turns"),
            ("step_id", "steps", "rollouts"),
          ):
            item = {field: ids["A"][kind][0], "turn": 5, "success": True}
            columns = {
              "actions": ("turn_id",),
              "validations": ("rollout_id", "success"),
              "turns": ("rollout_id", "turn"),
              "rollouts": ("step_id",),
            }[array]
            reply = http_.post(
              "/api/ingest/batch",
              json={
                array: [{k: item[k] for k in columns} | {"client_id": "evil"}]
              },
            )
            assert reply.status_code == 400, (array, reply.text)
            assert "this project has no" in reply.text
    for kind in ids["A"]:
      assert not set(ids["A"][kind]) & set(ids["B"][kind])


# --- the client and its spool -------------------------------------------------


def test_a_record_that_the_disk_has_garbled_holds_up_nothing(
  lite, tmp_path, caplog
):
  abandoned = client_of("http://127.0.0.1:9", tmp_path, target="t", name="left")
  for name in ("first", "garbled", "last"):
    abandoned.post_task({"task_id": name})
    assert abandoned.flush()
  assert not abandoned.close(0.1)
  (segment,) = (tmp_path / "left.spool").glob("*.seg")
  segment.write_bytes(segment.read_bytes().replace(b"garbled", b"xxxxxxx"))
  with caplog.at_level(logging.WARNING):
    with client_of(lite.url, tmp_path, target="t") as client:
      wait_for(lambda: not (tmp_path / "left.spool").exists())
      assert client.sender.counters["damaged"] == 1
      assert not client.sender.counters["dead_letters"]
  assert "1 records of" in caplog.text and "damaged" in caplog.text
  tasks = {r["task_id"] for r in lite.rows("task")}
  assert {"first", "last"} <= tasks and "garbled" not in tasks


def test_a_spool_that_is_destroyed_does_not_raise_at_the_end(tmp_path, caplog):
  client = client_of("http://127.0.0.1:9", tmp_path)
  client.post_task({"task_id": "t"})
  assert client.flush()
  shutil.rmtree(client.sender.spool.path)
  with caplog.at_level(logging.WARNING):
    assert client.close(1.0) is False
  assert "spool" in caplog.text


def test_somebody_elses_damaged_spool_is_put_aside_once(lite, tmp_path, caplog):
  (tmp_path / "old.spool").write_bytes(b"SQLite format 3\0" + b"\x07" * 8000)
  for name, header in (
    ("text", "nothing like a header"),
    ("list", "[]"),
    ("id", '{"id": "x"}'),
    (
      "run",
      '{"id": "%s", "target": "%s", "run": {"a": 1}}' % ("0" * 32, lite.url),
    ),
  ):
    (tmp_path / f"{name}.spool").mkdir()
    (tmp_path / f"{name}.spool" / "lock").write_text("")
    (tmp_path / f"{name}.spool" / "header.json").write_text(header)
    (tmp_path / f"{name}.spool" / f"{1:020d}.seg").write_text("x")
  (tmp_path / "new.spool").mkdir()  # Another process has just begun to make it.
  for _ in range(2):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      with client_of(lite.url, tmp_path) as client:
        client.post_task({"task_id": "t"})
        assert client.drain(20)
        wait_for(lambda: len(list(tmp_path.glob("*.damaged"))) == 5)
  assert "cannot be read" not in caplog.text
  assert (tmp_path / "new.spool").exists()


def test_a_spool_of_a_living_trainer_is_not_taken_for_damaged(lite, tmp_path):
  with client_of(lite.url, tmp_path) as first:
    first.post_task({"task_id": "t"})
    with client_of(lite.url, tmp_path) as second:
      second.post_task({"task_id": "u"})
      assert second.drain(20) and first.drain(20)
      with pytest.raises(BlockingIOError, match="another process"):
        spool_lib.Spool(first.sender.spool.path, lite.url)
  assert not list(tmp_path.glob("*.damaged"))


def test_two_trainers_beside_each_other_deliver_everything_once(lite, tmp_path):
  lite.post(base())
  with (
    client_of(lite.url, tmp_path) as one,
    client_of(lite.url, tmp_path) as two,
  ):
    for n in range(20):
      for name, client in (("one", one), ("two", two)):
        client.sender.put(episode(f"{name}-{n}"))
    assert one.drain(30) and two.drain(30)
  stored = [r["rollout_id"] for r in lite.rows("rollout")]
  for name in ("one", "two"):
    assert [s for s in stored if s.startswith(name)] == [
      f"{name}-{n}" for n in range(20)
    ]


def test_a_huge_text_does_not_take_its_episode_with_it(lite, tmp_path):
  with client_of(lite.url, tmp_path) as client:
    body = joined({"training_id": "T"}, episode("huge"))
    body["observations"][0]["text_content"] = "ä" * 6_000_000
    body["turns"][0]["metrics_json"] = {"thought": "x" * 5_000_000}
    client.sender.put(body | {"training_id": "T"})
    assert client.drain(60)
    assert not client.sender.counters["dead_letters"]
  turn = lite.get("/api/v1/rollouts/huge/turns")["items"][0]
  text = turn["observations"][0]["text_content"]
  assert text.startswith("äää") and "6000000 characters" in text
  assert "5000000 characters" in turn["metrics_json"]["thought"]


def test_images_that_do_not_fit_do_not_take_the_words_with_them(tmp_path):
  with client_of("http://127.0.0.1:9", tmp_path, config=SMALL) as client:
    part = {"tasks": [{"task_id": "t"}]}
    client.sender.put(part, {"a" * 64: bytes(30_000)})
    assert client.flush()
    assert client.sender.counts()["entry"] == 1
    assert client.sender.counters["dropped_images"] == 1
    assert not client.sender.counters["dropped_disk"]
    client.close(0.1)


def test_what_is_refused_still_counts_as_taken_space(lite, tmp_path):
  config = Config(spool_mb=5000 / (1 << 20))
  with client_of(lite.url, tmp_path, config=config, name="x") as client:
    for _ in range(2):
      client.post_turn({"rollout_id": "nobody", "turn": 1, "x": "y" * 600})
      assert client.drain(20)
    assert client.sender.spool.bytes > 1600
  again = spool_lib.Spool(tmp_path / "x.spool", lite.url, max_bytes=5000)
  assert again.bytes > 1600
  with pytest.raises(spool_lib.SpoolFull):
    again.append([(spool_lib.PART, b"x" * 3500)])
  again.close()


@pytest.mark.slow
def test_numbering_ones_own_items_takes_bounded_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(ingest_client, "_MOST_LOCAL", 100)
  config = Config(max_pending=9)
  with client_of("http://127.0.0.1:9", tmp_path, config=config) as client:
    client.record("training", 0, {"run_name": "r"})
    for n in range(300):
      client.record("step", n, {"training_id": 0, "step": n})
      client.record("action", n, {"tool_name": "x"})
    assert len(client._local) <= 100
    assert ("training", 0) in client._local
    client.close(0.1)


def test_reading_a_body_raises_nothing_but_its_faults():
  """Every wrong body is refused with a message."""
  for body in (
      b"", b"null", b"[]", b'"x"', b'{"turns": null}', b'{"turns": {}}',
      b'{"turns": [1]}', b'{"training": []}', b'{"delivery": []}',
      b'{"training_id": 1.5}', b'{"rollouts": [{"rollout_id": 5}]}',
      b'{"turns": [{"turn": 1e99}]}', b'{"turns": [{"start_time": 1e99}]}',
      b'{"turns": [{"start_time": -1e99}]}',
      b'{"turns": [{"start_time": "0001-01-01T00:00:00+23:59"}]}',
      b'{"steps": [{"rollout_progress": "3"}]}',
      b'{"actions": [{"tokens": "7", "num_tokens": 1}]}',
  ):  # fmt: skip
    try:
      items.read(body)
    except errors.ApiError as error:
      assert error.status == 400
