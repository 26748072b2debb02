"""`/v1/responses`: its bodies, answers and streams.

Items are put together to the messages that a chat completion would have: an
assistant message and the function calls after it are one.

Promises: text that is streamed adds up to that of the whole answer, and every
event carries the next `sequence_number`.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Mapping

import numpy as np
from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import chat
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import fields
from tunix.rl.multi_turn.serving import requests

PREFIX = "resp_"
ROLES = ("system", "developer", "user", "assistant")

_LOGPROBS = "message.output_text.logprobs"
_KNOWN = requests.COMMON | {
    "input", "instructions", "max_output_tokens", "tools", "tool_choice",
    "previous_response_id", "store", "include", "stream_options",
    "top_logprobs", "parallel_tool_calls", "text",
}  # pyformat: disable
_NEUTRAL = requests.NEUTRAL | {
    "background": (False,),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "truncation": ("disabled",),
}
# What items say about themselves, and what no sample depends on.
_OF_ITEM = {"id", "type", "status"}


def read(body: Mapping[str, Any], limits: requests.Limits) -> requests.Request:
  """Checks a body.

  Raises:
    ApiError: naming the field.
  """
  fields.refuse_others(body, _KNOWN, _NEUTRAL)
  tools = _tools(body)
  if requests.include_usage(body):
    raise fields.unsupported("stream_options.include_usage", True)
  include = body.get("include") or []
  if include not in ([], [_LOGPROBS]):
    raise errors.invalid(
        "include",
        f"include may hold {_LOGPROBS!r}, got {fields.shown(include)}",
        "unsupported_parameter",
    )
  instructions = body.get("instructions")
  if instructions is not None:
    instructions = fields.string(body, "instructions")
  previous = body.get("previous_response_id")
  if previous is not None:
    previous = fields.string(body, "previous_response_id")
  alternatives = requests.alternatives(
      body, bool(include), f"include=[{_LOGPROBS!r}]"
  )
  parse_tools, calls = requests.tool_choice(body, tools)
  text = fields.mapping("text", body.get("text") or {})
  fields.refuse_others(text, {"format"}, where="text")
  shape = requests.json_format(
      "text.format", text.get("format"), text.get("format")
  )
  guide = requests.guide(body, calls, shape)
  if parse_tools and guide is not None and guide is not calls:
    raise errors.invalid(
        guide.field,
        f"{guide.field} leaves no room for tool calls; leave tools out, or set"
        " tool_choice to none",
    )
  return requests.Request(
      model=fields.string(body, "model"),
      messages=_messages(body.get("input"), limits),
      sampling=requests.sampling(
          body, limits, "max_output_tokens", alternatives
      ),
      stream=fields.flag(body, "stream"),
      logprobs=bool(include),
      guide=guide,
      tools=requests.shown(tools),
      parse_tools=parse_tools,
      return_token_ids=fields.flag(body, "return_token_ids"),
      instructions=instructions,
      previous=previous,
      remember=fields.flag(body, "store", True),
      told={
          "instructions": instructions,
          "max_output_tokens": body.get("max_output_tokens"),
          "metadata": body.get("metadata") or {},
          "previous_response_id": previous,
          "store": fields.flag(body, "store", True),
          "temperature": body.get("temperature", 1.0),
          "tool_choice": body.get("tool_choice") or "auto",
          "parallel_tool_calls": fields.flag(body, "parallel_tool_calls", True),
          "text": {"format": {"type": "text"}, **text},
          "top_logprobs": alternatives,
          "tools": body.get("tools") or [],
          "top_p": body.get("top_p", 1.0),
          "user": body.get("user"),
      },
  )


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
  """Functions, in the shape that chat completions have them."""
  tools = body.get("tools") or []
  if not isinstance(tools, list):
    raise errors.invalid("tools", "tools must be a list")
  shaped = []
  for i, tool in enumerate(tools):
    where = f"tools[{i}]"
    function = {**fields.mapping(where, tool)}
    kind = function.pop("type", None)
    if kind != "function":
      raise errors.invalid(
          where, f"{where}.type must be 'function', got {fields.shown(kind)}"
      )
    requests.check_tool(where, function)
    shaped.append({"type": "function", "function": function})
  return tuple(shaped)


# --- items --------------------------------------------------------------------


def _messages(
    found: Any, limits: requests.Limits
) -> tuple[requests.Message, ...]:
  if isinstance(found, str) and found:
    return ({"role": "user", "content": fields.text("input", found)},)
  if not isinstance(found, list) or not found:
    raise errors.invalid(
        "input",
        "input must be a text or a list of items, not empty; got"
        f" {fields.shown(found)}",
    )
  messages: list[requests.Message] = []
  for i, item in enumerate(found):
    where = f"input[{i}]"
    item = fields.mapping(where, item)
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
      messages.append(_message(where, item))
    elif kind == "function_call":
      call = _function_call(where, item)
      # What was said before a call belongs to it, as it was one answer.
      if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
      messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
      messages.append(_function_output(where, item))
    else:
      raise errors.invalid(
          where,
          f"{where}.type={fields.shown(kind)} is not taken; items are message,"
          " function_call and function_call_output",
          "unsupported_content",
      )
  limits.check_images(requests.count_images(messages), "input")
  return tuple(messages)


def _message(where: str, item: Mapping[str, Any]) -> requests.Message:
  fields.refuse_others(item, _OF_ITEM | {"role", "content"}, where=where)
  role = item.get("role")
  if role not in ROLES:
    raise errors.invalid(
        f"{where}.role",
        f"{where}.role must be one of {', '.join(ROLES)}, got"
        f" {fields.shown(role)}",
    )
  return {
      "role": "system" if role == "developer" else role,
      "content": _content(f"{where}.content", role, item.get("content")),
  }


def _content(where: str, role: str, content: Any) -> Any:
  """A string, or a list of text and image_url parts."""
  if isinstance(content, str):
    return fields.text(where, content)
  if not isinstance(content, list) or not content:
    raise errors.invalid(
        where,
        f"{where} must be a string or a list of parts, got"
        f" {fields.shown(content)}",
    )
  parts = []
  for j, part in enumerate(content):
    at = f"{where}[{j}]"
    part = fields.mapping(at, part)
    kind = part.get("type")
    text = "output_text" if role == "assistant" else "input_text"
    if kind == text and isinstance(part.get("text"), str):
      # An answer's own parts come back with what was told beside the text.
      told = {"annotations", "logprobs"} if role == "assistant" else set()
      fields.refuse_others(part, {"type", "text"} | told, where=at)
      shown = fields.text(f"{at}.text", part["text"])
      parts.append({"type": "text", "text": shown})
    elif kind == "input_image" and role in ("user", "tool"):
      fields.refuse_others(part, {"type", "image_url", "detail"}, where=at)
      parts.append(
          requests.image_url(at, part.get("image_url"), part.get("detail"))
      )
    else:
      raise errors.invalid(
          at,
          f"{at}.type={fields.shown(kind)} is not taken from role {role!r};"
          f" parts are {text} and, from user and tools, input_image",
          "unsupported_content",
      )
  return parts


def _function_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
  fields.refuse_others(
      item, _OF_ITEM | {"call_id", "name", "arguments"}, where=where
  )
  return chat.tool_call(where, fields.string(item, "call_id", where), item)


def _function_output(where: str, item: Mapping[str, Any]) -> requests.Message:
  fields.refuse_others(item, _OF_ITEM | {"call_id", "output"}, where=where)
  return {
      "role": "tool",
      "content": _content(f"{where}.output", "tool", item.get("output")),
      "tool_call_id": fields.string(item, "call_id", where),
  }


# --- answers ------------------------------------------------------------------


def _response(
    asked: requests.Request, answer_id: str, created: float
) -> dict[str, Any]:
  """The object of an answer that has not begun."""
  return {
      "id": answer_id,
      "object": "response",
      "created_at": created,
      "model": asked.model,
      "status": "in_progress",
      "background": False,
      "error": None,
      "incomplete_details": None,
      "output": [],
      "reasoning": {"effort": None, "summary": None},
      "truncation": "disabled",
      "usage": None,
      **asked.told,
  }


def _text_part(
    text: str, logprobs: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
  return {
      "type": "output_text",
      "text": text,
      "annotations": [],
      "logprobs": logprobs or [],
  }


def _message_item(
    answer_id: str, status: str, content: list[dict[str, Any]]
) -> dict[str, Any]:
  return {
      "id": f"msg_{answer_id.removeprefix(PREFIX)}",
      "type": "message",
      "role": "assistant",
      "status": status,
      "content": content,
  }


def _call_items(answer: answers.Answer) -> list[dict[str, Any]]:
  return [
      {
          "id": f"fc_{answer.id.removeprefix(PREFIX)}_{i}",
          "type": "function_call",
          "call_id": call["id"],
          "name": call["function"]["name"],
          "arguments": call["function"]["arguments"],
          "status": "completed",
      }
      for i, call in enumerate(answer.choices[0].message.get("tool_calls", ()))
  ]


def whole(
    asked: requests.Request, answer: answers.Answer, decoder: answers.Decoder
) -> dict[str, Any]:
  """The JSON object of an answer that is not streamed."""
  choice = answer.choices[0]
  cut = choice.finish_reason == "length"
  status = "incomplete" if cut else "completed"
  calls = _call_items(answer)
  output = []
  if choice.message["content"] or not calls:
    logprobs = (
        answers.logprobs(choice.completion, decoder) if asked.logprobs else None
    )
    part = _text_part(choice.message["content"] or "", logprobs)
    output.append(_message_item(answer.id, status, [part]))
  result = _response(asked, answer.id, answer.created) | {
      "status": status,
      "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
      "output": output + calls,
      "usage": {
          "input_tokens": answer.num_prompt_tokens,
          "input_tokens_details": {"cached_tokens": answer.reused_tokens},
          "output_tokens": answer.num_sampled,
          "output_tokens_details": {"reasoning_tokens": 0},
          "total_tokens": answer.num_prompt_tokens + answer.num_sampled,
      },
      **answers.extras(asked, answer, 0),
  }
  if asked.return_token_ids:
    result["prompt_token_ids"] = answer.prompt_tokens.tolist()
    result["token_logprobs"] = choice.completion.logprobs.tolist()
  return result


class Stream:
  """The events of an answer as it is sampled; function calls come at the end.

  Text begins its message with the first of it: with tools, what is a message
  and what a call is known when all is there.
  """

  last = b""

  def __init__(
      self,
      asked: requests.Request,
      answer_id: str,
      created: int,
      decoder: answers.Decoder,
  ):
    self._asked = asked
    self._id = answer_id
    self._created = created
    self._decoder = decoder
    self._text = answers.TextStream(decoder)
    self._numbers = itertools.count()
    self._begun = False  # The message.
    self._message = {
        "item_id": _message_item(answer_id, "", [])["id"],
        "output_index": 0,
        "content_index": 0,
    }

  def start(self) -> Iterator[dict[str, Any]]:
    response = _response(self._asked, self._id, self._created)
    yield self._event("response.created", response=response)
    yield self._event("response.in_progress", response=response)

  def tokens(self, index: int, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    del index
    if not self._asked.parse_tools:
      if new := self._text.feed(tokens):
        yield from self._delta(new)

  def finish(self, answer: answers.Answer) -> Iterator[dict[str, Any]]:
    response = whole(self._asked, answer, self._decoder)
    for place, item in enumerate(response["output"]):
      if item["type"] == "message":
        yield from self._end_message(item)
      else:
        yield from self._call(place, item)
    event = f"response.{response['status']}"
    yield self._event(event, response=response)

  def failed(self, error: errors.ApiError) -> Iterator[dict[str, Any]]:
    body = error.body()
    # The event's own fields; and `error`, at which clients raise.
    told = {k: body["error"][k] for k in ("code", "message", "param")}
    yield self._event("error", **told, **body)

  def _event(self, kind: str, **fields_: Any) -> dict[str, Any]:
    return {"type": kind, "sequence_number": next(self._numbers), **fields_}

  def _delta(self, text: str) -> Iterator[dict[str, Any]]:
    if not self._begun:
      self._begun = True
      item = _message_item(self._id, "in_progress", [])
      yield self._event(
          "response.output_item.added", output_index=0, item=item
      )
      yield self._event(
          "response.content_part.added", **self._message, part=_text_part("")
      )
    if text:
      yield self._event(
          "response.output_text.delta", **self._message, delta=text, logprobs=[]
      )

  def _end_message(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    yield from self._delta(self._text.rest(part["text"]))
    yield self._event(
        "response.output_text.done",
        **self._message,
        text=part["text"],
        logprobs=part["logprobs"],
    )
    yield self._event(
        "response.content_part.done", **self._message, part=part
    )
    yield self._event("response.output_item.done", output_index=0, item=item)

  def _call(
      self, place: int, item: dict[str, Any]
  ) -> Iterator[dict[str, Any]]:
    begun = item | {"arguments": "", "status": "in_progress"}
    yield self._event(
        "response.output_item.added", output_index=place, item=begun
    )
    at = {"item_id": item["id"], "output_index": place}
    yield self._event(
        "response.function_call_arguments.delta", **at, delta=item["arguments"]
    )
    yield self._event(
        "response.function_call_arguments.done",
        **at,
        name=item["name"],
        arguments=item["arguments"],
    )
    yield self._event(
        "response.output_item.done", output_index=place, item=item
    )
