"""The judge against a real server: scores, hangs, 500s, garbage, budgets."""

import asyncio
import contextlib
import time

import judge_server
import pytest
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.rewards import llm_judge

TASK = {"question": "What is 2 + 2?", "ground_truth": "4"}


@contextlib.contextmanager
def judged_by(*answers, **options):
  """(judge, server)."""
  with judge_server.serving(*answers) as (url, server):
    options = {"deadline_s": 10.0, **options}
    yield llm_judge.LLMJudge(base_url=url, model="m", **options), server


def judge_all(judge, *answers):
  async def run():
    return await asyncio.gather(
      *(judge(TASK, answer) for answer in answers), return_exceptions=True
    )

  return asyncio.run(run())


def test_a_score_is_brought_to_0_1(monkeypatch):
  monkeypatch.setenv("JUDGE_TOKEN", "secret-token")
  with judged_by(
    "I gave Score: 3 at first.\nScore: 7.5",
    api_key_env="JUDGE_TOKEN",
    system="Be strict.",
    temperature=0.5,
    max_tokens=64,
  ) as (judge, server):
    (out,) = judge_all(judge, "It is 4.")
  assert out.reward == 0.75 and out.metadata["score"] == 7.5
  ((path, headers, body),) = server.requests
  assert path == "/v1/chat/completions"
  assert headers["authorization"] == "Bearer secret-token"
  assert (body["model"], body["temperature"], body["max_tokens"]) == (
    "m",
    0.5,
    64,
  )
  system, user = body["messages"]
  assert system == {"role": "system", "content": "Be strict."}
  for text in ("What is 2 + 2?", "4", "It is 4."):
    assert text in user["content"]


@pytest.mark.parametrize(
  "text, options, reward",
  [
    ("Score: 99", {}, 1.0),
    ("Score: -4", {}, 0.0),
    (
      '{"grade": 3}',
      {"score_pattern": r'"grade": (\d+)', "lowest": 1.0, "highest": 5.0},
      0.5,
    ),
    ("4", {"score_pattern": r"\d+"}, 0.4),
  ],
)
def test_score_extraction(text, options, reward):
  with judged_by(text, **options) as (judge, _):
    assert judge_all(judge, "x")[0].reward == reward


def test_the_template_shows_the_transcript_and_reads_nothing_of_it(tmp_path):
  file = tmp_path / "template.txt"
  file.write_text("{transcript} // {answer}")
  episode = trajectory.Trajectory(
    steps=[
      trajectory.Step(
        model_response="I call {question}",
        observation={"tool_outputs": {"c": "sunny"}},
      ),
      trajectory.Step(
        model_response="It is sunny.",
        observation={"axtree": "[1] button", "text": "Over."},
      ),
    ]
  )
  with judged_by("Score: 5", template=str(file)) as (judge, server):
    asyncio.run(judge(TASK, "{ground_truth}", episode))
    prompt = server.requests[0][2]["messages"][0]["content"]
  assert prompt == (
    "[turn 1] I call {question}\n[tool] sunny\n[turn 2] It is sunny.\n"
    "[environment] [1] button\n[environment] Over. // {ground_truth}"
  )


def test_500_and_garbage_are_tried_again():
  with judged_by(500, b"<html>", b'{"choices": 3}', "Score: 10", tries=4) as (
    judge,
    server,
  ):
    assert judge_all(judge, "x")[0].reward == 1.0
    assert len(server.requests) == judge.requests == 4


@pytest.mark.parametrize(
  "answer, calls, says",
  [
    (500, 3, "500"),
    (401, 1, "401"),  # A wrong token stays wrong.
    (b"garbage", 3, "not JSON"),
    ("I would rather not.", 3, "no score"),
    ("Score: one", 3, "no score"),
  ],
)
def test_failures_by_policy(answer, calls, says):
  with judged_by(answer) as (judge, server):
    (error,) = judge_all(judge, "x")
    assert isinstance(error, llm_judge.JudgeError) and says in str(error)
    assert len(server.requests) == calls
  with judged_by(answer, on_failure="zero", tries=1) as (judge, _):
    (out,) = judge_all(judge, "x")
    assert out.reward == 0.0 and says in out.metadata["judge_failed"]
  with judged_by(answer, on_failure="skip", tries=1) as (judge, _):
    assert judge_all(judge, "x") == [None]


def test_a_hang_ends_at_the_deadline():
  with judged_by(30.0, deadline_s=0.3) as (judge, _):
    start = time.monotonic()
    (error,) = judge_all(judge, "x")
    assert isinstance(error, llm_judge.JudgeError)
    assert "within 0.3 s" in str(error)
    assert time.monotonic() - start < 5


def test_a_server_that_is_not_there():
  judge = llm_judge.LLMJudge(
    base_url="http://127.0.0.1:9", model="m", deadline_s=5.0, tries=2
  )
  assert isinstance(judge_all(judge, "x")[0], llm_judge.JudgeError)


def test_budget_counts_requests():
  with judged_by("Score: 10", budget=3) as (judge, server):
    outs = judge_all(judge, *(f"answer {i}" for i in range(5)))
    failed = [o for o in outs if isinstance(o, llm_judge.JudgeError)]
    assert len(failed) == 2 and "budget of 3" in str(failed[0])
    assert len(server.requests) == 3
  with judged_by(500, budget=2, tries=5) as (judge, server):
    assert "budget of 2" in str(judge_all(judge, "x")[0])
    assert len(server.requests) == 2  # Attempts are requests.


def test_equal_contents_are_judged_once():
  with judged_by(0.2) as (judge, server):
    outs = judge_all(judge, *["same"] * 20)  # At once,
    assert {out.reward for out in outs} == {1.0}
    judge_all(judge, "same")  # later, in another event loop,
    assert len(server.requests) == 1
    judge_all(judge, "other")
    assert len(server.requests) == 2


def test_a_failure_is_not_remembered_and_the_cache_is_bounded():
  with judged_by(500, "Score: 10", tries=1, cache_size=2) as (judge, server):
    assert isinstance(judge_all(judge, "x")[0], llm_judge.JudgeError)
    assert judge_all(judge, "x")[0].reward == 1.0
    for text in ("y", "z", "x"):
      judge_all(judge, text)
    assert len(server.requests) == 5  # x was forgotten for z.


@pytest.mark.parametrize(
  "options, says",
  [
    ({"base_url": "judge"}, "base_url='judge'"),
    ({"model": ""}, "model"),
    ({"score_pattern": "("}, "score_pattern"),
    ({"template": "nothing.txt"}, "template"),
    ({"api_key_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN"),
    ({"highest": 0.0}, "highest"),
    ({"tries": 0}, "tries"),
    ({"on_failure": "ignore"}, "on_failure"),
    ({"budgget": 3}, "did you mean 'budget'"),
  ],
)
def test_options_are_checked_when_the_run_is_built(options, says):
  options = {"base_url": "http://127.0.0.1:9/v1", "model": "m", **options}
  with pytest.raises(ValueError, match=says):
    rewards.plan({"llm_judge": options})
