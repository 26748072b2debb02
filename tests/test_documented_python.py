"""The Python of the pages runs, against the servers that a page speaks of.

Each test gives a page its servers, files and names, runs every block that has
no marker, and looks at what came of it. Pages whose parts have tests of their
own are run there.
"""

import asyncio
import json
import pathlib
import re
import time

from agent_services.rollout_buffer import plugins
import buffer_services
import chat_server
import documented_code
import fake_engines
import gym_servers
import own_parts
import pytest
import rollout_server
import small_server
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
import yaml

TESTS = pathlib.Path(__file__).resolve().parent
PACKAGES = TESTS.parent / "packages"
SMALL_RUN = """
policy: {config: {width: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16,
  vision_heads: 2, mlp: 64, vision_mlp: 64, stem: [8, 8, 16]}}
warm_start: {source: none}
task_source: {families: [enter-text]}
collect: {group_size: 4, min_valid: 2, concurrency: 8}
learner: {groups_per_step: 2, rows: 4, row_length: 384}
engine: {slots: 8, context_length: 384}
eval: {episodes_per_task: 2}
report: {progress: none}
"""


def test_every_block_is_run_or_marked():
  """`documented_code.run` runs all of a page: a test names each one."""
  files = [*TESTS.rglob("test_*.py"), *PACKAGES.glob("*/tests/**/test_*.py")]
  tested = "\n".join(p.read_text("utf-8") for p in files)
  ran = set(re.findall(r'documented_code\.run\(\s*"([^"]+)"', tested))
  result = {p: documented_code.blocks(p) for p in documented_code.pages()}
  for page, blocks in result.items():
    for block in blocks:
      if block.marker is not None:
        kind, reason = block.marker
        assert kind in documented_code.KINDS, f"{page}:{block.line} {kind}"
        assert reason.strip()
    if any(block.marker is None for block in blocks):
      assert page in ran, f"no test runs the Python of {page}"
  assert ran <= set(result)
  assert sum(map(len, result.values())) > 30


@pytest.mark.parametrize("page", documented_code.pages())
def test_data_of_a_page_can_be_read(page):
  for block in documented_code.blocks(page, None):
    if block.language == "yaml":
      assert yaml.safe_load(block.text), f"{page}:{block.line}"
    elif block.language == "json":
      decoder, text = json.JSONDecoder(), block.text.strip()
      while text:  # One object after the other.
        _, end = decoder.raw_decode(text)
        text = text[end:].lstrip()
    else:
      languages = ("", "python", "sh", "text")
      assert block.language in languages, f"{page}:{block.line}"


def test_nothing_indented_is_python():
  """Indented blocks are a shell's; test_documented_commands checks them."""
  for page in documented_code.pages():
    text = (documented_code.ROOT / page).read_text("utf-8")
    for line in re.findall(
      r"^    (\S.*)$",
      re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S),
      re.M,
    ):
      assert not re.match(r"(import|from) [\w.]+( import|$)", line), (
        f"{page} has Python without a fence: {line}"
      )


@pytest.mark.slow
def test_gym_servers(tmp_path, monkeypatch):
  (tmp_path / "tasks.jsonl").write_text(
    "".join(
      json.dumps({"task_id": f"t{i}", "instruction": "Do it."}) + "\n"
      for i in range(20)
    )
  )
  monkeypatch.chdir(tmp_path)
  try:
    with gym_servers.serving() as (url, _):
      names = documented_code.run(
        "docs/gym_server.md",
        {
          "LampGym": gym_servers.NaughtyGym,
          "LampTasks": gym_servers.NaughtyTasks,
        },
        {"http://127.0.0.1:5010": url},
      )
    assert "lamps" in gyms.names()
  finally:
    gyms.gym_registry.GYMS.unregister("lamps")
  assert 0 < len(names["tasks"]) < len(names["merged"])
  groups = names["batches"][0]
  assert all(t == group[0] for group in groups for t in group)
  assert len({id(group[0]) for group in groups}) == 4
  assert [len(group) for group in groups] == [4] * 4
  shown, _ = names["env"].reset(seed=0)
  assert names["env"].observation_space.contains(shown)
  flat, _ = names["flat"].reset(seed=0)
  assert names["flat"].observation_space.contains(flat)


def test_the_tasks_of_a_buffers_trainer(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  documented_code.run("docs/rollout_buffer_trainer.md")
  lines = (tmp_path / "tasks.jsonl").read_text().splitlines()
  assert len(lines) == len(set(lines)) == 240


def test_the_rollout_buffer(tmp_path):
  page = "docs/rollout_buffer.md"
  with buffer_services.Running(tmp_path / "buffer") as running:
    running.start(num_repeat_per_sample="1")
    names = documented_code.run(
      "docs/rollout_buffer.md", replace={"http://127.0.0.1:8889": running.url}
    )
    asyncio.run(names["use"]())
    stats = running.stats()
  assert stats["reads"] == 1 and stats["items"] == stats["leases"] == 0
  for number, block in enumerate(documented_code.blocks(page)[1:]):
    folder = tmp_path / f"generators{number}"
    folder.mkdir()
    (folder / "riddles_generator.py").write_text(block.text)
    generators = plugins.discover([folder])
    assert "riddles" in generators.generators and not generators.problems


def test_the_rollout_buffers_generator_plays(tmp_path):
  folder = tmp_path / "generators"
  folder.mkdir()
  block = documented_code.blocks("docs/rollout_buffer.md")[2]
  (folder / "riddles_generator.py").write_text(block.text)
  rows = tmp_path / "riddles.jsonl"
  rows.write_text('{"instance_id": "a", "prompt": "What is it?"}\n')
  with buffer_services.Running(
    tmp_path / "buffer", generators=[folder]
  ) as running:
    answer = running.start(
      task_type="riddles",
      num_repeat_per_sample="2",
      num_epoch="1",
      input_file=str(rows),
      remote_buffer_url=running.url,
    )
    assert answer.status_code == 200, answer.text
    due = time.monotonic() + 60
    while running.stats()["generator"]["state"] != "finished":
      assert time.monotonic() < due, running.stats()
      time.sleep(0.05)
    stats = running.stats()
  # Equal rewards teach nothing: the group is kept and not handed out.
  assert stats["total_written"] == stats["waiting_items"] == 2
  assert stats["generator"]["log"][-1] == "2 episodes written, 0 failed"


@pytest.mark.slow
def test_serving(tmp_path, capsys):
  """The openai client, a session, a prompt of tokens, weights for a vLLM."""
  with rollout_server.Running() as server:
    saved = checkpoint.save_policy(tmp_path / "first", server.model)
    launch = vllm.VllmLaunch(
      str(saved),
      served_name="cua",
      max_model_len=small_server.CONTEXT,
      images=3,
      dtype="float32",
    )
    other, _, _ = checkpoint.create_policy("nano", 3, screen=small_server.SIZE)
    with fake_engines.FakeVllm(launch.argv(), launch.environment()) as fake:

      def ask_in_tokens(names):
        # The session was dropped: another client from here on.
        assert names["found"] == {}  # Nothing was played in it.
        names["client"] = server.client()
        message = rollout_server.screenshot()
        answer = rollout_server.ask(names["client"], [message])
        names.update(
          images=message["content"][1:],
          ids=answer.prompt_token_ids,
          model=other,
        )

      def hand_over(names):
        names["policy_client"] = openai_client.OpenAIClient(
          f"{fake.url}/v1", "cua", server.images
        )

      names = documented_code.run(
        "docs/serving.md",
        replace={
          '"http://127.0.0.1:8000"': f'"{server.url}"',
          '"http://127.0.0.1:8000/v1"': f'"{server.url}/v1"',
          "tiny_vl": rollout_server.MODEL,
          "/shared/weights": str(tmp_path / "weights"),
          "/models/policy": str(saved),
          f'VllmEngine("{server.url}")': f'VllmEngine("{fake.url}")',
        },
        before={2: ask_in_tokens, 3: hand_over},
      )
      names["weights"].close()
      asyncio.run(names["policy_client"].aclose())
    assert names["policy_client"].version == names["weights"].version == 1
  assert names["choice"].token_ids and names["choice"].logprobs.content
  assert str(names["choice"].token_ids) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_python_api(tmp_path, monkeypatch):
  """Two runs, two evaluations and three episodes, with a small policy."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "config.yaml").write_text(SMALL_RUN)

  def choose(names):
    assert names["run"].status == "completed" and names["run"].step == 1
    (tmp_path / "chosen").symlink_to(names["run"].directory)

  once = '**{"eval.episodes_per_task": 1}'
  with chat_server.serving() as (url, _):
    names = documented_code.run(
      "docs/python_api.md",
      {"my_reward": own_parts.brevity, "__name__": "__main__"},
      {
        'mt.train(steps=40, gym="desktop")': (
          'mt.train("config.yaml", steps=1, gym="desktop")'
        ),
        "steps=40": "steps=1",
        "runs/desktop-20260101-120000-3fa2b1": "chosen",
        "runs/desktop-…": "chosen",
        "attempts=4": f"attempts=2, {once}",
        "http://127.0.0.1:8000/v1": url,
        'v1", gym="desktop"': f'v1", "enter-text", gym="desktop", {once}',
      },
      before={2: choose},
    )
  assert names["run"].directory.samefile(tmp_path / "chosen")
  assert names["found"].status == "completed"
  assert len(list((tmp_path / "chosen" / "evaluations").iterdir())) == 1
  assert len(list((tmp_path / "evaluations").iterdir())) == 1
