"""Whether a test that needs a browser, and MiniWoB++'s pages, can be run."""

from cua_gyms.chromium import devtools
from cua_gyms.miniwob import miniwob_tasks
import pytest


def missing(miniwob=True):
  """The missing browser and how to install it; "" for none missing.

  Args:
    miniwob: whether its pages are needed, too.
  """
  try:
    devtools.find_browser()
    if miniwob:
      miniwob_tasks.pages_directory()
  except (devtools.BrowserNotFound, miniwob_tasks.PagesNotFound) as error:
    return str(error)
  return ""


def needed(miniwob=True):
  """Marks of tests that need one: a module's `pytestmark`, or a part of it."""
  why = missing(miniwob)
  return [pytest.mark.browser, pytest.mark.skipif(bool(why), reason=why or "-")]
