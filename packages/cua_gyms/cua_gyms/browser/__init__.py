"""Declares the `browser` gym: any web page in headless Chromium, walled in."""

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import spec

GYM = spec.GymSpec(
  doc="any web pages, see docs/web.md",
  make=f"{__name__}.browser_gym:WebGym",
  operator_options=("browser", "evaluator", "hosts", "pages", "start_urls"),
  tasks=f"{__name__}.browser_tasks:WebTasks",
  preset={"gym.width": 640, "gym.height": 480},
  lists_tasks=True,
  needs="cua_gyms.chromium:needs",
  # Each episode holds a tab of the browser.
  set_by_run={
    **spec.SIZE,
    "max_pages": "concurrency",
    "observation": "observation",
  },
  close_shared=f"{__name__}.browser_gym:shared_browser.close",
)

__getattr__ = registry.lazy_attributes(
  __name__,
  browser_gym="Browser PageState WebGym shared_browser",
  page="PageUnreachable",
  browser_tasks="WebTasks",
)
