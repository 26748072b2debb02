"""Sites on the loopback interface for the `browser` gym, and what listens."""

import http.server
import json
import select
import socket
import threading
import urllib.parse

_INDEX = """<!doctype html><title>Index</title>
<meta name="instruction" content="Greet seed {seed}.">
<style>body {{ margin: 0; font: 16px sans-serif }}
  a, button, input, textarea {{ position: absolute; left: 10px; width: 200px;
    height: 24px }}</style>
<input id=field style="top: 10px">
<button style="top: 50px" onclick="location = '/greeted?name='
  + encodeURIComponent(field.value)">Greet</button>
<a style="top: 90px" href="http://127.0.0.1:{other}/away">away</a>
<a style="top: 130px" target=_blank href="/second">second</a>
<a style="top: 170px" href="/file.zip">file</a>
<button style="top: 210px" onclick="title = document.title = confirm('Sure?')
  + prompt('Who?', 'me')">ask</button>
<button style="top: 250px" onclick="fetch('/slow').then(r => r.text())
  .then(t => this.textContent = document.title = t)">load</button>
<a style="top: 290px" target=_blank
  href="http://127.0.0.1:{other}/popup">popup</a>
<input type=file style="top: 330px">
<textarea id=text style="top: 370px"></textarea>
"""

_LEAKY = """<!doctype html><title>Leaky</title><body>
<link rel=prefetch href="http://B/prefetch">
<link rel=preconnect href="http://B">
<link rel=stylesheet href="http://B/style.css">
<img src="http://B/img"><iframe src="http://B/frame"></iframe>
<iframe src="file:///etc/passwd"></iframe><iframe src="/redirect"></iframe>
<img src="/redirect"><script src="http://B/script.js"></script>
<form id=form action="http://B/form" method=post target=_blank></form>
<script>
const tried = [];
const attempt = (name, run) => tried.push(
  new Promise(resolve => { run(resolve); setTimeout(resolve, 1500, 'quiet'); })
    .catch(e => 'threw').then(outcome => [name, outcome]));
attempt('fetch', done => fetch('http://B/fetch', {mode: 'no-cors'})
  .then(() => done('open'), () => done('blocked')));
attempt('redirected', done => fetch('/redirect', {mode: 'no-cors'})
  .then(() => done('open'), () => done('blocked')));
attempt('name', done => fetch('http://localhost:PORT/name', {mode: 'no-cors'})
  .then(() => done('open'), () => done('blocked')));
attempt('file', done => fetch('file:///etc/passwd')
  .then(() => done('open'), () => done('blocked')));
attempt('socket', done => { const s = new WebSocket('ws://B/ws');
  s.onopen = () => done('open'); s.onerror = () => done('blocked'); });
attempt('events', done => { const s = new EventSource('http://B/events');
  s.onopen = () => done('open'); s.onerror = () => done('blocked'); });
attempt('worker', done => { const w = new Worker(URL.createObjectURL(new Blob([
  `fetch('http://B/worker', {mode: 'no-cors'}).then(() => postMessage('open'),
   () => postMessage('blocked'))`])));
  w.onmessage = e => done(e.data); });
attempt('service', done => navigator.serviceWorker.register('/service.js')
  .then(r => navigator.serviceWorker.ready).then(r => {
    navigator.serviceWorker.onmessage = e => done(e.data);
    r.active.postMessage('go'); }));
attempt('beacon', done => { navigator.sendBeacon('http://B/beacon', 'x');
  setTimeout(done, 300, 'sent'); });
attempt('rtc', done => {
  const pc = new RTCPeerConnection({iceServers: [
    {urls: 'stun:127.0.0.1:PORT'}, {urls: 'turn:127.0.0.1:PORT?transport=tcp',
     username: 'a', credential: 'b'}]});
  pc.createDataChannel('x');
  pc.createOffer().then(o => pc.setLocalDescription(o));
});
attempt('transport', done => { const t = new WebTransport('https://B/wt');
  t.ready.then(() => done('open'), () => done('blocked')); });
try { window.open('http://B/window'); } catch (e) {}
try { form.submit(); } catch (e) {}
try { location.replace('file:///etc/passwd'); } catch (e) {}
window.outcomes = Promise.all(tried);
</script>"""

_SERVICE = """self.addEventListener('message', e => fetch('http://B/service',
  {mode: 'no-cors'}).then(() => e.source.postMessage('open'),
  () => e.source.postMessage('blocked')));
self.addEventListener('activate', e => e.waitUntil(clients.claim()));"""


class Ears:
  """A TCP and a UDP socket on one port: whoever calls there is heard."""

  def __init__(self):
    while True:
      self._tcp = socket.create_server(("127.0.0.1", 0))
      self.port = self._tcp.getsockname()[1]
      self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
      try:
        self._udp.bind(("127.0.0.1", self.port))
        break
      except OSError:  # Taken for UDP; another.
        self._tcp.close()
        self._udp.close()

  def heard(self) -> list[str]:
    """The callers' addresses; nothing is read from their connections."""
    ready, _, _ = select.select([self._tcp, self._udp], [], [], 0)
    return [("tcp", "udp")[s is self._udp] for s in ready]

  def close(self) -> None:
    self._tcp.close()
    self._udp.close()


class Site:
  """A site that episodes play on. `asked` are the paths it was asked for."""

  def __init__(self, other: int):
    self.asked: list[str] = []
    site = self
    place = f"127.0.0.1:{other}"

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_GET(self):
        site.asked.append(self.path)
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        headers, status, kind = {}, 200, "text/html; charset=utf-8"
        name = parts.path
        if name == "/":
          body = _INDEX.format(seed=query.get("seed", ""), other=other)
        elif name == "/greeted":
          body = f"<title>Greeted</title>{json.dumps(query.get('name'))}"
        elif name == "/leaky":
          body = _LEAKY.replace("//B", f"//{place}").replace("PORT", str(other))
        elif name == "/service.js":
          body = _SERVICE.replace("//B", f"//{place}")
          kind = "text/javascript"
        elif name == "/redirect":
          body, status = "", 302
          headers["Location"] = f"http://{place}/redirected"
        elif name == "/file.zip":
          body, kind = "PK", "application/zip"
          headers["Content-Disposition"] = "attachment; filename=file.zip"
        elif name == "/slow":
          threading.Event().wait(0.4)
          body = "loaded"
        elif name == "/hang":
          body = "<script>for (;;);</script>"
        elif name == "/cookie":
          headers["Set-Cookie"] = "been=here"
          body = f"<title>{self.headers.get('Cookie')}</title>"
        elif name == "/second":
          body = "<title>Second</title>second"
        else:
          body, status = "no such page", 404
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for key, value in headers.items():
          self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

      def log_message(self, *args):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._server.daemon_threads = True
    self.port = self._server.server_port
    self.url = f"http://127.0.0.1:{self.port}"
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()


def greeted(page, task, answer):
  """An evaluator: whether the page greets whom the task's seed says."""
  del answer
  return page.title == "Greeted" and page.text.strip() == f'"{task.seed}"'
