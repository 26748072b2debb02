"""The watchdog names why a run cannot learn, and is quiet about others.

`watchdog_runs.json` holds metrics that runs of the shipped policy recorded:
a plain one, one from random weights, one sampled so cold that every group is
alike, one at a learning rate of 0.03 with a KL that costs nothing, and one
whose engine gets new weights every third update.
"""

import json
import pathlib

import breaking_gym
import pytest
import small_runs
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import watchdog

RUNS = json.loads(
  (pathlib.Path(__file__).parent / "watchdog_runs.json").read_text()
)
STATUS = trajectory.TrajectoryStatus


def found(metrics, **config):
  """(step, rule) of each finding."""
  rules = watchdog.Rules(reporting_settings.WatchdogConfig(**config))
  return [
    (number, finding.rule)
    for number, m in enumerate(metrics, 1)
    for finding in rules.step(m)
  ]


def test_a_plain_run_has_no_finding():
  assert not found(RUNS["healthy"])
  assert not found(RUNS["healthy"], window=3, no_gradient_updates=2)
  assert not found(RUNS["healthy"] * 10)


@pytest.mark.parametrize(
  "run, config, want",
  [
    ("unsolved", dict(no_gradient_updates=4), [(4, "unsolved")]),
    ("solved", dict(no_gradient_updates=5), [(5, "no_variance")]),
    ("high_rate_with_kl", dict(), [(2, "kl")]),
    (
      "high_rate_with_kl",
      dict(max_kl=0.0, window=1, entropy_fraction=0.3),
      [(3, "entropy"), (8, "entropy")],
    ),
    (
      "stale",
      dict(window=3, gradient_factor=3.0, gap_factor=0.0),
      [(4, "gradient"), (8, "gradient")],
    ),
    ("stale", dict(window=1, gap_factor=2.0), [(2, "logprob_gap")]),
  ],
)
def test_a_recorded_run_is_diagnosed(run, config, want):
  got = found(RUNS[run], **config)
  assert got[: len(want)] == want
  assert {rule for _, rule in got} == {rule for _, rule in want}


@pytest.mark.parametrize(
  "run, off",
  [
    ("unsolved", dict(no_gradient_updates=0)),
    ("solved", dict(no_gradient_updates=0)),
    (
      "high_rate_with_kl",
      dict(max_kl=0.0, entropy_fraction=0.0, no_gradient_updates=0),
    ),
    ("stale", dict(gap_factor=0.0, gradient_factor=0.0, window=1)),
  ],
)
def test_a_threshold_of_0_turns_a_rule_off(run, off):
  assert not found(RUNS[run] * 5, **off)


def test_a_rule_speaks_once_until_it_stopped_holding():
  run = RUNS["unsolved"] * 3
  assert found(run, no_gradient_updates=4) == [(4, "unsolved")]
  again = RUNS["unsolved"] + RUNS["healthy"][:1] + RUNS["unsolved"]
  assert found(again, no_gradient_updates=4) == [
    (4, "unsolved"),
    (9, "unsolved"),
  ]


def test_episodes_that_infrastructure_ends():
  rules = watchdog.Rules(reporting_settings.WatchdogConfig(failed_episodes=3))
  broken = [STATUS.ENV_ERROR, STATUS.TIMEOUT, STATUS.MODEL_ERROR]
  got = [f for s in broken for f in rules.episode(s)]
  assert [f.rule for f in got] == ["environments"]
  assert "model_error" in got[0].message
  assert not rules.episode(STATUS.ENV_ERROR)
  assert not rules.episode(STATUS.FAILED)  # The policy's own.
  for status in (STATUS.ENV_ERROR, STATUS.CANCELLED, STATUS.ENV_ERROR):
    assert not rules.episode(status)
  assert [f.rule for f in rules.episode(STATUS.ENV_ERROR)] == ["environments"]


def gap(kl, steps, staleness=0.0):
  return {
    "sampler_kl": kl,
    "optimizer_steps": float(steps),
    "staleness_max": staleness,
  }


def test_a_gap_on_equal_weights_is_seen_in_three_updates():
  """And never becomes the usual level that later ones are compared with."""
  far = [gap(0.02, n) for n in range(1, 5)]
  assert found(far) == [(3, "logprob_gap")]
  lost = [gap(float("inf"), n) for n in range(1, 4)]
  assert found(lost) == [(3, "logprob_gap")]
  assert not found(far, gap_limit=0.0)
  # One update may have a few tokens of very low probability.
  assert not found([gap(0.02, 1), gap(0.02, 2), gap(1e-4, 3), gap(0.02, 4)])
  # Its metric may be absent, which judges nothing.
  absent = {"optimizer_steps": 3.0, "staleness_max": 0.0}
  assert found([*far[:2], absent, gap(0.02, 4)]) == [(4, "logprob_gap")]
  # Steps of before are not known after resuming; others are of older weights
  # or of later steps of an update, which may be far.
  assert not found([gap(0.02, 2 * n) for n in range(1, 5)])
  assert not found([gap(0.02, n, staleness=1.0) for n in range(1, 5)])
  mixed = [{**step, "mixed_kv_tokens": 5.0} for step in far]
  assert not found(mixed)
  polluted = [gap(0.3, n) for n in (1, 2, 3)]
  clean = [gap(1e-4, n) for n in (4, 5, 6)]
  drifted = [gap(0.02, n, staleness=1.0) for n in (7, 8, 9)]
  assert found(polluted + clean + drifted, window=3) == [
    (3, "logprob_gap"),
    (9, "logprob_gap"),
  ]


def _events(run):
  return [events.StepFinished(i, i, m) for i, m in enumerate(RUNS[run], 1)]


def test_a_finding_is_a_fault_and_a_stop_raises():
  faults, reports = [], []
  config = reporting_settings.WatchdogConfig(
    no_gradient_updates=4, stop=("unsolved",)
  )
  dog = watchdog.Watchdog(config, faults.append)
  dog.on_stop(reports.append)
  for event in _events("unsolved")[:3]:
    dog.on_event(event)
  dog.check()
  for event in _events("unsolved")[3:]:
    dog.on_event(event)
  (fault,) = faults
  assert (fault.stage, fault.kind) == ("watchdog", "unsolved")
  assert "clone demonstrations first" in fault.message
  with pytest.raises(watchdog.RunStopped, match="clone demonstrations"):
    dog.check()
  assert [str(e) for e in reports] == [
    f"stopped by the watchdog (unsolved): {fault.message}"
  ]


def test_rules_not_in_stop_warn_only():
  faults = []
  dog = watchdog.Watchdog(
    reporting_settings.WatchdogConfig(no_gradient_updates=4), faults.append
  )
  for event in _events("unsolved"):
    dog.on_event(event)
  assert len(faults) == 1
  dog.check()


def test_it_may_be_off_and_evaluations_are_not_watched():
  faults = []
  off = watchdog.Watchdog(
    reporting_settings.WatchdogConfig(on=False, no_gradient_updates=1),
    faults.append,
  )
  for event in _events("unsolved"):
    off.on_event(event)
  dog = watchdog.Watchdog(
    reporting_settings.WatchdogConfig(failed_episodes=1), faults.append
  )
  ended = trajectory.Trajectory(status=STATUS.ENV_ERROR)
  dog.on_event(events.EpisodeFinished(ended, "eval-g", "t", split="eval"))
  assert not faults
  dog.on_event(events.EpisodeFinished(ended, "g", "t"))
  assert [fault.kind for fault in faults] == ["environments"]


def _ended(status, error="", turns=0):
  steps = [trajectory.Step() for _ in range(turns)]
  return trajectory.Trajectory(status=status, error=error, steps=steps)


def test_first_episodes_that_are_all_invalid_end_a_run_with_their_cause():
  faults = []
  dog = watchdog.Watchdog(
    reporting_settings.WatchdogConfig(invalid_episodes=4), faults.append
  )
  limit = _ended(STATUS.CONTEXT_LIMIT, "ContextLimit: 837 tokens, 512 fit")
  for split, one in (
    ("eval", limit),
    ("eval", _ended(STATUS.CANCELLED)),
    ("eval", _ended(STATUS.ENV_ERROR, "no screen")),
    ("train", limit),
  ):
    dog.on_event(events.EpisodeFinished(one, "g", "t", split=split))
  dog.check()
  dog.on_event(events.EpisodeFinished(limit, "g", "t"))
  assert [fault.kind for fault in faults] == ["invalid"]
  with pytest.raises(
    watchdog.RunStopped,
    match="3 of them by context_limit: ContextLimit: 837 tokens, 512 fit",
  ):
    dog.check()
  assert [fault.kind for fault in faults] == ["invalid"]


def _group(*members):
  return trajectory.TrajectoryGroup("g", "t", members)


def test_first_episodes_end_a_run_once_retries_have_failed_too():
  """An environment's server that comes up late has time to."""
  broken = _ended(STATUS.ENV_ERROR, "no server")
  requeued = events.GroupFinished(_group(broken), "requeued", "none is valid")
  dropped = events.GroupFinished(_group(broken), "dropped", "none is valid")

  def dog_after(*last):
    dog = watchdog.Watchdog(
      reporting_settings.WatchdogConfig(invalid_episodes=4), [].append
    )
    first = [events.EpisodeFinished(broken, "g", "t")] * 9
    for event in (*first, requeued, *last):
      dog.on_event(event)
    return dog

  dog_after().check()
  played = events.EpisodeFinished(_ended(STATUS.FAILED, turns=1), "g", "t")
  dog_after(played, dropped).check()
  with pytest.raises(watchdog.RunStopped, match="first 9 .*: no server"):
    dog_after(dropped).check()


def test_first_episodes_without_a_token_to_train_on_end_a_run():
  masked = _ended(STATUS.FAILED, turns=1)
  masked.metrics["untrained_tokens"] = 7
  rules = watchdog.Rules(reporting_settings.WatchdogConfig(invalid_episodes=2))
  for split in ("eval", "train", "train"):
    assert not rules.first_episode(masked, split)
  (finding,) = rules.given_up()
  assert "first 2 episodes" in finding.message
  assert "see rollout.other_sampling" in finding.message


@pytest.mark.parametrize("status", ["max_turns", "context_limit"])
def test_one_valid_episode_is_enough(status):
  rules = watchdog.Rules(reporting_settings.WatchdogConfig(invalid_episodes=2))
  broken = _ended(STATUS.ENV_ERROR)
  for one in (broken, _ended(STATUS(status), turns=1), *[broken] * 9):
    assert not rules.first_episode(one)


def test_a_run_in_which_nothing_can_be_played_fails(tmp_path, capsys):
  breaking_gym.mend()
  status = small_runs.run_train(
    tmp_path,
    "name=w",
    small_runs.ONE_LAYER,
    "warm_start.source=none",
    "steps=2",
    "gym=breaking_gym:GYM",
    "tasks=[t]",
    "watchdog.invalid_episodes=4",
    "eval.episodes_per_task=6",
  )
  assert status == 1
  errors = capsys.readouterr().err
  assert "all of the first 4 episodes were invalid, 4 of them by env_error" in (
    errors
  )
  assert "no screen" in errors
  assert not (tmp_path / "w" / "traceback.txt").exists()
  summary = small_runs.summary_of(tmp_path / "w")
  assert summary["status"] == "failed" and "no screen" in summary["error"]


@pytest.mark.slow
def test_a_run_that_solves_nothing_is_stopped_with_its_diagnosis(
  tmp_path, capsys
):
  assert (
    small_runs.run_train(
      tmp_path,
      "name=w",
      small_runs.NANO,
      "warm_start.source=none",
      "steps=8",
      "environment.max_turns=2",
      "eval.on=false",
      "watchdog.no_gradient_updates=3",
      "watchdog.stop=[unsolved]",
    )
    == 1
  )
  errors = capsys.readouterr().err
  assert "error: stopped by the watchdog (unsolved)" in errors
  assert "clone demonstrations first" in errors
  directory = tmp_path / "w"
  assert not (directory / "traceback.txt").exists()
  summary = small_runs.summary_of(directory)
  assert summary["status"] == "failed"
  assert summary["step"] == 3
  assert "watchdog/unsolved" in json.dumps(summary)
  assert list((directory / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_whose_engine_breaks_is_stopped_while_it_waits(tmp_path, capsys):
  """A learning rate of 1e25 makes weights from which nothing is sampled."""
  assert (
    small_runs.run_train(
      tmp_path,
      "name=w",
      small_runs.NANO,
      "warm_start.source=none",
      "steps=4",
      "environment.max_turns=2",
      "algorithm.entropy_coef=0.1",
      "learner.skip_zero_advantage=false",
      "eval.on=false",
      "learner.learning_rate=1e25",
      "learner.grad_clip=0",
      "watchdog.failed_episodes=8",
      "watchdog.stop=[environments]",
    )
    == 1
  )
  errors = capsys.readouterr().err
  assert "error: stopped by the watchdog (environments)" in errors
  assert "model_error" in errors


def test_a_gap_of_late_turns_alone_is_seen_and_named():
  """The mean over all tokens is far below the limit."""
  name = "sampler_kl_by_turn/17-32"
  steps = [
    {**gap(1e-3, n), name: 0.05, "sampler_kl_by_turn/01": 1e-5}
    for n in range(1, 5)
  ]
  assert found(steps) == [(3, "logprob_gap")]
  rules = watchdog.Rules(reporting_settings.WatchdogConfig())
  (finding,) = [f for step in steps for f in rules.step(step)]
  assert "turns 17-32" in finding.message and "0.05" in finding.message
  images = [
    {**gap(1e-3, n), "sampler_kl_by_images/03-04": 0.05} for n in range(1, 4)
  ]
  rules = watchdog.Rules(reporting_settings.WatchdogConfig())
  (finding,) = [f for step in images for f in rules.step(step)]
  assert "contexts with 03-04 images" in finding.message
  # One update may have a few tokens of very low probability.
  assert not found([*steps[:2], gap(1e-3, 3), *steps[3:]])
  assert not found(steps, gap_limit=0.0)


def test_a_gap_of_all_tokens_says_where_it_is_worst():
  steps = [
    {**gap(0.02, n), "sampler_kl_by_turn/09-16": 0.09} for n in (1, 2, 3)
  ]
  rules = watchdog.Rules(reporting_settings.WatchdogConfig())
  (finding,) = [f for step in steps for f in rules.step(step)]
  assert "0.09 at turns 09-16" in finding.message
