"""An attacker at every door of the monitor: routes, projects, connections."""

import contextlib
import io
import json
import re
import socket
import threading
import time

import httpx
import monitor_server
from PIL import Image
import pytest
from starlette import routing
from training_monitor import app as app_lib
from training_monitor import serve
from training_monitor.net import connections
from training_monitor.net import http_server
from training_monitor.schema import database
from training_monitor.server import access

pytestmark = pytest.mark.timeout(400)
MARK = "only-for-project-A"
OPEN = {
  "/health",
  "/api/v1/openapi.json",
  "/static/{version}/{name:path}",
  "/login",
  "/favicon.ico",
}
"""What is served to anybody. Log-out is, too, and takes nothing but a form."""
ENDLESS = {"/api/v1/events"}
FORMS = {
  "/runs/{id:int}/tags",
  "/runs/{id:int}/pin",
  "/{id:int}",
  "/rollouts/{id:int}/annotations",
}
"""Asked with GET they lead to the run or rollout, if there is one or not."""
SENDING = ("POST", "PUT")


# --- who may have what --------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
  """A server with a project A that has one of everything, marked."""
  folder = tmp_path_factory.mktemp("guarded")
  with monitor_server.sqlite_server(folder, token="tm_owner") as server:
    make = lambda *of: access.make_token(server.engine, *of)
    server.tokens = {
      "A": make("A", ("ingest", "read")),
      "A reads": make("A", ("read",)),
      "A sends": make("A", ("ingest",)),
      "B": make("B", ("ingest", "read")),
    }
    body = monitor_server.joined(
      monitor_server.base(run_name=MARK, status_message=MARK),
      monitor_server.episode(
        f"{MARK}-r",
        reward=0.5,
        status="completed",
        error_message=MARK,
        task_success=True,
      ),
    )
    body["steps"][0] |= {
      "status_message": MARK,
      "metrics_json": {"loss": 1.0, MARK: 1.0},
    }
    body["groups"] = [{"step_id": "S", "group_num": 1, "status": MARK}]
    for turn in body["turns"]:
      turn["metrics_json"] = {"thought": MARK}
    for observation in body["observations"]:
      observation["text_content"] = MARK
    for measured in (*body["evals"], *body["baselines"]):
      measured["status_message"] = MARK
    server.sha, png = monitor_server.screenshot(3)
    body["observations"][0]["screenshot_uri"] = f"sha256:{server.sha}"
    body["delivery"] = {"spool": MARK, "first": 1, "last": 1, "health": {}}
    with client_of(server, "A") as http:
      reply = http.post("/api/ingest/batch", json=body)
      assert reply.status_code == 200, reply.text
      http.put(f"/api/v1/screenshots/{server.sha}", content=png)
      http.post(
        "/rollouts/1/annotations",
        data={"label": MARK, "note": MARK, "turn": 1},
        headers={"origin": server.url},
      )
    server.places = {
        "/api/videos": "?path=x.mp4",
        "/compare/tasks": "?a=eval-1&b=baseline-1",
        "id": "1", "step": "1", "task": "1", "name": f"{MARK}-r", "turn": "1",
        "obs": str(server.rows("obs")[0]["id"]), "measurement": "1",
        "kind": "eval", "format": "json", "sha256": server.sha,
    }  # fmt: skip
    yield server


@contextlib.contextmanager
def client_of(server, who, **headers):
  token = server.tokens.get(who, who)
  with httpx.Client(
    base_url=server.url,
    timeout=30,
    verify=False,
    headers={"authorization": f"Bearer {token}"} | headers
    if token
    else headers,
  ) as client:
    yield client


def doors(server):
  """(method, path's pattern, a path there is) of everything served."""
  routes = []
  for route in server.app.asgi.routes:
    assert isinstance(route, routing.Route)
    path = re.sub(
      r"\{(\w+)(:\w+)?\}",
      lambda m: server.places.get(m.group(1), m.group(1)),
      route.path,
    )
    path += server.places.get(route.path, "")
    for method in route.methods - {"HEAD"}:
      routes.append((method, route.path, path))
  return routes


def test_every_door_is_shut_without_the_right_token(guarded):
  doors_ = doors(guarded)
  assert len(doors_) > 55 and {d[0] for d in doors_} == {"GET", *SENDING}
  assert OPEN | FORMS < {d[1] for d in doors_}
  for who in ("", "tm_nobody", "A sends", "A reads"):
    with client_of(guarded, who) as http:
      for method, pattern, path in doors_:
        if pattern in OPEN | {"/logout"} or (
          pattern in ENDLESS and who == "A reads"
        ):
          continue
        if pattern in FORMS:  # To be sent by a page of this server only.
          reply = http.request(method, path)
          if method == "GET":
            assert reply.headers["location"] in ("/runs/1", "/rollouts/1")
            assert not reply.content
          else:
            assert reply.status_code == 403, (who, path)
          continue
        sends = method in SENDING
        may = who == ("A sends" if sends else "A reads")
        reply = http.request(method, path)
        is_page = not path.startswith("/api")
        if may:
          # What this is asked with may be wrong, but it was asked.
          assert reply.status_code in (200, 400, 404), (who, path)
          asks_nothing = (
            sends
            or path in ("/compare", "/api/videos?path=x.mp4")
            or path.endswith("/beside")  # Of the only attempt at its task.
          )
          assert reply.status_code == 200 or asks_nothing, path
        elif who == "A sends" or who == "A reads":
          assert reply.status_code == 403, (who, method, path)
          assert MARK not in reply.text
        elif is_page:
          assert reply.status_code == 303
          assert reply.headers["location"].startswith("/login?next=/")
        else:
          assert reply.status_code == 401, (who, method, path)
          assert reply.headers["www-authenticate"] == "Bearer"


def test_a_cookie_opens_reading_only_and_a_doubled_header_nothing(guarded):
  cookie = f"{access.COOKIE}={guarded.tokens['A']}"
  with client_of(guarded, "", cookie=cookie) as http:
    for method, pattern, path in doors(guarded):
      if method != "GET" and pattern not in OPEN | {"/logout"}:
        # The pages' own forms get 403, every other request 401.
        status = 403 if pattern in FORMS else 401
        assert http.request(method, path).status_code == status, path
    assert http.get("/runs/1").status_code == 200
  for first, status in (("tm_nobody", 401), (guarded.tokens["A"], 200)):
    reply = httpx.get(
      f"{guarded.url}/api/v1/trainings",
      timeout=30,
      verify=False,
      headers=[
        ("authorization", f"Bearer {first}"),
        ("authorization", f"Bearer {guarded.tokens['A']}"),
      ],
    )
    assert reply.status_code == status


def test_nothing_of_a_project_is_at_any_door_for_another(guarded):
  with client_of(guarded, "B") as http, client_of(guarded, "A") as own:
    count = 0
    for method, pattern, path in doors(guarded):
      if method != "GET" or pattern in OPEN | ENDLESS | FORMS:
        continue
      count += MARK in own.get(path).text.replace(f"{MARK}-r", "")
      reply = http.get(path)
      # That it says what it was asked for is no news.
      assert MARK not in reply.text.replace(f"{MARK}-r", ""), path
      by_number = "{id:int}" in pattern or "{name}" in pattern
      assert reply.status_code == 404 or not by_number, path
    for path in ("/runs/1/tags", "/runs/1/pin"):
      reply = http.post(
        path,
        data={"add": "theirs", "pinned": "1"},
        headers={"origin": guarded.url},
      )
      assert reply.status_code in (400, 404), (path, reply.text)
    assert not guarded.rows("monitor_training_tag", "*", "tag")
    assert not guarded.rows("monitor_pinned_baseline", "*", "project_id")
    assert count > 25  # Else the loop compared nothing.
    for path in (
      "/compare?run=1&run=2",
      "/api/v1/rollouts?training_id=1",
      "/compare/tasks?a=eval-1&b=baseline-1",
      "/rollouts",
      f"/api/v1/rollouts?label={MARK}",
      "/api/v1/rollouts?step_id=1",
      f"/?q={MARK}",
      "/api/v1/rollouts?task_id=1",
    ):
      shown = http.get(path).text.replace(f'value="{MARK}"', "")
      assert MARK not in shown, path
    # The stream: of A's training there is nothing to hear.
    with http.stream("GET", "/api/v1/events?after=0", timeout=5) as stream:
      with contextlib.suppress(httpx.ReadTimeout):
        heard = b""
        for part in stream.iter_raw():
          heard += part
          assert b"change" not in heard, heard


def test_no_answer_is_kept_run_or_shown_elsewhere(guarded):
  """But for what anybody may have, and pictures, whose hash is their name."""
  with client_of(guarded, "A") as http:
    for method, pattern, path in (
      *doors(guarded),
      ("GET", "", "/nothing"),
      ("GET", "", "/" + "x" * 5000),
      ("DELETE", "", "/runs/1"),
    ):
      if pattern in ENDLESS or pattern.startswith(("/static", "/favicon")):
        continue
      reply = http.request(method, path)
      get = reply.headers.get
      assert get("x-content-type-options") == "nosniff" or (
        reply.status_code == 303
      ), path
      image = get("content-type", "").startswith("image/")
      assert (
        get("cache-control") == "no-store"
        or reply.status_code == 303
        or (image and get("cache-control").startswith("private"))
      ), path
      assert reply.status_code == 303 or (
        "default-src 'none'" in get("content-security-policy")
      ), path


# --- other sites --------------------------------------------------------------


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
  """A server without tokens that many tests fill and none empties."""
  with monitor_server.sqlite_server(tmp_path_factory.mktemp("lite")) as running:
    yield running


@pytest.mark.parametrize("headers", [
    {"origin": "http://evil.example"}, {"origin": "null"},
    {"host": "evil.example"}, {"host": "127.0.0.1.evil.example"},
    {"host": ""}, {"origin": "http://localhost:1"},
    {"host": "localhost@evil.example"},
], ids=str)  # fmt: skip
def test_a_page_of_another_site_can_send_nothing(lite, headers):
  """A form needs no leave of CORS: text/plain is enough to post JSON."""
  reply = lite.http.post(
    "/api/ingest/batch",
    content='{"tasks": [{"task_id": "csrf"}]}',
    headers={"content-type": "text/plain"} | headers,
  )
  assert reply.status_code in (400, 403), reply.text
  assert "csrf" not in {t["task_id"] for t in lite.rows("task")}
  assert lite.http.get("/", headers=headers).status_code in (400, 403)


# --- what is asked ------------------------------------------------------------


ODD = (
    "9" * 5000, "9" * 30, "-1", "1e999", "nan", "inf", "\0", "٣", "%00",
    "' OR 1=1--", "../../../etc/passwd", "\u202e", "a" * 3000, "", "true",
    "\ud800",
)  # fmt: skip
ASKED = (
    "q", "state", "after", "run", "base", "differences", "x", "more", "smooth",
    "page", "sort", "order", "outcome", "from", "to", "task", "by", "turn",
    "heat", "a", "b", "tag", "mode", "limit", "names", "first", "last",
    "points", "status", "success", "training_id", "batch", "group", "path",
    "next",
)  # fmt: skip


@pytest.mark.slow
def test_whatever_is_asked_is_answered(guarded):
  """No parameter of any page makes the server fail, or answer late."""
  from urllib import parse  # pylint: disable=g-import-not-at-top

  quote = lambda text: parse.quote(text.encode("utf-8", "surrogatepass"))
  with client_of(guarded, "A") as http:
    for method, pattern, path in doors(guarded):
      if method != "GET" or pattern in ENDLESS | OPEN - {"/login"}:
        continue
      path = path.partition("?")[0]
      for odd in ODD:
        # All at once fit into a head if each is short.
        query = "&".join(f"{name}={quote(odd[:400])}" for name in ASKED)
        urls = [f"{path}?{query}"]
        if odd == ODD[0] and not path.startswith("/api"):
          # Each alone, too: the first wrong one ends a request.
          urls += [f"{path}?{name}={odd}" for name in ASKED]
        if odd in ODD[1:5] and "{" in pattern:
          urls.append(f"{path}/{quote(odd)}")
        for url in urls:
          if len(url) < 15_000:  # h11 takes no longer head.
            reply = http.get(url)
            assert reply.status_code < 500, (url[:200], reply.text[:300])


def test_ten_thousand_runs_are_not_compared(lite):
  query = "&".join(f"run={n}" for n in range(1, 3000))
  reply = lite.http.get(f"/compare?{query}")
  assert reply.status_code == 400 and "2 to 10" in reply.text


@pytest.mark.parametrize("path", [
    "/static/x/../site.py", "/static/x/%2e%2e/%2e%2e/text.py",
    "/static/x//etc/passwd", "/api/videos?path=../m.db",
    "/api/videos?path=/etc/passwd", "/api/v1/screenshots/..%2f..%2fm.db",
    "/api/v1/screenshots/" + "A" * 64, "/rollouts/1/export/..%2fjson",
])  # fmt: skip
def test_no_path_leads_out_of_a_folder(lite, path):
  with socket.create_connection(
    lite.url.removeprefix("http://").split(":"), timeout=20
  ) as line:  # A raw request: HTTP clients tidy dots away.
    line.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    status = line.makefile("rb").readline()
  assert status.split()[1] in (b"400", b"404"), status


# --- errors -------------------------------------------------------------------


def test_figures_beyond_all_measure_do_not_break_a_page(lite):
  """Numbers, times and places that no trainer would send."""
  huge = 10**30
  sha, png = monitor_server.screenshot(9, size=(1, 2000))
  lite.http.put(f"/api/v1/screenshots/{sha}", content=png)
  body = monitor_server.joined(
    monitor_server.base(
      run_name="odd", total_steps=2**62, current_step=2**62 - 1
    ),
    monitor_server.episode(
      "odd-r", status="completed", reward=1.7e308, max_turns=2**62
    ),
    monitor_server.episode("odd-s", status="completed", reward=-1.7e308),
  )
  places = [
      {"x": 1e308, "y": -1e308}, {"x": huge, "y": huge, "count": huge},
      {"point": [1e308, 1e308, 1e308, 1e308]}, {"point": [[], {}]},
      {"x": True, "y": False}, {"x": 5, "y": 5, "x2": 1e308, "y2": 1e308},
      {"dx": 1e308, "dy": 1e308, "x": 0, "y": 0}, {"dx": "1", "dy": [1]},
      {"text": {"a": [1]}}, {"keys": [[1], None]}, {"args": {"x": 1e9, "y": 1}},
  ]  # fmt: skip
  body["actions"] = [
      {"client_id": f"odd:{n}", "turn_id": f"{rollout}:turn:1",
       "action_type": kind, "tool_args": place}
      for n, (rollout, kind, place) in enumerate(
          (r, k, p) for r in ("odd-r", "odd-s")
          for k in ("click", "drag", "scroll") for p in places
      )
  ]  # fmt: skip
  for observation in body["observations"]:
    observation["screenshot_uri"] = f"sha256:{sha}"
  body["steps"][0] |= {
    "metrics_json": {
      "loss": 1.7e308,
      "time": -1.7e308,
      "reward_mean": 1e308,
      "seconds_total": 1e308,
      "x": huge,
    },
    "start_time": "0001-01-01T00:00:00+14:00",
  }
  body["steps"].append({
      "client_id": "S2", "step": 2**62, "end_time": "9999-12-31T23:59:59Z",
      "metrics_json": {"time": 1.7e308, "reward_mean": -1.7e308,
                       "loss": -1.7e308},
  })  # fmt: skip
  reply = lite.http.post("/api/ingest/batch", json=body)
  while reply.status_code == 400:  # What is refused is refused by its name.
    (fault,) = reply.json()["errors"][:1]
    kind, number, field = re.fullmatch(
      r"(\w+)(?:\[(\d+)\])?\.(\w+)", fault["field"]
    ).groups()
    item = body[kind] if number is None else body[kind][int(number)]
    del item[field]
    reply = lite.http.post("/api/ingest/batch", json=body)
  assert reply.status_code == 200, reply.text
  (run,) = [t for t in lite.rows("training") if t["run_name"] == "odd"]
  rollouts = [r["id"] for r in lite.rows("rollout") if "odd" in r["rollout_id"]]
  home = f"/runs/{run['id']}"
  tasks = lite.rows("task")
  for path in (
      "/", "/?q=odd", home, f"{home}?x=time", f"{home}/steps",
      f"{home}/steps/1", f"{home}/steps/{2**62}", f"{home}/steps/1?sort=reward",
      f"{home}/evals", f"{home}/tasks", f"{home}/tasks/{tasks[0]['id']}",
      f"{home}/health", f"{home}/config",
      f"/api/v1/trainings/{run['id']}/curves?names=loss,x,reward_mean,time",
      *(f"/rollouts/{r}{more}" for r in rollouts for more in (
          "", "?turn=2", *(f"/export/{f}" for f in (
              "json", "atif", "html", "webp")))),
  ):  # fmt: skip
    began = time.monotonic()
    reply = lite.http.get(path)
    assert reply.status_code == 200, (path, reply.text[-500:])
    assert time.monotonic() - began < 20, path


def test_a_name_cannot_write_a_files_header(lite):
  name = 'a"; filename="x.exe"\r\nset-cookie: a=b\r\n\r\n<script>é\u202e/../..'
  lite.post(
    monitor_server.joined(monitor_server.base(), monitor_server.episode(name))
  )
  (id_,) = [r["id"] for r in lite.rows("rollout") if r["rollout_id"] == name]
  reply = lite.http.get(f"/rollouts/{id_}/export/json")
  assert "set-cookie" not in reply.headers
  assert re.fullmatch(
    r'attachment; filename="[A-Za-z0-9_-][A-Za-z0-9._-]*\.json"',
    reply.headers["content-disposition"],
  )


def test_a_rollout_is_shown_when_its_pictures_are_gone(lite):
  sha, png = monitor_server.screenshot(77)
  lite.http.put(f"/api/v1/screenshots/{sha}", content=png)
  body = monitor_server.joined(
    monitor_server.base(), monitor_server.episode("gone")
  )
  for observation in body["observations"]:
    observation["screenshot_uri"] = f"sha256:{sha}"
  lite.post(body)
  (id_,) = [r["id"] for r in lite.rows("rollout") if r["rollout_id"] == "gone"]
  lite.app._screenshots.path(sha, "image/png").unlink()
  for path, status in (
    ("", 200),
    ("/export/html", 200),
    ("/export/atif", 200),
    ("/export/webp", 404),
  ):
    assert lite.http.get(f"/rollouts/{id_}{path}").status_code == status, path


def test_pictures_that_are_bombs_are_refused_and_long_films_made_small(lite):
  file = io.BytesIO()
  Image.new("1", (9_000, 9_000)).save(file, "PNG")  # 10 kB, 240 MB as RGB.
  reply = lite.http.put(
    f"/api/v1/screenshots/{'0' * 64}", content=file.getvalue()
  )
  assert reply.status_code == 400 and "pixels" in reply.json()["detail"]
  from training_monitor.dashboard import exports  # pylint: disable=g-import-not-at-top

  for shape, count in (
    ((1280, 720), 300),
    ((1, 60_000), 1),
    ((60_000, 1), 300),
    ((16, 12), 300),
    ((8192, 8192), 2),
  ):
    image = exports.StoredImage("", "image/png", *shape, None)
    width, height = exports._frame_size(image, count)
    assert 1 <= width * height * count <= 1.05 * exports._ANIMATION_PIXELS
    assert max(width, height) <= 1280


# --- connections --------------------------------------------------------------


@contextlib.contextmanager
def served(folder, **limits):
  """The server as the command makes it, with these limits."""
  engine = database.connect(folder / "m.db")
  database.upgrade(engine)
  app = app_lib.MonitorApp(
    engine, folder / "files", access.Access(engine, open_to_all=True)
  )
  listening = http_server.listen("127.0.0.1", 0, backlog=128)
  server = serve._Server(app, connections.ConnectionLimits(**limits))
  thread = threading.Thread(
    target=server.run, kwargs={"sockets": [listening]}, daemon=True
  )
  thread.start()
  try:
    yield listening.getsockname(), app
  finally:
    server.should_exit = True
    thread.join(20)
    app.writer.close()
    engine.dispose()
    assert not thread.is_alive()


def ended(line, seconds=20.0):
  """Whether the server hangs up."""
  line.settimeout(seconds)
  try:
    while line.recv(1 << 16):
      pass
  except ConnectionError:
    return True
  except TimeoutError:
    return False
  return True


def answer(line):
  """The whole of an answer in JSON, which comes in parts."""
  data = b""
  while not data.endswith(b"}"):
    data += line.recv(1 << 16)
  return data


def test_a_client_that_never_ends_its_head_is_cut_off(tmp_path):
  with served(tmp_path, head_timeout=0.5) as (address, _):
    begun = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for head in (b"", b"G", begun):
      with socket.create_connection(address, timeout=20) as line:
        line.sendall(head)
        assert ended(line), head
    # A second request on a connection that was good is no other matter; and
    # one that is idle in between is not in a hurry.
    with socket.create_connection(address, timeout=20) as line:
      for _ in range(2):
        line.sendall(begun + b"\r\n")
        assert b" 200 " in answer(line)
        time.sleep(1.0)
      line.sendall(begun)
      assert ended(line)
    with socket.create_connection(address, timeout=20) as line:
      line.sendall(begun + b"x: " + b"y" * 200_000)
      assert ended(line)


def test_a_listener_that_never_reads_is_cut_off(tmp_path):
  with served(tmp_path, stall_timeout=3.0) as (address, app):
    reply = httpx.post(
      f"http://{address[0]}:{address[1]}/api/ingest/batch",
      timeout=30,
      json=monitor_server.base(),
    )
    assert reply.status_code == 200, reply.text
    engine = database.connect(tmp_path / "m.db")
    with engine.begin() as connection:  # More than any socket holds.
      connection.exec_driver_sql(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE"
        " i < 120000) INSERT INTO monitor_change (training_id, kind,"
        " entity_id, changed_at) SELECT 1, 'rollout', i, '2026-01-01' FROM n"
      )
    engine.dispose()
    with socket.socket() as line:
      line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      line.connect(address)
      line.sendall(
        b"GET /api/v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\n\r\n"
      )
      assert b"200 OK" in line.recv(15)
      deadline = time.monotonic() + 60
      while not app._live._listeners and time.monotonic() < deadline:
        time.sleep(0.005)
      while app._live._listeners and time.monotonic() < deadline:
        time.sleep(0.05)
      assert app._live._listeners == 0
      assert ended(line)


def test_more_connections_than_there_may_be_are_hung_up_on(tmp_path):
  with served(tmp_path, max_connections=10) as (address, _):
    with contextlib.ExitStack() as stack:
      lines = []
      for _ in range(20):
        line = socket.create_connection(address, timeout=20)
        lines.append(stack.enter_context(line))
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(0.01)
      # Those that have waited longest.
      assert sum(ended(line) for line in lines[:10]) == 10
      lines[-1].sendall(b"\r\n")
      assert b" 200 " in answer(lines[-1])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
      with contextlib.suppress(httpx.TransportError):
        response = httpx.get(f"http://{address[0]}:{address[1]}/health")
        assert response.status_code == 200
        break
    else:
      pytest.fail("it never served again")


@pytest.mark.parametrize("head", [
    "Content-Length: 5\r\nContent-Length: 6", "Content-Length: -1",
    "Transfer-Encoding: chunked\r\nContent-Length: 5\r\nX: y\x00z",
    "Host: localhost\r\nHost: evil.example", "Transfer-Encoding: gzip, chunked",
    " Folded: a", "Bad Name: x",
])  # fmt: skip
def test_a_head_with_two_meanings_has_none(tmp_path_factory, head, lite):
  address = lite.url.removeprefix("http://").split(":")
  with socket.create_connection(address, timeout=20) as line:
    line.sendall(
      f"POST /api/ingest/batch HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n"
      "hello".encode("latin-1")
    )
    status = int(line.makefile("rb").readline().split()[1])
  assert status in (400, 403, 501), status


def test_openapi_names_every_route_of_the_api(guarded):
  document = guarded.http.get("/api/v1/openapi.json").json()
  documented = {
    (m.upper(), p) for p, ms in document["paths"].items() for m in ms
  }
  served_ = {
    (m, re.sub(r":\w+\}", "}", p))
    for m, p, _ in doors(guarded)
    if p.startswith(("/api/", "/health"))
  }
  assert served_ <= documented, json.dumps(sorted(served_ - documented))
