"""Implements the endpoints that render a prompt and sample nothing.

`/v1/messages/count_tokens` is Anthropic's, `/tokenize` is vLLM's.

Promises: the tokens are those of the prompt that a completion with the same
fields would have; in a session, those of its next turn.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Callable, Mapping

import pydantic
from tunix.rl.multi_turn.core import policy_client

from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import requests
from agent_services.serving.endpoints import chat
from agent_services.serving.endpoints import completions
from agent_services.serving.endpoints import messages


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """An endpoint that renders.

  Attributes:
    path: Path below the API's root.
    body: Model of its bodies.
    read: Checks a body.
    to_json: Returns the answer for a prompt and the policy's context length.
  """

  path: str
  body: type[pydantic.BaseModel]
  read: Callable[
    [Mapping[str, Any], requests.RequestLimits], requests.SamplingRequest
  ]
  to_json: Callable[[policy_client.TokenPrompt, int], dict[str, Any]]


class CountBody(messages.MessagesBody):
  """A body of `/v1/messages/count_tokens`."""

  max_tokens: Annotated[int, bodies.UpTo("max_new_tokens")] = 1


class TokenizeBody(bodies.Body):
  """A body of `/tokenize`: messages, or a text."""

  model: bodies.Name
  messages: chat.Messages | None = None
  tools: chat.Tools = []
  prompt: bodies.Text | None = None
  chat_template_kwargs: requests.TemplateOptions | None = None
  add_generation_prompt: Annotated[Any, bodies.Neutral(True)] = True
  continue_final_message: Annotated[Any, bodies.Neutral(False)] = False
  add_special_tokens: Annotated[Any, bodies.Ignored()] = None
  return_token_strs: Annotated[Any, bodies.Neutral(False)] = None
  mm_processor_kwargs: Annotated[Any, bodies.Neutral({})] = None


def _read_text_or_messages(
  body: Mapping[str, Any], limits: requests.RequestLimits
) -> requests.SamplingRequest:
  fields = bodies.parse(TokenizeBody, body, limits)
  if (fields.messages is None) == (fields.prompt is None):
    raise errors.invalid("messages", "give messages or prompt, one of them")
  if fields.prompt is not None:
    return completions.read(
      {"model": fields.model, "prompt": fields.prompt}, limits
    )
  names = ("model", "messages", "tools", "chat_template_kwargs")
  return chat.read({k: body[k] for k in names if k in body}, limits)


def _tokens(
  prompt: policy_client.TokenPrompt, context_length: int
) -> dict[str, Any]:
  return {
    "count": len(prompt),
    "max_model_len": context_length,
    "tokens": prompt.tokens.tolist(),
    "token_strs": None,
  }


ENDPOINTS = (
  Endpoint(
    "messages/count_tokens",
    CountBody,
    lambda body, limits: messages.read(body, limits, CountBody),
    lambda prompt, _: {"input_tokens": len(prompt)},
  ),
  Endpoint("tokenize", TokenizeBody, _read_text_or_messages, _tokens),
)
