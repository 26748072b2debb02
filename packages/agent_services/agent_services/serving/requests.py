"""Defines a checked sampling request, and the fields that endpoints share.

Promises: no field that could change sampling is ignored: it is served,
or refused by its path.

Does not fetch images or render: messages leave as they were sent, checked for
their shape.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Mapping, Sequence

import pydantic
from tunix.rl.multi_turn.core import policy_client

from agent_services.serving import bodies
from agent_services.serving import errors

Message = dict[str, Any]
Prompt = str | tuple[int, ...]
MAX_STOPS = 16


@dataclasses.dataclass(frozen=True)
class RequestLimits:
  """Bounds of one request.

  Attributes:
    max_new_tokens: Largest length of a completion, and its length unless the
      request sets one.
    n: Largest number of completions of one request.
    images: Largest number of images of one prompt.
    body_bytes: Largest size of a request's body.
    prompt_tokens: Largest number of tokens of a prompt sent as tokens; None:
      the policy's context.
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
    """Most JSON values in a body: 2 a prompt token, and 65536; None: any."""
    most = self.prompt_tokens
    return None if most is None else 2 * most + (1 << 16)

  def check_images(self, count: int, where: str) -> None:
    if count > self.images:
      raise errors.invalid(
        where,
        f"{where} holds {count} images, a prompt may hold at most"
        f" {self.images}; drop older screenshots",
        "too_many_images",
      )


@dataclasses.dataclass(frozen=True)
class Guide:
  """A grammar that a request asks for.

  Attributes:
    kind: "json", "regex" or "calls".
    value: a JSON schema, None for any object; a pattern; the tools that may be
      called.
    field: Field of the request that sets it.
    many: Whether more calls may follow the first.
    free: Whether the policy may answer without a call.
    otherwise: JSON guide of an answer without a call; None: `free` decides.
  """

  kind: str
  value: Any
  field: str
  many: bool = False
  free: bool = False
  otherwise: Guide | None = None

  @property
  def only_calls(self) -> bool:
    """Whether a completion that is read for calls holds nothing else."""
    return self.kind == "calls" and not self.free

  def reads_calls(self, text: str) -> bool:
    """Returns whether `text`, sampled under this grammar, is read for calls."""
    return self.otherwise is None or text.startswith("<")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRequest:
  """A checked request. Its prompt is messages, a text, or tokens.

  Attributes:
    model: Name of the model in the request.
    sampling: Sampling of each completion; its seed is that of the first.
    chosen: Names of the fields that the client sent, null left out.
    messages: Messages as sent; image parts hold their URL.
    text: Prompt that is tokenised unchanged.
    tokens: Prompt that is rendered already; `messages` may then hold the images
      of its placeholders, in order, and nothing else.
    kept_by_client: Whether the client stores the tokens. The request uses its
      session's cache, and an equal body gets the same completion; nothing is
      stored.
    n: Number of completions.
    stream: Whether the answer is a stream of server-sent events.
    include_usage: Whether the stream ends with an event of the usage.
    logprobs: Whether to return the sampled tokens' log-probs.
    tokens_as_ids: Whether log-probs name tokens by their ids.
    stop: Strings that end a completion; its text ends before them.
    one_call: Whether the first tool call ends the completion.
    guide: Grammar that the completion must follow.
    tools: OpenAI schemas that the policy reads, as sent.
    parse_tools: Whether tool calls are read out of the completion.
    return_token_ids: Whether to return the ids of prompt and completions.
    instructions: System message that no later request inherits.
    previous: Id of the answer whose conversation comes before `messages`.
    remember: Whether to store the conversation for a request that names it as
      `previous`.
    echo: Fields that the answer repeats.
    min_tokens: Least number of sampled tokens before one that ends the
      completion.
    prompts: Several prompts, texts or tokens, in place of `text` and `tokens`;
      each gets `n` completions.
    repeat_prompt: Whether the choices' texts begin with the prompt's.
    continues: Whether the last message is the beginning of the answer.
    index: Place of the prompt among several, for errors.
    template_options: Variables of the chat template that the client takes the
      policy to have; another prompt than the policy's own is refused.
    ignored: Paths of fields that were accepted and change nothing.
  """

  model: str
  sampling: policy_client.SamplingParams
  chosen: frozenset[str] = frozenset()
  messages: tuple[Message, ...] | None = None
  text: str | None = None
  tokens: tuple[int, ...] | None = None
  kept_by_client: bool = False
  n: int = 1
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  tokens_as_ids: bool = False
  stop: tuple[str, ...] = ()
  one_call: bool = False
  guide: Guide | None = None
  tools: tuple[Mapping[str, Any], ...] = ()
  parse_tools: bool = False
  return_token_ids: bool = False
  instructions: str | None = None
  previous: str | None = None
  remember: bool = False
  echo: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  min_tokens: int = 0
  prompts: tuple[Prompt, ...] = ()
  repeat_prompt: bool = False
  continues: bool = False
  index: int | None = None
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()

  def __post_init__(self):
    if self.min_tokens:
      self._check_least()

  def _check_least(self) -> None:
    """Refuses `min_tokens` beside a field that may end a completion before.

    Raises:
      ApiError: naming `min_tokens`.
    """
    least, most = self.min_tokens, self.sampling.max_new_tokens
    if least > most:
      raise errors.invalid(
        "min_tokens",
        f"min_tokens={least} exceeds the {most} tokens that a completion may"
        " have; lower it, or raise max_tokens",
      )
    other = ""
    if self.stop:
      other = "stop"
    elif self.guide is not None:
      other = self.guide.field
    elif self.one_call:
      other = "parallel_tool_calls=false"
    if other:
      raise errors.invalid(
        "min_tokens",
        f"min_tokens={least} and {other} exclude each other: {other} may end"
        " the completion before; leave one out",
      )

  @property
  def choices(self) -> int:
    """Completions of the request, over all of its prompts."""
    return self.n * max(1, len(self.prompts))

  def parts(self) -> tuple[SamplingRequest, ...]:
    """Returns a request for each prompt; itself, where there is one."""
    if not self.prompts:
      return (self,)
    return tuple(
      dataclasses.replace(
        self,
        prompts=(),
        text=prompt if isinstance(prompt, str) else None,
        tokens=None if isinstance(prompt, str) else prompt,
        index=index,
      )
      for index, prompt in enumerate(self.prompts)
    )

  @property
  def prompt_field(self) -> str:
    """The field that errors about the prompt name."""
    if self.text is self.tokens is None:
      return "messages"
    if self.messages is not None:
      return "prompt_token_ids"
    return "prompt" if self.index is None else f"prompt[{self.index}]"


# --- pieces of bodies ---------------------------------------------------------


class StreamOptions(bodies.Body):
  """`stream_options`."""

  include_usage: bodies.Flag = False
  include_obfuscation: Annotated[Any, bodies.Neutral(False)] = None


class Function(bodies.Body):
  """A function that the policy may call."""

  name: bodies.Text
  description: bodies.AnyText = ""
  parameters: bodies.Object = {}
  strict: bodies.Flag = False


class FunctionName(bodies.Body):
  """The function that `tool_choice` names."""

  name: bodies.Text


class NamedTool(bodies.Body):
  """`tool_choice` of one function, in either API's shape."""

  type: Annotated[Literal["function"], bodies.Must("must be 'function'")]
  function: FunctionName | None = None
  name: bodies.Text | None = None


_CHOICES = "must be auto, none, required or the name of one of the tools"
ToolChoice = Annotated[
  Annotated[Literal["auto", "none", "required"], bodies.Must(_CHOICES)]
  | NamedTool,
  bodies.ByShape(_CHOICES),
]


class TextFormat(bodies.Body):
  """Free text."""

  type: Literal["text"]

  def guide(self, where: str) -> Guide | None:
    del where
    return None


class JsonFormat(bodies.Body):
  """Any JSON object."""

  type: Literal["json_object"]

  def guide(self, where: str) -> Guide | None:
    return Guide("json", None, where)


class JsonSchema(bodies.Body):
  """A named JSON schema; without `schema`, any JSON object."""

  name: bodies.Text
  description: bodies.AnyText = ""
  schema_: bodies.Object | None = pydantic.Field(None, alias="schema")
  strict: bodies.Flag = False

  def guide(self, where: str) -> Guide | None:
    if self.schema_ is None:
      return Guide("json", None, where)
    return Guide("json", self.schema_, f"{where}.schema")


class SchemaFormat(bodies.Body):
  """Format "json_schema" in the nested shape of both completions APIs."""

  type: Literal["json_schema"]
  json_schema: JsonSchema

  def guide(self, where: str) -> Guide | None:
    return self.json_schema.guide(f"{where}.json_schema")


class FlatSchemaFormat(JsonSchema):
  """Format "json_schema" in the flat shape of the Responses API."""

  type: Literal["json_schema"]


ResponseFormat = Annotated[
  TextFormat | JsonFormat | SchemaFormat, bodies.ByField("type")
]
# The policy's own processor decides the size of every image.
Detail = Annotated[Any, bodies.Ignored("auto", "high", "original")]
_STOP = f"must be a string or a list of up to {MAX_STOPS} strings, none empty"


class TemplateOptions(bodies.Body):
  """`chat_template_kwargs`: the switches of reasoning; no other variable."""

  enable_thinking: Annotated[
    bool | None, bodies.Must("must be true or false"), bodies.Ignored(False)
  ] = None
  thinking: Annotated[
    bool | None, bodies.Must("must be true or false"), bodies.Ignored(False)
  ] = None
  add_vision_id: Annotated[Any, bodies.Neutral(False)] = None


class SamplingBody(bodies.Body):
  """The fields of every endpoint that samples.

  A field of type `Any` is read by the client alone: no sample depends on it.
  """

  model: bodies.Name
  temperature: Annotated[float, bodies.Range(0.0, 100.0)] = 1.0
  top_p: Annotated[float, bodies.Range(0.0, 1.0, above=True)] = 1.0
  top_k: Annotated[int, bodies.Range(-1, 1 << 30)] = 0
  min_p: Annotated[float, bodies.Range(0.0, 1.0)] = 0.0
  seed: Annotated[int, bodies.Range(0, 2**31 - 1)] | None = None
  stream: bodies.Flag = False
  stream_options: StreamOptions | None = None
  stop_token_ids: Annotated[tuple[int, ...], bodies.TokenIds(1024)] = ()
  return_token_ids: bodies.Flag = False
  return_prompt_token_ids: bodies.Flag = False  # SGLang's; here with the above.
  return_raw_logprobs: bodies.Flag = False
  guided_regex: (
    Annotated[
      str,
      pydantic.StringConstraints(min_length=1, max_length=1 << 16),
      bodies.Must(f"must be a pattern of 1 to {1 << 16} characters"),
    ]
    | None
  ) = None
  user: bodies.Unread = None
  metadata: bodies.Unread = None
  safety_identifier: bodies.Unread = None
  prompt_cache_key: Annotated[Any, bodies.Ignored()] = None
  prompt_cache_retention: Annotated[Any, bodies.Ignored()] = None
  chat_template_kwargs: TemplateOptions | None = None
  continue_final_message: Annotated[Any, bodies.Neutral(False)] = False
  add_generation_prompt: Annotated[Any, bodies.Neutral(True)] = True
  presence_penalty: Annotated[float, bodies.Range(-2.0, 2.0)] = 0.0
  frequency_penalty: Annotated[float, bodies.Range(-2.0, 2.0)] = 0.0
  repetition_penalty: Annotated[Any, bodies.Neutral(1)] = None
  logit_bias: Annotated[Any, bodies.Neutral({})] = None
  min_tokens: Annotated[int, bodies.Range(0, 2**31 - 1)] = 0
  service_tier: Annotated[Any, bodies.Ignored("auto", "default")] = None

  def sampling(
    self, length: int | None, limits: RequestLimits, alternatives: int = 0
  ) -> policy_client.SamplingParams:
    """Returns the request's sampling: up to `length` tokens; None takes the
    limit."""
    return policy_client.SamplingParams(
      max_new_tokens=limits.max_new_tokens if length is None else length,
      temperature=self.temperature,
      top_p=self.top_p,
      top_k=max(0, self.top_k),
      seed=self.seed,
      stop_token_ids=self.stop_token_ids,
      min_p=self.min_p,
      frequency_penalty=self.frequency_penalty,
      presence_penalty=self.presence_penalty,
      top_logprobs=alternatives,
      raw_logprobs=self.return_raw_logprobs,
    )

  def request(
    self, sampling: policy_client.SamplingParams, **fields: Any
  ) -> SamplingRequest:
    """Returns the checked request.

    Args:
      sampling: Sampling of each completion.
      **fields: Fields of the endpoint's own.
    """
    shared = SamplingRequest(
      model=self.model,
      sampling=sampling,
      chosen=frozenset(self.model_fields_set),
      stream=self.stream,
      include_usage=self.include_usage,
      return_token_ids=self.wants_token_ids,
      min_tokens=self.min_tokens,
      template_options=self.template_options,
      ignored=bodies.ignored(self),
    )
    return dataclasses.replace(shared, **fields)

  @property
  def template_options(self) -> dict[str, Any]:
    """Variables of the chat template that the request sets."""
    options = self.chat_template_kwargs
    values = {
      name: getattr(options, name, None)
      for name in ("enable_thinking", "thinking")
    }
    return {k: value for k, value in values.items() if value is not None}

  @property
  def wants_token_ids(self) -> bool:
    return self.return_token_ids or self.return_prompt_token_ids

  @property
  def include_usage(self) -> bool:
    """Whether a stream ends with its usage."""
    if self.stream_options is None:
      return False
    if not self.stream:
      raise errors.invalid("stream_options", "stream_options needs stream=true")
    return self.stream_options.include_usage

  def guide_with_calls(
    self,
    tools: Sequence[Mapping[str, Any]],
    called: str | None,
    many: bool,
    shape: Guide | None,
  ) -> tuple[bool, Guide | None]:
    """Whether calls are read, and the one grammar of the completion.

    Args:
      tools: OpenAI schemas of the tools.
      called: As `choice` of `call_rules`.
      many: Whether a completion may hold more calls than one.
      shape: JSON that the answer has, if it is no call.
    """
    parse_tools, calls = call_rules(called, many, tools)
    if parse_tools and shape is not None:
      if called == "auto":  # Either calls, or JSON.
        calls = Guide("calls", tools, shape.field, many, otherwise=shape)
      shape = None
    guide = self.guide(calls, shape)
    if parse_tools and guide is not None and guide is not calls:
      raise errors.invalid(
        guide.field,
        f"{guide.field} leaves no room for tool calls; leave tools out, or"
        " set tool_choice to none",
      )
    return parse_tools, guide

  def guide(self, *guides: Guide | None) -> Guide | None:
    """Returns the grammar of `guided_regex` or of `guides`; None for none."""
    requested = [other for other in guides if other is not None]
    if self.guided_regex is not None:
      requested.append(Guide("regex", self.guided_regex, "guided_regex"))
    if len(requested) > 1:
      names = " and ".join(one.field for one in requested)
      raise errors.invalid(
        requested[0].field, f"{names} exclude each other; leave one out"
      )
    return requested[0] if requested else None


class ChoicesBody(SamplingBody):
  """The fields of endpoints that return several choices."""

  n: Annotated[int, bodies.UpTo("n")] = 1
  max_tokens: Annotated[int, bodies.UpTo("max_new_tokens")] | None = None
  stop: Annotated[
    bodies.AnyText
    | Annotated[list[bodies.Text], bodies.Items(_STOP, 0, MAX_STOPS)],
    bodies.Must(_STOP),
  ] = ""
  response_format: ResponseFormat | None = None

  @property
  def stops(self) -> tuple[str, ...]:
    if isinstance(self.stop, str):
      return (self.stop,) if self.stop else ()
    return tuple(self.stop)

  def check_n(self) -> None:
    if self.n > 1 and self.temperature == 0:
      raise errors.invalid(
        "n",
        f"n={self.n} with temperature=0 samples the same {self.n} times; use"
        " n=1",
      )

  @property
  def format_guide(self) -> Guide | None:
    if self.response_format is None:
      return None
    return self.response_format.guide("response_format")


class ToolsBody(SamplingBody):
  """The fields about tool calls; `tools` differs between the endpoints."""

  tool_choice: ToolChoice | None = None
  parallel_tool_calls: bodies.Flag = True
  top_logprobs: Annotated[
    int, bodies.Range(0, policy_client.MAX_TOP_LOGPROBS)
  ] = 0

  def alternatives(self, with_logprobs: bool, need: str) -> int:
    """`top_logprobs`, which needs log-probs to be `wanted`."""
    if self.top_logprobs and not with_logprobs:
      raise errors.invalid(
        "top_logprobs", f"top_logprobs={self.top_logprobs} needs {need}"
      )
    return self.top_logprobs

  @property
  def called(self) -> str | None:
    """`tool_choice` as "auto", "none", "required" or the name of a tool; None
    for an object without a name."""
    choice = self.tool_choice or "auto"
    if isinstance(choice, str):
      return choice
    return choice.name if choice.function is None else choice.function.name


def ends_after_call(parse_tools: bool, many: bool, guide: Guide | None) -> bool:
  """Whether the end of its first call ends a completion."""
  if guide is not None and guide.otherwise is not None:
    return False  # The grammar does, and JSON may spell a call's end.
  return parse_tools and not many


def call_rules(
  choice: str | None, many: bool, tools: Sequence[Mapping[str, Any]]
) -> tuple[bool, Guide | None]:
  """Whether calls of `tools` are read, and the grammar that they follow.

  Args:
    choice: "auto", "none", "required" or the name of a tool.
    many: Whether a completion may hold more calls than one.
    tools: OpenAI schemas of the tools.
  """
  if choice in ("auto", "none"):
    if choice == "none" or not tools:
      return False, None
    if not any(t["function"].get("strict") for t in tools):
      return True, None
    return True, Guide("calls", tuple(tools), "tools", free=True)
  if not tools:
    raise errors.invalid("tool_choice", "tool_choice needs tools")
  if choice == "required":
    return True, Guide("calls", tuple(tools), "tools", many)
  called = [t for t in tools if t["function"]["name"] == choice]
  if not called:
    raise errors.invalid(
      "tool_choice",
      f"tool_choice={bodies.shown(choice)} must be auto, none, required or"
      " the name of one of the tools",
    )
  return True, Guide("calls", tuple(called), "tools")


def shown_tools(
  tools: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any], ...]:
  """Returns the tools as the policy reads them: `strict` is not for it."""
  return tuple(
    {
      **tool,
      "function": {k: v for k, v in tool["function"].items() if k != "strict"},
    }
    for tool in tools
  )


def text_of(message: Mapping[str, Any]) -> str:
  """Returns the content of a message of text alone."""
  content = message.get("content") or ""
  if isinstance(content, str):
    return content
  return "".join(part["text"] for part in content)


def count_images(messages: Sequence[Mapping[str, Any]]) -> int:
  """Returns the number of images in messages, as URLs or loaded."""
  return sum(
    part["type"] != "text"
    for message in messages
    if isinstance(message.get("content"), list)
    for part in message["content"]
  )
