"""Episodes that an agent of somebody else's plays, in its own loop.

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
environment of the run; messages come in OpenAI's form, screenshots as data
URLs. What the agent asks, how often, and what it shows the policy is its own
affair: all that was sampled in its session is trained on, with the reward of
the episode.

Promises: environment, deadlines, statuses and rewards are those of any other
episode; an agent that raises is a model error; one that is not done when its
episode is gets to know it (`act` returns None), is cancelled if it goes on, and
left to itself, which is a fault, if it does not mind that either.

Does not give answers to turns: an agent that asks several times before it acts
makes more answers than steps, which `turn_returns` would take for turns.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from typing import Any, Callable, Coroutine, Sequence

from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.trajectory_collector import model_calls

Message = trajectory.Message
Play = Callable[..., Coroutine[Any, Any, Any]]

_GRACE_S = 1.0  # For an agent to end once its episode has, or is cancelled.

# Agents that would not end; asyncio itself holds tasks weakly.
_LEFT: set[asyncio.Task[Any]] = set()


def load(name: str) -> Play:
  """The agent that "module:function" names.

  Raises:
    ValueError: there is none; says what to write.
  """
  module, _, function = name.partition(":")
  if not module or not function:
    raise ValueError(f"{name!r} names no agent; write module:function")
  try:
    found = getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError) as error:
    raise ValueError(f"{name!r} cannot be had: {error}") from error
  if not inspect.iscoroutinefunction(found):
    raise ValueError(f"{name!r} must be a coroutine function (async def)")
  return found


class Computer:
  """The environment, as an agent has it."""

  def __init__(self, session: AgentSession):
    self._session = session

  async def reset(self) -> Message:
    """What is seen first, with the task; a user message."""
    return await self._session._seen()

  async def act(self, text: str) -> Message | None:
    """Acts as the policy's text says; what is seen then, or None at the end.

    Who stops waiting for it (`asyncio.wait_for`) has acted all the same, and
    does not see what came of it.

    Raises:
      RuntimeError: the act before is not done yet.
    """
    if not isinstance(text, str):
      raise TypeError(f"act takes a text, got {type(text).__name__}")
    return await self._session._acted(text)

  async def close(self) -> None:
    """The run closes it."""


class AgentConnection(proxy.ProxyConnection):
  """The server, as its agents reach it; theirs is the loop, if `play` is."""

  def __init__(self, *args: Any, play: Play | None = None, **options: Any):
    super().__init__(*args, **options)
    self._play = play

  def model(self, sampling: policy_client.SamplingParams) -> Any:
    if self._play is None:
      return super().model(sampling)
    return AgentModel(self, sampling, self._play)


class AgentModel:
  """What a collector takes as its model call."""

  def __init__(
      self,
      connection: proxy.ProxyConnection,
      sampling: policy_client.SamplingParams,
      play: Play,
  ):
    self.connection = connection
    self.sampling = sampling
    self.play = play

  def new_session(self, name: str, seed: int | None) -> AgentSession:
    return AgentSession(self, name, seed)


class AgentSession(proxy.ProxySession):
  """One episode. The collector and the agent take turns."""

  def __init__(self, model: AgentModel, name: str, seed: int | None):
    super().__init__(model, name, seed)
    self._play = model.play
    self._agent: asyncio.Task[Any] | None = None
    self._known = 0  # Messages that the agent has been given.
    # Of what is seen, and of what is done: at most one is waited for.
    self._sights: asyncio.Queue[Message | None] = asyncio.Queue()
    self._acts: asyncio.Queue[str] = asyncio.Queue()
    self._first: Message | None = None
    self._acting = False  # An act whose outcome is not seen yet.

  async def _reply(
      self, messages: Sequence[Message], turn: int
  ) -> model_calls.Reply:
    del turn
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
    self._agent.result()  # Raises what the agent did.
    # It has given up: there is nothing that could be done.
    self._answers += 1
    return model_calls.Reply("")

  async def release(self, session: str) -> None:
    """Ends the agent, and fetches what was sampled for it.

    Raises:
      RuntimeError: the agent goes on though it was cancelled. What was sampled
        has been fetched, and its session is gone.
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
          f"the agent went on for {_GRACE_S:g} s after it was cancelled, and is"
          " left to itself; let asyncio.CancelledError pass in it"
      )

  async def _run(self) -> None:
    openai = self._connection.openai
    sampling = self._sampling
    extra: dict[str, Any] = {"top_k": sampling.top_k}
    if sampling.min_p:
      extra["min_p"] = sampling.min_p
    try:
      await self._play(
          self._client,
          self._connection.name,
          Computer(self),
          max_tokens=sampling.max_new_tokens,
          temperature=sampling.temperature,
          top_p=sampling.top_p,
          extra_body=extra,
      )
    except openai.BadRequestError as error:
      if error.code != "context_length_exceeded":
        raise
      raise proxy.context_limit(error) from error

  async def _seen(self) -> Message | None:
    if self._first is None:
      self._first = await self._sights.get()
    return self._first

  async def _acted(self, text: str) -> Message | None:
    if self._acting:
      raise RuntimeError(
          "act was called while the act before it is not done; await that one,"
          " and give it no deadline shorter than the run's own"
          " (collect.deadlines.step)"
      )
    if await self._seen() is None:  # It has not asked what there is.
      return None
    while not self._sights.empty():  # Of acts that nobody waits for any more.
      if self._sights.get_nowait() is None:
        return None
    self._acting = True
    self._acts.put_nowait(text)
    return await self._sights.get()


async def _ended(agent: asyncio.Task[Any]) -> bool:
  """Waits for it, then cancels it; False if it goes on nevertheless."""
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
