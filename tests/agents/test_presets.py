"""Agents of published models: built by name, overridden, and played."""

import asyncio
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.agents import agent_registry
from tunix.rl.multi_turn.agents import agent_settings
from tunix.rl.multi_turn.agents import presets
from tunix.rl.multi_turn.config import resolution
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.warm_start import demonstrations

NAMES = sorted(presets.PRESETS)


def load(*overrides):
  return config_lib.load_config(["name=x", *overrides])


@pytest.fixture(scope="module", name="renderer")
def _renderer():
  _, processor, tokenizer = checkpoint.create_policy("nano")
  return qwen.QwenRenderer(tokenizer, processor.num_image_tokens)


def play(renderer, config, family="click-button"):
  """An episode of the built-in desktop, its oracle writing in the grammar."""
  store = images.ImageStore()
  factory = episodes_lib.EpisodeFactory(config, store)
  demonstrator = demonstrations.Demonstrator(
    renderer,
    factory.make_agent,
    desktop.DesktopGym,
    desktop.GYM.load_oracle(),
    store,
    screenshots=agent_registry.screenshot_options(config.agent),
  )
  task = desktop.DesktopTasks().train_task(family, 0)
  return asyncio.run(demonstrator.episode(task, 0))


def _checkpoint(folder, family, width=2048):
  folder.mkdir(parents=True)
  text = {"hidden_size": width}
  config = {"model_type": family, "text_config": text}
  (folder / "config.json").write_text(json.dumps(config))
  return str(folder)


@pytest.mark.parametrize(
  "name, family, agent",
  [
    ("Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "qwen2_5_vl_computer_use"),
    ("Qwen3-VL-2B-Instruct", "qwen3_vl", "qwen3_vl_computer_use"),
    ("Holo2-4B", "qwen3_vl", "qwen3_vl_computer_use"),
    ("UI-TARS-1.5-7B", "qwen2_5_vl", "ui_tars_1_5"),
    ("MAI-UI-2B", "qwen3_vl", "mai_ui"),
    ("GLM-4.5V", "glm4v_moe", "glm_4_5v"),
    ("models--x--UI-TARS-1.5-7B/snapshots/0a1b", "qwen2_5_vl", "ui_tars_1_5"),
  ],
)
def test_a_checkpoint_brings_the_agent_of_its_family(
  tmp_path, caplog, name, family, agent
):
  directory = _checkpoint(tmp_path / name, family)
  config = load(f"policy={directory}")
  assert config.agent.name == agent
  expected = load(f"agent={agent}", f"policy={directory}")
  assert config == expected
  assert config.engine.context_length == 16384
  assert f"agent.name={agent}" in caplog.text
  assert f"agent.parser={config.agent.parser} and" in caplog.text
  by_path = agent in ("ui_tars_1_5", "mai_ui")
  names = "its path names" if by_path else "config.json names"
  assert names in caplog.text
  again = config_lib.from_yaml(config.to_yaml())
  assert again == config


def test_a_chosen_agent_and_a_toy_keep_theirs(tmp_path):
  real = _checkpoint(tmp_path / "real", "qwen3_vl")
  toy = _checkpoint(tmp_path / "toy", "qwen3_vl", width=160)
  other = _checkpoint(tmp_path / "other", "llama")
  assert load(f"policy={real}", "agent=tool").agent.name == "tool"
  parser = load(f"policy={real}", "agent.parser=ui_tars")
  assert (parser.agent.name, parser.agent.parser) == ("tool", "ui_tars")
  saved = _checkpoint(tmp_path / "run" / "policy", "qwen3_vl")
  (tmp_path / "run" / "policy" / durable.SUMS).write_text("")  # By a run.
  broken = _checkpoint(tmp_path / "broken", "qwen3_vl", width=float("inf"))
  missing = str(tmp_path / "missing")
  for policy in (toy, other, saved, broken, missing, "~nosuchuser/x"):
    assert load(f"policy={policy}").agent.name == "tool"
  on_phone = {"policy.name": real, "gym.name": "android_world"}
  assert resolution.checkpoint_agent(on_phone) == "qwen3_vl_mobile_use"
  short = load(f"policy={real}", "learner.row_length=8192")
  assert short.engine.context_length == 8192


@pytest.mark.parametrize("name", NAMES)
def test_a_name_brings_what_its_authors_published(name):
  config = load(f"agent={name}")
  spec = agent_registry.get(name)
  assert spec.reads_calls
  for key, value in spec.preset.items():
    section, field = key.split(".")
    assert getattr(getattr(config, section), field) == value, key
  agent = episodes_lib.EpisodeFactory(config, images.ImageStore()).make_agent()
  system = agent.chat_completions[0]["content"]
  assert len(system) > 200 and "$" not in system
  assert isinstance(agent.tool_parser, tool_parser.GuiActionParser)
  # Either the grammar's prompt is the whole, or the named prompt frames it.
  named = config.agent.system_prompt
  assert agent.tools_prompt in system
  if named:
    assert prompts.get_prompt(named).split("$tools_prompt")[0] in system


@pytest.mark.parametrize("name", NAMES)
def test_its_oracle_wins_on_the_desktop(renderer, name):
  """Prompt, resizing, writing, reading and coordinates fit one another."""
  episode = play(renderer, load(f"agent={name}"))
  assert episode.status is trajectory.TrajectoryStatus.SUCCEEDED


def step_once(config, response):
  """The outcome of one response on the desktop: (observation, info)."""
  agent, env = episodes_lib.EpisodeFactory(config, images.ImageStore())(
    desktop.DesktopTasks().train_task("enter-text", 0)
  )

  async def run():
    observation, info = await env.reset()
    agent.update_from_env(observation, 0.0, False, info)
    try:
      return await env.step(agent.update_from_model(response))
    finally:
      await env.close()

  observation, _, ended, info = asyncio.run(run())
  return observation, ended, info


def test_a_call_of_several_actions_is_carried_out_in_order():
  _, ended, info = step_once(
    load("agent=gemini_computer"),
    '{"functionCall": {"name": "type_text_at", "args": {"x": 1, "y": 1,'
    ' "text": "hi"}}}',
  )
  kinds = [action["kind"] for action in info["gui_actions"]]
  assert kinds == ["click", "key", "key", "type", "key"] and not ended


def test_plain_text_is_the_answer_where_a_format_ends_so():
  _, ended, info = step_once(load("agent=openai_computer"), "All done.")
  assert ended and info["answer"] == "All done." and info["status"] == "failed"
  _, ended, info = step_once(load("agent=mai_ui"), "All done.")
  assert ended and info["status"] == "parse_error"


def test_every_key_may_be_overridden():
  config = load(
    "agent=qwen3_vl_computer_use",
    "agent.max_images=3",
    "agent.image_stride=2",
    "agent.parser=ui_tars",
    "agent.resize=none",
    "agent.max_pixels=0",
    "agent.list_dropped_turns=false",
    "sampling.max_new_tokens=64",
  )
  assert (config.agent.max_images, config.agent.image_stride) == (3, 2)
  assert (
    config.agent.parser == "ui_tars" and not config.agent.list_dropped_turns
  )
  assert config.agent.system_prompt == "qwen3_vl_computer_use"
  assert config.sampling.max_new_tokens == 64


def test_a_preset_survives_the_run_s_own_file():
  config = load("agent=mai_ui", "agent.image_stride=2")
  assert config_lib.from_yaml(config.to_yaml()) == config


class TestResizing:
  def test_the_policy_sees_what_the_model_s_processor_leaves_alone(self):
    config = load(
      "agent=qwen2_5_vl_computer_use", "gym.width=1280", "gym.height=720"
    )
    assert episodes_lib.screen_size(config) == (1288, 728)
    config = load(
      "agent=qwen3_vl_computer_use", "gym.width=1280", "gym.height=720"
    )
    assert episodes_lib.screen_size(config) == (1280, 704)
    config = load(
      "agent=qwen3_vl_computer_use",
      "gym.width=1280",
      "gym.height=720",
      "agent.max_pixels=300000",
    )
    width, height = episodes_lib.screen_size(config)
    assert width * height <= 300000 and width % 32 == height % 32 == 0

  @settings(max_examples=300)
  @given(
      name=st.sampled_from(["computer_use", "computer_use_absolute",
                            "ui_tars_absolute", "opencua", "mai_ui"]),
      width=st.integers(30, 5000),
      height=st.integers(30, 5000),
  )  # fmt: skip
  def test_the_rule_is_the_processor_s(self, name, width, height):
    rule = tool_parser.get_tool_parser(name).resizing
    rows, cols = qwen_vl_inputs.smart_resize(
      height, width, rule.factor, rule.min_pixels, rule.max_pixels
    )
    config = agent_settings.AgentConfig(parser=name, resize="grammar")
    assert agent_registry.screenshot_size(config, width, height) == (cols, rows)

  def test_a_policy_that_resizes_once_more_is_refused(self, tmp_path):
    config = load(
      f"run.dir={tmp_path}",
      "agent=qwen2_5_vl_computer_use",
      "policy=qwen2_5_vl_tiny",
      "policy.config={max_pixels: 6272}",
      "engine.slots=1",
    )
    with pytest.raises(config_lib.ConfigError) as caught:
      models.make_policy(config, None, "")
    for part in ("140x84", "computer_use_absolute", "agent.max_pixels"):
      assert part in str(caught.value)

  def test_the_prompt_of_pixels_states_the_resized_size(self):
    config = load(
      "agent=qwen2_5_vl_computer_use", "gym.width=1280", "gym.height=720"
    )
    factory = episodes_lib.EpisodeFactory(config, images.ImageStore())
    system = factory.make_agent().chat_completions[0]["content"]
    assert "1288x728" in system

  def test_clicks_arrive_in_the_gym_s_pixels(self, renderer):
    """The oracle's pixels of 308 x 224 and more lead back to 128 x 96."""
    config = load("agent=ui_tars_1_5")
    assert episodes_lib.screen_size(config) != (128, 96)
    for family in ("click-button", "enter-text", "drag-to-target"):
      episode = play(renderer, config, family)
      assert episode.status is trajectory.TrajectoryStatus.SUCCEEDED, family


@pytest.mark.parametrize(
    "overrides, parts",
    [
        (["agent=qwen3_vl_computr_use"], ["mean 'qwen3_vl_computer_use'"]),
        (["agent.list_dropped_turns=true"],
         ["agent.list_dropped_turns", "max_images"]),
        (["agent=mai_ui", "agent.image_stride=4"],
         ["agent.image_stride=4", "max_images=3"]),
        (["agent.max_pixels=99"], ["agent.max_pixels", "resize=grammar"]),
        (["agent=glm_4_5v", "agent.resize=grammar"],
         ["agent.resize=grammar", "glm_v", "agent.resize=none"]),
        (["agent=mai_ui", "agent.max_pixels=4096"],
         ["agent.min_pixels=65536", "agent.max_pixels=4096"]),
        (["agent=ui_tars_1_5", "policy=qwen3_vl_tiny",
          "policy.trajectory_pixels=100000"],
         ["policy.trajectory_pixels=100000", "ui_tars_absolute",
          "agent.max_pixels"]),
        (["agent=mai_ui", "environment=tool"],
         ["agent.parser=mai_ui", "GUI actions only"]),
        (["agent=mai_ui", "agent.parser=llama_json"],
         ["agent.parser=llama_json", "no GUI actions"]),
    ],
)  # fmt: skip
def test_what_cannot_go_together_is_refused(overrides, parts):
  with pytest.raises(config_lib.ConfigError) as caught:
    load(*overrides)
  for part in parts:
    assert part in str(caught.value)


def test_an_agent_without_the_parameter_refuses_the_setting():
  config = load("agent.show_tools=false")
  assert (
    agent_registry.Builder(config.agent, system_prompt="P")().chat_completions[
      0
    ]["content"]
    == "P"
  )

  class Own:
    def __init__(self, system_prompt=""):
      self.system_prompt = system_prompt

  agent_registry.AGENTS.register("own_agent", Own)
  try:
    config = load(
      "agent=own_agent", "agent.max_images=2", "agent.list_dropped_turns=true"
    )
    with pytest.raises(
      ValueError, match="agent.list_dropped_turns=True.*takes no list"
    ):
      agent_registry.Builder(config.agent, system_prompt="P")
  finally:
    agent_registry.AGENTS.unregister("own_agent")


def test_help_lists_them(capsys):
  with pytest.raises(SystemExit):
    config_lib.load_config(["--help", "agent"])
  text = capsys.readouterr().out
  for name in NAMES:
    assert f"agent={name}\n" in text
  with pytest.raises(SystemExit):
    config_lib.load_config(["--help"])
  assert "agent=tool" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ui_tars_1_5", "opencua", "glm_4_5v"])
def test_the_shipped_policy_plays_it_in_a_documented_row(
  tmp_path, name, capsys
):
  status = train.main(
    [
      f"run.dir={tmp_path}",
      f"agent={name}",
      "--dry-run",
      "engine.context_length=4096",
      "learner.row_length=4096",
      "learner.rows=1",
    ]
  )
  shown = capsys.readouterr()
  assert status == 0, shown.err
  assert "memory" in shown.out


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["qwen3_vl_computer_use", "ui_tars_1_5", "glm_4_5v"]
)
def test_train_plays_with_the_smallest_policy(tmp_path, name):
  status = train.main([
      f"run.dir={tmp_path}", "name=r", f"agent={name}", small_runs.NANO,
      "warm_start.source=none", "tasks=click-color", "steps=0",
      "eval.episodes_per_task=1", "eval.modes=[sampled]",
      "report.progress=none", "sampling.max_new_tokens=8", "engine.slots=1",
      "collect.concurrency=1",
      "engine.context_length=2048", "learner.row_length=2048",
      "engine.window_buckets=[2048]", "engine.prefill_buckets=[256]",
      "engine.prefill_rows=[1]", "engine.decode_rows=[1]",
  ])  # fmt: skip
  assert status == 0
  summary = small_runs.summary_of(tmp_path / "r")
  assert set(summary["eval"]) == {"warm_start", "final"}
