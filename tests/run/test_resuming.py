"""Resuming: the step a run continues from, and the files it refuses."""

import dataclasses
import errno
import hashlib
import os
import shutil
import signal
import socket
import time

import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run_lock
from tunix.rl.multi_turn.run.warm_start import stage

pytestmark = [
  pytest.mark.timeout(400),
  pytest.mark.filterwarnings("ignore:os.fork"),  # They only hold a lock.
]
NEW = (
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "eval.modes=[sampled]",
  "eval.episodes_per_task=1",
)


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory):
  """A finished run that has cloned and trained; copied, never changed."""
  directory = tmp_path_factory.mktemp("finished")
  assert small_runs.run_train(
      directory, *NEW, "name=r", "warm_start.steps=1",
      "warm_start.batch_size=4", "steps=1", "seed=3",
  ) == 0  # fmt: skip
  return directory / "r"


@pytest.fixture(name="run")
def _run(finished, tmp_path):
  return shutil.copytree(finished, tmp_path / "r")


def tree(directory):
  """Name, kind, size, time and hash of everything in a directory.

  Not the time of the lock's file, which an attempt to start writes its name to.
  """
  collected = {}
  for path in sorted(directory.rglob("*")):
    stat = path.stat()
    digest = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()
    changed = path.name != run_lock.NAME and stat.st_mtime_ns
    collected[str(path)] = (stat.st_mode, stat.st_size, changed, digest)
  return collected


def refusal(capsys, *argv):
  """Returns the one line with which a command is refused."""
  capsys.readouterr()
  status = train.main(list(argv))
  printed = capsys.readouterr()
  assert status == 2, printed
  assert "Traceback" not in printed.err
  (line,) = printed.err.strip().splitlines()
  assert line.startswith("error: ")
  return line


# --- the policy after cloning -------------------------------------------------


def test_a_dry_run_writes_and_deletes_nothing(run, capsys):
  (run / "cloning" / "1").mkdir(parents=True)
  (run / "cloning" / "1" / "a").write_text("perhaps the only copy")
  os.utime(run / "cloning", (1, 1))
  before = tree(run.parent)
  for argument in ("--dry-run", "run.dry_run=true"):
    assert train.main([f"resume={run}", argument]) == 0
  (run / "warm_start" / "model.safetensors").unlink()
  before = tree(run.parent)
  refusal(capsys, f"resume={run}", "--dry-run")
  assert tree(run.parent) == before


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "config"])
def test_a_damaged_warm_start_is_named_and_costs_no_checkpoint(
  run, capsys, damage
):
  checkpoint = run / "cloning" / "1" / "a"
  checkpoint.parent.mkdir(parents=True)
  checkpoint.write_text("the only copy")
  weights = run / "warm_start" / "model.safetensors"
  data = bytearray(weights.read_bytes())
  if damage == "cut":
    weights.write_bytes(data[: len(data) // 2])
  elif damage == "flipped":
    data[-5] ^= 4
    weights.write_bytes(data)
  elif damage == "missing":
    weights.unlink()
  else:
    (run / "warm_start" / "config.json").write_text("{")
  message = refusal(capsys, f"resume={run}", "steps=2")
  name = "config.json" if damage == "config" else "model.safetensors"
  assert str(run / "warm_start" / name) in message
  assert "delete the directory to clone again" in message
  assert checkpoint.read_text() == "the only copy"


@pytest.mark.slow
def test_what_an_older_version_left_half_written_is_made_again(
  run, monkeypatch
):
  """A killed warm start wrote config.json first and deleted cloning/ last."""
  (run / "warm_start" / durable.SUMS).unlink()
  (run / "warm_start" / "model.safetensors").unlink()
  (run / "cloning").mkdir()
  for name in ("checkpoints", "policy"):
    shutil.rmtree(run / name)
  assert train.main([f"resume={run}"]) == 0
  durable.check(run / "warm_start")
  assert not (run / "cloning").exists()

  def not_again(*args, **kwargs):
    raise AssertionError("cloned before")

  # A whole one of an older version, too, is trusted.
  monkeypatch.setattr(stage, "clone", not_again)
  (run / "warm_start" / durable.SUMS).unlink()
  assert train.main([f"resume={run}"]) == 0


def test_the_policy_of_a_run_is_whole(run):
  durable.check(run / "policy")


# --- one process at a time ----------------------------------------------------


def forked(work):
  """A child that has done `work` and sleeps; its process id."""
  ready, write = os.pipe()
  child = os.fork()
  if not child:
    lock = work()
    os.write(write, b"x")
    time.sleep(60)
    del lock
    os._exit(0)
  assert os.read(ready, 1) == b"x"
  os.close(ready)
  os.close(write)
  return child


def kill(child):
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)


@pytest.mark.parametrize(
  "new", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_second_process_is_refused_and_told_of_the_first(run, capsys, new):
  argv = [f"resume={run}", "steps=2"]
  if new:
    argv = [f"run.dir={run.parent}", *small_runs.SMALL, *NEW, "name=r"]
  holder = forked(lambda: run_lock.RunLock(run))
  try:
    before = tree(run)
    message = refusal(capsys, *argv)
    assert f"in use by process {holder} on {socket.gethostname()}" in message
    assert "since 2" in message and f"kill -INT {holder}" in message
    assert tree(run) == before
    # Nothing is written, so nothing is in the way.
    assert train.main([f"resume={run}", "--dry-run"]) == 0
    assert tree(run) == before
  finally:
    kill(holder)  # The kernel lets go, not the process.
  with train.Run(small_runs_config(f"resume={run}")):
    message = refusal(capsys, f"resume={run}")
    assert f"process {os.getpid()} on" in message
    # It must not keep the lock when its parent has let go.
    child = forked(lambda: None)
  try:
    with train.Run(small_runs_config(f"resume={run}")):
      pass
  finally:
    kill(child)


def small_runs_config(*argv):
  return config_lib.load_config(argv)


def test_a_run_that_cannot_be_built_lets_go_of_the_directory(run, capsys):
  refusal(capsys, f"resume={run}", "seed=4")
  with train.Run(small_runs_config(f"resume={run}")):
    pass


def test_without_locks_it_is_said_and_the_run_goes_on(
  tmp_path, monkeypatch, caplog
):
  def refuse(handle, kind):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
  run_lock.RunLock(tmp_path).close()
  (messages,) = [r.getMessage() for r in caplog.records]
  assert str(tmp_path) in messages and "No locks available" in messages
  assert "start it once only" in messages


def test_starts_of_one_second_have_directories_of_their_own(monkeypatch):
  monkeypatch.setattr(time, "strftime", lambda *args: "20300101-000000")
  directories = {small_runs_config().run_dir for _ in range(50)}
  assert len(directories) == 50
  assert all("20300101-000000" in d.name for d in directories)


def test_a_directory_that_cannot_be_written_is_named(tmp_path, capsys):
  (tmp_path / "file").write_text("")
  message = refusal(
    capsys, f"run.dir={tmp_path / 'file'}", *small_runs.SMALL, *NEW, "name=r"
  )
  assert f"run.dir={tmp_path / 'file'}" in message


# --- settings -----------------------------------------------------------------


def edit(run, change):
  file = run / "config.yaml"
  file.write_text(change(file.read_text()))


@pytest.mark.parametrize(
  "damage, named",
  [
    (lambda text: "", {"run.seed=0": "3", "learner.steps=50": "1"}),
    (
      lambda text: text[: text.index("\nlearner:") + 1],
      {"learner.steps=50": "1", "learner.groups_per_step=16": "2"},
    ),
    pytest.param(
      lambda text: text.replace("group_size: 4", "group_size: 6"),
      {"collect.group_size=6": "4"},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_changed_config_is_named_key_by_key(run, capsys, damage, named):
  edit(run, damage)
  before = tree(run)
  assert train.main([f"resume={run}"]) == 2
  stderr = capsys.readouterr().err
  assert "Traceback" not in stderr and tree(run) == before
  for change, value in named.items():
    (line,) = (l for l in stderr.splitlines() if f" {change}" in l)
    assert f" {value}" in line.partition(change)[2]
  if len(named) == 1:  # As the message advises.
    assert train.main([f"resume={run}", "collect.group_size=4"]) == 0
    assert config_lib.is_sealed((run / "config.yaml").read_text())


def test_without_a_checkpoint_a_changed_config_is_refused(run, capsys):
  shutil.rmtree(run / "checkpoints")
  edit(run, lambda text: text[:-20])
  message = refusal(capsys, f"resume={run}")
  assert str(run / "config.yaml") in message and "<file>.yaml" in message


def test_an_override_is_a_deliberate_change_and_is_said(run, capsys):
  config = small_runs_config(f"resume={run}", "learner.learning_rate=0.5")
  for _ in range(2):  # Also where the run dies before its next checkpoint.
    with train.Run(config) as result:
      (note,) = result.changed
    assert note.startswith("learner.learning_rate=0.5, ")
    config = small_runs_config(f"resume={run}")


# --- what observers left ------------------------------------------------------


@pytest.mark.slow
def test_damaged_lines_are_left_out_and_the_others_stay(run, caplog):
  metrics = run / "metrics.jsonl"
  (good,) = metrics.read_text().splitlines()
  metrics.write_text(f'[1]\n"text"\n{{"step": "x"}}\n7\n{good}\n{good[:30]}')
  episodes = run / "trajectories.jsonl"
  lines = episodes.read_text().splitlines()
  episodes.write_text(
    "\n".join(["[]", '{"index": "x", "split": 3}', *lines, lines[0][:99]])
  )
  assert train.main([f"resume={run}"]) == 0
  assert metrics.read_text().splitlines() == [good]
  again = episodes.read_text().splitlines()
  assert again[: len(lines)] == lines
  assert all('"index": "x"' not in line for line in again)
  messages = [r.getMessage() for r in caplog.records if "left out" in r.msg]
  assert any(f"{metrics}: 4 lines" in s for s in messages)
  assert any(f"{episodes}: 2 lines" in s for s in messages)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", '{"eval": []}', '{"eval": {"initial": 3}}',
        '{"seconds": "x"}', '{"step": null}', '{"counts": 1}',
    ],
)  # fmt: skip
def test_a_damaged_summary_is_named(run, capsys, text):
  (run / "summary.json").write_text(text)
  message = refusal(capsys, f"resume={run}")
  assert f"{run / 'summary.json'} is damaged: " in message
  assert "delete it" in message


def test_a_damaged_checkpoint_is_named_before_anything_is_built(run, capsys):
  file = run / "checkpoints" / "1" / "progress" / "metadata"
  file.write_bytes(file.read_bytes()[:-40])
  message = refusal(capsys, f"resume={run}")
  assert f"{run / 'checkpoints' / '1'} is damaged" in message
  assert "the run begins without one" in message


@pytest.mark.slow
def test_damaged_weights_end_the_run_with_one_line(run, capsys):
  data = [
    p
    for p in (run / "checkpoints" / "1" / "arrays").rglob("d/*")
    if p.stat().st_size > 2000
  ]
  for file in data:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  assert train.main([f"resume={run}", "steps=2"]) == 1
  printed = capsys.readouterr()
  assert "Traceback" not in printed.err
  (line,) = (l for l in printed.err.splitlines() if l.startswith("error: "))
  assert f"{run / 'checkpoints' / '1'} is damaged" in line


def test_a_damaged_queue_is_named_with_what_to_do(run, capsys, tmp_path):
  queue = tmp_path / "q.db"
  config = small_runs_config(f"resume={run}")
  config = dataclasses.replace(
    config, queue=dataclasses.replace(config.queue, path=str(queue))
  )
  queue.write_bytes(b"no database" * 1000)
  with pytest.raises(config_lib.ConfigError, match="restore it from a copy"):
    models.make_store(config, None, run / "queue.db")
  assert capsys.readouterr().err == ""


def test_another_algorithm_by_name_is_refused(run, capsys):
  """Its preset would lie below the recorded values, and change nothing."""
  message = refusal(capsys, f"resume={run}", "algorithm=dapo")
  assert "algorithm.name" in message and "dapo" in message


def test_the_parts_of_a_groups_queue_stay_as_they_are(tmp_path):
  """Its indices are those of parts: other parts would be other groups."""
  load = lambda *argv: config_lib.load_config([f"resume={tmp_path}", *argv])
  begin = lambda *argv: (tmp_path / "config.yaml").write_text(
    config_lib.seal(
      resuming.recorded(
        config_lib.load_config(["name=r", "queue.max_staleness=1", *argv])
      ).to_yaml()
    )
  )
  begin("collect.group_size=8", "collect.part_size=4")
  resuming.check(load())
  for argv, words in (
    (["collect.part_size=0"], "collect.part_size=0: .* begun with 4"),
    (["collect.group_size=12"], "collect.group_size=12: .* begun with 8"),
  ):
    with pytest.raises(config_lib.ConfigError, match=words):
      resuming.check(load(*argv))
  begin("collect.group_size=8")
  resuming.check(load("collect.group_size=12"))


@pytest.mark.parametrize(
  "begun, changed, key",
  [
    ((), ("rollout.via=offline", "offline.path=x"), "rollout.via=offline"),
    (
      ("rollout.via=offline", "offline.path=x"),
      ("rollout.via=in_process", "offline.path="),
      "rollout.via=in_process",
    ),
    (
      ("rollout.via=offline", "offline.path=x"),
      ("offline.shuffle=false",),
      "offline.shuffle=False",
    ),
    (
      ("rollout.via=offline", "offline.path=x"),
      ("offline.split=all",),
      "offline.split=all",
    ),
  ],
)
def test_the_order_of_recorded_groups_stays(begun, changed, key, tmp_path):
  before = config_lib.load_config(["name=r", *begun])
  text = config_lib.seal(resuming.recorded(before).to_yaml())
  (tmp_path / "config.yaml").write_text(text)
  load = lambda *argv: config_lib.load_config([f"resume={tmp_path}", *argv])
  resuming.check(load())
  with pytest.raises(config_lib.ConfigError, match=f"{key}: .* begun with"):
    resuming.check(load(*changed))


def test_episodes_may_be_played_in_another_way(tmp_path):
  text = config_lib.seal(
    resuming.recorded(config_lib.load_config(["name=r"])).to_yaml()
  )
  (tmp_path / "config.yaml").write_text(text)
  resuming.check(
    config_lib.load_config([f"resume={tmp_path}", "rollout.via=proxy"])
  )
