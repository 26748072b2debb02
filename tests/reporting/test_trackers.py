"""Trackers, read back with the packages that people look at them with."""

import contextlib
from http import server
import io
import json
import logging
import socket
import struct
import sys
import threading
import time

import fresh_interpreter
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import tracker_media
from tunix.rl.multi_turn.reporting import trackers

Status = trajectory.TrajectoryStatus
LOGGER = "tunix.rl.multi_turn.reporting.trackers"


def told(observers, steps=3, status="completed", first=1):
  """Events of a run that trackers receive."""
  for observer in observers:
    observer.on_event(events.RunStarted("my run", {"learner": {"steps": 3}}))
    for step in range(first, first + steps):
      observer.on_event(
        events.StepFinished(
          step, step, {"loss": 1.0 / step, "odd": float("nan")}
        )
      )
    observer.on_event(events.EvalStarted("step_2", "sampled", 8, 2))
    observer.on_event(events.EvalFinished("step_2", {
        "success_rate": 0.5, "headline": "sampled", "interval": [0.2, 0.8],
        "by_task": {"click": {"success_rate": 0.25}},
    }))  # fmt: skip
    observer.on_event(events.RunFinished(status))
    observer.close()
    assert (observer.failures, observer.dropped) == (0, 0)


def of_run(folder, resume_step=None, **tracking):
  tracking = {"close_timeout_s": 60.0} | tracking
  return trackers.of_run(
    reporting_settings.TrackingConfig(**tracking), folder, resume_step
  )


def test_nothing_is_tracked_unless_asked_for(tmp_path):
  assert of_run(tmp_path) == []
  program = (
    "import sys; from tunix.rl.multi_turn import train;"
    "bad = {'wandb', 'mlflow', 'tensorboardX.writer'} & set(sys.modules) -"
    " set(sys.argv); assert not bad, bad"
  )
  # Upstream's own logger brings tensorboardX with it.
  process = fresh_interpreter.run(program, "tensorboardX.writer")
  assert process.returncode == 0, process.stderr


# --- episodes ---------------------------------------------------------------


def episode(store, solved, number, split="eval"):
  """Three turns on screens of their own; the first click is at (20, 30)."""
  steps = []
  for turn in range(3):
    pixels = np.full((96, 128, 3), 40 * turn + number, np.uint8)
    content = [{"type": "image", "image": store.put(pixels)}]
    steps.append(
      trajectory.Step(
        chat_completions=[{"role": "user", "content": content}],
        model_response=f"answer | {turn}",
        info={"gui_actions": [{"action": "click", "x": 20, "y": 30}]},
      )
    )
  one = trajectory.Trajectory(
    task={"family": "click"},
    steps=steps,
    reward=float(solved),
    status=Status.SUCCEEDED if solved else Status.FAILED,
  )
  return events.EpisodeFinished(one, f"g{number}", f"click/{number}", split)


def shown(tmp_path, **tracking):
  """An evaluation of five solved episodes and three that failed, told."""
  store = images_lib.ImageStore()
  (tracker,) = trackers.of_run(
    reporting_settings.TrackingConfig(close_timeout_s=60.0, **tracking),
    tmp_path,
    None,
    store,
  )
  tracker.on_event(events.RunStarted("my run", {}))
  tracker.on_event(events.EvalStarted("step_2", "sampled", 8, 2))
  tracker.on_event(episode(store, True, 99, "train"))
  for number in range(8):
    tracker.on_event(episode(store, number < 5, number))
  tracker.on_event(events.EvalFinished("step_2", {"success_rate": 0.625}))
  tracker.on_event(events.RunFinished("completed"))
  tracker.close()
  assert (tracker.failures, tracker.dropped) == (0, 0)


def test_an_evaluation_under_another_name_is_of_its_step(tmp_path):
  """Also in a run that resumes with nothing left to update."""
  accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="needs the extra `dev`",
  )
  (tracker,) = of_run(tmp_path, resume_step=4, tensorboard=True)
  tracker.on_event(events.RunStarted("my run", {}))
  tracker.on_event(events.EvalFinished("final", {"success_rate": 0.5}, step=4))
  tracker.on_event(events.RunFinished("completed"))
  tracker.close()
  accumulator = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
  accumulator.Reload()
  (scalar,) = accumulator.Scalars("eval/success_rate")
  assert (scalar.step, scalar.value) == (4, 0.5)


def test_tensorboard_shows_film_strips_and_a_table(tmp_path):
  accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="needs the extra `dev`",
  )
  shown(tmp_path, tensorboard=True)
  accumulator = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
  accumulator.Reload()
  assert sorted(accumulator.Tags()["images"]) == [
    "episodes/failed_2",
    "episodes/failed_3",
    "episodes/solved_0",
    "episodes/solved_1",
  ]
  (event,) = accumulator.Images("episodes/solved_0")
  picture = Image.open(io.BytesIO(event.encoded_image_string))
  assert event.step == 2 and picture.size == (3 * 320 + 2 * 4, 240)
  pixels = np.asarray(picture)
  # The second frame's screen, and the ring around (20, 30) of the first.
  assert tuple(pixels[200, 324 + 200]) == (40, 40, 40)
  assert tuple(pixels[75, 50 + 8]) == (230, 30, 60)
  (text,) = accumulator.Tensors("episodes/table/text_summary")
  table = text.tensor_proto.string_val[0].decode()
  assert table.count("| click/") == 8 and "click/99" not in table
  assert "answer \\| 2" in table and "| failed | 0.0 | 3 |" in table


@pytest.mark.slow
def test_wandb_shows_film_strips_and_a_table(tmp_path):
  pytest.importorskip("wandb", reason="needs the extra `tracking`")
  shown(tmp_path, wandb="offline", film_strips=2)
  media = next((tmp_path / "wandb").glob("offline-run-*/files/media"))
  pictures = sorted(p.name for p in (media / "images").rglob("*.png"))
  assert len(pictures) == 2
  (table,) = (media / "table").rglob("*.json")
  data = json.loads(table.read_text())
  assert data["columns"] == list(tracker_media.COLUMNS)
  assert [row[0] for row in data["data"]] == [f"click/{n}" for n in range(8)]


def test_no_strip_is_drawn_where_none_is_wanted(tmp_path):
  shown(tmp_path, tensorboard=True, film_strips=0)
  accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator"
  )
  accumulator = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
  accumulator.Reload()
  assert accumulator.Tags()["images"] == []
  assert not any("episodes" in tag for tag in accumulator.Tags()["tensors"])


@pytest.mark.parametrize("solved", range(9))
def test_strips_are_of_both_kinds_where_there_are_both(solved):
  store = images_lib.ImageStore()
  media = tracker_media.EvalMedia(4)
  for number in range(8):
    media.add(episode(store, number < solved, number))
  kinds = [one.success for one in media.strips]
  assert len(kinds) == 4 and len(media.rows) == 8
  assert sum(kinds) == max(min(solved, 2), 4 - (8 - solved))


def test_an_observation_of_numbers_is_no_screen():
  store = images_lib.ImageStore()
  media = tracker_media.EvalMedia(1)
  one = episode(store, True, 1)
  one.trajectory.steps[-1].observation = np.arange(3.0)
  media.add(one)
  assert len(media.rows) == len(media.strips) == 1


def test_screens_that_are_gone_draw_nothing():
  store = images_lib.ImageStore()
  media = tracker_media.EvalMedia(1)
  media.add(episode(store, True, 1))
  assert tracker_media.strip(media.strips[0], images_lib.ImageStore()) is None


# --- TensorBoard ------------------------------------------------------------


def test_tensorboard_shows_every_number_once_after_a_resumption(tmp_path):
  accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="needs the extra `dev`",
  )
  told(of_run(tmp_path, tensorboard=True), steps=3, status="interrupted")
  time.sleep(1.1)  # File names differ by the second.
  told(of_run(tmp_path, resume_step=2, tensorboard=True), steps=2, first=3)
  read = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
  read.Reload()
  losses = [(e.step, e.value) for e in read.Scalars("train/loss")]
  assert losses == [(n, pytest.approx(1.0 / n)) for n in (1, 2, 3, 4)]
  evals = read.Tags()["scalars"]
  assert "eval/success_rate" in evals
  assert [e.step for e in read.Scalars("eval/by_task/click/success_rate")] == [
    2,
    2,
  ]
  (text,) = read.Tensors("config/text_summary")[-1].tensor_proto.string_val
  assert b"my run" in text and b'"steps": 3' in text


# --- Weights & Biases -------------------------------------------------------


def records(path):
  """Every record of a W&B transaction log: LevelDB's format."""
  pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
  data = path.read_bytes()
  assert data[:4] in (b":W&B", b"")
  at, part = 7, b""
  while at + 7 <= len(data):
    space = 32768 - at % 32768
    if space < 7:
      at += space
      continue
    _, size, kind = struct.unpack_from("<IHB", data, at)
    if not kind or at + 7 + size > len(data):
      break  # Not written yet.
    part += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # Whole, or the last part.
      record = pb.Record()
      record.ParseFromString(part)
      yield record
      part = b""


def test_wandb_keeps_an_offline_run_in_the_runs_folder(tmp_path):
  pytest.importorskip("wandb", reason="needs the extra `tracking`")
  told(of_run(tmp_path, wandb="offline", project="desk"))
  (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
  # A process of W&B's own writes it, its end a little after `finish`.
  deadline = time.monotonic() + 30
  stored = list(records(path))
  while not any(r.HasField("exit") for r in stored):
    assert time.monotonic() < deadline, "the file has no end"
    time.sleep(0.1)
    stored = list(records(path))
  (run,) = [r.run for r in stored if r.HasField("run")][:1]
  assert (run.project, run.display_name) == ("desk", "my run")
  name = json.loads((tmp_path / "tracking.json").read_text())["wandb"]
  assert run.run_id == name
  rows = [
    {
      (i.key or "/".join(i.nested_key)): json.loads(i.value_json)
      for i in r.history.item
    }
    for r in stored
    if r.HasField("history")
  ]
  losses = {r["step"]: r["train/loss"] for r in rows if "train/loss" in r}
  assert losses == {n: pytest.approx(1.0 / n) for n in (1, 2, 3)}
  (row,) = [r for r in rows if "eval/success_rate" in r]
  assert (row["step"], row["eval/success_rate"]) == (2, 0.5)
  (end,) = [r.exit for r in stored if r.HasField("exit")]
  assert end.exit_code == 0


def test_wandb_without_a_login_asks_nobody(tmp_path, monkeypatch, caplog):
  pytest.importorskip("wandb", reason="needs the extra `tracking`")
  monkeypatch.delenv("WANDB_API_KEY", raising=False)
  monkeypatch.setenv("NETRC", str(tmp_path / "none"))
  (tracker,) = of_run(tmp_path, wandb="online")
  with caplog.at_level(logging.WARNING, LOGGER):
    tracker.on_event(events.RunStarted("r", {}))
    tracker.on_event(events.StepFinished(1, 1, {"loss": 1.0}))
    tracker.close()
  (record,) = [r for r in caplog.records if r.name == LOGGER]
  assert "wandb login" in record.message and tracker.dropped == 2


# --- MLflow -----------------------------------------------------------------


@pytest.mark.slow
def test_mlflow_has_one_run_also_after_a_resumption(tmp_path):
  pytest.importorskip("mlflow", reason="needs the extra `tracking`")
  pytest.importorskip("sqlalchemy", reason="needs the extra `tracking`")
  uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
  told(of_run(tmp_path, mlflow=uri, project="desk"), status="interrupted")
  told(of_run(tmp_path, resume_step=3, mlflow=uri, project="desk"), first=4)
  from mlflow import tracking  # pylint: disable=g-import-not-at-top

  client = tracking.MlflowClient(tracking_uri=uri)
  experiment = client.get_experiment_by_name("desk")
  (run,) = client.search_runs([experiment.experiment_id])
  assert run.info.run_name == "my run" and run.info.status == "FINISHED"
  assert run.data.params == {"learner.steps": "3"}
  history = client.get_metric_history(run.info.run_id, "train/loss")
  assert {m.step: m.value for m in history} == {
    n: pytest.approx(1.0 / n) for n in range(1, 7)
  }
  assert run.data.metrics["eval/success_rate"] == 0.5
  assert "train/odd" not in run.data.metrics


@pytest.mark.slow
def test_mlflow_closes_a_run_that_failed_as_failed(tmp_path):
  pytest.importorskip("mlflow", reason="needs the extra `tracking`")
  uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
  told(of_run(tmp_path, mlflow=uri, project="desk"), steps=1, status="failed")
  from mlflow import tracking  # pylint: disable=g-import-not-at-top

  client = tracking.MlflowClient(tracking_uri=uri)
  experiment = client.get_experiment_by_name("desk")
  (run,) = client.search_runs([experiment.experiment_id])
  assert run.info.status == "FAILED"


@contextlib.contextmanager
def mlflow_server(answer):
  """An address that answers MLflow's client; what it was asked to log.

  Args:
    answer: `(path, body) -> status`, called at each request; may be slow.
  """
  state = {"metrics": [], "requests": 0, "ended": []}
  run = {"info": {"run_id": "r1", "status": "RUNNING"}, "data": {}}
  answers = {
    "experiments/get-by-name": {"experiment": {"experiment_id": "1"}},
    "runs/create": {"run": run},
    "runs/get": {"run": run},
    "runs/update": {"run_info": run["info"]},
  }

  class Handler(server.BaseHTTPRequestHandler):
    def do_GET(self):  # pylint: disable=invalid-name
      self._reply({})

    def do_POST(self):  # pylint: disable=invalid-name
      size = int(self.headers["Content-Length"])
      self._reply(json.loads(self.rfile.read(size)))

    def _reply(self, body):
      path = self.path.partition("/mlflow/")[2].partition("?")[0]
      status = answer(path, body)
      if status == 200 and path == "runs/log-batch" and "metrics" in body:
        state["requests"] += 1
        state["metrics"] += [(m["key"], m["step"]) for m in body["metrics"]]
      if path == "runs/update" and "end_time" in body:
        state["ended"].append(body["status"])
      text = json.dumps(answers.get(path, {})).encode()
      self.send_response(status)
      self.send_header("Content-Type", "application/json")
      self.send_header("Content-Length", str(len(text)))
      self.end_headers()
      self.wfile.write(text)

    def log_message(self, *args):
      pass

  httpd = server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=httpd.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{httpd.server_port}", state
  finally:
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize(
  "status, ended",
  [("completed", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")],
)
def test_a_slow_mlflow_server_gets_every_value_and_the_end(
  tmp_path, status, ended
):
  pytest.importorskip("mlflow", reason="needs the extra `tracking`")

  def slow(path, body):
    del body
    time.sleep(0.3 if path == "runs/log-batch" else 0)
    return 200

  with mlflow_server(slow) as (uri, state):
    # One by one, 100 steps would take 30 s.
    trackers_ = of_run(tmp_path, mlflow=uri, close_timeout_s=15.0)
    told(trackers_, steps=100, status=status)
  losses = [step for key, step in state["metrics"] if key == "train/loss"]
  assert losses == list(range(1, 101))
  assert state["ended"] == [ended] and state["requests"] < 20


def test_what_an_mlflow_server_refused_is_sent_again(tmp_path, monkeypatch):
  pytest.importorskip("mlflow", reason="needs the extra `tracking`")
  monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
  refused = []

  def at_times(path, body):
    first = path == "runs/log-batch" and "metrics" in body and not refused
    if first:
      refused.append(len(body["metrics"]))
    return 503 if first else 200

  with mlflow_server(at_times) as (uri, state):
    (tracker,) = of_run(tmp_path, mlflow=uri)
    tracker.on_event(events.RunStarted("my run", {}))
    for step in (1, 2, 3):
      tracker.on_event(events.StepFinished(step, step, {"loss": 1.0 / step}))
    tracker.on_event(events.RunFinished("completed"))
    tracker.close()
  assert refused and tracker.failures == 1 and not tracker.dropped
  losses = [step for key, step in state["metrics"] if key == "train/loss"]
  assert losses == [1, 2, 3] and state["ended"] == ["FINISHED"]


def test_an_mlflow_server_that_never_answers_does_not_hold_the_end_up(
  tmp_path, monkeypatch, caplog
):
  pytest.importorskip("mlflow", reason="needs the extra `tracking`")
  monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
  over = threading.Event()

  def silent(path, body):
    del path, body
    over.wait(30)
    return 200

  with mlflow_server(silent) as (uri, _):
    (tracker,) = of_run(tmp_path, mlflow=uri, close_timeout_s=0.5)
    tracker.on_event(events.RunStarted("my run", {}))
    tracker.on_event(events.RunFinished("completed"))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, LOGGER):
      tracker.close()
    assert time.monotonic() - began < 10
    over.set()
  assert "did not take everything within 0.5 s" in caplog.text


def test_an_mlflow_server_that_is_not_there_is_named_once(
  tmp_path, monkeypatch, caplog
):
  pytest.importorskip("mlflow", reason="needs the extra `tracking`")
  monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
  asked_by = set()

  class Noting(trackers.MLflow):
    def __init__(self, *args):
      asked_by.add(threading.current_thread().name)
      super().__init__(*args)

  monkeypatch.setattr(trackers, "MLflow", Noting)
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))  # And does not listen.
    uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
    (tracker,) = of_run(tmp_path, mlflow=uri)
    with caplog.at_level(logging.WARNING, LOGGER):
      began = time.monotonic()
      for step in range(50):
        tracker.on_event(events.StepFinished(step, step, {"loss": 1.0}))
      assert time.monotonic() - began < 10
      tracker.on_event(events.RunFinished("completed"))
      tracker.close()
  own = [r for r in caplog.records if r.name == LOGGER]
  assert len(own) == 1 and uri.rpartition(":")[2] in own[0].message
  # Whatever it takes to find out, the run does not wait for it.
  assert asked_by == {"tracker-MLflow"}
  assert 1 <= tracker.failures <= 5 and tracker.dropped


# --- whatever the backend does ------------------------------------------------


class Broken:
  """Backend that fails in chosen calls."""

  def __init__(self, fails):
    self.fails = fails
    self.calls = []

  def _call(self, *call):
    self.calls.append(call)
    if len(self.calls) - 1 in self.fails:
      raise OSError("gone for a while")

  def start(self, run_name, config):
    self._call("start")

  def scalars(self, step, values):
    self._call("scalars", step)

  def finish(self, status):
    self._call("finish", status)


@pytest.mark.parametrize(
  "fails, calls, warnings",
  [
    ((2, 3, 5), 22, 0),  # It came back each time.
    (tuple(range(3, 99)), 8, 1),
    ((0,), 1, 1),
  ],
)
def test_a_backend_that_fails(fails, calls, warnings, caplog):
  backend = Broken(fails)
  tracker = trackers.Tracker("It", lambda: backend)
  with caplog.at_level(logging.WARNING, LOGGER):
    tracker.on_event(events.RunStarted("r", {}))
    for step in range(20):
      tracker.on_event(events.StepFinished(step, step, {"loss": 1.0}))
    tracker.on_event(events.RunFinished("completed"))
    tracker.close()
  assert len(backend.calls) == calls
  assert len(caplog.records) == warnings
  if warnings:
    assert "It receives nothing more of this run" in caplog.text


def test_a_package_that_is_absent_is_named_with_the_way_to_get_it(
  tmp_path, monkeypatch, caplog
):
  for name in ("wandb", "mlflow", "mlflow.tracking"):
    monkeypatch.setitem(sys.modules, name, None)
  trackers_ = of_run(tmp_path, wandb="offline", mlflow="sqlite:///x.db")
  with caplog.at_level(logging.WARNING, LOGGER):
    for tracker in trackers_:
      tracker.on_event(events.RunStarted("r", {}))
      tracker.close()
  assert len(caplog.records) == 2
  assert all("[tracking]" in r.message for r in caplog.records)


def test_a_backend_that_hangs_holds_up_nobody(caplog):
  hang = threading.Event()

  class Hanging(Broken):
    def scalars(self, step, values):
      hang.wait(60)

  tracker = trackers.Tracker(
    "It",
    lambda: Hanging(()),
    reporting_settings.TrackingConfig(close_timeout_s=0.2),
  )
  began = time.monotonic()
  for step in range(12_000):
    tracker.on_event(events.StepFinished(step, step, {}))
  tracker.close()
  tracker.close()
  assert time.monotonic() - began < 10
  assert tracker.dropped >= 1_900
  assert "within 0.2 s" in caplog.text
  hang.set()


@pytest.mark.parametrize(
  "key, says",
  [
    ("tracking.mlflow=somewhere", "http://host:port"),
    ("tracking.wandb=maybe", "offline"),
    ("tracking.project=' '", "give a name"),
  ],
)
def test_settings_that_cannot_be(key, says):
  with pytest.raises(config_lib.ConfigError, match=says):
    config_lib.load_config([key])
