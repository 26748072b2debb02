"""Fixtures that the tests of the OpenAI-compatible server share."""

import pytest


@pytest.fixture(scope="session", name="running")
def _running():
  """A server; only what can be undone may be done to it."""
  import rollout_server  # Not before a test asks for it: it is slow to import.
  from tunix.rl.multi_turn.engine import config

  with rollout_server.Running(features=config.FEATURES) as running:
    yield running
    stats = running.engine.stats()
    assert stats["compiles_after_warm_up"] == stats["compiles_on_demand"] == 0


@pytest.fixture(name="saying")
def _saying(running, monkeypatch):
  """Makes the policy say a text."""

  def say(text):
    monkeypatch.setattr(
      running.app._service.policy.renderer,
      "decode",
      lambda ids: text if len(ids) else "",
    )

  return say
