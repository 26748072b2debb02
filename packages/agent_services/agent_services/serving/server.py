"""Builds the OpenAI-compatible application around a rollout engine."""

from __future__ import annotations

from typing import Any

from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.engine import programs
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

from agent_services.serving import answers
from agent_services.serving import app as app_lib
from agent_services.serving import grammars as grammars_lib
from agent_services.serving import media
from agent_services.serving import prompts
from agent_services.serving import requests
from agent_services.serving import service as service_lib
from agent_services.serving.sessions import session_sampling
from agent_services.serving.sessions import session_store


def make_run_app(
  *policy: Any,
  max_new_tokens: int,
  max_images: int,
  sampling: sampling_rule.SamplingRule,
  **options: Any,
) -> app_lib.OpenAIApp:
  """Builds the application of a run's own episodes; see `make_app`.

  Args:
    *policy: Positional arguments of `make_app`.
    max_new_tokens: Largest length of a completion.
    max_images: Largest number of images of a prompt.
    sampling: The run's distribution of trainable tokens.
    **options: Keyword arguments of `make_app`.
  """
  return make_app(
    *policy,
    limits=requests.RequestLimits(
      max_new_tokens=max_new_tokens, images=max_images
    ),
    sampling=session_sampling.SessionSampling(
      **sampling.fields, other=sampling.other
    ),
    **options,
  )


def make_app(
  name: str,
  engine: engine_lib.RolloutEngine,
  policy: tuple[Any, Any, Any],
  image_store: images.ImageStore,
  *,
  parser: str = "qwen",
  limits: requests.RequestLimits = requests.RequestLimits(),
  media_limits: media.MediaLimits = media.MediaLimits(),
  max_sessions: int = 1024,
  session_timeout_s: float = 3600.0,
  max_concurrent: int = 256,
  token: str = "",
  renderer: choice.AnyRenderer | None = None,
  export_arrays: str = "lists",
  sampling: session_sampling.SessionSampling = (
    session_sampling.SessionSampling()
  ),
) -> app_lib.OpenAIApp:
  """Builds the application around an engine.

  Args:
    name: Name of the model for clients.
    engine: Engine that samples.
    policy: Model, processor and tokenizer of the engine.
    image_store: Image store of the engine.
    parser: Registered tool parser that reads tool calls.
    limits: Limits of a request.
    media_limits: Limits of an image.
    max_sessions: Largest number of sessions in memory.
    session_timeout_s: Seconds after which an idle session ends.
    max_concurrent: Largest number of requests in progress; others get 429 and a
      time to retry.
    token: Token that clients must present; "" requires none.
    renderer: Renderer of the policy; None for ChatML.
    export_arrays: One of `session_routes.ARRAYS`, where a request for an export
      names none.
    sampling: The distribution of sessions whose start names none.
  """
  _, processor, tokenizer = policy
  if renderer is None:
    renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)
  decoder = answers.TokenDecoder(
    renderer.decode, tokenizer, renderer.end_of_turn_id
  )
  try:
    grammars = grammars_lib.Grammars(
      decoder.bytes,
      renderer.encode,
      engine.vocabulary,
      decoder.special,
      renderer.stop_token_ids,
    )
  except ImportError:  # Requests that need one are refused with the reason.
    grammars = None
  service = service_lib.Service(
    prompts.ServedPolicy(
      name=name,
      client=engine,
      renderer=renderer,
      parser=tool_parser.make_tool_parser(parser, "operator"),
      decoder=decoder,
      grammars=grammars,
      context_length=engine.context_length,
      max_stop_token_ids=programs.MAX_STOP_TOKENS,
      vocabulary=engine.vocabulary,
      healthy=lambda: engine.healthy,
    ),
    session_store.SessionStore(
      renderer,
      max_sessions=max_sessions,
      timeout_s=session_timeout_s,
      sampling=sampling,
    ),
    media.MediaLoader(image_store, media_limits),
    limits=limits,
    max_concurrent=max_concurrent,
  )
  return app_lib.OpenAIApp(
    service, token=token, stats=engine.stats, export_arrays=export_arrays
  )
