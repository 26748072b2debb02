"""Completions kept by their prompts, to be given again.

`RecordingClient` writes down what another client answered, `Recording` holds
it and is a file, `PromptReplayClient` answers from it: an episode plays again
without a policy, whatever its sessions are called and in whatever order they
ask. The same prompt asked several times (members of a group) has as many
answers, given in turn.

Does not keep pixels: images are told apart by their SHA-256. No JAX.
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
from typing import Any, Iterator

from tunix.rl.multi_turn import policy_client


def prompt_key(prompt: policy_client.TokenPrompt) -> str:
  """Of the prompt's tokens and images."""
  digest = hashlib.sha256(prompt.tokens.tobytes())
  for span in prompt.images:
    digest.update(f"{span.image.sha256}/{span.offset};".encode())
  return digest.hexdigest()


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


class PromptReplayClient:
  """Answers each prompt as it was answered when it was recorded."""

  def __init__(self, recording: Recording):
    self._left: dict[str, collections.deque[policy_client.Completion]] = {}
    for key, completion in recording:
      self._left.setdefault(key, collections.deque()).append(completion)

  def open_session(self, session: str) -> None:
    """Nothing to prepare."""

  async def generate(
      self,
      prompt: policy_client.TokenPrompt,
      sampling: policy_client.SamplingParams,
      *,
      session: str,
  ) -> policy_client.Completion:
    """The prompt's next recorded completion.

    Raises:
      LookupError: nothing (more) was recorded for this prompt.
    """
    del sampling
    left = self._left.get(prompt_key(prompt))
    if not left:
      said = "no" if left is None else "no further"
      raise LookupError(
          f"{said} completion was recorded for the prompt of"
          f" {len(prompt)} tokens and {len(prompt.images)} images that session"
          f" {session!r} asks; record it again if the renderer, the gym or the"
          " prompts have changed"
      )
    return left.popleft()

  async def release(self, session: str) -> None:
    """Nothing is held; the recording stays."""
