"""The image proxy, in front of our server and of vLLM's protocol."""

import asyncio
import base64
import json
import os
import time

from agent_services.serving import image_addresses
from agent_services.serving import image_proxy
from agent_services.serving import media
import httpx
import hypothesis
from hypothesis import strategies as st
import media_sites
from media_sites import make_fixture  # noqa: F401
from media_sites import site_fixture  # noqa: F401
import pytest
import run_services
import small_server
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import request_bodies

DATA = "data:image/png;base64," + base64.b64encode(media_sites.PNG).decode()


def chat(*urls, **fields):
  parts = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
  return {
    "model": "m",
    "messages": [{"role": "user", "content": parts}],
    **fields,
  }


class Front:
  """A proxy on the test's own loop, with loaders that reach loopback."""

  def __init__(self, upstream, make, *hosts, **options):
    self.proxy = image_proxy.ImageProxy(
      upstream, media.MediaLimits(), loader=make(*hosts), **options
    )
    self.client = httpx.AsyncClient(
      transport=httpx.ASGITransport(self.proxy.asgi),
      base_url="http://127.0.0.1:1",
    )


def echo():
  return run_services.scripted(lambda *_: (200, {"ok": True}))


async def test_addresses_become_data_urls(make, site):
  with echo() as (upstream, log):
    front = Front(upstream, make, site.name)
    url = f"{site.url}/i.png"
    anthropic = {
      "messages": [
        {
          "role": "user",
          "content": [{"type": "image", "source": {"type": "url", "url": url}}],
        }
      ]
    }
    responses = {
      "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
      ]
    }
    for path, body in (
      ("/v1/chat/completions", chat(url, url)),
      ("/sessions/key/v1/messages", anthropic),
      ("/v1/responses?a=b", responses),
    ):
      answer = await front.client.post(path, json=body)
      assert answer.json() == {"ok": True}
      _, got, query, headers, sent = log.requests[-1]
      assert got == path.partition("?")[0]
      assert query == path.partition("?")[2]
      text = sent.decode()
      assert json.loads(text) == json.loads(json.dumps(body).replace(url, DATA))
    # Fetched once: later turns show the same pixels.
    assert len(site.requests) == 1


async def test_each_form_of_vllm_and_sglang_is_rewritten(make, site):
  """Content parts and inputs as their published request models have them."""
  url = f"{site.url}/i.png"
  user = lambda *parts: {"messages": [{"role": "user", "content": [*parts]}]}
  forms = [
      # vLLM's parts, and its simple form without a type.
      ("/v1/chat/completions", user(
          {"type": "image_url", "uuid": "u",
           "image_url": {"url": url, "detail": "low"}},
          {"image_url": url, "uuid": None},
          {"type": "input_image", "image_url": url, "detail": "auto"})),
      ("/tokenize", user({"type": "image_url", "image_url": {"url": url}})),
      ("/inference/v1/generate", {"token_ids": [1, 2], "content_parts": [
          {"type": "image_url", "url": url, "uuid": "u"},
          {"type": "image_url", "url": DATA}]}),
      # SGLang's, with its own fields.
      ("/v1/chat/completions", user(
          {"type": "image_url", "modalities": "image",
           "image_url": {"url": url, "max_dynamic_patch": 4}})),
      ("/generate", {"text": "a", "image_data": url}),
      ("/generate", {"input_ids": [[1], [2]],
                     "image_data": [[url], [{"url": url, "detail": "auto"}]]}),
  ]  # fmt: skip
  with echo() as (upstream, log):
    front = Front(upstream, make, site.name)
    for path, body in forms:
      assert (await front.client.post(path, json=body)).status_code == 200
      sent = log.requests[-1][-1].decode()
      assert json.loads(sent) == json.loads(json.dumps(body).replace(url, DATA))
      assert site.name not in sent
    assert len(site.requests) == 1
    for path, body, where in (
        ("/v1/chat/completions", user(
            {"type": "video_url", "video_url": {"url": url}}),
         "messages[0].content[0].video_url.url"),
        ("/generate", {"text": "a", "audio_data": [url]}, "audio_data[0]"),
        ("/inference/v1/generate", {"token_ids": [1], "content_parts": [
            {"type": "video_url", "url": url}]}, "content_parts[0].url"),
    ):  # fmt: skip
      count = len(log.requests)
      answer = await front.client.post(path, json=body)
      assert answer.status_code == 400 and len(log.requests) == count
      assert answer.json()["error"]["param"] == where


async def test_tools_and_their_calls_are_left_as_they_are(make):
  url = "http://other.test/a.png"
  elsewhere = {"image_url": url, "source": {"url": url}}
  body = {
    "tools": [{"function": {"parameters": {"default": elsewhere}}}],
    "metadata": elsewhere,
    "guided_json": {"$schema": "http://json-schema.org/draft-07/schema"},
    "messages": [
      {
        "role": "assistant",
        "annotations": [elsewhere],
        "content": [{"type": "tool_use", "name": "f", "input": elsewhere}],
        "tool_calls": [{"function": {"arguments": elsewhere}}],
      }
    ],
  }
  with echo() as (upstream, log):
    front = Front(upstream, make)
    answer = await front.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert json.loads(log.requests[-1][-1]) == body
    # The conversation of Responses does not become a tool's input by a type.
    body = {
      "type": "tool_use",
      "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
      ],
    }
    answer = await front.client.post("/v1/responses", json=body)
    assert answer.status_code == 400 and len(log.requests) == 1


async def test_text_is_passed_on_as_the_value_that_was_read(make):
  """The upstream gets JSON written from the parsed body, and headers."""
  with echo() as (upstream, log):
    front = Front(upstream, make)
    for body in (
      b'{"messages": [],   "x": 1e5}',
      b'{"messages": [{"role": "user", "content": "see http://a.b/c.png"}]}',
      b'{"messages": [{"role": "user", "content": "http://a.b/c.png"}]}',
      b'{"prompt": ["//a.b", "x"], "stop": ["http:"], "seed": 1%s}'
      % (b"0" * 300),
      b'{"image_url": "http://a.b/c", "image_url": "%s"}' % DATA.encode(),
      '{"text": "\u00e9\U0001f600"}'.encode(),
      json.dumps(chat(DATA)).encode(),
    ):
      answer = await front.client.post(
        "/v1/chat/completions",
        content=body,
        headers={
          "authorization": "Bearer mine",
          "x-request-id": "r1",
          "connection": "keep-alive, x-hop",
          "x-hop": "1",
        },
      )
      assert answer.status_code == 200, answer.text
      sent = log.requests[-1][-1]
      assert json.loads(sent) == json.loads(body) and sent.isascii()
      headers = log.requests[-1][3]
      assert headers["authorization"] == "Bearer mine"
      assert headers["x-request-id"] == "r1" and "x-hop" not in headers
      assert headers["content-type"] == "application/json"


HIDDEN = '{"messages": [{"role": "user", "content": [{"image_url": "%s"}]}]}'


@pytest.mark.parametrize(
  "body",
  [
    HIDDEN % r"\u0068ttp://a.test/i.png",
    HIDDEN % r"\u0068\u0074\u0074\u0070\u003a//a.test/i.png",
    HIDDEN % " http://a.test/i.png",
    HIDDEN % r"\u0000http://a.test/i.png",
    HIDDEN % r"\thttp://a.test/i.png",
    HIDDEN % "\u200bhttp://a.test/i.png",
    HIDDEN % "HtTp://a.test/i.png",
    HIDDEN % "//a.test/i.png",
    HIDDEN % r"\\\\a.test\\i.png",
    HIDDEN % "file:///etc/passwd",
    HIDDEN % "s3://bucket/i.png",
    HIDDEN % "%68ttp://a.test/i.png",
    HIDDEN % "/etc/x.png",
    HIDDEN % "http:a.test/i.png",
    '{"x": NaN, ' + (HIDDEN % "http://a.test/i.png")[1:],
    '{"x": 1e999, ' + (HIDDEN % "http://a.test/i.png")[1:],
    (HIDDEN % "http://a.test/i.png").replace("user", r"\ud800"),
    "\ufeff" + HIDDEN % "http://a.test/i.png",
    (HIDDEN % "http://a.test/i.png").encode("utf-16"),
    (HIDDEN % "http://a.test/i.png").encode("utf-32-le"),
    (HIDDEN % "http://a.test/i.png").encode() + b"\xff",
    '{"x": 1' + "0" * 5000 + ", " + (HIDDEN % "http://a.test/i.png")[1:],
    '{"image_url": "data:image/png;base64,", "image_url":'
    ' "http://a.test/i.png"}',
    '{"x": ' + "[" * 5000 + '"http://a.test/"' + "]" * 5000 + "}",
    '{"x": ' + "[" * 150 + '"http://a.test/"' + "]" * 150 + "}",
    (HIDDEN % "http://a.test/i.png") + " {}",
    "see http://a.test/i.png",
    '"http://a.test/i.png"',
    # Places that are no image's, or that servers read as another medium.
    '{"messages": [{"content": [{"file_url": "http://a.test/"}]}]}',
    '{"messages": [{"content": [{"video_url": "/etc/a.mp4"}]}]}',
    '{"messages": [{"content": [{"input_audio":'
    ' {"data": "http://a.test/"}}]}]}',
    '{"messages": [{"content": [{"image_embeds": "http://a.test/"}]}]}',
    '{"messages": [{"content": [["http://a.test/"]]}]}',
    '{"mm_processor_kwargs": {"images": ["http://a.test/"]}}',
    '{"media_io_kwargs": {"video": {"fallback": "http://a.test/"}}}',
    '{"chat_template_kwargs": {"icon": "http://a.test/"}}',
    '{"tools": [{"type": "mcp", "server_url": "http://a.test/"}]}',
    '{"prompt_embeds": "http://a.test/"}',
    '{"images": ["http://a.test/"]}',
    '{"http://a.test/": 1}',
    '{"kv_transfer_params": {"remote_host": "a.test"}}',
    '{"image_data": [["a.test/x.png"]]}',
    '{"content_parts": [{"type": "image_url", "url": "file:///x"}]}',
    '{"source": {"url": "data:,", "image_url": "http://a.test/"}}',
    # Names of unread fields, elsewhere than requests have them.
    '{"mm_processor_kwargs": {"function": "http://a.test/"}}',
    '{"messages": [{"content": [{"parameters": "http://a.test/"}]}]}',
    '{"x": {"content": [{"type": "tool_use",'
    ' "input": {"icon": "http://a.test/"}}]}}',
    '{"messages": [{"content": [{"input_audio":'
    ' {"data": "", "format": "wav;http://a.test/"}}]}]}',
  ],
)
async def test_no_address_is_hidden_from_the_proxy(make, body):
  with echo() as (upstream, log):
    front = Front(upstream, make)
    answer = await front.client.post(
      "/v1/chat/completions",
      content=body if isinstance(body, bytes) else body.encode(),
      headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"]
    assert not log.requests


async def test_what_is_read_elsewhere_in_another_form_is_given_as_data(make):
  """Bare base64, which SGLang may take for a file's name."""
  bare = DATA.partition(",")[2]
  with echo() as (upstream, log):
    front = Front(upstream, make)
    body = {"text": "a", "image_data": [bare, DATA]}
    assert (await front.client.post("/generate", json=body)).is_success
    sent = json.loads(log.requests[-1][-1])
    assert sent == {"text": "a", "image_data": [DATA, DATA]}


@pytest.mark.parametrize(
  "headers",
  [
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "application/msgpack"},
    {"content-type": "text/plain"},
    {"content-type": "application/jsonl"},
    {"content-encoding": "gzip"},
    {"content-encoding": "identity, br"},
  ],
)
async def test_only_plain_json_is_passed_on(make, headers):
  with echo() as (upstream, log):
    front = Front(upstream, make)
    for method in ("POST", "GET", "DELETE"):
      answer = await front.client.request(
        method, "/v1/chat/completions", content=b"{}", headers=headers
      )
      assert answer.status_code == 415, answer.text
    assert not log.requests
    for kind in ("application/json; charset=utf-7", "application/x.y+json"):
      answer = await front.client.post(
        "/v1/models", content=b"{}", headers={"content-type": kind}
      )
      assert answer.status_code == 200
      assert log.requests[-1][3]["content-type"] == "application/json"


async def test_routes_without_prompts_take_no_address_at_all(make, site):
  url = f"{site.url}/i.png"
  with echo() as (upstream, log):
    front = Front(upstream, make, site.name)
    for body in (
      {"text": url},
      {"metadata": {"a": url}},
      chat(url),
      chat("/etc/x.png"),
    ):
      for method in ("POST", "DELETE", "GET"):
        answer = await front.client.request(method, "/invocations", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "address_not_allowed"
    assert not log.requests and not site.requests
    for body in ({"reward": 0.5}, chat(DATA)):
      assert (await front.client.post("/rl/x", json=body)).is_success
      assert json.loads(log.requests[-1][-1]) == body
    assert (await front.client.post("/reset_prefix_cache")).is_success
    assert log.requests[-1][-1] == b""


async def test_a_body_of_many_values_is_refused_before_it_is_parsed(make):
  most = image_addresses.MOST_VALUES
  walked = image_addresses.MOST_WALKED
  deep = b"[" * 190 + b"]" * 190  # Lists without a comma.
  with echo() as (upstream, log):
    front = Front(upstream, make)
    for body in (
      b"[" + b"0," * most + b"0,0]",
      b"[" + b",".join([deep] * (most // 190)) + b"]",
      b"[" + b"[]," * walked + b"0]",
      b"[" + b'"",' * walked + b'""]',
      b"{" + b'"a":0,' * walked + b'"b":0}',
    ):
      answer = await front.client.post("/generate", content=body)
      assert answer.status_code == 413
      assert answer.json()["error"]["code"] == "request_too_large"
    assert not log.requests
    # The most that is looked into.
    body = {"tools": [{}] * (walked - 3), "seeds": [""] * (walked - 3)}
    began = time.process_time()
    assert (await front.client.post("/generate", json=body)).is_success
    assert time.process_time() - began < 4, "2 s on a slow machine"


@pytest.mark.parametrize("key", ["image", "video", "audio"])
async def test_a_local_path_of_an_embedding_is_refused_by_its_place(make, key):
  """As SGLang's inputs of embeddings have it."""
  with echo() as (upstream, log):
    front = Front(upstream, make)
    for value, status in (("/etc/secret.png", 400), (DATA, 200)):
      answer = await front.client.post(
        "/v1/embeddings", json={"input": [{"text": "a", key: value}]}
      )
      assert answer.status_code == status, answer.text
      if status == 400:
        assert answer.json()["error"]["param"] == f"input[0].{key}"
    assert len(log.requests) == 1


async def test_the_address_and_headers_may_hold_any_byte(make):
  """Over a connection, as a client of the standard library sends nothing so."""
  with echo() as (upstream, log):
    proxy = image_proxy.ImageProxy(
      f"{upstream}/tenant", media.MediaLimits(), loader=make()
    )
    with http_server.LoopbackServer(proxy.asgi) as front:
      port = int(front.url.rpartition(":")[2])
      for target, extra, status in (
        (b"/\xff", b"", b"400"),
        (b"/a?\xc3\xa9", b"", b"400"),
        (b"/v1/chat/completions/.", b"", b"400"),
        (b"/v1/chat/completions/x/..", b"", b"400"),
        (b"/v1/chat/completions/x/%2E%2e", b"", b"400"),
        (b"/v1/chat/completions/x/%252e%252e", b"", b"400"),
        (b"/v1/chat/completions#x", b"", b"400"),
        (b"/v1//chat/completions", b"", b"400"),
        (b"/v1/%2fchat/completions", b"", b"400"),
        (b"/../other/v1/models", b"", b"400"),
        (b"/..\\other", b"", b"400"),
        (b"/a/.b/c..", b"X-Name: \xe9\r\n", b"200"),
      ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
          b"GET %s HTTP/1.1\r\nHost: localhost\r\n%sConnection: close"
          b"\r\n\r\n" % (target, extra)
        )
        line = await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        assert line.split()[1] == status, (target, line)
    assert [one[1] for one in log.requests] == ["/tenant/a/.b/c.."]


PRETTY = ("http://a.test/i", "HTTPS://a.test/i", " file:///etc/x", "//a.test/x",
          "s3://b/x", "%68ttp://a.test", "\tht\ntp://a.test", "\x00ftp://a.test",
          "\\\\a.test\\x", "\ufeffhttp://a.test", "http%3A%2F%2Fa.test",
          "ｈttp://a.test")  # fmt: skip
NAMES = st.sampled_from((
    "messages", "content", "text", "image_url", "url", "source", "input",
    "image_data", "content_parts", "type", "video_url", "tools", "function",
    "output", "image_embeds", "documents", "mm_processor_kwargs", "metadata",
    "uuid", "data",
)) | st.text(max_size=4)  # fmt: skip
LEAVES = (
  st.sampled_from(PRETTY)
  | st.sampled_from(("image_url", "tool_use", "url", DATA, "user"))
  | st.integers()
  | st.none()
  | st.floats()
  | st.text(max_size=5)
)
BODIES = st.recursive(
  LEAVES,
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)
  ),
  max_leaves=12,
)
ROUTES = ("/v1/chat/completions", "/generate", "/v1/responses", "/other")


def _readable(value, where=()):
  """Addresses outside the places that no server reads for media."""
  if isinstance(value, str):
    if image_addresses.is_address(value):
      yield where, value
  elif isinstance(value, list):
    for item in value:
      yield from _readable(item, (*where, 0))
  elif isinstance(value, dict):
    for key, item in value.items():
      yield from _readable(key, (*where, "key"))
      yield from _readable(item, (*where, key))


@pytest.fixture(scope="module", name="recording")
def _recording():
  with echo() as (upstream, log):
    proxy = image_proxy.ImageProxy(upstream, media.MediaLimits())
    with http_server.LoopbackServer(proxy.asgi) as front:
      with httpx.Client(base_url=front.url) as client:
        yield client, log


@hypothesis.settings(
  max_examples=int(os.environ.get("PROXY_EXAMPLES", "150")),
  deadline=None,
  database=None,
  derandomize="PROXY_EXAMPLES" not in os.environ,
)
@hypothesis.given(
  BODIES,
  st.sampled_from(ROUTES),
  st.booleans(),
  st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-16-le")),
)
def test_no_forwarded_body_has_an_address(recording, value, route, ascii, code):
  """Addresses hidden anywhere; nothing is fetched, as no host is listed."""
  client, log = recording
  body = json.dumps(value, ensure_ascii=ascii).encode(code, "surrogatepass")
  log.requests.clear()
  answer = client.post(route, content=body)
  if answer.status_code != 200:
    assert answer.status_code in (400, 413) and not log.requests
    return
  ((*_, sent),) = log.requests
  if not sent:
    return
  forwarded = json.loads(sent)
  assert forwarded == json.loads(body)
  for where, address in _readable(forwarded):
    assert route != "/other", (where, address)
    field = where[-2:-1] if where[-1:] == (0,) else where[-1:]
    is_text = {*field} & {"content", "text", "input", "output"}
    is_unread = (
      where[:1] == ("metadata",)
      or where[:3] == ("tools", 0, "function")
      or ("input" in where and b"tool_use" in sent)
    )
    assert is_text or is_unread, (where, address)


@pytest.mark.parametrize(
  "url, code",
  [
    ("https://other.test/i.png", "image_host_not_allowed"),
    ("http://sub.{host}/i.png", "image_host_not_allowed"),
    ("http://127.0.0.1:22/", "image_host_not_allowed"),
    ("http://169.254.169.254/latest/meta-data", "image_host_not_allowed"),
    ("http://[::1]/", "image_host_not_allowed"),
    ("http://user@{host}/i.png", "invalid_image_url"),
    ("{site}/text", "invalid_image"),
    ("{site}/gone", "image_fetch_failed"),
    ("{site}/away", "image_host_not_allowed"),
  ],
)
async def test_what_must_not_be_fetched_is_refused_by_its_place(
  make, site, url, code
):
  site.answer("/text", b"<html>")
  site.answer("/gone", b"", "404 Not Found")
  site.redirect("/away", "http://127.0.0.1:9/")
  with echo() as (upstream, log):
    front = Front(upstream, make, site.name)
    answer = await front.client.post(
      "/v1/chat/completions",
      json=chat(url.format(host=site.name, site=site.url)),
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert not log.requests


async def test_a_listed_host_at_a_private_address_needs_to_be_named(make, site):
  strict = media.MediaLimits((site.name,), allow_http=True)
  named = media.MediaLimits(
    (site.name,), allow_http=True, private_hosts=(site.name,)
  )
  for limits, works in ((strict, False), (named, True)):
    loader = media.MediaLoader(
      images_lib.ImageStore(), limits, _resolve=media_sites.at("127.0.0.1")
    )
    if works:
      assert await loader.fetch(f"{site.url}/i.png") == media_sites.PNG
    else:
      with pytest.raises(media.MediaError, match="no public address"):
        await loader.fetch(f"{site.url}/i.png")
    await loader.aclose()
  with pytest.raises(ValueError, match="private_hosts"):
    media.MediaLimits(("a.test",), private_hosts=("b.test",))


async def test_images_are_bounded_and_the_upstream_s_failure_is_an_answer(make):
  with echo() as (upstream, log):
    front = Front(upstream, make, max_images=2)
    answer = await front.client.post(
      "/v1/chat/completions", json=chat(*["https://a.test/i.png"] * 3)
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "too_many_images"
    assert not log.requests
  failure = await front.client.post("/v1/chat/completions", json=chat())
  assert failure.status_code == 502
  assert failure.json()["error"]["code"] == "upstream_failed"


async def test_streams_are_passed_on_as_they_come(make):
  async def app(scope, receive, send):
    if scope["type"] != "http":
      return
    await send(
      {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
      }
    )
    for number in range(2):
      await send(
        {
          "type": "http.response.body",
          "more_body": True,
          "body": b"data: %d\n\n" % number,
        }
      )
      if not number:
        for _ in range(200):
          if seen_first:
            break
          await asyncio.sleep(0.01)
        else:
          raise AssertionError("the first part was kept back")
    await send({"type": "http.response.body", "body": b""})

  seen_first = []
  with http_server.LoopbackServer(app) as server:
    proxy = image_proxy.ImageProxy(
      server.url, media.MediaLimits(), loader=make()
    )
    with http_server.LoopbackServer(proxy.asgi) as front:
      async with httpx.AsyncClient() as client:
        async with client.stream(
          "POST", f"{front.url}/v1/chat/completions", json=chat()
        ) as answer:
          parts = []
          async for part in answer.aiter_raw():
            seen_first.append(part)
            parts.append(part)
  assert b"".join(parts) == b"data: 0\n\ndata: 1\n\n"


async def test_a_client_that_vanishes_ends_the_upstream_s_work(make):
  """Before the answer's head and in the middle of a stream."""
  endings = []

  async def app(scope, receive, send):
    if scope["type"] != "http":
      return
    if scope["path"] == "/v1/stream":
      await send({"type": "http.response.start", "status": 200, "headers": []})
      await send(
        {"type": "http.response.body", "body": b"a", "more_body": True}
      )
    while (await receive())["type"] != "http.disconnect":
      pass
    endings.append(scope["path"])

  with http_server.LoopbackServer(app) as server:
    proxy = image_proxy.ImageProxy(
      server.url, media.MediaLimits(), loader=make()
    )
    with http_server.LoopbackServer(proxy.asgi) as front:
      port = int(front.url.rpartition(":")[2])
      for path in ("/v1/wait", "/v1/stream"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
          b"POST %s HTTP/1.1\r\nHost: localhost\r\n"
          b"Content-Length: 2\r\n\r\n{}" % path.encode()
        )
        await asyncio.sleep(0.3)
        assert path not in endings
        writer.transport.abort()
        for _ in range(1000):
          if path in endings:
            break
          await asyncio.sleep(0.01)
        assert path in endings


@pytest.fixture(name="large")
def _large(site):
  site.answer("/large.png", media_sites.PNG + bytes(600 << 10))
  return f"{site.url}/large.png"


async def test_one_image_many_times_is_no_body_without_bounds(
  make, site, large, monkeypatch
):
  monkeypatch.setattr(image_proxy, "_MAX_BODY", 3 << 20)
  with echo() as (upstream, log):
    front = Front(upstream, make, site.name)
    path = "/v1/chat/completions"
    answer = await front.client.post(path, json=chat(*[large] * 3))
    assert answer.status_code == 200
    assert 2 << 20 < len(log.requests.pop()[4]) < 3 << 20
    answer = await front.client.post(path, json=chat(*[large] * 4))
    assert answer.status_code == 413, answer.text
    assert "more than 3 MiB; send fewer" in answer.text
    assert not log.requests


async def test_images_of_all_requests_count_as_their_bodies_do(
  make, site, large
):
  limits = request_bodies.ConnectionLimits(body_memory=2, body_timeout=0.5)
  with echo() as (upstream, log):
    proxy = Front(upstream, make, site.name).proxy
    guard = request_bodies.BodyGuard(proxy.asgi, limits)
    client = httpx.AsyncClient(
      transport=httpx.ASGITransport(guard), base_url="http://127.0.0.1:1"
    )
    path = "/v1/chat/completions"
    for count, status in ((2, 200), (3, 429), (2, 200)):
      answer = await client.post(path, json=chat(*[large] * count))
      assert answer.status_code == status, answer.text
      assert guard.held == 0
    assert len(log.requests) == 2


async def test_strangers_are_refused_and_the_upstream_has_its_own_token(make):
  with echo() as (upstream, log):
    front = Front(upstream, make, token="secret", upstream_token="theirs")
    path = "/v1/chat/completions"
    assert (await front.client.post(path, json=chat())).status_code == 401
    token = {"authorization": "Bearer secret"}
    answer = await front.client.post(path, json=chat(), headers=token)
    assert answer.status_code == 200
    assert log.requests[-1][3]["authorization"] == "Bearer theirs"
    assert (await front.client.get("/health")).status_code == 200
    for path in ("/metrics", "/v1/models", "/healthy", "/x/health"):
      assert (await front.client.get(path)).status_code == 401
    assert (await front.client.post("/health")).status_code == 401
    path = "/v1/chat/completions"
    page = {**token, "origin": "http://evil.example"}
    answer = await front.client.post(path, json=chat(), headers=page)
    assert answer.status_code == 403
    open_one = Front(upstream, make)
    answer = await open_one.client.post(
      path, json=chat(), headers={"host": "evil.example"}
    )
    assert answer.status_code == 403


async def test_our_own_server_samples_what_the_address_shows(
  make, site, running
):
  """The same tokens as with the image in the request itself."""
  png = media_sites.encoded(small_server.pixels(3))
  site.answer("/screen.png", png)
  data = "data:image/png;base64," + base64.b64encode(png).decode()
  front = Front(running.url, make, site.name)
  answers = []
  for url in (f"{site.url}/screen.png", data):
    body = chat(
      url,
      model=small_server.MODEL,
      max_tokens=4,
      temperature=0,
      return_token_ids=True,
    )
    answer = await front.client.post(
      "/v1/chat/completions", json=body, timeout=60
    )
    assert answer.status_code == 200, answer.text
    answers.append(answer.json())
  first, second = answers
  assert first["prompt_token_ids"] == second["prompt_token_ids"]
  ids = [a["choices"][0]["token_ids"] for a in answers]
  assert ids[0] and ids[0] == ids[1]


@pytest.mark.parametrize(
  "argv, words",
  [
    (["--upstream", "moon"], "upstream='moon'"),
    (["--upstream", "http://a:1", "--allow-host", "*.b"], "allowed_hosts"),
    (["--upstream", "http://a:1", "--host", "0.0.0.0"], "needs a token"),
  ],
)
def test_the_command_refuses_what_cannot_be(argv, words, capsys, monkeypatch):
  monkeypatch.delenv(image_proxy.TOKEN_VARIABLE, raising=False)
  assert image_proxy.main([*argv, "--port", "0"]) == 2
  stderr = capsys.readouterr().err
  assert stderr.startswith("error: ") and words in stderr
