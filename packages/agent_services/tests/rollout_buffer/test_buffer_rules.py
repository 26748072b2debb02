"""Rules by which a rollout buffer gives groups, held to a second writing.

The reference below is written from the protocol's facts with fractions, lists
and loops, and shares no line with the rules.
"""

import copy
import fractions
import math

from agent_services.rollout_buffer import rules
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
import pytest
import trials

Rules = rules.GroupRules
REWARDS = st.one_of(
  st.sampled_from([0.0, 1.0, 0.5, -1.0, 2.0]),
  st.floats(-0.5, 1.5, allow_nan=False),
)
GROUPS = st.lists(REWARDS, min_size=1, max_size=12)
SHARES = st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0])


def items_of(rewards):
  return [
    {"uid": str(i), "instance_id": "g", "messages": [], "reward": r}
    for i, r in enumerate(rewards)
  ]


# --- the reference ------------------------------------------------------------


def expected_verdict(rewards, idle, size, ratio, timeout, timeout_ratio):
  least = max(1, math.floor(size * ratio))
  if len(rewards) >= least:
    differs = any(a != b for a in rewards for b in rewards)
    return "use" if differs or size == 1 else "drop"
  if idle > timeout:
    return "use" if len(rewards) / size >= timeout_ratio else "drop"
  return "waits"


def expected_items(rewards, size, item_ratio):
  """(reward, raw reward, index of the original) of each item, or None."""
  valid = [(i, r) for i, r in enumerate(rewards) if 0 <= r <= 1]
  if len(valid) < max(1, math.floor(size * item_ratio)):
    return None
  exact = [fractions.Fraction(r) for _, r in valid]
  mean = sum(exact) / len(exact)
  deviation = math.sqrt(sum((e - mean) ** 2 for e in exact) / len(exact))
  if all(e == 0 for e in exact):
    new = [0.0] * len(exact)
  elif deviation < 1e-8:
    new = [0.0] * len(exact)
  else:
    new = [float(e - mean) / (deviation + 1e-8) for e in exact]
  scale = size / len(valid)
  rows = [[n * scale, raw, i] for n, (i, raw) in zip(new, valid)]
  total = sum(row[0] for row in rows)
  target = max(size, len(rows))
  out = list(rows)
  while len(out) < target:
    out.append(rows[len(out) % len(rows)])
  count = {id(r): sum(o is r for o in out) for r in rows}
  shared = [(row[0] / count[id(row)], row[1], row[2]) for row in out]
  assert math.isclose(math.fsum(s[0] for s in shared), total, abs_tol=1e-6)
  return shared


# --- properties ---------------------------------------------------------------


@hypothesis_settings(max_examples=trials.count(400), deadline=None)
@given(
  GROUPS,
  st.floats(0, 1000),
  st.integers(1, 12),
  SHARES,
  st.sampled_from([1.0, 300.0]),
  SHARES,
)
def test_a_group_waits_is_used_or_dropped_as_the_protocol_has_it(
  rewards, idle, size, ratio, timeout, timeout_ratio
):
  settings = Rules(
    group_size=size,
    min_valid_group_size_ratio=ratio,
    group_timeout_seconds=timeout,
    min_timeout_group_size_ratio=timeout_ratio,
  )
  valid, finished = rules.is_valid_group(rewards, settings)
  assert not valid or finished
  got = rules.verdict(valid, finished, len(rewards), idle, settings)
  assert got == expected_verdict(
    rewards, idle, size, ratio, timeout, timeout_ratio
  )


@hypothesis_settings(max_examples=trials.count(400), deadline=None)
@given(GROUPS, st.integers(1, 12), SHARES)
def test_what_a_reader_gets_is_filtered_normalised_and_padded(
  rewards, size, ratio
):
  settings = Rules(group_size=size, min_valid_item_size_ratio=ratio)
  items = items_of(rewards)
  before = copy.deepcopy(items)
  got = rules.delivered(("g", items), settings, rules.Hooks(), "math")
  assert items == before, "the rules change no item that they are given"
  want = expected_items(rewards, size, ratio)
  if want is None:
    assert got is None
    return
  assert [i["uid"] for i in got] == [str(w[2]) for w in want]
  assert [i["raw_reward"] for i in got] == [w[1] for w in want]
  for item, (reward, _, _) in zip(got, want):
    assert math.isclose(item["reward"], reward, rel_tol=1e-6, abs_tol=1e-6)
  if len([r for r in rewards if 0 <= r <= 1]) <= size:
    assert len(got) % size == 0


@hypothesis_settings(max_examples=trials.count(200), deadline=None)
@given(st.dictionaries(st.text(max_size=3), GROUPS, max_size=5))
def test_the_statistics_are_those_of_all_items(by_instance):
  info = rules.meta_info(by_instance)
  every = [fractions.Fraction(r) for g in by_instance.values() for r in g]
  assert info["total_samples"] == len(every)
  assert info["num_groups"] == len(by_instance)
  if not every:
    assert set(info.values()) == {0}
    return
  mean = sum(every) / len(every)
  assert math.isclose(info["avg_reward"], mean, abs_tol=1e-12)
  assert info["reward_min"] == min(every)
  assert info["reward_max"] == max(every)
  assert info["avg_group_size"] == len(every) / len(by_instance)
  spread = 0.0
  if len(every) > 1:
    spread = math.sqrt(sum((e - mean) ** 2 for e in every) / (len(every) - 1))
  assert math.isclose(info["reward_std"], spread, abs_tol=1e-9)


# --- cases --------------------------------------------------------------------


def test_a_group_is_too_old_just_after_its_time_and_not_at_it():
  settings = Rules(group_size=10)
  for size, late in ((6, "drop"), (7, "use")):
    just_after = math.nextafter(300.0, 301.0)
    assert rules.verdict(False, False, size, 300.0, settings) == "waits"
    assert rules.verdict(False, False, size, just_after, settings) == late


def test_a_whole_group_of_zeros_keeps_its_rewards_and_one_of_ones_loses_them():
  for value in (0.0, 1.0):
    _, items = rules.normalize_group_data(("g", items_of([value] * 3)))
    assert [i["reward"] for i in items] == [0.0] * 3
    assert [i["raw_reward"] for i in items] == [value] * 3


def test_padding_repeats_items_as_often_as_it_must():
  _, items = rules.pad_group_data(("g", items_of([0.3, 0.6])), 5)
  assert [i["uid"] for i in items] == ["0", "1", "0", "1", "0"]
  assert math.isclose(sum(i["reward"] for i in items), 0.9 * 5 / 2)
  _, items = rules.pad_group_data(("g", items_of([1.0] * 3)), 4)
  assert [i["reward"] for i in items] == pytest.approx(
    [4 / 6, 4 / 3, 4 / 3, 4 / 6]
  )


def test_raw_groups_leave_as_they_came():
  settings = Rules(group_size=3, raw=True)
  rewards = [7.0, 7.0, 7.0]
  assert rules.is_valid_group(rewards, settings) == (True, True)
  got = rules.delivered(("g", items_of(rewards)), settings, rules.Hooks(), "x")
  assert [(i["reward"], i["raw_reward"]) for i in got] == [(7.0, 7.0)] * 3


def test_hooks_of_the_older_form_replace_their_step():
  hooks = rules.Hooks(
    filter_item=lambda item, task_type: item["uid"] != "0",
    normalize_group_data=lambda g: (g[0], [{**i, "reward": 9} for i in g[1]]),
    pad_group_data=lambda g, size: (g[0], g[1] * size),
  )
  settings = Rules(group_size=2, min_valid_item_size_ratio=0.5)
  got = rules.delivered(("g", items_of([0.0, 5.0])), settings, hooks, "math")
  assert [(i["uid"], i["reward"], i["raw_reward"]) for i in got] == [
    ("1", 9, 9),
    ("1", 9, 9),
  ]


def test_a_hook_of_the_newer_form_replaces_all_of_them():
  hooks = rules.Hooks(
    transform_group=lambda g, task_type: (g[0], [{**g[1][0], "t": task_type}])
  )
  got = rules.delivered(
    ("g", items_of([5.0, 5.0])), Rules(group_size=2), hooks, "math"
  )
  assert [(i["reward"], i["raw_reward"], i["t"]) for i in got] == [
    (5.0, 5.0, "math")
  ]


@pytest.mark.parametrize(
  "answer, judged",
  [
    (True, (True, True)),
    (False, (False, False)),
    ((True, True), (True, True)),
    ([False, True], (False, True)),
  ],
)
def test_both_forms_of_is_valid_group_are_read(answer, judged):
  assert rules.judged(answer) == judged


@pytest.mark.parametrize(
  "answer, fault",
  [
    ((True, False), "a valid group is finished"),
    (None, "return (valid, finished), or a bool"),
    ((1, 2, 3), "return (valid, finished), or a bool"),
  ],
)
def test_other_answers_of_is_valid_group_are_refused(answer, fault):
  with pytest.raises(rules.HookError, match="is_valid_group") as caught:
    rules.judged(answer)
  assert fault in str(caught.value)


@pytest.mark.parametrize("answer", [None, ("g",), ("g", "x"), ("g", [1])])
def test_a_hook_that_returns_no_group_is_refused(answer):
  hooks = rules.Hooks(transform_group=lambda group, task_type: answer)
  with pytest.raises(rules.HookError, match="hook returned"):
    rules.delivered(("g", items_of([1.0])), Rules(group_size=1), hooks, "x")
