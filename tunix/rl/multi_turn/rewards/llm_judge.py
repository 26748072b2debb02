"""Registers `llm_judge`: a model behind an OpenAI-compatible server scores.

The judge reads a prompt made of the episode's texts and writes an answer, from
which a pattern takes the score. Scores run from `lowest` to `highest` and are
brought to [0, 1].

Promises: an episode is judged within `deadline_s`, all attempts included; no
more than `budget` requests are sent in a run; equal prompts are sent once while
their score is remembered (`cache_size`), also when they come at once. A judge
that fails does what `on_failure` names. The token is read from the environment,
and is in no message.

Does not: show the judge screenshots, or keep scores or the budget beyond the
process.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import threading
from typing import Any, Literal, Mapping
import weakref

import tenacity
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.rewards import patterns
from tunix.rl.multi_turn.rewards import reward_registry

TEMPLATE = """You judge how well a task was done.

Task: {question}
Reference answer: {ground_truth}

Given answer:
{answer}

Explain in at most three sentences, then end with a line "Score: N", N from 0
(wrong) to 10 (right and complete)."""

SCORE = r"(?i)score[^\w-]{0,4}(-?\d+(?:\.\d+)?)"

_FIELDS = ("question", "ground_truth", "answer", "transcript")
_FIELD = re.compile(r"\{(" + "|".join(_FIELDS) + r")\}")
_BODY = 1 << 20  # Bytes of a judge's answer.


class JudgeError(RuntimeError):
  """There is no score: the judge failed, or its budget is spent."""


@dataclasses.dataclass(frozen=True)
class Scored:
  """A judge's `score`, and the `text` that it was taken from."""

  score: float
  text: str


class LLMJudge:
  """See the module docstring. Thread-safe.

  Attributes:
    deadline_s: Deadline of one episode, in seconds.
    requests: Number of requests sent so far.
  """

  def __init__(
    self,
    *,
    base_url: str,
    model: str,
    template: str = TEMPLATE,
    system: str = "",
    score_pattern: str = SCORE,
    lowest: float = 0.0,
    highest: float = 10.0,
    api_key_env: str = "",
    temperature: float = 0.0,
    max_tokens: int = 512,
    deadline_s: float = 20.0,
    tries: int = 3,
    budget: int | None = 10000,
    cache_size: int = 4096,
    max_chars: int = 20000,
    concurrency: int = 16,
    on_failure: Literal["fail", "zero", "skip"] = "fail",
  ):
    """Args:

      base_url: Address of the server with its version, e.g.
        http://judge:8000/v1.
      model: name that the server knows the judge by.
      template: the prompt, or a file with it; {question}, {ground_truth},
        {answer} and {transcript} stand for the episode's texts.
      system: system message; "" for none.
      score_pattern: regular expression; the first group of its last match in
        the judge's answer is the score.
      lowest, highest: scores that become 0 and 1; others are brought in range.
      api_key_env: environment variable with the token; "" for none.
      temperature, max_tokens: Sampling of the judge.
      deadline_s: Seconds for one episode, all attempts included. Below
        `collect.deadlines.evaluate`.
      tries: attempts, of which each counts against `budget`.
      budget: requests in a run; None for no limit.
      cache_size: prompts whose score is remembered.
      max_chars: Longest text in the prompt; the middle of a longer one is cut.
      concurrency: requests at a time.
      on_failure: "fail": the episode ends as an environment's error, and is
        not trained on. "zero": the judge's part is 0. "skip": the sum is made
        without it, and nothing is logged of it.

    Raises:
      ValueError: naming the option.
    """
    self._url = http.address(base_url, "base_url", "http://judge:8000/v1")
    if not model:
      raise ValueError("model='' must name the judge's model")
    if not (highest > lowest and math.isfinite(highest - lowest)):
      raise ValueError(f"highest={highest} must be above lowest={lowest}")
    if not (temperature >= 0 and math.isfinite(temperature)):
      raise ValueError(f"temperature={temperature} must be >= 0 and finite")
    for name, value, low in (
      ("tries", tries, 1),
      ("budget", budget, 0),
      ("concurrency", concurrency, 1),
      ("cache_size", cache_size, 0),
      ("max_chars", max_chars, 100),
      ("max_tokens", max_tokens, 1),
    ):
      if value is not None and value < low:
        raise ValueError(f"{name}={value} must be >= {low}")
    if not (deadline_s > 0 and math.isfinite(deadline_s)):
      raise ValueError(f"deadline_s={deadline_s} must be > 0 seconds")
    patterns.check(score_pattern, "score_pattern")
    if "{" not in template and os.path.isfile(template):
      with open(template, encoding="utf-8") as file:
        template = file.read()
    if not _FIELD.search(template):
      raise ValueError(
        f"template={template!r:.60} is no file, and shows the judge nothing:"
        f" it needs one of {', '.join('{%s}' % f for f in _FIELDS)}"
      )
    key = os.environ.get(api_key_env, "") if api_key_env else ""
    if api_key_env and not key:
      raise ValueError(
        f"api_key_env={api_key_env}: that environment variable is not set"
      )
    self.deadline_s = float(deadline_s)
    self.requests = 0
    self._template, self._system = template, system
    self._pattern = score_pattern
    self._range = (float(lowest), float(highest))
    self._headers = {"authorization": f"Bearer {key}"} if key else {}
    self._body = {
      "model": model,
      "temperature": temperature,
      "max_tokens": max_tokens,
    }
    self._budget, self._max_chars = budget, max_chars
    self._connections = concurrency
    self._on_failure = on_failure
    self._retry = http.RetryPolicy(
      tries=tries,
      wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
      retry=tenacity.retry_if_exception(_may_pass),
    )
    self._lock = threading.Lock()
    self._scores: collections.OrderedDict[str, Scored] = (
      collections.OrderedDict()
    )
    self._cache_size = cache_size
    # What belongs to an event loop: connections, and judgements under way.
    self._loops: weakref.WeakKeyDictionary[Any, _OfLoop] = (
      weakref.WeakKeyDictionary()
    )

  async def __call__(
    self,
    task: object,
    action: object,
    trajectory: trajectory_lib.Trajectory | None = None,
  ) -> reward_registry.RewardOutput | None:
    """The score in [0, 1]; None when it is skipped.

    Raises:
      JudgeError: no score, with on_failure "fail".
    """
    messages = self._messages(task, action, trajectory)
    try:
      scored, cached = await self._scored(messages)
    except JudgeError as error:
      if self._on_failure == "fail":
        raise
      if self._on_failure == "skip":
        return None
      return reward_registry.RewardOutput(
        0.0, {"judge_failed": str(error)[:500]}
      )
    low, high = self._range
    value = (min(max(scored.score, low), high) - low) / (high - low)
    return reward_registry.RewardOutput(
      value,
      {"score": scored.score, "text": scored.text[:2000], "cached": cached},
    )

  def _messages(
    self, task: Any, action: Any, trajectory: Any
  ) -> list[dict[str, str]]:
    texts = {
      "question": _task_text(task, "question", "instruction", "prompt"),
      "ground_truth": _task_text(task, "ground_truth", "answer"),
      "answer": "" if action is None else str(action),
      "transcript": transcript(trajectory),
    }
    # In one pass: what the policy wrote is not read as a template.
    prompt = _FIELD.sub(
      lambda match: _shortened(texts[match[1]], self._max_chars), self._template
    )
    messages = [{"role": "user", "content": prompt}]
    if self._system:
      messages.insert(0, {"role": "system", "content": self._system})
    return messages

  async def _scored(
    self, messages: list[dict[str, str]]
  ) -> tuple[Scored, bool]:
    """(score, whether it was known or under way)."""
    body = {**self._body, "messages": messages}
    written = json.dumps(body, sort_keys=True).encode()
    digest = hashlib.sha256(written).hexdigest()
    with self._lock:
      scored = self._scores.get(digest)
      if scored is not None:
        self._scores.move_to_end(digest)
        return scored, True
      of_loop = self._of_this_loop()
    task = of_loop.under_way.get(digest)
    first = task is None
    if task is None:
      task = asyncio.ensure_future(self._ask(of_loop.http, body))
      of_loop.under_way[digest] = task
      task.add_done_callback(functools.partial(self._keep, of_loop, digest))
    # One caller's cancellation must not take the score from the others.
    return await asyncio.shield(task), not first

  def _keep(
    self, of_loop: _OfLoop, digest: str, task: asyncio.Task[Scored]
  ) -> None:
    of_loop.under_way.pop(digest, None)
    if task.cancelled() or task.exception() is not None:
      return  # Asked again the next time.
    with self._lock:
      self._scores[digest] = task.result()
      while len(self._scores) > self._cache_size:
        self._scores.popitem(last=False)

  def _of_this_loop(self) -> _OfLoop:
    loop = asyncio.get_running_loop()
    of_loop = self._loops.get(loop)
    if of_loop is None:
      of_loop = self._loops[loop] = _OfLoop(
        http.Http(
          headers=self._headers, proxies=True, connections=self._connections
        )
      )
    return of_loop

  async def _ask(self, client: http.Http, body: Mapping[str, Any]) -> Scored:
    url = f"{self._url}/chat/completions"

    async def attempt() -> Scored:
      self._spend()
      data = await client.ask("POST", url, None, body=body, limit=_BODY)
      return self._read(data)

    loop = asyncio.get_running_loop()
    try:
      async with asyncio.timeout(self.deadline_s):
        due = loop.time() + self.deadline_s
        return await self._retry.run(attempt, due=due)
    except TimeoutError:
      raise JudgeError(
        f"the judge at {self._url} gave no score within {self.deadline_s:g} s"
      ) from None
    except http.CallError as error:
      raise JudgeError(f"the judge failed: {error}") from error

  def _spend(self) -> None:
    with self._lock:
      if self._budget is not None and self.requests >= self._budget:
        raise JudgeError(
          f"the judge's budget of {self._budget} requests is spent; raise"
          " environment.reward.llm_judge.budget"
        )
      self.requests += 1

  def _read(self, data: Mapping[str, Any]) -> Scored:
    """Returns the score in a server's answer.

    Raises:
      http.CallError: none is in it.
    """
    try:
      text = data["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
      text = None
    if not isinstance(text, str):
      raise http.CallError(
        f"the answer holds no message: {str(data)[:200]!r}", 200
      )
    try:
      matches = patterns.found(self._pattern, text, "score_pattern")
      score = float(matches[-1].group(1 if matches[-1].re.groups else 0))
    except (IndexError, TypeError, ValueError) as error:
      raise http.CallError(
        f"no score in the judge's text {text[-200:]!r}: {error}", 200
      ) from None
    if not math.isfinite(score):
      raise http.CallError(f"the judge's score is {score}", 200)
    return Scored(score, text)


class _OfLoop:
  """An event loop's connections and judgements."""

  def __init__(self, client: http.Http):
    self.http = client
    self.under_way: dict[str, asyncio.Task[Scored]] = {}


def _may_pass(error: BaseException) -> bool:
  """Whether a failure may not come again: no connection, 5xx, garbage."""
  return isinstance(error, http.CallError) and (
    error.status in (0, 200, 408) or error.status >= 500
  )


def transcript(trajectory: trajectory_lib.Trajectory | None) -> str:
  """An episode's turns as text: what the policy wrote, what tools answered."""
  lines = []
  for k, step in enumerate(trajectory.steps if trajectory is not None else ()):
    lines.append(f"[turn {k + 1}] {step.model_response}")
    observation = step.observation
    observation = observation if isinstance(observation, Mapping) else {}
    outputs = observation.get("tool_outputs")
    if isinstance(outputs, Mapping):
      lines += [f"[tool] {text}" for text in outputs.values()]
    lines += [
      f"[environment] {observation[k]}"
      for k in ("axtree", "text")
      if isinstance(observation.get(k), str)
    ]
  return "\n".join(lines)


def _task_text(task: object, *keys: str) -> str:
  for key in keys:
    value = (
      task.get(key) if isinstance(task, Mapping) else getattr(task, key, None)
    )
    if value is not None and value != "":
      return str(value)
  return ""


def _shortened(text: str, most: int) -> str:
  """`text` with its middle cut out if it is too long."""
  if len(text) <= most:
    return text
  half = most // 2
  cut = len(text) - 2 * half
  return f"{text[:half]}\n[… {cut} characters …]\n{text[-half:]}"
