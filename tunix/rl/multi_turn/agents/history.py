"""Keeps an append-only list of messages, with snapshots that cost nothing.

A `MessageView` is the first n messages of a list that only grows: taking one
a turn keeps an episode's memory linear in its turns, where a copy a turn would
make it quadratic. Messages are shared, never copied; treat them as frozen.
"""

from __future__ import annotations

import collections.abc
from typing import Any, Callable, Iterator

from tunix.rl.multi_turn.core import trajectory

Message = trajectory.Message
Shrink = Callable[[trajectory.ImageRef], trajectory.ImageRef]


class MessageView(collections.abc.Sequence):
  """The first `length` messages of an append-only list."""

  __slots__ = ("_messages", "_length")

  def __init__(self, messages: list[Message], length: int | None = None):
    self._messages = messages
    self._length = len(messages) if length is None else length

  def __len__(self) -> int:
    return self._length

  def __iter__(self) -> Iterator[Message]:
    messages = self._messages
    for i in range(self._length):
      yield messages[i]

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      start, stop, step = index.indices(self._length)
      if step == 1:
        return self._messages[start:stop] if start < stop else []
      return [self._messages[i] for i in range(start, stop, step)]
    if index < 0:
      index += self._length
    if not 0 <= index < self._length:
      raise IndexError(f"message {index} of {self._length}")
    return self._messages[index]

  def __eq__(self, other: object) -> bool:
    if isinstance(other, MessageView):
      if self._messages is other._messages and self._length == other._length:
        return True
      return list(self) == list(other)
    if isinstance(other, list):
      return list(self) == other
    return NotImplemented

  __hash__ = None  # type: ignore[assignment]

  def __add__(self, other: list[Message]) -> list[Message]:
    return self[:] + list(other)

  def __repr__(self) -> str:
    return repr(self[:])


class MessageHistory:
  """Messages of an episode, in full and as the policy sees them.

  A screen is a screenshot, a page's tree, or both in one message. With
  `max_images`, the policy sees the newest screens only: when there
  are more, at least the oldest `image_stride` are dropped, and the seen history
  is a new list. The turns that they belong to
  - keep their texts, and `image_note` stands where a screenshot was; or
  - with `list_dropped_turns`, are left out: the message of the oldest
    screenshot that is left gets the task's text and a line for each turn that
    is gone.

  With `shrink`, those before the newest are seen at another size: each new one
  rewrites the history.

  `compact` rewrites it around a summary that the policy wrote.

  Each rewrite starts a new token sequence and costs a prefill of the whole
  prompt, so a stride of several turns is cheaper than one.
  """

  def __init__(
    self,
    max_images: int | None = None,
    image_stride: int = 1,
    image_note: str = "(an older screenshot)",
    list_dropped_turns: bool = False,
    shrink: Shrink | None = None,
  ):
    if list_dropped_turns and max_images is None:
      raise ValueError(
        "list_dropped_turns=True needs max_images: all turns are kept else"
      )
    if max_images is not None and max_images < 1:
      raise ValueError(f"max_images must be >= 1 or None, got {max_images}")
    if image_stride < 1 or image_stride > (max_images or image_stride):
      raise ValueError(
        "image_stride must be between 1 and max_images, got"
        f" {image_stride} with max_images={max_images}"
      )
    self._max_images = max_images
    self._stride = image_stride
    self._note = image_note
    self._shrink = shrink
    self._full: list[Message] = []
    self._seen = self._full
    # (index, text of its page or "") of messages, once for each screen.
    self._with_images: list[tuple[int, str]] = []
    self._lists_dropped = list_dropped_turns
    self._task = ""  # Text of the first user message.
    self._lines: list[str] = []  # Of turns that are gone.
    self._line_of: dict[int, str] = {}  # id of an assistant message -> line.
    self._snapshot: list[Message] | None = None
    self.rewrites = 0

  @property
  def full(self) -> MessageView:
    """Every message as it was when appended."""
    return MessageView(self._full)

  @property
  def seen(self) -> list[Message]:
    """Messages the policy sees now: a new list of shared messages."""
    if self._snapshot is None or len(self._snapshot) != len(self._seen):
      self._snapshot = list(self._seen)
    return self._snapshot

  def view(self) -> MessageView:
    """Returns a snapshot of `seen` that later turns do not change."""
    return MessageView(self._seen)

  def append(self, message: Message, line: str = "", page: str = "") -> None:
    """Adds a message.

    Args:
      message: shared, never copied; treat it as frozen.
      line: The turn of an assistant's message in one line, for the list of
        dropped turns.
      page: Part of a user message's text that shows a page, "" for none.
    """
    self._full.append(message)
    role = message.get("role")
    if self._lists_dropped and role == "assistant":
      self._line_of[id(message)] = line  # `full` keeps the message alive.
    elif role == "user" and not self._task:
      self._task = _without(_text_of(message), page, "").strip()
    if self._seen is not self._full:
      self._seen.append(message)
    images = sum(map(_is_image, _parts(message)))
    if not images and not page:
      return
    before = self._seen
    if self._shrink is not None:
      self._shrink_older()
    if self._max_images is not None:
      index = len(self._seen) - 1
      self._with_images += [(index, page)] * max(images, 1)
      excess = len(self._with_images) - self._max_images
      if excess > 0:
        self._drop_images(max(excess, self._stride))
    if self._seen is not before:
      self._snapshot = None
      self.rewrites += 1

  def compact(self, summary: str, images: int) -> None:
    """Replaces the turns that are seen by the policy's summary of them.

    The history ends with the request of the summary and its answer. Seen from
    now on are the system's messages and the newest observation, with up to
    `images` of the newest screenshots, the task and the summary in it.
    """
    earlier = self._seen[:-2]
    head = next(
      (i for i, m in enumerate(earlier) if m.get("role") != "system"), 0
    )
    newest = len(earlier)
    while newest > head and earlier[newest - 1].get("role") != "assistant":
      newest -= 1
    first, *following = earlier[newest:] or [{"role": "user", "content": ""}]
    shown = [p for m in earlier[newest:] for p in _parts(m) if _is_image(p)]
    older = [p for m in earlier[:newest] for p in _parts(m) if _is_image(p)]
    spare = max(images - len(shown), 0)
    older = older[max(len(older) - spare, 0) :]
    about = "\n\n".join(filter(None, (self._task, summary)))
    content = first["content"]
    if isinstance(content, str):
      content = [{"type": "text", "text": content}] if content else []
    content = [*older, *content, {"type": "text", "text": about}]
    if not any(map(_is_image, content)):
      content = "\n\n".join(part["text"] for part in content)
    self._seen = [*earlier[:head], {**first, "content": content}, *following]
    self._snapshot = None
    self.rewrites += 1

  def _shrink_older(self) -> None:
    """Shrinks the screenshots of the message before the newest with one."""
    assert self._shrink is not None
    for index in range(len(self._seen) - 2, -1, -1):
      message = self._seen[index]
      if _has_image(message):
        parts = [
          {**part, "image": self._shrink(part["image"])}
          if _is_image(part)
          else part
          for part in message["content"]
        ]
        messages = list(self._seen)
        messages[index] = {**message, "content": parts}
        self._seen = messages
        return

  def _drop_images(self, count: int) -> None:
    dropped = self._with_images[:count]
    del self._with_images[:count]
    messages = list(self._seen)
    for index, page in dropped:
      messages[index] = _without_screen(messages[index], page, self._note)
    if self._lists_dropped:
      messages = self._with_list(messages)
    self._seen = messages

  def _with_list(self, messages: list[Message]) -> list[Message]:
    """Returns the history from the oldest image on, with the list of turns."""
    first = self._with_images[0][0]
    head = next(
      (i for i, m in enumerate(messages) if m.get("role") != "system"), 0
    )
    self._lines += [
      self._line_of[id(m)]
      for m in messages[head:first]
      if id(m) in self._line_of
    ]
    steps = "\n".join(
      f"Step {i + 1}: {line}" for i, line in enumerate(self._lines)
    )
    about = "\n\n".join(
      part
      for part in (self._task, steps and f"Previous actions:\n{steps}")
      if part
    )
    content = messages[first]["content"]
    if about and isinstance(content, str):
      content = f"{content}\n\n{about}"
    elif about:
      content = [*content, {"type": "text", "text": about}]
    shift = first - head
    self._with_images = [(i - shift, page) for i, page in self._with_images]
    message = {**messages[first], "content": content}
    return [*messages[:head], message, *messages[first + 1 :]]


def _text_of(message: Message) -> str:
  content = message.get("content")
  if isinstance(content, str):
    return content
  return "\n".join(
    part["text"] for part in content or () if part.get("type") == "text"
  )


def _is_image(part: object) -> bool:
  return isinstance(part, dict) and part.get("type") == "image"


def _parts(message: Message) -> list[Any]:
  content = message.get("content")
  return content if isinstance(content, list) else []


def _has_image(message: Message) -> bool:
  return any(map(_is_image, _parts(message)))


def _without(text: str, page: str, note: str) -> str:
  return text.replace(page, note, 1) if page else text


def _without_screen(message: Message, page: str, note: str) -> Message:
  """Returns a copy of the message, its first screen replaced by the note."""
  if isinstance(message["content"], str):
    return {**message, "content": _without(message["content"], page, note)}
  parts = [
    {**part, "text": _without(part["text"], page, "").strip()}
    if part.get("type") == "text"
    else part
    for part in message["content"]
  ]
  for i, part in enumerate(parts):
    if _is_image(part):
      parts[i] = {"type": "text", "text": note}
      break
  if all(part.get("type") == "text" for part in parts):
    return {**message, "content": "\n".join(part["text"] for part in parts)}
  return {**message, "content": parts}
