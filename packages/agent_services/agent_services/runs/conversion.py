"""Turns a run's events into token-exact training data.

`turns_of` reads each `model_call` and `model_output`; `sequences_of` joins
turns whose prompts extend one another into `TokenSequence`s, as the policy saw
them; `samples_of` gives the (messages, text, weight) of behaviour cloning.

Promises: ids and log-probs are those of the model server's reply, or the turn
is refused; with `on_missing="fallback"` it is made by a tokenizer, with
log-prob 0, and counted. No token is trained on that the server did not report
as sampled, unless it is counted so.

Does not fetch screenshots: the caller gives their references.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

ON_MISSING = ("refuse", "fallback")


class MissingTokens(ValueError):
  """A turn without its tokens or log-probs, where none may be made up."""


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
  """One model call of a run.

  Attributes:
    messages: Messages of the request.
    text: Text of the reply.
    prompt_ids: int32[T]; None where the server did not report them.
    token_ids: int32[S], sampled; None where the server did not report them.
    logprobs: float32[S]; None where the server reported none, or another
      number of them.
    versions: int32[S], versions of the weights.
    request: the model call's fields, as the service reports them.
    reply_id: the model server's id of the reply, "" for none.
  """

  messages: Sequence[Mapping[str, Any]]
  text: str
  prompt_ids: np.ndarray | None
  token_ids: np.ndarray | None
  logprobs: np.ndarray | None
  versions: np.ndarray | None
  request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reply_id: str = ""

  @property
  def is_exact(self) -> bool:
    parts = (self.prompt_ids, self.token_ids, self.logprobs)
    return all(part is not None for part in parts)


def turns_of(events: Iterable[Mapping[str, Any]]) -> list[Turn]:
  """Returns the model calls of a run, in order.

  Raises:
    ValueError: a model_output that is no chat completion.
  """
  turns: list[Turn] = []
  call: Mapping[str, Any] = {}
  for event in events:
    kind = event.get("type")
    if kind == "model_call":
      call = event
    elif kind == "model_output":
      turns.append(_turn(event.get("modelOutput"), call))
  return turns


def untrained_of(
  turns: Sequence[Turn],
  rule: sampling_rule.SamplingRule,
  records: Mapping[str, str],
) -> dict[int, str]:
  """Reasons by index of the turns whose tokens are not trained on.

  A field that neither the reported request nor the model server's own record
  names is taken for the run's.

  Args:
    turns: Turns of one run.
    rule: Distribution of the run.
    records: Reasons by reply id, of the run's own model server.

  Raises:
    OtherSampling: a turn has another distribution, and the rule refuses it.
  """
  reasons = {}
  for index, turn in enumerate(turns):
    reason = rule.reason_against(turn.request)
    reason = reason or records.get(turn.reply_id, "")
    if reason:
      reasons[index] = reason
  return reasons


def samples_of(
  events: Iterable[Mapping[str, Any]], weight: float = 1.0
) -> list[tuple[list[dict[str, Any]], str, float]]:
  """(messages, response text, weight) of each turn, for behaviour cloning."""
  return [
    ([dict(m) for m in turn.messages], turn.text, float(weight))
    for turn in turns_of(events)
  ]


def sequences_of(
  turns: Sequence[Turn],
  images: Sequence[Sequence[trajectory.ImageRef]],
  image_token_id: int | None,
  *,
  image_break_id: int | None = None,
  on_missing: str = "refuse",
  encode: Callable[[Turn], tuple[Sequence[int], Sequence[int]]] | None = None,
  version: int = 0,
  untrained: Iterable[int] = (),
) -> tuple[list[trajectory.TokenSequence], int]:
  """(training sequences, turns that were made by `encode`).

  Args:
    turns: Turns of one run.
    images: Images of each turn's request, in the order of its prompt.
    image_token_id: Placeholder of images; None for a policy without images.
    image_break_id: token between rows of placeholders (Pixtral); None for a
      policy whose images are one run each.
    on_missing: "refuse" or "fallback", for a turn without tokens or log-probs.
    encode: turn -> (prompt ids, ids of its text), for "fallback".
    version: Version of the weights where replies name none.
    untrained: Indices of turns whose tokens are not trained on.

  Raises:
    MissingTokens: naming the turn and the fix.
    ValueError: a prompt whose placeholders do not fit its images.
  """
  if on_missing not in ON_MISSING:
    raise ValueError(
      f"on_missing must be one of {', '.join(ON_MISSING)}; got {on_missing!r}"
    )
  sequences: list[_Growing] = []
  encoded = 0
  for index, turn in enumerate(turns):
    if not turn.is_exact:
      if on_missing == "refuse" or encode is None:
        raise MissingTokens(
          f"turn {index} has no {_missing(turn)}; let the service ask its"
          " model for logprobs and return_token_ids, or set"
          " on_missing=fallback"
        )
      turn, encoded = _encoded(turn, encode), encoded + 1
    if not sequences or not sequences[-1].extends(turn):
      sequences.append(_Growing(image_token_id, image_break_id))
    sequences[-1].add(turn, index, images[index], version)
  context = frozenset(untrained)
  return [one.build().without_turns(context) for one in sequences], encoded


def _missing(turn: Turn) -> str:
  names = ("prompt_ids", "token_ids", "logprobs")
  return ", ".join(n for n in names if getattr(turn, n) is None)


def _encoded(turn: Turn, encode: Callable[[Turn], Any]) -> Turn:
  prompt, sampled = encode(turn)
  if turn.token_ids is not None:
    sampled = turn.token_ids
  if turn.prompt_ids is not None:
    prompt = turn.prompt_ids
  ids = np.asarray(sampled, np.int32)
  versions = turn.versions
  if versions is not None and len(versions) != len(ids):
    versions = None
  return dataclasses.replace(
    turn,
    prompt_ids=np.asarray(prompt, np.int32),
    token_ids=ids,
    logprobs=np.zeros(len(ids), np.float32),
    versions=versions,
  )


class _Growing:
  """A sequence to which turns are added."""

  def __init__(self, image_token_id: int | None, image_break_id: int | None):
    self._image_ids = image_token_id, image_break_id
    self._tokens = np.zeros(0, np.int32)
    self._parts: list[tuple[int, int, Turn, int, int]] = []
    self._images: Sequence[trajectory.ImageRef] = ()

  def extends(self, turn: Turn) -> bool:
    assert turn.prompt_ids is not None
    length = len(self._tokens)
    return len(turn.prompt_ids) >= length and bool(
      np.array_equal(turn.prompt_ids[:length], self._tokens)
    )

  def add(
    self,
    turn: Turn,
    index: int,
    images: Sequence[trajectory.ImageRef],
    version: int,
  ) -> None:
    assert turn.prompt_ids is not None and turn.token_ids is not None
    earlier = list(self._images)
    if list(images[: len(earlier)]) != earlier:
      raise ValueError(
        f"turn {index}: its tokens extend the turn before, its screenshots"
        " do not; are its events complete?"
      )
    self._images = images
    self._parts.append(
      (
        len(turn.prompt_ids) - len(self._tokens),
        len(turn.token_ids),
        turn,
        index,
        version,
      )
    )
    self._tokens = np.concatenate([turn.prompt_ids, turn.token_ids])

  def build(self) -> trajectory.TokenSequence:
    length = len(self._tokens)
    mask = np.zeros(length, bool)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    turn_ids = np.zeros(length, np.int32)
    at = 0
    for prompt, sampled, turn, index, version in self._parts:
      run = slice(at + prompt, at + prompt + sampled)
      turn_ids[at : run.stop] = index
      mask[run] = True
      logprobs[run] = turn.logprobs
      versions[run] = version if turn.versions is None else turn.versions
      at = run.stop
    return trajectory.TokenSequence(
      self._tokens,
      mask,
      logprobs,
      versions,
      turn_ids,
      _spans(self._tokens, self._images, *self._image_ids),
    )


def _spans(
  tokens_T: np.ndarray,
  images: Sequence[trajectory.ImageRef],
  image_token_id: int | None,
  image_break_id: int | None,
) -> tuple[trajectory.ImageSpan, ...]:
  """Each run of placeholders, breaks between rows included, with its image."""
  is_image = np.zeros(len(tokens_T) + 2, np.int8)
  if image_token_id is not None:
    is_image[1:-1] = tokens_T == image_token_id
  is_break = np.zeros(0, np.bool_)
  if image_break_id is not None:
    is_break = tokens_T == image_break_id
    is_image[1:-1] |= is_break
  change = np.diff(is_image)
  starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
  if len(starts) != len(images):
    raise ValueError(
      f"the prompt has {len(starts)} runs of image placeholders for"
      f" {len(images)} screenshots; let the model server return prompts with"
      " placeholders expanded"
    )
  spans = []
  for image, start, end in zip(images, starts, ends):
    breaks = np.flatnonzero(is_break[start:end])
    row = int(breaks[0]) if len(breaks) else 0
    spans.append(trajectory.ImageSpan(image, int(start), int(end - start), row))
  return tuple(spans)


# --- reading replies ----------------------------------------------------------


def image_urls(messages: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns the addresses of a request's screenshots, in order."""
  urls = []
  for message in messages:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
      if isinstance(part, Mapping) and part.get("type") == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        urls.append(str(url))
  return urls


def messages_of(event: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
  """Returns the messages of a `model_call` event, in any of its shapes."""
  messages: Any = _call_of(event)
  if messages is None:
    messages = event.get("messages")
  if isinstance(messages, Mapping):
    messages = messages.get("messages")
  if not isinstance(messages, list):
    return ()
  return [m for m in messages if isinstance(m, Mapping)]


def _call_of(event: Mapping[str, Any]) -> Any:
  """The request that the service reports: its fields, messages or None."""
  return event.get("modelSpecificInput", event.get("modelInput"))


def _turn(output: Any, call: Mapping[str, Any]) -> Turn:
  try:
    choice = output["choices"][0]
    text = choice["message"].get("content") or ""
    if not isinstance(text, str):
      raise TypeError
  except (KeyError, IndexError, TypeError, AttributeError):
    raise ValueError(
      f"a model_output holds no chat completion: {str(output)[:80]!r}"
    ) from None
  ids = _ids(choice.get("token_ids"))
  # vLLM's prompt is beside the choices, SGLang's in each.
  prompt = _ids(output.get("prompt_token_ids"))
  if prompt is None:
    prompt = _ids(choice.get("prompt_token_ids"))
  logprobs = _logprobs(choice.get("logprobs"))
  if ids is None or logprobs is None or len(logprobs) != len(ids):
    logprobs = None
  versions = None
  spans = choice.get("policy_versions")
  if ids is not None and isinstance(spans, list):
    versions = _versions(spans, len(ids))
  request = _call_of(call)
  return Turn(
    messages_of(call),
    text,
    prompt,
    ids,
    logprobs,
    versions,
    request if isinstance(request, Mapping) else call,
    str(output.get("id") or ""),
  )


def _ids(value: object) -> np.ndarray | None:
  if not isinstance(value, list) or not value:
    return None
  if not all(type(i) is int and 0 <= i < 1 << 31 for i in value):
    return None
  return np.array(value, np.int32)


def _logprobs(value: object) -> np.ndarray | None:
  content = value.get("content") if isinstance(value, Mapping) else None
  if not isinstance(content, list) or not content:
    return None
  values = [
    entry.get("logprob") if isinstance(entry, Mapping) else None
    for entry in content
  ]
  if not all(
    isinstance(n, (int, float)) and math.isfinite(n) and n <= 1e-4
    for n in values
  ):
    return None
  return np.array(values, np.float32)


def _versions(spans: list[Any], length: int) -> np.ndarray | None:
  """Versions of `length` tokens from [[first token, version], …]."""
  versions = np.zeros(length, np.int32)
  try:
    for first, version in spans:
      versions[int(first) :] = int(version)
  except (TypeError, ValueError, OverflowError):
    return None
  return versions
