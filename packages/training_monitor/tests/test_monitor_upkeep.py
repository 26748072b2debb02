"""Pruning, and the doctor."""

import json
import os
import pathlib
import sqlite3
import time

import fresh_interpreter
import monitor_server
import pytest
import sqlalchemy as sa
from training_monitor import serve
from training_monitor.client import spool as spool_lib
from training_monitor.maintenance import doctor
from training_monitor.maintenance import pruning
from training_monitor.schema import database
from training_monitor.schema import tables

episode, joined = monitor_server.episode, monitor_server.joined
LEAVES = ("turn", "action", "obs", "validation", "environment")


def add_run(server, name, success=None, status="completed", shas=(), **more):
  """A run of two episodes which show these screenshots."""
  body = joined(
    {
      "training": {
        "client_id": name,
        "run_name": name,
        "status": status,
        **more,
      },
      "tasks": [{"task_id": "open-door"}],
      "steps": [{"client_id": f"{name}-S", "step": 1}],
      "evals": [{"client_id": f"{name}-E", "step": 1, "success_rate": success}],
    },
    episode(f"{name}-0", step_id=f"{name}-S"),
    episode(f"{name}-1", step_id=f"{name}-S"),
  )
  for rollout in body["rollouts"]:
    rollout["step_id"] = f"{name}-S"
  for obs, sha in zip(body["observations"], shas):
    obs["screenshot_uri"] = f"sha256:{sha}"
  server.post(body)


def put_screenshot(server, seed, age_s=7200):
  """Stores one as if that long ago; returns (hash, its file)."""
  sha, image = monitor_server.screenshot(seed)
  server.http.put(f"/api/v1/screenshots/{sha}", content=image)
  s = tables.screenshot
  with database.writing(server.engine) as connection:
    when = connection.execute(
      sa.select(s.c.created_at).where(s.c.sha256 == sha)
    ).scalar()
    connection.execute(
      sa.update(s)
      .where(s.c.sha256 == sha)
      .values(created_at=when - pruning.datetime.timedelta(seconds=age_s))
    )
  path = server.app._screenshots.path(sha, "image/png")
  os.utime(path, (time.time() - age_s,) * 2)
  return sha, path


def prune(server, **options):
  criteria = {
    k: options.pop(k)
    for k in ("project", "names", "older_than_s")
    if k in options
  }
  return pruning.prune(
    server.engine, server.app._files, pruning.Criteria(**criteria), **options
  )


def names(server):
  return [r["run_name"] for r in server.rows("training")]


def test_a_pruned_run_leaves_nothing_and_the_others_whole(server):
  add_run(server, "elder")
  add_run(server, "kept")
  before = {t: len(server.rows(t)) for t in LEAVES}
  outcome = prune(server, names=("elder",))
  assert [r.name for r in outcome.runs] == ["elder"] and outcome.rows
  assert names(server) == ["kept"]
  for table in LEAVES:
    assert len(server.rows(table)) == before[table] / 2, table
  for table, order in (
    ("monitor_client_id", "client_id"),
    ("monitor_raw_value", "field"),
    ("status_history", "id"),
    ("monitor_change", "id"),
  ):
    rows = server.rows(table, order=order)
    assert rows and not any("elder" in str(row) for row in rows), table


def test_a_server_that_runs_learns_of_it(server):
  """The server's cache of a run must not outlive the run."""
  add_run(server, "again")
  prune(server, names=("again",))
  add_run(server, "again")
  assert names(server) == ["again"]
  assert len(server.rows("turn")) == 4


def test_which_runs_go(server):
  for name, success in (("a", 0.2), ("b", 0.9), ("c", None), ("d", 0.5)):
    add_run(server, name, success)
  add_run(server, "live", 0.1, status="running")
  chosen = lambda **c: [
    [r.name for r in runs]
    for runs in pruning.choose(server.engine, pruning.Criteria(**c))
  ]
  assert chosen(older_than_s=0.0) == [["a", "b", "c", "d"], ["live"], []]
  assert chosen(older_than_s=3600.0) == [[], [], []]
  assert chosen(names=("a", "live")) == [["a"], ["live"], []]
  tomorrow = pruning.datetime.datetime.now(
    pruning.datetime.timezone.utc
  ).replace(tzinfo=None) + pruning.datetime.timedelta(days=1)
  runs = pruning.choose(
    server.engine, pruning.Criteria(older_than_s=3600.0), tomorrow
  )
  assert [r.name for r in runs[0]] == ["a", "b", "c", "d", "live"]
  # A clock that was set back a day makes no run look abandoned.
  yesterday = tomorrow - pruning.datetime.timedelta(days=2)
  assert pruning.choose(
    server.engine, pruning.Criteria(older_than_s=3600.0), yesterday
  ) == ([], [], [])


def test_a_pinned_baseline_stays_and_tags_go_with_their_runs(server):
  for name in ("a", "b"):
    add_run(server, name, 0.5, tags=["lr sweep", name])
  ids = {t["run_name"]: t["id"] for t in server.rows("training")}
  pin = lambda pinned: server.http.post(
    f"/runs/{ids['a']}/pin",
    data={"pinned": pinned},
    headers={"origin": server.url},
    follow_redirects=False,
  )
  assert pin("1").status_code == 303
  outcome = prune(server, names=("a", "b"))
  assert [[r.name for r in rs] for rs in (outcome.runs, outcome.pinned)] == [
    ["b"],
    ["a"],
  ]
  assert names(server) == ["a"]
  assert [
    r["tag"] for r in server.rows("monitor_training_tag", order="tag")
  ] == ["a", "lr sweep"]
  pin("0")
  prune(server, names=("a",))
  for table, order in (
    ("training", "id"),
    ("monitor_training_tag", "tag"),
    ("monitor_pinned_baseline", "project_id"),
  ):
    assert server.rows(table, order=order) == []


def test_thumbnails_go_with_their_screenshots(lite):
  shas = []
  for seed in (1, 2):
    sha, image = monitor_server.screenshot(seed, size=(640, 480))
    lite.http.put(f"/api/v1/screenshots/{sha}", content=image)
    assert (
      lite.http.get(f"/api/v1/screenshots/{sha}/thumbnail").headers[
        "content-type"
      ]
      == "image/webp"
    )
    shas.append(sha)
  folder = lite.app._files / "thumbnails"
  thumbnails = {sha: folder / sha[:2] / f"{sha}.webp" for sha in shas}
  add_run(lite, "run", shas=shas[:1])
  with database.writing(lite.engine) as connection:
    connection.execute(
      sa.update(tables.screenshot).values(
        created_at=sa.text("'2020-01-01 00:00:00'")
      )
    )
  assert all(path.exists() for path in thumbnails.values())
  assert prune(lite).screenshots == 1
  assert [thumbnails[sha].exists() for sha in shas] == [True, False]


def test_screenshots_go_with_the_last_run_that_shows_them(server):
  shared, path = put_screenshot(server, 1)
  own, unshown = put_screenshot(server, 2)
  raw, raw_shown = put_screenshot(server, 3)
  fresh, new = put_screenshot(server, 4, age_s=0)
  add_run(server, "old", shas=(shared, own))
  add_run(server, "new", shas=(shared,))
  server.post({"training_id": "new", "validations": [{
      "client_id": "v", "rollout_id": "new-0", "success": True,
      "screenshot_uri": f"sha256:{raw}",
  }]})  # fmt: skip
  stray = unshown.with_name("f" * 64 + ".png")
  stray.write_bytes(b"left by somebody")
  os.utime(stray, (time.time() - 7200,) * 2)
  would = prune(server, names=("old",), dry_run=True)
  assert (would.screenshots, would.rows) == (1, 0) and would.bytes
  assert names(server) == ["old", "new"] and unshown.exists() and stray.exists()
  outcome = prune(server, names=("old",))
  assert (outcome.screenshots, outcome.bytes) == (1, would.bytes)
  there = [p.exists() for p in (path, unshown, raw_shown, new, stray)]
  assert there == [True, False, True, True, False]
  assert server.http.get(f"/api/v1/screenshots/{own}").status_code == 404
  missing = server.http.post(
    "/api/v1/screenshots/missing", json={"sha256": [shared, own, raw, fresh]}
  )
  assert missing.json() == {"missing": [own]}


def test_a_screenshot_that_is_shown_at_this_moment_stays(server, monkeypatch):
  """Between looking and deleting, a run comes to show it again."""
  sha, path = put_screenshot(server, 1)
  shown = pruning._shown
  calls = []

  def look_then_show(connection, shas, **options):
    result = shown(connection, shas, **options)
    calls.append(options)
    if len(calls) == 1:
      connection.rollback()
      add_run(server, "late", shas=(sha,))
    return result

  monkeypatch.setattr(pruning, "_shown", look_then_show)
  assert prune(server).screenshots == 0
  assert len(calls) == 2 and path.exists()


def test_a_screenshot_that_is_about_to_be_shown_stays(server, monkeypatch):
  """A client that was told a screenshot exists does not send it again."""
  requested, path = put_screenshot(server, 1)
  other, unshown = put_screenshot(server, 2)
  shown = pruning._shown
  answers = []

  def look_then_ask(connection, shas, **options):
    result = shown(connection, shas, **options)
    if not answers:
      connection.rollback()
      answers.append(
        server.http.post(
          "/api/v1/screenshots/missing", json={"sha256": [requested]}
        ).json()
      )
    return result

  monkeypatch.setattr(pruning, "_shown", look_then_ask)
  assert prune(server).screenshots == 1
  assert answers == [{"missing": []}]
  assert path.exists() and not unshown.exists()
  (remaining,) = server.rows("monitor_screenshot", order=1)
  assert remaining["sha256"] == requested != other


def test_a_prune_that_was_killed_is_mended_by_the_next(lite):
  sha, path = put_screenshot(lite, 1)
  add_run(lite, "run", shas=(sha,))
  path.rename(f"{path}.pruned")  # Killed before it committed.
  other = path.with_name(f"{'e' * 64}.png.pruned")
  other.write_bytes(b"killed after it committed")
  prune(lite)
  assert path.exists() and not other.exists()


def test_space_is_given_back(lite, tmp_path):
  for n in range(3):
    body = joined(
      {
        "training": {
          "client_id": f"r{n}",
          "run_name": f"r{n}",
          "status": "completed",
        },
        "tasks": [{"task_id": "open-door"}],
        "steps": [{"client_id": f"S{n}", "step": 1}],
      },
      episode(f"e{n}"),
    )
    body["rollouts"][0]["step_id"] = f"S{n}"
    for obs in body["observations"]:
      obs["text_content"] = os.urandom(300_000).hex()
    lite.post(body)
  size = lambda: lite.rows(
    "monitor_meta",
    "(SELECT page_count FROM pragma_page_count()) AS pages",
    "key",
  )[0]["pages"]
  before = size()
  prune(lite, names=("r0", "r1", "r2"))
  assert size() < before / 3


@pytest.mark.parametrize(
  "text, age_s",
  [("90m", 5400), ("1.5h", 5400), ("30d", 30 * 86400), ("2w", 14 * 86400)],
)
def test_ages(text, age_s):
  assert pruning.seconds(text) == age_s


def test_the_prune_command(lite, tmp_path, capsys):
  add_run(lite, "old")
  own = [
    "--database",
    str(tmp_path / "m.db"),
    "--files",
    str(tmp_path / "files"),
  ]
  assert serve.main(["prune", "--run", "old", "--dry-run", *own]) == 0
  assert "would delete run old (default, completed)" in capsys.readouterr().out
  assert names(lite) == ["old"]
  for args, status, says in (
    (["--run", "new"], 2, "no run of this name or id"),
    (["--project", "default"], 2, "which runs?"),
    (["--run", "old"], 0, "deleted 1 runs"),
  ):
    assert serve.main(["prune", *args, *own]) == status
    captured = capsys.readouterr()
    assert says in captured.out + captured.err
  with pytest.raises(SystemExit):
    serve.main(["prune", "--older-than", "soon", *own])
  assert "such as 30d" in capsys.readouterr().err


# --- the doctor -------------------------------------------------------------


def look(server, *spools, **options):
  url = server.engine.url.render_as_string(hide_password=False)
  if url.startswith("sqlite"):
    url = server.engine.url.database
  return list(doctor.examine(url, server.app._files, spools, **options))


def told(findings, level):
  return {f.subject for f in findings if f.level == level}


def test_a_healthy_monitor_is_told_so(server, tmp_path):
  sha, _ = put_screenshot(server, 1)
  add_run(server, "run", shas=(sha,))
  (tmp_path / "spool").mkdir()
  findings = look(server, tmp_path / "spool", deep=True)
  assert told(findings, doctor.ERROR) == set()
  assert told(findings, doctor.OK) == {
      "disk", "schema", "integrity", "screenshots", "spool",
  }  # fmt: skip


def test_what_is_wrong_with_screenshots_is_found(lite):
  paths = [put_screenshot(lite, n)[1] for n in range(4)]
  paths[0].unlink()
  paths[1].write_bytes(paths[1].read_bytes() + b"x")
  data = paths[2].read_bytes()
  paths[2].write_bytes(data[:-20] + bytes(20))
  add_run(lite, "run", shas=("a" * 64,))
  findings = [f for f in look(lite, deep=True) if f.subject == "screenshots"]
  assert [f.level for f in findings] == [doctor.ERROR] * 3 + [doctor.WARNING]
  assert all(f.advice for f in findings)
  assert len([
      f for f in look(lite)
      if f.subject == "screenshots" and f.level == doctor.ERROR
  ]) == 2  # fmt: skip


def test_rows_without_their_parents_are_found(lite):
  add_run(lite, "run")
  with lite.engine.connect() as connection:
    driver = connection.connection.driver_connection
    driver.executescript(
      "PRAGMA foreign_keys=OFF; DELETE FROM environment WHERE id = 1; UPDATE"
      " turn SET rollout_id = 99 WHERE id = 1; PRAGMA foreign_keys=ON"
    )
  (finding,) = [f for f in look(lite) if f.level == doctor.ERROR]
  assert "1 rows refer to missing rows, the first in turn" in finding.text


def test_a_damaged_file_is_an_error_and_nothing_else_is_asked(lite, tmp_path):
  for n in range(20):
    add_run(lite, f"run{n}")
  path = tmp_path / "copy.db"
  with sqlite3.connect(path) as copy, sqlite3.connect(tmp_path / "m.db") as db:
    db.backup(copy)
  db.close()
  copy.close()
  data = bytearray(path.read_bytes())
  for page in range(20, len(data) // 4096, 3):
    data[page * 4096 : page * 4096 + 200] = os.urandom(200)
  path.write_bytes(data)
  findings = list(doctor.examine(str(path), tmp_path / "files"))
  assert findings[-1].level == doctor.ERROR and "recover" in findings[-1].advice


def test_what_is_no_database_of_the_monitor(tmp_path):
  sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE x (y)")
  for name, says in (
    ("other.db", "not a database of the monitor"),
    ("none.db", "no file"),
  ):
    *_, last = doctor.examine(str(tmp_path / name), tmp_path)
    assert last.level == doctor.ERROR and says in last.text
  assert not (tmp_path / "none.db").exists()


def test_spools_are_looked_into_and_left_as_they_are(lite, tmp_path):
  folder = tmp_path / "spools"
  abandoned = spool_lib.Spool(folder / "left.spool", "http://x")
  abandoned.append([(spool_lib.PART, b"{}")] * 2)
  abandoned.keep_image("a" * 64, b"png")
  abandoned.close()
  dead = spool_lib.Spool(folder / "dead.spool", "http://x")
  (dead.path / spool_lib.DEAD).write_text(
    json.dumps({"seq": 1, "body": "{}", "reason": "400: nonsense"}) + "\n"
  )
  (folder / "damaged.spool").mkdir()
  (folder / "damaged.spool" / spool_lib.HEADER).write_text("{")
  findings = {
    f.text.split(",")[0].split()[0]: f
    for f in look(lite, folder)
    if f.subject == "spool"
  }
  assert findings["left.spool"].level == doctor.WARNING
  assert "without an owner" in findings["left.spool"].text
  assert "2 records and 1 screenshots" in findings["left.spool"].text
  assert findings["dead.spool"].level == doctor.ERROR
  assert "in use" in findings["dead.spool"].text
  assert "400: nonsense" in findings["dead.spool"].text
  assert findings["damaged.spool"].level == doctor.ERROR
  dead.close()


def test_the_doctors_command_exits_with_what_it_found(lite, tmp_path):
  add_run(lite, "run")
  result = fresh_interpreter.run_module(
    "training_monitor",
    "doctor",
    "--database",
    tmp_path / "m.db",
    "--files",
    tmp_path / "files",
    "--json",
  )
  assert result.returncode == 0, result.stdout + result.stderr
  lines = result.stdout.splitlines()
  subjects = [json.loads(line)["subject"] for line in lines]
  assert list(dict.fromkeys(subjects)) == [
      "disk", "schema", "integrity", "screenshots",
  ]  # fmt: skip
  assert serve.main(["doctor", "--database", str(tmp_path / "no.db")]) == 1
  assert not pathlib.Path(tmp_path / "no.db").exists()
