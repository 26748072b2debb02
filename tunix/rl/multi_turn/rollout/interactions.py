"""What an outside agent and the policy said to each other, token by token.

The store behind an OpenAI-compatible proxy. A `Session` is one episode of an
agent that runs elsewhere; each request with its answer is an `Interaction`. A
request that begins with the messages of an earlier one and its answer extends
it: its prompt is that prompt, the ids that were sampled and the renderer's
bridge. Any other request is rendered anew and starts a chain of its own.

Promises: sampled ids are never re-tokenised, and each is trainable in exactly
one exported sequence, whatever the agent resampled, rewrote or interleaved; a
refused call changes nothing; finding the parent looks at each message once,
however many interactions there are (more only where ids cannot tell equal
answers apart); memory is bounded and grows with what a request adds.

Does not: speak HTTP, sample, parse tool calls, write tools into messages, hold
pixels, import JAX, or lock: it belongs to one event loop. T = tokens of a
sequence, S = tokens sampled in an interaction.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
import secrets
import time
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn import trajectory

Message = trajectory.Message
TokenPrompt = policy_client.TokenPrompt
Completion = policy_client.Completion


KEY_PREFIX = "tunix-"
"""What sessions' keys begin with, to be told from a server's token."""


class InteractionError(ValueError):
  """A call that was refused and has changed nothing.

  `code`: unknown_session, unknown_interaction, unknown_prompt (of another
  session), duplicate_interaction, session_ended, capacity,
  reward_already_discounted, or bad_ message, completion, reward, discount,
  style.
  """

  def __init__(self, code: str, message: str):
    super().__init__(message)
    self.code = code


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PendingPrompt:
  """A request, rendered. It serves for any number of answers (n > 1)."""

  session_id: str
  before: Interaction | None  # What it extends; None starts a chain.
  # What it adds to the messages of `before`, the echo of its answer first, and
  # to its tokens; offsets of images count from the start of `extension`.
  new_messages: tuple[Message, ...]
  extension: TokenPrompt
  _path: tuple[_Key, ...] = dataclasses.field(repr=False)

  @property
  def parent(self) -> str | None:
    return self.before.id if self.before else None

  @property
  def ancestors(self) -> tuple[Interaction, ...]:
    """From the root of the chain to `before`."""
    found, at = [], self.before
    while at is not None:
      found.append(at)
      at = at.before
    return tuple(reversed(found))

  @property
  def messages(self) -> tuple[Message, ...]:
    """Snapshots of the whole request."""
    asked = (*self.ancestors, self)
    return tuple(m for request in asked for m in request.new_messages)

  @property
  def prompt(self) -> TokenPrompt:
    """The whole token prompt. Put together at each call, not held."""
    return _join(self.ancestors, self.extension)

  @property
  def num_reused(self) -> int:
    """How many first tokens of the prompt were read or sampled before."""
    return sum(i.num_tokens for i in self.ancestors)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Interaction(PendingPrompt):
  """A request and what the policy sampled for it."""

  id: str
  index: int  # Its place in the session's order of creation.
  completion: Completion
  text: str  # `completion` decoded, without the end-of-turn token.
  answer: Message  # The assistant message that the client was told.
  closed: bool  # `completion` ends with a stop token.
  created: float  # Seconds, by the session's clock.
  reward: float | None = None  # As of when the session gave this object out.
  _node: _Node = dataclasses.field(repr=False)

  @property
  def num_tokens(self) -> int:
    """Tokens that it added to its chain, read and sampled."""
    return len(self.extension) + len(self.completion.tokens)


@dataclasses.dataclass(frozen=True)
class Exported:
  """A training sequence. Its `turn_ids` are interactions' `index`es."""

  id: str  # Of the interaction that it ends with.
  reward: float  # Of that interaction.
  sequence: trajectory.TokenSequence
  trained: tuple[str, ...]  # Ids of the interactions trainable in it.


class Session:
  """One episode; see the module docstring. `SessionStore` makes them.

  Once `ended`, prompts and answers are refused; the rest stays possible.
  `last_active` is when it was last prompted, answered or rewarded, in seconds.
  """

  def __init__(
      self,
      renderer: Any,
      session_id: str,
      key: str = "",
      task_id: str = "",
      max_interactions: int = 1024,
      clock: Callable[[], float] = time.monotonic,
  ):
    """`renderer` is one of `parser/renderer`: render, bridge, decode."""
    self.id, self.key, self.task_id = session_id, key, task_id
    self.ended = False
    self.busy = 0  # Requests being answered.
    self._renderer = renderer
    self._max_interactions = max_interactions
    self._clock = clock
    self._root = _Node(None)
    self._interactions: dict[str, Interaction] = {}
    self._discounted = False
    self.touch()

  @property
  def interactions(self) -> tuple[Interaction, ...]:
    """In order of creation."""
    return tuple(self._interactions.values())

  def get(self, interaction_id: str | None = None) -> Interaction:
    """The interaction of that id; the last one for None."""
    if interaction_id is None:
      interaction_id = next(reversed(self._interactions), None)
    if interaction_id not in self._interactions:
      raise InteractionError(
          "unknown_interaction",
          f"session {self.id!r} has given no answer {interaction_id!r}",
      )
    return self._interactions[interaction_id]

  def touch(self) -> None:
    """Puts off the expiry; for answers that are longer in the making."""
    self.last_active = self._clock()

  def end(self) -> None:
    self.ended = True
    self.touch()

  def prompt(
      self, messages: Sequence[Message], tools: Sequence[Any] | None = None
  ) -> PendingPrompt:
    """Renders a request.

    It extends the deepest interaction whose messages and answer `messages`
    begin with; of equally deep ones that whose answer was told as it stands in
    `messages`, then the newest. Only one with the same `tools`: what the
    policy is to read of them, the caller has written into `messages`.
    """
    self._check_open()
    messages = list(messages)
    try:
      if not messages:
        raise ValueError("messages must not be empty")
      read = [_read(m, f"messages[{i}]") for i, m in enumerate(messages)]
      told_of = json.dumps(list(tools or ()), sort_keys=True)
      keys = (("tools", told_of), None), *(key for _, key in read)
      before, depth = self._find(keys)
      if before is None:
        extension = self._renderer.render(messages, add_generation_prompt=True)
      else:
        extension = self._renderer.bridge(
            messages[depth:], last_sampled_is_eot=before.closed
        )
    except (KeyError, RecursionError, TypeError, ValueError) as error:
      raise InteractionError(
          "bad_message", f"the request cannot be rendered: {error}"
      ) from error
    self.touch()
    return PendingPrompt(
        session_id=self.id,
        before=before,
        new_messages=tuple(copy for copy, _ in read[max(depth - 1, 0) :]),
        extension=extension,
        _path=keys if before is None else keys[depth + 1 :],
    )

  def add(
      self,
      pending: PendingPrompt,
      completion: Completion,
      *,
      assistant_message: Message,
      id: str | None = None,  # pylint: disable=redefined-builtin
  ) -> Interaction:
    """Records an answer to a request of this session.

    `assistant_message` is what the client is told: a request that holds it, or
    the sampled text as its content, extends this interaction. An `id` is made
    up when None.
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
    answer, said = _read(assistant_message, "assistant_message")
    if (role := answer["role"]) != "assistant":
      raise InteractionError("bad_message", f"role of the answer: {role!r}")
    tokens_S = completion.tokens
    closed = int(tokens_S[-1]) in self._renderer.stop_token_ids
    text = self._renderer.decode(tokens_S[:-1] if closed else tokens_S)
    _, raw = _read({"role": "assistant", "content": text}, "text")
    node = pending.before._node if pending.before else self._root
    for key in pending._path:
      node = node.child(key)
    node = node.child(said, raw)
    node.interaction = made = Interaction(
        **vars(pending),
        id=secrets.token_urlsafe(18) if id is None else id,
        index=len(self._interactions),
        completion=completion,
        text=text,
        answer=answer,
        closed=closed,
        created=self._clock(),
        _node=node,
    )
    self._interactions[made.id] = made
    self.touch()
    return made

  def set_reward(self, interaction_id: str | None, reward: float) -> None:
    """Sets or replaces a reward; None is the last interaction's."""
    self._check_not_discounted()
    found = self.get(interaction_id)
    # It travels as float32, where a larger one is infinite.
    if not isinstance(reward, numbers.Real) or not abs(reward) < 3e38:
      raise InteractionError(
          "bad_reward", f"reward must be a finite number, got {reward!r}"
      )
    self._replace_rewards({found.id: float(reward)})
    self.touch()

  def apply_reward_discount(self, discount: float) -> None:
    """Spreads rewards back over the order of creation, once and for all.

    R_t = r_t + discount * R_{t+1}, r_t being 0 where unset. Answers cannot be
    added any more.
    """
    self._check_not_discounted()
    self._replace_rewards(self._returns(discount))
    self._discounted = True

  def export(
      self, style: str = "individual", discount: float | None = 1.0
  ) -> list[Exported]:
    """Training sequences in order of creation. Changes nothing.

    "individual" is one an interaction, which trains its own completion.
    "concat" is one for each that nothing extends, from its root on; what
    several share trains in the first only, with the reward of that one's end.
    `discount` is applied as `apply_reward_discount` would, unless that was
    called before; None gives rewards as they were set, or 0.
    """
    if style not in ("individual", "concat"):
      raise InteractionError(
          "bad_style", f"style must be 'individual' or 'concat', got {style!r}"
      )
    rewards = {i.id: i.reward or 0.0 for i in self.interactions}
    if discount is not None and not self._discounted:
      rewards = self._returns(discount)
    extended = {i.parent for i in self.interactions}
    untrained = set(self._interactions)
    exported = []
    for last in self.interactions:
      if style == "concat" and last.id in extended:
        continue
      chain = (*last.ancestors, last)
      # Nobody else's chain holds a leaf: each sequence trains something.
      own = chain if style == "concat" else (last,)
      trained = tuple(i.id for i in own if i.id in untrained)
      untrained.difference_update(trained)
      sequence = _sequence(chain, trained)
      exported.append(Exported(last.id, rewards[last.id], sequence, trained))
    return exported

  def _find(self, keys: Sequence[_Key]) -> tuple[Interaction | None, int]:
    """The parent, and how many messages it covers with its answer."""
    nodes, answers, depth = [self._root], [], 0
    for at, key in enumerate(keys):
      nodes = [after for node in nodes for after in node.follow(key)]
      if found := [node for node in nodes if node.interaction]:
        answers, depth = found, at
    if not answers:
      return None, 0
    value, _ = given = keys[depth]
    # Told so; told so but for ids left out; the newest.
    rank = lambda n: (n.key == given, n.key[0] == value, n.interaction.index)
    return max(answers, key=rank).interaction, depth

  def _check_open(self) -> None:
    self._check_not_discounted()
    if self.ended:
      raise InteractionError("session_ended", f"session {self.id!r} has ended")
    if len(self._interactions) >= self._max_interactions:
      raise InteractionError(
          "capacity",
          f"session {self.id!r} is full; end it or raise max_interactions",
      )

  def _check_not_discounted(self) -> None:
    if self._discounted:
      raise InteractionError(
          "reward_already_discounted",
          f"rewards of session {self.id!r} are final; set all, discount once",
      )

  def _check_completion(self, completion: Completion) -> None:
    tokens_S, image_id = completion.tokens, self._renderer.image_token_id
    ones, zeros = np.ones(len(tokens_S)), np.zeros(len(tokens_S))
    try:
      if not len(tokens_S):
        raise ValueError("no token was sampled; record answers only")
      if image_id is not None and np.any(tokens_S == image_id):
        raise ValueError(f"placeholder id {image_id}: ban it in the sampler")
      trajectory.TokenSequence(
          tokens_S, ones, completion.logprobs, completion.versions, zeros
      )
    except ValueError as error:
      raise InteractionError(
          "bad_completion", f"completion cannot be trained on: {error}"
      ) from error

  def _replace_rewards(self, rewards: Mapping[str, float]) -> None:
    for key, reward in rewards.items():
      found = self._interactions[key]
      self._interactions[key] = dataclasses.replace(found, reward=reward)

  def _returns(self, discount: float) -> dict[str, float]:
    if not isinstance(discount, numbers.Real) or not 0 <= discount <= 1:
      raise InteractionError(
          "bad_discount", f"discount must be in [0, 1], got {discount!r}"
      )
    returns, later = {}, 0.0
    for found in reversed(self.interactions):
      later = (found.reward or 0.0) + float(discount) * later
      returns[found.id] = later
    return returns


class SessionStore:
  """The sessions of a proxy.

  Idle for `timeout_s`, a session is ended by the next `sweep`; ended and idle
  for that long, it is dropped. All that are held count as `max_sessions`.
  """

  def __init__(
      self,
      renderer: Any,
      max_sessions: int = 256,
      timeout_s: float = 3600.0,
      max_interactions: int = 1024,
      clock: Callable[[], float] = time.monotonic,
  ):
    if min(max_sessions, max_interactions) < 1 or not timeout_s > 0:
      limits = f"{max_sessions=}, {max_interactions=}, {timeout_s=}"
      raise ValueError(f"limits must be positive, got {limits}")
    self._new_session = functools.partial(
        Session, renderer, max_interactions=max_interactions, clock=clock
    )
    self._max_sessions = max_sessions
    self._timeout_s = timeout_s
    self._clock = clock
    self._sessions: dict[str, Session] = {}
    self._by_key: dict[str, Session] = {}

  def __len__(self) -> int:
    return len(self._sessions)

  def start(self, task_id: str = "") -> Session:
    """A session whose id and key nobody can guess."""
    if len(self) >= self._max_sessions:
      raise InteractionError(
          "capacity", f"{len(self)} sessions are held; drop ended ones or wait"
      )
    session = self._new_session(
        secrets.token_urlsafe(18),
        KEY_PREFIX + secrets.token_urlsafe(32),
        task_id,
    )
    self._sessions[session.id] = self._by_key[session.key] = session
    return session

  def get(self, session_id: str) -> Session:
    if session_id not in self._sessions:
      raise InteractionError(
          "unknown_session", f"no session {session_id!r}, or not any more"
      )
    return self._sessions[session_id]

  def by_key(self, key: str) -> Session:
    if key not in self._by_key:  # What may be a secret is not repeated.
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

  def sweep(self, now: float | None = None) -> list[str]:
    """Ends, later drops, what was idle; returns the ids that it ended."""
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


def to_tensor_dict(
    exported: Exported,
    multi_modal: Callable[[Sequence[trajectory.ImageSpan]], Any] | None = None,
) -> dict[str, Any]:
  """A sequence as AReaL's batch of one row.

  input_ids, loss_mask, versions int32[1, T], logprobs float32[1, T],
  attention_mask bool[1, T], rewards float32[1], and multi_modal_input: a list
  with the {pixel_values, image_grid_thw} that `multi_modal` makes of the
  images, {} without images, lest another row's take its place in a batch.
  ValueError: images, but no `multi_modal`.
  """
  sequence = exported.sequence
  if sequence.images and multi_modal is None:
    raise ValueError(f"{exported.id!r} has images; pass multi_modal for them")
  pictures = [multi_modal(sequence.images)] if sequence.images else [{}]
  return {
      "input_ids": sequence.tokens[None].copy(),
      "attention_mask": np.ones((1, len(sequence)), np.bool_),
      "loss_mask": sequence.loss_mask[None].astype(np.int32),
      "logprobs": sequence.logprobs[None].copy(),
      "versions": sequence.versions[None].copy(),
      "rewards": np.array([exported.reward], np.float32),
      "multi_modal_input": pictures,
  }


def _join(chain: Sequence[Interaction], last: TokenPrompt) -> TokenPrompt:
  """What `chain` read and sampled, then `last`."""
  parts, images, at = [], [], 0
  for found in chain:
    parts += [found.extension.tokens, found.completion.tokens]
    images += [span.shifted(at) for span in found.extension.images]
    at += found.num_tokens
  images += [span.shifted(at) for span in last.images]
  return TokenPrompt(np.concatenate([*parts, last.tokens]), tuple(images))


def _sequence(
    chain: Sequence[Interaction], trained: Sequence[str]
) -> trajectory.TokenSequence:
  last, prompt = chain[-1].completion, chain[-1].prompt
  own = [i.completion for i in chain if i.id in trained]
  runs = [(len(i.extension), len(i.completion.tokens)) for i in chain]
  whose = np.repeat(np.arange(2 * len(chain)), np.ravel(runs))
  mask = np.ravel([(False, i.id in trained) for i in chain])[whose]
  logprobs = np.zeros(len(mask), np.float32)
  logprobs[mask] = np.concatenate([c.logprobs for c in own])
  versions = np.full(len(mask), -1, np.int32)
  versions[mask] = np.concatenate([c.versions for c in own])
  all_T = np.concatenate([prompt.tokens, last.tokens])
  turns = np.array([i.index for i in chain], np.int32)[whose // 2]
  rest = mask, logprobs, versions, turns, prompt.images
  return trajectory.TokenSequence(all_T, *rest)


_Key = tuple[tuple, "tuple[str, ...] | None"]
"""A message by value: what renderers read of it, and the ids of its calls or
of the call that it answers; None, where one is missing, matches any ids."""

_ANY = object()


class _Node:
  """A history, with the edges by which requests went on from it.

  An answer has a node of its own, which only equal answers share. The message
  that the client was told and the sampled text both lead to it: what follows
  hangs below the tokens that it follows, however the client spells them.
  """

  __slots__ = ("key", "interaction", "_children", "_edges")

  def __init__(self, key: _Key | None):
    self.key = key
    self.interaction: Interaction | None = None  # The newest answer's.
    self._children: dict[tuple[_Key, _Key | None], _Node] = {}
    self._edges: dict[tuple[tuple, Any], list[_Node]] = {}

  def child(self, key: _Key, raw: _Key | None = None) -> _Node:
    """After a message, or after an answer whose sampled text is `raw`."""
    if (key, raw) not in self._children:
      made = self._children[key, raw] = _Node(key)
      for value, ids in {key[0]: key, (raw or key)[0]: raw or key}.values():
        self._edges.setdefault((value, ids), []).append(made)
        self._edges.setdefault((value, _ANY), []).append(made)
    return self._children[key, raw]

  def follow(self, key: _Key) -> list[_Node]:
    """The nodes that a message may lead to."""
    value, ids = key
    if ids is None:
      return self._edges.get((value, _ANY), [])
    exact = self._edges.get((value, ids), [])
    return exact + self._edges.get((value, None), [])


def _read(message: Message, where: str) -> tuple[Message, _Key]:
  """A snapshot, calls in OpenAI's form, and the key."""
  try:
    copy = {**message}
    content = copy.get("content") or ""
    if not isinstance(content, str):
      copy["content"] = [{**part} for part in content]
      content = tuple(
          part["text"] if part["type"] == "text" else (part["image"],)
          for part in content
      )
      if len(content) == 1 and isinstance(content[0], str):
        content = content[0]
    calls = [_call(call) for call in copy.get("tool_calls") or ()]
    if calls:
      copy["tool_calls"] = calls
    value = tuple(_asked(**call["function"]) for call in calls)
    ids = tuple(call["id"] for call in calls) or (copy.get("tool_call_id"),)
    key = (copy["role"], content, value), ids if all(ids) else None
    hash(key)
  except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as e:
    raise InteractionError(
        "bad_message",
        f"{where} is not one of text, ImageRefs and tool calls: {e!r}",
    ) from e
  return copy, key


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
  function = call.get("function") or call
  arguments = function["arguments"]
  if not isinstance(arguments, str):  # As renderers write them.
    arguments = json.dumps(arguments, ensure_ascii=False)
  function = {"name": function["name"], "arguments": arguments}
  return {"id": call.get("id"), "type": "function", "function": function}


def _asked(name: str, arguments: str) -> tuple[str, str, str]:
  try:
    return name, "json", json.dumps(json.loads(arguments), sort_keys=True)
  except (RecursionError, ValueError):  # Not JSON; equal only as text.
    return name, "text", arguments
