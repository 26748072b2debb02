"""Completions kept by their prompts, to be given again.

`RecordingClient` writes down what another client answered, `Recording` holds
it and is a file, `ReplayClient` answers from it: an episode plays again
without a policy, whatever its sessions are called and in whatever order they
ask (`by_prompt`). The same prompt asked several times (members of a group) has
as many answers, given in turn.

Does not keep pixels: images are told apart by their SHA-256. No JAX.
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
from typing import Any, Callable, Iterable, Iterator, Mapping

from tunix.rl.multi_turn.core import policy_client


def prompt_key(prompt: policy_client.TokenPrompt) -> str:
  """Of the prompt's tokens and images."""
  digest = hashlib.sha256(prompt.tokens.tobytes())
  for span in prompt.images:
    digest.update(f"{span.image.sha256}/{span.offset};".encode())
  return digest.hexdigest()


def by_session(prompt: policy_client.TokenPrompt, session: str) -> str:
  """Key of completions that belong to their session, whatever it asks."""
  del prompt
  return session


def by_prompt(prompt: policy_client.TokenPrompt, session: str) -> str:
  """Key of completions that belong to their prompt, whoever asks."""
  del session
  return prompt_key(prompt)


class Recording:
  """Prompt's key -> its completions, in the order in which they came."""

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
    """By their prompt's key."""
    return {key: list(found) for key, found in self._found.items()}

  def add(self, key: str, completion: policy_client.Completion) -> None:
    self._found.setdefault(key, []).append(completion)

  def save(self, path: str | pathlib.Path) -> None:
    """JSON lines; a file that is there is replaced when all is written."""
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
  def load(cls, path: str | pathlib.Path) -> Recording:
    """Raises ValueError, naming the line, for a file that is none."""
    made = cls()
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, 1):
      try:
        line = json.loads(text)
        made.add(
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
            f"{path}, line {number} is no completion: {error!r}"
        ) from error
    return made


class RecordingClient:
  """Passes everything on to a client; `recording` is what it answered."""

  def __init__(self, client: policy_client.PolicyClient):
    self.recording = Recording()
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
    """What the client raises is not recorded."""
    completion = await self._client.generate(
        prompt, sampling, session=session, **options
    )
    self.recording.add(prompt_key(prompt), completion)
    return completion

  async def release(self, session: str) -> None:
    await self._client.release(session)


class ReplayClient:
  """Answers with completions that were recorded, each once."""

  def __init__(
      self,
      completions: Mapping[str, Iterable[policy_client.Completion]],
      key: Callable[[policy_client.TokenPrompt, str], str] = by_session,
  ):
    """Args:

      completions: by key, in the order in which they are given.
      key: of a prompt and its session, `by_session` or `by_prompt`.
    """
    self._left = {k: collections.deque(c) for k, c in completions.items()}
    self._key = key

  def open_session(self, session: str) -> None:
    """Nothing to prepare."""

  async def generate(
      self,
      prompt: policy_client.TokenPrompt,
      sampling: policy_client.SamplingParams,
      *,
      session: str,
  ) -> policy_client.Completion:
    """The next completion that was recorded under the key.

    Raises:
      LookupError: nothing (more) was recorded for it.
    """
    del sampling
    left = self._left.get(self._key(prompt, session))
    if not left:
      said = "no" if left is None else "no further"
      raise LookupError(
          f"{said} completion was recorded for what session {session!r} asks, a"
          f" prompt of {len(prompt)} tokens and {len(prompt.images)} images;"
          " record it again if the renderer, the gym or the prompts have"
          " changed"
      )
    return left.popleft()

  async def release(self, session: str) -> None:
    """Nothing is held; the recording stays."""
