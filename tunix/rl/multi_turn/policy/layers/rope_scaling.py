"""Reads and computes scaled rotary positions: linear, YaRN and Llama 3's.

Linear (position interpolation): every frequency divided by a factor. YaRN (Peng
et al. 2023): frequencies that turn often within the original context stay,
those that turn seldom are divided, a ramp in between; queries and keys are
scaled by the attention factor. Llama 3: the same with a ramp over the turns
themselves in place of the frequencies' numbers, and no attention factor.

Promises: frequencies and factor are those of transformers 5.12.1
(`modeling_rope_utils`), whose other kinds are refused by name.

Does not: scale by the longest sequence so far ("dynamic"). Its frequencies
change as a sequence grows past the trained context: keys in a cache were turned
by other ones than the keys of a whole forward pass, and a token's log-prob
depends on its neighbours in a batch. Up to that context it changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Mapping

import numpy as np

KINDS = ("linear", "yarn", "llama3")
_PLAIN = ("default", "mrope")
_LLAMA3 = (
  "low_freq_factor",
  "high_freq_factor",
  "original_max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scaled rotary positions of a decoder.

  Attributes:
    kind: One of `KINDS`.
    factor: Ratio of the context to the original one.
    original_max_position_embeddings: tokens of the original context (yarn,
      llama3).
    beta_fast: turns within it above which a frequency stays (yarn).
    beta_slow: turns within it below which a frequency is divided (yarn).
    truncate: whether the ramp's ends are whole frequencies (yarn).
    attention_factor: Factor of cosine and sine.
    low_freq_factor: turns within the original context below which a frequency
      is divided (llama3).
    high_freq_factor: turns above which it stays (llama3).
  """

  kind: str
  factor: float
  original_max_position_embeddings: int = 0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"kind must be one of {KINDS}, got {self.kind!r}")
    if not self.factor > 0:
      raise ValueError(f"rope factor must be > 0, got {self.factor}")
    if self.kind != "linear" and self.original_max_position_embeddings < 1:
      raise ValueError(
        "original_max_position_embeddings must be >= 1, got"
        f" {self.original_max_position_embeddings}"
      )
    if not 0 < self.low_freq_factor < self.high_freq_factor:
      raise ValueError(
        "rope low_freq_factor must be > 0 and less than high_freq_factor,"
        f" got {self.low_freq_factor} and {self.high_freq_factor}"
      )

  def scaled(self, frequencies_H: np.ndarray, theta: float) -> np.ndarray:
    """Returns float32[H / 2] of the plain frequencies to this base."""
    divided = (frequencies_H / np.float32(self.factor)).astype(np.float32)
    if self.kind == "linear":
      return divided
    if self.kind == "llama3":
      turns = frequencies_H * np.float32(
        self.original_max_position_embeddings / (2 * math.pi)
      )
      low, high = self.low_freq_factor, self.high_freq_factor
      ramp = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
      return (frequencies_H * ramp + divided * (1 - ramp)).astype(np.float32)
    half = len(frequencies_H)
    low, high = (
      self._frequency_of(turns, 2 * half, theta)
      for turns in (self.beta_fast, self.beta_slow)
    )
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
      high += 0.001
    ramp = (np.arange(half, dtype=np.float32) - low) / (high - low)
    ramp = np.clip(ramp, 0, 1).astype(np.float32)
    return (divided * ramp + frequencies_H * (1 - ramp)).astype(np.float32)

  def _frequency_of(self, turns: float, dim: int, theta: float) -> float:
    """Returns the number of the frequency with this many turns in a context."""
    length = self.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(length) / (2 * math.log(theta))

  def to_hf(self) -> dict[str, Any]:
    """Returns the fields of `rope_parameters`."""
    out: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
    if self.kind == "yarn":
      names = (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
      )
      out |= {name: getattr(self, name) for name in names}
    if self.kind == "llama3":
      out |= {name: getattr(self, name) for name in _LLAMA3}
    return out


def read(
  rope: Mapping[str, Any], max_position_embeddings: int
) -> RopeScaling | None:
  """Returns the scaling of `rope_parameters` or `rope_scaling`, if any.

  Args:
    rope: the section of config.json, of either transformers' spelling.
    max_position_embeddings: Longest context of the decoder.

  Raises:
    ValueError: another kind, or a field that it needs is missing.
  """
  kind = rope.get("rope_type", rope.get("type", "default"))
  if rope.get("partial_rotary_factor", 1.0) != 1.0:
    raise ValueError(
      "config.json: partial_rotary_factor="
      f"{rope['partial_rotary_factor']}, heads are rotated whole here"
    )
  if kind in _PLAIN:
    return None
  if kind not in KINDS:
    why = ""
    if kind == "dynamic":
      why = (
        ": it follows the longest sequence of a batch, so that cached keys"
        " and those of a whole pass would differ. Up to"
        f" max_position_embeddings={max_position_embeddings} tokens it"
        " changes nothing: remove it from config.json for contexts within"
        " them"
      )
    raise ValueError(
      f"config.json: rope_type={kind!r} is not implemented{why}; scaled"
      f" rotary positions here are {', '.join(KINDS)}"
    )
  original = rope.get("original_max_position_embeddings")
  original = max_position_embeddings if original is None else original
  factor = rope.get("factor")
  if factor is None and kind == "yarn" and "factor" in rope:
    factor = max_position_embeddings / original
  if factor is None:
    raise ValueError(f"config.json: rope_type={kind!r} lacks 'factor'")
  if kind == "linear":
    return RopeScaling(kind, float(factor))
  if kind == "llama3":
    for name in _LLAMA3:
      if rope.get(name) is None:
        raise ValueError(f"config.json: rope_type={kind!r} lacks {name!r}")
    return RopeScaling(
      kind,
      float(factor),
      int(original),
      low_freq_factor=float(rope["low_freq_factor"]),
      high_freq_factor=float(rope["high_freq_factor"]),
    )
  return RopeScaling(
    kind,
    float(factor),
    int(original),
    float(rope.get("beta_fast") or 32),
    float(rope.get("beta_slow") or 1),
    bool(rope.get("truncate", True)),
    _attention_factor(rope, float(factor)),
  )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
  stated = rope.get("attention_factor")
  if stated is not None:
    return float(stated)

  def temperature(weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

  above, below = rope.get("mscale"), rope.get("mscale_all_dim")
  if above and below:
    return temperature(above) / temperature(below)
  return temperature(1.0)
