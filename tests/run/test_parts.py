"""Parts of a run follow its configuration."""

import asyncio

import hypothesis
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import tasks as run_tasks


def config_of(*argv):
  return config_lib.load_config(["warm_start.source=none", *argv])


@pytest.mark.slow
def test_the_learner_discounts_as_the_collector_does():
  config = config_of("collect.gamma=0.5", "algorithm.advantage=turn_returns")
  policy = models.make_policy(config, None, "")
  store = images.ImageStore()
  learner = models.make_learner(config, policy, store, None)
  assert learner.gamma == 0.5


def test_the_documented_overrides_build():
  config = config_of("policy.config.layers=2", "gym.options.time_decay=0.1")
  assert models.make_policy(config, None, "").model.config.layers == 2
  assert episodes_lib.make_gym(config, "enter-text").time_decay == 0.1
  config = config_of("gym=miniwob", "gym.options.seconds_per_action=0.2")
  episodes_lib.make_gym(config, "click-dialog")
  for argv in (
    ["policy.config.num_layers=2"],
    ["gym.options.headless=false"],
    ["gym=miniwob", "gym.options.headless=false"],
  ):
    with pytest.raises(config_lib.ConfigError):
      config = config_of(*argv)
      models.make_policy(config, None, "")
      episodes_lib.make_gym(config, config.task_source.families[0])


def test_screenshots_share_the_pixels_of_a_trajectory():
  limit = ["policy=qwen3_vl_tiny", "policy.trajectory_pixels=12288"]
  for argv, tokens in (
    (["environment.max_turns=1"], 48),  # 128x96 unchanged.
    (["environment.max_turns=4"], 12),  # 64x48.
    (["environment.max_turns=8", "agent.max_images=1"], 48),
  ):
    policy = models.make_policy(config_of(*limit, *argv), None, "")
    assert policy.processor.num_image_tokens(128, 96) == tokens, argv
  with pytest.raises(config_lib.ConfigError, match="keep fewer images"):
    models.make_policy(config_of(*limit, "environment.max_turns=99"), None, "")


@pytest.mark.slow
@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.example(16, 17, 65536)
@hypothesis.given(
  st.integers(16, 400), st.integers(16, 400), st.integers(256, 90_000)
)
def test_a_screenshot_stays_within_its_share_whatever_its_size(
  width, height, share
):
  hypothesis.assume(max(width, height) < 15 * min(width, height))
  _, processor, _ = checkpoint.create_policy(
    "qwen3_vl_tiny", min_pixels=65536, image_budget=(4 * share, 4)
  )
  tokens = processor.num_image_tokens(width, height)
  # A side is never less than a token's.
  longest = max(width, height) / min(width, height)
  assert tokens * processor.factor**2 <= max(
    share, processor.factor**2 * -(-longest // 1)
  )


def test_rows_of_tiny_vl_are_not_split():
  config = config_of("mesh.sequence=2")
  with pytest.raises(config_lib.ConfigError, match="cannot split its rows"):
    models.make_policy(config, None, "")


@pytest.fixture
def registered():
  """A reward of one's own: it costs 0.1 to have finished without success."""

  @rewards.register("test_finish_fee")
  def fee(task, answer, info):
    assert task["family"] == "enter-text" and answer == "no"
    return float(info["success"]) - 0.1

  yield "test_finish_fee"
  rewards.unregister("test_finish_fee")


def play(config):
  """An episode in which the policy gives up at once."""
  factory = episodes_lib.EpisodeFactory(config, images.ImageStore())
  task = run_tasks.make_tasks(config).train_task("enter-text", 0, 0)
  _, env = factory(task)

  async def episode():
    await env.reset()
    gives_up = gui_action.GuiAction("answer", text="no")
    _, reward, over, info = await env.step([gives_up])
    await env.close()
    return reward, over, info

  return asyncio.run(episode())


def test_the_reward_is_the_configured_one(registered):
  for name, want in (("score", 0.0), ("success", 0.0), (registered, -0.1)):
    reward, over, info = play(config_of(f"environment.reward={name}"))
    assert over and not info["success"]
    assert reward == pytest.approx(want)


def test_an_unknown_reward_is_refused_before_anything_runs(registered):
  with pytest.raises(config_lib.ConfigError, match=registered):
    config_of("environment.reward=test_finish_fe")


def test_a_run_on_web_pages_reads_them_from_a_file(tmp_path):
  file = tmp_path / "pages.yaml"
  file.write_text("greet: {url: 'http://127.0.0.1:1/?s={seed}'}\n")
  argv = ["gym=browser", f"gym.options.pages={file}"]
  judge = "gym.options.evaluator=web_sites:greeted"
  config, tasks = run_tasks.resolve(config_of(*argv, judge))
  assert config.task_source.families == ("greet",)
  held_out = tasks.eval_task("greet", 0, 0)
  assert held_out.params["url"].endswith(f"?s={held_out.seed}")
  gym = episodes_lib.make_gym(config, "greet")
  assert (gym.width, gym.height) == (640, 480)
  with pytest.raises(config_lib.ConfigError, match="needs option 'evaluator'"):
    episodes_lib.make_gym(config_of(*argv), "greet")
  with pytest.raises(config_lib.ConfigError, match="gym.options.pages=FILE"):
    run_tasks.make_tasks(config_of("gym=browser", judge))
