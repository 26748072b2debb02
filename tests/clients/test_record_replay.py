"""Episodes play again from what was recorded of them."""

import collected
import numpy as np
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import record_replay
from tunix.rl.multi_turn.clients import scripted_client
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import tasks as run_tasks

WORDS = ("left_click 30 20", "type_text hello", "wait", "hm")


async def collect(client, renderer, images):
  config = config_lib.load_config(
    [
      "tasks=[click-button, enter-text]",
      "collect.group_size=3",
      "collect.min_valid=2",
      "agent.on_parse_error=retry",
      "environment.max_turns=3",
      "engine.context_length=2048",
      "learner.row_length=2048",
    ]
  )
  source = run_tasks.make_tasks(config)
  tasks = run_tasks.TrainTasks(source, config.task_source.families, 0)
  collector = episodes_lib.make_collector(
    config,
    episodes_lib.EpisodeFactory(config, images),
    client,
    renderer,
    observers=None,
  )
  return await collected.groups(collector, [next(tasks) for _ in range(4)])


async def test_groups_of_episodes_are_equal_without_the_policy(tmp_path):
  _, processor, tokenizer = checkpoint.create_policy("nano", screen=(128, 96))
  renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)
  count = iter(range(10**6))

  def answer(prompt, session):
    text = WORDS[(len(session) + next(count)) % len(WORDS)]
    return [*renderer.encode(text), renderer.end_of_turn_id]

  recorder = record_replay.RecordingClient(
    scripted_client.ScriptedClient(answer, version=3)
  )
  images = images_lib.ImageStore()
  want = await collect(recorder, renderer, images)
  recorder.recording.save(tmp_path / "seen.jsonl")
  loaded = record_replay.RecordedCompletions.load(tmp_path / "seen.jsonl")
  assert len(loaded) == len(recorder.recording) > 12
  got = await collect(
    record_replay.ReplayClient(loaded.completions, record_replay.by_prompt),
    renderer,
    images,
  )
  turns = 0
  for one, other in zip(got, want):
    # Members of a group begin with one prompt, whose answers come in turn.
    for left_episode, right_episode in zip(one, other):
      assert left_episode.status is right_episode.status
      assert left_episode.reward == right_episode.reward
      assert left_episode.num_turns == right_episode.num_turns
      turns += left_episode.num_turns
      for a, b in zip(left_episode.sequences, right_episode.sequences):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.versions.tolist() == b.versions.tolist()
  assert turns == len(loaded)


async def test_what_was_not_recorded_is_an_error():
  recorded = record_replay.RecordedCompletions()
  prompt = policy_client.TokenPrompt([1, 2, 3])
  stop = policy_client.FinishReason.STOP
  recorded.add(
    record_replay.prompt_key(prompt),
    policy_client.Completion([4], [-0.5], [0], stop, fallback="no_logprobs"),
  )
  client = record_replay.ReplayClient(
    recorded.completions, record_replay.by_prompt
  )
  params = policy_client.SamplingParams()
  got = await client.generate(prompt, params, session="a")
  assert got.tokens.tolist() == [4] and got.fallback == "no_logprobs"
  with pytest.raises(LookupError, match="no further completion"):
    await client.generate(prompt, params, session="a")
  other = policy_client.TokenPrompt(np.array([1, 2]))
  with pytest.raises(LookupError, match="no completion was.*2 tokens"):
    await client.generate(other, params, session="a")


def test_a_file_that_is_no_recording_is_named(tmp_path):
  path = tmp_path / "bad.jsonl"
  path.write_text('{"prompt": "x"}\n')
  with pytest.raises(ValueError, match="bad.jsonl, line 1"):
    record_replay.RecordedCompletions.load(path)
