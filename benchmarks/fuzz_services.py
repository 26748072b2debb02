"""Fuzzes every route of the six HTTP services, as real processes.

    python benchmarks/fuzz_services.py [--minutes 120] [--seed N]
        [--services gym,policy,monitor,runs,buffer,proxy] [--folder DIR]
    python benchmarks/fuzz_services.py --vanish 30

Half of the time without tokens, half with. The routes are those of
docs/http_api.md, which is built from the applications, and the dashboard's.
Each gets, in rotation, what schemathesis makes of the service's OpenAPI
document, valid and not, and requests written here: hostile JSON, ids, queries
and headers, mutations of valid bodies.

Prints requests and answers per route, and for each service its largest memory.
Exits with 1 for any of: an answer of 5xx that is not 502, 503 or 504 (the
buffer's documented 500 `invalid_item` aside), a connection closed without an
answer, a process that ended, a traceback in a log, memory beyond `BOUNDS`, an
answer of 2xx without the token where one is asked for.

`--vanish` runs `vanishing_clients` instead: connections that end at every
stage.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import itertools
import json
import logging
import pathlib
import random
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from typing import Any, Iterator
import urllib.parse
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
import attack_servers  # noqa: E402
import hostile_requests  # noqa: E402

TOKEN = "secret-of-the-owner"
BOUNDS = {
  "gym": 1024,
  "policy": 4096,
  "monitor": 1024,
  "runs": 1024,
  "buffer": 1024,
  "proxy": 1024,
}
"""MiB of a service with its children."""
PUBLIC = re.compile(
  r"/|/health|/openenv/[^/]*/health|/images/.*|/static/.*|/login|/logout"
  r"|/favicon.ico|/api/v1/openapi.json|/openapi.json"
)
DOCUMENTS = {
  "gym": "/openapi.json",
  "monitor": "/api/v1/openapi.json",
  "policy": "/openapi.json",
}
TITLES = {
  "Gym server": "gym",
  "Policy server": "policy",
  "Run service": "runs",
  "Rollout buffer": "buffer",
  "Training Monitor": "monitor",
}
PAGES = (
    "/", "/login", "/logout", "/favicon.ico", "/1", "/{id}", "/static/1/{name}",
    "/runs/{id}", "/rollouts/{name}", "/compare", "/health",
)  # fmt: skip


def documented_routes() -> dict[str, list[tuple[str, str]]]:
  """Returns each service's (method, path)s from docs/http_api.md."""
  routes: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
  name = ""
  for line in (ROOT / "docs" / "http_api.md").read_text().splitlines():
    if line.startswith("## "):
      name = TITLES.get(line[3:].strip(), "")
    elif name and (call := re.match(r"\| `([A-Z]+) (/[^`]*)`", line)):
      routes[name].append((call[1], call[2]))
  routes["buffer"] += [
    (method, f"/b/{{buffer}}{path}")
    for method, path in routes["buffer"]
    if path.startswith(("/buffer/", "/start", "/stop", "/get"))
  ]
  routes["policy"] += [
    (method, f"/{{session}}{path}")
    for method, path in routes["policy"]
    if path.startswith("/v1/")
  ]
  routes["monitor"] += [(m, p) for p in PAGES for m in ("GET", "POST")]
  routes["proxy"] = [
    *routes["policy"],
    *(("POST", p) for p in hostile_requests.ENGINE_ROUTES),
  ]
  return routes


class Report:
  """Counts of answers, and findings; safe to use from several threads."""

  def __init__(self, folder: pathlib.Path):
    self._lock = threading.Lock()
    self._file = (folder / "findings.jsonl").open("a")
    self.answers: dict[str, collections.Counter[str]] = collections.defaultdict(
      collections.Counter
    )
    self.findings: collections.Counter[str] = collections.Counter()

  def answer(self, service: str, label: str, status: str) -> None:
    with self._lock:
      self.answers[f"{service} {label}"][status] += 1

  def finding(self, kind: str, **details: Any) -> None:
    with self._lock:
      self.findings[kind] += 1
      if self.findings[kind] <= 20:
        print(f"FINDING {kind}: {json.dumps(details)[:600]}", flush=True)
      self._file.write(json.dumps({"kind": kind, **details}) + "\n")
      self._file.flush()

  def show(self) -> None:
    print(f"\n{'route':70} requests  answers")
    for label, counts in sorted(self.answers.items()):
      answers = ", ".join(f"{v} {k}" for k, v in sorted(counts.items()))
      print(f"{label:70} {sum(counts.values()):8d}  {answers}")
    total = sum(sum(c.values()) for c in self.answers.values())
    print(f"{total} requests, {len(self.answers)} routes")
    for kind, count in sorted(self.findings.items()):
      print(f"FINDINGS {kind}: {count}")


class Service:
  """A running service, and what is known of its ids.

  Attributes:
    ids: Path parameter -> a value that exists.
  """

  def __init__(self, name: str, port: int, process: Any, token: str):
    self.name, self.port, self.process = name, port, process
    self.token = token
    self.ids: dict[str, str] = {}

  def send(self, request: bytes, wait_s: float = 60.0) -> tuple[str, bytes]:
    """Returns (status, up to 1 MiB of the answer); "closed" without one."""
    try:
      with socket.create_connection(("127.0.0.1", self.port), 20) as line:
        line.settimeout(wait_s)
        with contextlib.suppress(OSError):  # It may answer before the end.
          line.sendall(request)
        answer = http.client.HTTPResponse(line)
        answer.begin()
        if "event-stream" in (answer.getheader("content-type") or ""):
          line.settimeout(0.3)
          with contextlib.suppress(TimeoutError):
            answer.read1(1 << 16)
          return str(answer.status), b""
        return str(answer.status), answer.read(1 << 20)
    except TimeoutError:
      return "late", b""
    except (OSError, http.client.HTTPException) as error:
      return f"closed ({type(error).__name__})", b""

  def call(self, method: str, path: str, body: Any = None) -> Any:
    """Returns the JSON of a valid request's answer, or None."""
    content = b"" if body is None else json.dumps(body).encode()
    head = [
      f"{method} {path} HTTP/1.1",
      "Host: localhost",
      f"Content-Length: {len(content)}",
      "Connection: close",
      "Content-Type: application/json",
    ]
    if self.token:
      head.append(f"Authorization: Bearer {self.token}")
    raw = "\r\n".join([*head, "", ""]).encode() + content
    status, answer = self.send(raw)
    return json.loads(answer) if status == "200" and answer else None

  def refresh(self, fleet: dict[str, "Service"]) -> None:
    """Makes things whose ids the next requests may name."""
    name = self.name
    if name == "gym":
      for row in (self.call("GET", "/api/v1/desktop/executions") or {}).get(
        "executions", ()
      )[8:]:
        self.call(
          "POST", f"/api/v1/desktop/executions/{row['execution_id']}/terminate"
        )
      created = self.call("POST", "/api/v1/desktop/tasks/001") or {}
      self.ids |= {
        "gym_id": "desktop",
        "env_name": "desktop",
        "identifier": "001",
        "execution_id": created.get("execution_id", "x"),
      }
    elif name in ("policy", "proxy"):
      if "session" in self.ids:
        old = self.ids["session"]
        self.call("POST", f"/sessions/{old}/rl/end_session", {})
      created = self.call("POST", "/rl/start_session", {"task_id": "t"}) or {}
      self.ids |= {
        "session": created.get("session_id", "x"),
        "model": "tiny_vl",
        "response": "resp_1",
      }
    elif name == "runs":
      body = hostile_requests.run_body(
        fleet["policy"].port if "policy" in fleet else 9, self.token
      )
      created = self.call("POST", "/runs", body) or {}
      run = created.get("runId", "x")
      self.ids |= {"run": run, "index": "0", "name": "x.png"}
    elif name == "buffer":
      rng = random.Random()
      self.call("POST", "/b/b/buffer/write", hostile_requests.item(rng))
      read = {"batch_size": 1, "lease_s": 5, "timeout": 0.1}
      created = self.call("POST", "/buffer/read", read) or {}
      lease = (created.get("data") or {}).get("lease") or "x"
      self.ids |= {"buffer": "b", "lease": lease}
    elif name == "monitor":
      batch = hostile_requests.monitor_batch()
      self.call("POST", "/api/v1/ingest/batch", batch)
      sha, _ = hostile_requests.screenshot()
      self.ids |= {
        "id": "1",
        "turn": "1",
        "obs": "1",
        "name": "r1",
        "sha256": sha,
      }


class Fuzzer(threading.Thread):
  """Sends requests to one service until a time."""

  def __init__(
    self,
    service: Service,
    fleet: dict[str, Service],
    routes: list[tuple[str, str]],
    report: Report,
    until: float,
    seed: int,
  ):
    super().__init__(name=f"fuzz {service.name}", daemon=True)
    self._service, self._fleet, self._routes = service, fleet, routes
    self._report, self._until = report, until
    self._rng = random.Random(f"{seed} {service.name} {bool(service.token)}")
    self.error: BaseException | None = None

  def run(self) -> None:
    try:
      operations = itertools.cycle(self._operations())
      while time.monotonic() < self._until:
        self._service.refresh(self._fleet)
        for method, path in self._routes:
          self._hostile(method, path)
        for operation, mode in itertools.islice(operations, 8):
          self._generated(operation, mode)
    except BaseException as error:  # pylint: disable=broad-except
      self.error = error
      raise

  def _judge(
    self,
    label: str,
    status: str,
    answer: bytes,
    path: str,
    trusted: bool,
    request: bytes = b"",
  ) -> None:
    name = self._service.name
    self._report.answer(name, label, status)
    details = dict(
      service=name,
      route=label,
      path=path[:300],
      status=status,
      answer=answer[:300].decode("latin-1"),
      request=request[:2000].decode("latin-1"),
    )
    if not status.isdigit():
      # A body that is refused unread may cost its sender the answer.
      if status.startswith("closed") and len(request) > 65536:
        return
      self._report.finding(status, **details)
    elif status[0] == "5" and status not in ("502", "503", "504"):
      if not (name == "buffer" and b'"invalid_item"' in answer):
        self._report.finding(f"answer of {status}", **details)
    elif status[0] == "2" and self._service.token and not trusted:
      if not PUBLIC.fullmatch(path.partition("?")[0]):
        self._report.finding("answered without a token", **details)

  # --- requests written here --------------------------------------------------

  def _hostile(self, method: str, template: str) -> None:
    rng, service = self._rng, self._service
    for _ in range(rng.randrange(1, 5)):
      if time.monotonic() > self._until:
        return
      trusted = not service.token or rng.random() < 0.9
      path = hostile_requests.path(rng, template, service.ids)
      if method == "WS":
        raw = hostile_requests.web_socket(
          rng, path, service.token if trusted else ""
        )
      else:
        raw = hostile_requests.request(
          rng,
          service.name,
          method,
          template,
          path,
          service.token if trusted else "",
          service.ids,
          {n: s.port for n, s in self._fleet.items()},
        )
      status, answer = service.send(raw)
      self._judge(f"{method} {template}", status, answer, path, trusted, raw)

  # --- schemathesis -----------------------------------------------------------

  def _operations(self) -> list[tuple[Any, Any]]:
    import schemathesis  # pylint: disable=g-import-not-at-top

    name = self._service.name
    if name == "proxy":
      document = self._fleet["policy"].call("GET", DOCUMENTS["policy"])
    elif name in DOCUMENTS:
      document = self._service.call("GET", DOCUMENTS[name])
    else:
      document = hostile_requests.document(name)
    schema = schemathesis.openapi.from_dict(document)
    return [
      (result.ok(), mode)
      for result in schema.get_all_operations()
      if not result.ok().path.endswith("/events")
      for mode in schemathesis.GenerationMode
    ]

  def _generated(self, operation: Any, mode: Any) -> None:
    import hypothesis  # pylint: disable=g-import-not-at-top
    import requests  # pylint: disable=g-import-not-at-top
    import schemathesis  # pylint: disable=g-import-not-at-top

    service, rng = self._service, self._rng
    headers = {"Host": "localhost"}
    if service.token:
      headers["Authorization"] = f"Bearer {service.token}"
    label = f"{operation.method.upper()} {operation.path}"

    @hypothesis.seed(rng.randrange(1 << 60))
    @hypothesis.settings(
      max_examples=8,
      deadline=None,
      database=None,
      phases=[hypothesis.Phase.generate],
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case):
      if time.monotonic() > self._until:
        return
      for name in case.path_parameters or ():
        if rng.random() < 0.7 and name in service.ids:
          case.path_parameters[name] = service.ids[name]
      try:
        reply = case.call(
          base_url=f"http://127.0.0.1:{service.port}",
          headers=headers,
          timeout=60,
        )
      except (requests.ConnectionError, requests.Timeout) as error:
        name = type(error).__name__
        self._judge(label, f"closed ({name})", b"", operation.path, True,
                    repr(case).encode())  # fmt: skip
        return
      except (requests.RequestException, UnicodeError, ValueError):
        return  # The library cannot send it.
      self._judge(
        label,
        str(reply.status_code),
        reply.content[:400],
        urllib.parse.urlsplit(reply.request.url).path,
        True,
        str(reply.request.body)[:1500].encode("utf-8", "replace"),
      )

    try:
      send()
    except (
      hypothesis.errors.Unsatisfiable,
      schemathesis.errors.SchemathesisError,
    ):
      pass  # No such data for this operation.
    except (SystemError, hypothesis.errors.FlakyFailure) as error:
      # CPython 3.11's ast.parse, which Hypothesis calls, is not thread-safe.
      if "AST constructor" not in str(getattr(error, "exceptions", error)):
        raise


def tree(pid: int) -> list[int]:
  """Returns a process and all below it."""
  pids = [pid]
  for one in pids:
    with contextlib.suppress(OSError):
      for task in pathlib.Path(f"/proc/{one}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
  return pids


def memory_mib(pid: int) -> int:
  """Returns the resident memory of a process and all below it."""
  total = 0
  for one in tree(pid):
    with contextlib.suppress(OSError, TypeError):
      text = pathlib.Path(f"/proc/{one}/status").read_text()
      total += int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]
  return total >> 10


@contextlib.contextmanager
def started(
  names: list[str],
  folder: pathlib.Path,
  token: str,
  options: dict[str, list[str]],
) -> Iterator[dict[str, Service]]:
  """Yields the services by name; the proxy's upstream is the policy server."""
  folder.mkdir(parents=True, exist_ok=True)
  fleet: dict[str, Service] = {}
  with contextlib.ExitStack() as stack:
    for name in names:
      upstream = (
        f"http://127.0.0.1:{fleet['policy'].port}" if name == "proxy" else ""
      )
      port, process = stack.enter_context(
        attack_servers.running(
          name,
          folder,
          token,
          upstream,
          options.get(name, ()),
          1024,
          # A request for too much fails, and does not end the machine.
          resource.RLIM_INFINITY if name == "policy" else 6 << 30,
        )
      )
      fleet[name] = Service(name, port, process, token)
    yield fleet


def check_logs(folder: pathlib.Path, report: Report) -> None:
  for log in folder.glob("*.log"):
    text = log.read_text(errors="replace")
    # What a generator's own process wrote is its user's to read.
    text = re.sub(r"(?m)^.* generator \w+: .*\n", "", text)
    for place in re.finditer("Traceback ", text):
      report.finding(
        "traceback", log=log.name, text=text[place.start() :][:3000]
      )


def fuzz(
  names: list[str],
  token: str,
  minutes: float,
  seed: int,
  folder: pathlib.Path,
  report: Report,
) -> None:
  routes = documented_routes()
  peaks: collections.Counter[str] = collections.Counter()
  with started(names, folder, token, hostile_requests.OPTIONS) as fleet:
    start = {name: memory_mib(s.process.pid) for name, s in fleet.items()}
    until = time.monotonic() + 60 * minutes
    threads = [
      Fuzzer(service, fleet, routes[name], report, until, seed)
      for name, service in fleet.items()
    ]
    for thread in threads:
      thread.start()
    dead: set[str] = set()
    while any(thread.is_alive() for thread in threads):
      for name, service in fleet.items():
        peaks[name] = max(peaks[name], memory_mib(service.process.pid))
        if service.process.poll() is not None and name not in dead:
          dead.add(name)
          report.finding(
            "process ended", service=name, status=service.process.returncode
          )
      time.sleep(0.5)
      if time.monotonic() > until + 180:
        report.finding("a fuzzer did not end")
        break
    for thread in threads:
      if thread.error is not None:
        report.finding(
          "fuzzer failed", name=thread.name, error=repr(thread.error)
        )
  print(f"\nmemory, MiB, {'with a token' if token else 'without a token'}")
  for name in names:
    print(
      f"{name:8} start {start[name]:6d}  peak {peaks[name]:6d}"
      f"  bound {BOUNDS[name]:6d}"
    )
    if peaks[name] > BOUNDS[name]:
      report.finding("memory", service=name, peak_mib=peaks[name])
  check_logs(folder, report)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--minutes", type=float, default=120.0)
  parser.add_argument("--vanish", type=float, default=0.0, metavar="MINUTES")
  parser.add_argument(
    "--services", default="policy,gym,monitor,runs,buffer,proxy"
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", type=pathlib.Path)
  args = parser.parse_args()
  names = args.services.split(",")
  if "proxy" in names and "policy" not in names[: names.index("proxy")]:
    parser.error("--services: the proxy needs policy before it")
  warnings.simplefilter("ignore")
  logging.disable(logging.WARNING)
  with tempfile.TemporaryDirectory() as temporary:
    folder = args.folder or pathlib.Path(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder)
    if args.vanish:
      import vanishing_clients  # pylint: disable=g-import-not-at-top

      vanishing_clients.run(names, args.vanish, folder, report)
    else:
      for label, token in (("open", ""), ("token", TOKEN)):
        fuzz(names, token, args.minutes / 2, args.seed, folder / label, report)
  report.show()
  return 1 if report.findings else 0


if __name__ == "__main__":
  sys.exit(main())
