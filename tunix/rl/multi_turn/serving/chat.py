"""`/v1/chat/completions`: its bodies, answers and streams.

Promises: what a client is told is the sampled text, cut into content and tool
calls and otherwise unchanged; text that is streamed adds up to that of the
whole answer.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import fields
from tunix.rl.multi_turn.serving import requests

PREFIX = "chatcmpl-"
ROLES = ("system", "developer", "user", "assistant", "tool")

_KNOWN = requests.COMMON | {
    "messages", "max_tokens", "max_completion_tokens", "n", "stream_options",
    "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "stop", "response_format", "prompt_token_ids",
}  # pyformat: disable
_NEUTRAL = requests.NEUTRAL | {
    "store": (False,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "reasoning_effort": ("none",),
}
# Of a message; its empty fields come back from clients that dump the answer.
_FIELDS = {
    "system": {"content"},
    "developer": {"content"},
    "user": {"content"},
    "assistant": {"content", "tool_calls"},
    "tool": {"content", "tool_call_id"},
}
_EMPTY = {"annotations": ([],), "tool_calls": ([],), "refusal": ("",)}


def read(body: Mapping[str, Any], limits: requests.Limits) -> requests.Request:
  """Checks a body.

  Raises:
    ApiError: naming the field.
  """
  fields.refuse_others(body, _KNOWN, _NEUTRAL)
  tools = _tools(body)
  if None not in (body.get("max_tokens"), body.get("max_completion_tokens")):
    raise errors.invalid(
        "max_tokens", "give max_tokens or max_completion_tokens, not both"
    )
  length = "max_tokens"
  if body.get("max_completion_tokens") is not None:
    length = "max_completion_tokens"
  logprobs = fields.flag(body, "logprobs")
  alternatives = requests.alternatives(body, logprobs, "logprobs=true")
  sampling = requests.sampling(body, limits, length, alternatives)
  parse_tools, calls = requests.tool_choice(body, tools)
  shape = requests.json_format("response_format", body.get("response_format"))
  guide = requests.guide(body, calls, shape)
  if parse_tools and guide is not None and guide is not calls:
    raise errors.invalid(
        guide.field,
        f"{guide.field} leaves no room for tool calls; leave tools out, or set"
        " tool_choice to none",
    )
  messages = _messages(body.get("messages"), limits)
  tokens = _prompt_tokens(body, messages, tools, limits)
  return requests.Request(
      model=fields.string(body, "model"),
      messages=messages,
      tokens=tokens,
      kept_by_client=tokens is not None,
      sampling=sampling,
      n=requests.choices(body, limits, sampling),
      stream=fields.flag(body, "stream"),
      include_usage=requests.include_usage(body),
      logprobs=logprobs,
      stop=requests.stop(body),
      guide=guide,
      # Shown also where none may be called: hidden, they would break the
      # session's sequence.
      tools=requests.shown(tools),
      parse_tools=parse_tools,
      return_token_ids=fields.flag(body, "return_token_ids"),
  )


def _prompt_tokens(
    body: Mapping[str, Any],
    messages: Sequence[requests.Message],
    tools: Sequence[Any],
    limits: requests.Limits,
) -> tuple[int, ...] | None:
  """A prompt that is tokens already; its messages may only hold its images."""
  name = "prompt_token_ids"
  if body.get(name) is None:
    return None
  ids = fields.token_ids(name, body[name], limits.prompt_tokens)
  if not ids:
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
  return ids


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
  tools = body.get("tools") or []
  if not isinstance(tools, list):
    raise errors.invalid("tools", "tools must be a list")
  for i, tool in enumerate(tools):
    where = f"tools[{i}]"
    tool = fields.mapping(where, tool)
    if tool.get("type") != "function":
      raise errors.invalid(
          where,
          f"{where}.type must be 'function', got"
          f" {fields.shown(tool.get('type'))}",
      )
    fields.refuse_others(tool, {"type", "function"}, where=where)
    where += ".function"
    requests.check_tool(where, fields.mapping(where, tool.get("function")))
  return tuple(tools)


def _messages(
    found: Any, limits: requests.Limits
) -> tuple[requests.Message, ...]:
  if not isinstance(found, list) or not found:
    raise errors.invalid("messages", "messages must be a list with an entry")
  result = []
  for i, message in enumerate(found):
    where = f"messages[{i}]"
    message = fields.mapping(where, message)
    role = message.get("role")
    if role not in ROLES:
      raise errors.invalid(
          f"{where}.role",
          f"{where}.role must be one of {', '.join(ROLES)}, got"
          f" {fields.shown(role)}",
      )
    fields.refuse_others(message, _FIELDS[role] | {"role"}, _EMPTY, where)
    kept: requests.Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(where, role, message.get("content")),
    }
    if message.get("tool_calls"):
      kept["tool_calls"] = _tool_calls(where, message["tool_calls"])
    elif kept["content"] is None:
      raise errors.invalid(f"{where}.content", f"{where} has no content")
    if message.get("tool_call_id") is not None:
      kept["tool_call_id"] = fields.string(message, "tool_call_id", where)
    result.append(kept)
  limits.check_images(requests.count_images(result), "messages")
  return tuple(result)


def _content(where: str, role: str, content: Any) -> Any:
  """A string, a list of text and image_url parts, or None."""
  at = f"{where}.content"
  if content is None:
    return None
  if isinstance(content, str):
    return fields.text(at, content)
  if not isinstance(content, list):
    raise errors.invalid(
        at, f"{at} must be a string or a list, got {fields.shown(content)}"
    )
  parts = []
  for j, part in enumerate(content):
    at = f"{where}.content[{j}]"
    part = fields.mapping(at, part)
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
      fields.refuse_others(part, {"type", "text"}, where=at)
      text = fields.text(f"{at}.text", part["text"])
      parts.append({"type": "text", "text": text})
    elif kind == "image_url" and role in ("user", "tool"):
      fields.refuse_others(part, {"type", "image_url"}, where=at)
      image = part.get("image_url")
      if not isinstance(image, Mapping):
        image = {"url": image}
      fields.refuse_others(
          image, {"url", "detail"}, where=f"{at}.image_url"
      )
      parts.append(
          requests.image_url(at, image.get("url"), image.get("detail"))
      )
    else:
      raise errors.invalid(
          at,
          f"{at}.type={fields.shown(kind)} is not taken in a message of role"
          f" {role!r}; parts are text and, from user and tool, image_url",
          "unsupported_content",
      )
  return parts


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
  if not isinstance(calls, list):
    raise errors.invalid(
        f"{where}.tool_calls", f"{where}.tool_calls must be a list"
    )
  kept = []
  for j, call in enumerate(calls):
    at = f"{where}.tool_calls[{j}]"
    call = fields.mapping(at, call)
    # The index is a stream's, and is kept by some who put one together.
    fields.refuse_others(call, {"id", "type", "function", "index"}, where=at)
    if call.get("type") not in (None, "function"):
      raise fields.unsupported(f"{at}.type", call["type"])
    if call.get("id") is not None:
      fields.string(call, "id", at)
    call_id, at = call.get("id"), f"{at}.function"
    function = fields.mapping(at, call.get("function"))
    fields.refuse_others(function, {"name", "arguments"}, where=at)
    kept.append(tool_call(at, call_id, function))
  return kept


def tool_call(
    where: str, call_id: str | None, function: Mapping[str, Any]
) -> dict[str, Any]:
  """A call as assistant messages hold it, checked."""
  fields.string(function, "name", where)
  arguments = function.get("arguments")
  if not isinstance(arguments, str):
    raise errors.invalid(
        where,
        f"{where}.arguments must be JSON text, got {fields.shown(arguments)}",
    )
  return {
      "id": call_id,
      "type": "function",
      "function": {
          "name": function["name"],
          "arguments": fields.text(f"{where}.arguments", arguments),
      },
  }


# --- answers ------------------------------------------------------------------


def whole(
    asked: requests.Request, answer: answers.Answer, decoder: answers.Decoder
) -> dict[str, Any]:
  """The JSON object of an answer that is not streamed."""
  choices = []
  for i, choice in enumerate(answer.choices):
    choices.append({
        "index": i,
        "message": choice.message | {"refusal": None},
        "finish_reason": choice.finish_reason,
        "logprobs": (
            {
                "content": answers.logprobs(choice.completion, decoder),
                "refusal": None,
            }
            if asked.logprobs
            else None
        ),
        **answers.extras(asked, answer, i),
    })
  result = {
      "id": answer.id,
      "object": "chat.completion",
      "created": answer.created,
      "model": answer.model,
      "choices": choices,
      "usage": answers.usage(answer),
  }
  if asked.return_token_ids:
    result["prompt_token_ids"] = answer.prompt_tokens.tolist()
  return result


class Stream(answers.ChoiceStream):
  """The events of an answer as it is sampled; tool calls come at the end."""

  kind = "chat.completion.chunk"

  def start(self) -> Iterator[dict[str, Any]]:
    for i in range(self._asked.n):
      yield self._chunk(i, self._delta({"role": "assistant", "content": ""}))

  def _new(self, text: str) -> dict[str, Any]:
    return self._delta({"content": text})

  def _ending(
      self, answer: answers.Answer, index: int
  ) -> Iterator[dict[str, Any]]:
    asked, choice = self._asked, answer.choices[index]
    for delta in self._rest(index, choice):
      yield self._chunk(index, self._delta(delta))
    extra = answers.extras(asked, answer, index)
    if asked.logprobs:
      content = answers.logprobs(choice.completion, self._decoder)
      extra["logprobs"] = {"content": content, "refusal": None}
    event = self._chunk(
        index, self._delta({}), finish_reason=choice.finish_reason, **extra
    )
    if asked.return_token_ids:
      event["prompt_token_ids"] = answer.prompt_tokens.tolist()
    yield event

  def _rest(
      self, index: int, choice: answers.Choice
  ) -> Iterator[dict[str, Any]]:
    calls = choice.message.get("tool_calls")
    content = choice.message["content"] or ""
    rest = content if calls else self._texts[index].rest(content)
    if rest:
      yield {"content": rest}
    for i, call in enumerate(calls or ()):
      yield {"tool_calls": [{"index": i, **call}]}

  def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta}
