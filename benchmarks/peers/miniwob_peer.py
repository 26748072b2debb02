"""One episode after another of another MiniWoB++ environment, in a process.

Started by bench_miniwob.py, in the virtual environment of the peer; imports
nothing of this package. Opens its environment and prints "ready"; for each line
with a number of seconds it plays random clicks for that time and prints what it
measured, and it ends with its input.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import tempfile
import time


def selenium_environment(family: str):
  """The `miniwob` package's own environment: (reset, click, close)."""
  import gymnasium  # pylint: disable=g-import-not-at-top
  import miniwob  # pylint: disable=g-import-not-at-top
  from miniwob.action import ActionTypes  # pylint: disable=g-import-not-at-top

  gymnasium.register_envs(miniwob)
  environment = gymnasium.make(f"miniwob/{family}-v1")

  def reset(seed):
    observation, _ = environment.reset(seed=seed)
    assert observation["screenshot"].shape == (210, 160, 3)
    return observation["utterance"]

  def click(x, y):
    action = environment.unwrapped.create_action(
      ActionTypes.CLICK_COORDS, coords=[x, y]
    )
    observation, _, terminated, _, _ = environment.step(action)
    assert observation["screenshot"].shape == (210, 160, 3)
    return terminated

  return reset, click, environment.close


def browsergym_environment(family: str):
  """BrowserGym's environment of the same pages."""
  _lend_chromium_to_playwright(os.environ["PEER_CHROMIUM"])
  from browsergym.core.action.highlevel import HighLevelActionSet  # pylint: disable=g-import-not-at-top
  import browsergym.miniwob  # pylint: disable=g-import-not-at-top,unused-import  # noqa: F401
  import gymnasium  # pylint: disable=g-import-not-at-top

  environment = gymnasium.make(
    f"browsergym/miniwob.{family}",
    headless=True,
    action_mapping=HighLevelActionSet(["coord"]).to_python_code,
  )

  def reset(seed):
    observation, _ = environment.reset(seed=seed)
    assert observation["screenshot"].ndim == 3
    return observation["goal"]

  def click(x, y):
    action = f"mouse_click({x}, {y})"
    observation, _, terminated, _, _ = environment.step(action)
    assert observation["screenshot"].ndim == 3
    return terminated

  return reset, click, environment.close


def _lend_chromium_to_playwright(executable: str) -> None:
  """Puts the system's Chromium where this playwright looks for its own."""
  import playwright  # pylint: disable=g-import-not-at-top

  package = pathlib.Path(playwright.__file__).parent / "driver" / "package"
  browsers = json.loads((package / "browsers.json").read_text())["browsers"]
  (revision,) = [b["revision"] for b in browsers if b["name"] == "chromium"]
  home = pathlib.Path(tempfile.mkdtemp(prefix="peer-playwright-"))
  place = home / f"chromium-{revision}" / "chrome-linux"
  place.mkdir(parents=True)
  (place / "chrome").symlink_to(executable)
  os.environ["PLAYWRIGHT_BROWSERS_PATH"] = str(home)


def main() -> None:
  kind, family, number = sys.argv[1:4]
  number = int(number)
  make = {
    "selenium": selenium_environment,
    "browsergym": browsergym_environment,
  }[kind]
  reset, click, close = make(family)
  reset(number)
  print("ready", flush=True)
  rng = random.Random(number)
  episode = 0
  for line in sys.stdin:
    steps, starts, goals = [], [], {}
    began = time.perf_counter()
    end = began + float(line)
    while time.perf_counter() < end:
      seed = 1000 * number + episode
      episode += 1
      at = time.perf_counter()
      goals[seed] = reset(seed)
      starts.append(time.perf_counter() - at)
      for _ in range(4):
        x, y = rng.randrange(160), rng.randrange(50, 210)
        at = time.perf_counter()
        terminated = click(x, y)
        steps.append(time.perf_counter() - at)
        if terminated:
          break
    print(json.dumps({
        "family": family, "steps": steps, "starts": starts,
        "took": time.perf_counter() - began, "goals": goals,
    }), flush=True)  # fmt: skip
  close()


if __name__ == "__main__":
  main()
