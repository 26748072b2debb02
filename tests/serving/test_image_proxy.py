"""The image proxy, in front of our server and of vLLM's protocol."""

import asyncio
import base64
import json

import httpx
import media_sites
from media_sites import make_fixture  # noqa: F401
from media_sites import site_fixture  # noqa: F401
import pytest
import run_services
import small_server
from tunix.rl.multi_turn.agents.runs import conversion
from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import sampling_rule
from tunix.rl.multi_turn.serving import image_proxy
from tunix.rl.multi_turn.serving import media

DATA = "data:image/png;base64," + base64.b64encode(media_sites.PNG).decode()


def chat(*urls, **fields):
  parts = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
  return {"model": "m", "messages": [{"role": "user", "content": parts}],
          **fields}  # pyformat: disable


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
  with echo() as (upstream, seen):
    front = Front(upstream, make, site.name)
    url = f"{site.url}/i.png"
    anthropic = {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": url}}]}]}
    responses = {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": url}]}]}
    for path, body in (
        ("/v1/chat/completions", chat(url, url)),
        ("/sessions/key/v1/messages", anthropic),
        ("/v1/responses?a=b", responses),
    ):
      answer = await front.client.post(path, json=body)
      assert answer.json() == {"ok": True}
      _, got, query, headers, sent = seen.requests[-1]
      assert got == path.partition("?")[0]
      assert query == path.partition("?")[2]
      text = sent.decode()
      assert json.loads(text) == json.loads(
          json.dumps(body).replace(url, DATA)
      )
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
  ]  # pyformat: disable
  with echo() as (upstream, seen):
    front = Front(upstream, make, site.name)
    for path, body in forms:
      assert (await front.client.post(path, json=body)).status_code == 200
      sent = seen.requests[-1][-1].decode()
      assert json.loads(sent) == json.loads(
          json.dumps(body).replace(url, DATA)
      )
      assert site.name not in sent
    assert len(site.requests) == 1
    for path, body, where in (
        ("/v1/chat/completions", user(
            {"type": "video_url", "video_url": {"url": url}}),
         "messages[0].content[0].video_url"),
        ("/generate", {"text": "a", "audio_data": [url]}, "audio_data"),
        ("/inference/v1/generate", {"token_ids": [1], "content_parts": [
            {"type": "video_url", "url": url}]}, "content_parts[0].url"),
    ):  # pyformat: disable
      count = len(seen.requests)
      answer = await front.client.post(path, json=body)
      assert answer.status_code == 400 and len(seen.requests) == count
      assert answer.json()["error"]["param"] == where


async def test_tools_and_their_calls_are_left_as_they_are(make):
  url = "http://other.test/a.png"
  elsewhere = {"image_url": url, "source": {"url": url}}
  body = {
      "tools": [{"function": {"parameters": {"default": elsewhere}}}],
      "metadata": elsewhere,
      "messages": [
          {"role": "assistant", "content": [
              {"type": "tool_use", "name": "f", "input": elsewhere}],
           "tool_calls": [{"function": {"arguments": elsewhere}}]},
      ],
  }  # pyformat: disable
  content = json.dumps(body).encode()
  with echo() as (upstream, seen):
    front = Front(upstream, make)
    answer = await front.client.post("/v1/messages", content=content)
    assert answer.status_code == 200, answer.text
    assert seen.requests[-1][-1] == content


async def test_other_requests_are_passed_on_byte_for_byte(make):
  with echo() as (upstream, seen):
    front = Front(upstream, make)
    for body in (
        b'{"messages": [],   "x": 1e5}',
        b'{"messages": [{"role": "user", "content": "see http://a.b/c.png"}]}',
        json.dumps(chat(DATA)).encode(),
        b"http no json",
    ):
      answer = await front.client.post(
          "/v1/chat/completions",
          content=body,
          headers={"authorization": "Bearer mine", "x-request-id": "r1"},
      )
      assert answer.status_code == 200
      assert seen.requests[-1][-1] == body
      headers = seen.requests[-1][3]
      assert headers["authorization"] == "Bearer mine"
      assert headers["x-request-id"] == "r1"


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
  with echo() as (upstream, seen):
    front = Front(upstream, make, site.name)
    answer = await front.client.post(
        "/v1/chat/completions",
        json=chat(url.format(host=site.name, site=site.url)),
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert not seen.requests


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
  with echo() as (upstream, seen):
    front = Front(upstream, make, max_images=2)
    answer = await front.client.post(
        "/v1/chat/completions", json=chat(*["https://a.test/i.png"] * 3)
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "too_many_images"
    assert not seen.requests
  gone = await front.client.post("/v1/chat/completions", json=chat())
  assert gone.status_code == 502
  assert gone.json()["error"]["code"] == "upstream_failed"


async def test_streams_are_passed_on_as_they_come(make):
  async def app(scope, receive, send):
    if scope["type"] != "http":
      return
    await send({"type": "http.response.start", "status": 200,
                "headers": [(b"content-type", b"text/event-stream")]})
    for number in range(2):
      await send({"type": "http.response.body", "more_body": True,
                  "body": b"data: %d\n\n" % number})  # pyformat: disable
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


async def test_strangers_are_refused_and_the_upstream_has_its_own_token(make):
  with echo() as (upstream, seen):
    front = Front(upstream, make, token="secret", upstream_token="theirs")
    path = "/v1/chat/completions"
    assert (await front.client.post(path, json=chat())).status_code == 401
    mine = {"authorization": "Bearer secret"}
    answer = await front.client.post(path, json=chat(), headers=mine)
    assert answer.status_code == 200
    assert seen.requests[-1][3]["authorization"] == "Bearer theirs"
    page = {**mine, "origin": "http://evil.example"}
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


async def test_a_run_s_sampling_holds_in_front_of_an_engine(make, running):
  """Left out, it is filled in; another one is marked, and counted."""
  rule = sampling_rule.SamplingRule(temperature=0.7, top_k=5)
  front = Front(running.url, make, rule=rule)
  path = "/v1/chat/completions"
  body = {"model": small_server.MODEL, "seed": 3, "max_tokens": 6,
          "messages": [{"role": "user", "content": "go"}],
          "return_token_ids": True, "logprobs": True}  # pyformat: disable
  own = await front.client.post(path, json=body, timeout=60)
  assert own.status_code == 200, own.text
  assert "x-untrained" not in own.headers
  (choice,) = own.json()["choices"]
  assert "untrained" not in choice
  direct = httpx.post(
      running.url + path, json={**body, "temperature": 0.7, "top_k": 5},
      timeout=60,
  )  # pyformat: disable
  (expected,) = direct.json()["choices"]
  assert choice["token_ids"] == expected["token_ids"]
  assert choice["logprobs"] == expected["logprobs"]
  assert not front.proxy.untrained_requests
  cold = {**body, "temperature": 0.2}
  answer = await front.client.post(path, json=cold, timeout=60)
  reason = "temperature=0.2, not the run's 0.7"
  assert answer.headers["x-untrained"] == reason
  assert answer.json()["choices"][0]["untrained"] == reason
  events = [{"type": "model_call", "messages": body["messages"]},
            {"type": "model_output", "modelOutput": answer.json()}]
  turns = conversion.turns_of(events)
  assert conversion.untrained_of(turns, rule, {}) == {0: reason}
  streamed = await front.client.post(
      path, json={**cold, "stream": True}, timeout=60
  )
  assert streamed.headers["x-untrained"] == reason
  assert streamed.text.endswith("data: [DONE]\n\n")
  assert front.proxy.untrained_requests == 2


async def test_a_run_s_sampling_in_each_protocol_or_a_refusal(make):
  rule = sampling_rule.SamplingRule(
      temperature=0.7, min_p=0.1, other="refuse"
  )
  filled = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.1}
  with echo() as (upstream, seen):
    front = Front(upstream, make, rule=rule)
    for path, body, expected in (
        ("/v1/completions", {"prompt": "a"}, {"prompt": "a", **filled}),
        ("/generate", {"text": "a", "sampling_params": {"top_k": 0}},
         {"text": "a", "sampling_params": {**filled, "top_k": 0}}),
        ("/inference/v1/generate", {"token_ids": [1]},
         {"token_ids": [1], "sampling_params": filled}),
        ("/v1/responses", {"input": "a"},
         {"input": "a", "temperature": 0.7, "top_p": 1.0}),
        ("/v1/embeddings", {"input": "a"}, {"input": "a"}),
    ):  # pyformat: disable
      assert (await front.client.post(path, json=body)).status_code == 200
      assert json.loads(seen.requests[-1][-1]) == expected
    count = len(seen.requests)
    answer = await front.client.post(
        "/generate", json={"text": "a", "sampling_params": {"top_p": 0.5}}
    )
    assert answer.status_code == 400 and len(seen.requests) == count
    error = answer.json()["error"]
    assert error["param"] == "top_p" and "temperature=0.7" in error["message"]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--upstream", "moon"], "upstream='moon'"),
        (["--upstream", "http://a:1", "--allow-host", "*.b"], "allowed_hosts"),
        (["--upstream", "http://a:1", "--host", "0.0.0.0"], "needs a token"),
        (["--upstream", "http://a:1", "--sampling", '{"heat": 1}'],
         '--sampling={"heat": 1}'),
    ],
)
def test_the_command_refuses_what_cannot_be(argv, words, capsys, monkeypatch):
  monkeypatch.delenv(image_proxy.TOKEN_VARIABLE, raising=False)
  assert image_proxy.main([*argv, "--port", "0"]) == 2
  said = capsys.readouterr().err
  assert said.startswith("error: ") and words in said
