"""Cloning in environments without a screen."""

import asyncio
import json
import re

import numpy as np
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import arithmetic
from tunix.rl.multi_turn.environments import conversations
from tunix.rl.multi_turn.environments import spec
from tunix.rl.multi_turn.environments import word_problems
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.warm_start import conversing
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.run.warm_start import recorded

pytestmark = pytest.mark.timeout(400)
TOOL = (
  "environment=tool",
  "environment.options.tools=[calculator]",
  "environment.max_turns=3",
  "tasks=[add, multiply]",
)
CALL = {
  "role": "assistant",
  "content": "So:",
  "tool_calls": [
    {
      "id": "x",
      "type": "function",
      "function": {
        "name": "calculator",
        "arguments": '{"expression": "2 + 3"}',
      },
    }
  ],
}


def converser(*overrides):
  """(its source, a converser) of a run with these settings."""
  config = config_lib.load_config([*TOOL, "warm_start.steps=1", *overrides])
  config, tasks = run_tasks.resolve(config)
  factory = episodes.EpisodeFactory(config, images_lib.ImageStore())
  source = recorded.for_run(config, tasks, factory.tool_schemas)
  tokenizer = checkpoint.load_tokenizer("tiny_vl")
  renderer = qwen.QwenRenderer(tokenizer, lambda width, height: 0)
  return source, conversing.Converser(
    renderer, factory, source.solve, config.environment.max_turns
  )


def played(source, converser, number):
  pairs = [(next(source.tasks), i) for i in range(number)]
  return asyncio.run(demonstrations.play_all(converser.episode, pairs, 4))


def test_the_oracle_s_words_are_learned_from_and_tools_answer():
  source, converser_ = converser()
  for episode in played(source, converser_, 6):
    assert episode.status is trajectory.TrajectoryStatus.SUCCEEDED
    call, answer = episode.steps
    (tool_call,) = call.action.tool_calls
    assert tool_call.name == "calculator"
    assert eval(tool_call.arguments["expression"]) == int(answer.model_response)  # pylint: disable=eval-used
    (sequence,) = episode.sequences
    learned = sequence.tokens[sequence.loss_mask]
    replies = [
      demonstrations.completion_ids(converser_.renderer, step.model_response)
      for step in (call, answer)
    ]
    assert learned.tolist() == np.concatenate(replies).tolist()
    assert not sequence.logprobs.any()


def test_a_file_s_conversations_are_played_with_the_run_s_tools(tmp_path):
  rows = [
    {
      "messages": [
        {"role": "system", "content": "Elsewhere."},
        {"role": "user", "content": "What is 2 + 3?"},
        CALL,
        {"role": "tool", "tool_call_id": "x", "content": "not this"},
        {"role": "assistant", "content": answer},
      ],
      "answer": "5",
    }
    for answer in ("5", "7")
  ]
  path = tmp_path / "c.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  source, converser_ = converser(f"warm_start.recordings={path}")
  # The second is wrong, hence no demonstration.
  shown = played(source, converser_, 2)
  (episode,) = shown
  assert episode.steps[0].thought == "So:"
  assert [s.model_response for s in episode.steps][1] == "5"
  text = converser_.renderer.decode(episode.sequences[0].tokens.tolist())
  assert "Tool returned result: 5" in text
  assert "not this" not in text and "Elsewhere" not in text


@pytest.mark.parametrize(
  "line, words",
  [
    ("{", "line 1 is not JSON"),
    ("[]", "no `messages`"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "no message of"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "no question"),
    (
      '{"question": "x", "messages": [{"role": "assistant"}]}',
      "neither content nor tool_calls",
    ),
    (
      '{"question": "x", "messages": [{"role": "assistant", "tool_calls":'
      ' [{"function": {"name": "f", "arguments": "{"}}]}]}',
      "of 'f'",
    ),
    ("", "holds no conversation"),
  ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, words):
  path = tmp_path / "c.jsonl"
  path.write_text(line)
  with pytest.raises(ValueError, match=words):
    conversations.read(path)
  with pytest.raises(config_lib.ConfigError, match="warm_start.recordings="):
    converser(f"warm_start.recordings={path}")


@pytest.mark.parametrize(
  "tool, arguments",
  [
    (
      {"name": "calc", "parameters": {"properties": {"expression": {}}}},
      {"expression": "6 * 7"},
    ),
    (
      {"name": "python", "parameters": {"properties": {"code": {}}}},
      {"code": "print(6 * 7)"},
    ),
    (
      {"name": "multiply", "parameters": {"properties": {"x": {}, "y": {}}}},
      {"x": 6, "y": 7},
    ),
  ],
)
def test_arithmetic_is_demonstrated_with_the_tools_there_are(tool, arguments):
  other = {"function": {"name": "add", "parameters": {}}}
  fields = {"question": "What is 6 * 7?", "answer": "42"}
  call, answer = arithmetic.solve(fields, [other, {"function": tool}])
  (called,) = call["tool_calls"]
  assert called["function"] == {"name": tool["name"], "arguments": arguments}
  assert answer["content"] == "42"
  assert arithmetic.solve(fields, []) == [answer]
  with pytest.raises(LookupError, match="none of the tools add"):
    arithmetic.solve(fields, [other])
  with pytest.raises(LookupError, match="not an arithmetic problem"):
    arithmetic.solve({"question": "Who?"}, [])


def test_held_out_problems_are_of_numbers_that_training_has():
  tasks = arithmetic.ArithmeticTasks(["multiply"])
  collected = {}
  for split in ("train", "eval"):
    drawn = (getattr(tasks, f"{split}_task")("multiply", i) for i in range(900))
    collected[split] = {
      tuple(t.params["question"].split()[2:5:2]) for t in drawn
    }
  assert len(collected["train"]) + len(collected["eval"]) == 100
  assert 15 <= len(collected["eval"]) <= 25
  for place in (0, 1):
    for pairs in collected.values():
      assert len({pair[place].strip("?") for pair in pairs}) == 10
  # Nor does one know a * b who has learned b * a.
  turned = {(b.strip("?"), f"{a}?") for a, b in collected["train"]}
  assert not turned & collected["eval"]


@pytest.mark.parametrize(
  "family, signs",
  [("multiply_hundreds", 1), ("words_2", 2), ("words_3", 3), ("words_4", 4)],
)
def test_problems_in_words_are_solved_from_the_question_alone(family, signs):
  tools = [{"name": "c", "parameters": {"properties": {"expression": {}}}}]
  tasks = arithmetic.ArithmeticTasks([family])
  texts = {"train": set(), "eval": set()}
  for split, templates in texts.items():
    for i in range(150):
      task = getattr(tasks, f"{split}_task")(family, i)
      call, answer = arithmetic.solve(task.params, tools)
      (called,) = call["tool_calls"]
      expression = called["function"]["arguments"]["expression"]
      assert len(expression.split()) == 2 * signs + 1
      assert eval(expression) == int(answer["content"]) > 0 or signs == 1  # pylint: disable=eval-used
      templates.add(_template(task.params["question"]))
  if family in word_problems.FAMILIES:
    assert len(texts["train"]) > len(texts["eval"]) > 1
    assert not texts["train"] & texts["eval"]
  add = {
    "function": {
      "name": "add",
      "parameters": {"properties": {"x": {}, "y": {}}},
    }
  }
  with pytest.raises(LookupError, match="none of the tools add"):
    arithmetic.solve(task.params, [add])


def _template(question):
  """A problem's template: its text without numbers, names and things."""
  drawn = "|".join([r"\d+", *word_problems.NAMES, *word_problems.THINGS])
  return re.sub(rf"\b({drawn})\b", "_", question)


def test_what_cannot_be_demonstrated_is_refused(tmp_path):
  tool = "environment.options.tools=[submit_answer]"
  with pytest.raises(config_lib.ConfigError, match="none of the tools"):
    converser(tool)
  assert spec.get("tool_request").oracle == ""
  path = tmp_path / "t.jsonl"
  path.write_text('{"question": "x"}')
  with pytest.raises(config_lib.ConfigError, match="has no oracle"):
    config_lib.load_config(
      [
        "environment=tool_request",
        "task_source.source=jsonl",
        f"task_source.path={path}",
        "warm_start.steps=1",
        "tasks=[]",
      ]
    )


@pytest.mark.slow
def test_a_run_clones_and_then_trains(tmp_path):
  status = train.main([
      f"run.dir={tmp_path}", "name=r", *TOOL, small_runs.NANO,
      "warm_start.source=none", "warm_start.steps=3",
      "warm_start.batch_size=8", "steps=1", "collect.group_size=2",
      "collect.min_valid=2", "learner.groups_per_step=2", "engine.slots=4",
      "eval.episodes_per_task=1", "eval.modes=[sampled]",
      "report.progress=none",
  ])  # fmt: skip
  assert status == 0
  summary = small_runs.summary_of(tmp_path / "r")
  assert set(summary["eval"]) == {"initial", "warm_start", "final"}
  assert summary["stage_seconds"]["cloning demonstrations"] > 0
