"""An expert beside groups that failed: an oracle in the policy's own words."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import experts
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.tools import screenshot
from tunix.rl.multi_turn.trajectory_collector import model_calls

TASK = desktop.DesktopTasks().train_task("click-button", 3)
ORACLE = desktop.GYM.load_oracle()
SUCCEEDED = trajectory.TrajectoryStatus.SUCCEEDED
VERSION, LOGPROB = 7, -0.5


@pytest.fixture(scope="module")
def renderer():
  _, processor, tokenizer = checkpoint.create_policy("nano")
  return qwen.QwenRenderer(tokenizer, processor.num_image_tokens)


class Policy:
  """Clicks at a place, in every turn."""

  def __init__(self, renderer, x, y):
    click = gui_action.GuiAction(gui_action.GuiActionKind.CLICK, x=x, y=y)
    parser = tool_parser.make_tool_parser("computer_use_compact")
    text = parser.format_gui_action(click, 128, 96)
    self.tokens = demonstrations.completion_ids(renderer, text)
    self.calls = 0

  async def generate(self, prompt, sampling, *, session):
    self.calls += 1
    return policy_client.Completion(
      tokens=self.tokens,
      logprobs=np.full(len(self.tokens), LOGPROB),
      versions=np.full(len(self.tokens), VERSION),
      finish_reason=policy_client.FinishReason.STOP,
    )

  async def release(self, session):
    pass


def collector(renderer, policy, share=1.0, oracle=ORACLE, **changes):
  model = model_calls.PolicyModel(policy, renderer, runs_inline=True)

  def pair(task):
    agent = tool_agent.ToolAgent(
      prompts.get_prompt("desktop_compact"), "computer_use_compact"
    )
    shots = screenshot.ScreenshotTool(images.ImageStore())
    parser = agent.tool_parser
    gym = desktop.DesktopGym()
    return agent, cua_env.CUAEnv(gym, shots, task, action_parser=parser)

  return tc.GroupCollector(
    pair,
    model,
    tc.CollectConfig(group_size=2, min_valid=2, expert_share=share),
    max_turns=3,
    expert_call=experts.ExpertModel(model, oracle, demonstrations.POINT_GRID),
    **changes,
  )


def target(dx=0):
  """A place on the button that the task asks for, in the policy's numbers."""
  gym = desktop.DesktopGym()
  gym.start_sync(TASK)
  action = ORACLE.act(gym)
  assert gym.describe(action.x + dx, action.y) == gym.describe(
    action.x, action.y
  )
  return action.x + dx, action.y


def sampled(episode, name):
  parts = [getattr(s, name)[s.loss_mask] for s in episode.sequences]
  return np.concatenate(parts)


def test_what_the_policy_cannot_do_the_oracle_writes(renderer):
  policy = Policy(renderer, 1, 1)
  group = asyncio.run(collector(renderer, policy).collect(TASK))
  assert [t.status is SUCCEEDED for t in group] == [False, False]
  expert = group.expert
  assert expert.status is SUCCEEDED
  assert expert.trajectory_id == f"{group.group_id}.expert"
  # Tokens of no policy, but of the version that would have sampled them.
  assert not sampled(expert, "logprobs").any()
  assert set(sampled(expert, "versions")) == {VERSION}
  assert len(group) == 2 and group.played == (*group, expert)
  again = trajectory.TrajectoryGroup.from_json(
    json.loads(json.dumps(group.to_json()))
  )
  assert again.expert.sequences == expert.sequences


def test_what_the_policy_does_right_stays_in_its_own_words(renderer):
  x, y = target(dx=2)
  policy = Policy(renderer, x, y)

  async def corrected():
    of_group = collector(renderer, policy)
    return await of_group._episode(TASK, "t", "g", 0, 0, trajectory.EXPERT)

  expert = asyncio.run(corrected())
  assert expert.status is SUCCEEDED
  assert set(sampled(expert, "logprobs")) == {np.float32(LOGPROB)}
  assert np.array_equal(sampled(expert, "tokens"), policy.tokens)


def test_a_group_with_a_success_has_no_expert(renderer):
  policy = Policy(renderer, *target())
  group = asyncio.run(collector(renderer, policy).collect(TASK))
  assert all(t.status is SUCCEEDED for t in group)
  assert group.extra is None and policy.calls == 2


def test_the_share_of_groups_is_drawn_from_their_seeds(renderer):
  policy = Policy(renderer, 1, 1)

  async def drawn(seed):
    half = collector(renderer, policy, share=0.5, seed=seed)
    groups = [await half.collect(TASK, index=i) for i in range(24)]
    return [g.expert is not None for g in groups]

  first = asyncio.run(drawn(0))
  assert first == asyncio.run(drawn(0)) != asyncio.run(drawn(1))
  assert 4 < sum(first) < 20


def test_an_oracle_that_fails_leaves_the_group_as_it_was(renderer):
  def act(gym):
    raise LookupError("nothing to click")

  group = asyncio.run(
    collector(
      renderer,
      Policy(renderer, 1, 1),
      oracle=dataclasses.replace(ORACLE, act=act),
    ).collect(TASK)
  )
  assert group.extra is None and len(group.valid) == 2


@pytest.mark.slow
def test_a_run_learns_from_experts_and_counts_its_own_episodes(tmp_path):
  assert small_runs.run_train(
    tmp_path, "name=r", "warm_start.steps=0", "steps=2",
    "collect.group_size=2", "tasks=[click-color]", "eval.on=false",
    "collect.expert_share=1",
  ) == 0  # fmt: skip
  read = lambda name: [
    json.loads(line)
    for line in (tmp_path / "r" / name).read_text().splitlines()
  ]
  won: dict[str, dict[str, bool]] = {}
  for record in read("trajectories.jsonl"):
    group, _, member = record["trajectory_id"].rpartition(".")
    won.setdefault(group, {})[member] = record["status"] == "succeeded"
  with_expert = {g for g, m in won.items() if m.get(trajectory.EXPERT)}
  assert with_expert == {g for g, m in won.items() if not (m["0"] or m["1"])}
  steps = read("metrics.jsonl")
  assert sum(s["expert_episodes"] for s in steps) == len(with_expert) > 0
  for step in steps:
    assert step["episodes"] == 4 and step["valid_episodes"] == 4
    assert step["ratio_max"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
  "settings, message",
  [
    (["environment=tool"], "needs an oracle"),
    (["gym=browser"], "needs an oracle"),
    (["rollout.via=proxy"], "rollout.via=proxy"),
    (["fleet.via=join"], "fleet"),
    (
      ["collect.part_size=4", "queue.max_staleness=1"],
      "collect.part_size=4 splits",
    ),
    (["algorithm=remax"], "advantage=remax compares none"),
  ],
)
def test_where_it_cannot_be_it_is_refused(settings, message):
  with pytest.raises(config_lib.ConfigError, match=message):
    config_lib.load_config(["name=x", "collect.expert_share=0.5", *settings])
