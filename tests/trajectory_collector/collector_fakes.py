"""Agents, environments and clients that do just what a test tells them."""

import asyncio
import threading
import time

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib


class ListAgent:
  """Keeps messages in a list; its action is the response."""

  def __init__(self, log=None):
    self.log = log if log is not None else []
    self.messages = []

  @property
  def chat_completions(self):
    self.log.append("agent.chat_completions")
    return self.messages

  def reset(self):
    self.log.append("agent.reset")
    self.messages = [{"role": "system", "content": "be brief"}]
    self.trajectory = trajectory_lib.Trajectory()

  def update_from_env(self, observation, reward, done, info=None):
    self.log.append("agent.update_from_env")
    if self.trajectory.task is None:
      self.trajectory.task = observation
    if not done:
      self.messages.append({"role": "user", "content": str(observation)})

  def update_from_model(self, response):
    self.log.append("agent.update_from_model")
    self.messages.append({"role": "assistant", "content": response})
    return trajectory_lib.Action(response)


class ScriptEnv:
  """Ends after `turns` steps; each step's reward is given.

  `faults` maps a method's name to "raise", "hang" or "garbage".
  """

  def __init__(self, rewards=(0.0, 0.0, 1.0), log=None, faults=None):
    self.rewards = list(rewards)
    self.log = log if log is not None else []
    self.faults = faults or {}
    self.count = 0
    self.closed = 0

  async def _fault(self, method):
    fault = self.faults.get(method)
    if fault == "raise":
      raise ConnectionError(f"{method} broke")
    if fault == "hang":
      await asyncio.sleep(3600)
    return fault == "garbage"

  async def reset(self):
    self.log.append("env.reset")
    if await self._fault("reset"):
      return "no tuple"
    return "task", {"from": "reset"}

  async def step(self, action):
    self.log.append("env.step")
    garbage = await self._fault("step")
    reward = self.rewards[self.count]
    self.count += 1
    if garbage:
      return "observation", float("nan"), False, {}
    return f"obs {self.count}", reward, self.count == len(self.rewards), {}

  async def close(self):
    self.log.append("env.close")
    self.closed += 1
    await self._fault("close")


class SyncScriptEnv(ScriptEnv):
  """The same, blocking. `release` lets hanging calls return."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.release = threading.Event()
    self.busy = threading.Lock()
    self.overlaps = 0

  def _run(self, method, result):
    if not self.busy.acquire(blocking=False):
      self.overlaps += 1
      return result
    try:
      fault = self.faults.get(method)
      if fault == "raise":
        raise ConnectionError(f"{method} broke")
      if fault == "hang":
        self.release.wait(30)
      return "garbage" if fault == "garbage" else result
    finally:
      self.busy.release()

  def reset(self):
    self.log.append("env.reset")
    return self._run("reset", ("task", {}))

  def step(self, action):
    self.log.append("env.step")
    self.count += 1
    done = self.count == len(self.rewards)
    return self._run(
      "step", (f"obs {self.count}", self.rewards[self.count - 1], done, {})
    )

  def close(self):
    self.log.append("env.close")
    self.closed += 1
    self._run("close", None)


async def say_x(messages):
  """A null model."""
  return "x"


class Recorder:
  """An observer that keeps every event."""

  def __init__(self):
    self.events = []

  def on_event(self, event):
    self.events.append(event)

  def of(self, kind):
    return [e for e in self.events if isinstance(e, kind)]


EOT = 1
PAD = 2
IMAGE_TOKENS = 3


class CharRenderer:
  """One token a character (code point + 10); images are runs of PAD.

  Small enough to be checked by eye, and strict: whatever was sampled decodes
  to text that encodes to other ids as soon as a merge (`~`) is involved.
  """

  stop_token_ids = (EOT,)
  image_token_id = PAD
  merged = 5  # Decodes to "ab", which never encodes to it.

  def __init__(self):
    self.rendered = 0  # Messages rendered, for cost checks.

  def _encode(self, text):
    return [ord(c) + 10 for c in text]

  def _tokens(self, messages, head=()):
    tokens, spans = list(head), []
    for message in messages:
      self.rendered += 1
      tokens += self._encode("<" + message["role"][0] + ">")
      content = message["content"]
      parts = (
        [{"type": "text", "text": content}]
        if isinstance(content, str)
        else content
      )
      for part in parts:
        if part["type"] == "text":
          tokens += self._encode(part["text"])
        else:
          spans.append(
            trajectory_lib.ImageSpan(part["image"], len(tokens), IMAGE_TOKENS)
          )
          tokens += [PAD] * IMAGE_TOKENS
      tokens.append(EOT)
    return policy_client.TokenPrompt(
      np.array(tokens + self._encode("<a>"), np.int32), tuple(spans)
    )

  def render(self, messages, add_generation_prompt=True):
    assert add_generation_prompt
    return self._tokens(messages)

  def bridge(self, new_messages, *, last_sampled_is_eot):
    return self._tokens(
      new_messages, head=() if last_sampled_is_eot else (EOT,)
    )

  def decode(self, ids):
    return "".join(
      "ab" if int(i) == self.merged else chr(int(i) - 10)
      for i in ids
      if int(i) != EOT
    )


class TokenClient:
  """Samples `script(turn, sampling) -> ids`; keeps what it was asked."""

  def __init__(self, script, version=0, limit=None):
    self.script = script
    self.version = version
    self.limit = limit
    self.prompts = []
    self.requests = []
    self.opened = []
    self.released = []

  def open_session(self, session):
    self.opened.append(session)

  async def generate(self, prompt, sampling, *, session):
    await asyncio.sleep(0)
    if self.limit is not None and len(prompt) >= self.limit:
      raise policy_client.ContextLimitError(f"{len(prompt)} tokens")
    tokens = list(self.script(len(self.prompts), sampling))
    tokens = tokens[: sampling.max_new_tokens]
    self.prompts.append(np.array(prompt.tokens))
    self.requests.append((session, sampling))
    stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
    return policy_client.Completion(
      tokens=np.array(tokens, np.int32),
      logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
      versions=np.full(len(tokens), self.version, np.int32),
      finish_reason=policy_client.FinishReason.STOP
      if stopped
      else policy_client.FinishReason.LENGTH,
    )

  async def release(self, session):
    self.released.append(session)


def wait_until(condition, timeout=20.0):
  """Waits for another thread; True when the condition came true."""
  deadline = time.monotonic() + timeout
  while not condition():
    if time.monotonic() > deadline:
      return False
    time.sleep(0.005)
  return True
