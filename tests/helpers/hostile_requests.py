"""Requests that no honest client sends, for every route of every service."""

import base64
import copy
import gzip
import io
import json
import re
import urllib.parse

from PIL import Image

ENGINE_ROUTES = (
  "/inference/v1/generate",
  "/generate",
  "/tokenize",
  "/pooling",
  "/v1/embeddings",
  "/invocations",
  "/v1/responses/{response}/cancel",
)
OPTIONS = {
    "gym": ["--capacity", "24", "--lease", "20"],
    "runs": ["--max-runs", "8", "--max-kept", "64", "--image-memory", "64"],
    "buffer": ["--max-wait", "2", "--item-mib", "8", "--read-mib", "32"],
    "policy": ["--max-sessions", "64", "--session-timeout", "20",
               "--image-memory", "64"],
    "proxy": ["--timeout", "120"],
}  # fmt: skip
"""Options of the commands, under which a search of minutes meets limits."""

_IDS = (
    "", "%00", "..%2f..%2fetc%2fpasswd", "9" * 400, "9" * 19, "-1", "1e9",
    "%ed%a0%80", "%ff", "a" * 7000, "NaN", "%D9%A3", "0x10", "%20",
    "%0d%0aX:y", "None", "true", "1.5", "%2500", "*", "'", "%22;--", ".", "..",
    "0", "1", "2", "%F0%9F%98%80", "-9223372036854775809", "x:y", "{}", "%",
)  # fmt: skip
_QUERIES = (
    "limit", "after", "from", "to", "batch_size", "shape", "split", "family",
    "full", "bare", "format", "training_id", "step_id", "task_id", "status",
    "tag", "names", "first", "last", "points", "minus", "path", "label",
    "success", "buffer", "sig", "exp", "expires", "signature", "q", "sort",
    "run", "runs", "id", "turn",
)  # fmt: skip
_LEAVES = (
    None, True, False, 0, -1, 1, 1e308, -0.0, 2**31, 2**53, 2**63, 2**64,
    10**30, 10**400, 1.5, "", "\x00", "a" * 70000, "\ud800", "‮x", "é́",
    "../../etc/passwd", "1", "NaN", [], {}, [[]], [None], {"": None},
    {"type": "object"}, ["x"] * 1000, {"a" * 300: 1}, [1] * 5000,
    "data:image/png;base64,", "data:image/png;base64,AAAA",
    "http://127.0.0.1:9/x.png", "file:///etc/passwd",
)  # fmt: skip
_RAW = (
    b"", b" ", b"null", b"[]", b"{}", b"1", b'"x"', b"NaN", b"{", b"[1,]",
    b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a": NaN}', b'{"a": Infinity}',
    b'{"a": 1e999}', b'{"a": "\\ud800"}', b'{"a": "\xed\xa0\x80"}',
    b"[" * 199 + b"]" * 199, b"[" * 1000 + b"]" * 1000, b"[" * 200000,
    b'{"a":' * 200000, b'{"a": 1' + b"0" * 5000 + b"}", b"\x00" * 100,
    b'{"a": 1, "a": 2}', b"[" + b"[]," * 30000 + b"[]]", b"\x1f\x8b\x08",
    b"--x\r\n\r\n--x--", b"a=b&c=d", b"\x80\x04\x95",
)  # fmt: skip
_HEADERS = (
    "Content-Type: text/plain", "Content-Type: multipart/form-data",
    "Content-Type: application/msgpack", "Content-Type: \xff",
    "Content-Type: application/json; charset=utf-16",
    "Content-Encoding: gzip", "Range: bytes=0-", "Range: bytes=9-1,-",
    "If-None-Match: \"x\"", "If-Modified-Since: x", "Last-Event-ID: -1",
    "Last-Event-ID: " + "9" * 300, "Prefer: return=minimal", "Prefer: \xe9",
    "X-Request-ID: a b\t\xff", "Accept: \xff", "Accept-Encoding: gzip;q=x",
    "Cookie: a=\xff; token=x", "Cookie: " + "a=b; " * 500,
    "Idempotency-Key: " + "k" * 3000, "Idempotency-Key: \xff",
    "X-Forwarded-For: \xff", "X-Forwarded-Proto: gopher", "Expect: x",
    "Accept-Language: \xe9", "Authorization: Basic \xff",
    "Authorization: Bearer \xff", "X-Api-Key: \xff", "Upgrade: h2c",
    "Connection: x, y", "Origin: null", "Host: localhost:x",
    "Host: [::1", "Host: \xff", "Via: 1.1 x",
)  # fmt: skip


def screenshot():
  """Returns (sha256 of the pixels, PNG)."""
  import monitor_server  # pylint: disable=g-import-not-at-top

  return monitor_server.screenshot()


def monitor_batch():
  import monitor_server  # pylint: disable=g-import-not-at-top

  return monitor_server.joined(
    monitor_server.base(), monitor_server.episode("r1", status="completed")
  )


def run_body(policy_port, key=""):
  """A run of two steps, of the drawn desktop with the policy server."""
  from tunix.rl.multi_turn.environments.gyms import gym_registry  # pylint: disable=g-import-not-at-top

  desktop = gym_registry.get("desktop").make_tasks((), {})
  task = desktop.train_task("click-button", 0, 0).to_json()
  return {
      "task": "Press the button.", "agent": "compact", "maxSteps": 2,
      "maxRunTimeSec": 20.0, "maxStepTimeSec": 10.0,
      "model": {
          "baseUrl": f"http://127.0.0.1:{policy_port}/v1", "name": "tiny_vl",
          "apiKey": key, "sampling": {"temperature": 1.0, "max_tokens": 4},
      },
      "env": {"type": "gym", "gym": "desktop", "width": 128, "height": 96,
              "task": task},
      "images": "url",
  }  # fmt: skip


def item(rng):
  return {
    "uid": f"u{rng.randrange(1 << 40)}",
    "instance_id": f"i{rng.randrange(40)}",
    "messages": [
      {"role": "user", "content": "2 + 2?"},
      {"role": "assistant", "content": "4"},
    ],
    "reward": rng.choice((0.0, 0.5, 1.0)),
    "extra_info": {"timestamp": "1", "finish_reason": "stop"},
    "tokens": [1, 2, 3],
    "loss_mask": [0, 1, 1],
    "logprobs": [None, -0.5, -0.25],
  }


def _picture():
  file = io.BytesIO()
  Image.new("RGB", (128, 96), "red").save(file, "PNG")
  return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


PICTURE = _picture()
_CHAT = {
    "model": "tiny_vl", "max_tokens": 2, "temperature": 1.0, "stream": False,
    "seed": 1, "logprobs": True, "top_logprobs": 0, "n": 1, "stop": ["x"],
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [
            {"type": "text", "text": "hi"},
            {"type": "image_url", "image_url": {"url": PICTURE}}]},
    ],
}  # fmt: skip


def valid_body(rng, service, template, ids, ports):
  """A body that the route accepts, near enough to be worth mutating."""
  end = template.rpartition("/")[2]
  if service in ("policy", "proxy"):
    if template.endswith("chat/completions"):
      return {**_CHAT, "stream": rng.random() < 0.3}
    if end == "completions":
      return {
        "model": "tiny_vl",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "stream": rng.random() < 0.3,
        "echo": False,
      }
    if end == "responses":
      return {
        "model": "tiny_vl",
        "max_output_tokens": 2,
        "input": [
          {
            "role": "user",
            "content": [
              {"type": "input_text", "text": "hi"},
              {"type": "input_image", "image_url": PICTURE},
            ],
          }
        ],
      }
    if end == "messages":
      return {
        "model": "tiny_vl",
        "max_tokens": 2,
        "messages": [
          {
            "role": "user",
            "content": [
              {"type": "text", "text": "hi"},
              {
                "type": "image",
                "source": {
                  "type": "base64",
                  "media_type": "image/png",
                  "data": PICTURE.partition(",")[2],
                },
              },
            ],
          }
        ],
      }
    if end == "generate":
      return {
        "token_ids": [1, 2],
        "text": "a",
        "image_data": [[PICTURE]],
        "content_parts": [{"type": "image_url", "url": PICTURE}],
        "sampling_params": {"max_tokens": 1},
      }
    return {
      "start_session": {"task_id": "t", "sampling": {"temperature": 1.0}},
      "set_reward": {"reward": 0.5},
      "export_trajectories": {
        "session_id": ids.get("session", "x"),
        "style": "individual",
        "discount": 0.9,
        "drop": False,
      },
    }.get(end, {})
  if service == "gym":
    if end == "step":
      return {
        "action": {"kind": "click", "x": 64, "y": 40, "count": 2},
        "screenshot": True,
      }
    if end == "evaluate":
      return {"execution_data": {}, "answer_text": "", "facts": {}}
    if end == "reset":
      return {"split": "train", "index": 0, "seed": 1, "episode_id": "e"}
    if end in ("tasks", "num_tasks", "task", "task_range"):
      return {"split": "train", "index": 0, "start": 0, "stop": 3}
    return {
      "options": {
        "observe": True,
        "screenshot": True,
        "lease_s": 20,
        "gym": {},
      },
      "idempotency_key": "k",
    }
  if service == "runs":
    return run_body(ports.get("policy", 9))
  if service == "buffer":
    if end == "write":
      items = [item(rng) for _ in range(rng.randrange(1, 4))]
      return rng.choice((items[0], items))
    if end == "start_rollout":
      return {
        "task_type": "math",
        "num_repeat_per_sample": 4,
        "num_process": 1,
        "num_epoch": 1,
        "input_file": "none.jsonl",
        "remote_engine_url": "http://127.0.0.1:9",
        "sampling_params": {"max_tokens": 4},
        "keep_items": True,
      }
    return {
      "batch_size": rng.randrange(1, 5),
      "lease_s": 0.5,
      "timeout": 0.2,
      "wait": True,
      "lease": ids.get("lease", "x"),
      "uids": ["u1"],
    }
  if end == "batch":
    return monitor_batch()
  return {
    "tags": {"add": ["a"], "remove": ["b"]},
    "annotations": {"turn": 1, "label": "l", "note": "n"},
    "missing": {"sha256": ["0" * 64]},
  }.get(end, {"token": "t"})


def path(rng, template, ids):
  """The route's path, with ids that exist, or not, and maybe a query."""

  def fill(match):
    name = match[1].partition(":")[0]
    if rng.random() < 0.6 and name in ids:
      return urllib.parse.quote(ids[name])
    return rng.choice(_IDS)

  out = re.sub(r"\{([^}]*)\}", fill, template)
  if rng.random() < 0.4:
    pairs = [
      f"{rng.choice(_QUERIES)}={rng.choice(_IDS)}"
      for _ in range(rng.randrange(1, 4))
    ]
    out += "?" + "&".join(pairs)
  return out


def mutated(rng, value):
  """The JSON value with one to three of its places changed."""
  value = json.loads(json.dumps(value))
  for _ in range(rng.randrange(1, 4)):
    places = list(_nodes(value))
    if not places:
      return copy.deepcopy(rng.choice(_LEAVES))
    holder, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.15 and isinstance(holder, dict):
      del holder[key]
    elif kind < 0.25 and isinstance(holder, dict):
      name = rng.choice(("", "x", "__proto__", "a" * 99))
      holder[name] = copy.deepcopy(holder[key])
    elif kind < 0.3:
      for _ in range(rng.choice((3, 190, 260))):
        holder[key] = [holder[key]]
    else:
      holder[key] = copy.deepcopy(rng.choice(_LEAVES))
  return value


def _nodes(value):
  pairs = (
    value.items()
    if isinstance(value, dict)
    else enumerate(value)
    if isinstance(value, list)
    else ()
  )
  for key, inner in list(pairs):
    yield value, key
    yield from _nodes(inner)


def _written(rng, value):
  """JSON text in one of the forms that a reader may meet."""
  text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
  code = rng.choice(("utf-8",) * 8 + ("utf-8-sig", "utf-16", "utf-32-be"))
  return text.encode(code, "surrogatepass")


def request(rng, service, method, template, target, token, ids, ports):
  """The bytes of a request."""
  headers = ["Content-Type: application/json"]
  body = b""
  if method != "GET" or rng.random() < 0.1:
    kind = rng.random()
    if kind < 0.25:
      body = rng.choice(_RAW)
    else:
      value = valid_body(rng, service, template, ids, ports)
      if kind < 0.85:
        value = mutated(rng, value)
      body = _written(rng, value)
    if "screenshots" in template and rng.random() < 0.5:
      sha, body = screenshot()
      headers = [f"Content-Type: {rng.choice(('image/png', 'image/webp'))}"]
      if method == "POST":
        files = {"images": [{"sha256": sha, "bytes": len(body)}]}
        body = json.dumps(files).encode() + b"\n" + body
      if rng.random() < 0.5:
        at = rng.randrange(len(body))
        body = body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
  if rng.random() < 0.3:
    headers += rng.sample(_HEADERS, rng.randrange(1, 4))
    if "Content-Encoding: gzip" in headers and rng.random() < 0.5:
      body = gzip.compress(body)
  if token:
    headers.append(f"Authorization: Bearer {token}")
  if rng.random() < 0.1 and body:
    headers.append("Transfer-Encoding: chunked")
    half = len(body) // 2 or 1
    parts = [part for part in (body[:half], body[half:]) if part]
    body = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts)
    body += b"0\r\n\r\n"
  else:
    headers.append(f"Content-Length: {len(body)}")
  head = [
    f"{method} {target} HTTP/1.1",
    "Host: localhost",
    "Connection: close",
    *headers,
  ]
  return "\r\n".join([*head, "", ""]).encode("latin-1") + body


_FRAMES = (
    b'{"type": "reset", "data": {}}', b'{"type": "state"}', b"{}", b"null",
    b'{"type": "step", "data": {"action_type": "click", "x": 1, "y": 1}}',
    b'{"type": "step", "data": {"kind": "click", "x": 1e9, "y": -1}}',
    b'{"type": "close"}', b"\xff", b"[" * 3000, b'{"type": NaN}',
    b'{"type": "reset", "data": {"seed": 1' + b"0" * 400 + b"}}",
    b'{"type": "\\ud800"}', b"a" * 100000,
)  # fmt: skip


def frame(rng, data, code=None, masked=True):
  """A WebSocket frame of a client."""
  code = rng.choice((1, 1, 1, 1, 2, 9, 10, 8, 3)) if code is None else code
  size = len(data)
  head = bytes([0x80 | code])
  flag = 0x80 if masked else 0
  if size < 126:
    head += bytes([flag | size])
  elif size < 65536:
    head += bytes([flag | 126]) + size.to_bytes(2, "big")
  else:
    head += bytes([flag | 127]) + size.to_bytes(8, "big")
  return head + (b"\0\0\0\0" if masked else b"") + data


def web_socket(rng, target, token=""):
  """The bytes of a WebSocket's start, and frames after it."""
  head = [
    f"GET {target} HTTP/1.1",
    "Host: localhost",
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    f"Sec-WebSocket-Version: {rng.choice(('13', '13', '13', '8'))}",
  ]
  if token:
    head.append(f"Authorization: Bearer {token}")
  frames = b"".join(
    frame(rng, rng.choice(_FRAMES), masked=rng.random() < 0.95)
    for _ in range(rng.randrange(4))
  )
  return "\r\n".join([*head, "", ""]).encode() + frames


def document(service):
  """An OpenAPI document of a service that serves none."""
  any_json = {"type": "object", "additionalProperties": True}
  number = {"type": "number"}
  text = {"type": "string"}
  if service == "runs":
    from agent_services.run_service import schemas  # pylint: disable=g-import-not-at-top

    create = schemas.CreateBody.model_json_schema(
      ref_template="#/components/schemas/{model}"
    )
    components = create.pop("$defs", {})
    paths = {
      ("post", "/runs"): create,
      ("get", "/runs/{run}"): None,
      ("get", "/runs/{run}/events"): None,
      ("get", "/runs/{run}/steps/{index}"): None,
      ("get", "/runs/{run}/trajectory"): None,
      ("get", "/runs/{run}/tokens"): None,
      ("post", "/runs/{run}/cancel"): any_json,
      ("get", "/images/{name}"): None,
    }
    queries = ("from", "to")
  else:
    components = {}
    written = {
      "type": "object",
      "required": ["uid", "instance_id", "messages", "reward", "extra_info"],
      "properties": {
        "uid": text,
        "instance_id": text,
        "reward": number,
        "messages": {"type": "array", "items": any_json},
        "extra_info": any_json,
        "tokens": {"type": "array", "items": {"type": "integer"}},
      },
    }
    read = {
      "type": "object",
      "properties": {
        "batch_size": {"type": "integer"},
        "wait": {"type": "boolean"},
        "lease_s": number,
        "timeout": number,
      },
    }
    leased = {"type": "object", "properties": {"lease": text}}
    paths = {
      ("post", "/buffer/write"): written,
      ("post", "/b/{buffer}/buffer/write"): written,
      ("post", "/get_rollout_data"): read,
      ("post", "/buffer/read"): read,
      ("post", "/buffer/ack"): leased,
      ("post", "/buffer/release"): leased,
      ("post", "/buffer/known"): {
        "type": "object",
        "properties": {"uids": {"type": "array", "items": text}},
      },
      ("post", "/start_rollout"): {
        "type": "object",
        "properties": {
          "task_type": {"enum": ["math", "none"]},
          "num_repeat_per_sample": {"type": "integer"},
          "group_timeout_seconds": number,
        },
      },
      ("post", "/stop_rollout"): any_json,
      ("get", "/buffer/peek"): None,
      ("get", "/buffer/stats"): None,
      ("get", "/buffers"): None,
    }
    queries = ("batch_size", "buffer")
  out = {}
  for (method, route), body in paths.items():
    parameters = [
      {"name": name, "in": "path", "required": True, "schema": text}
      for name in re.findall(r"\{(\w+)\}", route)
    ] + [{"name": name, "in": "query", "schema": text} for name in queries]
    operation = {
      "parameters": parameters,
      "responses": {"200": {"description": "ok"}},
    }
    if body is not None:
      operation["requestBody"] = {
        "content": {"application/json": {"schema": body}}
      }
    out.setdefault(route, {})[method] = operation
  return {
    "openapi": "3.1.0",
    "info": {"title": service, "version": "1"},
    "paths": out,
    "components": {"schemas": components},
  }
