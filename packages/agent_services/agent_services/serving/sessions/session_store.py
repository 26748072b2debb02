"""Holds a server's sessions: the turns of each, and all by id and key.

A `ServedSession` is one episode of an agent that runs elsewhere. A request that
begins with the messages of an earlier one and its answer extends that one. Any
other request is rendered anew, or comes as text or tokens, and starts a chain
of its own.

Promises: a refused call changes nothing; finding the parent reads each message
once, however many interactions there are (more only where ids do not
distinguish equal answers); memory is bounded and grows with each request's
additions; sessions' ids and keys cannot be guessed, and their number is
bounded: an idle one is ended, and dropped later.

Does not: speak HTTP, sample, parse tool calls, write tools into messages, hold
pixels, import JAX, or lock: a store belongs to one event loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import secrets
import time
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.trajectory_collector import completion_checks

from agent_services.serving.sessions import interactions
from agent_services.serving.sessions import session_sampling

Completion = interactions.Completion
Exported = interactions.Exported
Exporter = interactions.Exporter
Interaction = interactions.Interaction
InteractionError = interactions.InteractionError
Key = interactions.Key
Message = interactions.Message
Node = interactions.Node
PendingPrompt = interactions.PendingPrompt
TokenPrompt = interactions.TokenPrompt

_DEFAULT_SAMPLING = session_sampling.SessionSampling()

KEY_PREFIX = "tunix-"
"""Prefix of sessions' keys, which distinguishes them from a server's token."""


class ServedSession:
  """The turns of one episode; a `SessionStore` makes them.

  Once `ended`, prompts and answers are refused; rewards and exports are not.
  `last_active` is the time of its last prompt, answer or reward, in seconds.
  """

  def __init__(
    self,
    renderer: choice.AnyRenderer,
    session_id: str,
    key: str = "",
    task_id: str = "",
    max_interactions: int = 1024,
    clock: Callable[[], float] = time.monotonic,
    sampling: session_sampling.SessionSampling = _DEFAULT_SAMPLING,
  ):
    """`renderer` is one of `parser/renderer`: render, bridge, decode."""
    self.id, self.key, self.task_id = session_id, key, task_id
    self.sampling = sampling
    self.untrained_answers = 0  # Drawn from another distribution.
    self.ended = False
    self.busy = 0  # Requests being answered.
    self._renderer = renderer
    self._max_interactions = max_interactions
    self._clock = clock
    self._root = interactions.Node(None)
    self._reserved = 0
    self._interactions: dict[str, Interaction] = {}
    self._discounted = False
    self.touch()

  @property
  def interactions(self) -> tuple[Interaction, ...]:
    """The interactions, in order of creation."""
    return tuple(self._interactions.values())

  def get(self, interaction_id: str | None = None) -> Interaction:
    """Returns the interaction of that id; the last one for None."""
    if interaction_id is None:
      interaction_id = next(reversed(self._interactions), None)
    if interaction_id not in self._interactions:
      raise InteractionError(
        "unknown_interaction",
        f"session {self.id!r} has no answer {interaction_id!r}",
      )
    return self._interactions[interaction_id]

  def touch(self) -> None:
    """Postpones the expiry."""
    self.last_active = self._clock()

  def end(self) -> None:
    self.ended = True
    self.touch()

  @contextlib.contextmanager
  def reserve(self, count: int) -> Iterator[None]:
    """Reserves room for `count` answers while they are sampled."""
    self._check_open()
    free = self._max_interactions - len(self._interactions) - self._reserved
    if count > free:
      raise InteractionError(
        "session_full",
        f"session {self.id!r} has room for {max(0, free)} more answers of"
        f" {self._max_interactions}, {count} are asked for; continue in a"
        " new session",
      )
    self._reserved += count
    try:
      yield
    finally:
      self._reserved -= count

  def prompt(
    self,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    show_tools: bool = False,
  ) -> PendingPrompt:
    """Renders a request.

    It extends the deepest interaction with the same `tools` whose messages and
    answer `messages` begin with; of equally deep ones, the one whose answer was
    sent exactly as it stands in `messages`, then the newest. Without
    `show_tools`, the caller has written the tools' text into `messages`.
    """
    self._check_open()
    messages = list(messages)
    with _rendering():
      read, keys = interactions.read_all(messages, tools)
      before, depth = self._find(keys)
      if before is None:
        shown = {"tools": list(tools or ())} if show_tools else {}
        extension = self._renderer.render(
          messages, add_generation_prompt=True, **shown
        )
      else:
        extension = self._renderer.bridge(
          messages[depth:], last_sampled_is_eot=before.closed
        )
    self.touch()
    return PendingPrompt(
      session_id=self.id,
      before=before,
      new_messages=tuple(copy for copy, _ in read[max(depth - 1, 0) :]),
      extension=extension,
      _path=keys if before is None else keys[depth + 1 :],
    )

  def prompt_continuing(
    self,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    show_tools: bool = False,
  ) -> PendingPrompt:
    """Renders a request whose last message, text, is its answer's beginning.

    Takes the arguments of `prompt`. Where the text is the whole of an answer
    that its length cut off, the request continues the sampled tokens. Any other
    text is tokenised.
    """
    self._check_open()
    with _rendering():
      read, keys = interactions.read_all(messages, tools)
    text = keys[-1][0][1]
    before, depth = self._find(keys)
    if (
      before is None
      or depth < len(messages)
      or before.closed
      or before.whole_text != text
    ):
      pending = self.prompt(messages[:-1], tools, show_tools)
      tokens = np.concatenate(
        [pending.extension.tokens, self._renderer.encode(text)]
      )
      extension = TokenPrompt(tokens, pending.extension.images)
      return dataclasses.replace(pending, extension=extension, _prefix=text)
    self.touch()
    return PendingPrompt(
      session_id=self.id,
      before=before,
      new_messages=(read[-1][0],),
      extension=TokenPrompt(np.zeros(0, np.int32)),
      _prefix=text,
      _node_before=before._node_before,
    )

  def prompt_raw(self, tokens: np.ndarray) -> PendingPrompt:
    """Takes a request that is rendered already, int32[T]; it extends none."""
    self._check_open()
    self.touch()
    return PendingPrompt(
      session_id=self.id,
      before=None,
      new_messages=(),
      extension=TokenPrompt(tokens),
      _raw=True,
    )

  def add(
    self,
    pending: PendingPrompt,
    completion: Completion,
    *,
    assistant_message: Message,
    id: str | None = None,  # pylint: disable=redefined-builtin
    sampling: Mapping[str, float] | None = None,
    untrained: str = "",
  ) -> Interaction:
    """Records an answer to a request of this session.

    A request that holds `assistant_message` (as sent to the client), or the
    sampled text as its content, extends this interaction. None makes up an
    `id`. `sampling` is what it was drawn with, None the session's own;
    `untrained` says why its tokens are not trainable.
    """
    self._check_open()
    if pending.session_id != self.id:
      raise InteractionError(
        "unknown_prompt", f"pending is of session {pending.session_id!r}"
      )
    if id in self._interactions:
      raise InteractionError(
        "duplicate_interaction", f"id {id!r} is taken; use another one"
      )
    self._check_completion(completion)
    answer, key = interactions.read(assistant_message, "assistant_message")
    if (role := answer["role"]) != "assistant":
      raise InteractionError("bad_message", f"role of the answer: {role!r}")
    text, closed = completion_checks.read(
      completion, self._renderer, self._renderer.stop_token_ids
    )
    if pending._prefix:
      content = pending._prefix + (answer.get("content") or "")
      answer = {**answer, "content": content}
      answer, key = interactions.read(answer, "assistant_message")
    message = {"role": "assistant", "content": pending._prefix + text}
    node_before = node = None
    if not pending._raw:
      node_before = self._request_node(pending)
      node = node_before.child(key, interactions.read(message, "text")[1])
    interaction = Interaction(
      **{**vars(pending), "_node_before": node_before},
      id=secrets.token_urlsafe(18) if id is None else id,
      index=len(self._interactions),
      completion=completion,
      text=text,
      answer=answer,
      closed=closed,
      created=self._clock(),
      sampling=sampling or self.sampling.fields,
      untrained=untrained,
      _node=node,
    )
    if node is not None:
      node.interaction = interaction
    self._interactions[interaction.id] = interaction
    self.untrained_answers += bool(untrained)
    self.touch()
    return interaction

  def set_reward(self, interaction_id: str | None, reward: float) -> None:
    """Sets or replaces a reward; None is the last interaction."""
    self._check_not_discounted()
    interaction = self.get(interaction_id)
    # Exports hold float32, in which a larger one is infinite.
    if not isinstance(reward, numbers.Real) or not abs(reward) < 3e38:
      raise InteractionError(
        "bad_reward", f"reward must be a finite number, got {reward!r}"
      )
    self._replace_rewards({interaction.id: float(reward)})
    self.touch()

  def apply_reward_discount(self, discount: float) -> None:
    """Turns rewards into discounted returns, in the order of creation, once.

    R_t = r_t + discount * R_{t+1}, r_t being 0 where unset. Afterwards answers
    cannot be added.
    """
    self._check_not_discounted()
    self._replace_rewards(self._returns(discount))
    self._discounted = True

  def exporter(
    self, style: str = "individual", discount: float | None = 1.0
  ) -> Exporter:
    """Returns a snapshot as training sequences, see `interactions.Exporter`.

    `discount` is applied as by `apply_reward_discount`, unless that was called
    before; None leaves rewards as they were set, or 0.
    """
    if style not in interactions.STYLES:
      raise InteractionError(
        "bad_style", f"style must be 'individual' or 'concat', got {style!r}"
      )
    rewards = {i.id: i.reward or 0.0 for i in self.interactions}
    if discount is not None and not self._discounted:
      rewards = self._returns(discount)
    return Exporter(self.interactions, rewards, style)

  def export(
    self, style: str = "individual", discount: float | None = 1.0
  ) -> list[Exported]:
    """Returns all sequences of `exporter`. Changes nothing."""
    return list(self.exporter(style, discount))

  def _find(self, keys: Sequence[Key]) -> tuple[Interaction | None, int]:
    """Returns the parent, and the number of messages up to its answer."""
    nodes, answers, depth = [self._root], [], 0
    for at, key in enumerate(keys):
      nodes = [after for node in nodes for after in node.follow(key)]
      if answered := [node for node in nodes if node.interaction]:
        answers, depth = answered, at
    if not answers:
      return None, 0
    value, _ = last_key = keys[depth]
    # Equal; equal but for ids left out; the newest.
    rank = lambda n: (n.key == last_key, n.key[0] == value, n.interaction.index)
    return max(answers, key=rank).interaction, depth

  def _request_node(self, pending: PendingPrompt) -> Node:
    """Returns the node of a request's messages, without a beginning of its
    answer."""
    if pending._node_before is not None:
      return pending._node_before
    node = pending.before._node if pending.before else self._root
    for key in pending._path:
      node = node.child(key)
    return node

  def _check_open(self) -> None:
    self._check_not_discounted()
    if self.ended:
      raise InteractionError("session_ended", f"session {self.id!r} has ended")
    if len(self._interactions) >= self._max_interactions:
      raise InteractionError(
        "session_full",
        f"session {self.id!r} is full; continue in a new session, or raise"
        " max_interactions",
      )

  def _check_not_discounted(self) -> None:
    if self._discounted:
      raise InteractionError(
        "reward_already_discounted",
        f"rewards of session {self.id!r} are final: they were discounted;"
        " set all rewards before",
      )

  def _check_completion(self, completion: Completion) -> None:
    try:
      if not len(completion.tokens):
        raise ValueError("no token was sampled; record answers only")
      completion_checks.check(completion, self._renderer.image_token_id)
    except ValueError as error:
      raise InteractionError("bad_completion", str(error)) from error

  def _replace_rewards(self, rewards: Mapping[str, float]) -> None:
    for key, reward in rewards.items():
      interaction = self._interactions[key]
      self._interactions[key] = dataclasses.replace(interaction, reward=reward)

  def _returns(self, discount: float) -> dict[str, float]:
    if not isinstance(discount, numbers.Real) or not 0 <= discount <= 1:
      raise InteractionError(
        "bad_discount", f"discount must be in [0, 1], got {discount!r}"
      )
    returns, later = {}, 0.0
    for interaction in reversed(self.interactions):
      later = (interaction.reward or 0.0) + float(discount) * later
      returns[interaction.id] = later
    return returns


class SessionStore:
  """Sessions by id and key.

  The next `sweep` ends a session that was idle for `timeout_s`, and drops an
  ended one that was. All sessions held count against `max_sessions`.
  """

  def __init__(
    self,
    renderer: choice.AnyRenderer,
    max_sessions: int = 256,
    timeout_s: float = 3600.0,
    max_interactions: int = 1024,
    clock: Callable[[], float] = time.monotonic,
    sampling: session_sampling.SessionSampling = _DEFAULT_SAMPLING,
  ):
    self.sampling = sampling
    if min(max_sessions, max_interactions) < 1 or not timeout_s > 0:
      limits = f"{max_sessions=}, {max_interactions=}, {timeout_s=}"
      raise ValueError(f"limits must be positive, got {limits}")
    self._new_session = functools.partial(
      ServedSession, renderer, max_interactions=max_interactions, clock=clock
    )
    self._max_sessions = max_sessions
    self._timeout_s = timeout_s
    self._clock = clock
    self._sessions: dict[str, ServedSession] = {}
    self._by_key: dict[str, ServedSession] = {}
    self._by_request: dict[str, ServedSession] = {}
    self._request_of: dict[str, str] = {}

  def __len__(self) -> int:
    return len(self._sessions)

  @property
  def free(self) -> int:
    """Number of sessions that may still be opened."""
    return max(0, self._max_sessions - len(self))

  def start(
    self,
    task_id: str = "",
    request: str = "",
    sampling: session_sampling.SessionSampling | None = None,
  ) -> ServedSession:
    """Opens a session with an id and a key that cannot be guessed.

    Args:
      task_id: The client's id of the task.
      request: The client's name for this call: as long as the session is in the
        store, another call with it returns the same session. "" is not a name.
      sampling: The distribution of its trainable tokens; None: the store's.
    """
    if (existing := self._by_request.get(request)) is not None:
      if existing.task_id != task_id:
        raise InteractionError(
          "request_differs",
          f"the same request started a session of task {existing.task_id!r},"
          f" not of {task_id!r}; send another Idempotency-Key",
        )
      return existing
    if len(self) >= self._max_sessions:
      raise InteractionError(
        "capacity",
        f"{len(self)} sessions are held, no more are accepted; drop ended"
        " ones, or wait",
      )
    session = self._new_session(
      secrets.token_urlsafe(18),
      KEY_PREFIX + secrets.token_urlsafe(32),
      task_id,
      sampling=sampling or self.sampling,
    )
    self._sessions[session.id] = self._by_key[session.key] = session
    if request:
      self._by_request[request] = session
      self._request_of[session.id] = request
    return session

  def get(self, session_id: str) -> ServedSession:
    if session_id not in self._sessions:
      raise InteractionError(
        "unknown_session",
        f"no session {session_id!r} is held any more; start another one",
      )
    return self._sessions[session_id]

  def of_tasks(self, prefix: str) -> list[ServedSession]:
    """Sessions held whose task's id begins so."""
    return [
      session
      for session in self._sessions.values()
      if session.task_id.startswith(prefix)
    ]

  def by_key(self, key: str) -> ServedSession:
    if key not in self._by_key:  # A key is a secret: not in the error.
      raise InteractionError("unknown_session", "no session has this key")
    return self._by_key[key]

  def end(self, session_id: str) -> None:
    self.get(session_id).end()

  def drop(self, session_id: str) -> None:
    """Ends and forgets a session. Unknown ids are fine."""
    session = self._sessions.pop(session_id, None)
    if session is not None:
      session.end()
      del self._by_key[session.key]
      self._by_request.pop(self._request_of.pop(session_id, ""), None)

  def sweep(self, now: float | None = None) -> list[str]:
    """Ends idle sessions, drops ended ones; returns the ids it ended."""
    now = self._clock() if now is None else now
    idle = lambda s: not s.busy and now - s.last_active >= self._timeout_s
    ended = []
    for session in list(filter(idle, self._sessions.values())):
      if session.ended:
        self.drop(session.id)
      else:
        session.end()
        session.last_active = now
        ended.append(session.id)
    return ended


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
  """Turns what a request's messages raise into `InteractionError`."""
  try:
    yield
  except (KeyError, RecursionError, TypeError, ValueError) as error:
    raise InteractionError(
      "bad_message", f"the request cannot be rendered: {error}"
    ) from error
