"""AReaL's workflow: rows in, tensors or None out, nothing left behind."""

import asyncio
import contextlib
import json
import time

import documented_code
import gym_servers
import monitor_databases
import monitor_server
import numpy as np
import pytest
import run_services
from tunix.rl.multi_turn.clients import cua_workflow
from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.core import tensor_rows
from tunix.rl.multi_turn.monitor.client import http_rollout_recorder
from tunix.rl.multi_turn.monitor.client import ingest_client
from tunix.rl.multi_turn.policy import checkpoint

torch = pytest.importorskip("torch")
PAD = 9  # Placeholder of images.
ROW = {
    "task_id": "click-button-train-0",
    "name": "click-button-train-0",
    "description": "Click the button.",
    "gym_id": "desktop",
}
MOVE = run_services.call(action="mouse_move", coordinate=[500, 500])
END = run_services.call(action="terminate", status="success")


def policy(texts=(MOVE, END), **without):
  """A model server: prompts extend one another, as a real one's do."""

  def answer(method, path, body):
    if path.endswith("/models"):
      return 200, {"data": [{"id": "tiny"}]}
    messages = json.loads(body)["messages"]
    turn = sum(m["role"] == "assistant" for m in messages)
    prompt = [1, PAD, PAD, 2]
    for _ in range(turn):
      prompt += [5, 6, 3, PAD, PAD, 2]
    return 200, run_services.completion(
        texts[min(turn, len(texts) - 1)], **{"prompt": prompt, **without}
    )

  return answer


class Engine:
  """As much of AReaL's as is asked for."""

  def __init__(self, address=None, version=7):
    self.addresses = [address] if address else []
    self._version = version

  def get_version(self):
    return self._version


class Pixels:
  """A processor, as transformers' are called."""

  image_token_id = PAD

  def image_processor(self, images, return_tensors):
    assert return_tensors == "np"
    assert all(i.shape == (96, 128, 3) for i in images)
    return {
        "pixel_values": np.ones((4 * len(images), 6), np.float32),
        "image_grid_thw": np.array([[1, 2, 2]] * len(images)),
    }


class World:
  """The three servers, and a workflow in front of them."""

  def __init__(self, answer=None, **options):
    self.log = []
    self.answer = answer or policy()
    self.options = options

  def __enter__(self):


    self._stack = contextlib.ExitStack()
    self.gym_url, gym_app = self._stack.enter_context(gym_servers.serving())
    self.gym = gym_app
    model = run_services.Scripted(self.answer)
    self.model = self._serve(model, "model")
    service = run_services.app_lib.App()
    self.service = service
    self.url = self._serve(service.asgi, "service")
    self.gym_front = self._serve(gym_app.asgi, "gym")
    self.row = {**ROW, "gym_base_url": self.gym_front}
    return self

  def _serve(self, app, name):
    logged = run_services.Logged(app, name, self.log)
    return self._stack.enter_context(
        http_server.LoopbackServer(logged)
    ).url

  def __exit__(self, *exc_info):
    self._stack.close()

  def workflow(self, **options):
    return cua_workflow.CUAAgentWorkflow(**{
        "gbox_mini_agent_base_url": self.url,
        "gbox_mini_agent_agent": "tool",
        "standard_action_space": "pc",
        "processor": Pixels(),
        "poll_s": 0.02,
        "max_turns": 3,
        **options,
    })


def test_the_code_in_the_documentation_runs():
  _, _, tokenizer = checkpoint.create_policy("nano")
  with World() as world:
    names = documented_code.run(
        "docs/run_service.md",
        {
            "tokenizer": tokenizer,
            "messages": [
                {"role": "user", "content": "2 + 3?"},
                {"role": "assistant", "content": "5"},
            ],
            "tools": None,
            "gconfig": None,
            "processor": Pixels(),
            "engine": Engine(),
            "row": world.row,
        },
        {
            "http://127.0.0.1:3000": world.url,
            "http://127.0.0.1:8000/v1": f"{world.model}/v1",
        },
    )
  masked = names["masked"]  # The newline after the reply is not trained on.
  assert sum(masked.loss_mask) == masked.response_length - 1 > 0
  assert not names["workflow"].rejected
  assert names["batch"]["input_ids"].shape == names["batch"]["loss_mask"].shape


async def test_an_episode_is_the_documented_sequence_and_gives_tensors():
  with World() as world:
    workflow = world.workflow()
    batch = await workflow.arun_episode(Engine(f"{world.model}"), world.row)
    assert workflow.accepted == 1 and not workflow.rejected
  assert isinstance(batch["input_ids"], torch.Tensor)
  tokens = [1, PAD, PAD, 2, 5, 6, 3, PAD, PAD, 2, 5, 6]
  mask = [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
  assert batch["input_ids"].tolist() == [tokens]
  assert batch["loss_mask"].tolist() == [mask]
  assert batch["attention_mask"].tolist() == [[True] * 12]
  assert batch["versions"].tolist() == [[7 if m else -1 for m in mask]]
  pair = iter([-0.5, -0.25] * 2)
  assert batch["logprobs"].tolist() == [
      [next(pair) if m else 0.0 for m in mask]
  ]
  assert {k: str(v.dtype) for k, v in batch.items() if k[0] != "m"} == {
      "input_ids": "torch.int32", "loss_mask": "torch.int32",
      "versions": "torch.int32", "attention_mask": "torch.bool",
      "logprobs": "torch.float32", "rewards": "torch.float32",
  }  # pyformat: disable
  assert batch["rewards"].shape == (1,)
  (pictures,) = batch["multi_modal_input"]
  assert pictures["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
  assert pictures["pixel_values"].shape == (8, 6)
  # Create, run, (model, action) each turn, evaluate, terminate: once each.
  order = []
  for who, method, path in world.log:
    what = path.rpartition("/")[2]
    if who == "gym" and method == "POST":
      order.append("create" if "/tasks/" in path else what)
    elif (who, method, what) == ("service", "POST", "runs"):
      order.append("run")
    elif (who, what) == ("model", "completions"):
      order.append("model")
  assert order == [
      "create", "run", "model", "step", "model", "step", "evaluate",
      "terminate",
  ]  # pyformat: disable


async def test_a_policy_whose_images_are_rows_is_read_as_any_other():
  """Pixtral's processor: breaks between rows, and no image_grid_thw."""

  class Rows(Pixels):
    image_break_token_id = 8

    def image_processor(self, images, return_tensors):
      found = super().image_processor(images, return_tensors)
      return {
          "pixel_values": found["pixel_values"],
          "image_sizes": [(16, 16)] * len(images),
      }

  prompt = [1, PAD, PAD, 8, PAD, PAD, 7, 2]
  with World(policy((END,), prompt=prompt)) as world:
    workflow = world.workflow(processor=Rows())
    batch = await workflow.arun_episode(Engine(world.model), world.row)
    assert not workflow.rejected
  assert batch["input_ids"].tolist() == [[*prompt, 5, 6]]
  (pictures,) = batch["multi_modal_input"]
  assert sorted(pictures) == ["image_sizes", "pixel_values"]
  assert pictures["image_sizes"].tolist() == [[16, 16]]


async def test_it_collates_with_another_sample():
  with World() as world:
    batch = await world.workflow().arun_episode(Engine(world.model), world.row)
  ours = cua_workflow._as_numpy(batch)
  rlvr = {  # As AReaL's RLVRWorkflow makes them, without images.
      "input_ids": np.arange(15, dtype=np.int32)[None],
      "attention_mask": np.ones((1, 15), bool),
      "loss_mask": np.ones((1, 15), np.int32),
      "logprobs": np.zeros((1, 15), np.float32),
      "versions": np.zeros((1, 15), np.int32),
      "rewards": np.ones(1, np.float32),
  }
  both = tensor_rows.collate([ours, rlvr])
  assert both["input_ids"].shape == (2, 15)
  assert both["attention_mask"].sum(1).tolist() == [12, 15]
  assert both["loss_mask"][0, 12:].tolist() == [0, 0, 0]
  assert both["rewards"].shape == (2,)
  assert [sorted(m) for m in both["multi_modal_input"]] == [
      ["image_grid_thw", "pixel_values"], [],
  ]  # pyformat: disable
  with pytest.raises(ValueError, match="versions"):
    tensor_rows.collate([ours, {k: v for k, v in rlvr.items()
                                if k != "versions"}])


@pytest.mark.parametrize(
    "answer, cause",
    [
        (lambda *_: (500, {"error": "no"}), "RunFailed"),
        (lambda *_: asyncio.sleep(3, (200, {})), "timeout"),
        (lambda *_: (200, b"<html>"), "RunFailed"),
        (policy(ids=None), "MissingTokens"),
        (policy(logprobs=(-1.0,)), "MissingTokens"),
        (policy(prompt=[1, 2]), "MissingTokens"),
    ],
    ids=["500", "hang", "garbage", "no ids", "short logprobs", "no image"],
)
async def test_what_cannot_be_trained_on_is_none_and_leaves_nothing(
    answer, cause
):
  with World(answer) as world:
    workflow = world.workflow(
        max_task_time_seconds=1.5,
        gbox_mini_agent_model="m",
        max_concurrent_rollouts=1,
    )
    for _ in range(2 if cause == "MissingTokens" else 1):  # Its slot is free.
      started = time.monotonic()
      assert await workflow.arun_episode(
          Engine(world.model), world.row
      ) is None
      assert time.monotonic() - started < 10.0
    assert set(workflow.rejected) == {cause}, workflow.rejected
    assert not workflow.running and not workflow.accepted
    assert world.log[-1][0] == "gym" or world.log[-1][2].endswith("cancel")
    ended = [p for w, _, p in world.log if p.endswith("/terminate")]
    assert len(ended) == sum(workflow.rejected.values())
    await gym_servers.until(lambda: not world.service.playing)
    assert world.gym.store.open == 0


async def test_a_service_that_is_not_there_is_none():
  with World() as world:
    for url in ("http://127.0.0.1:1", world.gym_url):
      workflow = world.workflow(
          gbox_mini_agent_base_url=url, gbox_mini_agent_model="m"
      )
      assert await workflow.arun_episode(
          Engine(world.model), world.row
      ) is None
      assert set(workflow.rejected) == {"RunServiceError"}


async def test_fallbacks_are_counted_and_only_when_asked_for():
  class Words:
    """A tokenizer of as many tokens as there are words."""

    def apply_chat_template(self, messages, **options):
      assert options == {"add_generation_prompt": True, "tokenize": False}
      return " ".join(str(m["content"]) for m in messages)

    def encode(self, text, add_special_tokens):
      assert not add_special_tokens
      return [ord(w[0]) for w in text.split()]

  class Renderer:
    """As much of a renderer as a fallback reads."""

    image_token_id, end_of_turn_id = PAD, 2

    def render(self, messages):
      from tunix.rl.multi_turn.core import policy_client

      images = sum(
          p["type"] == "image"
          for m in messages
          if isinstance(m["content"], list)
          for p in m["content"]
      )
      return policy_client.TokenPrompt(np.array([1, *[PAD, 3] * images]))

    def encode(self, text):
      return np.array([7] * len(text.split()))

  with World(policy((END,), ids=None, logprobs=None, prompt=None)) as world:
    refused = world.workflow()
    assert await refused.arun_episode(Engine(world.model), world.row) is None
    workflow = world.workflow(on_missing="fallback", renderer=Renderer())
    batch = await workflow.arun_episode(Engine(world.model), world.row)
    assert workflow.fallback_turns == 1
    assert not batch["logprobs"].any() and batch["loss_mask"].any()
    # A tokenizer alone cannot place screenshots.
    plain = world.workflow(on_missing="fallback", tokenizer=Words())
    assert await plain.arun_episode(Engine(world.model), world.row) is None


async def test_rollouts_are_counted_in_runs_and_in_groups():
  with World() as world:
    workflow = world.workflow(
        max_concurrent_rollouts=3, max_concurrent_groups=2
    )
    engine = Engine(world.model)
    batches = await asyncio.gather(
        *(workflow.arun_group(engine, world.row, 4) for _ in range(2))
    )
    assert workflow.peak == 3 and workflow.accepted == 8
    for batch in batches:
      assert batch["input_ids"].shape == (4, 12)
      assert len(batch["multi_modal_input"]) == 4
    alone = world.workflow(max_concurrent_rollouts=None, consumer_batch_size=2)
    await asyncio.gather(
        *(alone.arun_episode(engine, world.row) for _ in range(4))
    )
    assert alone.peak == 2


async def test_a_batch_fills_with_the_episodes_that_are_left():
  """One call plays one run; rejected ones are in no batch, and hold no slot."""
  real, count = policy(), 0

  def sometimes(method, path, body):
    nonlocal count
    messages = json.loads(body)["messages"] if body else ()
    if messages and not any(m["role"] == "assistant" for m in messages):
      count += 1
      if count % 2 == 0:
        return 500, {"error": "no"}
    return real(method, path, body)

  with World(sometimes) as world:
    workflow = world.workflow(
        gbox_mini_agent_model="m", max_concurrent_rollouts=1
    )
    engine, batches, items = Engine(world.model), [], 0
    while sum(len(b["rewards"]) for b in batches) < 4:  # As prepare_batch does.
      items += 1
      found = await workflow.arun_group(engine, world.row, 2)
      batches += [] if found is None else [found]
    assert (items, workflow.accepted) == (4, 4)
    assert workflow.rejected == {"RunFailed": 4} and not workflow.running
    runs = [p for w, m, p in world.log if (w, m) == ("service", "POST")
            and p.endswith("/runs")]  # pyformat: disable
    assert len(runs) == 8  # One an episode.
    full = tensor_rows.collate([cua_workflow._as_numpy(b) for b in batches])
    assert full["input_ids"].shape == (4, 12)
    assert world.gym.store.open == 0


async def test_wrong_arguments_raise_and_do_not_reject_every_episode():
  make = cua_workflow.CUAAgentWorkflow
  for options, words in (
      ({"on_missing": "invent"}, "on_missing"),
      ({"max_turns": 0}, "max_turns"),
      ({"max_concurrent_rollouts": 0}, "max_concurrent_rollouts"),
      ({"max_task_time_seconds": 0.0}, "max_task_time_seconds"),
      ({"model_base_url": "localhost"}, "model_base_url"),
      ({"gbox_mini_agent_base_url": "moon"}, "base_url"),
  ):
    with pytest.raises(ValueError, match=words):
      make(**options)
  workflow = make(gbox_mini_agent_base_url="http://127.0.0.1:1")
  row = {**ROW, "gym_base_url": "http://127.0.0.1:1"}
  with pytest.raises(ValueError, match="model_base_url"):
    await workflow.arun_episode(Engine(), row)
  with pytest.raises(ValueError, match="gym_base_url"):
    await workflow.arun_episode(Engine("http://127.0.0.1:2"), ROW)
  assert not workflow.rejected


def test_the_address_of_the_service_is_also_the_environment_s(monkeypatch):
  monkeypatch.setenv("GBOX_MINI_AGENT_BASE_URL", "http://gbox.lan:3000")
  workflow = cua_workflow.CUAAgentWorkflow()
  assert workflow._service_url == "http://gbox.lan:3000"
  explicit = cua_workflow.CUAAgentWorkflow(
      gbox_mini_agent_base_url="http://other:1"
  )
  assert explicit._service_url == "http://other:1"


async def test_episodes_are_recorded_at_the_monitor_also_rejected_ones(
    tmp_path,
):
  target = tmp_path / "monitor.db"
  monitor_databases.new_sqlite(target)
  names = iter(("good", "bad"))
  answers = {"now": policy()}
  with (
      monitor_server.MonitorServer(
          str(target), tmp_path / "files"
      ) as monitor,
      World(lambda *args: answers["now"](*args)) as world,
      ingest_client.IngestClient(
          monitor.url, timeout_seconds=10, spool_dir=tmp_path / "spool"
      ) as client,
  ):
    training = client.post_training(run_name="x", status="running")
    step = client.post_step({"training_id": training, "step": 1})
    workflow = world.workflow(
        gbox_mini_agent_model="m",
        make_recorder=lambda row: http_rollout_recorder.HttpRolloutRecorder(
            client, next(names), training, "step", "m", step_id=step
        ),
    )
    engine = Engine(world.model)
    assert await workflow.arun_episode(engine, world.row) is not None
    answers["now"] = lambda *_: (500, {})
    assert await workflow.arun_episode(engine, world.row) is None
    assert await asyncio.to_thread(client.drain, 20)
    good = monitor.get("/api/v1/rollouts/good")
    bad = monitor.get("/api/v1/rollouts/bad")
    actions = monitor.rows("action")
  assert good["status"] == "completed" and len(good["turns"]) == 2
  assert len(good["validations"]) == 1
  assert [a["action_type"] for a in actions] == ["move", "terminate"]
  assert bad["status"] == "failed" and "RunFailed" in bad["error_message"]


async def test_a_monitor_that_is_down_costs_no_episode():
  def broken(row):
    raise ConnectionError("no monitor")

  with World() as world:
    workflow = world.workflow(make_recorder=broken)
    batch = await workflow.arun_episode(Engine(world.model), world.row)
  assert batch is not None
