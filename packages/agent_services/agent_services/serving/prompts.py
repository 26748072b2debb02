"""Turns a checked request into the prompt and the constraints of its sampling.

Promises: a prompt that cannot fit the context is refused before it is
tokenised, as that blocks the event loop.

Does not sample, or fetch images.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Callable, Protocol, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import constrained_decoding
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base

from agent_services.serving import answers
from agent_services.serving import errors
from agent_services.serving import grammars as grammars_lib
from agent_services.serving import requests
from agent_services.serving.sessions import interactions
from agent_services.serving.sessions import session_store

_CALL = 32  # Fewer characters than any call is written in.


class ServedClient(policy_client.PolicyClient, Protocol):
  """Client whose completions can be watched and constrained."""

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
    on_tokens: Callable[[np.ndarray], None] | None = None,
    stop_when: constrained_decoding.StopWhen | None = None,
    grammar: constrained_decoding.Grammar | None = None,
  ) -> policy_client.Completion: ...


@dataclasses.dataclass
class ServedPolicy:
  """The policy that a server samples from.

  Attributes:
    name: Name of the model.
    client: Client that samples; `generate` takes `on_tokens` where `streams`.
    renderer: Renderer from messages to tokens.
    parser: Parser of tool calls.
    decoder: Decoder from tokens to text and bytes.
    context_length: Tokens of a sequence.
    grammars: Compiler of the answers' grammars; None: none can be requested.
    max_stop_token_ids: Number of stop token ids that the client takes, the
      renderer's own included; None: any number.
    vocabulary: Number of the policy's ids, where `client.generate` takes a
      `constrained_decoding.Grammar`.
    healthy: Returns whether the client can still sample.
    streams: Whether `client.generate` reports tokens while it samples.
  """

  name: str
  client: ServedClient
  renderer: Any
  parser: parser_base.ToolParser
  decoder: answers.TokenDecoder
  context_length: int
  grammars: grammars_lib.Grammars | None = None
  max_stop_token_ids: int | None = None
  vocabulary: int | None = None
  healthy: Callable[[], bool] = lambda: True
  streams: bool = True
  _shown: tuple[Any, bool] = dataclasses.field(
    default=(None, False), init=False, repr=False
  )

  @property
  def template_tools(self) -> bool:
    """Whether the renderer shows tools, where the policy's template does; else
    the parser's prompt does, in the system message."""
    parser, shown = self._shown
    if parser is not self.parser:
      shown = self.renderer.shows_tools_of(self.parser)
      self._shown = self.parser, shown
    return shown


# --- prompts ------------------------------------------------------------------


def render(
  request: requests.SamplingRequest,
  messages: Sequence[requests.Message],
  session: session_store.ServedSession | None,
  policy: ServedPolicy,
) -> policy_client.TokenPrompt | interactions.PendingPrompt:
  """Returns the request's prompt, in a session the next one of that session.

  Args:
    request: Checked request.
    messages: Messages of the request and of the conversation before it, with
      images in place of their URLs; empty: the prompt is a text or tokens.
    session: Session of the request, if it has one.
    policy: Policy that samples.

  Raises:
    ApiError: naming the prompt's field.
    InteractionError: the session refuses it.
  """
  renderer = policy.renderer
  if request.tokens is not None:
    return _token_prompt(request.tokens, request, messages, session, policy)
  if request.text is not None:
    _check_characters(len(request.text), request, policy)
    tokens_T = renderer.encode(request.text)
    if session is not None:
      return session.prompt_raw(tokens_T)
    return policy_client.TokenPrompt(tokens_T)
  _check_template(request, policy)
  if request.instructions:
    messages = [{"role": "system", "content": request.instructions}, *messages]
  tools = list(request.tools)
  if tools and not policy.template_tools:
    tools = []
  if not tools:
    messages = _with_tools(messages, request.tools, policy.parser)
  # A message is a token or more, whatever its text.
  size = len(messages) * renderer.longest_token + _characters(messages)
  size += len(json.dumps(tools)) if tools else 0
  _check_characters(size, request, policy)
  if session is not None:
    shown = bool(tools)
    if request.continues:
      return session.prompt_continuing(messages, tools, shown)
    return session.prompt(messages, tools, shown)
  try:
    if request.continues:
      return continued(renderer, messages, tools)
    if tools:
      return renderer.render(messages, tools=tools)
    return renderer.render(messages)
  except (KeyError, RecursionError, TypeError, ValueError) as error:
    raise errors.invalid(
      "messages", f"the messages cannot be rendered: {error}"
    ) from None


def continued(
  renderer: Any, messages: Sequence[requests.Message], tools: Sequence[Any] = ()
) -> policy_client.TokenPrompt:
  """Returns a prompt whose last message is the beginning of the answer.

  Its text is encoded by itself, as if it had been sampled after the header.
  """
  shown = {"tools": list(tools)} if tools else {}
  prompt = renderer.render(messages[:-1], **shown)
  text = renderer.encode(requests.text_of(messages[-1]))
  return policy_client.TokenPrompt(
    np.concatenate([prompt.tokens, text]), prompt.images
  )


def _check_template(
  request: requests.SamplingRequest, policy: ServedPolicy
) -> None:
  """Refuses variables of the chat template that change the policy's prompt."""
  for name in policy.renderer.changed_by(request.template_options):
    field = f"chat_template_kwargs.{name}"
    raise errors.invalid(
      field,
      f"{field}={request.template_options[name]!r} is not how this server"
      " renders; leave it out, or start the server with"
      " --default-chat-template-kwargs",
      "unsupported_parameter",
    )


def check_room(
  length: int, request: requests.SamplingRequest, policy: ServedPolicy
) -> int:
  """Returns the number of tokens that fit after a prompt of `length`; at least
  one."""
  room = policy.context_length - length
  if room < 1:
    raise errors.invalid(
      request.prompt_field,
      f"This model's maximum context length is {policy.context_length}"
      f" tokens, the prompt has {length}; shorten the {request.prompt_field}",
      "context_length_exceeded",
    )
  return room


def _token_prompt(
  tokens: tuple[int, ...],
  request: requests.SamplingRequest,
  messages: Sequence[requests.Message],
  session: session_store.ServedSession | None,
  policy: ServedPolicy,
) -> policy_client.TokenPrompt | interactions.PendingPrompt:
  check_room(len(tokens), request, policy)  # Before reading them.
  renderer = policy.renderer
  if request.kept_by_client:
    pictures = [
      part["image"]
      for message in messages
      if isinstance(message["content"], list)
      for part in message["content"]
    ]
    try:
      return renderer.prompt_of_tokens(tokens, pictures)
    except ValueError as error:
      raise errors.invalid(request.prompt_field, str(error)) from None
  if renderer.image_token_id in tokens:
    raise errors.invalid(
      "prompt",
      f"prompt holds {renderer.image_token_id}, which stands for an image;"
      " send images in the messages of a chat completion",
    )
  tokens_T = np.asarray(tokens, np.int32)
  if session is not None:
    return session.prompt_raw(tokens_T)
  return policy_client.TokenPrompt(tokens_T)


def _check_characters(
  size: int, request: requests.SamplingRequest, policy: ServedPolicy
) -> None:
  if size > policy.context_length * policy.renderer.longest_token:
    raise errors.invalid(
      request.prompt_field,
      f"This model's maximum context length is {policy.context_length}"
      f" tokens, which the {request.prompt_field} cannot fit ({size}"
      f" characters); shorten the {request.prompt_field}",
      "context_length_exceeded",
    )


def _with_tools(
  messages: Sequence[requests.Message],
  tools: Sequence[Any],
  parser: parser_base.ToolParser,
) -> list[requests.Message]:
  """Returns the messages with the tools where Qwen's template shows them."""
  messages = list(messages)
  if not tools:
    return messages
  try:
    shown = parser.get_tool_prompt(tools)
  except ValueError as error:
    raise errors.invalid(
      "tools", f"tools cannot be shown to this policy: {error}"
    ) from None
  if messages[0]["role"] != "system":
    return [{"role": "system", "content": shown}, *messages]
  content = messages[0].get("content") or ""
  if isinstance(content, list):
    content = "".join(part["text"] for part in content)
  text = f"{content}\n\n{shown}" if content else shown
  return [{"role": "system", "content": text}, *messages[1:]]


def _characters(messages: Sequence[requests.Message]) -> int:
  """Returns the number of characters of the messages, calls included."""
  total = 0
  for message in messages:
    content = message.get("content") or ""
    if isinstance(content, str):
      total += len(content)
    else:
      total += sum(len(part.get("text", "")) for part in content)
    for call in message.get("tool_calls") or ():
      function = call["function"]
      total += _CALL + len(function["name"]) + len(function["arguments"])
  return total


# --- constraints --------------------------------------------------------------


def stop_token_ids(
  request: requests.SamplingRequest, policy: ServedPolicy
) -> tuple[int, ...]:
  """Returns the renderer's own stop ids, then the request's further ones."""
  own = tuple(policy.renderer.stop_token_ids)
  requested = dict.fromkeys(request.sampling.stop_token_ids)
  more = tuple(token for token in requested if token not in own)
  most = policy.max_stop_token_ids
  if most is not None and len(own) + len(more) > most:
    raise errors.invalid(
      "stop_token_ids",
      f"stop_token_ids holds {len(more)} different ids beside the end of a"
      f" turn, at most {most - len(own)} are accepted",
    )
  return own + more


def stop_strings(
  request: requests.SamplingRequest, policy: ServedPolicy
) -> answers.StopStrings | None:
  """Watches one completion for the request's stop strings, and for the end of
  its first call where it may hold no other."""
  call_ends: tuple[str, ...] = ()
  if request.one_call:
    if not policy.parser.call_end:
      raise errors.invalid(
        "parallel_tool_calls",
        "parallel_tool_calls=false: calls of"
        f" {type(policy.parser).__name__} have no end of their own; leave it"
        " out",
        "unsupported_parameter",
      )
    call_ends = (policy.parser.call_end,)
  if not request.stop and not call_ends:
    return None
  return answers.StopStrings(
    request.stop,
    policy.decoder.bytes,
    policy.renderer.stop_token_ids,
    call_ends,
  )


def start_grammar(
  guide: requests.Guide, policy: ServedPolicy, length: int
) -> grammars_lib.Matcher:
  """Compiles a grammar for one completion of up to `length` tokens.

  Slow: not for an event loop.

  Raises:
    ApiError: naming the field that asks for it.
  """
  grammars = policy.grammars
  if grammars is None:
    raise errors.invalid(
      guide.field,
      f"{guide.field} needs a server with llguidance; install"
      " 'tunix-multi-turn[grammar]' where it runs",
      "unsupported_parameter",
    )
  try:
    if guide.kind == "json":
      source = grammars.json(guide.value)
    elif guide.kind == "regex":
      source = grammars.regex(guide.value)
    else:
      shape = None if guide.otherwise is None else guide.otherwise.value
      if guide.otherwise is not None and shape is None:
        shape = {"type": "object"}
      source = grammars.calls(
        policy.parser,
        guide.value,
        many=guide.many,
        free=guide.free,
        otherwise=shape,
      )
    return grammars.start(source, length)
  except grammars_lib.GrammarError as error:
    raise refused_grammar(guide, error) from None


def hold_back_stops(
  request: requests.SamplingRequest,
  stop_token_ids: Sequence[int],
  policy: ServedPolicy,
) -> constrained_decoding.MinTokens:
  """Constrains one completion to the request's `min_tokens`.

  Raises:
    ApiError: the client samples without constraints.
  """
  if policy.vocabulary is None:
    raise errors.invalid(
      "min_tokens",
      f"min_tokens={request.min_tokens} is not supported by the engine of this"
      " server; leave min_tokens out",
      "unsupported_parameter",
    )
  return constrained_decoding.MinTokens(
    request.min_tokens, stop_token_ids, policy.vocabulary
  )


def refused_grammar(
  guide: requests.Guide, error: grammars_lib.GrammarError
) -> errors.ApiError:
  return errors.invalid(
    guide.field, f"{guide.field} cannot constrain the answer: {error}"
  )
