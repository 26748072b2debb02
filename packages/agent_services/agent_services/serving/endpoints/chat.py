"""Implements `/v1/chat/completions`: its bodies, answers and streams.

Promises: an answer holds the sampled text, cut into content and tool calls and
otherwise unchanged; streamed text adds up to that of the whole answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Iterator, Literal, Mapping

import pydantic

from agent_services.serving import answers
from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import requests
from agent_services.serving.endpoints import streams

# --- bodies -------------------------------------------------------------------


class TextPart(bodies.Body):
  """Text of a message."""

  type: Literal["text"]
  text: bodies.AnyText
  cache_control: Annotated[Any, bodies.Ignored()] = None

  def part(self) -> dict[str, Any]:
    return {"type": "text", "text": self.text}


class ImageUrl(bodies.Body):
  """An image by its URL."""

  url: bodies.AnyText
  detail: requests.Detail = "auto"


class ImagePart(bodies.Body):
  """An image of a message, as its URL or an object with it."""

  type: Literal["image_url"]
  image_url: Annotated[
    bodies.AnyText | ImageUrl,
    bodies.ByShape("must be a URL or an object with one"),
  ]
  cache_control: Annotated[Any, bodies.Ignored()] = None

  def part(self) -> dict[str, Any]:
    image = self.image_url
    url = image if isinstance(image, str) else image.url
    return {"type": "image_url", "url": url}


_CONTENT = bodies.ByShape("must be a string or a list of parts")
_TextPart = Annotated[TextPart, bodies.ByField("type", "unsupported_content")]
_AnyPart = Annotated[
  TextPart | ImagePart, bodies.ByField("type", "unsupported_content")
]
_LIST = bodies.Items("must be a list of parts")
Texts = Annotated[bodies.AnyText | Annotated[list[_TextPart], _LIST], _CONTENT]
Parts = Annotated[bodies.AnyText | Annotated[list[_AnyPart], _LIST], _CONTENT]


class _Message(bodies.Body):
  """A message. Clients that dump an answer send its empty fields, too."""

  name: Annotated[Any, bodies.Ignored()] = None
  annotations: Annotated[Any, bodies.Neutral([])] = None
  refusal: Annotated[Any, bodies.Neutral("")] = None
  provider_specific_fields: Annotated[Any, bodies.Ignored()] = None

  def message(self: bodies.Spoken) -> requests.Message:
    """Returns the message as renderers read it, image parts with their URL."""
    role, content = self.role, self.content
    if isinstance(content, list):
      content = [part.part() for part in content]
    role = "system" if role == "developer" else role
    return {"role": role, "content": content}


class SystemMessage(_Message):
  """Instructions."""

  role: Literal["system", "developer"]
  content: Texts
  tool_calls: Annotated[Any, bodies.Neutral([])] = None


class UserMessage(_Message):
  """Text and screenshots of the user, or of the environment."""

  role: Literal["user"]
  content: Parts
  tool_calls: Annotated[Any, bodies.Neutral([])] = None


class CalledFunction(bodies.Body):
  """A call's function, with its arguments as JSON text."""

  name: bodies.Text
  arguments: bodies.JsonText
  provider_specific_fields: Annotated[Any, bodies.Ignored()] = None


class ToolCall(bodies.Body):
  """A call; `index` comes from clients that put a stream together."""

  id: bodies.Text | None = None
  type: Annotated[
    Literal["function"], bodies.Must("", "unsupported_parameter")
  ] = "function"
  function: CalledFunction
  index: bodies.Unread = None
  provider_specific_fields: Annotated[Any, bodies.Ignored()] = None

  def call(self) -> dict[str, Any]:
    return tool_call(self.id, self.function.name, self.function.arguments)


class AssistantMessage(_Message):
  """An earlier answer: text, tool calls, or both.

  Reasoning that clients keep beside an answer is not shown to the policy: its
  own thought is part of the text.
  """

  role: Literal["assistant"]
  reasoning: Annotated[Any, bodies.Ignored("")] = None
  reasoning_content: Annotated[Any, bodies.Ignored("")] = None
  thinking_blocks: Annotated[Any, bodies.Ignored([])] = None
  # Of NeMo Gym; a session holds the tokens of its own answers.
  prompt_token_ids: Annotated[Any, bodies.Ignored()] = None
  generation_token_ids: Annotated[Any, bodies.Ignored()] = None
  generation_log_probs: Annotated[Any, bodies.Ignored()] = None
  content: Texts | None = None
  tool_calls: Annotated[
    list[ToolCall], bodies.Items("must be a list of calls")
  ] = []

  @pydantic.model_validator(mode="after")
  def _check_said(self) -> AssistantMessage:
    if self.content is None and not self.tool_calls:
      raise bodies.refusal(
        "must be given where there are no tool_calls", field="content"
      )
    return self

  def message(self) -> requests.Message:
    message = super().message()
    if self.tool_calls:
      message["tool_calls"] = [one.call() for one in self.tool_calls]
    return message


class ToolMessage(_Message):
  """Result of a tool call, screenshots included."""

  role: Literal["tool"]
  content: Parts
  tool_call_id: bodies.Text | None = None
  tool_calls: Annotated[Any, bodies.Neutral([])] = None

  def message(self) -> requests.Message:
    message = super().message()
    if self.tool_call_id is not None:
      message["tool_call_id"] = self.tool_call_id
    return message


class Tool(bodies.Body):
  """A tool that the policy may call."""

  type: Literal["function"]
  function: requests.Function


Messages = Annotated[
  list[
    Annotated[
      SystemMessage | UserMessage | AssistantMessage | ToolMessage,
      bodies.ByField("role"),
    ]
  ],
  bodies.Items("must be a list with an entry", 1),
]
Tools = Annotated[
  list[Annotated[Tool, bodies.ByField("type")]],
  bodies.Items("must be a list of tools"),
]


class ChatBody(requests.ChoicesBody, requests.ToolsBody):
  """A body of `/v1/chat/completions`."""

  messages: Messages
  max_completion_tokens: (
    Annotated[int, bodies.UpTo("max_new_tokens")] | None
  ) = None
  logprobs: bodies.Flag = False
  return_tokens_as_token_ids: bodies.Flag = False
  tools: Tools = []
  prompt_token_ids: Annotated[tuple[int, ...], bodies.TokenIds()] | None = None
  # The last message is the beginning of the answer.
  continue_final_message: bodies.Flag = False
  add_generation_prompt: bodies.Flag = True
  store: Annotated[Any, bodies.Neutral(False)] = None
  modalities: Annotated[Any, bodies.Neutral(["text"])] = None
  functions: Annotated[Any, bodies.Neutral([])] = None
  function_call: Annotated[Any, bodies.Neutral("auto", "none")] = None
  reasoning_effort: Annotated[Any, bodies.Ignored("none")] = None
  verbosity: Annotated[Any, bodies.Ignored()] = None


def read(
  body: Mapping[str, Any], limits: requests.RequestLimits
) -> requests.SamplingRequest:
  """Checks a body.

  Raises:
    ApiError: naming the field.
  """
  fields = bodies.parse(ChatBody, body, limits)
  lengths = {fields.max_tokens, fields.max_completion_tokens} - {None}
  if len(lengths) > 1:
    raise errors.invalid(
      "max_tokens", "give max_tokens or max_completion_tokens, not both"
    )
  length = lengths.pop() if lengths else None
  # As sent: the policy reads the tools' fields in the client's order.
  tools = tuple(body.get("tools") or ())
  parse_tools, guide = fields.guide_with_calls(
    tools, fields.called, fields.parallel_tool_calls, fields.format_guide
  )
  messages = tuple(one.message() for one in fields.messages)
  limits.check_images(requests.count_images(messages), "messages")
  fields.check_n()
  if fields.continue_final_message:
    _check_continuation(fields, messages, parse_tools, guide)
    text = requests.text_of(messages[-1])
    messages = (*messages[:-1], {**messages[-1], "content": text})
  elif not fields.add_generation_prompt:
    raise errors.invalid(
      "add_generation_prompt",
      "add_generation_prompt=false needs continue_final_message=true; leave"
      " it out",
      "unsupported_parameter",
    )
  if fields.prompt_token_ids is not None:
    _check_images_only(fields.prompt_token_ids, messages, tools)
  return fields.request(
    fields.sampling(
      length, limits, fields.alternatives(fields.logprobs, "logprobs=true")
    ),
    messages=messages,
    tokens=fields.prompt_token_ids,
    kept_by_client=fields.prompt_token_ids is not None,
    n=fields.n,
    logprobs=fields.logprobs,
    tokens_as_ids=fields.return_tokens_as_token_ids,
    stop=fields.stops,
    guide=guide,
    # Shown also where none may be called: hidden, they would break the
    # session's sequence.
    tools=requests.shown_tools(tools),
    parse_tools=parse_tools,
    one_call=requests.ends_after_call(
      parse_tools, fields.parallel_tool_calls, guide
    ),
    continues=fields.continue_final_message,
  )


def _check_continuation(
  fields: ChatBody,
  messages: tuple[requests.Message, ...],
  parse_tools: bool,
  guide: requests.Guide | None,
) -> None:
  """Checks that the last message can be continued.

  Raises:
    ApiError: It cannot; names the field.
  """
  field = name = "continue_final_message"
  last, where = messages[-1], f"messages[{len(messages) - 1}]"
  if fields.add_generation_prompt:
    problem = (
      f"{name}=true needs add_generation_prompt=false: the answer begins with"
      " the last message, not with a header of its own"
    )
  elif fields.prompt_token_ids is not None:
    problem = (
      f"{name}=true and prompt_token_ids exclude each other; append the"
      " answer's first tokens to prompt_token_ids"
    )
  elif guide is not None or parse_tools:
    other = guide.field if guide is not None else "tools"
    problem = (
      f"{name}=true and {other} exclude each other: {other} is about whole"
      " answers; leave one out, or set tool_choice to none"
    )
  elif len(messages) < 2:
    field = "messages"
    problem = (
      f"with {name}=true messages must hold one before the last; what is"
      " continued needs something to answer"
    )
  elif last["role"] != "assistant":
    field = f"{where}.role"
    problem = (
      f"{field}={last['role']!r} cannot be continued; with {name}=true"
      " the last message is the assistant's"
    )
  elif last.get("tool_calls"):
    field = f"{where}.tool_calls"
    problem = (
      f"{field} cannot be continued; with {name}=true the last message is text"
    )
  elif not requests.text_of(last):
    field = f"{where}.content"
    problem = f"{field} is empty; leave the message and {name} out"
  else:
    return
  raise errors.invalid(field, problem)


def _check_images_only(
  tokens: tuple[int, ...],
  messages: tuple[requests.Message, ...],
  tools: tuple[Any, ...],
) -> None:
  """Checks a prompt in tokens: messages hold its placeholders' images only."""
  if not tokens:
    raise errors.invalid(
      "prompt_token_ids",
      "prompt_token_ids must be a list of token ids, not empty",
    )
  for message in messages:
    content = message["content"]
    if isinstance(content, list):
      texts = any(part["type"] != "image_url" for part in content)
    else:
      texts = bool(content)
    if texts or tools or message["role"] != "user":
      # They would not be read, or read twice.
      raise errors.invalid(
        "messages",
        "with prompt_token_ids, messages hold the images of its placeholders"
        " and nothing else; put texts and tools into the tokens",
      )


def tool_call(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
  """Returns a call in the form of assistant messages."""
  return {
    "id": call_id,
    "type": "function",
    "function": {"name": name, "arguments": arguments},
  }


# --- answers ------------------------------------------------------------------


def whole(
  request: requests.SamplingRequest,
  answer: answers.SampledAnswer,
  decoder: answers.TokenDecoder,
) -> dict[str, Any]:
  """Returns the JSON object of an answer that is not streamed."""
  choices = []
  for i, choice in enumerate(answer.choices):
    choices.append(
      {
        "index": i,
        "message": choice.message | {"refusal": None},
        "finish_reason": choice.finish_reason,
        "logprobs": (
          {
            "content": answers.logprobs(
              choice.completion, decoder, request.tokens_as_ids
            ),
            "refusal": None,
          }
          if request.logprobs
          else None
        ),
        **answers.extras(request, answer, i),
      }
    )
  result = {
    "id": answer.id,
    "object": "chat.completion",
    "created": answer.created,
    "model": answer.model,
    "choices": choices,
    "usage": answers.usage(answer),
  }
  if request.return_token_ids:
    result["prompt_token_ids"] = answer.prompt_tokens.tolist()
  return result


class ChatStream(streams.ChoiceStream):
  """Writer of an answer's events during sampling; tool calls come last."""

  kind = "chat.completion.chunk"

  def start(self) -> Iterator[dict[str, Any]]:
    for i in range(self._request.n):
      yield self._chunk(i, self._delta({"role": "assistant", "content": ""}))

  def _new(self, text: str) -> dict[str, Any]:
    return self._delta({"content": text})

  def _ending(
    self, answer: answers.SampledAnswer, index: int
  ) -> Iterator[dict[str, Any]]:
    request, choice = self._request, answer.choices[index]
    for delta in self._rest(index, choice):
      yield self._chunk(index, self._delta(delta))
    extra = answers.extras(request, answer, index)
    if request.logprobs:
      content = answers.logprobs(
        choice.completion, self._decoder, request.tokens_as_ids
      )
      extra["logprobs"] = {"content": content, "refusal": None}
    event = self._chunk(
      index, self._delta({}), finish_reason=choice.finish_reason, **extra
    )
    if request.return_token_ids:
      event["prompt_token_ids"] = answer.prompt_tokens.tolist()
    yield event

  def _rest(
    self, index: int, choice: answers.Choice
  ) -> Iterator[dict[str, Any]]:
    calls = choice.message.get("tool_calls")
    content = choice.message["content"] or ""
    unsent = content if calls else self._texts[index].rest(content)
    if unsent:
      yield {"content": unsent}
    for i, call in enumerate(calls or ()):
      yield {"tool_calls": [{"index": i, **call}]}

  def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta}


ENDPOINT = streams.Endpoint(
  "chat/completions", "chatcmpl-", ChatBody, read, whole, ChatStream
)
