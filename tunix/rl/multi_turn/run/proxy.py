"""Serves the engine to a run's own episodes over HTTP (`rollout.via=proxy`).

Promises: it listens on the loopback interface, and answers only requests with
the run's token; it takes as many sessions and requests as the run has episodes.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, Callable

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import agent_session
from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.run import models

_LOG = logging.getLogger(__name__)


class RunProxy:
  """An HTTP server in front of the run's engine.

  Attributes:
    connection: what `episodes.make_collector` takes.
  """

  def __init__(
      self,
      config: config_lib.TrainConfig,
      policy: models.LoadedPolicy,
      engine: engine_lib.RolloutEngine,
      image_store: images_lib.ImageStore,
  ):
    """Listens, but does not answer before `start`.

    Raises:
      ConfigError: a package that it needs is not installed.
    """
    play = None
    if config.rollout.agent:
      try:
        play = agent_session.load(config.rollout.agent)
      except ValueError as error:
        raise config_lib.ConfigError([f"rollout.agent: {error}"]) from None
    token = secrets.token_urlsafe(32)
    # Evaluations run beside training.
    most = 2 * config.collect.concurrency + 16
    try:
      from tunix.rl.multi_turn.serving import requests  # pylint: disable=g-import-not-at-top
      from tunix.rl.multi_turn.serving import server  # pylint: disable=g-import-not-at-top

      self.app = server.make_app(
          config.policy.name,
          engine,
          (policy.model, policy.processor, policy.tokenizer),
          image_store,
          parser=config.agent.parser,
          limits=requests.RequestLimits(
              max_new_tokens=config.sampling.max_new_tokens,
              images=max(64, config.environment.max_turns + 1),
          ),
          max_sessions=most,
          max_concurrent=most,
          session_timeout_s=config.collect.deadlines.episode + 60.0,
          token=token,
      )
      self._server = http_server.LoopbackServer(self.app.asgi)
      self.connection = agent_session.AgentConnection(
          self._server.url,
          config.policy.name,
          image_store,
          token=token,
          timeout_s=config.collect.deadlines.model,
          play=play,
      )
    except ImportError as error:
      raise config_lib.ConfigError([
          f"rollout.via=proxy: {error}; pip install"
          " 'tunix-multi-turn[serve,client]', or set rollout.via=in_process"
      ]) from None

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
