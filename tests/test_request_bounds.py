"""Every request schema of the six services bounds what it takes.

Numbers, strings, lists and mappings of a request become memory, time or
processes of the service, so each has a bound in its schema.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping


def unbounded(
    schema: Any, defs: Mapping[str, Any], path: str, trail: tuple[str, ...] = ()
) -> Iterator[str]:
  """Yields the path of each part of a JSON schema that has no bound."""
  if schema is True or not isinstance(schema, dict):
    if schema is True:
      yield f"{path}: any value"
    return
  if "$ref" in schema:
    name = schema["$ref"].rpartition("/")[2]
    if name not in trail:
      yield from unbounded(defs[name], defs, path, (*trail, name))
    return
  if "const" in schema or "enum" in schema or "x-maxBytes" in schema:
    return
  by_body = schema.get("x-boundedBy") == "body"
  branches = [b for key in ("anyOf", "oneOf") for b in schema.get(key, ())]
  for branch in branches:
    yield from unbounded(branch, defs, path, trail)
  for part in schema.get("allOf", ()):
    yield from unbounded(part, defs, path, trail)
  kinds = schema.get("type")
  if kinds is None:
    if not branches and "allOf" not in schema and not by_body:
      yield f"{path}: any value"
    return
  for kind in kinds if isinstance(kinds, list) else [kinds]:
    yield from _unbounded_kind(kind, schema, defs, path, trail)


def _unbounded_kind(kind, schema, defs, path, trail) -> Iterator[str]:
  if kind in ("integer", "number"):
    low = {"minimum", "exclusiveMinimum"} & schema.keys()
    high = {"maximum", "exclusiveMaximum"} & schema.keys()
    if not low or not high:
      yield f"{path}: {kind}"
  elif kind == "string":
    if not {"maxLength", "pattern", "x-boundedBy"} & schema.keys():
      yield f"{path}: string"
  elif kind == "array":
    if not {"maxItems", "x-boundedBy"} & schema.keys():
      yield f"{path}: array"
    for item in schema.get("prefixItems", ()):
      yield from unbounded(item, defs, path + "[]", trail)
    yield from unbounded(schema.get("items", True), defs, path + "[]", trail)
  elif kind == "object":
    for name, inner in schema.get("properties", {}).items():
      yield from unbounded(inner, defs, f"{path}.{name}", trail)
    more = schema.get("additionalProperties", "properties" not in schema)
    whole = {"x-maxValues", "x-boundedBy"} & schema.keys()
    if more is True and not whole:
      yield f"{path}: mapping of any values"
    elif isinstance(more, dict):
      if "maxProperties" not in schema:
        yield f"{path}: mapping"
      yield from unbounded(more, defs, path + ".*", trail)
