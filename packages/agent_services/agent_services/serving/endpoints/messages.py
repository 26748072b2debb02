"""Implements Anthropic's `/v1/messages`: its bodies, answers and streams.

Blocks become the messages that a chat completion would have: a `tool_result`
is a message of a tool, the blocks after it are the user's. The API is described
at https://docs.anthropic.com/en/api/messages.

Promises: a session's turn by this endpoint continues as one by chat completions
does; streamed text adds up to that of the whole answer.

Does not serve documents, citations, blocks of thinking (a policy's reasoning is
text), an answer that the client begins, or Anthropic's own server tools.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Iterator, Literal, Mapping

import pydantic

from agent_services.serving import answers
from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import requests
from agent_services.serving.endpoints import chat
from agent_services.serving.endpoints import streams

PREFIX = "msg_"

# --- bodies -------------------------------------------------------------------


class _Block(bodies.Body):
  """Piece of a message; prompts are always cached, so that a client's marks
  change nothing."""

  cache_control: Annotated[Any, bodies.Ignored()] = None


class TextBlock(_Block):
  """Text of a message."""

  type: Literal["text"]
  text: bodies.AnyText
  citations: Annotated[Any, bodies.Neutral([])] = None

  def part(self) -> dict[str, Any]:
    return {"type": "text", "text": self.text}


class Base64Source(bodies.Body):
  """An image's bytes."""

  type: Literal["base64"]
  media_type: Annotated[
    Literal["image/jpeg", "image/png", "image/gif", "image/webp"],
    bodies.Must(
      "must be image/jpeg, image/png, image/gif or image/webp",
      "unsupported_content",
    ),
  ]
  data: bodies.Text

  @property
  def address(self) -> str:
    return f"data:{self.media_type};base64,{self.data}"


class UrlSource(bodies.Body):
  """An image by its URL."""

  type: Literal["url"]
  url: bodies.Text

  @property
  def address(self) -> str:
    return self.url


class ImageBlock(_Block):
  """An image of a message."""

  type: Literal["image"]
  source: Annotated[
    Base64Source | UrlSource, bodies.ByField("type", "unsupported_content")
  ]

  def part(self) -> dict[str, Any]:
    return {"type": "image_url", "url": self.source.address}


class ToolUseBlock(_Block):
  """An earlier answer's call."""

  type: Literal["tool_use"]
  id: bodies.Text
  name: bodies.Text
  input: bodies.Object

  def call(self) -> dict[str, Any]:
    # As `answers.make_choice` writes them.
    arguments = json.dumps(self.input, ensure_ascii=False)
    return chat.tool_call(self.id, self.name, arguments)


_LIST = bodies.Items("must be a string or a list of blocks")
_CONTENT = bodies.ByShape("must be a string or a list of blocks")
_TextBlock = Annotated[TextBlock, bodies.ByField("type", "unsupported_content")]
_Texts = Annotated[
  bodies.AnyText | Annotated[list[_TextBlock], _LIST], _CONTENT
]
_Shown = Annotated[
  TextBlock | ImageBlock, bodies.ByField("type", "unsupported_content")
]


class ToolResultBlock(_Block):
  """Result of a call, screenshots included.

  `is_error` is not shown to the policy: the content is.
  """

  type: Literal["tool_result"]
  tool_use_id: bodies.Text
  content: Annotated[
    bodies.AnyText | Annotated[list[_Shown], _LIST], _CONTENT
  ] = ""
  is_error: Annotated[Any, bodies.Ignored(False)] = None


_UserBlock = Annotated[
  TextBlock | ImageBlock | ToolResultBlock,
  bodies.ByField("type", "unsupported_content"),
]
_AnswerBlock = Annotated[
  TextBlock | ToolUseBlock, bodies.ByField("type", "unsupported_content")
]


def _parts(blocks: str | list[Any]) -> str | list[dict[str, Any]]:
  """Content as chat completions have it; a lone text is a string."""
  if isinstance(blocks, str):
    return blocks
  if len(blocks) == 1 and isinstance(blocks[0], TextBlock):
    return blocks[0].text
  return [block.part() for block in blocks]


class UserMessage(bodies.Body):
  """Text and screenshots of the user, and results of tool calls."""

  role: Literal["user"]
  content: Annotated[
    bodies.AnyText | Annotated[list[_UserBlock], _LIST], _CONTENT
  ]

  def messages(self) -> Iterator[requests.Message]:
    if isinstance(self.content, str):
      yield {"role": "user", "content": self.content}
      return
    shown: list[Any] = []
    for block in self.content:
      if not isinstance(block, ToolResultBlock):
        shown.append(block)
        continue
      if shown:
        yield {"role": "user", "content": _parts(shown)}
        shown = []
      yield {
        "role": "tool",
        "content": _parts(block.content),
        "tool_call_id": block.tool_use_id,
      }
    if shown:
      yield {"role": "user", "content": _parts(shown)}


class AssistantMessage(bodies.Body):
  """An earlier answer: text, calls, or both."""

  role: Literal["assistant"]
  content: Annotated[
    bodies.AnyText | Annotated[list[_AnswerBlock], _LIST], _CONTENT
  ]

  def messages(self) -> Iterator[requests.Message]:
    if isinstance(self.content, str):
      yield {"role": "assistant", "content": self.content}
      return
    texts = [b.text for b in self.content if isinstance(b, TextBlock)]
    calls = [b.call() for b in self.content if isinstance(b, ToolUseBlock)]
    message: requests.Message = {"role": "assistant", "content": "".join(texts)}
    if calls:
      message["content"] = message["content"] or None
      message["tool_calls"] = calls
    yield message


class Tool(bodies.Body):
  """A tool that the policy may call."""

  type: Annotated[
    Literal["custom"],
    bodies.Must(
      "must be 'custom': Anthropic's own tools are not served here",
      "unsupported_parameter",
    ),
  ] = "custom"
  name: bodies.Text
  description: bodies.AnyText = ""
  input_schema: bodies.Object
  cache_control: Annotated[Any, bodies.Ignored()] = None
  strict: bodies.Flag = False


_CHOICES = "must be auto, any, tool or none"


class ToolChoice(bodies.Body):
  """Whether, and which, tool is called."""

  type: Annotated[Literal["auto", "any", "tool", "none"], bodies.Must(_CHOICES)]
  name: bodies.Text | None = None
  disable_parallel_tool_use: bodies.Flag = False

  @property
  def called(self) -> str:
    """In the words of `requests.call_rules`."""
    if self.type == "tool":
      if self.name is None:
        raise errors.invalid(
          "tool_choice.name", "tool_choice.name must name one of the tools"
        )
      return self.name
    return "required" if self.type == "any" else self.type


class OutputFormat(bodies.Body):
  """The JSON schema of the answer."""

  type: Literal["json_schema"]
  schema_: bodies.Object = pydantic.Field(alias="schema")


class OutputConfig(bodies.Body):
  """The form of the answer."""

  effort: Annotated[Any, bodies.Ignored()] = None
  format: Annotated[OutputFormat, bodies.ByField("type")] | None = None


class MessagesBody(requests.SamplingBody):
  """A body of `/v1/messages`."""

  messages: Annotated[
    list[Annotated[UserMessage | AssistantMessage, bodies.ByField("role")]],
    bodies.Items("must be a list with an entry", 1),
  ]
  max_tokens: Annotated[int, bodies.UpTo("max_new_tokens")]
  system: _Texts = ""
  stop_sequences: Annotated[
    list[bodies.Text],
    bodies.Items(
      f"must be a list of up to {requests.MAX_STOPS} strings, none empty",
      0,
      requests.MAX_STOPS,
    ),
  ] = []
  tools: Annotated[list[Tool], bodies.Items("must be a list of tools")] = []
  tool_choice: ToolChoice = ToolChoice(type="auto")
  thinking: Annotated[Any, bodies.Ignored()] = None
  cache_control: Annotated[Any, bodies.Ignored()] = None
  inference_geo: Annotated[Any, bodies.Ignored()] = None
  output_config: OutputConfig = OutputConfig()
  thread: bodies.Unread = None
  container: Annotated[Any, bodies.Neutral()] = None
  mcp_servers: Annotated[Any, bodies.Neutral([])] = None
  context_management: Annotated[Any, bodies.Neutral({})] = None


def read(
  body: Mapping[str, Any],
  limits: requests.RequestLimits,
  kind: type[MessagesBody] = MessagesBody,
) -> requests.SamplingRequest:
  """Checks a body of one kind.

  Raises:
    ApiError: naming the field.
  """
  fields = bodies.parse(kind, body, limits)
  if fields.thread is not None:
    raise _no_threads()
  if fields.stream_options is not None:
    raise bodies.unsupported("stream_options", body["stream_options"])
  tools = tuple(map(_chat_tool, body.get("tools") or ()))
  choice = fields.tool_choice
  many = not choice.disable_parallel_tool_use
  output, shape = fields.output_config, None
  if output.format is not None:
    schema = output.format.schema_
    shape = requests.Guide("json", schema, "output_config.format.schema")
  parse_tools, guide = fields.guide_with_calls(
    tools, choice.called, many, shape
  )
  messages = [m for one in fields.messages for m in one.messages()]
  if isinstance(fields.messages[-1], AssistantMessage):
    where = f"messages[{len(fields.messages) - 1}]"
    raise errors.invalid(
      where,
      f"{where} is the assistant's, and its beginning of an answer is not"
      " continued here; end with the user's message, or use chat completions"
      " with continue_final_message=true",
    )
  if fields.system:
    system = fields.system
    if not isinstance(system, str):
      system = "\n\n".join(block.text for block in system)
    messages.insert(0, {"role": "system", "content": system})
  limits.check_images(requests.count_images(messages), "messages")
  return fields.request(
    fields.sampling(fields.max_tokens, limits),
    messages=tuple(messages),
    stop=tuple(fields.stop_sequences),
    guide=guide,
    tools=requests.shown_tools(tools),
    parse_tools=parse_tools,
    one_call=requests.ends_after_call(parse_tools, many, guide),
  )


def _no_threads() -> errors.ApiError:
  """Returns the error at which a client sends its whole history instead."""
  code = "thread_unsupported_request"
  return errors.ApiError(
    400,
    "thread: the server holds no threads; send all messages without thread,"
    " a session continues its own answers",
    code=code,
    param="thread",
    details={"error_code": code, "unsupported": ["thread"]},
  )


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a tool in the shape of chat completions."""
  function = {"name": tool["name"]}
  if "description" in tool:
    function["description"] = tool["description"]
  function["parameters"] = tool["input_schema"]
  if "strict" in tool:
    function["strict"] = tool["strict"]
  return {"type": "function", "function": function}


# --- answers ------------------------------------------------------------------


def _message(
  answer_id: str, model: str, prompt: int = 0, reused: int = 0
) -> dict[str, Any]:
  """Returns the object of an answer that has not begun."""
  return {
    "id": answer_id,
    "type": "message",
    "role": "assistant",
    "model": model,
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {
      "input_tokens": prompt - reused,
      "cache_creation_input_tokens": 0,
      "cache_read_input_tokens": reused,
      "output_tokens": 0,
    },
  }


def _reason(choice: answers.Choice) -> str:
  if choice.stop is not None:
    return "stop_sequence"
  reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
  return reasons.get(choice.finish_reason, "end_turn")


def whole(
  request: requests.SamplingRequest,
  answer: answers.SampledAnswer,
  decoder: answers.TokenDecoder,
) -> dict[str, Any]:
  """Returns the JSON object of an answer that is not streamed."""
  del decoder
  choice = answer.choices[0]
  calls = choice.message.get("tool_calls") or ()
  content: list[dict[str, Any]] = []
  if choice.message["content"]:
    content.append({"type": "text", "text": choice.message["content"]})
  for call in calls:
    content.append(
      {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": json.loads(call["function"]["arguments"]),
      }
    )
  result = _message(
    answer.id, answer.model, answer.num_prompt_tokens, answer.reused_tokens
  )
  result["usage"]["output_tokens"] = answer.num_sampled
  result |= {
    "content": content,
    "stop_reason": _reason(choice),
    "stop_sequence": choice.stop,
    **answers.extras_of_one(request, answer),
  }
  return result


class MessageStream(streams.AnswerStream):
  """Writer of an answer's events during sampling; calls come last.

  Usage comes with `message_delta`: the prompt's tokens are counted by then.
  """

  def start(self) -> Iterator[dict[str, Any]]:
    yield {
      "type": "message_start",
      "message": _message(self._id, self._request.model),
    }

  def finish(self, answer: answers.SampledAnswer) -> Iterator[dict[str, Any]]:
    message = whole(self._request, answer, self._decoder)
    for i, block in enumerate(message["content"]):
      if block["type"] == "text":
        yield from self._delta(self._texts[0].rest(block["text"]))
      else:
        yield from self._call(i, block)
      yield {"type": "content_block_stop", "index": i}
    own = {k: v for k, v in message.items() if k not in _OF_START}
    yield {
      "type": "message_delta",
      "delta": {
        "stop_reason": message["stop_reason"],
        "stop_sequence": message["stop_sequence"],
      },
      "usage": message["usage"],
      **own,
    }
    yield {"type": "message_stop"}

  def failed(self, error: errors.ApiError) -> Iterator[dict[str, Any]]:
    yield {"type": "error", **error.body()}

  def _begin(self) -> Iterator[dict[str, Any]]:
    yield {
      "type": "content_block_start",
      "index": 0,
      "content_block": {"type": "text", "text": ""},
    }

  def _new(self, text: str) -> dict[str, Any]:
    return {
      "type": "content_block_delta",
      "index": 0,
      "delta": {"type": "text_delta", "text": text},
    }

  def _call(
    self, index: int, block: dict[str, Any]
  ) -> Iterator[dict[str, Any]]:
    yield {
      "type": "content_block_start",
      "index": index,
      "content_block": block | {"input": {}},
    }
    yield {
      "type": "content_block_delta",
      "index": index,
      "delta": {
        "type": "input_json_delta",
        "partial_json": json.dumps(block["input"], ensure_ascii=False),
      },
    }


_OF_START = frozenset(_message("", "")) | {"token_logprobs"}

ENDPOINT = streams.Endpoint(
  "messages", PREFIX, MessagesBody, read, whole, MessageStream
)
