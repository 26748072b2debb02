"""Paths, queries and headers that no service may fail on.

Every route of the six services, with and without a token, gets each number
that is none, or is too large, in each place of its path and query.
"""

import re
import socket
from urllib import parse

import httpx
import pytest
import six_services
from tunix.rl.multi_turn.net import bounds

VALUES = (
    "-1", str(2**31), str(2**63), str(2**64), str(10**400), "1e400", "\u0661",
    "", "9" * 5000, "1_0", " 1",
)  # fmt: skip
TOO_LARGE = (str(2**63), str(2**64), str(10**400), "1e400", "\u0661", "-1")
TOKEN = "a-token-of-the-tests"
WAITS = ("/buffer/read", "/start_rollout")
"""Routes that wait for items or start a process; bodies have their numbers."""
QUERIES = {
  "run": ("from", "to", "expires", "signature"),
  "gym": ("shape", "split", "family", "full", "bare", "format"),
  "buffer": ("batch_size", "buffer"),
  "policy": ("limit",),
  "proxy": ("limit",),
}
"""The monitor's are those of its document."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["", TOKEN], ids=["open", "token"])
def services(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp("six")
  with six_services.serving(folder, request.param) as running:
    yield running, request.param


def _queries(name, app, path):
  """Names of a route's parameters after "?"."""
  if name != "monitor":
    return QUERIES[name]
  plain = re.sub(r":\w+}", "}", path)
  methods = app.document["paths"].get(plain, {})
  running = [
    one["name"]
    for operation in methods.values()
    for one in operation.get("parameters", ())
    if one["in"] == "query"
  ]
  # Pages of the dashboard are not in the document.
  return running or ("after", "run", "from", "to", "turn", "page", "step")


def _filled(path, value):
  return re.sub(r"{[^}]*}", parse.quote(value, safe=""), path)


def _status(client, url, path, method):
  with client.stream(method, url + path) as answer:
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
      return answer.status_code, ""  # It does not end.
    answer.read()
    return answer.status_code, answer.text


@pytest.mark.slow
@pytest.mark.parametrize("name", six_services.NAMES)
def test_no_number_of_an_address_is_a_failure_of_the_service(services, name):
  running, token = services
  url, app = running[name]
  headers = {"authorization": f"Bearer {token}"} if token else {}
  # The handlers behind the check of the token are those of open services.
  values = VALUES[:2] if token else VALUES
  requests = 0
  with httpx.Client(headers=headers, timeout=30) as client:
    for route in app.asgi.routes:
      path, methods = route.path, getattr(route, "methods", None) or ()
      if path.endswith(WAITS):
        continue
      for method in set(methods) - {"HEAD"}:
        cases = {_filled(path, value) for value in values if "{" in path}
        plain = _filled(path, "1")
        for query in _queries(name, app, path):
          cases |= {f"{plain}?{parse.urlencode({query: v})}" for v in values}
        for case in sorted(cases):
          status, text = _status(client, url, case, method)
          assert status < 500 or _as_protocol(text), (method, case[:200], text)
          requests += 1
  assert requests >= len(values)


def _as_protocol(text):
  """Whether a 500 is the buffer's answer to an item that it cannot read."""
  return '"code":"invalid_item"' in text


@pytest.mark.parametrize("value", TOO_LARGE)
@pytest.mark.parametrize(
  "name, path, field, high",
  [
    ("run", "/runs/{run}/steps/{value}", "index", bounds.LARGEST),
    ("run", "/runs/{run}/events?from={value}", "from", 253402300799000),
    ("run", "/runs/{run}/events?to={value}", "to", 253402300799000),
    ("buffer", "/buffer/peek?batch_size={value}", "batch_size", 2**31),
    ("monitor", "/api/v1/rollouts?step_id={value}", "step_id", bounds.LARGEST),
    ("monitor", "/api/v1/events?after={value}", "after", bounds.LARGEST),
  ],
)
def test_a_number_beyond_its_bound_is_refused_by_its_name(
  services, name, path, field, high, value
):
  running, token = services
  url, app = running[name]
  headers = {"authorization": f"Bearer {token}"} if token else {}
  run = ""
  with httpx.Client(headers=headers, timeout=30) as client:
    if name == "run":
      body = {
        "model": {"baseUrl": "http://127.0.0.1:1/v1", "name": "m"},
        "env": {
          "type": "genv",
          "gymBaseUrl": "http://127.0.0.1:1",
          "gymId": "g",
          "executionId": "x",
        },
        "task": "t",
      }
      run = client.post(f"{url}/runs", json=body).json()["runId"]
    elif name == "buffer":
      client.post(f"{url}/buffer/known", json={"uids": []})
    quoted = parse.quote(value, safe="")
    answer = client.get(url + path.format(run=run, value=quoted))
  assert 400 <= answer.status_code < 500
  assert field in answer.text and str(high) in answer.text, answer.text


def test_an_id_of_a_path_beyond_64_bits_is_refused_with_its_bound(services):
  running, token = services
  url, _ = running["monitor"]
  headers = {"authorization": f"Bearer {token}"} if token else {}
  answer = httpx.get(f"{url}/api/v1/trainings/{2**64}", headers=headers)
  assert answer.status_code == 404
  assert f"id={2**64}" in answer.text and str(bounds.LARGEST) in answer.text


@pytest.mark.parametrize("name", six_services.NAMES)
@pytest.mark.parametrize("path", ["/health", "/metrics", "/nowhere"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://["])
def test_a_foreign_page_is_answered_nowhere(services, name, path, origin):
  running, token = services
  if (name, path) in NOT_SERVED:
    path = NOT_SERVED[name, path]
  headers = {"authorization": f"Bearer {token}"} if token else {}
  with httpx.Client(headers=headers, timeout=30) as client:
    url = running[name][0] + path
    answer = client.get(url, headers={"origin": origin})
    assert answer.status_code == 403, answer.text
    rebound = client.get(url, headers={"host": "evil.example"})
    # With a token, a name of its own may lead to the service.
    assert (rebound.status_code == 403) == (not token), rebound.text
    assert client.get(running[name][0] + "/health").status_code == 200


NOT_SERVED = {
  ("run", "/metrics"): "/runs/x",
  ("run", "/nowhere"): "/runs/x/steps",
  ("gym", "/nowhere"): "/api/v1/gyms",
  ("buffer", "/nowhere"): "/buffers",
  ("policy", "/nowhere"): "/v1/models",
  ("proxy", "/nowhere"): "/v1/models",
  ("monitor", "/metrics"): "/api/v1/trainings",
  ("monitor", "/nowhere"): "/api/v1/openapi.json",
}
"""Served paths instead of those that a service does not have."""


SOCKET = (
  "Host: localhost",
  "Upgrade: websocket",
  "Connection: Upgrade",
  "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
  "Sec-WebSocket-Version: 13",
)


@pytest.mark.parametrize("name", six_services.NAMES)
@pytest.mark.parametrize(
  "query, lines, body, statuses",
  [
    ("", [], b"", ("101", "401", "403")),
    ("?a=" + "a" * 9000, [], b"", ("400",)),
    ("", ["X: " + "a" * 9000], b"", ("400",)),
    ("", [f"X{n}: a" for n in range(200)], b"", ("400",)),
    ("", ["Sec-WebSocket-Protocol: \x01"], b"", ("400",)),
    ("", ["Content-Length: 5"], b"abcde", ("400",)),
    ("", ["Transfer-Encoding: chunked"], b"1\r\na\r\n0\r\n\r\n", ("400",)),
  ],
  ids=["plain", "line", "header", "headers", "bytes", "body", "chunks"],
)
def test_a_request_for_a_web_socket_is_always_answered(
  services, name, query, lines, body, statuses
):
  path = "/openenv/desktop/ws" if name == "gym" else "/health"
  head = "\r\n".join([f"GET {path}{query} HTTP/1.1", *SOCKET, *lines, "", ""])
  url = parse.urlsplit(services[0][name][0])
  with socket.create_connection((url.hostname, url.port), 10) as line:
    line.sendall(head.encode() + body)
    answer = line.recv(4096).decode()
    assert answer.split()[1] in statuses, answer
    if answer.split()[1] != "101":  # And nothing is kept of it.
      while line.recv(4096):
        pass
