"""vLLM and SGLang as far as their protocols go, around a very small policy.

Real HTTP servers. They sample with the rollout engine, so that what comes back
is what the weights they were given say. Parsing is strict: a field or a flag
that the real ones do not have is refused.
"""

import argparse
import asyncio
import json

from agent_services.serving import media
import safetensors.numpy
import shared_programs
import small_server
from starlette import applications
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

SIZE = small_server.SIZE


class Refused(Exception):
  def __init__(self, status, message):
    super().__init__(message)
    self.status, self.message = status, message


class FakeEngine:
  """Common parts of the two engines."""

  def __init__(self, model, context, images, size=SIZE, slots=4):
    self.model_path = str(model)
    self.size = size
    self.context = context
    self.images_limit = images
    self.store = images_lib.ImageStore()
    self.policy = checkpoint.load_policy(model, screen=size)
    module, self.processor, tokenizer = self.policy
    self.renderer = qwen.QwenRenderer(
      tokenizer, self.processor.num_image_tokens
    )
    self.engine = engine_lib.RolloutEngine(
      module,
      self.processor,
      self.store,
      engine_config.EngineConfig(slots=slots, context_length=context),
      image_sizes=(size,),
      banned_token_ids=module.config.banned_token_ids,
    )
    self.loader = media.MediaLoader(self.store)
    self.bodies = []  # Of requests for completions.
    self.calls = []  # To everything else.
    self.loaded = []
    self.load_failure = ""
    self.loads_nothing = False
    self.served = 0
    self.gate = asyncio.Event()
    self.gate.set()
    self.running = set()
    self.server = http_server.LoopbackServer(
      applications.Starlette(
        routes=[
          routing.Route(path, self._guarded(handler), methods=[method])
          for path, handler, method in self.routes()
        ]
      )
    )
    self.url = self.server.url

  def __enter__(self):
    shared_programs.warm_up(
      self.engine, self.policy[0].config, self.size, self.engine.config
    )
    self.server.start()
    return self

  def __exit__(self, *exc_info):
    self.server.close()
    self.engine.close()

  def _guarded(self, handler):
    async def run(request):
      try:
        raw = await request.body()
        return await handler(request, json.loads(raw) if raw else {})
      except Refused as refused:
        return responses.JSONResponse(
          self.error(refused), status_code=refused.status
        )

    return run

  async def expanded(self, ids, urls):
    """Each image's one placeholder becomes as many as it has tokens."""
    if len(urls) > self.images_limit:
      raise Refused(
        400,
        f"At most {self.images_limit} image(s) may be provided in one prompt.",
      )
    pictures = [await self.loader.load(url) for url in urls]
    pad = self.renderer.image_token_id
    if ids.count(pad) != len(pictures):
      raise Refused(400, f"{ids.count(pad)} placeholders, {len(pictures)} data")
    tokens, left = [], iter(pictures)
    for token in ids:
      image = next(left) if token == pad else None
      tokens += [token] * (
        self.processor.num_image_tokens(image.width, image.height)
        if image
        else 1
      )
    return self.renderer.prompt_of_tokens(tokens, pictures)

  async def sample(self, prompt, sampling):
    """(tokens, log-probs, finish reason).

    What runs while the server pauses is cut off after two tokens. A test that
    puts None in the place of log-probs gets answers without them.
    """
    await self.gate.wait()
    self.served += 1
    session = f"r{self.served}"
    task = asyncio.ensure_future(
      self.engine.generate(prompt, sampling, session=session)
    )
    self.running.add(task)
    try:
      done = await task
    finally:
      self.running.discard(task)
      await self.engine.release(session)
    logprobs = done.logprobs
    if done.raw_logprobs is not None:
      logprobs = done.raw_logprobs
    tokens, logprobs = done.tokens.tolist(), logprobs.tolist()
    if not self.gate.is_set() and len(tokens) > 2:
      return tokens[:2], logprobs[:2], "abort"
    return tokens, logprobs, done.finish_reason.value

  async def load(self, path):
    if self.load_failure:
      raise Refused(500, self.load_failure)
    if self.loads_nothing:
      self.loaded.append(path)
      return
    module, _, _ = await asyncio.to_thread(
      checkpoint.load_policy, path, screen=self.size
    )
    done = self.engine.update_weights(len(self.loaded) + 1, module)
    await asyncio.wrap_future(done)
    self.loaded.append(path)


class FakeVllm(FakeEngine):
  """Started by the arguments that vLLM would be started by."""

  def __init__(self, argv, environment, abort_first=False, **options):
    assert list(argv[:2]) == ["vllm", "serve"], argv
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add = parser.add_argument
    add("model")
    add("--served-model-name")
    add("--host")
    add("--port", type=int)
    add("--max-model-len", type=int)
    add("--limit-mm-per-prompt", type=json.loads)
    add("--allowed-media-domains", nargs="+")
    add("--logprobs-mode", default="raw_logprobs")
    add("--generation-config", default="auto")
    add("--dtype")
    add("--tensor-parallel-size", type=int)
    add("--enable-scale-out", action="store_true")
    add("--enforce-eager", action="store_true")
    add("--max-num-batched-tokens", type=int)
    add("--max-num-seqs", type=int)
    add("--enable-lora", action="store_true")
    add("--max-lora-rank", type=int, choices=(8, 16, 32, 64, 128, 256))
    self.lora_updates = (
      environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1"
    )
    self.weight_version = "default"
    self.dies = False
    self.adapters = {}
    self.args = parser.parse_args(list(argv[2:]))
    self.dev = environment.get("VLLM_SERVER_DEV_MODE") == "1"
    self.abort_first = abort_first
    self.resets = True
    self.resume_failures = 0
    self.resume_s = 0.0
    super().__init__(
      self.args.model,
      self.args.max_model_len,
      self.args.limit_mm_per_prompt["image"],
      **options,
    )

  def routes(self):
    found = [
      ("/v1/models", self.models, "GET"),
      ("/v1/completions", self.completions, "POST"),
      ("/inference/v1/generate", self.generate, "POST"),
    ]
    if self.dev:
      found += [
        ("/pause", self.pause, "POST"),
        ("/resume", self.resume, "POST"),
        ("/is_paused", self.is_paused, "GET"),
        ("/collective_rpc", self.collective_rpc, "POST"),
        ("/reset_prefix_cache", self.reset_prefix_cache, "POST"),
        ("/update_weight_version", self.update_weight_version, "POST"),
      ]
    if self.args.enable_lora and self.lora_updates:
      found.append(("/v1/load_lora_adapter", self.load_adapter, "POST"))
    return found

  def error(self, refused):
    kind = "BadRequestError" if refused.status == 400 else "InternalServerError"
    return {
      "error": {
        "message": refused.message,
        "type": kind,
        "param": None,
        "code": refused.status,
      }
    }

  async def models(self, request, body):
    del request, body
    return responses.JSONResponse(
      {
        "object": "list",
        "data": [
          {
            "id": self.args.served_model_name,
            "object": "model",
            "max_model_len": self.context,
          }
        ],
      }
    )

  _SAMPLING = {
      "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
      "presence_penalty", "frequency_penalty", "repetition_penalty",
      "stop_token_ids", "skip_special_tokens", "logprobs", "logit_bias",
  }  # fmt: skip

  def sampling(self, params):
    unknown = set(params) - self._SAMPLING
    assert not unknown, unknown
    neutral = {
      "presence_penalty": 0,
      "frequency_penalty": 0,
      "repetition_penalty": 1,
    }
    assert all(params[k] == v for k, v in neutral.items())
    return policy_client.SamplingParams(
      max_new_tokens=params["max_tokens"],
      temperature=params["temperature"],
      top_p=params["top_p"],
      top_k=max(0, params["top_k"]),
      min_p=params["min_p"],
      seed=params["seed"],
      stop_token_ids=tuple(params["stop_token_ids"]),
      raw_logprobs=self.args.logprobs_mode == "raw_logprobs",
    )

  def check_length(self, prompt):
    if len(prompt) >= self.context:
      raise Refused(
        400,
        f"This model's maximum context length is {self.context} tokens."
        f" However, your request has {len(prompt)} input tokens. Please"
        " reduce the length of the input messages.",
      )

  async def sampled(self, prompt, params):
    self.check_length(prompt)
    if self.abort_first:
      self.abort_first = False
      return await self.cut(prompt, params)
    return await self.sample(prompt, self.sampling(params))

  async def cut(self, prompt, params):
    """The rest of a completion after a pause with mode=abort."""
    tokens, logprobs, _ = await self.sample(prompt, self.sampling(params))
    return tokens[:2], logprobs[:2], "abort"

  async def completions(self, request, body):
    del request
    self.bodies.append(dict(body))
    if self.dies:
      raise Refused(500, "EngineCore encountered an issue.")
    assert body.pop("return_token_ids") is True
    assert body.pop("model") == self.args.served_model_name
    ids = body.pop("prompt")
    prompt = await self.expanded(ids, [])
    tokens, logprobs, reason = await self.sampled(prompt, body)
    return responses.JSONResponse(
      {
        "object": "text_completion",
        "choices": [
          {
            "index": 0,
            "text": self.renderer.decode(tokens),
            "finish_reason": reason,
            "token_ids": tokens,
            "prompt_token_ids": prompt.tokens.tolist(),
            "logprobs": {"token_logprobs": logprobs},
          }
        ],
        "usage": {"prompt_tokens": len(prompt)},
      }
    )

  async def generate(self, request, body):
    del request
    if not self.args.enable_scale_out:
      raise Refused(
        403,
        "Scale-out endpoints are disabled. Restart vllm serve with"
        " --enable-scale-out to enable them.",
      )
    self.bodies.append(dict(body))
    if self.dies:
      raise Refused(500, "EngineCore encountered an issue.")
    assert body.pop("model") == self.args.served_model_name
    assert set(body) == {
      "token_ids",
      "content_parts",
      "sampling_params",
      "return_token_ids",
    }
    for part in body["content_parts"]:
      assert part["type"] == "image_url" and set(part) == {"type", "url"}
    urls = [part["url"] for part in body["content_parts"]]
    prompt = await self.expanded(body["token_ids"], urls)
    await self.gate.wait()
    version = self.weight_version
    tokens, logprobs, reason = await self.sampled(
      prompt, body["sampling_params"]
    )
    return responses.JSONResponse(
      {
        "request_id": "r",
        "prompt_token_ids": prompt.tokens.tolist(),
        "choices": [
          {
            "index": 0,
            "finish_reason": reason,
            "token_ids": tokens,
            "weight_versions": [
              {"version": version, "start": 0, "end": len(tokens)}
            ],
            "logprobs": logprobs
            and {
              "content": [
                {"token_id": t, "logprob": lp, "top_logprobs": []}
                for t, lp in zip(tokens, logprobs)
              ]
            },
          }
        ],
      }
    )

  async def pause(self, request, body):
    del body
    self.calls.append(f"pause {request.query_params['mode']}")
    self.gate.clear()
    # With `keep` it loses the images of running requests, and dies.
    assert request.query_params["mode"] == "abort"
    if self.running:
      await asyncio.wait(self.running)
    return responses.JSONResponse({"status": "paused"})

  async def is_paused(self, request, body):
    del request, body
    return responses.JSONResponse({"is_paused": not self.gate.is_set()})

  async def resume(self, request, body):
    del request, body
    self.calls.append("resume")
    await asyncio.sleep(self.resume_s)
    if self.resume_failures:
      self.resume_failures -= 1
      raise Refused(500, "not now")
    self.gate.set()
    return responses.JSONResponse({"status": "resumed"})

  async def collective_rpc(self, request, body):
    del request
    self.calls.append(body["method"])
    assert body["method"] == "reload_weights"
    assert set(body["kwargs"]) == {"weights_path", "is_checkpoint_format"}
    await self.load(body["kwargs"]["weights_path"])
    return responses.JSONResponse({"results": [None]})

  async def update_weight_version(self, request, body):
    del request
    self.calls.append("update_weight_version")
    self.weight_version = body["new_version"]
    return responses.JSONResponse({"success": True})

  async def load_adapter(self, request, body):
    del request
    assert set(body) <= {"lora_name", "lora_path", "load_inplace"}
    name, path = body["lora_name"], body["lora_path"]
    self.calls.append("load_lora_adapter")
    if name in self.adapters and not body.get("load_inplace"):
      raise Refused(
        400,
        f"The lora adapter '{name}' has already been loaded. If you want to"
        " load the adapter in place, set 'load_inplace' to True.",
      )
    try:
      with open(f"{path}/adapter_config.json", encoding="utf-8") as file:
        config = json.load(file)
    except OSError:
      raise Refused(404, f"No adapter found for {path}") from None
    if config["r"] > self.args.max_lora_rank:
      raise Refused(
        400,
        f"LoRA rank {config['r']} is greater than max_lora_rank"
        f" {self.args.max_lora_rank}.",
      )
    tensors = safetensors.numpy.load_file(f"{path}/adapter_model.safetensors")
    self.adapters[name] = (config, tensors)
    return responses.PlainTextResponse(
      f"Success: LoRA adapter '{name}' added successfully."
    )

  async def reset_prefix_cache(self, request, body):
    del body
    self.calls.append("reset_prefix_cache")
    del request
    return responses.JSONResponse({"success": self.resets})


class FakeSglang(FakeEngine):
  def __init__(self, model, context=256, images=64, **options):
    self.weight_version = "default"
    super().__init__(model, context, images, **options)

  def routes(self):
    return [
      ("/v1/models", self.models, "GET"),
      ("/generate", self.generate, "POST"),
      ("/update_weights_from_disk", self.update, "POST"),
      ("/pause_generation", self.pause, "POST"),
      ("/continue_generation", self.resume, "POST"),
      ("/flush_cache", self.flush_cache, "POST"),
    ]

  def error(self, refused):
    return {"error": {"message": refused.message}}

  async def models(self, request, body):
    del request, body
    entry = {"id": self.model_path, "max_model_len": self.context}
    return responses.JSONResponse({"object": "list", "data": [entry]})

  async def generate(self, request, body):
    del request
    self.bodies.append(dict(body))
    fields = {
      "input_ids",
      "image_data",
      "sampling_params",
      "return_logprob",
      "return_sampling_mask",
    }
    assert set(body) <= fields and body["return_logprob"]
    params = body["sampling_params"]
    masked = body.get("return_sampling_mask", False)
    if masked and not 0 < params["top_k"] <= 4096:
      raise Refused(
        400,
        "return_sampling_mask requires top_k=1 for greedy sampling or finite"
        f" 1 < top_k <= 4096; got top_k={params['top_k']}.",
      )
    prompt = await self.expanded(body["input_ids"], body.get("image_data", []))
    if len(prompt) >= self.context:
      raise Refused(
        400,
        f"The input ({len(prompt)} tokens) is longer than the model's context"
        f" length ({self.context} tokens).",
      )
    version = self.weight_version
    tokens, logprobs, reason = await self.sample(
      prompt,
      policy_client.SamplingParams(
        max_new_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=max(0, params["top_k"]),
        min_p=params["min_p"],
        seed=params["sampling_seed"],
        stop_token_ids=tuple(params["stop_token_ids"]),
      ),
    )
    sampled = {"output_token_sampling_logprobs": logprobs} if masked else {}
    return responses.JSONResponse(
      {
        "text": self.renderer.decode(tokens),
        "meta_info": {
          "finish_reason": {"type": reason},
          "prompt_tokens": len(prompt),
          "weight_version": version,
          # The real one's are of the whole vocabulary then.
          "output_token_logprobs": [
            [None if masked else lp, t, None] for t, lp in zip(tokens, logprobs)
          ],
          **sampled,
        },
      }
    )

  async def pause(self, request, body):
    del request
    assert body == {"mode": "abort"}
    self.calls.append("pause_generation")
    self.gate.clear()
    if self.running:
      await asyncio.wait(self.running)
    return responses.JSONResponse({"status": "ok"})

  async def resume(self, request, body):
    del request, body
    self.calls.append("continue_generation")
    self.gate.set()
    return responses.JSONResponse({"status": "ok"})

  async def flush_cache(self, request, body):
    del body
    assert float(request.query_params["timeout"]) > 0
    self.calls.append("flush_cache")
    return responses.PlainTextResponse("Cache flushed.")

  async def update(self, request, body):
    del request
    fields = {
      "model_path",
      "weight_version",
      "abort_all_requests",
      "flush_cache",
    }
    assert set(body) <= fields, body
    self.calls.append("update_weights_from_disk")
    try:
      await self.load(body["model_path"])
    except Refused as refused:
      return responses.JSONResponse(
        {"success": False, "message": refused.message}, 400
      )
    self.weight_version = body["weight_version"]
    return responses.JSONResponse({"success": True, "message": "done"})
