"""Learner's calls over a path that loses packets or is cut."""

import json
import time

import lossy_link
import pytest

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not lossy_link.available(), reason="needs root, ip and /dev/net/tun"
  ),
]
SERVER = """
import http.server, sys, time
class Slow(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  def do_GET(self):
    if self.path == "/silent":
      print("asked", flush=True)
      time.sleep(60)
    self.send_response(200)
    self.send_header("Content-Length", "2")
    self.end_headers()
    self.wfile.write(b"ok")
  do_POST = do_GET
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Slow).serve_forever()
"""
CLIENT = """
import asyncio, json, sys, time
from tunix.rl.multi_turn.net import http
async def main(url, silence_s):
  client = http.Http(silence_s=silence_s)
  assert await client.call("GET", url + "/", 20.0) == b"ok"
  began = time.monotonic()
  try:
    await client.call("GET", url + "/silent", 12.0)
    how = "answered"
  except http.CallError as error:
    how = "late" if error.late else "cut"
  seconds = time.monotonic() - began
  while True:
    try:
      await client.call("GET", url + "/", 2.0)
      break
    except http.CallError:
      pass
  print(json.dumps([how, seconds]))
asyncio.run(main(f"http://{sys.argv[1]}:8000", float(sys.argv[2]) or None))
"""


@pytest.mark.parametrize("silence_s", [3.0, 0.0])
def test_a_cut_connection_is_given_up_long_before_the_deadline(
  silence_s, tmp_path
):
  address = lossy_link.ENDS[0]
  with lossy_link.Link(lossy_link.NetworkPath(0.001)) as link:
    log = tmp_path / "server"
    server = link.start(0, "-c", SERVER, address, log=log)
    arguments = ("-c", CLIENT, address, str(silence_s))
    client = link.start(1, *arguments, log=tmp_path / "client")
    try:
      _wait_for(lambda: "asked" in log.read_text(), client)
      link.cut(9.0)
      assert client.wait(60) == 0, (tmp_path / "client").read_text()
    finally:
      server.kill()
      client.kill()
  how, seconds = json.loads((tmp_path / "client").read_text())
  if silence_s:
    assert how == "cut" and seconds < 8
  else:  # What the option is for: nothing tells that the peer is out of reach.
    assert how == "late"


def _wait_for(condition, process, seconds=30.0):
  due = time.monotonic() + seconds
  while not condition():
    assert process.poll() is None and time.monotonic() < due
    time.sleep(0.05)
