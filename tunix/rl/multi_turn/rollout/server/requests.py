"""Bodies of `/v1/chat/completions`, read strictly.

Promises: a field that is not served is refused by its name, unless its value
asks for nothing (`presence_penalty: 0`); nothing is ignored that could change
what is sampled.

Does not fetch images or render: messages come out as they were sent, checked
for their shape.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn.rollout.server import errors

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one request may ask for.

  Attributes:
    max_new_tokens: cap of a completion, and its length unless asked for.
    n: completions of one request.
    images: images of one prompt.
    body_bytes: size of a request.
  """

  max_new_tokens: int = 1024
  n: int = 16
  images: int = 64
  body_bytes: int = 64 << 20

  def __post_init__(self):
    for name in ("max_new_tokens", "n", "body_bytes"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A checked request.

  Attributes:
    model: as asked for.
    messages: as sent; image parts hold their URL.
    sampling: of each completion; a seed is that of the first.
    n: completions.
    stream: answer in server-sent events, with usage at the end if asked for.
    include_usage: see `stream`.
    logprobs: give those of sampled tokens.
    tools: OpenAI schemas that the policy is shown.
    parse_tools: read tool calls out of the answer.
    return_token_ids: give the ids of prompt and completions.
    prompt_token_ids: instead of rendering `messages`, which then hold nothing
      but the images of the placeholders in it, in their order.
  """

  model: str
  messages: tuple[Message, ...]
  sampling: policy_client.SamplingParams
  n: int = 1
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  tools: tuple[Mapping[str, Any], ...] = ()
  parse_tools: bool = True
  return_token_ids: bool = False
  prompt_token_ids: tuple[int, ...] = ()


# Fields that are served, and how.
_KNOWN = frozenset({
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "seed", "n", "stream", "stream_options", "logprobs",
    "tools", "tool_choice", "stop_token_ids", "return_token_ids",
    "prompt_token_ids",
})  # pyformat: disable
# Fields about the caller and its bookkeeping: no sample depends on them.
_NO_EFFECT = frozenset({"user", "metadata", "safety_identifier"})
# Fields that are not served, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop": ([], ""),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": ([],),
    "reasoning_effort": ("none",),
}


def read_json(body: bytes, limits: Limits) -> dict[str, Any]:
  """The object that a request's body holds.

  Raises:
    ApiError: too large, or no JSON object.
  """
  if len(body) > limits.body_bytes:
    raise errors.ApiError(
        413,
        f"the body has {len(body):,} bytes, at most {limits.body_bytes:,} are"
        " taken; send fewer or smaller images",
        code="request_too_large",
    )
  try:
    found = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise errors.invalid(
        None, f"the body is not JSON: {error}", "invalid_json"
    ) from None
  if not isinstance(found, dict):
    raise errors.invalid(None, "the body must be a JSON object", "invalid_json")
  return found


def chat(body: Mapping[str, Any], limits: Limits) -> ChatRequest:
  """Checks the body of a chat completion.

  Raises:
    ApiError: naming the field.
  """
  _refuse_unserved(body)
  tools = _tools(body)
  choice = _tool_choice(body, tools)
  stream = _flag(body, "stream")
  options = body.get("stream_options")
  if options is not None and not stream:
    raise errors.invalid(
        "stream_options", "stream_options needs stream=true"
    )
  options = _mapping("stream_options", options or {})
  unknown = sorted(set(options) - {"include_usage"})
  if unknown:
    raise _unsupported(f"stream_options.{unknown[0]}", options[unknown[0]])
  n = _integer(body, "n", 1, 1, limits.n)
  sampling = _sampling(body, limits)
  if n > 1 and sampling.temperature == 0:
    raise errors.invalid(
        "n", f"n={n} with temperature=0 would be {n} times the same; use n=1"
    )
  messages = _messages(body.get("messages"), limits)
  return ChatRequest(
      model=_string(body, "model"),
      messages=messages,
      sampling=sampling,
      n=n,
      stream=stream,
      include_usage=_flag(options, "include_usage"),
      logprobs=_flag(body, "logprobs"),
      # Shown all the same: hidden, they would break the session's sequence.
      tools=tools,
      parse_tools=choice != "none" and bool(tools),
      return_token_ids=_flag(body, "return_token_ids"),
      prompt_token_ids=_prompt_tokens(body, messages, tools),
  )


def _refuse_unserved(body: Mapping[str, Any]) -> None:
  for name, value in body.items():
    if name in _KNOWN or name in _NO_EFFECT or value is None:
      continue
    neutral = _NEUTRAL.get(name, ())
    if value not in neutral:
      raise _unsupported(name, value)


def _unsupported(name: str, value: Any) -> errors.ApiError:
  shown = repr(value)
  shown = shown if len(shown) < 60 else shown[:57] + "..."
  return errors.invalid(
      name,
      f"{name}={shown} is not supported by this server; leave {name} out",
      "unsupported_parameter",
  )


# --- fields -------------------------------------------------------------------


def _sampling(
    body: Mapping[str, Any], limits: Limits
) -> policy_client.SamplingParams:
  if None not in (body.get("max_tokens"), body.get("max_completion_tokens")):
    raise errors.invalid(
        "max_tokens", "give max_tokens or max_completion_tokens, not both"
    )
  name = "max_tokens"
  if body.get("max_completion_tokens") is not None:
    name = "max_completion_tokens"
  most = limits.max_new_tokens
  stops = body.get("stop_token_ids") or []
  if not isinstance(stops, list) or not all(
      isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in stops
  ):
    raise errors.invalid(
        "stop_token_ids", "stop_token_ids must be a list of token ids"
    )
  top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
  if top_p == 0:
    raise errors.invalid("top_p", "top_p must be in (0, 1], got 0")
  seed = body.get("seed")
  return policy_client.SamplingParams(
      max_new_tokens=_integer(body, name, most, 1, most),
      temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
      top_p=top_p,
      top_k=max(0, _integer(body, "top_k", 0, -1, 1 << 30)),
      seed=None if seed is None else _integer(body, "seed", 0, 0, 2**31 - 1),
      stop_token_ids=tuple(stops),
  )


def _prompt_tokens(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    tools: Sequence[Any],
) -> tuple[int, ...]:
  """A prompt that is tokens already; its messages may only hold its images."""
  name = "prompt_token_ids"
  ids = body.get(name)
  if ids is None:
    return ()
  if not isinstance(ids, list) or not ids or not all(
      type(i) is int and 0 <= i < 1 << 31 for i in ids
  ):
    raise errors.invalid(name, f"{name} must be a list of token ids, not empty")
  says = tools or any(
      message["role"] != "user"
      or (message["content"] if isinstance(message["content"], str) else any(
          part["type"] != "image_url" for part in message["content"]
      ))
      for message in messages
  )
  if says:  # It would not be read, or read twice.
    raise errors.invalid(
        "messages",
        f"with {name}, messages hold the images of its placeholders and"
        " nothing else; put texts and tools into the tokens",
    )
  return tuple(ids)


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
  tools = body.get("tools") or []
  if not isinstance(tools, list):
    raise errors.invalid("tools", "tools must be a list")
  for i, tool in enumerate(tools):
    where = f"tools[{i}]"
    kind = _mapping(where, tool).get("type")
    if kind != "function":
      raise errors.invalid(
          where, f"{where}.type must be 'function', got {kind!r}"
      )
    function = _mapping(f"{where}.function", tool.get("function"))
    if not isinstance(function.get("name"), str) or not function["name"]:
      raise errors.invalid(where, f"{where}.function needs a name")
  return tuple(tools)


def _tool_choice(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> str:
  choice = body.get("tool_choice")
  if choice is None:
    return "auto"
  if choice in ("auto", "none"):
    return choice
  if not tools:
    raise errors.invalid("tool_choice", "tool_choice needs tools")
  raise _unsupported("tool_choice", choice)


def _messages(found: Any, limits: Limits) -> tuple[Message, ...]:
  if not isinstance(found, list) or not found:
    raise errors.invalid("messages", "messages must be a list with an entry")
  result, images = [], 0
  for i, message in enumerate(found):
    where = f"messages[{i}]"
    message = _mapping(where, message)
    role = message.get("role")
    if role not in ROLES:
      raise errors.invalid(
          f"{where}.role",
          f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}",
      )
    kept: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(where, role, message.get("content")),
    }
    if isinstance(kept["content"], list):
      images += sum(p["type"] == "image_url" for p in kept["content"])
    if message.get("tool_calls"):
      kept["tool_calls"] = _tool_calls(where, role, message["tool_calls"])
    elif kept["content"] is None:
      raise errors.invalid(f"{where}.content", f"{where} has no content")
    if role == "tool" and message.get("tool_call_id") is not None:
      kept["tool_call_id"] = str(message["tool_call_id"])
    result.append(kept)
  if images > limits.images:
    raise errors.invalid(
        "messages",
        f"the messages hold {images} images, at most {limits.images} are taken"
        " in a prompt; drop older screenshots",
        "too_many_images",
    )
  return tuple(result)


def _content(where: str, role: str, content: Any) -> Any:
  """A string, a list of text and image_url parts, or None."""
  if content is None or isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise errors.invalid(
        f"{where}.content", f"{where}.content must be a string or a list"
    )
  parts = []
  for j, part in enumerate(content):
    at = f"{where}.content[{j}]"
    kind = _mapping(at, part).get("type")
    if kind == "text" and isinstance(part.get("text"), str):
      parts.append({"type": "text", "text": part["text"]})
    elif kind == "image_url" and role in ("user", "tool"):
      image = part.get("image_url")
      url = image.get("url") if isinstance(image, Mapping) else image
      if not isinstance(url, str):
        raise errors.invalid(at, f"{at}.image_url needs a url")
      detail = image.get("detail") if isinstance(image, Mapping) else None
      if detail not in (None, "auto", "high", "original"):
        raise _unsupported(f"{at}.image_url.detail", detail)
      parts.append({"type": "image_url", "url": url})
    else:
      raise errors.invalid(
          at,
          f"{at}.type={kind!r} is not taken in a message of role {role!r};"
          " parts are text and, from user and tool, image_url",
          "unsupported_content",
      )
  return parts


def _tool_calls(where: str, role: str, calls: Any) -> list[dict[str, Any]]:
  if role != "assistant" or not isinstance(calls, list):
    raise errors.invalid(
        f"{where}.tool_calls", "tool_calls are a list in assistant messages"
    )
  for j, call in enumerate(calls):
    at = f"{where}.tool_calls[{j}]"
    function = _mapping(f"{at}.function", _mapping(at, call).get("function"))
    if not isinstance(function.get("name"), str):
      raise errors.invalid(at, f"{at}.function needs a name")
    if not isinstance(function.get("arguments"), str):
      raise errors.invalid(at, f"{at}.function.arguments must be JSON text")
  return list(calls)


# --- values -------------------------------------------------------------------


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
  if not isinstance(value, Mapping):
    raise errors.invalid(where, f"{where} must be an object")
  return value


def _string(body: Mapping[str, Any], name: str) -> str:
  value = body.get(name)
  if not isinstance(value, str) or not value:
    raise errors.invalid(name, f"{name} must be a string, got {value!r}")
  return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
  value = body.get(name)
  if value is None:
    return False
  if not isinstance(value, bool):
    raise errors.invalid(name, f"{name} must be true or false, got {value!r}")
  return value


def _integer(
    body: Mapping[str, Any], name: str, default: int, low: int, high: int
) -> int:
  return _in_range(body, name, default, low, high, int)


def _number(
    body: Mapping[str, Any], name: str, default: float, low: float, high: float
) -> float:
  return float(_in_range(body, name, default, low, high, (int, float)))


def _in_range(
    body: Mapping[str, Any],
    name: str,
    default: Any,
    low: Any,
    high: Any,
    kind: type | tuple[type, ...],
) -> Any:
  value = body.get(name)
  if value is None:
    return default
  good = isinstance(value, kind) and not isinstance(value, bool)
  if not good or not low <= value <= high:  # Not a number is in no range.
    number = "an integer" if kind is int else "a number"
    raise errors.invalid(
        name, f"{name} must be {number} in [{low}, {high}], got {value!r}"
    )
  return value
