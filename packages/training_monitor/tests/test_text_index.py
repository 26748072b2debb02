"""The search by an index of words, on both databases."""

import re
import time

import monitor_server
import sqlalchemy as sa
from training_monitor.dashboard.views import search_page
from training_monitor.maintenance import pruning
from training_monitor.schema import database
from training_monitor.schema import text_index

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)


def thinking(name, *thoughts, typed=None, **rollout):
  body = episode(name, len(thoughts), **rollout)
  for turn, thought in zip(body["turns"], thoughts):
    turn["metrics_json"] = {"thought": thought, "model_response": f"<{name}>"}
  if typed is not None:
    body["actions"][-1] |= {"action_type": "type", "tool_args": {"text": typed}}
  return body


def fill(server):
  server.post(joined(
      base(),
      thinking("r1", "The Grader sleeps.", "L'épée, ça va?",
               typed="sesame-open"),
      thinking("r2", "graders grade 2,000 graduates", status="completed",
               task_success=True),
      thinking("r3", "門を開ける", "nothing; O'Brien's DROP TABLE"),
  ))  # fmt: skip


def found(server, query, **params):
  """(rollout, turn) of each row, in order."""
  answer = server.http.get("/runs/1/search", params={"q": query, **params})
  assert answer.status_code == 200, answer.text
  names = {r["id"]: r["rollout_id"] for r in server.rows("rollout")}
  rows = re.findall(r'href="/rollouts/(\d+)\?turn=(\d+)" data-row', answer.text)
  return [(names[int(r)], int(t)) for r, t in rows]


def index_all(engine):
  """As the server's writer does when nothing waits."""
  with database.writing(engine) as connection:
    while text_index.catch_up(connection, 2):
      pass


def indexed(server, query):
  index_all(server.engine)
  with database.reading(server.engine) as connection:
    return text_index.find(connection, 1, text_index.terms_of(query), None, 100)


def test_words_are_found_whole_and_by_their_beginning_newest_first(server):
  fill(server)
  for query, rows in (
    ("grader", [("r1", 1)]),
    ("GRADER sleeps", [("r1", 1)]),
    ("grade*", [("r2", 1), ("r1", 1)]),
    ("grad", []),
    ("sesame", [("r1", 2)]),
    ("sesame-open épée", [("r1", 2)]),
    ("2,000", [("r2", 1)]),
    ("r3", [("r3", 2), ("r3", 1)]),
    ("o'brien", [("r3", 2)]),
    ("table drop", [("r3", 2)]),
    ("sleeps sesame", []),  # Of two turns.
    # The task's description is of the first turn.
    ("open door", [("r3", 1), ("r2", 1), ("r1", 1)]),
    ("door grader", [("r1", 1)]),
    # Any part of a script without spaces; marks are no words.
    ("開け", [("r3", 1)]),
    ("門け", []),
    ("門 r3", [("r3", 1)]),
    ("?", []),
    ("sleeps.", [("r1", 1)]),
    ("100%", []),
  ):
    assert found(server, query) == rows, query
  assert found(server, "r2", outcome="success") == [("r2", 1)]
  assert found(server, "r2", outcome="failure") == []
  index_all(server.engine)
  assert found(server, "開け") == [("r3", 1)] and found(server, "門け") == []


def test_no_query_is_a_syntax(server):
  fill(server)
  for query in (
      '"', "' OR 1=1 --", "NEAR(a b)", "a AND NOT b", "words:grader", "*",
      "**", "grader) (", "a:* & !b", "\ue0001", "grader\ue0002*",
      "\U00016ee3word", "_", "-", "\\", "grader^2", "{a b}: c", "\0grader",
      "x" * 500,
  ):  # fmt: skip
    found(server, query)
  assert len(server.rows("turn")) == 5


def test_the_index_follows_every_writer(server):
  fill(server)
  assert indexed(server, "sesame") and not indexed(server, "later")
  with database.writing(server.engine) as connection:
    run = connection.exec_driver_sql
    run(
      'UPDATE turn SET metrics_json = \'{"thought": "later words"}\' WHERE'
      " id = 1"
    )
    run(
      "INSERT INTO turn (rollout_id, turn, metrics_json) VALUES (1, 9,"
      ' \'{"thought": "inserted"}\')'
    )
    run(
      "INSERT INTO turn (rollout_id, turn, metrics_json) VALUES (1, 10,"
      " '{no json inserted')"
    )
    run(
      "UPDATE action SET action_type = 'type', tool_args ="
      ' \'{"text": "typed afterwards"}\' WHERE turn_id = 1'
    )
  assert found(server, "later words") == [("r1", 1)]
  assert found(server, "inserted") == [("r1", 9)]
  assert found(server, "afterwards") == [("r1", 1)]
  # The index may still have what is gone; the page looks.
  assert found(server, "sleeps") == []
  server.post(
    {
      "training_id": "T",
      "turns": [{"client_id": "r2:turn:1", "thinking": "of another recorder"}],
    }
  )
  assert found(server, "another recorder") == [("r2", 1)]


def test_turns_are_found_before_and_after_they_are_indexed(server, monkeypatch):
  index_all(server.engine)
  with monkeypatch.context() as patch:
    patch.setattr(text_index, "catch_up", lambda connection, most: False)
    fill(server)
    pages = [found(server, q) for q in ("grader", "grade*", "nowhere")]
    with database.reading(server.engine) as connection:
      waits = text_index.pending(connection)
  assert waits
  assert pages == [[("r1", 1)], [("r2", 1), ("r1", 1)], []]
  index_all(server.engine)
  assert pages == [found(server, q) for q in ("grader", "grade*", "nowhere")]


def test_the_server_indexes_what_it_stores_and_what_was_left(
  tmp_path, monkeypatch
):
  def wait(server):
    until = time.monotonic() + 20
    while True:
      with database.reading(server.engine) as connection:
        if not text_index.pending(connection):
          return text_index.find(connection, 1, ["grader"], None, 9)
      assert time.monotonic() < until
      time.sleep(0.02)

  with monkeypatch.context() as patch:
    patch.setattr(text_index, "catch_up", lambda connection, most: False)
    with monitor_server.sqlite_server(tmp_path) as server:
      fill(server)
  with monitor_server.sqlite_server(tmp_path) as server:
    assert wait(server) == [1]
    server.post({"training_id": "T", **thinking("r4", "a second grader")})
    assert wait(server) == [6, 1]


def test_an_index_that_cannot_be_written_refuses_no_batch(
  tmp_path, monkeypatch, caplog
):
  def broken(connection, most):
    raise OSError("no space for words")

  monkeypatch.setattr(text_index, "catch_up", broken)
  with monitor_server.sqlite_server(tmp_path) as server:
    fill(server)
    until = time.monotonic() + 20
    while "no space for words" not in caplog.text:
      assert time.monotonic() < until
      time.sleep(0.02)
    server.post({"training_id": "T", **thinking("r4", "after the grader")})
    assert found(server, "grader") == [("r4", 1), ("r1", 1)]
  assert caplog.text.count("no space for words") == 1


def test_a_long_text_is_stored_and_its_beginning_indexed(server):
  words = " ".join(f"w{n}\u00e4" for n in range(60_000))
  server.post(joined(base(), thinking("r1", words)))
  assert indexed(server, "w17\u00e4") and not indexed(server, "w59999\u00e4")


def test_a_page_goes_on_where_the_one_before_stopped(server, monkeypatch):
  monkeypatch.setattr(search_page, "_FOUND", 3)
  server.post(joined(base(), thinking("r1", *["same words"] * 8)))
  numbers, path = [], "/runs/1/search?q=same"
  while path:
    page = server.http.get(path).text
    numbers += re.findall(r'turn=(\d+)" data-row', page)
    more = re.search(r'href="([^"]+)">Earlier turns', page)
    path = more and more[1].replace("&amp;", "&")
  assert numbers == [str(n) for n in range(8, 0, -1)]


def test_an_index_of_another_version_is_made_anew(server):
  fill(server)
  index_all(server.engine)
  with database.writing(server.engine) as connection:
    connection.exec_driver_sql(
      "UPDATE monitor_meta SET value = '1' WHERE key = 'text_index'"
    )
  database.upgrade(server.engine)
  assert found(server, "grader") == [("r1", 1)]
  assert indexed(server, "grader") == [1]


def test_a_prune_leaves_out_what_is_gone(server, tmp_path):
  fill(server)
  server.post({"training": {"client_id": "T", "status": "completed"}})
  server.post({"training": {"client_id": "U", "run_name": "kept"}})
  server.post(
    joined(
      {"training": {"client_id": "U"}},
      {"steps": [{"client_id": "S2", "step": 1}]},
      thinking("k1", "kept words", step_id="S2"),
    )
  )
  pruning.prune(
    server.engine, tmp_path / "files", pruning.Criteria(names=("run",))
  )
  index_all(server.engine)
  with database.reading(server.engine) as connection:
    count = (
      connection.execute(
        sa.text("SELECT count(*) FROM monitor_turn_words")
      ).scalar()
      if server.engine.dialect.name == "postgresql"
      else 1
    )
    assert count == 1
    assert text_index.find(connection, 1, ["grader"], None, 9) == []
    assert len(text_index.find(connection, 2, ["kept"], None, 9)) == 1
