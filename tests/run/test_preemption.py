"""Notices that a machine will be taken away."""

import http.server
import threading
import time

import pytest
from tunix.rl.multi_turn.run import interrupts


class Metadata(http.server.ThreadingHTTPServer):
  """The instance's part of Google Compute Engine's metadata server."""

  def __init__(self, **values):
    self.values = {"preempted": "FALSE", "maintenance-event": "NONE", **values}
    self.asked = []
    server = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):  # pylint: disable=invalid-name
        server.asked.append(self.path)
        # As the real one, which refuses requests without the header.
        flavored = self.headers.get("Metadata-Flavor") == "Google"
        name = self.path.removeprefix("/computeMetadata/v1/instance/")
        self.send_response(200 if flavored and name in server.values else 403)
        self.end_headers()
        self.wfile.write(server.values.get(name, "").encode())

      def log_message(self, *_):
        pass

    super().__init__(("127.0.0.1", 0), Handler)
    threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture(name="metadata")
def _metadata(monkeypatch):
  server = Metadata()
  monkeypatch.setenv(
    "GCE_METADATA_HOST", f"127.0.0.1:{server.server_address[1]}"
  )
  yield server
  server.shutdown()
  server.server_close()


def wait_until(condition):
  due = time.monotonic() + 20
  while not condition() and time.monotonic() < due:
    time.sleep(0.01)
  assert condition()


@pytest.mark.parametrize(
  "name, value",
  [
    ("preempted", "TRUE"),
    ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
  ],
)
def test_a_notice_stops_the_run(name, value, metadata, capsys):
  stop = threading.Event()
  watch = interrupts.PreemptionWatch("auto", stop, poll_s=0.01)
  watch.start()
  wait_until(lambda: len(metadata.asked) > 4)
  metadata.values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
  count = len(metadata.asked)
  wait_until(lambda: len(metadata.asked) > count + 4)
  assert not stop.is_set()  # A live migration takes nothing away.
  metadata.values[name] = value
  assert stop.wait(20)
  watch.close()
  assert f"taken away ({name}={value})" in capsys.readouterr().err


def test_a_server_that_does_not_answer_costs_a_warning(
  metadata, monkeypatch, caplog
):
  monkeypatch.setattr(interrupts, "_PATH", "elsewhere")
  stop = threading.Event()
  watch = interrupts.PreemptionWatch("gce", stop, poll_s=0.001)
  watch.start()
  wait_until(lambda: "run.preemption" in caplog.text)
  assert "run.preemption=off" in caplog.text and not stop.is_set()
  watch.close()


def test_other_machines_ask_nobody(monkeypatch, tmp_path):
  monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
  product = tmp_path / "product_name"
  monkeypatch.setattr(interrupts, "_PRODUCT", product)
  for text, mode, host in (
    (None, "auto", ""),
    ("Standard PC", "auto", ""),
    ("Google Compute Engine", "auto", "metadata.google.internal"),
    ("Google Compute Engine", "off", ""),
    ("Standard PC", "gce", "metadata.google.internal"),
  ):
    if text is not None:
      product.write_text(text)
    assert interrupts.metadata_host(mode) == host
