"""Words the errors of building a run's parts as refusals of its settings."""

from __future__ import annotations

import contextlib
from typing import Iterator

from tunix.rl.multi_turn import config as config_lib


@contextlib.contextmanager
def refused(
  where: str, *errors: type[Exception], fix: str = ""
) -> Iterator[None]:
  """Raises a `ConfigError` in place of `errors`.

  Args:
    where: The setting and its value, before the error's text; "" for a text
      that names it.
    errors: Classes of the errors.
    fix: Text after the error's.
  """
  try:
    yield
  except errors as error:
    text = f"{where}: {error}" if where else str(error)
    raise config_lib.ConfigError([text + fix]) from None
