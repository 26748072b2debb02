"""Implements `/v1/responses`: its bodies, answers and streams.

Items become the messages that a chat completion would have: an assistant
message and the function calls after it are one.

Promises: streamed text adds up to that of the whole answer, and every event
carries the next `sequence_number`.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Iterator, Literal, Mapping

import pydantic

from agent_services.serving import answers
from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import requests
from agent_services.serving.endpoints import chat
from agent_services.serving.endpoints import streams

PREFIX = "resp_"
_LOGPROBS = "message.output_text.logprobs"

# --- bodies -------------------------------------------------------------------


class InputText(bodies.Body):
  """Text of a message that the client wrote."""

  type: Literal["input_text"]
  text: bodies.AnyText

  def part(self) -> dict[str, Any]:
    return {"type": "text", "text": self.text}


class OutputText(bodies.Body):
  """Text of an earlier answer, as it was returned."""

  type: Literal["output_text"]
  text: bodies.AnyText
  annotations: bodies.Unread = None
  logprobs: bodies.Unread = None

  def part(self) -> dict[str, Any]:
    return {"type": "text", "text": self.text}


class InputImage(bodies.Body):
  """An image by its URL."""

  type: Literal["input_image"]
  image_url: bodies.AnyText
  detail: requests.Detail = "auto"

  def part(self) -> dict[str, Any]:
    return {"type": "image_url", "url": self.image_url}


_CONTENT = bodies.ByShape("must be a string or a list of parts, not empty")
_LIST = bodies.Items("must be a string or a list of parts, not empty", 1)
_PART = bodies.ByField("type", "unsupported_content")
_Texts = Annotated[
  bodies.AnyText | Annotated[list[Annotated[InputText, _PART]], _LIST], _CONTENT
]
_Outputs = Annotated[
  bodies.AnyText | Annotated[list[Annotated[OutputText, _PART]], _LIST],
  _CONTENT,
]
_Parts = Annotated[
  bodies.AnyText
  | Annotated[list[Annotated[InputText | InputImage, _PART]], _LIST],
  _CONTENT,
]


def _content(content: Any) -> Any:
  """Returns a string, or a list of text and image_url parts."""
  if isinstance(content, str):
    return content
  return [part.part() for part in content]


class _Item(bodies.Body):
  """The fields of items that no sample depends on."""

  id: bodies.Unread = None
  status: bodies.Unread = None
  # Of NeMo Gym; a session holds the tokens of its own answers.
  prompt_token_ids: Annotated[Any, bodies.Ignored()] = None
  generation_token_ids: Annotated[Any, bodies.Ignored()] = None
  generation_log_probs: Annotated[Any, bodies.Ignored()] = None


class _MessageItem(_Item):
  type: Literal["message"] = "message"

  def add_to(self: bodies.Spoken, messages: list[requests.Message]) -> None:
    role = "system" if self.role == "developer" else self.role
    messages.append({"role": role, "content": _content(self.content)})


class SystemItem(_MessageItem):
  """Instructions."""

  role: Literal["system", "developer"]
  content: _Texts


class UserItem(_MessageItem):
  """Text and screenshots of the user, or of the environment."""

  role: Literal["user"]
  content: _Parts


class AssistantItem(_MessageItem):
  """An earlier answer's text."""

  role: Literal["assistant"]
  content: _Outputs


class FunctionCall(_Item):
  """An earlier answer's call, with its arguments as JSON text."""

  type: Literal["function_call"]
  call_id: bodies.Text
  name: bodies.Text
  arguments: bodies.JsonText

  def add_to(self, messages: list[requests.Message]) -> None:
    # An answer's text and the calls after it are one message.
    if not messages or messages[-1]["role"] != "assistant":
      messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(
      chat.tool_call(self.call_id, self.name, self.arguments)
    )


class FunctionOutput(_Item):
  """Result of a function call, screenshots included."""

  type: Literal["function_call_output"]
  call_id: bodies.Text
  output: _Parts

  def add_to(self, messages: list[requests.Message]) -> None:
    messages.append(
      {
        "role": "tool",
        "content": _content(self.output),
        "tool_call_id": self.call_id,
      }
    )


_Message = Annotated[
  SystemItem | UserItem | AssistantItem, bodies.ByField("role")
]
_InputItem = Annotated[
  _Message | FunctionCall | FunctionOutput,
  bodies.ByField(
    "type",
    "unsupported_content",
    lambda item: "message" if "role" in item else None,
  ),
]


class ResponseTool(requests.Function):
  """A tool that the policy may call."""

  type: Literal["function"]


class TextOptions(bodies.Body):
  """`text`."""

  verbosity: Annotated[Any, bodies.Ignored()] = None

  format: (
    Annotated[
      requests.TextFormat | requests.JsonFormat | requests.FlatSchemaFormat,
      bodies.ByField("type"),
    ]
    | None
  ) = None


_INPUT = "must be a text or a list of items, not empty"


class ResponseBody(requests.ToolsBody):
  """A body of `/v1/responses`."""

  input: Annotated[
    bodies.Text | Annotated[list[_InputItem], bodies.Items(_INPUT, 1)],
    bodies.ByShape(_INPUT),
  ]
  instructions: bodies.Text | None = None
  max_output_tokens: Annotated[int, bodies.UpTo("max_new_tokens")] | None = None
  tools: Annotated[
    list[Annotated[ResponseTool, bodies.ByField("type")]],
    bodies.Items("must be a list of tools"),
  ] = []
  previous_response_id: bodies.Name | None = None
  store: bodies.Flag = True
  include: Annotated[
    list[
      Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
    ],
    pydantic.Field(max_length=16),
    bodies.Must(
      f"may hold {_LOGPROBS!r} and 'reasoning.encrypted_content'",
      "unsupported_parameter",
    ),
  ] = []
  text: TextOptions = TextOptions()
  background: Annotated[Any, bodies.Neutral(False)] = None
  reasoning: Annotated[
    Any, bodies.Ignored({}, {"effort": None}, {"effort": "none"})
  ] = None
  # "auto" would drop items of a prompt that does not fit: that is refused.
  truncation: Annotated[
    Literal["auto", "disabled"], bodies.Must("must be auto or disabled")
  ] = "disabled"


def read(
  body: Mapping[str, Any], limits: requests.RequestLimits
) -> requests.SamplingRequest:
  """Checks a body.

  Raises:
    ApiError: naming the field.
  """
  fields = bodies.parse(ResponseBody, body, limits)
  if fields.include_usage:
    raise bodies.unsupported("stream_options.include_usage", True)
  logprobs = _LOGPROBS in fields.include
  alternatives = fields.alternatives(logprobs, f"include=[{_LOGPROBS!r}]")
  # As sent: the policy reads the tools' fields in the client's order.
  tools = tuple(map(_chat_tool, body.get("tools") or ()))
  shape = fields.text.format
  parse_tools, guide = fields.guide_with_calls(
    tools,
    fields.called,
    fields.parallel_tool_calls,
    None if shape is None else shape.guide("text.format"),
  )
  messages = _messages(fields.input)
  limits.check_images(requests.count_images(messages), "input")
  return fields.request(
    fields.sampling(fields.max_output_tokens, limits, alternatives),
    messages=tuple(messages),
    logprobs=logprobs,
    guide=guide,
    tools=requests.shown_tools(tools),
    parse_tools=parse_tools,
    one_call=requests.ends_after_call(
      parse_tools, fields.parallel_tool_calls, guide
    ),
    instructions=fields.instructions,
    previous=fields.previous_response_id,
    remember=fields.store,
    echo={
      "instructions": fields.instructions,
      "max_output_tokens": fields.max_output_tokens,
      "metadata": fields.metadata or {},
      "previous_response_id": fields.previous_response_id,
      "store": fields.store,
      "temperature": fields.temperature,
      "tool_choice": body.get("tool_choice") or "auto",
      "parallel_tool_calls": fields.parallel_tool_calls,
      "text": {"format": {"type": "text"}, **(body.get("text") or {})},
      "top_logprobs": alternatives,
      "tools": body.get("tools") or [],
      "top_p": fields.top_p,
      "truncation": fields.truncation,
      "user": fields.user,
    },
  )


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a function in the shape of chat completions."""
  function = {name: value for name, value in tool.items() if name != "type"}
  return {"type": "function", "function": function}


def _messages(items: Any) -> list[requests.Message]:
  if isinstance(items, str):
    return [{"role": "user", "content": items}]
  messages: list[requests.Message] = []
  for item in items:
    item.add_to(messages)
  return messages


# --- answers ------------------------------------------------------------------


def _response(
  request: requests.SamplingRequest, answer_id: str, created: float
) -> dict[str, Any]:
  """Returns the object of an answer that has not begun."""
  return {
    "id": answer_id,
    "object": "response",
    "created_at": created,
    "model": request.model,
    "status": "in_progress",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "reasoning": {"effort": None, "summary": None},
    "usage": None,
    **request.echo,
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


def _call_items(answer: answers.SampledAnswer) -> list[dict[str, Any]]:
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
  request: requests.SamplingRequest,
  answer: answers.SampledAnswer,
  decoder: answers.TokenDecoder,
) -> dict[str, Any]:
  """Returns the JSON object of an answer that is not streamed."""
  choice = answer.choices[0]
  cut = choice.finish_reason == "length"
  status = "incomplete" if cut else "completed"
  calls = _call_items(answer)
  output = []
  if choice.message["content"] or not calls:
    logprobs = None
    if request.logprobs:
      logprobs = answers.logprobs(choice.completion, decoder)
    part = _text_part(choice.message["content"] or "", logprobs)
    output.append(_message_item(answer.id, status, [part]))
  return _response(request, answer.id, answer.created) | {
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
    **answers.extras_of_one(request, answer),
  }


class ResponseStream(streams.AnswerStream):
  """Writer of an answer's events during sampling; function calls come last.

  A message begins with its first text. With tools, the text is cut into message
  and calls once all of it is sampled.
  """

  def __init__(
    self,
    request: requests.SamplingRequest,
    answer_id: str,
    created: int,
    decoder: answers.TokenDecoder,
  ):
    super().__init__(request, answer_id, created, decoder)
    self._numbers = itertools.count()
    self._message = {
      "item_id": _message_item(answer_id, "", [])["id"],
      "output_index": 0,
      "content_index": 0,
    }

  def start(self) -> Iterator[dict[str, Any]]:
    response = _response(self._request, self._id, self._created)
    yield self._event("response.created", response=response)
    yield self._event("response.in_progress", response=response)

  def finish(self, answer: answers.SampledAnswer) -> Iterator[dict[str, Any]]:
    response = whole(self._request, answer, self._decoder)
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
    fields = {k: body["error"][k] for k in ("code", "message", "param")}
    yield self._event("error", **fields, **body)

  def _event(self, kind: str, **fields_: Any) -> dict[str, Any]:
    return {"type": kind, "sequence_number": next(self._numbers), **fields_}

  def _begin(self) -> Iterator[dict[str, Any]]:
    item = _message_item(self._id, "in_progress", [])
    yield self._event("response.output_item.added", output_index=0, item=item)
    yield self._event(
      "response.content_part.added", **self._message, part=_text_part("")
    )

  def _new(self, text: str) -> dict[str, Any]:
    return self._event(
      "response.output_text.delta", **self._message, delta=text, logprobs=[]
    )

  def _end_message(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    yield from self._delta(self._texts[0].rest(part["text"]))
    yield self._event(
      "response.output_text.done",
      **self._message,
      text=part["text"],
      logprobs=part["logprobs"],
    )
    yield self._event("response.content_part.done", **self._message, part=part)
    yield self._event("response.output_item.done", output_index=0, item=item)

  def _call(self, place: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
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


ENDPOINT = streams.Endpoint(
  "responses", PREFIX, ResponseBody, read, whole, ResponseStream
)
