"""Sessions of an outside agent, as the tests of what they keep play them."""

import functools

from agent_services.serving.sessions import session_store
import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

FinishReason = policy_client.FinishReason
IMAGES = [trajectory.ImageRef(c * 64, 64, 32) for c in "ab"]
CALL = '<tool_call>\n{"name": "click", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "click"}}]


@functools.lru_cache(1)
def renderer():
  tokenizer = checkpoint.load_tokenizer("tiny_vl")
  return qwen.QwenRenderer(tokenizer, lambda width, height: 6)


def user(*parts):
  content = [
    {"type": "text", "text": p}
    if isinstance(p, str)
    else {"type": "image", "image": p}
    for p in parts
  ]
  return {"role": "user", "content": content}


def say(content):
  return {"role": "assistant", "content": content}


def calling(call_id, arguments='{"x": 1}', content=None):
  function = {"name": "click", "arguments": arguments}
  call = {"id": call_id, "type": "function", "function": function}
  return {"role": "assistant", "content": content, "tool_calls": [call]}


ASK = [{"role": "system", "content": "Use it."}, user("Save.", IMAGES[0])]
NEXT = {"role": "tool", "tool_call_id": "c", "content": "done"}


def completion(tokens, logprobs=None, versions=None):
  closed = len(tokens) and tokens[-1] in renderer().stop_token_ids
  return policy_client.Completion(
    tokens,
    np.full(len(tokens), -0.5) if logprobs is None else logprobs,
    np.full(len(tokens), 3) if versions is None else versions,
    FinishReason.STOP if closed else FinishReason.LENGTH,
  )


def spoken(text, closed=True):
  end = [renderer().end_of_turn_id] if closed else []
  return completion([*renderer().encode(text), *end])


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


def new_session(**kwargs):
  return session_store.ServedSession(renderer(), "s", **kwargs)


def answer(session, messages, text, told=None, closed=True, **kwargs):
  pending = session.prompt(messages)
  return session.add(
    pending, spoken(text, closed), assistant_message=told or say(text), **kwargs
  )
