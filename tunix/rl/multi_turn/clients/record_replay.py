"""Records a client's completions and replays them without a policy.

`RecordingClient` records the completions of another client into
`RecordedCompletions`, which are saved as a file; `ReplayClient` returns them.
With `by_prompt`, episodes replay under any session names and in any order; a
prompt sent several times (members of a group) gets its completions in turn.

Does not keep pixels: images are identified by their SHA-256. No JAX.
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
from typing import Any, Callable, Iterable, Iterator, Mapping

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import policy_client


def prompt_key(prompt: policy_client.TokenPrompt) -> str:
  """Returns a digest of the prompt's tokens and images."""
  digest = hashlib.sha256(prompt.tokens.tobytes())
  for span in prompt.images:
    digest.update(f"{span.image.sha256}/{span.offset};".encode())
  return digest.hexdigest()


def by_session(prompt: policy_client.TokenPrompt, session: str) -> str:
  """Replays by session, whatever its prompts."""
  del prompt
  return session


def by_prompt(prompt: policy_client.TokenPrompt, session: str) -> str:
  """Replays by prompt, whatever its session."""
  del session
  return prompt_key(prompt)


class RecordedCompletions:
  """Completions by their prompt's key, in the order of arrival."""

  def __init__(self):
    self._found: dict[str, list[policy_client.Completion]] = {}

  def __len__(self) -> int:
    return sum(map(len, self._found.values()))

  def __iter__(self) -> Iterator[tuple[str, policy_client.Completion]]:
    for key, completions in self._found.items():
      for completion in completions:
        yield key, completion

  @property
  def completions(self) -> dict[str, list[policy_client.Completion]]:
    """Completions by their prompt's key."""
    return {key: list(recorded) for key, recorded in self._found.items()}

  def add(self, key: str, completion: policy_client.Completion) -> None:
    self._found.setdefault(key, []).append(completion)

  def save(self, path: str | pathlib.Path) -> None:
    """Writes JSON lines; replaces an existing file once all is written."""
    path = pathlib.Path(path)
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
      for key, completion in self:
        line = {
          "prompt": key,
          "tokens": completion.tokens.tolist(),
          "logprobs": completion.logprobs.tolist(),
          "versions": completion.versions.tolist(),
          "finish_reason": completion.finish_reason.value,
          "fallback": completion.fallback,
        }
        if completion.entropies is not None:
          line["entropies"] = completion.entropies.tolist()
        file.write(json.dumps(line) + "\n")
    part.replace(path)

  @classmethod
  def load(cls, path: str | pathlib.Path) -> RecordedCompletions:
    """Reads a saved file; raises ValueError, naming the line, if malformed."""
    recorded = cls()
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, 1):
      try:
        line = json_text.parse(text)
        recorded.add(
          line["prompt"],
          policy_client.Completion(
            line["tokens"],
            line["logprobs"],
            line["versions"],
            policy_client.FinishReason(line["finish_reason"]),
            fallback=line["fallback"],
            entropies=line.get("entropies"),
          ),
        )
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
          f"{path}, line {number} is not a completion: {error!r}; record it"
          " again"
        ) from error
    return recorded


class RecordingClient:
  """Forwards requests to a client; records its completions in `recording`."""

  def __init__(self, client: policy_client.PolicyClient):
    self.recording = RecordedCompletions()
    self._client = client

  def open_session(self, session: str) -> None:
    announce = getattr(self._client, "open_session", None)
    if announce is not None:
      announce(session)

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
    **options: Any,
  ) -> policy_client.Completion:
    """Returns the client's completion. Errors are not recorded."""
    completion = await self._client.generate(
      prompt, sampling, session=session, **options
    )
    self.recording.add(prompt_key(prompt), completion)
    return completion

  async def release(self, session: str) -> None:
    await self._client.release(session)


class ReplayClient:
  """Returns recorded completions, each once."""

  def __init__(
    self,
    completions: Mapping[str, Iterable[policy_client.Completion]],
    key: Callable[[policy_client.TokenPrompt, str], str] = by_session,
  ):
    """Args:

    completions: Completions by key, in the order in which they are returned.
    key: Function from a prompt and its session to a key, `by_session` or
      `by_prompt`.
    """
    self._left = {k: collections.deque(c) for k, c in completions.items()}
    self._key = key

  def open_session(self, session: str) -> None:
    """Does nothing."""

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
  ) -> policy_client.Completion:
    """Returns the next completion recorded under the key.

    Raises:
      LookupError: none is left.
    """
    del sampling
    remaining = self._left.get(self._key(prompt, session))
    if not remaining:
      which = "no" if remaining is None else "no further"
      raise LookupError(
        f"{which} completion was recorded for session {session!r} with a"
        f" prompt of {len(prompt)} tokens and {len(prompt.images)} images;"
        " record again if the renderer, the gym or the prompts have changed"
      )
    return remaining.popleft()

  async def release(self, session: str) -> None:
    """Does nothing; the recording stays."""
