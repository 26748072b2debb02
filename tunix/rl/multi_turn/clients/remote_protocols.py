"""Writes requests to vLLM, SGLang and our own server, and reads the answers.

Promises: a request that found no connection, or a server that is full or not
ready, is repeated, less and less often; a creation is undone when its caller
has gone away, and made once however often it was asked for.

Does not set a deadline over all attempts (the caller does). `JsonRequests`
belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from typing import Any, Awaitable, Callable, Mapping, Sequence
import uuid

import numpy as np
import tenacity
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http

_SESSION_GONE = ("unknown_session", "session_ended")
_TOO_LONG = (
  "context_length_exceeded",  # OpenAI's code, and ours.
  "maximum context length",
  "longer than the maximum model length",
  "longer than the model's context length",
  "exceeds the maximum allowed length",
)


class RemoteError(http.CallError):
  """The server failed, or cannot be reached."""


class PromptMismatchError(RemoteError):
  """The server has read other tokens than the prompt's."""


class SessionGoneError(ValueError):
  """The server has no such session any more."""


@dataclasses.dataclass
class Answer:
  """Fields of a server's answer; None for one it left out."""

  text: str
  reason: str
  tokens: list[int] | None
  logprobs: list[float] | None
  prompt: list[int] | None
  prompt_length: int | None
  versions: list[tuple[int, int]]  # (first token, version).
  support: list[list[int]] | None = None  # Of each token, its sampling mask.


# --- requests -----------------------------------------------------------------


def _sampling(sampling: policy_client.SamplingParams) -> dict[str, Any]:
  """Parameters of the same name in both. All are sent: a server takes one that
  is left out from generation_config.json."""
  return {
    "temperature": sampling.temperature,
    "top_p": sampling.top_p,
    "top_k": sampling.top_k or -1,
    "min_p": sampling.min_p,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": list(sampling.stop_token_ids),
    "skip_special_tokens": False,
  }


def vllm_body(
  model: str,
  prompt: policy_client.TokenPrompt,
  sampling: policy_client.SamplingParams,
  pictures: Sequence[str],
  banned: Sequence[int],
) -> dict[str, Any]:
  """Body of /v1/completions, or with images of /inference/v1/generate."""
  params: dict[str, Any] = {
    "max_tokens": sampling.max_new_tokens,
    **_sampling(sampling),
    "seed": sampling.seed,
    "logprobs": 0,  # Of the sampled token, and of no other.
  }
  if banned:
    params["logit_bias"] = {str(i): -100 for i in banned}
  body = {"model": model, "return_token_ids": True}
  if not pictures:
    return body | params | {"prompt": prompt.tokens.tolist()}
  return body | {
    "token_ids": collapsed(prompt),
    # Flat, unlike the parts of a chat message.
    "content_parts": [{"type": "image_url", "url": url} for url in pictures],
    "sampling_params": params,
  }


def sglang_body(
  prompt: policy_client.TokenPrompt,
  sampling: policy_client.SamplingParams,
  pictures: Sequence[str],
  banned: Sequence[int],
) -> dict[str, Any]:
  """Body of SGLang's /generate."""
  params: dict[str, Any] = {
    "max_new_tokens": sampling.max_new_tokens,
    **_sampling(sampling),
    "sampling_seed": sampling.seed,
    "no_stop_trim": True,
  }
  if banned:
    params["logit_bias"] = {str(i): -100 for i in banned}
  body = {
    "input_ids": collapsed(prompt),
    "sampling_params": params,
    "return_logprob": True,
  }
  if sampling.temperature and (
    sampling.top_k or sampling.top_p < 1 or sampling.min_p
  ):
    # Without it log-probs are of the whole vocabulary. It needs a top_k.
    body["return_sampling_mask"] = True
  if pictures:
    body["image_data"] = pictures
  return body


def collapsed(prompt: policy_client.TokenPrompt) -> list[int]:
  """Returns the tokens with one placeholder an image."""
  keep = np.ones(len(prompt), np.bool_)
  for span in prompt.images:
    keep[span.offset + 1 : span.end] = False
  return prompt.tokens[keep].tolist()


# --- answers ------------------------------------------------------------------


def finish_reason(reason: str) -> policy_client.FinishReason:
  """Maps a server's finish reason to ours."""
  if reason == "length":
    return policy_client.FinishReason.LENGTH
  if reason in ("abort", "cancelled"):
    return policy_client.FinishReason.CANCELLED
  return policy_client.FinishReason.STOP


def of_openai(answer: Mapping[str, Any]) -> Answer:
  """Reads an answer of completions, chat completions or vLLM's generate."""
  choices = field(answer, "choices", list)
  if not choices or not isinstance(choices[0], Mapping):
    raise RemoteError("the server's answer has no choice")
  choice = choices[0]
  message = choice.get("message") or {}
  logprobs = choice.get("logprobs") or {}
  if logprobs.get("content") is not None:
    values: Any = [entry["logprob"] for entry in logprobs["content"]]
  else:
    values = logprobs.get("token_logprobs")
  prompt = choice.get("prompt_token_ids")
  if prompt is None:
    prompt = answer.get("prompt_token_ids")
  return Answer(
    text=choice.get("text") or message.get("content") or "",
    reason=choice.get("finish_reason") or "stop",
    tokens=choice.get("token_ids"),
    logprobs=values,
    prompt=prompt,
    prompt_length=(answer.get("usage") or {}).get("prompt_tokens"),
    versions=(
      [(int(a), int(v)) for a, v in choice.get("policy_versions") or ()]
      or _spans(choice.get("weight_versions"))
    ),
    support=_support(choice.get("sampling_mask")),
  )


def of_sglang(answer: Mapping[str, Any]) -> Answer:
  """Reads an answer of SGLang's own generate."""
  about = field(answer, "meta_info", dict)
  reason = about.get("finish_reason") or {}
  sampled = about.get("output_token_logprobs")  # [[log-prob, id, text], …]
  support = _support(about.get("output_token_sampling_mask"))
  # With a mask they are of what was sampled from, else of the whole vocabulary.
  logprobs = about.get("output_token_sampling_logprobs")
  if logprobs is None and sampled is not None:
    logprobs = [float(entry[0]) for entry in sampled]
  versions = _spans(about.get("weight_versions"))
  if not versions:
    versions = _spans([{"start": 0, "version": about.get("weight_version")}])
  return Answer(
    text=answer.get("text") or "",
    reason=reason.get("type", "stop") if reason else "stop",
    tokens=(
      [int(entry[1]) for entry in sampled]
      if sampled is not None
      else answer.get("output_ids")
    ),
    logprobs=logprobs,
    prompt=answer.get("prompt_token_ids"),
    prompt_length=about.get("prompt_tokens"),
    versions=versions,
    support=support,
  )


def _support(mask: Any) -> list[list[int]] | None:
  """Returns the lists of ids of a sampling mask, which is lists of ids or
  {"token_ids": [...], "offsets": [...]}.

  Raises:
    RemoteError: neither.
  """
  if mask is None:
    return None
  try:
    if isinstance(mask, Mapping):
      ids, at = mask["token_ids"], mask["offsets"]
      mask = [ids[a:b] for a, b in zip(at, at[1:])]
    return [[int(i) for i in row] for row in mask]
  except (KeyError, TypeError, ValueError) as error:
    raise RemoteError(
      "the server's answer has a sampling_mask that is no list of token ids"
      f" a token: {str(mask)[:200]!r}"
    ) from error


def support_of(
  answer: Answer, tokens_S: np.ndarray, is_fallback: bool
) -> np.ndarray | None:
  """Returns int32[S, K] of an answer's sampling mask, see `Completion.support`.

  None without one, or where the tokens are not the sampler's own.

  Raises:
    RemoteError: it is of other tokens.
  """
  rows = answer.support
  if rows is None or is_fallback:
    return None
  if len(rows) != len(tokens_S) or any(
    row and int(token) not in row for row, token in zip(rows, tokens_S)
  ):
    raise RemoteError(
      f"the server's sampling_mask of {len(rows)} tokens is not of the"
      f" {len(tokens_S)} that it sampled"
    )
  support = np.full((len(rows), max([1, *map(len, rows)])), -1, np.int32)
  for i, row in enumerate(rows):
    support[i, : len(row)] = row
  return support


def joined_support(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
  """Returns int32[S, K] of a completion in parts; None if one has none."""
  masks = [part for part in parts if part is not None]
  if len(masks) < len(parts) or not masks:
    return None
  width = max(part.shape[1] for part in masks)
  return np.concatenate(
    [
      np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1)
      for part in masks
    ]
  )


def _spans(entries: Any) -> list[tuple[int, int]]:
  """Versions in vLLM's and SGLang's answers; drops names that are no number."""
  spans = []
  for entry in entries or ():
    if isinstance(entry, Mapping):
      version, start = entry.get("version"), entry.get("start", 0)
    else:
      version, start = entry[0], entry[1]
    if str(version).isdigit():
      spans.append((int(start), int(str(version))))
  return spans


def field(answer: object, name: str, kind: type) -> Any:
  """Returns a field that an answer must have.

  Raises:
    RemoteError: it has not.
  """
  value = answer.get(name) if isinstance(answer, Mapping) else None
  if not isinstance(value, kind):
    raise RemoteError(
      f"the server's answer has no {name}: {str(answer)[:200]!r}; is it of"
      " the protocol that was configured?"
    )
  return value


def refusal(url: str, error: http.CallError) -> Exception:
  """Returns the error of the `PolicyClient` seam for a failed call."""
  answer = error.answer
  if answer is None:
    return RemoteError(f"{url} cannot be reached: {error}")
  if answer.ok:  # No JSON.
    return RemoteError(str(error), answer.status)
  try:
    body = json_text.parse(answer.content)
  except ValueError:
    body = None
  body = body.get("error", body) if isinstance(body, Mapping) else {}
  code = body.get("code") if isinstance(body, Mapping) else None
  text = body.get("message") if isinstance(body, Mapping) else None
  text = text or answer.quoted()
  if any(sign in f"{code} {text}" for sign in _TOO_LONG):
    return policy_client.ContextLimitError(text)
  reason = f"{url} answered {error.status}: {text}"
  if code in _SESSION_GONE:
    return SessionGoneError(reason)
  if error.status in (400, 401, 403, 404, 409, 413, 422):
    return ValueError(reason)
  return RemoteError(reason, error.status)


# --- posting ------------------------------------------------------------------

WAIT = tenacity.wait_exponential(multiplier=0.1, max=5.0)
"""Between two attempts."""
_RETRIED = (408, 429, 500, 502, 503, 504)


def _may_pass(error: BaseException) -> bool:
  if not isinstance(error, http.CallError):
    return False
  if error.answer is None:
    return True
  refused = error.answer.headers.get("x-should-retry") == "false"
  return error.status in _RETRIED and not refused


class JsonRequests:
  """Posts JSON to an inference server; retries temporary failures.

  Attributes:
    root: URL that paths are below.
    undoing: creations that are being undone, for the caller that closes.
  """

  def __init__(
    self,
    root: str,
    *,
    api_key: str,
    timeout_s: float,
    retries: int,
    counts: collections.Counter[str],
  ):
    """Args:

    root: URL of the server, without a path.
    api_key: Key that is presented as a bearer token.
    timeout_s: Deadline of an attempt, in seconds.
    retries: Repetitions of a request. A request to a full server (429) is
      repeated until its caller's deadline.
    counts: Counter whose "retries" are counted.
    """
    self.root = root
    self.undoing: set[asyncio.Future[Any]] = set()
    self._counts = counts
    self._timeout_s = timeout_s
    self._policy = http.RetryPolicy(
      retries + 1, WAIT, tenacity.retry_if_exception(_may_pass)
    )
    self._http = http.Http(
      headers={"authorization": f"Bearer {api_key}"},
      proxies=True,
      connections=1000,
    )

  async def post(self, path: str, body: Mapping[str, Any]) -> Any:
    """As `request`."""
    return await self.request("post", path, body)

  async def request(
    self,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    undo: Callable[[Any], Awaitable[Any]] | None = None,
  ) -> Any:
    """Returns the answer's JSON; retries. The caller sets the deadline.

    Args:
      method: "get" or "post".
      path: below `root`.
      body: JSON values; None for a "get".
      undo: Undoes the request's creation if its caller has gone away. Such a
        request has a key, by which a server creates once however often it is
        repeated.

    Raises:
      ValueError: the server refuses the request, and its reason.
      RemoteError: it failed, or cannot be reached.
    """
    url = self.root + path
    headers = {"idempotency-key": uuid.uuid4().hex} if undo else None

    async def attempt() -> Any:
      call = self._http.json(
        method.upper(), url, self._timeout_s, body=body, headers=headers
      )
      if undo is None:
        return await call
      return await concurrency.create_or_rollback(call, undo, self.undoing)

    try:
      return await self._policy.run(attempt, before_sleep=self._count)
    except http.CallError as error:
      raise refusal(url, error) from error

  def _count(self, state: tenacity.RetryCallState) -> None:
    del state
    self._counts["retries"] += 1

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    await self._http.aclose()
