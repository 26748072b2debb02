"""What an outside agent and the policy said to each other, token by token.

The store behind an OpenAI-compatible proxy. A `Session` is one episode of an
agent that runs elsewhere; each request with its answer is an `Interaction`. A
request that begins with the messages of an earlier one and its answer extends
it: its prompt is that prompt, the ids that were sampled and the renderer's
bridge. Any other request is rendered anew and starts a chain of its own. So
does one that comes without messages, as text or tokens: it extends the
interaction whose text, or whose tokens, it begins with.

Promises: sampled ids are never re-tokenised, and each is trainable in exactly
one exported sequence, whatever the agent resampled, rewrote or interleaved; a
refused call changes nothing; finding the parent looks at each message once,
however many interactions there are (more only where ids cannot tell equal
answers apart); memory is bounded and grows with what a request adds.

Does not: speak HTTP, sample, parse tool calls, write tools into messages, hold
pixels, import JAX, or lock: it belongs to one event loop. S = tokens sampled
in an interaction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import numbers
import secrets
import time
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import completion_checks
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.serving import exports
from tunix.rl.multi_turn.serving import prefixes

Message = trajectory.Message
TokenPrompt = policy_client.TokenPrompt
Completion = policy_client.Completion


class InteractionError(ValueError):
  """A call that was refused and has changed nothing.

  `code`: unknown_session, unknown_interaction, unknown_prompt (of another
  session), duplicate_interaction, session_ended, session_full, capacity and
  request_differs (of the store), reward_already_discounted, or bad_ message,
  completion, reward, discount, style.
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
  _path: tuple[_Key, ...] = dataclasses.field(default=(), repr=False)
  # Of a request without messages: its text up to the sampled one, None where
  # it came as tokens.
  _raw: bool = False
  _text: prefixes.Running | None = dataclasses.field(default=None, repr=False)

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
  _node: _Node | None = dataclasses.field(repr=False)  # None without messages.
  # Up to its end. Tokens with images say too little of what was seen.
  _all_tokens: prefixes.Running | None = dataclasses.field(repr=False)
  _all_text: prefixes.Running | None = dataclasses.field(repr=False)

  @property
  def num_tokens(self) -> int:
    """Tokens that it added to its chain, read and sampled."""
    return len(self.extension) + len(self.completion.tokens)


class Session:
  """One episode; see the module docstring. A `SessionStore` makes them.

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
    self._by_tokens = prefixes.Prefixes[Interaction]()
    self._by_text = prefixes.Prefixes[tuple[Interaction, prefixes.Running]]()
    self._reserved = 0
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

  @contextlib.contextmanager
  def reserve(self, count: int) -> Iterator[None]:
    """Keeps room for so many answers, for those that are being sampled."""
    self._check_open()
    free = self._max_interactions - len(self._interactions) - self._reserved
    if count > free:
      raise InteractionError(
          "session_full",
          f"session {self.id!r} has room for {max(0, free)} more answers of"
          f" {self._max_interactions}, {count} are asked for; go on in a new"
          " session",
      )
    self._reserved += count
    try:
      yield
    finally:
      self._reserved -= count

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

  def prompt_tokens(self, tokens: Sequence[int]) -> PendingPrompt:
    """A request that is rendered already.

    It extends the interaction with the most tokens, prompt and completion,
    that it begins with; images are those of that one.
    """
    self._check_open()
    tokens_T = np.asarray(tokens, np.int32)
    before, length = self._by_tokens.longest(tokens_T.tobytes())
    extension = TokenPrompt(tokens_T[length // tokens_T.itemsize :])
    self.touch()
    return self._raw_prompt(before, extension)

  def prompt_text(self, text: str) -> PendingPrompt:
    """A request that is rendered as it stands, without a template.

    It extends the interaction with the longest text, prompt and completion as
    sampled or as told, that it begins with: only what follows is tokenised.
    """
    self._check_open()
    data = text.encode()
    found, length = self._by_text.longest(data)
    before, known = found or (None, prefixes.Running())
    new = data[length:].decode()
    extension = TokenPrompt(self._renderer.encode(new))
    self.touch()
    return self._raw_prompt(
        before, extension, known.extended(data[length:])
    )

  def _raw_prompt(
      self,
      before: Interaction | None,
      extension: TokenPrompt,
      text: prefixes.Running | None = None,
  ) -> PendingPrompt:
    return PendingPrompt(
        session_id=self.id,
        before=before,
        new_messages=(),
        extension=extension,
        _raw=True,
        _text=text,
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
    text, closed = completion_checks.read(
        completion, self._renderer, self._renderer.stop_token_ids
    )
    _, raw = _read({"role": "assistant", "content": text}, "text")
    node = None if pending._raw else self._answer_node(pending, said, raw)
    all_text = None
    if pending._text is not None and not closed:  # No text stands for the end.
      all_text = pending._text.extended(text.encode())
    made = Interaction(
        **vars(pending),
        id=secrets.token_urlsafe(18) if id is None else id,
        index=len(self._interactions),
        completion=completion,
        text=text,
        answer=answer,
        closed=closed,
        created=self._clock(),
        _node=node,
        _all_tokens=_all_tokens(pending, completion),
        _all_text=all_text,
    )
    if node is not None:
      node.interaction = made
    if made._all_tokens is not None:
      self._by_tokens.add(made._all_tokens, made)
    if made._all_text is not None:
      self._by_text.add(made._all_text, (made, made._all_text))
      told = answer.get("content")
      # As with messages: a stop string was sampled, and not told.
      if isinstance(told, str) and told and told != text:
        cut = pending._text.extended(told.encode())
        self._by_text.add(cut, (made, cut))
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

  def exporter(
      self, style: str = "individual", discount: float | None = 1.0
  ) -> exports.Exporter:
    """What is here now as training sequences, see `exports.Exporter`.

    `discount` is applied as `apply_reward_discount` would, unless that was
    called before; None gives rewards as they were set, or 0.
    """
    if style not in exports.STYLES:
      raise InteractionError(
          "bad_style", f"style must be 'individual' or 'concat', got {style!r}"
      )
    rewards = {i.id: i.reward or 0.0 for i in self.interactions}
    if discount is not None and not self._discounted:
      rewards = self._returns(discount)
    return exports.Exporter(self.interactions, rewards, style)

  def export(
      self, style: str = "individual", discount: float | None = 1.0
  ) -> list[exports.Exported]:
    """All of what `exporter` gives. Changes nothing."""
    return list(self.exporter(style, discount))

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

  def _answer_node(
      self, pending: PendingPrompt, said: _Key, raw: _Key
  ) -> _Node:
    node = pending.before._node if pending.before else self._root
    for key in pending._path:
      node = node.child(key)
    return node.child(said, raw)

  def _check_open(self) -> None:
    self._check_not_discounted()
    if self.ended:
      raise InteractionError("session_ended", f"session {self.id!r} has ended")
    if len(self._interactions) >= self._max_interactions:
      raise InteractionError(
          "session_full",
          f"session {self.id!r} is full; end it or raise max_interactions",
      )

  def _check_not_discounted(self) -> None:
    if self._discounted:
      raise InteractionError(
          "reward_already_discounted",
          f"rewards of session {self.id!r} are final; set all, discount once",
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


def _join(chain: Sequence[Interaction], last: TokenPrompt) -> TokenPrompt:
  """What `chain` read and sampled, then `last`."""
  parts, images, at = [], [], 0
  for found in chain:
    parts += [found.extension.tokens, found.completion.tokens]
    images += [span.shifted(at) for span in found.extension.images]
    at += found.num_tokens
  images += [span.shifted(at) for span in last.images]
  return TokenPrompt(np.concatenate([*parts, last.tokens]), tuple(images))


def _all_tokens(
    pending: PendingPrompt, completion: Completion
) -> prefixes.Running | None:
  """The hash of prompt and completion; None where there are images."""
  if pending.before is not None:
    before = pending.before._all_tokens
  else:
    before = prefixes.Running()
  if before is None or pending.extension.images:
    return None
  return before.extended(
      pending.extension.tokens.tobytes(), completion.tokens.tobytes()
  )


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
