"""Runs into a file and into another database, ids and all."""

import json
import pathlib
import zipfile

import monitor_databases
import monitor_server
import pytest
import sqlalchemy as sa
from training_monitor import serve
from training_monitor.maintenance import archive
from training_monitor.maintenance import exporting
from training_monitor.maintenance import importing
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.schema import tables

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)
KEPT = [t.name for t in tables.TABLES] + [
  "monitor_raw_value",
  "monitor_client_id",
]


def contents(engine):
  """Maps each table to its rows; times are not normalised."""
  tables_ = {}
  with database.reading(engine) as connection:
    for name in KEPT:
      table = tables.metadata.tables[name]
      order = list(table.primary_key.columns)
      tables_[name] = [
        tuple(row)
        for row in connection.execute(sa.select(table).order_by(*order))
      ]
  return tables_


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
    yield running


def export(server, path, **options):
  return exporting.export(
    server.engine, server.app._files, path, quiet=True, **options
  )


def import_(engine, tmp_path, path, **options):
  return importing.import_(
    engine, tmp_path / "to_files", path, quiet=True, **options
  )


def test_a_project_arrives_whole_with_its_ids_and_only_once(
  source, engine, tmp_path
):
  sha = fill(source)
  fill(source, "other")
  path = tmp_path / "runs.zip"
  manifest = export(source, path)
  assert [r["run_name"] for r in manifest["runs"]] == ["run", "other"]
  outcome = import_(engine, tmp_path, path)
  assert (outcome.imported, outcome.renumbered) == (["run", "other"], 0)
  assert contents(engine) == contents(source.engine)
  file = tmp_path / "to_files" / "screenshots" / sha[:2] / f"{sha}.png"
  assert file.read_bytes() == monitor_server.screenshot(3)[1]
  again = import_(engine, tmp_path, path)
  assert again.present == ["run", "other"] and not again.imported
  assert (again.rows, again.screenshots) == (0, 0)
  assert contents(engine) == contents(source.engine)


def test_tags_and_the_baseline_travel_and_what_is_here_stays(
  source, target, tmp_path
):
  fill(source)
  (id_,) = [t["id"] for t in source.rows("training")]
  path = tmp_path / "runs.zip"
  tag = lambda server, **body: server.http.post(
    f"/api/v1/trainings/{id_}/tags", json=body
  ).json()["tags"]
  tag(source, add=["first", "ü"])
  source.http.put(f"/api/v1/trainings/{id_}/pin")
  export(source, path)
  with monitor_server.MonitorServer(target, tmp_path / "to_files") as here:
    assert import_(here.engine, tmp_path, path).imported == ["run"]
    training = lambda: here.get(f"/api/v1/trainings/{id_}")
    assert (training()["tags"], training()["pinned"]) == (["first", "ü"], True)
    tag(source, add=["second"], remove=["first"])
    again = tmp_path / "again.zip"
    export(source, again)
    assert import_(here.engine, tmp_path, again).replaced == ["run"]
    # A tag that was taken away there may have been given here.
    assert training()["tags"] == ["first", "second", "ü"]
    assert training()["pinned"]
    assert import_(here.engine, tmp_path, path).present == ["run"]
    # The baseline of a project that has one is not another run.
    fill(source, "other")
    other = source.rows("training")[1]["id"]
    source.http.put(f"/api/v1/trainings/{other}/pin")
    export(source, again)
    assert import_(here.engine, tmp_path, again).imported == ["other"]
    assert training()["pinned"]


def test_what_is_imported_is_served_and_can_be_gone_on_with(
  source, target, tmp_path
):
  fill(source)
  path = tmp_path / "runs.zip"
  export(source, path)
  with monitor_server.MonitorServer(target, tmp_path / "to_files") as server:
    server.post(base(run_name="mine"))  # It knows of ids already.
    import_(server.engine, tmp_path, path)
    (run, _) = server.get("/api/v1/trainings")["items"]
    assert run["run_name"] == "run"
    (picture,) = [
      o for o in server.rows("obs") if o["screenshot_uri"] is not None
    ]
    sha = picture["screenshot_uri"].removeprefix("sha256:")
    assert server.http.get(f"/api/v1/screenshots/{sha}").status_code == 200
    # The client of the run may have moved, too: its names still work.
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
    assert reply["training_id"] == run["id"]
    (rollout,) = [
      r for r in server.rows("rollout") if r["rollout_id"] == "run-1"
    ]
    assert rollout["batch"] == 7


def test_a_later_state_replaces_and_an_earlier_one_does_not(
  source, engine, tmp_path
):
  fill(source)
  early, late = tmp_path / "early.zip", tmp_path / "late.zip"
  export(source, early)
  source.post(
    {
      "training": {"client_id": "run-T", "status": "completed"},
      "rollouts": [{"client_id": "run-1", "reward": 0.25}],
      "steps": [{"client_id": "s2", "step": 2}],
    }
  )
  export(source, late)
  assert import_(engine, tmp_path, early).imported == ["run"]
  outcome = import_(engine, tmp_path, late)
  assert (outcome.replaced, outcome.renumbered) == (["run"], 0)
  assert contents(engine) == contents(source.engine)
  assert import_(engine, tmp_path, early).present == ["run"]
  assert contents(engine) == contents(source.engine)


def shape(server):
  """A database without its ids: every row by what it says and belongs to."""
  pairs = []
  for run in server.get("/api/v1/trainings")["items"]:
    history = server.get(f"/api/v1/trainings/{run['id']}/history")["items"]
    rollouts = []
    for rollout in server.get("/api/v1/rollouts", training_id=run["id"])[
      "items"
    ]:
      detail = server.get(f"/api/v1/rollouts/{rollout['id']}")
      # Tasks are shared: existing ones do not change.
      detail["task"] = detail["task"]["task_id"]
      turns = server.get(f"/api/v1/rollouts/{rollout['id']}/turns")["items"]
      rollouts.append((detail, turns))
    rollouts.sort(key=lambda pairs: pairs[0]["rollout_id"])
    pairs.append((run, history, rollouts))

  def plain(value):
    if isinstance(value, dict):
      return {
        k: plain(v)
        for k, v in value.items()
        if k not in ("id", "entity_id")
        and not (k.endswith("_id") and isinstance(v, int))
      }
    if isinstance(value, (list, tuple)):
      return [plain(v) for v in value]
    return value

  return plain(pairs)


def test_where_ids_are_taken_new_ones_are_given_and_all_that_refers_follows(
  source, target, tmp_path
):
  fill(source)
  expected = shape(source)
  path = tmp_path / "runs.zip"
  export(source, path)
  with monitor_server.MonitorServer(target, tmp_path / "to_files") as server:
    fill(server, "first", episodes=2)  # Has the same ids, fewer rows of them.
    before = shape(server)
    outcome = import_(server.engine, tmp_path, path)
    assert outcome.imported == ["run"] and outcome.renumbered
    (imported, present) = shape(server)
    assert [imported] == expected and [present] == before
    assert import_(server.engine, tmp_path, path).present == ["run"]
    # And the next entity gets an unused id.
    server.post(joined(base(run_name="last"), episode("last")))
    assert len(server.rows("rollout")) == 5 + 4 + 1


def test_another_run_of_the_same_name_gets_a_number_and_stays_known(
  exported, tmp_path
):
  with monitor_server.sqlite_server(tmp_path / "to") as server:
    server.post({"training": {"client_id": "x", "run_name": "run"}})
    import_(server.engine, tmp_path, exported)
    names = {r["run_name"] for r in server.rows("training")}
    assert names == {"run", "run-2"}
    assert import_(server.engine, tmp_path, exported).present == ["run"]
    assert len(server.rows("training")) == 2


@pytest.mark.slow
def test_an_export_is_one_moment_of_the_database(source, tmp_path):
  fill(source)
  expected = contents(source.engine)
  rows = archive.ArchiveWriter.rows

  def rows_and_more(self, name, content):
    count = rows(self, name, content)
    if name.endswith("rollout.jsonl"):
      source.post(episode("meanwhile") | {"training_id": "run-T", "rollouts": [
          {"rollout_id": "meanwhile", "step_id": "run-S",
           "task_id": "open-door"}]})  # fmt: skip
    return count

  archive.ArchiveWriter.rows = rows_and_more
  try:
    export(source, tmp_path / "runs.zip")
  finally:
    archive.ArchiveWriter.rows = rows
  assert len(source.rows("rollout")) == 6
  engine = database.connect(tmp_path / "to.db")
  database.upgrade(engine)
  import_(engine, tmp_path, tmp_path / "runs.zip")
  assert contents(engine) == expected
  engine.dispose()


def test_a_run_or_a_project_can_be_chosen(source, tmp_path, engine):
  fill(source)
  fill(source, "other")
  path = tmp_path / "one.zip"
  assert len(export(source, path, names=("other",))["runs"]) == 1
  outcome = import_(engine, tmp_path, path, project="elsewhere")
  assert outcome.imported == ["other"] and not outcome.renumbered
  with database.reading(engine) as connection:
    (run,) = runs_lib.find(connection, "elsewhere")
  assert run.name == "other"
  for options, says in (
    ({"names": ("nobody",)}, "--run=nobody"),
    ({"project": "none"}, "--project=none"),
  ):
    with pytest.raises(runs_lib.MaintenanceError, match=says):
      export(source, path, **options)


# --- what can be wrong ------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  """An archive of one run."""
  folder = tmp_path_factory.mktemp("exported")
  with monitor_server.sqlite_server(folder) as server:
    fill(server)
    export(server, folder / "runs.zip")
  return folder / "runs.zip"


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
  """A database into which nothing may come."""
  opened = database.connect(tmp_path_factory.mktemp("empty") / "to.db")
  database.upgrade(opened)
  yield opened
  opened.dispose()


def rewritten(path, out, change):
  """Copies an archive with each member replaced by `change(name, bytes)`."""
  with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
    for name in old.namelist():
      data = change(name, old.read(name))
      if data is not None:
        new.writestr(name, data)
  return out


@pytest.mark.parametrize(
  "part, change, says",
  [
    ("rollout.jsonl", lambda d: d.replace(b'"run-1"', b'"run-9"'), "hash"),
    ("obs.jsonl", lambda d: d[: len(d) // 2], "damaged"),
    ("turn.jsonl", lambda d: None, "damaged"),
    (".png", lambda d: monitor_server.screenshot(9)[1], "hash"),
    (".png", lambda d: None, "damaged"),
    ("manifest.json", lambda d: b"{}", "monitor export"),
    ("manifest.json", lambda d: d.replace(b"1,", b"2,", 1), "version 2"),
    (
      "manifest.json",
      lambda d: d.replace(b'"schema": "', b'"schema": "9'),
      "schema 9",
    ),
  ],
)
def test_what_is_damaged_does_not_come_in(
  exported, empty, tmp_path, part, change, says
):
  wrong = rewritten(
    exported,
    tmp_path / "changed.zip",
    lambda name, data: change(data) if name.endswith(part) else data,
  )
  with pytest.raises(runs_lib.MaintenanceError, match=says):
    import_(empty, tmp_path, wrong)
  assert not any(contents(empty).values())


def test_an_archive_that_is_cut_off_is_none(exported, tmp_path):
  path = tmp_path / "runs.zip"
  path.write_bytes(exported.read_bytes()[:-100])
  with pytest.raises(runs_lib.MaintenanceError, match="not a whole archive"):
    archive.ArchiveReader(path)


def test_a_failed_export_leaves_what_was_there(source, tmp_path, monkeypatch):
  fill(source)
  path = tmp_path / "runs.zip"
  path.write_bytes(b"precious")

  def full(self, name, content):
    del self, name, content
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(archive.ArchiveWriter, "rows", full)
  with pytest.raises(OSError):
    export(source, path)
  assert path.read_bytes() == b"precious"
  assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_the_same_episodes_cannot_be_of_two_runs(exported, tmp_path):
  with monitor_server.sqlite_server(tmp_path / "to") as server:
    server.post(base())
    server.post(episode("run-0"))
    before = contents(server.engine)
    with pytest.raises(runs_lib.MaintenanceError, match="same episodes"):
      import_(server.engine, tmp_path, exported)
    assert contents(server.engine) == before


def test_the_commands(source, tmp_path, capsys):
  fill(source)
  path, to = str(tmp_path / "runs.zip"), str(tmp_path / "to.db")
  own = (
    "--database",
    str(tmp_path / "from" / "m.db"),
    "--files",
    str(tmp_path / "from" / "files"),
  )
  assert serve.main(["export", path, "--quiet", *own]) == 0
  assert "1 runs" in capsys.readouterr().out
  assert serve.main(["export", path, "--quiet", *own]) == 2
  assert "--force" in capsys.readouterr().err
  assert serve.main(["import", path, "--database", to]) == 0
  captured = capsys.readouterr()
  assert "1 runs imported" in captured.out and "importing" in captured.err
  assert (tmp_path / "to_files").is_dir()
  for args, says in (
    (["import", path + "x", "--database", to], "no such file"),
    (["export", path, "--force", "--database", to + "x"], "no such file"),
  ):
    assert serve.main(args) == 2
    assert says in capsys.readouterr().err
  assert not pathlib.Path(to + "x").exists()


def test_the_two_databases_understand_each_other(request, tmp_path):
  """SQLite to PostgreSQL and back is the same to the last column."""
  url = monitor_databases.new_database(request.getfixturevalue("postgres"))
  with monitor_server.sqlite_server(tmp_path / "from") as source:
    fill(source)
    first, second = tmp_path / "1.zip", tmp_path / "2.zip"
    export(source, first)
    middle, back = database.connect(url), database.connect(tmp_path / "b.db")
    database.upgrade(back)
    import_(middle, tmp_path, first)
    exporting.export(middle, tmp_path / "to_files", second, quiet=True)
    import_(back, tmp_path, second)
    assert contents(back) == contents(source.engine)
    middle.dispose()
    back.dispose()
