"""Defines the turns of a session, finds the one that a request continues, and
exports them as training sequences.

Each request of an agent with its answer is an `Interaction`. One that continues
another shares its tokens: its prompt is that one's prompt, the sampled ids and
the renderer's bridge.

Promises: sampled ids are never re-tokenised; each sampled token is trainable in
exactly one of an export's sequences, or in none where it was drawn from another
distribution than the session's; an `Exporter` is a snapshot, so a thread may
put sequences together while the session continues; a history is found by
reading each of its messages once, and a sequence by reading its bytes once,
however many are stored.

T = tokens of a sequence, S = tokens sampled in an interaction.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory

from agent_services import tensor_rows

Message = trajectory.Message
TokenPrompt = policy_client.TokenPrompt
Completion = policy_client.Completion
STYLES = ("individual", "concat")
_ANY = object()

Key = tuple[tuple, "tuple[str, ...] | None"]
"""A message by value: the parts that renderers read, and the ids of its calls
or of the call that it answers; None, where one is missing, matches any ids."""


class InteractionError(ValueError):
  """A refused call, which has changed nothing.

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
  """A rendered request, for any number of answers (n > 1)."""

  session_id: str
  before: Interaction | None  # The one it extends; None starts a chain.
  # Its additions to the messages of `before`, the echo of its answer first, and
  # to its tokens; offsets of images count from the start of `extension`.
  new_messages: tuple[Message, ...]
  extension: TokenPrompt
  _path: tuple[Key, ...] = dataclasses.field(default=(), repr=False)
  _raw: bool = False  # Of a request without messages.
  # Text of the client's that the answer begins with, not sampled here; and the
  # node of the messages before it, where it is not at the end of `_path`.
  _prefix: str = ""
  _node_before: Any = dataclasses.field(default=None, repr=False)

  @property
  def parent(self) -> str | None:
    return self.before.id if self.before else None

  @property
  def ancestors(self) -> tuple[Interaction, ...]:
    """The chain of interactions, from its root to `before`."""
    chain, at = [], self.before
    while at is not None:
      chain.append(at)
      at = at.before
    return tuple(reversed(chain))

  @property
  def messages(self) -> tuple[Message, ...]:
    """Snapshots of the whole request."""
    chain = (*self.ancestors, self)
    return tuple(m for request in chain for m in request.new_messages)

  @property
  def prompt(self) -> TokenPrompt:
    """The whole token prompt, concatenated at each call."""
    return _join(self.ancestors, self.extension)

  @property
  def num_reused(self) -> int:
    """The number of first tokens that earlier turns read or sampled."""
    return sum(i.num_tokens for i in self.ancestors)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Interaction(PendingPrompt):
  """A request and the policy's completion."""

  id: str
  index: int  # Its place in the session's order of creation.
  completion: Completion
  text: str  # `completion` decoded, without the end-of-turn token.
  answer: Message  # The assistant message that the client received.
  closed: bool  # `completion` ends with a stop token.
  created: float  # Seconds, by the session's clock.
  sampling: Mapping[str, float]  # `sampling_rule.FIELDS` of its tokens.
  untrained: str = ""  # Why its tokens are not trainable; "" when they are.
  reward: float | None = None  # When the session returned this object.
  _node: Any = dataclasses.field(repr=False)  # None without messages.

  @property
  def whole_text(self) -> str:
    """Text of the assistant's message: what it begins with, then `text`."""
    return self._prefix + self.text

  @property
  def num_tokens(self) -> int:
    """Tokens that it adds to its chain, read and sampled."""
    return len(self.extension) + len(self.completion.tokens)


def _join(chain: Sequence[Interaction], last: TokenPrompt) -> TokenPrompt:
  """Returns the tokens and images of `chain`, then those of `last`."""
  parts, images, at = [], [], 0
  for interaction in chain:
    parts += [interaction.extension.tokens, interaction.completion.tokens]
    images += [span.shifted(at) for span in interaction.extension.images]
    at += interaction.num_tokens
  images += [span.shifted(at) for span in last.images]
  return TokenPrompt(np.concatenate([*parts, last.tokens]), tuple(images))


# --- histories of messages ----------------------------------------------------


class Node:
  """A history of messages by value, with the edges by which requests continued
  it.

  An answer has a node of its own, which only equal answers share. The message
  that was sent and the sampled text both lead to it, so that a continuation
  follows the sampled tokens, however the client spells the answer.
  """

  __slots__ = ("key", "interaction", "_children", "_edges")

  def __init__(self, key: Key | None):
    self.key = key
    self.interaction: Interaction | None = None  # The newest answer's.
    self._children: dict[tuple[Key, Key | None], Node] = {}
    self._edges: dict[tuple[tuple, Any], list[Node]] = {}

  def child(self, key: Key, raw: Key | None = None) -> Node:
    """Returns the node after a message, or after an answer whose sampled text
    is `raw`."""
    if (key, raw) not in self._children:
      node = self._children[key, raw] = Node(key)
      for value, ids in {key[0]: key, (raw or key)[0]: raw or key}.values():
        self._edges.setdefault((value, ids), []).append(node)
        self._edges.setdefault((value, _ANY), []).append(node)
    return self._children[key, raw]

  def follow(self, key: Key) -> list[Node]:
    """Returns the nodes that a message may lead to."""
    value, ids = key
    if ids is None:
      return self._edges.get((value, _ANY), [])
    exact = self._edges.get((value, ids), [])
    return exact + self._edges.get((value, None), [])


def read_all(
  messages: Sequence[Message], tools: Sequence[Any] | None
) -> tuple[list[tuple[Message, Key]], tuple[Key, ...]]:
  """Returns snapshots of the messages with their keys, and the path of keys.

  The path begins with a key of the tools, as histories with other tools do not
  continue one another.
  """
  if not messages:
    raise ValueError("messages must not be empty")
  snapshots = [read(m, f"messages[{i}]") for i, m in enumerate(messages)]
  shown = json.dumps(list(tools or ()), sort_keys=True)
  return snapshots, ((("tools", shown), None), *(key for _, key in snapshots))


def read(message: Message, where: str) -> tuple[Message, Key]:
  """Returns a snapshot of a message, calls in OpenAI's form, and its key."""
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
    value = tuple(_call_key(**call["function"]) for call in calls)
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


def _call_key(name: str, arguments: str) -> tuple[str, str, str]:
  try:
    return name, "json", json.dumps(json_text.parse(arguments), sort_keys=True)
  except ValueError:  # Not JSON; equal only as text.
    return name, "text", arguments


# --- exports ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exported:
  """A training sequence. Its `turn_ids` are interactions' `index`es."""

  id: str  # Of the interaction that it ends with.
  reward: float  # Of that interaction.
  sequence: trajectory.TokenSequence
  trained: tuple[str, ...]  # Ids of the interactions trainable in it.
  # Those whose tokens stand in this sequence first, trainable or not.
  new: tuple[Interaction, ...] = ()

  @property
  def untrained_tokens(self) -> int:
    """Sampled tokens that are trainable in no sequence."""
    return sum(len(i.completion.tokens) for i in self.new if i.untrained)


@dataclasses.dataclass(frozen=True, eq=False)
class Exporter:
  """Training sequences in order of creation, one at a time.

  "individual" yields one an interaction, which trains its own completion.
  "concat" yields one for each interaction that no other extends, from its root
  on; a completion that several share trains in the first only, with the reward
  of that one's end. An interaction that is `untrained` trains in none.

  Attributes:
    interactions: Interactions of a session.
    rewards: Reward of each interaction, by id.
    style: One of `STYLES`.
  """

  interactions: tuple[Interaction, ...]
  rewards: Mapping[str, float]
  style: str

  def __iter__(self) -> Iterator[Exported]:
    concat = self.style == "concat"
    extended = {i.parent for i in self.interactions}
    remaining = {i.id for i in self.interactions}
    for last in self.interactions:
      if concat and last.id in extended:
        continue
      chain = (*last.ancestors, last)
      # A leaf is in no other chain, so each sequence has something new.
      own = chain if concat else (last,)
      new = tuple(i for i in own if i.id in remaining)
      remaining.difference_update(i.id for i in new)
      trained = tuple(i.id for i in new if not i.untrained)
      sequence = _sequence(chain, trained)
      yield Exported(last.id, self.rewards[last.id], sequence, trained, new)


def to_tensor_dict(
  exported: Exported,
  multi_modal: Callable[[Sequence[trajectory.ImageSpan]], Any] | None = None,
) -> dict[str, Any]:
  """Returns a sequence as AReaL's batch of one row.

  input_ids, loss_mask, versions int32[1, T], logprobs float32[1, T],
  attention_mask bool[1, T], rewards float32[1], and multi_modal_input: a list
  with the {pixel_values, image_grid_thw} that `multi_modal` makes of the
  images, {} without images, lest another row's take its place in a batch.
  ValueError: images, but no `multi_modal`.
  """
  sequence = exported.sequence
  if sequence.images and multi_modal is None:
    raise ValueError(f"{exported.id!r} has images; pass multi_modal for them")
  return tensor_rows.row_of(sequence, exported.reward, multi_modal)


def _sequence(
  chain: Sequence[Interaction], trained: Sequence[str]
) -> trajectory.TokenSequence:
  last, prompt = chain[-1].completion, chain[-1].prompt
  own = [i.completion for i in chain if i.id in trained]
  runs = [(len(i.extension), len(i.completion.tokens)) for i in chain]
  whose = np.repeat(np.arange(2 * len(chain)), np.ravel(runs))
  mask = np.ravel([(False, i.id in trained) for i in chain])[whose]
  logprobs = np.zeros(len(mask), np.float32)
  versions = np.full(len(mask), -1, np.int32)
  entropies = None
  if own:
    logprobs[mask] = np.concatenate([c.logprobs for c in own])
    versions[mask] = np.concatenate([c.versions for c in own])
  if own and all(c.entropies is not None for c in own):
    entropies = np.zeros(len(mask), np.float32)
    entropies[mask] = np.concatenate([c.entropies for c in own])
  all_T = np.concatenate([prompt.tokens, last.tokens])
  turns = np.array([i.index for i in chain], np.int32)[whose // 2]
  fields = mask, logprobs, versions, turns, prompt.images, entropies
  return trajectory.TokenSequence(all_T, *fields)
