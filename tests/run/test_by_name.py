"""Episodes, policies and rewards by name, trained through the command."""

import json

import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import run as run_lib

pytestmark = pytest.mark.timeout(400)


def one_shape(context):
  """Of every program one, which all runs of this context share."""
  return (
    f"engine.context_length={context}",
    f"learner.row_length={context}",
    f"engine.window_buckets=[{context}]",
    "engine.prefill_buckets=[64]",
    "engine.prefill_rows=[4]",
    "engine.decode_rows=[4]",
    "engine.slots=4",
    "engine.decode_steps_per_call=4",
    "learner.targets=128",
  )


TEXT = (
  "policy=qwen3_text_tiny",
  "collect.group_size=2",
  "collect.min_valid=2",
  "collect.concurrency=4",
  "learner.groups_per_step=2",
  "learner.rows=2",
  "sampling.max_new_tokens=4",
  *one_shape(384),
  "eval.on=false",
  "report.progress=none",
  "steps=2",
  # Random weights hardly ever answer right; entropy is always learned from.
  "algorithm.entropy_coef=0.1",
  "learner.skip_zero_advantage=false",
)


def trained(tmp_path, *overrides):
  """A finished run: (metrics, trajectories)."""
  status = train.main([f"run.dir={tmp_path}", "name=r", *overrides])
  assert status == 0
  directory = tmp_path / "r"
  lines = (directory / "trajectories.jsonl").read_text().splitlines()
  return small_runs.metrics_of(directory), [json.loads(x) for x in lines]


@pytest.mark.slow
def test_gsm8k_with_a_text_policy(tmp_path):
  metrics, trajectories = trained(
    tmp_path,
    "environment=gsm8k",
    *TEXT,
    "eval.on=true",
    "eval.episodes_per_task=1",
    "eval.modes=[sampled]",
  )
  assert [m["step"] for m in metrics] == [1, 2]
  assert {t["split"] for t in trajectories} == {"train", "eval"}
  assert all(m["logprob_gap_max"] < 1e-4 for m in metrics)
  assert all(m["optimizer_steps"] == m["step"] for m in metrics)
  text = json.dumps(trajectories[0])
  assert "What is" in text and '"image"' not in text


@pytest.mark.slow
def test_tools_by_name_with_a_list_of_tasks(tmp_path):
  """Plain and stateful tools; the row's kwargs reach the stateful one."""
  rows = [
    {
      "task_id": f"t{i}",
      "question": f"What is {i} + 1?",
      "answer": str(i + 1),
      "tools_kwargs": {
        "submit_answer": {"create_kwargs": {"ground_truth": str(i + 1)}}
      },
    }
    for i in range(10)
  ]
  file = tmp_path / "tasks.jsonl"
  file.write_text("\n".join(json.dumps(row) for row in rows))
  metrics, trajectories = trained(
    tmp_path,
    "environment=tool",
    *TEXT,
    "environment.options.tools=[calculator, submit_answer]",
    "environment.max_turns=2",
    "task_source.source=jsonl",
    f"task_source.path={file}",
  )
  assert [m["step"] for m in metrics] == [1, 2]
  text = json.dumps(trajectories[0])
  assert "calculator" in text and "submit_answer" in text


@pytest.mark.slow
def test_an_environment_and_an_agent_of_upstream(tmp_path):
  agentic = "tunix.rl.agentic"
  metrics, _ = trained(
    tmp_path,
    *TEXT,
    f"environment={agentic}.environments.task_environment:TaskEnvironment",
    f"agent={agentic}.agents.model_agent:ModelAgent",
    "agent.system_prompt=",
    "agent.on_parse_error=answer",
    "agent.parser=qwen",
    "reward=exact_match",
    "task_source.source=jsonl",
    f"task_source.path={questions(tmp_path)}",
  )
  assert [m["step"] for m in metrics] == [1, 2]


@pytest.mark.slow
def test_upstreams_tool_environment_with_its_agent_and_tools(tmp_path):
  agentic = "tunix.rl.agentic"
  metrics, trajectories = trained(
    tmp_path,
    *TEXT,
    f"environment={agentic}.environments.tool_environment:ToolEnvironment",
    f"agent={agentic}.agents.tool_agent:ToolAgent",
    "agent.parser=qwen",
    "agent.on_parse_error=answer",
    "agent.system_prompt=tool",
    "environment.options.tools={calculator:"
    f" '{agentic}.tools.calculator_tool:CalculatorTool'}}",
    "environment.max_turns=2",
    "reward=numeric_match",
    "task_source.source=jsonl",
    f"task_source.path={questions(tmp_path)}",
    *one_shape(1024),
  )
  assert [m["step"] for m in metrics] == [1, 2]
  assert "calculator" in json.dumps(trajectories[0])


def questions(tmp_path):
  file = tmp_path / "questions.jsonl"
  file.write_text(
    "\n".join(
      json.dumps(
        {
          "task_id": f"q{i}",
          "question": f"What is {i} + {i}?",
          "answer": str(2 * i),
        }
      )
      for i in range(10)
    )
  )
  return file


def test_one_file_of_a_user(tmp_path):
  """Gym, agent, reward and policy of tests/helpers/own_parts.py."""
  metrics, trajectories = trained(
    tmp_path,
    *small_runs.SMALL[1:],
    "gym=own_parts:GYM",
    "gym.options.brightness=200",
    "agent=own_parts:PoliteAgent",
    "agent.options.please=Kindly. ",
    "policy=own_parts:make_policy",
    "policy.config={layers: 1}",
    "reward={success: 1, own_parts:brevity: 0.5}",
    "steps=2",
    "environment.max_turns=3",
  )
  assert [m["step"] for m in metrics] == [1, 2]
  last = trajectories[0]["steps"][-1]
  parts = last["info"]["reward_metadata"]
  assert set(parts) == {"success", "own_parts:brevity"}
  brevity = parts["own_parts:brevity"]["reward"]
  total = parts["success"]["reward"] + 0.5 * brevity
  assert last["reward"] == pytest.approx(total)
  assert "reward_part/own_parts:brevity" in metrics[0]


@pytest.mark.slow
def test_tasks_that_end_within_a_step_are_all_trained_on(tmp_path, caplog):
  """Five tasks in steps of two; a resumed run takes the last one."""
  common = (
    *small_runs.SMALL[1:],
    "gym=own_parts:FEW",
    small_runs.ONE_LAYER,
    "warm_start.source=none",
    "collect.group_size=2",
    "eval.on=false",
    "environment.max_turns=1",
    "algorithm.entropy_coef=0.1",
    "learner.skip_zero_advantage=false",
  )
  metrics, trajectories = trained(tmp_path, *common, "steps=10")
  assert [m["groups"] for m in metrics] == [2, 2, 1]
  assert [m["episodes"] for m in metrics] == [4, 4, 2]
  assert len({m["compiles"] for m in metrics}) == 1
  trained_on = {t["task_id"] for t in trajectories if t["split"] == "train"}
  assert len(trained_on) == 5
  summary = small_runs.summary_of(tmp_path / "r")
  assert summary["status"] == "completed" and summary["step"] == 3
  assert "the task source ended after 5 groups" in caplog.text
  assert "the run ends after 3 of learner.steps=10 updates" in caplog.text
  # The same in two starts, and a third finds nothing to do.
  assert train.main([f"run.dir={tmp_path}", "name=s", *common, "steps=2"]) == 0
  for _ in range(2):
    assert train.main([f"resume={tmp_path / 's'}", "steps=10"]) == 0
    again = small_runs.metrics_of(tmp_path / "s")
    assert [m["groups"] for m in again] == [2, 2, 1]
  assert [m.get("loss") for m in again] == [m.get("loss") for m in metrics]


@pytest.mark.slow
def test_an_environment_of_a_user_with_its_own_reward(tmp_path):
  metrics, _ = trained(
    tmp_path,
    *TEXT,
    "environment=own_parts:Echo",
    "environment.options.bonus=1.5",
    "agent.parser=qwen",
    "agent.on_parse_error=answer",
    "agent.system_prompt=",
    "task_source.source=jsonl",
    f"task_source.path={questions(tmp_path)}",
  )
  assert all(m["reward_mean"] >= 1.5 for m in metrics)


# --- refusals ----------------------------------------------------------------


def refusal(*overrides):
  with pytest.raises(config_lib.ConfigError) as caught:
    run_lib.Run(config_lib.load_config(overrides))
  return str(caught.value)


@pytest.mark.parametrize(
    "overrides, parts",
    [
        (["environment=gsm9k"], ["environment.name=gsm9k", "'gsm8k'"]),
        (["environment=own_parts:Eco"], ["environment.name", "'Eco'"]),
        (["environment=cua", "agent.parser=qwen"],
         ["agent.parser=qwen", "environment.name=cua", "computer_use"]),
        (["environment=tool", "agent.parser=ui_tars"],
         ["agent.parser=ui_tars", "environment.name=tool", "qwen"]),
        (["environment=gsm8k", "gym.width=64"], ["gym.width=64", "no gym"]),
        (["environment=own_parts:Echo", "agent.parser=qwen",
          "agent.on_parse_error=answer"],
         ["environment.name=own_parts:Echo", "task_source.source=jsonl"]),
        (["environment=gsm8k", "environment.options.tol=1"],
         ["environment.options.tol", "'tool'"]),
        (["environment=tool", "environment.options.tools=[calculater]"],
         ["'calculator'"]),
        (["agent=own_parts:PoliteAgent", "agent.max_images=2"],
         ["agent.max_images=2", "own_parts:PoliteAgent"]),
        (["agent=own_parts:PoliteAgent", "agent.options.pleas=x"],
         ["agent.options.pleas", "'please'"]),
        (["gym=own_parts:GYM", "gym.options.brightness=dim"],
         ["gym.options.brightness", "int"]),
        (["environment=gsm8k", "reward=exact_match"],
         ["environment.reward=exact_match", "rewards by itself"]),
        (["reward={success: 1, exact_mach: 1}"], ["exact_mach", "exact_match"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_go_together_names_both_settings(overrides, parts):
  text = refusal(*overrides)
  for part in parts:
    assert part in text


def test_agents_get_every_setting_that_they_take(tmp_path):
  config = config_lib.load_config(
    [f"run.dir={tmp_path}", "agent.max_images=4", "agent.image_stride=3"]
  )
  run = run_lib.Run(config)
  try:
    agent = run.episodes.make_agent()
    assert agent._history_args[:2] == (4, 3)  # pylint: disable=protected-access
  finally:
    run.engine.close()
  assert episodes.system_prompt("") == ""


@pytest.mark.slow
def test_an_agent_of_a_user_gets_its_own_options(tmp_path):
  run = run_lib.Run(
    config_lib.load_config(
      [
        f"run.dir={tmp_path}",
        "agent=own_parts:PoliteAgent",
        "agent.options.please='Kindly. '",
      ]
    )
  )
  try:
    first = run.episodes.make_agent().chat_completions[0]["content"]
    assert first.startswith("Kindly. You see a computer's screen.")
    assert "computer_use" in first or "click" in first  # The grammar's tools.
  finally:
    run.engine.close()
