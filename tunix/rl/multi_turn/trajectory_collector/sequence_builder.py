"""Turns the turns of an episode into token-exact training sequences.

The builder keeps the tokens that the policy has read and written so far. While
the agent's messages extend them, the next prompt is the old tokens plus the
renderer's bridge for the new messages; sampled ids are never re-tokenised.
When the agent has changed anything that was already rendered (a sliding
window of screenshots, a summary, a rewritten answer), a new sequence starts.

Promises: every sampled token is trainable in exactly one sequence; the prompt
of a turn begins with the whole sequence of the turn before, unless a new
sequence starts; the work of a turn is proportional to its new tokens (plus one
comparison of pointers a message).

Does not: sample, tokenise, or hold pixels.

Axis names: T = tokens of a sequence, S = tokens sampled in a turn.
"""

from __future__ import annotations

from typing import Any, Protocol, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.trajectory_collector import completion_checks

Message = trajectory.Message
SamplingContractError = completion_checks.SamplingContractError
TokenPrompt = policy_client.TokenPrompt


class Renderer(Protocol):
  """Renders messages to tokens; see `parser/renderer`."""

  stop_token_ids: tuple[int, ...]
  image_token_id: int | None

  def render(
    self, messages: Sequence[Message], add_generation_prompt: bool = True
  ) -> TokenPrompt:
    """Tokens of a whole conversation."""
    ...

  def bridge(
    self, new_messages: Sequence[Message], *, last_sampled_is_eot: bool
  ) -> TokenPrompt:
    """Tokens between a sampled turn and the next one's first token."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of sampled ids."""
    ...


def _snapshot(message: Message) -> Message:
  """A copy that an in-place change of `message` or its parts cannot reach."""
  copy = dict(message)
  content = copy.get("content")
  if isinstance(content, list):
    copy["content"] = [
      dict(part) if isinstance(part, dict) else part for part in content
    ]
  return copy


def _is_sampled_text(message: Message, text: str) -> bool:
  """Whether the message is the assistant's, with the sampled text."""
  if message.get("role") != "assistant":
    return False
  content = message.get("content")
  if isinstance(content, str):
    return content == text
  if isinstance(content, list) and len(content) == 1:
    part = content[0]
    return (
      isinstance(part, dict)
      and part.get("type") == "text"
      and part.get("text") == text
    )
  return False


class _Growing:
  """One sequence under construction, in arrays that double."""

  def __init__(self, turn: int, capacity: int):
    capacity = max(256, 2 * capacity)
    self.length = 0
    self.first_turn = turn
    self.tokens = np.empty(capacity, np.int32)
    self.mask = np.zeros(capacity, np.bool_)
    self.logprobs = np.zeros(capacity, np.float32)
    self.versions = np.full(capacity, -1, np.int32)
    # None as soon as a completion has none.
    self.entropies: np.ndarray | None = np.zeros(capacity, np.float32)
    self.supports: list[np.ndarray] | None = []  # Of each completion.
    self.turn_ids = np.empty(capacity, np.int32)
    self.images: list[trajectory.ImageSpan] = []
    self.num_sampled = 0

  def _reserve(self, extra: int) -> slice:
    start, end = self.length, self.length + extra
    if end > len(self.tokens):
      capacity = max(end, 2 * len(self.tokens))
      for name, fill in (
        ("tokens", None),
        ("mask", False),
        ("logprobs", 0),
        ("versions", -1),
        ("turn_ids", None),
        ("entropies", 0),
      ):
        old = getattr(self, name)
        if old is None:
          continue
        new = np.empty(capacity, old.dtype)
        new[:start] = old[:start]
        if fill is not None:
          new[start:] = fill
        setattr(self, name, new)
    self.length = end
    return slice(start, end)

  def extend(self, prompt: TokenPrompt, turn: int) -> None:
    start = self.length
    where = self._reserve(len(prompt))
    self.tokens[where] = prompt.tokens
    self.turn_ids[where] = turn
    self.images.extend(span.shifted(start) for span in prompt.images)

  def sample(self, completion: policy_client.Completion, turn: int) -> None:
    where = self._reserve(len(completion.tokens))
    self.tokens[where] = completion.tokens
    self.mask[where] = True
    self.logprobs[where] = completion.logprobs
    self.versions[where] = completion.versions
    if completion.entropies is None:
      self.entropies = None
    elif self.entropies is not None:
      self.entropies[where] = completion.entropies
    if completion.support is None:
      self.supports = None
    elif self.supports is not None:
      self.supports.append(completion.support)
    self.turn_ids[where] = turn
    self.num_sampled += len(completion.tokens)

  def prompt(self) -> TokenPrompt:
    """Returns a view of the tokens so far; later appends do not change it.

    The parts were checked when they were made, so the whole is not checked
    (and copied) again every turn.
    """
    tokens_T = self.tokens[: self.length]
    tokens_T.flags.writeable = False
    prompt = object.__new__(TokenPrompt)
    object.__setattr__(prompt, "tokens", tokens_T)
    object.__setattr__(prompt, "images", tuple(self.images))
    return prompt

  def build(self) -> trajectory.TokenSequence:
    n = self.length
    entropies = self.entropies
    return trajectory.TokenSequence(
      tokens=self.tokens[:n],
      loss_mask=self.mask[:n],
      logprobs=self.logprobs[:n],
      versions=self.versions[:n],
      turn_ids=self.turn_ids[:n],
      images=tuple(self.images),
      entropies=None if entropies is None else entropies[:n],
      support=self._support(),
    )

  def _support(self) -> np.ndarray | None:
    """int32[T, K], K the most that a completion has."""
    if not self.supports:
      return None
    width = max(part.shape[1] for part in self.supports)
    support = np.full((self.length, width), -1, np.int32)
    support[self.mask[: self.length]] = np.concatenate(
      [
        np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1)
        for part in self.supports
      ]
    )
    return support


class SequenceBuilder:
  """Builds the token sequences of one episode; see the module docstring.

  Each turn: `prompt(messages)`, generate, `append(completion)`.
  """

  def __init__(self, renderer: Renderer):
    self._renderer = renderer
    self._stop = frozenset(int(i) for i in renderer.stop_token_ids)
    self._image_token = getattr(renderer, "image_token_id", None)
    self._done: list[_Growing] = []
    self._current: _Growing | None = None
    # The current sequence covers these messages (snapshots), then the text
    # that was sampled on top of them (None before the first sample).
    self._seen: list[Message] = []
    self._text: str | None = None
    self._ended = False
    self._turn = -1
    self._awaiting = False

  @property
  def num_sequences(self) -> int:
    return len(self._done) + (self._current is not None)

  @property
  def num_rewrites(self) -> int:
    """Times that the agent's history did not extend the rendered one."""
    return len(self._done)

  @property
  def num_sampled(self) -> int:
    current = self._current.num_sampled if self._current else 0
    return current + sum(s.num_sampled for s in self._done)

  def prompt(self, messages: Sequence[Message]) -> TokenPrompt:
    """Starts a turn: the token prompt that stands for `messages`.

    Calling it again before `append` (a retried model call) gives the prompt
    of the same turn.
    """
    # 1. No completion came for the last prompt: a retry gets the same prompt;
    #    other messages undo that turn, so that the next one has its number.
    if self._awaiting and self._current is not None:
      if len(messages) == len(self._seen) and self._extends(messages):
        return self._current.prompt()
      self._awaiting = False
      if not self._current.num_sampled:
        self._current = None
        self._seen = []
      self._turn -= 1
    # 2. The sequence grows if the messages begin with those it covers and then
    #    the sampled text, unchanged. The sampled ids stay: encoding their text
    #    again might give others. Only the messages after it are rendered.
    turn = self._turn + 1
    covered = len(self._seen) + 1
    if (
      self._current is not None
      and self._text is not None
      and len(messages) >= covered
      and self._extends(messages)
      and _is_sampled_text(messages[covered - 1], self._text)
    ):
      new = messages[covered:]
      bridge = self._renderer.bridge(new, last_sampled_is_eot=self._ended)
      self._current.extend(bridge, turn)
      self._seen.extend(_snapshot(m) for m in messages[covered - 1 :])
    else:
      # 3. Else the agent has rewritten its history: the sequence ends, with
      #    what it has sampled, and a new one begins with a whole rendering.
      full = self._renderer.render(messages, add_generation_prompt=True)
      if self._current is not None:
        self._done.append(self._current)
      self._current = _Growing(turn, len(full))
      self._current.extend(full, turn)
      self._seen = [_snapshot(m) for m in messages]
    # 4. The prompt is a view of the sequence, not a copy of all its tokens.
    self._text = None
    self._turn = turn
    self._awaiting = True
    return self._current.prompt()

  def append(self, completion: policy_client.Completion) -> str:
    """Ends the turn with a completion; returns its text.

    The end-of-turn token is kept in the sequence and not part of the text.

    Raises:
      SamplingContractError: ids, log-probs or versions that cannot be
        trained on. Nothing of the completion is kept then.
    """
    if not self._awaiting or self._current is None:
      raise RuntimeError("append() needs a prompt() before it")
    # 5. Refuse a completion that cannot be trained on before any of it is kept.
    completion_checks.check(completion, self._image_token)
    text, ended = completion_checks.read(completion, self._renderer, self._stop)
    self._current.sample(completion, self._turn)
    self._text = text
    self._ended = ended
    self._awaiting = False
    return text

  def build(self) -> list[trajectory.TokenSequence]:
    """The sequences so far; those without a sampled token are left out."""
    # 6. A sequence ends with its last sampled token: the prompt of a turn that
    #    was never answered, or a whole such sequence, has no gradient.
    growing = self._done + ([self._current] if self._current else [])
    sequences = []
    for sequence in growing:
      if not sequence.num_sampled:
        continue
      built = sequence.build()
      if not built.loss_mask[-1]:
        last = int(np.flatnonzero(built.loss_mask)[-1]) + 1
        entropies, support = built.entropies, built.support
        built = trajectory.TokenSequence(
          tokens=built.tokens[:last],
          loss_mask=built.loss_mask[:last],
          logprobs=built.logprobs[:last],
          versions=built.versions[:last],
          turn_ids=built.turn_ids[:last],
          images=tuple(s for s in built.images if s.end <= last),
          entropies=None if entropies is None else entropies[:last],
          support=None if support is None else support[:last],
        )
      sequences.append(built)
    return sequences

  def _extends(self, messages: Sequence[Any]) -> bool:
    """Whether messages[:len(seen)] are the rendered ones.

    One comparison in C; unchanged strings compare by identity.
    """
    try:
      return bool(list(messages[: len(self._seen)]) == self._seen)
    except ValueError:  # An array in a message has no truth value.
      return False
