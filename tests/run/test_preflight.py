"""A run and a dry run refuse the same, before anything is compiled."""

import dataclasses
import json
import re

import jax
import pytest
import small_runs
import trials
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.planning import compiled_update
from tunix.rl.multi_turn.planning import run_memory
from tunix.rl.multi_turn.policy import memory_limits
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import preflight
from tunix.rl.multi_turn.run import run as run_lib

GIB = 1 << 30


def load(*argv):
  return config_lib.load_config(["name=a", "warm_start.source=none", *argv])


def memory_of(*argv, exact=False):
  config = load(small_runs.NANO, *small_runs.SMALL, *argv)
  policy = models.make_policy(config, None, "")
  return config, run_memory.of_run(
    config, policy.model, policy.processor, None, exact=exact
  )


def part(memory, name):
  return next(p for p in memory.parts if p.name.startswith(name))


@pytest.fixture
def nothing_compiled(monkeypatch):
  """Fails the test where an engine is made or a program compiled."""

  def compiled(*args, **kwargs):
    raise AssertionError("it got as far as compiling")

  monkeypatch.setattr(engine_lib, "RolloutEngine", compiled)
  monkeypatch.setattr(compiled_update, "activations", compiled)
  monkeypatch.setattr(train, "execute", compiled)


REFUSED = (
  "agent.system_prompt=no_such_prompt",
  "agent.options.colour=red",
  "engine.cache_tokens=10000000000",
  "engine.context_length=64",
  "agent.history=summary agent.summary_at=160",
  "run.dir=/proc/nowhere",
  "queue.path=/proc/nowhere/q.db",
  "policy.config.layers=-1",
  "rollout.agent=no_such:agent rollout.via=proxy",
  "algorithm.advantage=tests:nothing",
  "policy=./nowhere",
  "tasks=[no-such-task]",
  "gym.options.difficulty=9",
)
# By the same checks, and a policy is made for each.
REFUSED_ALIKE = (
  "learner.rows=60000 learner.row_length=1000000",
  "engine.context_length=64 rollout.via=proxy",
  "engine.context_length=64 rollout.via=proxy rollout.agent=run_service",
  "engine.context_length=64 rollout.via=external"
  " external.url=http://127.0.0.1:9",
  "agent.history=summary agent.summary_at=430",
  "engine.page_size=1000000 engine.slots=60000",
  "policy.config.width=250000 policy.config.mlp=250000",
  "gym.width=4096",
)


@pytest.mark.parametrize(
  "overrides",
  trials.by_default(REFUSED, REFUSED + REFUSED_ALIKE, unlike=REFUSED_ALIKE),
)
def test_what_a_dry_run_refuses_a_run_refuses_in_the_same_words(
  overrides, nothing_compiled, capsys, tmp_path
):
  argv = ["warm_start.source=none", f"run.dir={tmp_path}", *overrides.split()]
  if overrides.startswith("run.dir="):
    argv.remove(f"run.dir={tmp_path}")
  assert train.main([*argv, "--dry-run"]) == 2
  dry = capsys.readouterr().err
  assert train.main(argv) == 2
  assert capsys.readouterr().err == dry
  assert dry.startswith("error: ") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "at, fields",
  [
    (160, ["agent.summary_at=160", "passed by every turn", "raise it above"]),
    (430, ["agent.summary_at=430", "no room for a summary", "lower it to 3"]),
  ],
)
def test_a_bound_of_summaries_is_checked_against_the_prompts(at, fields):
  config = load("agent.history=summary", f"agent.summary_at={at}")
  with pytest.raises(config_lib.ConfigError) as caught:
    run_lib.Run(config)
  assert all(field in str(caught.value) for field in fields), caught.value


def test_tasks_of_a_buffer_that_cannot_fit_are_named_by_their_line(
  tmp_path, nothing_compiled, capsys
):
  tasks = tmp_path / "tasks.jsonl"
  rows = [
    {"instance_id": str(i), "prompt": [{"role": "user", "content": "a " * n}]}
    for i, n in enumerate((900, 700, 800))
  ]
  tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
  argv = [
    *small_runs.SMALL,
    small_runs.NANO,
    "warm_start.source=none",
    "rollout.via=buffer",
    "buffer.url=http://127.0.0.1:9",
    f"buffer.input_file={tasks}",
    f"run.dir={tmp_path}",
  ]
  assert train.main(argv) == 2
  errors = capsys.readouterr().err
  assert "(line 2) has 7" in errors and "engine.context_length=384" in errors
  tasks.write_text(
    tasks.read_text()
    + json.dumps(
      {"instance_id": "d", "prompt": [{"role": "user", "content": "a"}]}
    )
  )
  with pytest.raises(AssertionError, match="as far as compiling"):
    train.main(argv)


def test_a_run_of_a_directory_that_holds_one_is_refused_by_both(
  tmp_path, nothing_compiled, capsys
):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
  for dry in ((), ("--dry-run",)):
    assert train.main([f"run.dir={tmp_path}", "name=a", *dry]) == 2
    assert "holds a run already" in capsys.readouterr().err


# --- memory -------------------------------------------------------------------


def test_the_dry_run_prints_every_part_against_what_there_is(tmp_path, capsys):
  assert (
    small_runs.run_train(
      tmp_path, small_runs.NANO, "warm_start.source=none", "--dry-run", "name=d"
    )
    == 0
  )
  assert not list(tmp_path.iterdir())
  shown = capsys.readouterr().out
  table = shown.partition("\nmemory\n")[2]
  assert re.search(r"KV cache of \d+ tokens, [\d.]+ \wiB", shown)
  assert "group_size: 4" in shown
  for name in (
    "parameters",
    "gradients",
    "optimizer state",
    "rollout copy",
    "KV cache",
    "vision cache",
    "image cache",
  ):
    assert re.search(rf"^  {name}.* [\d.]+ (B|KiB|MiB|GiB)", table, re.M), name
  assert re.search(r"activations of an update +[\d.]+ MiB \(compiled\)", table)
  assert re.search(r"in all, this machine +[\d.]+ \wiB of [\d.,]+ \wiB", table)


def test_the_table_counts_what_the_run_makes(tmp_path):
  config, memory = memory_of(f"run.dir={tmp_path}")
  run = run_lib.Run(config)
  try:
    assert part(memory, "KV cache").bytes == run.engine.cache_bytes
    assert part(memory, "rollout copy").bytes == run.engine.weight_bytes
    learner = models.make_learner(config, run.policy, run.images, None)
    arrays = learner.arrays()
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert part(memory, "gradients").bytes == size(arrays["params"])
    assert part(memory, "optimizer").bytes == size(arrays["optimizer"])
    pool = jax.tree.leaves(run.engine._state.pool)
    assert part(memory, "vision cache").bytes == sum(x.nbytes for x in pool)
  finally:
    run.engine.close()


def test_the_reference_and_an_adapter_are_counted():
  _, plain = memory_of()
  _, kl = memory_of(
    "algorithm.kl_coef=0.1", "learner.skip_zero_advantage=false"
  )
  assert part(kl, "KL reference").bytes == part(plain, "gradients").bytes
  config = load("policy=qwen3_vl_tiny", "policy.lora_rank=2")
  policy = models.make_policy(config, None, "")
  memory = run_memory.of_run(
    config, policy.model, policy.processor, None, exact=False
  )
  assert part(memory, "gradients").bytes < part(memory, "parameters").bytes / 10


@pytest.mark.slow
def test_the_bytes_of_a_parameter_are_those_of_its_types():
  def found(*argv):
    config = load("policy=qwen3_vl_tiny", *argv)
    policy = models.make_policy(config, None, "")
    return run_memory.of_run(
      config, policy.model, policy.processor, None, exact=False
    )

  names = ("parameters", "parameters that", "gradients", "optimizer", "rollout")
  sizes = {}
  for dtype in ("float32", "bfloat16"):
    memory = found(f"policy.config.param_dtype={dtype}")
    rows = [part(memory, name) for name in names]
    count = rows[1].bytes // 4
    sizes[dtype] = [round(row.bytes / count, 2) for row in rows]
    for row, size in zip(rows, sizes[dtype]):
      assert f"{size:.3g} bytes a parameter" in row.how, row.name
  assert sizes == {"float32": [4, 4, 4, 8, 4], "bfloat16": [2, 4, 4, 8, 2]}
  assert "float32 masters" in part(memory, "parameters that").how


@pytest.mark.slow
def test_activations_grow_with_the_rows_predicted_and_compiled():
  """The prediction is within a factor of three of what is compiled."""
  # With enough rows that the logits of a chunk, of constant size, are less.
  sizes = {}
  for rows in (8, 32):
    for exact in (False, True):
      _, memory = memory_of(f"learner.rows={rows}", exact=exact)
      activations = part(memory, "activations")
      assert activations.how == ("compiled" if exact else "predicted")
      sizes[rows, exact] = activations.bytes
  assert 2 < sizes[32, True] / sizes[8, True] < 5
  assert 2 < sizes[32, False] / sizes[8, False] < 5
  for rows in (8, 32):
    assert 1 / 3 < sizes[rows, True] / sizes[rows, False] < 3


def test_near_the_limit_a_run_compiles_to_be_sure(monkeypatch):
  _, memory = memory_of()
  predicted = part(memory, "activations").bytes
  monkeypatch.setattr(memory_limits, "host_bytes", lambda: 3 * predicted)
  requests = []
  monkeypatch.setattr(
    compiled_update,
    "activations",
    lambda *a, **k: requests.append(1) or 4 * predicted,
  )
  config, memory = memory_of()
  assert requests and part(memory, "activations").how == "compiled"
  (problem,) = memory.problems(config)
  assert "learner.rows=4" in problem and "lower learner.rows" in problem
  assert run_memory.human(3 * predicted) in problem
  monkeypatch.setattr(memory_limits, "host_bytes", lambda: 1000 * GIB)
  requests.clear()
  config, memory = memory_of()
  assert not requests and not memory.problems(config)


def test_a_cache_that_is_only_a_bound_refuses_nothing(monkeypatch):
  config, memory = memory_of()
  sure = memory.total(True, least=True)
  assert sure < memory.total(True)
  fits = dataclasses.replace(memory, host=sure, device=sure)
  assert not fits.problems(config)
  assert dataclasses.replace(fits, host=sure - 1).problems(config)


def test_a_device_apart_from_the_host_has_a_limit_of_its_own():
  config, memory = memory_of()
  apart = dataclasses.replace(memory, shared=False, device=1, host=64 * GIB)
  (problem,) = apart.problems(config)
  assert "a device has 1 B" in problem
  assert not dataclasses.replace(apart, device=None).problems(config)
  lines = dict(apart.table())
  assert "in all, a device" in lines and "in all, this machine" in lines


def test_a_custom_policy_is_not_predicted_and_not_refused(
  tmp_path, monkeypatch
):
  config, memory = memory_of()
  monkeypatch.setattr(
    run_memory.update_memory.Sizes, "known", staticmethod(lambda config: False)
  )
  config, memory = memory_of()
  activations = part(memory, "activations")
  assert activations.bytes == 0 and "not known" in activations.how


def test_a_cgroup_limits_this_machines_memory(tmp_path, monkeypatch):
  total = memory_limits.host_bytes()
  limit = tmp_path / "memory.max"
  monkeypatch.setattr(memory_limits, "_LIMITS", (str(limit),))
  limit.write_text("max\n")
  assert memory_limits.host_bytes() >= total
  limit.write_text(f"{1 << 20}\n")
  assert memory_limits.host_bytes() == 1 << 20


def test_no_memory_while_it_is_built_is_one_line(tmp_path, monkeypatch, capsys):
  def full(*args, **kwargs):
    raise MemoryError("Unable to allocate 3 TiB")

  monkeypatch.setattr(models, "make_engine", full)
  assert (
    small_runs.run_train(
      tmp_path, small_runs.NANO, "name=x", "warm_start.source=none"
    )
    == 2
  )
  stderr = capsys.readouterr().err
  assert "Unable to allocate 3 TiB" in stderr and "--dry-run" in stderr


def test_a_folder_called_auto_is_not_in_the_queues_way(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "auto").mkdir()
  config = config_lib.load_config([f"run.dir={tmp_path}"])
  assert config.queue.path == "auto"
  preflight.before_building(config)


# --- teachers -----------------------------------------------------------------


@pytest.mark.parametrize(
  "name, message",
  [
    ("qwen3_vl_tiny", "another tokenizer|another image processor"),
    ("./nowhere", "nowhere"),
    ("qwen2_5_vl_tiny", "neither a policy directory"),
  ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_anything(name, message):
  config = config_lib.load_config(
    ["name=x", "algorithm=distill", f"algorithm.teacher={name}"]
  )
  source = models.warm_start_source(config)
  policy = models.make_policy(config, None, source)
  with pytest.raises(config_lib.ConfigError, match=message) as raised:
    models.make_teacher(config, policy, None)
  assert f"algorithm.teacher={name}" in str(raised.value)


def test_a_teacher_of_the_same_family_is_loaded():
  config = config_lib.load_config(
    ["name=x", "algorithm=distill", "algorithm.teacher=tiny_vl"]
  )
  policy = models.make_policy(config, None, "")
  teacher = models.make_teacher(config, policy, None)
  assert type(teacher) is type(policy.model)
  plain = config_lib.load_config(["name=x"])
  assert models.make_teacher(plain, policy, None) is None
