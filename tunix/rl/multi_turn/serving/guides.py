"""What a request's completions end with, and what they are held to."""

from __future__ import annotations

from typing import Any

from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import grammars as grammars_lib
from tunix.rl.multi_turn.serving import requests
from tunix.rl.multi_turn.serving import stops


def watch(request: requests.Request, policy: Any) -> stops.StopStrings | None:
  """Of one completion; `policy` is a `service.Policy`."""
  if not request.stop:
    return None
  return stops.StopStrings(
      request.stop, policy.decoder.bytes, policy.renderer.stop_token_ids
  )


def start(guide: requests.Guide, policy: Any) -> grammars_lib.Matcher:
  """For one completion. Takes a while: not for an event loop.

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
      source = grammars.calls(
          policy.parser, guide.value, many=guide.many, free=guide.free
      )
    return grammars.start(source)
  except grammars_lib.GrammarError as error:
    raise refused(guide, error) from None


def refused(
    guide: requests.Guide, error: grammars_lib.GrammarError
) -> errors.ApiError:
  return errors.invalid(
      guide.field, f"{guide.field} cannot be held to: {error}"
  )
