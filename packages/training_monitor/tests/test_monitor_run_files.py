"""Runs into a file and into another database, by the ingest protocol."""

import json
import pathlib

import monitor_databases
import monitor_server
import pytest
from training_monitor import serve
from training_monitor.maintenance import run_files
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)
MADE = {"created_at", "updated_at", "last_heartbeat"}
"""Columns that an import makes anew."""


def fill(server, name="run", episodes=3):
  """A run with episodes of all sources, statuses, raw values, a picture."""
  sha, image = monitor_server.screenshot(len(name))
  server.http.put(f"/api/v1/screenshots/{sha}", content=image)
  one = episode(f"{name}-0", status="running", group=1)
  one["observations"][0]["screenshot_uri"] = f"sha256:{sha}"
  one["turns"][0]["model_response"] = "ü\u2028 <b>"
  prefix = lambda body: json.loads(
    json.dumps(body)
    .replace('"T"', f'"{name}-T"')
    .replace('"S"', f'"{name}-S"')
    .replace('"E"', f'"{name}-E"')
    .replace('"B"', f'"{name}-B"')
  )
  start = base(run_name=name, status="running", learning_rate="NaN")
  start["validators"] = [{"task_id": "open-door", "validator_type": "state"}]
  server.post(prefix(joined(start, one)))
  server.post(prefix({
      "training_id": "T",
      **joined(
          {"rollouts": [{"client_id": f"{name}-0", "status": "success"}]},
          *(episode(f"{name}-{n}", status="completed", reward=n / 7)
            for n in range(1, episodes)),
          episode(f"{name}-e", eval_id="E", status="failed"),
          episode(f"{name}-b", baseline_id="B", status="completed"),
      ),
  }))  # fmt: skip
  return sha


@pytest.fixture
def source(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "from") as running:
    fill(running)
    yield running


def export(server, path, name="run", **options):
  return run_files.export(
    server.engine, server.app._files, path, name, **options
  )


def import_(server, path, **options):
  return run_files.import_(server.engine, server.app._files, path, **options)


def shape(server):
  """The runs without ids: every row by what it says and belongs to."""
  runs = []
  for run in server.get("/api/v1/trainings")["items"]:
    own = f"/api/v1/trainings/{run['id']}"
    rollouts = []
    for rollout in server.get("/api/v1/rollouts", training_id=run["id"])[
      "items"
    ]:
      detail = server.get(f"/api/v1/rollouts/{rollout['id']}")
      turns = server.get(f"/api/v1/rollouts/{rollout['id']}/turns")["items"]
      rollouts.append((detail, turns))
    rollouts.sort(key=lambda pairs: pairs[0]["rollout_id"])
    sources = [
      server.get(f"{own}/{kind}")["items"]
      for kind in ("steps", "evals", "baselines")
    ]
    runs.append((server.get(own), sources, rollouts))

  def plain(value):
    if isinstance(value, dict):
      return {
        k: plain(v)
        for k, v in value.items()
        if k not in ("id", "entity_id", "raw", *MADE)
        and not (k.endswith("_id") and isinstance(v, int))
      }
    if isinstance(value, (list, tuple)):
      return [plain(v) for v in value]
    return value

  return plain(runs)


def counts(server):
  return {
    table: len(server.rows(table))
    for table in ("training", "rollout", "turn", "obs", "validator")
  }


def test_a_run_arrives_whole_beside_others_and_only_once(
  source, target, tmp_path
):
  sha = monitor_server.screenshot(3)[0]
  path = tmp_path / "run.jsonl"
  written = export(source, path)
  assert (written.screenshots, written.missing) == (1, [])
  with monitor_server.MonitorServer(target, tmp_path / "to_files") as server:
    fill(server, "first", episodes=2)  # Has the same ids, fewer rows of them.
    before = shape(server)
    brought = import_(server, path)
    assert (brought.run, brought.rows) == ("run", written.rows)
    (imported, present) = shape(server)
    assert [imported] == shape(source) and [present] == before
    reply = server.http.get(f"/api/v1/screenshots/{sha}")
    assert reply.content == monitor_server.screenshot(3)[1]
    (raw,) = server.rows(
      "monitor_raw_value", where="field = 'learning_rate'", order="kind"
    )[-1:]
    assert raw["value"] == "NaN"  # What has no column is not lost.
    here = counts(server)
    assert import_(server, path).rows == 0
    assert counts(server) == here


def test_an_imported_run_can_be_gone_on_with(source, target, tmp_path):
  path = tmp_path / "run.jsonl"
  export(source, path)
  with monitor_server.MonitorServer(target, tmp_path / "to_files") as server:
    server.post(base(run_name="mine"))  # It knows of ids already.
    import_(server, path)
    reply = server.post(
      {
        "training_id": "run-T",
        "steps": [
          {"client_id": "run-S", "status": "completed"},
          {"client_id": "new", "step": 2},
        ],
        "rollouts": [{"client_id": "run-1", "batch": 7}],
      }
    )
    (run,) = [r for r in server.rows("training") if r["run_name"] == "run"]
    assert reply["training_id"] == run["id"]
    (rollout,) = [
      r for r in server.rows("rollout") if r["rollout_id"] == "run-1"
    ]
    assert rollout["batch"] == 7 and len(server.rows("step")) == 3


def test_another_run_of_the_same_name_gets_a_number(exported, tmp_path):
  with monitor_server.sqlite_server(tmp_path / "to") as server:
    server.post({"training": {"client_id": "x", "run_name": "run"}})
    for _ in range(2):
      import_(server, exported)
      names = {r["run_name"] for r in server.rows("training")}
      assert names == {"run", "run-2"}


def test_rows_that_raw_sql_made_travel_too(source, tmp_path):
  with database.writing(source.engine) as connection:
    connection.exec_driver_sql("DELETE FROM monitor_client_id")
  path = tmp_path / "run.jsonl"
  export(source, path)
  with monitor_server.sqlite_server(tmp_path / "to") as server:
    for _ in range(2):
      import_(server, path)
      assert shape(server) == shape(source)
  before = counts(source)
  with pytest.raises(runs_lib.MaintenanceError, match="same rollouts"):
    import_(source, path)
  assert counts(source) == before


def test_an_export_is_one_moment_of_the_database(source, tmp_path):
  expected = shape(source)
  parts = run_files._RunReader.parts

  def parts_and_more(self, kind):
    if kind.name == "rollout":
      source.post(episode("meanwhile") | {"training_id": "run-T", "rollouts": [
          {"rollout_id": "meanwhile", "step_id": "run-S",
           "task_id": "open-door"}]})  # fmt: skip
    return parts(self, kind)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run_files._RunReader, "parts", parts_and_more)
    export(source, tmp_path / "run.jsonl")
  assert len(source.rows("rollout")) == 6
  with monitor_server.sqlite_server(tmp_path / "to") as server:
    import_(server, tmp_path / "run.jsonl")
    assert shape(server) == expected


# --- what can be wrong ------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  """A file of one run."""
  folder = tmp_path_factory.mktemp("exported")
  with monitor_server.sqlite_server(folder) as server:
    fill(server)
    export(server, folder / "run.jsonl")
  return folder / "run.jsonl"


@pytest.mark.parametrize(
  "change, says",
  [
    (lambda d: d.replace(b'"run-1"', b'"run-9"'), "another hash"),
    (lambda d: d[: len(d) // 2], "whole file"),
    (lambda d: b"".join(d.splitlines(True)[:-1]), "not whole"),
    (lambda d: d.replace(b'"base64":"iVBO', b'"base64":"jVBO'), "whole PNG"),
    (lambda d: d.replace(b'"version":1', b'"version":2'), "version 2"),
    (lambda d: b"{}\n", "monitor export"),
    (lambda d: b"[" * 9999 + b"\n", "line 1"),
    (lambda d: b"", "not whole"),
  ],
)
def test_what_is_damaged_does_not_come_in(exported, tmp_path, change, says):
  wrong = tmp_path / "changed.jsonl"
  wrong.write_bytes(change(exported.read_bytes()))
  with monitor_server.sqlite_server(tmp_path / "to") as server:
    with pytest.raises(runs_lib.MaintenanceError, match=says):
      import_(server, wrong)
    assert not any(counts(server).values())


def test_a_failed_export_leaves_what_was_there(source, tmp_path, monkeypatch):
  path = tmp_path / "run.jsonl"
  path.write_bytes(b"precious")

  def full(self, kind):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(run_files._RunReader, "parts", full)
  with pytest.raises(OSError):
    export(source, path)
  assert path.read_bytes() == b"precious"
  assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_the_same_episodes_cannot_be_of_two_runs(exported, tmp_path):
  with monitor_server.sqlite_server(tmp_path / "to") as server:
    server.post(base())
    server.post(episode("run-0"))
    before = counts(server)
    for project in ("", "other"):
      with pytest.raises(runs_lib.MaintenanceError, match="same rollouts"):
        import_(server, exported, project=project)
      assert counts(server) == before


def test_the_commands(source, tmp_path, capsys):
  path, to = str(tmp_path / "run.jsonl"), str(tmp_path / "to.db")
  own = (
    "--database",
    str(tmp_path / "from" / "m.db"),
    "--files",
    str(tmp_path / "from" / "files"),
  )
  one = ("export", path, "--run", "run")
  assert serve.main([*one, *own]) == 0
  assert "run run," in capsys.readouterr().out
  assert serve.main([*one, *own]) == 2
  assert "--force" in capsys.readouterr().err
  for says in ("run run imported: ", "is here already"):
    assert serve.main(["import", path, "--database", to]) == 0
    assert says in capsys.readouterr().out
  assert (tmp_path / "to_files").is_dir()
  for args, says in (
    (["import", path + "x", "--database", to], "no such file"),
    ([*one, "--force", "--database", to + "x"], "no such file"),
    (["export", path, "--force", "--run", "nobody", *own], "--run=nobody"),
    ([*one, "--force", "--project", "none", *own], "--project=none"),
  ):
    assert serve.main(args) == 2
    assert says in capsys.readouterr().err
  assert not pathlib.Path(to + "x").exists()


def test_the_two_databases_understand_each_other(request, source, tmp_path):
  """SQLite to PostgreSQL and back is the same to the last column."""
  url = monitor_databases.new_database(request.getfixturevalue("postgres"))
  first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
  export(source, first)
  with monitor_server.MonitorServer(url, tmp_path / "pg_files") as middle:
    import_(middle, first)
    export(middle, second)
  with monitor_server.sqlite_server(tmp_path / "back") as back:
    import_(back, second)
    assert shape(back) == shape(source)
  assert len(first.read_bytes()) == len(second.read_bytes())
