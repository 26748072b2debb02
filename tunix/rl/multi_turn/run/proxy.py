"""Serves the engine to a run's own episodes over HTTP (`rollout.via=proxy`),
or to generators of a rollout buffer (`rollout.via=buffer`).

Promises: it listens on the loopback interface unless `rollout.host` names
another address, and answers only requests with the run's token or a session's
key, except on the loopback interface those of a rollout buffer's generators,
which know none; it takes as many sessions and requests as the run has episodes.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import agent_session
from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import packages
from tunix.rl.multi_turn.run import refusals
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

_LOG = logging.getLogger(__name__)


class RunProxy:
  """An HTTP server in front of the run's engine.

  Attributes:
    app: the OpenAI-compatible application.
    url: Address of the server.
    connection: Argument of `episodes.make_collector`.
    address: (URL of the API, bearer token), as clients elsewhere use them.
  """

  def __init__(
    self,
    config: config_lib.TrainConfig,
    policy: models.LoadedPolicy,
    engine: models.Engine,
    image_store: images_lib.ImageStore,
    *,
    token: str = "",
    extra_apps: Mapping[str, Any] | None = None,
    sessions: int = 0,
  ):
    """Listens, but does not answer before `start`.

    Args:
      config, policy, engine, image_store: of the run.
      token: Token that clients present; "" makes one.
      extra_apps: ASGI applications at path prefixes of the same server.
      sessions: held at a time; 0 = twice the run's episodes in flight.

    Raises:
      ConfigError: a package that it needs is not installed.
    """
    play = None
    by_service = config.rollout.agent == episodes.RUN_SERVICE
    if config.rollout.agent and not by_service:
      with refusals.refused("rollout.agent", ValueError):
        play = agent_session.load(config.rollout.agent)
    token = token or secrets.token_urlsafe(32)
    if config.rollout.via == "buffer" and http_server.is_loopback(
      config.rollout.host
    ):
      token = ""  # The protocol's generators send none.
    # Evaluations run beside training.
    most = sessions or 2 * config.collect.concurrency + 16
    via = f"rollout.via={config.rollout.via}"
    if config.fleet.away:
      via = f"fleet.via={config.fleet.via}"
    make_app = packages.part("services", "policy_server", via)
    with server_lib.opening(
      config,
      via,
      "pip install 'tunix-multi-turn[serve,client]', or set"
      " rollout.via=in_process",
    ):
      self.app = make_app.load()(
        config.policy.name,
        engine,
        (policy.model, policy.processor, policy.tokenizer),
        image_store,
        parser=config.agent.parser,
        max_new_tokens=config.sampling.max_new_tokens,
        max_images=max(64, config.environment.max_turns + 1),
        max_sessions=most,
        max_concurrent=most,
        session_timeout_s=config.collect.deadlines.episode + 60.0,
        token=token,
        renderer=policy.renderer,
        sampling=sampling_rule.SamplingRule(
          **sampling_rule.fields_of(config.sampling),
          other=config.rollout.other_sampling,
        ),
      )
      self._server = http_server.LoopbackServer(
        _with(self.app.asgi, extra_apps or {}),
        host=config.rollout.host,
        port=config.rollout.port,
      )
      self.url = self._server.url
      public = config.rollout.public_url or self.url
      self.address = f"{public.rstrip('/')}/v1", token
      self.connection = self._connect(config, policy, image_store, token, play)

  def _connect(
    self,
    config: config_lib.TrainConfig,
    policy: models.LoadedPolicy,
    image_store: images_lib.ImageStore,
    token: str,
    play: Any,
  ) -> proxy.ProxyConnection:
    """The episodes' connection to this server."""
    common: dict[str, Any] = dict(
      # Clients refuse an empty one.
      token=token or "none",
      timeout_s=config.collect.deadlines.model,
      other_sampling=config.rollout.other_sampling,
    )
    url = self._server.url
    for wildcard, loopback in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")):
      url = url.replace(f"//{wildcard}:", f"//{loopback}:")
    arguments = url, config.policy.name, image_store
    if config.rollout.agent != episodes.RUN_SERVICE:
      return agent_session.AgentConnection(*arguments, play=play, **common)
    agent = config.agent
    deadlines = config.collect.deadlines
    return episodes.run_service().RunConnection(
      *arguments,
      service=config.run_service,
      public_url=config.rollout.public_url or self._server.url,
      episode_s=deadlines.episode,
      turn_s=deadlines.turn,
      max_turns=config.environment.max_turns,
      agent_config={
        "parser": agent.parser,
        "systemPrompt": episodes.system_prompt(agent.system_prompt),
        "maxImages": agent.max_images or None,
        "imageStride": agent.image_stride,
        "onParseError": agent.on_parse_error,
      },
      renderer=policy.renderer,
      **common,
    )

  def start(self) -> None:
    self._server.start()

  def close(self, wait: Callable[[Any], Any]) -> None:
    """Ends connections, then the server.

    Args:
      wait: runs a coroutine on the loop of the episodes.
    """
    try:
      wait(self.connection.aclose())
    except Exception as error:  # pylint: disable=broad-except
      # The run's other parts are yet to be closed.
      _LOG.warning("connections to the proxy did not close: %r", error)
    self._server.close()


def _with(main: Callable[..., Any], extra_apps: Mapping[str, Any]) -> Any:
  """An ASGI application that hands paths with a prefix to others."""
  if not extra_apps:
    return main

  async def asgi(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
      for prefix, application in extra_apps.items():
        if scope["path"].startswith(f"{prefix}/"):
          inner = {**scope, "path": scope["path"][len(prefix) :]}
          await application(inner, receive, send)
          return
    await main(scope, receive, send)

  return asgi
