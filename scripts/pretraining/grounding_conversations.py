"""Conversations about one screenshot, which teach a small policy to see.

A screenshot is read once and teaches several points: `inventory_sequence` names
and points at what is visible, `question_sequence` answers questions ("Click
the Save button.", "What is at [512, 300]?").

Promises: a conversation is a function of its seed; its tokens carry log-prob 0.
Does not train anything; no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.trajectory_collector import sequence_builder

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_CLICK_FORMS = ("Click {}.", "Click on {}.", "Press {}.", "Go to {}.")

_TYPE_FORMS = (
  'Type "{}".',
  'Enter "{}" in the field.',
  'Type "{}" into the text field.',
  'Click the field and type "{}".',
)

Expressions = Sequence[tuple[str, int, int]]
"""(phrase, x, y) of a visible object, in pixels."""


def _sample(
  expressions: Expressions, count: int, rng: np.random.Generator
) -> Expressions:
  """Up to `count` of the items, in random order."""
  if not expressions:
    raise ValueError("a conversation needs something visible to talk about")
  return [expressions[i] for i in rng.permutation(len(expressions))[:count]]


def _learn_only(
  sequence: trajectory.TokenSequence, keep_T: np.ndarray
) -> trajectory.TokenSequence:
  """Restricts the loss to the tokens of `keep_T`; others count as prompt."""
  mask = sequence.loss_mask & keep_T
  entropies = sequence.entropies
  return dataclasses.replace(
    sequence,
    loss_mask=mask,
    logprobs=np.where(mask, sequence.logprobs, 0.0),
    versions=np.where(mask, sequence.versions, -1),
    entropies=None if entropies is None else np.where(mask, entropies, 0.0),
  )


@dataclasses.dataclass(frozen=True)
class Grounder:
  """Makes conversations about screenshots.

  Attributes:
    renderer: messages to tokens.
    parser: a GUI-action parser; points are clicks in its grammar.
    grid: (columns, rows) that points are snapped to.
    words: Words to type, for questions that teach to copy.
    type_rate: Share of such questions, if `words` is not empty.
    reverse_rate: share of items and questions that go from a point to a name.
  """

  renderer: choice.AnyRenderer
  parser: Any
  grid: tuple[int, int] | None = None
  words: Sequence[str] = ()
  type_rate: float = 0.2
  reverse_rate: float = 0.35

  def inventory_sequence(
    self,
    image: trajectory.ImageRef,
    expressions: Expressions,
    rng: np.random.Generator,
    items: int = 12,
    point_rate: float = 0.0,
  ) -> trajectory.TokenSequence:
    """One answer that names up to `items` things and clicks on them.

    Or the reverse, or (at `point_rate`) the point without a click. Nothing
    twice, as a second time could be copied from the first.
    """
    lines = []
    for phrase, x, y in _sample(expressions, items, rng):
      if rng.random() < self.reverse_rate:
        lines.append(f"{self._point(image, x, y)} {phrase}")
      elif rng.random() < point_rate:
        lines.append(f"{phrase} {self._point(image, x, y)}")
      else:
        lines.append(self._click(image, x, y, phrase))
    turns = [("List what you see.", "\n".join(lines))]
    return self._converse(image, turns)

  def pairs_sequence(
    self,
    image: trajectory.ImageRef,
    expressions: Expressions,
    rng: np.random.Generator,
  ) -> trajectory.TokenSequence:
    """One answer of names run together with their points: "orange328,562".

    The number follows the token that names its target, and the loss is on the
    numbers only: the shortest look-up, by which a small policy first learns to
    distinguish targets.
    """
    lines = []
    for phrase, x, y in _sample(expressions, len(expressions), rng):
      point = self._point(image, x, y).strip("[]").replace(" ", "")
      name = phrase.split()[1]  # Without "the" and the kind.
      lines.append(f" {name}{point}")
    talk = self._converse(image, [("List what you see.", "\n".join(lines))])
    numbers = [self.renderer.decode([int(t)]).isdigit() for t in talk.tokens]
    return _learn_only(talk, np.array(numbers))

  def copies_sequence(
    self, rng: np.random.Generator, words: int = 5
  ) -> trajectory.TokenSequence:
    """A conversation without a screenshot: typing the quoted words.

    At once, or in half of the cases after a click. Nothing but the words is
    learned from, for the same reason as in `pairs_sequence`.
    """
    turns = []
    chosen = [self.words[i] for i in rng.permutation(len(self.words))[:words]]
    nowhere = trajectory.ImageRef(
      "0" * 64, *(self.grid or demonstrations.POINT_GRID)
    )
    for word in chosen:
      question = _TYPE_FORMS[int(rng.integers(len(_TYPE_FORMS)))].format(word)
      if rng.random() < 0.5:
        x, y = (int(rng.integers(n)) for n in (nowhere.width, nowhere.height))
        turns.append((question, self._click(nowhere, x, y, "the text field")))
        question = "Go on."
      answer = self._format(nowhere, GuiAction(Kind.TYPE, text=word))
      turns.append((question, answer))
    talk = self._converse(None, turns)
    is_word = [self.renderer.decode([int(t)]) in chosen for t in talk.tokens]
    return _learn_only(talk, np.array(is_word))

  def question_sequence(
    self,
    image: trajectory.ImageRef,
    expressions: Expressions,
    rng: np.random.Generator,
    questions: int = 6,
  ) -> trajectory.TokenSequence:
    """Up to `questions` of a user, each answered by one tool call."""
    turns = []
    for phrase, x, y in _sample(expressions, questions, rng):
      draw = rng.random()
      if self.words and draw < self.type_rate:
        word = self.words[int(rng.integers(len(self.words)))]
        answer = self._format(image, GuiAction(Kind.TYPE, text=word))
        turns.append((f'Type "{word}".', answer))
      elif draw < self.type_rate + self.reverse_rate:
        question = f"What is at {self._point(image, x, y)}?"
        answer = self._format(image, GuiAction(Kind.ANSWER, text=phrase))
        turns.append((question, answer))
      else:
        form = _CLICK_FORMS[int(rng.integers(len(_CLICK_FORMS)))]
        turns.append((form.format(phrase), self._click(image, x, y, phrase)))
    return self._converse(image, turns)

  def _format(
    self,
    image: trajectory.ImageRef,
    action: GuiAction,
    thought: str | None = None,
  ) -> str:
    return self.parser.format_gui_action(
      action, image.width, image.height, thought, grid=self.grid
    )

  def _click(
    self,
    image: trajectory.ImageRef,
    x: float,
    y: float,
    phrase: str | None = None,
  ) -> str:
    action = GuiAction(Kind.CLICK, x=float(x), y=float(y))
    return self._format(image, action, phrase)

  def _point(self, image: trajectory.ImageRef, x: float, y: float) -> str:
    """ "[x, y]" in the grammar's coordinates."""
    call = self._click(image, x, y)
    return call[call.rindex("[") : call.rindex("]") + 1]

  def _converse(
    self, image: trajectory.ImageRef | None, turns: Sequence[tuple[str, str]]
  ) -> trajectory.TokenSequence:
    builder = sequence_builder.SequenceBuilder(self.renderer)
    messages: list[trajectory.Message] = []
    for number, (question, answer) in enumerate(turns):
      content: Any = question
      if number == 0 and image is not None:
        content = [
          {"type": "image", "image": image},
          {"type": "text", "text": question},
        ]
      messages.append({"role": "user", "content": content})
      builder.prompt(messages)
      ids = demonstrations.completion_ids(self.renderer, answer)
      text = builder.append(
        policy_client.Completion(
          tokens=ids,
          logprobs=np.zeros(len(ids), np.float32),
          versions=np.zeros(len(ids), np.int32),
          finish_reason=policy_client.FinishReason.STOP,
        )
      )
      messages.append({"role": "assistant", "content": text})
    (sequence,) = builder.build()
    return sequence
