"""A checked request, and what the endpoints' bodies have in common.

Promises: nothing is ignored that could change what is sampled.

Does not fetch images or render: messages come out as they were sent, checked
for their shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import fields

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one request may ask for.

  Attributes:
    max_new_tokens: cap of a completion, and its length unless asked for.
    n: completions of one request.
    images: images of one prompt.
    body_bytes: size of a request.
    prompt_tokens: of a prompt that comes as tokens; None: the context that the
      policy has.
  """

  max_new_tokens: int = 1024
  n: int = 16
  images: int = 64
  body_bytes: int = 64 << 20
  prompt_tokens: int | None = None

  def __post_init__(self):
    for name in ("max_new_tokens", "n", "body_bytes"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

  @property
  def values(self) -> int | None:
    """Of a body: those of a prompt, twice, and of all else."""
    most = self.prompt_tokens
    return None if most is None else 2 * most + (1 << 16)

  def check_images(self, count: int, where: str) -> None:
    if count > self.images:
      raise errors.invalid(
          where,
          f"{where} holds {count} images, at most {self.images} are taken in a"
          " prompt; drop older screenshots",
          "too_many_images",
      )


@dataclasses.dataclass(frozen=True)
class Guide:
  """A grammar that is asked for.

  Attributes:
    kind: "json", "regex" or "calls".
    value: a JSON schema, None for any object; a pattern; the tools that may be
      called.
    field: that asked for it.
    many: whether more calls may follow the first.
    free: whether calls are made at all.
  """

  kind: str
  value: Any
  field: str
  many: bool = False
  free: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A checked request. Its prompt is messages, or a text, or tokens.

  Attributes:
    model: as asked for.
    sampling: of each completion; a seed is that of the first.
    messages: as sent; image parts hold their URL.
    text: a prompt that is rendered as it stands.
    tokens: a prompt that is rendered already; messages may then hold the
      images of the placeholders in it, in their order, and nothing else.
    kept_by_client: the client keeps the tokens. Of a session it uses the cache,
      and that the same body again gets the same completion; nothing is stored.
    n: completions.
    stream: answer in server-sent events.
    include_usage: a stream tells it at the end.
    logprobs: give those of sampled tokens.
    stop: strings that end a completion; its text ends before them.
    guide: what may be sampled at all.
    tools: OpenAI schemas that the policy is shown.
    parse_tools: read tool calls out of the answer.
    return_token_ids: give the ids of prompt and completions.
    instructions: a system message that is not remembered.
    previous: the answer whose messages come before these.
    remember: keep messages and answer for a request that names it as previous.
    told: fields that the answer repeats.
  """

  model: str
  sampling: policy_client.SamplingParams
  messages: tuple[Message, ...] | None = None
  text: str | None = None
  tokens: tuple[int, ...] | None = None
  kept_by_client: bool = False
  n: int = 1
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  stop: tuple[str, ...] = ()
  guide: Guide | None = None
  tools: tuple[Mapping[str, Any], ...] = ()
  parse_tools: bool = False
  return_token_ids: bool = False
  instructions: str | None = None
  previous: str | None = None
  remember: bool = False
  told: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def prompt_field(self) -> str:
    """What errors about the prompt name."""
    if self.text is self.tokens is None:
      return "messages"
    return "prompt" if self.messages is None else "prompt_token_ids"


# What every endpoint takes.
COMMON = fields.NO_EFFECT | {
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stream",
    "stop_token_ids", "return_token_ids", "return_raw_logprobs", "guided_regex",
}  # pyformat: disable
MAX_STOPS = 16

# What none does, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "service_tier": ("auto", "default"),
}


def sampling(
    body: Mapping[str, Any], limits: Limits, length: str, alternatives: int = 0
) -> policy_client.SamplingParams:
  """How to sample; the field `length` says how much."""
  top_p = fields.number(body, "top_p", 1.0, 0.0, 1.0)
  if top_p == 0:
    raise errors.invalid("top_p", "top_p must be in (0, 1], got 0")
  seed = None
  if body.get("seed") is not None:
    seed = fields.integer(body, "seed", 0, 0, 2**31 - 1)
  most = limits.max_new_tokens
  return policy_client.SamplingParams(
      max_new_tokens=fields.integer(body, length, most, 1, most),
      temperature=fields.number(body, "temperature", 1.0, 0.0, 100.0),
      top_p=top_p,
      top_k=max(0, fields.integer(body, "top_k", 0, -1, 1 << 30)),
      seed=seed,
      stop_token_ids=fields.token_ids(
          "stop_token_ids", body.get("stop_token_ids") or []
      ),
      min_p=fields.number(body, "min_p", 0.0, 0.0, 1.0),
      top_logprobs=alternatives,
      raw_logprobs=fields.flag(body, "return_raw_logprobs"),
  )


def alternatives(body: Mapping[str, Any], wanted: bool, need: str) -> int:
  """The field `top_logprobs`, for which log-probs must be `wanted`."""
  most = policy_client.MAX_TOP_LOGPROBS
  count = fields.integer(body, "top_logprobs", 0, 0, most)
  if count and not wanted:
    raise errors.invalid(
        "top_logprobs", f"top_logprobs={count} needs {need}"
    )
  return count


def stop(body: Mapping[str, Any]) -> tuple[str, ...]:
  """The field `stop`."""
  given = body.get("stop")
  if given is None or given == "":
    return ()
  strings = [given] if isinstance(given, str) else given
  if (
      not isinstance(strings, list)
      or len(strings) > MAX_STOPS
      or not all(isinstance(s, str) and s for s in strings)
  ):
    raise errors.invalid(
        "stop",
        f"stop must be a string or a list of up to {MAX_STOPS} strings, none"
        f" empty; got {fields.shown(given)}",
    )
  return tuple(fields.text("stop", s) for s in strings)


def guide(
    body: Mapping[str, Any], *others: Guide | None
) -> Guide | None:
  """The one grammar that is asked for, by `guided_regex` or otherwise."""
  asked = [other for other in others if other is not None]
  if body.get("guided_regex") is not None:
    pattern = fields.string(body, "guided_regex")
    asked.append(Guide("regex", pattern, "guided_regex"))
  if len(asked) > 1:
    names = " and ".join(one.field for one in asked)
    raise errors.invalid(
        asked[0].field, f"{names} exclude each other; leave one out"
    )
  return asked[0] if asked else None


def json_format(
    where: str, given: Any, shape: Mapping[str, Any] | None = None
) -> Guide | None:
  """A format for answers: `response_format`, and `text.format`.

  Args:
    where: the field.
    given: its value.
    shape: of a JSON schema, what holds it; None: it is in `json_schema`.
  """
  if given is None:
    return None
  given = fields.mapping(where, given)
  kind = given.get("type")
  if kind not in ("text", "json_object", "json_schema"):
    raise errors.invalid(
        f"{where}.type",
        f"{where}.type must be text, json_object or json_schema, got"
        f" {fields.shown(kind)}",
    )
  if kind != "json_schema":
    fields.refuse_others(given, {"type"}, where=where)
    return Guide("json", None, where) if kind == "json_object" else None
  if shape is None:
    fields.refuse_others(given, {"type", "json_schema"}, where=where)
    where += ".json_schema"
    shape = fields.mapping(where, given.get("json_schema"))
  known = {"type", "name", "description", "schema", "strict"}
  fields.refuse_others(shape, known, where=where)
  fields.string(shape, "name", where)
  schema = shape.get("schema")
  if schema is None:
    return Guide("json", None, where)
  return Guide(
      "json", fields.mapping(f"{where}.schema", schema), f"{where}.schema"
  )


def tool_choice(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[bool, Guide | None]:
  """The field `tool_choice`: whether calls are read, and must be made."""
  choice = body.get("tool_choice")
  many = fields.flag(body, "parallel_tool_calls", True)
  if choice in (None, "auto", "none"):
    if not many:
      raise errors.invalid(
          "parallel_tool_calls",
          "parallel_tool_calls=false needs tool_choice 'required'; leave it"
          " out, or say so",
          "unsupported_parameter",
      )
    if choice == "none" or not tools:
      return False, None
    strict = any(t["function"].get("strict") for t in tools)
    guide = Guide("calls", tuple(tools), "tools", free=True) if strict else None
    return True, guide
  if not tools:
    raise errors.invalid("tool_choice", "tool_choice needs tools")
  if choice == "required":
    return True, Guide("calls", tuple(tools), "tools", many)
  name = None
  if isinstance(choice, Mapping) and choice.get("type") == "function":
    # Of a chat completion, or of a response.
    known = {"type", "function", "name"}
    fields.refuse_others(choice, known, where="tool_choice")
    function = choice.get("function") or choice
    name = fields.mapping("tool_choice.function", function).get("name")
  called = [t for t in tools if t["function"]["name"] == name]
  if not called:
    raise errors.invalid(
        "tool_choice",
        f"tool_choice={fields.shown(choice)} must be auto, none, required or"
        " the name of one of the tools",
    )
  return True, Guide("calls", tuple(called), "tools")


def choices(
    body: Mapping[str, Any],
    limits: Limits,
    params: policy_client.SamplingParams,
) -> int:
  """The field `n`."""
  n = fields.integer(body, "n", 1, 1, limits.n)
  if n > 1 and params.temperature == 0:
    raise errors.invalid(
        "n", f"n={n} with temperature=0 would be {n} times the same; use n=1"
    )
  return n


def include_usage(body: Mapping[str, Any]) -> bool:
  """The field `stream_options`."""
  options = body.get("stream_options")
  if options is None:
    return False
  if not fields.flag(body, "stream"):
    raise errors.invalid("stream_options", "stream_options needs stream=true")
  options = fields.mapping("stream_options", options)
  fields.refuse_others(
      options,
      {"include_usage"},
      {"include_obfuscation": (False,)},
      "stream_options",
  )
  return fields.flag(options, "include_usage")


def check_tool(where: str, function: Mapping[str, Any]) -> None:
  """Refuses a function that cannot be shown as it is meant."""
  fields.string(function, "name", where)
  if function.get("parameters") is not None:
    fields.mapping(f"{where}.parameters", function["parameters"])
  fields.refuse_others(
      function,
      {"name", "description", "parameters", "strict"},
      where=where,
  )
  fields.flag(function, "strict")


def shown(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any], ...]:
  """The tools as the policy is to see them: what is strict is not for it."""
  return tuple(
      {**tool, "function": {
          k: v for k, v in tool["function"].items() if k != "strict"
      }}
      for tool in tools
  )  # pyformat: disable


def image_url(where: str, url: Any, detail: Any) -> Message:
  """An image part with its URL."""
  if not isinstance(url, str):
    raise errors.invalid(
        where, f"{where}.image_url needs a url, got {fields.shown(url)}"
    )
  if detail not in (None, "auto", "high", "original"):
    raise fields.unsupported(f"{where}.image_url.detail", detail)
  return {"type": "image_url", "url": url}


def count_images(messages: Any) -> int:
  """Of messages with URLs or with images."""
  return sum(
      part["type"] != "text"
      for message in messages
      if isinstance(message.get("content"), list)
      for part in message["content"]
  )
