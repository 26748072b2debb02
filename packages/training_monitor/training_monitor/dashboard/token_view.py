"""Prepares a turn's tokens and their recorded values for the heat view.

Promises: a missing value is shown as missing, never as 0. The loss mask
is the learner's: 1 where an update put the token into its loss, 0 for prompts
and for tokens that were left out, with the reason.
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from training_monitor.dashboard import text
from training_monitor.dashboard import token_text

_MOST_TOKENS = 4000
_MOST_ALIKE = 4  # More in a row are shown as one, with their number.
_SHADES = 9
MASK = "loss mask"
HEATS = (
  "probability",
  "log-prob",
  "entropy",
  "advantage",
  MASK,
  "policy version",
)
REASONS = {
  "invalid": "the episode was ended by infrastructure",
  "zero_advantage": "no token of the sequence has an advantage",
  "too_long": "the sequence is longer than learner.row_length",
  "stale": "its weights were older than queue.max_staleness",
  "untrained": "it was sampled from another distribution than the run's",
  "truncated": "a limit ended the episode, and algorithm.filter_truncated",
  "low_entropy": "its turn's entropy is below algorithm.entropy_share's",
  "group_dropped": "its group was dropped",
  "group_requeued": "its group was dropped and its task tried anew",
  "measurement": "a measurement: no update learns from it",
}
"""Why sampled tokens are not in the loss."""

Row = dict[str, Any]


class TokenView:
  """See the module docstring."""

  def __init__(self, texts: token_text.TokenTexts):
    self._texts = texts

  def of(self, rollout: Row, turn: Row, heat: str) -> Row:
    """Returns the view of a turn.

    Args:
      rollout: Row with `summary_json`, `source_type`, `batch`, `model_path`
        and `advantage`.
      turn: Row with `actions` and `metrics`.
      heat: Measure that colours the tokens; an unrecorded one is replaced.

    Returns:
      tokens: {id, text, times, known, number, shade, mark} of each;
      sampled: how many were; heats: (name, why it cannot be shown or "");
      heat; legend: {mark, name, count} of the loss mask's kinds.
    """
    empty = {"tokens": [], "sampled": 0, "heats": [], "heat": "", "legend": []}
    action = next((a for a in turn["actions"] if a["tokens"]), None)
    if action is None:
      return empty
    ids = action["tokens"]
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
      return empty
    measures, reason = _known(rollout, turn, action, len(ids))
    heats = [(h, "" if h in measures else _absent(h, rollout)) for h in HEATS]
    if heat not in measures:
      heat = next((h for h in HEATS if h in measures), "")
    tokens = self._tokens(rollout, ids[:_MOST_TOKENS], measures)
    legend: list[Row] = []
    if heat == MASK:
      prompt = self._prompt(rollout, turn["metrics"].get("prompt_tokens"))
      legend = mark(prompt, tokens, reason)
      tokens = prompt + tokens
    else:
      shade(tokens, heat)
    return {
      "tokens": tokens,
      "sampled": len(ids),
      "heats": heats,
      "heat": heat,
      "legend": legend,
    }

  def _tokens(
    self,
    rollout: Row,
    ids: Sequence[int],
    measures: Mapping[str, Sequence[float]],
  ) -> list[Row]:
    texts = self._texts.of(rollout["model_path"] or "", ids)
    return [
      {
        "id": id_,
        "text": texts[n] if texts else str(id_),
        "times": 1,
        "known": {k: v[n] for k, v in measures.items()},
        "number": texts is None,
        "shade": None,
        "mark": "",
      }
      for n, id_ in enumerate(ids)
    ]

  def _prompt(self, rollout: Row, runs: Any) -> list[Row]:
    """Tokens that the turn added to the prompt; repeats of one are joined."""
    try:
      pairs = [(int(i), int(n)) for i, n in runs or ()]
    except (TypeError, ValueError):
      return []
    places = [
      (id_, times)
      for id_, n in pairs
      if n > 0
      for times in ([1] * n if n <= _MOST_ALIKE else [n])
    ][:_MOST_TOKENS]
    tokens = self._tokens(rollout, [id_ for id_, _ in places], {})
    for token, (_, times) in zip(tokens, places):
      token["times"] = times
      token["known"][MASK] = 0.0
    return tokens


def _known(
  rollout: Row, turn: Row, action: Row, count: int
) -> tuple[dict[str, list[float]], str]:
  """Returns values of each of `count` tokens; why they are not in the loss."""
  measures: dict[str, list[float]] = {}
  metrics = turn["metrics"]
  logprobs = _numbers(action["logprobs"], count)
  if logprobs:
    measures["probability"] = [math.exp(min(0.0, v)) for v in logprobs]
    measures["log-prob"] = logprobs
  versions = _spread(metrics.get("policy_versions"), count)
  if versions:
    measures["policy version"] = versions
  summary = rollout.get("summary_json")
  summary = summary if isinstance(summary, dict) else {}
  weight = _of_turn(summary.get("advantages"), turn, rollout["advantage"])
  if isinstance(weight, (int, float)):
    measures["advantage"] = [float(weight)] * count
  trained, reason = _trained(rollout, turn, summary)
  if trained is not None:
    measures[MASK] = [float(trained)] * count
  # Other recorders' values of each token, under any name.
  raw = {**(turn.get("raw") or {}), **(action.get("raw") or {})}
  for field, name in (
    ("entropies", "entropy"),
    ("entropy", "entropy"),
    ("loss_mask", MASK),
    ("mask", MASK),
    ("advantages", "advantage"),
    ("versions", "policy version"),
  ):
    values = _numbers(text.read_json(raw.get(field)), count)
    if values is None:
      values = _numbers(metrics.get(field), count)
    if values is not None:
      measures[name] = values
  return measures, reason


def _trained(rollout: Row, turn: Row, summary: Row) -> tuple[bool | None, str]:
  """Returns whether an update put the turn's tokens into its loss, and why not.

  None where it was not recorded.
  """
  if rollout["source_type"] != "step":
    return False, REASONS["measurement"]
  left_out = summary.get("left_out")
  reason = left_out if isinstance(left_out, str) else _of_turn(left_out, turn)
  if not isinstance(reason, str):
    return None, ""
  return not reason, REASONS.get(reason, reason) if reason else ""


def _of_turn(values: object, turn: Row, otherwise: object = None) -> Any:
  """Returns a turn's entry; turns are numbered from 1."""
  number = turn["turn"]
  if isinstance(values, list) and 0 < number <= len(values):
    return values[number - 1]
  return otherwise


def _absent(heat: str, rollout: Row) -> str:
  if heat == MASK and rollout["batch"] is None:
    return "no update yet"
  return "not recorded"


def mark(
  prompt: Sequence[Row], sampled: Sequence[Row], reason: str
) -> list[Row]:
  """Sets `mark` of each token by its loss mask; returns the legend."""
  counts = {"in": 0, "out": 0, "prompt": 0}
  for token in prompt:
    token["mark"] = "prompt"
    counts["prompt"] += token["times"]
  for token in sampled:
    token["mark"] = "in" if token["known"].get(MASK) else "out"
    counts[token["mark"]] += 1
  names = {
    "in": "trained on",
    "prompt": "prompt",
    "out": f"sampled and left out: {reason}" if reason else "left out",
  }
  return [
    {"mark": kind, "name": names[kind], "count": count}
    for kind, count in counts.items()
    if count
  ]


def shade(tokens: Sequence[Row], heat: str) -> None:
  """Sets `shade` 0 … 8 of each token, None where nothing is known.

  Of a probability 8 is the least likely; of anything else the highest.
  """
  values = [t["known"].get(heat) for t in tokens]
  numbers = [v for v in values if v is not None and math.isfinite(v)]
  low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
  if heat == "probability":
    low, high = 0.0, 1.0
  elif heat in ("advantage", "entropy"):
    high = max(abs(low), abs(high)) or 1.0
    low = -high if heat == "advantage" else 0.0
  for token, value in zip(tokens, values):
    if value is None or not math.isfinite(value):
      token["shade"] = None
      continue
    share = (value - low) / (high - low) if high > low else 0.0
    if heat in ("probability", "log-prob"):
      share = 1 - share if high > low else 0.0
    token["shade"] = min(_SHADES - 1, int(share * _SHADES))


def _numbers(values: object, count: int) -> list[float] | None:
  if not isinstance(values, list) or len(values) != count:
    return None
  if not all(isinstance(v, (int, float)) for v in values):
    return None
  return [float(v) for v in values]


def _spread(runs: Any, count: int) -> list[float] | None:
  """Expands [[version, count]] into one version for each token."""
  try:
    pairs = [(float(v), int(n)) for v, n in runs]
  except (TypeError, ValueError):
    return None
  if sum(n for _, n in pairs) != count or any(n < 0 for _, n in pairs):
    return None
  return [v for v, n in pairs for _ in range(n)]
