"""Sends paths to code in every field of a request, and notes what they reach.

`Recorder` watches `core.registry`, through which every name becomes code;
`bodies` puts a poisoned name into each field of a body and of its schema.
"""

import copy
import importlib
import sys

from tunix.rl.multi_turn.core import registry

MODULE = "poison_of_a_request"
NAMES = (f"{MODULE}:run", "subprocess:Popen", "os:system")


def plant(folder, monkeypatch):
  """Writes the module; the returned file exists once it was imported."""
  touched = folder / "touched"
  (folder / f"{MODULE}.py").write_text(
    f"import pathlib\npathlib.Path({str(touched)!r}).touch()\n"
    "def run(*args, **options):\n  return None\n"
  )
  sys.modules.pop(MODULE, None)  # Of an earlier test.
  monkeypatch.syspath_prepend(str(folder))
  monkeypatch.setenv("PYTHONPATH", str(folder))
  return touched


class Recorder:
  """Notes look-ups and imports of poisoned names.

  Attributes:
    looks: (kind, source) of each look-up since the last `clear`.
    imports: Names that were imported.
  """

  def __init__(self, monkeypatch):
    self.looks, self.imports = [], []
    get = registry.Registry.get

    def looked_up(self_, name, source="request"):
      if _is_poisoned(name):
        self.looks.append((self_.kind, source))
      return get(self_, name, source)

    monkeypatch.setattr(registry.Registry, "get", looked_up)
    for where, name in (
      (registry, "import_path"),
      (registry, "import_module"),
      (importlib, "import_module"),
    ):
      monkeypatch.setattr(where, name, self._noting(getattr(where, name)))

  def _noting(self, call):
    def noted(name, *args):
      if _is_poisoned(name) or name == MODULE:
        self.imports.append(name)
      return call(name, *args)

    return noted


def _is_poisoned(name):
  return isinstance(name, str) and any(poison in name for poison in NAMES)


def walk(recorder, send, bodies_, touched):
  """Sends bodies; returns the faults and the number of look-ups.

  Args:
    recorder: A `Recorder`.
    send: body -> status of the answer.
    bodies_: (place, body) of each.
    touched: The file that `plant` returned.
  """
  faults, lookups = [], 0
  for place, body in bodies_:
    recorder.looks.clear()
    recorder.imports.clear()
    status = send(body)
    assert status < 500, (place, status)
    if recorder.imports or touched.exists():
      faults.append((place, "imported", list(recorder.imports)))
      touched.unlink(missing_ok=True)
      sys.modules.pop(MODULE, None)
    for kind, source in recorder.looks:
      lookups += 1
      if source != "request" or not 400 <= status:
        faults.append((place, kind, source, status))
  return faults, lookups


def bodies(body, schema=None, names=NAMES):
  """(place, body) for each field and each name.

  Args:
    body: A right body; its leaves are fields too.
    schema: JSON schema of the body, with its `$defs` or components.
    names: Poisoned ones.
  """
  places = dict.fromkeys(_of_value(body))
  if schema is not None:
    places |= dict.fromkeys(_of_schema(schema, schema))
  for place in places:
    for name in names:
      yield (*place, name), _put(body, place, name)


def _of_value(value, place=()):
  if isinstance(value, dict):
    for key, one in value.items():
      yield from _of_value(one, (*place, key))
    yield (*place, "another")
  elif isinstance(value, list):
    for index, one in enumerate(value):
      yield from _of_value(one, (*place, index))
  yield place


def _of_schema(schema, root, place=(), depth=0):
  """Places that may hold a text."""
  if depth > 12 or schema is False:
    return
  if schema is True:
    schema = {}
  if ref := schema.get("$ref"):
    schema = root
    for key in ref.removeprefix("#/").split("/"):
      schema = schema[key]
  options = [
    one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())
  ]
  for one in options:
    yield from _of_schema(one, root, place, depth + 1)
  kind = schema.get("type")
  kinds = kind if isinstance(kind, list) else [kind]
  for key, one in schema.get("properties", {}).items():
    yield from _of_schema(one, root, (*place, key), depth + 1)
  if "object" in kinds and schema.get("additionalProperties", True):
    more = schema.get("additionalProperties", True)
    yield from _of_schema(more, root, (*place, "another"), depth + 1)
  if "array" in kinds:
    item = schema.get("items", {})
    yield from _of_schema(item, root, (*place, 0), depth + 1)
  is_open = kind is None and not options and "properties" not in schema
  if "string" in kinds or is_open:
    yield place


def _put(body, place, value):
  """A copy of the body with the value at a place, made where it is missing."""
  if not place:
    return value
  key, *inner = place
  if isinstance(key, int):
    items = list(body) if isinstance(body, list) and body else [None]
    items[key] = _put(items[key], inner, value)
    return items
  body = copy.copy(body) if isinstance(body, dict) else {}
  body[key] = _put(body.get(key), inner, value)
  return body
