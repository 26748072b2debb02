"""Real desktops where other gyms are used: played, served, demonstrated."""

from cua_gyms.gym_server import catalog
import gym_servers
import numpy as np
import pytest
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import recordings
from tunix.rl.multi_turn.environments.play import __main__ as command

xdesktop = pytest.importorskip("cua_gyms.xdesktop")
from cua_gyms.sandbox import rooms  # noqa: E402

pytestmark = [
  pytest.mark.xdesktop,
  pytest.mark.skipif(
    bool(xdesktop.missing() or rooms.no_namespaces()),
    reason=f"no {', '.join(xdesktop.missing()) or 'namespaces'} (sudo make"
    " desktop)",
  ),
]


def test_the_oracle_plays_and_is_recorded(tmp_path, capsys):
  out = tmp_path / "demos.jsonl"
  status = command.main([
      "xdesktop", "window-maximize", "--by", "oracle", "--episodes", "2",
      "--out", str(out), "--settings", "{launch_s: 60}", "--timeout", "120",
  ])  # fmt: skip
  assert status == 0 and capsys.readouterr().out.count("-> solved") == 2
  for recording in recordings.read(out):
    assert recording.success
    (action,) = recording.actions
    assert action.kind.value == "click"
    assert "Mousepad" in recording.targets[0]
    assert recording.observations[0].screenshot.shape == (768, 1024, 3)


@pytest.mark.slow
async def test_a_server_serves_desktops():
  spec = catalog.ServedGym(
    gym_id="xdesktop",
    gym="xdesktop",
    families=("terminal-make-folders",),
    settings={"launch_s": 60.0},
  )
  task = gym_servers.instance("terminal-make-folders", 0, "eval")
  local = (
    gyms.get("xdesktop").make_tasks().eval_task("terminal-make-folders", 0)
  )
  with gym_servers.serving(spec) as (url, _):
    gym = gym_servers.gym(url, "xdesktop", width=1024, height=768)
    try:
      observation = await gym.start(task)
      assert observation.instruction == local.instruction
      assert observation.screenshot.shape == (768, 1024, 3)
      assert not (await gym.evaluate()).success
      actions = script(local, observation.screenshot)
      for action in actions:
        observation = await gym.act(action)
      assert (await gym.evaluate()).success
    finally:
      await gym.close()


def script(task, screenshot: np.ndarray):
  """The oracle's actions from a screenshot, without the desktop."""
  from cua_gyms.xdesktop import families  # pylint: disable=g-import-not-at-top

  instance = families.instance(task.family, task.seed)
  return instance.oracle(lambda: screenshot, 1)
