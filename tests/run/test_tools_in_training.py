"""Runs whose policy uses a real MCP server's tools, with rewards of turns."""

import json
import os
import pathlib
import sys

import judge_server
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run import run as run_lib

from tests.run import test_by_name

pytestmark = pytest.mark.timeout(400)
SERVER = pathlib.Path(__file__).parents[1] / "helpers" / "mcp_server.py"


def tools(**more):
  server = {
    "command": [sys.executable, str(SERVER)],
    "start_s": 60.0,
    "env": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    **more,
  }
  return "environment.options.tools=" + json.dumps([{"mcp": server}])


@pytest.mark.slow
def test_an_mcp_servers_tools_train(tmp_path):
  """Calls reach the server, their turns are rewarded, the policy learns.

  Each episode has a server of its own; the example of test_example_configs.py
  trains with one of the run.
  """
  pytest.importorskip("mcp")
  metrics, trajectories = test_by_name.trained(
    tmp_path,
    "environment=tool",
    *test_by_name.TEXT,
    tools(per="episode", only=["add", "fail"]),
    "environment.max_turns=3",
    "agent=calling_agent:CallingAgent",
    "agent.options={tool: add, arguments: {a: 40, b: 2}}",
    "reward={numeric_match: 1, tool_success: {weight: 0.5, per: turn},"
    " length_penalty: {weight: 0.1, limit: 2, ramp: 40}}",
    "algorithm.advantage=turn_returns",
    *test_by_name.one_shape(1024),
  )
  assert [m["step"] for m in metrics] == [1, 2]
  assert all(m["optimizer_steps"] == m["step"] for m in metrics)
  assert metrics[0]["reward_part/tool_success"] == 1.0
  assert metrics[0]["reward_part/length_penalty"] <= 0.0
  # The run's end cuts episodes short that no update needs.
  played = [e for e in trajectories if e["status"] != "cancelled"]
  assert len(played) >= 8
  for episode in played:
    text = json.dumps(episode)
    assert "Adds two numbers." in text  # The schema, in the prompt.
    assert list(
      episode["steps"][0]["observation"]["tool_outputs"].values()
    ) == ["42"]
    assert episode["steps"][0]["reward"] == 0.5
    assert episode["steps"][0]["mc_return"] == pytest.approx(episode["reward"])


@pytest.mark.slow
def test_a_parser_of_two_methods_trains(tmp_path):
  """`parse` and `get_tool_prompt` alone, as the first document has them."""
  metrics, trajectories = test_by_name.trained(
    tmp_path,
    "environment=tool",
    *test_by_name.TEXT,
    "environment.options.tools=[calculator]",
    "environment.max_turns=2",
    "agent.parser=tests.test_source_names:Angles",
    *test_by_name.one_shape(1024),
  )
  assert [m["step"] for m in metrics] == [1, 2]
  assert "Write <<name a b>>" in json.dumps(trajectories[0])


def test_a_server_that_does_not_start_is_refused_before_the_run():
  pytest.importorskip("mcp")
  config = config_lib.load_config(
    [
      "environment=tool",
      *test_by_name.TEXT,
      "environment.options.tools=[{mcp: {command: [/no/such/server]}}]",
    ]
  )
  with pytest.raises(config_lib.ConfigError, match="tools.mcp.*/no/such"):
    run_lib.Run(config)


@pytest.mark.slow
def test_rewards_of_turns_by_name_are_the_runs_parts(tmp_path):
  metrics, trajectories = test_by_name.trained(
    tmp_path,
    "environment=gsm8k",
    *test_by_name.TEXT,
    "reward={score: 1, format: {weight: 0.5, pattern: '.'},"
    " repetition_penalty: 0.1}",
  )
  assert {"reward_part/score", "reward_part/format"} <= set(metrics[0])
  last = trajectories[0]["steps"][-1]
  parts = last["info"]["final_reward"]["parts"]
  total = (
    parts["score"]["reward"]
    + 0.5 * parts["format"]["reward"]
    + 0.1 * parts["repetition_penalty"]["reward"]
  )
  assert trajectories[0]["reward"] == pytest.approx(total)


@pytest.mark.slow
def test_a_judge_scores_the_episodes_of_a_run(tmp_path):
  with judge_server.serving("Score: 8") as (url, server):
    metrics, trajectories = test_by_name.trained(
      tmp_path,
      "environment=gsm8k",
      *test_by_name.TEXT,
      f"reward={{score: 1, llm_judge: {{weight: 0.5, base_url: '{url}',"
      " model: m, cache_size: 0}}",
    )
  assert metrics[0]["reward_part/llm_judge"] == pytest.approx(0.8)
  played = [e for e in trajectories if e["status"] != "cancelled"]
  for episode in played:
    parts = episode["steps"][-1]["info"]["final_reward"]["parts"]
    assert episode["reward"] == pytest.approx(parts["score"]["reward"] + 0.4)
  assert 0 < len(server.requests)
  assert "What is" in json.dumps(server.requests[0])
