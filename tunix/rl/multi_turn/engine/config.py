"""Declares the rollout engine's settings; loads no JAX.

`EngineConfig` is the section `engine` of a run and the argument of
`RolloutEngine`. 0 and () leave a size to the engine, which chooses it by the
device and by the screenshots to come; each field's text gives the rule.

Facts of a run (the screenshots' sizes, banned tokens, seed, the first weights
version) are arguments of `RolloutEngine` and no settings.
"""

from __future__ import annotations

import dataclasses
from typing import get_args, Iterator, Literal

from tunix.rl.multi_turn.core import settings

Feature = Literal["details", "grammar", "penalties"]
FEATURES: tuple[Feature, ...] = get_args(Feature)
"""Requests that need programs of their own: log-probs of more than the sampled
tokens, and grammars."""

_MOST_TOKENS = 10**11
_opt = settings.setting


@settings.settings
class EngineConfig:
  """The engine that samples for many episodes at once."""

  slots: int = _opt(
    default=96,
    doc="Requests that are sampled at a time; more wait. On a mesh they, and"
    " all caches, are split over data, fsdp and sequence, and rounded up to a"
    " multiple of that; heads are split over tensor.",
    ge=1,
    le=65_536,
  )
  context_length: int = _opt(
    default=512,
    doc="Tokens of one sequence, screenshots and sampled tokens included. An"
    " episode that needs more ends with status context_limit.",
    unit="tokens",
    ge=2,
    le=10**7,
  )
  cache_tokens: int = _opt(
    default=0,
    doc="Tokens whose keys and values the KV cache holds, at least"
    " context_length. When they do not suffice, idle sessions lose theirs"
    " first, and the engine prefills them again. 0 = slots times"
    " context_length.",
    unit="tokens",
    ge=0,
    le=_MOST_TOKENS,
  )
  page_size: int = _opt(
    default=0,
    doc="Tokens of a page of the KV cache. Sessions share whole pages. 0 ="
    " the smallest of prefill_buckets.",
    unit="tokens",
    ge=0,
    le=10**6,
  )
  share_prefixes: Literal["auto", "true", "false"] = _opt(
    default="auto",
    doc="true, and auto: sessions whose tokens begin alike share pages, and"
    " the engine prefills them once. In lockstep a session takes what it"
    " would have computed in the same calls, a member of a group its whole"
    " prompt, so that no bit of a log-prob depends on other sessions while"
    " the cache holds all of them.",
  )
  decode_steps_per_call: int = _opt(
    default=8,
    doc="Tokens that a decode call samples for each request, up to about"
    " twice as many with drafts; requests join and new weights take over"
    " between calls.",
    unit="tokens",
    ge=1,
    le=1024,
  )
  decode_rows: tuple[int, ...] = _opt(
    default=(),
    doc="Requests of one decode call, ascending; each number compiles once,"
    " and more requests take further calls. An accelerator is fastest with"
    " all slots in one call; a CPU is as fast a request with few, and"
    " wastes less when few episodes run. [] = 16 on a CPU, else slots.",
    unit="requests",
    ge=1,
  )
  prefill_rows: tuple[int, ...] = _opt(
    default=(),
    doc="Requests of one prefill call, ascending. [] = slots, but on a CPU 8,"
    " and 2 if the policy has 32 million parameters or more: one request's"
    " tokens then fill its cores, and padded rows cost as much.",
    unit="requests",
    ge=1,
  )
  prefill_buckets: tuple[int, ...] = _opt(
    default=(),
    doc="Lengths that a request's new tokens are padded to, ascending; longer"
    " prompts take several calls of the largest. Each compiles once. [] = on"
    " a CPU 32 and a screenshot with 32 tokens of text, at most 256; else 64"
    " and 256. Where an image's tokens see each other (Gemma 3) the largest"
    " holds one.",
    unit="tokens",
    ge=1,
  )
  window_buckets: tuple[int, ...] = _opt(
    default=(),
    doc="Cache positions that a call reads, ascending; context_length is"
    " always one of them. Each compiles once. [] = equal steps of 256 or"
    " more: six on a CPU, else two. [context_length] = one window.",
    unit="tokens",
    ge=1,
  )
  image_buckets: tuple[int, ...] = _opt(
    default=(4,),
    doc="Images of one encode call, ascending; each compiles once.",
    unit="images",
    ge=1,
  )
  patch_buckets: tuple[int, ...] = _opt(
    default=(),
    doc="Patches that an image is padded to, ascending; the engine refuses"
    " larger images. [] = those of the run's screenshots; where their sizes"
    " are unknown, as many as fill the context.",
    unit="patches",
    ge=1,
    le=10**7,
  )
  prefill_calls_per_round: int = _opt(
    default=16,
    doc="Prefill calls before requests that are ready decode, so that long"
    " prompts do not hold up the others. 0 = no limit, as in lockstep.",
    unit="calls",
    ge=0,
  )
  vision_cache_tokens: int = _opt(
    default=0,
    doc="Vision tokens that the device keeps; an image whose tokens are"
    " kept is not encoded again. 0 = half of slots times context_length.",
    unit="tokens",
    ge=0,
    le=_MOST_TOKENS,
  )
  patch_cache_mib: int = _opt(
    default=256, doc="Image patches that the host keeps.", unit="MiB", ge=0
  )
  admission_wait_s: float = _opt(
    default=0.003,
    doc="When idle, wait this long after the newest request (at most 10x"
    " after the oldest) so that requests batch.",
    unit="s",
    ge=0,
  )
  max_wait_s: float = _opt(
    default=60.0,
    doc="In lockstep, start a batch without the missing sessions when no"
    " request has arrived for this long; counted as lockstep_timeouts.",
    unit="s",
    ge=0,
  )
  lockstep: Literal["auto", "true", "false"] = _opt(
    default="auto",
    doc="true: a batch starts when every open session has a request"
    " waiting, in the order in which the sessions opened, and all calls"
    " have the same shapes, so that equal seeds give equal bits. auto: true"
    " in a run whose queue.max_staleness is 0 and whose episodes reach this"
    " engine in the process.",
  )
  update_policy: Literal["immediate", "between_turns"] = _opt(
    default="immediate",
    doc="When new weights take over. immediate: between two decode calls."
    " between_turns: after the running completions.",
  )
  on_update: Literal["keep_kv", "recompute"] = _opt(
    default="keep_kv",
    doc="KV cache under new weights. keep_kv: a completion that is being"
    " sampled keeps its pages to its end, a small mismatch; every other"
    " request is computed anew. recompute: running completions are prefilled"
    " again, too, exact.",
  )
  weights: Literal["same", "int8"] = _opt(
    default="same",
    doc="Weights to sample with. same: the policy's, a Qwen policy's matrices"
    " in the type they are computed in. int8: a copy with its"
    " matrices rounded to a byte a number, half of bfloat16; correct for the"
    " difference with algorithm.importance=tis. Not for tiny_vl.",
  )
  drafts: Literal["false", "auto", "true"] = _opt(
    default="false",
    doc="Decode several tokens at a time where they were guessed right, from"
    " what followed the same words before, in the sequence or in completions"
    " that ended lately. Samples stay the same, up to rounding. auto: each"
    " kind of call is timed with drafts and without, and goes the faster way;"
    " in lockstep, and for a policy with recurrent layers, without. true, in"
    " lockstep: the sequence alone is guessed from.",
  )
  draft_tokens: int = _opt(
    default=3,
    doc="Tokens that a step drafts for each request. Work and memory of"
    " sampling grow with them; the reading of the weights does not.",
    unit="tokens",
    ge=1,
    le=32,
  )
  features: tuple[Feature, ...] = _opt(
    default=(),
    doc="Programs that warm-up compiles beside the usual ones. details:"
    " top_logprobs and raw log-probs. grammar: completions held to a"
    " grammar. penalties: frequency and presence penalties. The engine"
    " compiles others when a request first needs them, while all requests"
    " wait.",
  )
  entropies: bool = _opt(
    default=False,
    doc="Completions carry the entropy of each token's distribution. A"
    " property of the compiled programs, hence of all requests.",
  )

  def problems(self) -> Iterator[str]:
    for name in _BUCKETS:
      buckets = getattr(self, name)
      if list(buckets) != sorted(set(buckets)):
        yield f"{name}={list(buckets)} must ascend without repeats"
    for name in ("prefill_buckets", "window_buckets"):
      buckets = getattr(self, name)
      if buckets and max(buckets) > self.context_length:
        yield (
          f"{name}={list(buckets)} go beyond"
          f" context_length={self.context_length}; drop the longer ones"
        )
    if not self.image_buckets:
      yield "image_buckets=[] encodes no image; give at least one number"
    if 0 < self.cache_tokens < self.context_length:
      yield (
        f"cache_tokens={self.cache_tokens} is below"
        f" context_length={self.context_length}, so that a sequence could"
        " never end; raise the first or lower the second"
      )

  @property
  def is_lockstep(self) -> bool:
    """Whether the engine runs in lockstep; "auto" is off until `resolved`."""
    return self.lockstep == "true"

  @property
  def uses_drafts(self) -> bool:
    auto = self.drafts == "auto" and not self.is_lockstep
    return auto or self.drafts == "true"

  @property
  def shares_prefixes(self) -> bool:
    return self.share_prefixes != "false"

  def resolved(self, *, lockstep: bool) -> EngineConfig:
    """Returns a copy whose lockstep is decided: "auto" becomes `lockstep`."""
    if self.lockstep != "auto":
      return self
    return dataclasses.replace(self, lockstep="true" if lockstep else "false")


_BUCKETS = (
  "decode_rows",
  "prefill_rows",
  "prefill_buckets",
  "window_buckets",
  "image_buckets",
  "patch_buckets",
)
