"""A very small policy behind a real server on the loopback interface."""

from agent_services.serving import requests as requests_lib
from agent_services.serving import server as server_lib
import numpy as np
import shared_programs
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

MODEL = "nano"
SIZE = (32, 32)
CONTEXT = 256


class SmallPolicy:
  """A policy with what belongs to it, and an engine around it."""

  def __init__(self, seed=0, slots=4, store=None, features=()):
    self.policy = checkpoint.create_policy("nano", seed=seed, screen=SIZE)
    # An empty store is false.
    self.images = images_lib.ImageStore() if store is None else store
    self.model, self.processor, tokenizer = self.policy
    self.renderer = qwen.QwenRenderer(
      tokenizer, self.processor.num_image_tokens
    )
    self.engine = engine_lib.RolloutEngine(
      self.model,
      self.processor,
      self.images,
      engine_config.EngineConfig(
        slots=slots, context_length=CONTEXT, features=features
      ),
      image_sizes=(SIZE,),
      banned_token_ids=self.model.config.banned_token_ids,
    )

  def warm_up(self):
    shared_programs.warm_up(
      self.engine, self.model.config, SIZE, self.engine.config
    )

  def prompt(self, *seeds, text="look"):
    """A rendered message with an image a seed."""
    content = [
      {"type": "image", "image": self.images.put(pixels(seed))}
      for seed in seeds
    ]
    content.append({"type": "text", "text": text})
    return self.renderer.render([{"role": "user", "content": content}])

  def sampling(self, **options):
    return policy_client.SamplingParams(
      **{
        "max_new_tokens": 8,
        "seed": 5,
        "stop_token_ids": self.renderer.stop_token_ids,
        **options,
      }
    )


class SmallServer(SmallPolicy):
  """The small policy, served by this package's own server."""

  def __init__(self, limits=None, store=None, features=(), **options):
    super().__init__(store=store, features=features)
    self.app = server_lib.make_app(
      MODEL,
      self.engine,
      self.policy,
      self.images,
      limits=limits
      or requests_lib.RequestLimits(max_new_tokens=32, n=4, images=8),
      **options,
    )
    self.server = http_server.LoopbackServer(self.app.asgi)
    self.url = self.server.url

  def __enter__(self):
    self.warm_up()
    self.server.start()
    return self

  def __exit__(self, *exc_info):
    self.server.close()
    self.engine.close()


def pixels(seed):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (SIZE[1], SIZE[0], 3), np.uint8)
