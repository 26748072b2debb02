"""Plays episodes with an outside agent, which runs a loop of its own.

An agent is a coroutine function:

    async def play(client, model, computer, **options):
      messages = [{"role": "system", "content": "…"}, await computer.reset()]
      while True:
        answer = await client.chat.completions.create(
            model=model, messages=messages, **options)
        text = answer.choices[0].message.content
        seen = await computer.act(text)
        if seen is None:  # The episode has ended.
          return
        messages += [{"role": "assistant", "content": text}, seen]

`client` is an `openai.AsyncOpenAI` of the episode's session, `computer` the
environment of the run; messages have OpenAI's form, screenshots are data URLs.
The agent decides what it asks, how often, and what it shows the policy: the
learner trains on every token that was sampled in its session, with the
episode's reward.

Promises: environment, deadlines, statuses and rewards are those of any other
episode; an agent that raises is a model error. When the episode ends first,
`act` returns None, and an agent that continues is cancelled; one that ignores
that is abandoned, and reported as a fault.

Does not assign answers to turns: an agent that asks several times before it
acts makes more answers than steps, which `turn_returns` would take for turns.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Callable, Coroutine, Sequence

from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.trajectory_collector import model_calls

Message = trajectory.Message
Play = Callable[..., Coroutine[Any, Any, Any]]

_GRACE_S = 1.0  # For an agent to end after its episode, or after cancelling.

# Agents that did not end; asyncio itself holds tasks weakly.
_LEFT: set[asyncio.Task[Any]] = set()


def load(name: str) -> Play:
  """Imports the agent that "module:function" names.

  Raises:
    ValueError: no such coroutine function.
  """
  module, _, function = name.partition(":")
  if not module or not function:
    raise ValueError(f"{name!r} names no agent; write module:function")
  try:
    agent = getattr(registry.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(f"{name!r} cannot be imported: {error}") from error
  if not inspect.iscoroutinefunction(agent):
    raise ValueError(f"{name!r} must be a coroutine function (async def)")
  return agent


class Computer:
  """The agent's view of the environment."""

  def __init__(self, session: AgentSession):
    self._session = session

  async def reset(self) -> Message | None:
    """Returns the first observation with the task, as a user message; None if
    the episode ended before it."""
    return await self._session._seen()

  async def act(self, text: str) -> Message | None:
    """Acts by the policy's text; returns the next observation, None at the end.

    A caller that stops waiting (`asyncio.wait_for`) has acted all the same, and
    misses the observation.

    Raises:
      RuntimeError: the previous act is not done yet.
    """
    if not isinstance(text, str):
      raise TypeError(f"act takes a text, got {type(text).__name__}")
    return await self._session._acted(text)

  async def close(self) -> None:
    """Does nothing: the run closes the environment."""


class AgentConnection(proxy.ProxyConnection):
  """Connects agents to the server; `play` is the agent's own loop, or None."""

  def __init__(self, *args: Any, play: Play | None = None, **options: Any):
    super().__init__(*args, **options)
    self._play = play

  def model(self, sampling: policy_client.SamplingParams) -> Any:
    if self._play is None:
      return super().model(sampling)
    return AgentModel(self, sampling, self._play)


class AgentModel(proxy.ProxyModel):
  """The model of a collector whose episodes an outside agent plays."""

  def __init__(
    self,
    connection: proxy.ProxyConnection,
    sampling: policy_client.SamplingParams,
    play: Play,
  ):
    super().__init__(connection, sampling)
    self.play = play

  def new_session(self, name: str, seed: int | None) -> AgentSession:
    return AgentSession(self, name, seed)


class AgentSession(proxy.ProxySession):
  """One episode. The collector and the agent take turns."""

  def __init__(self, model: AgentModel, name: str, seed: int | None):
    super().__init__(model, name, seed)
    self._play = model.play
    self._agent: asyncio.Task[Any] | None = None
    self._known = 0  # Messages that the agent has received.
    # Observations and acts: the agent waits for at most one.
    self._sights: asyncio.Queue[Message | None] = asyncio.Queue()
    self._acts: asyncio.Queue[str] = asyncio.Queue()
    self._first: Message | None = None
    self._acting = False  # An act without an observation yet.

  async def _reply(
    self,
    messages: Sequence[Message],
    turn: int,
    max_new_tokens: int | None = None,
  ) -> model_calls.Reply:
    del turn, max_new_tokens  # The agent asks as it likes.
    if self._agent is None:
      await self._open()
      self._agent = asyncio.ensure_future(self._run())
    written = await self._write(messages)
    new = [m for m in written[self._known :] if m["role"] == "user"]
    self._known = len(messages)
    self._acting = False
    self._sights.put_nowait(_joined(new))
    acting = asyncio.ensure_future(self._acts.get())
    try:
      await asyncio.wait(
        {acting, self._agent}, return_when=asyncio.FIRST_COMPLETED
      )
      if acting.done():
        self._answers += 1
        return model_calls.Reply(acting.result())
    finally:
      acting.cancel()
    self._agent.result()  # Raises the agent's error.
    # The agent has returned before the end: an empty reply does nothing.
    self._answers += 1
    return model_calls.Reply("")

  async def release(self, session: str) -> None:
    """Ends the agent, and fetches its session's tokens.

    Raises:
      RuntimeError: the agent ignores its cancellation. Its tokens have been
        fetched, and its session is dropped.
    """
    ended = True
    try:
      if self._agent is not None:
        self._sights.put_nowait(None)
        ended = await _ended(self._agent)
    finally:
      await super().release(session)
    if not ended:
      raise RuntimeError(
        f"the agent ran for {_GRACE_S:g} s after it was cancelled and is"
        " abandoned; let asyncio.CancelledError pass in it"
      )

  async def _run(self) -> None:
    with self._context_errors():
      await self._play(
        self._client,
        self._connection.name,
        Computer(self),
        **self._sampling_options(),
      )

  async def _seen(self) -> Message | None:
    if self._first is None:
      self._first = await self._sights.get()
    return self._first

  async def _acted(self, text: str) -> Message | None:
    if self._acting:
      raise RuntimeError(
        "act was called before the previous act was done; await that one,"
        " with no deadline shorter than the run's own"
        " (collect.deadlines.step)"
      )
    if await self._seen() is None:  # It has not called reset.
      return None
    while not self._sights.empty():  # Of acts whose caller stopped waiting.
      if self._sights.get_nowait() is None:
        return None
    self._acting = True
    self._acts.put_nowait(text)
    return await self._sights.get()


async def _ended(agent: asyncio.Task[Any]) -> bool:
  """Waits for the agent, then cancels it; False if it keeps running."""
  try:
    await asyncio.wait({agent}, timeout=_GRACE_S)
  finally:
    agent.cancel()
    _LEFT.add(agent)
    agent.add_done_callback(_forget)
  await asyncio.wait({agent}, timeout=_GRACE_S)
  return agent.done()


def _forget(agent: asyncio.Task[Any]) -> None:
  _LEFT.discard(agent)
  if not agent.cancelled():
    agent.exception()  # Retrieved, so that asyncio does not complain.


def _joined(messages: Sequence[Message]) -> Message:
  """Several user messages as one."""
  if len(messages) == 1:
    return messages[0]
  parts: list[Any] = []
  for message in messages:
    content = message.get("content") or ""
    if isinstance(content, str):
      content = [{"type": "text", "text": content}]
    parts += content
  return {"role": "user", "content": parts}
