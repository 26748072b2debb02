"""Made-up requests to a server, and its answers against its OpenAPI document.

A module that imports this one is skipped where schemathesis is missing.
"""

import itertools
import os

import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi import checks  # pylint: disable=g-import-not-at-top # noqa: E402

# Of each operation; a search of an hour is one of some thousands.
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "12"))
ANY_TYPE = [
  schemathesis.checks.not_a_server_error,
  checks.status_code_conformance,
  checks.response_schema_conformance,
]
CHECKS = [*ANY_TYPE, checks.content_type_conformance]


def statuses(url, make_real, document="/openapi.json", every=3, **options):
  """Calls each operation; an undocumented status, type or shape fails.

  Args:
    url: Address of the server.
    make_real: Called with most cases: gives them names that exist, as made-up
      ones reach no further than the look-up.
    document: Path of the document.
    every: One case of this number keeps its made-up names.
    **options: `examples` of each operation; `leave_out`, the end of a path that
      is not called; `checks`; and `after`, called after each request.

  Returns:
    "METHOD /path" -> statuses of the answers.
  """
  tried, numbers = {}, itertools.count()
  leave_out = options.get("leave_out", "\0")
  for result in schemathesis.openapi.from_url(
    url + document
  ).get_all_operations():
    operation = result.ok()
    if operation.path.endswith(leave_out):
      continue

    @hypothesis.settings(
      max_examples=options.get("examples", EXAMPLES),
      deadline=None,
      derandomize=True,
      database=None,
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def try_it(case):
      if next(numbers) % every:
        make_real(case)
      reply = case.call(base_url=url, timeout=60)
      case.validate_response(reply, checks=options.get("checks", CHECKS))
      tried.setdefault(case.operation.label, set()).add(reply.status_code)
      options.get("after", lambda: None)()

    try_it()
  return tried
