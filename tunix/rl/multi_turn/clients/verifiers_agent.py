"""Plays episodes of `environment=verifiers`: a `rollout.agent`.

The environment asks the policy itself, so that this agent hands its session
over and waits for the end.
"""

from __future__ import annotations

from typing import Any

from tunix.rl.multi_turn.clients import agent_session
from tunix.rl.multi_turn.environments.verifiers import environment


async def play(
  client: Any, model: str, computer: agent_session.Computer, **sampling: Any
) -> None:
  """See `agent_session`; `sampling` are arguments of each completion."""
  await computer.reset()
  session = environment.PolicySession(
    base_url=str(client.base_url),
    api_key=client.api_key,
    model=model,
    sampling=sampling,
    timeout_s=float(client.timeout),
  )
  await computer.act(environment.hand_over(session))
