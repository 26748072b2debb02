"""The image proxy in front of the real vLLM."""

import base64

from agent_services.serving import image_proxy
from agent_services.serving import media
import httpx
import media_sites
from media_sites import make_fixture  # noqa: F401
from media_sites import site_fixture  # noqa: F401
from tunix.rl.multi_turn.clients import remote_protocols
import vllm_server


async def test_an_address_is_sent_along_as_pixels(policy, server, make, site):
  """In the flat parts of `/inference/v1/generate` and in chat."""
  png = media_sites.encoded(vllm_server.noise(1))
  site.answer("/i.png", png)
  url, refused = f"{site.url}/i.png", "http://other.test/i.png"
  data = "data:image/png;base64," + base64.b64encode(png).decode()
  proxy = image_proxy.ImageProxy(
    server.url, media.MediaLimits(), loader=make(site.name)
  )
  prompt = policy.prompt(1)
  sampling = policy.sampling(temperature=1.0, max_new_tokens=8)

  def generate(address):
    return remote_protocols.vllm_body(
      vllm_server.NAME, prompt, sampling, [address], policy.banned
    )

  def chat(address):
    return {
        "model": vllm_server.NAME,
        "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": address}},
            {"type": "text", "text": "look"}]}],
        "max_tokens": 8, "seed": 5, "logprobs": True,
    }  # fmt: skip

  async with (
    httpx.AsyncClient(
      transport=httpx.ASGITransport(proxy.asgi),
      base_url="http://127.0.0.1:1",
      timeout=100,
    ) as through,
    httpx.AsyncClient(base_url=server.url, timeout=100) as direct,
  ):
    for path, body in (
      ("/inference/v1/generate", generate),
      ("/v1/chat/completions", chat),
    ):
      got = await through.post(path, json=body(url))
      assert got.status_code == 200, got.text
      want = await direct.post(path, json=body(data))
      assert want.status_code == 200, want.text
      (choice,), (expected,) = got.json()["choices"], want.json()["choices"]
      assert choice["finish_reason"] == expected["finish_reason"]
      logprobs, expected_logprobs = (
        [entry["logprob"] for entry in c["logprobs"]["content"]]
        for c in (choice, expected)
      )
      assert len(logprobs) > 0
      assert max(abs(a - b) for a, b in zip(logprobs, expected_logprobs)) < 2e-5
      if path.startswith("/inference"):
        assert choice["token_ids"] == expected["token_ids"]
      denied = await through.post(path, json=body(refused))
      assert denied.status_code == 400
      error = denied.json()["error"]
      assert error["code"] == "image_host_not_allowed"
      # vLLM itself fetches from no host: it was started so.
      assert (await direct.post(path, json=body(url))).status_code >= 400
  assert len(site.requests) == 1
