"""Puts the results of tool calls into the order of their calls.

A chat template without ids reads results by their place: the first result is
the first call's. Clients send them as the tools end.

Promises: afterwards the n-th result after an answer is that of its n-th call;
every call before the end of the messages has one result, and every result after
calls is that of one. Messages between results stay where they are.
"""

from __future__ import annotations

from typing import Any, Sequence

from agent_services.serving import errors

Message = dict[str, Any]
_SHOWN = 20  # Ids in an error.


def in_order(messages: Sequence[Message], field: str) -> list[Message]:
  """Returns the messages, each answer's results in the order of its calls.

  The results of an answer without calls stay as sent, whatever their ids: its
  text may hold calls that the client read itself. A lone call's result needs no
  id.

  Args:
    messages: In OpenAI's form.
    field: Field of the request that holds them, for errors.

  Raises:
    ApiError: A call has no result, or a result no call; the error names the id.
  """
  ordered = list(messages)
  calls: list[str | None] = []
  places: list[int] = []
  for i, message in enumerate([*messages, {"role": "assistant"}]):
    if message["role"] == "tool":
      places.append(i)
    elif message["role"] == "assistant":
      results = [messages[place] for place in places]
      for place, result in zip(places, _matched(calls, results, field)):
        ordered[place] = result
      calls = [call.get("id") for call in message.get("tool_calls") or ()]
      places = []
  return ordered


def _matched(
  calls: Sequence[str | None], results: Sequence[Message], field: str
) -> Sequence[Message]:
  """Returns the results of calls with these ids, in their order."""
  ids = [result.get("tool_call_id") for result in results]
  if not calls:
    return results
  if len(calls) == len(results) == 1 and None in (calls[0], ids[0]):
    return results
  if calls and not any(calls) and len(calls) == len(results):
    return results  # Calls without ids: by their place.
  names = ", ".join(map(repr, calls[:_SHOWN]))
  if len(calls) > _SHOWN:
    names += f" and {len(calls) - _SHOWN} more"
  by_id = dict(zip(ids, results))
  called = set(calls)
  answered: set[str | None] = set()
  for id_ in ids:
    if id_ is None:
      raise _refused(
        field,
        f"a tool result has no tool_call_id, and the calls before it are"
        f" {names}; name the call that it answers",
      )
    if id_ not in called:
      raise _refused(
        field,
        f"a tool result has tool_call_id {id_!r}, and the calls before it"
        f" are {names}; send the result after the answer that made the call",
      )
    if id_ in answered:
      raise _refused(
        field, f"the call {id_!r} has two tool results; send one of them"
      )
    answered.add(id_)
  for id_ in calls:
    if id_ not in by_id:
      raise _refused(
        field,
        f"the call {id_!r} has no tool result; send one for each of the"
        f" calls {names} before the next message of the assistant",
      )
  return [by_id[id_] for id_ in calls]


def _refused(field: str, text: str) -> errors.ApiError:
  return errors.invalid(field, f"{field}: {text}", "invalid_tool_results")
