"""AReaL's workflow: rows in, tensors or None out, nothing left behind."""

import asyncio
import contextlib
import json
import time

from agent_services import cua_workflow
from agent_services import tensor_rows
import documented_code
import gym_servers
import monitor_databases
import monitor_server
import numpy as np
import pytest
import run_services
from training_monitor.client import http_rollout_recorder
from training_monitor.client import ingest_client
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

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


def as_numpy(batch):
  return {
    name: value if isinstance(value, list) else value.numpy()
    for name, value in batch.items()
  }


async def play_group(workflow, engine, row, size):
  """The accepted episodes of a row, as AReaL's groups gather them."""
  batches = await asyncio.gather(
    *(workflow.arun_episode(engine, row) for _ in range(size))
  )
  return [batch for batch in batches if batch is not None]


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
    return self._stack.enter_context(http_server.LoopbackServer(logged)).url

  def __exit__(self, *exc_info):
    self._stack.close()

  def workflow(self, make=cua_workflow.CUAAgentWorkflow, **options):
    return make(
      **{
        "gbox_mini_agent_base_url": self.url,
        "gbox_mini_agent_agent": "tool",
        "standard_action_space": "pc",
        "processor": Pixels(),
        "poll_s": 0.02,
        "max_turns": 3,
        **options,
      }
    )


def test_the_code_in_the_documentation_runs():
  _, _, tokenizer = checkpoint.create_policy("nano")
  messages = [{"role": "user", "content": "Click."}]
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
        "events": [
          {"type": "model_call", "messages": messages},
          {
            "type": "model_output",
            "modelOutput": run_services.completion("a click"),
          },
        ],
      },
      {
        "http://127.0.0.1:3000": world.url,
        "http://127.0.0.1:8000/v1": f"{world.model}/v1",
      },
    )
  masked = names["masked"]  # The newline after the reply is not trained on.
  assert sum(masked.loss_mask) == masked.response_length - 1 > 0
  assert (names["prompt"], names["text"], names["weight"]) == (
    messages,
    "a click",
    0.5,
  )
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
  assert {k: str(v.dtype) for k, v in batch.items() if k[:6] != "multi_"} == {
    "input_ids": "torch.int32",
    "loss_mask": "torch.int32",
    "versions": "torch.int32",
    "attention_mask": "torch.bool",
    "logprobs": "torch.float32",
    "rewards": "torch.float32",
    "mm_token_type_ids": "torch.int64",
  }
  assert batch["mm_token_type_ids"].tolist() == [
    [int(token == PAD) for token in tokens]
  ]
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
  ]  # fmt: skip


async def test_a_policy_whose_images_are_rows_is_read_as_any_other():
  """Pixtral's processor: breaks between rows, and no image_grid_thw."""

  class Rows(Pixels):
    image_break_token_id = 8

    def image_processor(self, images, return_tensors):
      arrays = super().image_processor(images, return_tensors)
      return {
        "pixel_values": arrays["pixel_values"],
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
  row = as_numpy(batch)
  other = {  # As AReaL's VisionRLVRWorkflow makes them.
    "input_ids": np.arange(15, dtype=np.int32)[None],
    "attention_mask": np.ones((1, 15), bool),
    "loss_mask": np.ones((1, 15), np.int32),
    "logprobs": np.zeros((1, 15), np.float32),
    "versions": np.zeros((1, 15), np.int32),
    "rewards": np.ones(1, np.float32),
    "mm_token_type_ids": np.zeros((1, 15), np.int64),
  }
  both = tensor_rows.collate([row, other])
  assert both["input_ids"].shape == (2, 15)
  assert both["attention_mask"].sum(1).tolist() == [12, 15]
  assert both["loss_mask"][0, 12:].tolist() == [0, 0, 0]
  assert both["rewards"].shape == (2,)
  assert [sorted(m) for m in both["multi_modal_input"]] == [
    ["image_grid_thw", "pixel_values"],
    [],
  ]
  with pytest.raises(ValueError, match="versions"):
    tensor_rows.collate(
      [row, {k: v for k, v in other.items() if k != "versions"}]
    )


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
      assert await workflow.arun_episode(Engine(world.model), world.row) is None
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
      assert await workflow.arun_episode(Engine(world.model), world.row) is None
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


class Settings:
  """AReaL's generation settings, as its configuration passes them."""

  n_samples, max_new_tokens, top_p, top_k = 1, 24, 1.0, int(1e8)
  greedy = False

  def __init__(self, temperature=1.0, **fields):
    self.temperature = temperature
    vars(self).update(fields)


async def test_turns_of_another_sampling_are_masked_and_counted():
  colder = {
    "gbox_mini_agent_model": {"name": "m", "sampling": {"temperature": 0.5}}
  }
  with World() as world:
    engine = Engine(world.model)
    # The service's temperature is the trainer's: every turn is trained on.
    same = world.workflow(gconfig=Settings(0.5), **colder)
    batch = await same.arun_episode(engine, world.row)
    assert int(batch["loss_mask"].sum()) == 4 and not same.untrained_tokens
    # It is not: no turn is left, and the episode says so.
    for gconfig in (None, Settings(), Settings(0.5, greedy=True)):
      other = world.workflow(gconfig=gconfig, **colder)
      assert await other.arun_episode(engine, world.row) is None
      assert other.rejected == {"OtherSampling": 1} and not other.accepted
    corrected = world.workflow(
      gconfig=Settings(), other_sampling="train", **colder
    )
    batch = await corrected.arun_episode(engine, world.row)
    assert int(batch["loss_mask"].sum()) == 4
    # With `sampling` the service gets the trainer's own.
    sent = world.workflow(
      gconfig=Settings(0.5, top_k=20),
      gbox_mini_agent_model="m",
      run_options={"sampling": True},
    )
    assert await sent.arun_episode(engine, world.row) is not None
    assert not sent.rejected


async def test_runs_in_flight_are_bounded_across_workflows():
  """AReaL's controller makes a workflow for each row."""
  with World() as world:
    both = [world.workflow(max_concurrent_rollouts=3) for _ in range(2)]
    engine, most = Engine(world.model), 0

    async def watch():
      nonlocal most
      while True:
        most = max(most, sum(w.running for w in both))
        await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    groups = await asyncio.gather(
      *(play_group(w, engine, world.row, 4) for w in both)
    )
    watching.cancel()
    assert most == 3 and [w.accepted for w in both] == [4, 4]
    assert [len(group) for group in groups] == [4, 4]
    alone = world.workflow(max_concurrent_rollouts=None, consumer_batch_size=2)
    await play_group(alone, engine, world.row, 4)
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
    while len(batches) < 4:  # As prepare_batch does.
      items += 1
      batches += await play_group(workflow, engine, world.row, 2)
    assert (items, workflow.accepted) == (4, 4)
    assert workflow.rejected == {"RunFailed": 4} and not workflow.running
    runs = [
      p
      for w, m, p in world.log
      if (w, m) == ("service", "POST") and p.endswith("/runs")
    ]
    assert len(runs) == 8  # One an episode.
    full = tensor_rows.collate([as_numpy(b) for b in batches])
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
    ({"group_size": 0}, "group_size"),
    ({"other_sampling": "ignore"}, "other_sampling"),
    ({"eval_id": "e", "baseline_id": "b"}, "eval_id and baseline_id"),
    # Before an episode is played, not after it.
    ({"processor": None}, "pass the policy's processor"),
  ):
    with pytest.raises(ValueError, match=words):
      make(**{"processor": Pixels(), **options})
  workflow = make(
    gbox_mini_agent_base_url="http://127.0.0.1:1", processor=Pixels()
  )
  row = {**ROW, "gym_base_url": "http://127.0.0.1:1"}
  with pytest.raises(ValueError, match="model_base_url"):
    await workflow.arun_episode(Engine(), row)
  with pytest.raises(ValueError, match="gym_base_url"):
    await workflow.arun_episode(Engine("http://127.0.0.1:2"), ROW)
  assert not workflow.rejected


def test_the_address_of_the_service_is_also_the_environment_s(monkeypatch):
  monkeypatch.setenv("GBOX_MINI_AGENT_BASE_URL", "http://gbox.lan:3000")
  workflow = cua_workflow.CUAAgentWorkflow(processor=Pixels())
  assert workflow._service_url == "http://gbox.lan:3000"
  explicit = cua_workflow.CUAAgentWorkflow(
    gbox_mini_agent_base_url="http://other:1", processor=Pixels()
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
    monitor_server.MonitorServer(str(target), tmp_path / "files") as monitor,
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


@pytest.mark.parametrize("first", [0, 1])
async def test_turns_are_counted_from_one_however_the_service_counts(first):
  """Steps 0 and 1 are two turns."""
  turns, ended = [], {}

  class Recorder:
    source_type, step_id, eval_id, baseline_id = "step", "s", None, None

    def start_rollout(self, *args, **options):
      assert options["env_index"] == 0

    def start_turn(self, turn):
      turns.append(("start", turn))

    def record_action(self, turn, name, action):
      turns.append((name, turn))

    def end_turn(self, turn):
      turns.append(("end", turn))

    def record_validation(self, success):
      pass

    def complete_rollout(self, **options):
      ended.update(options)

  class Shifted:
    """In front of the service: its steps, counted from `first`."""

    def __init__(self, app):
      self.app = app

    async def __call__(self, scope, receive, send):
      async def shifted(message):
        body = message.get("body", b"")
        if body and scope["path"].endswith("/events"):
          reply = json.loads(body)
          for event in reply["events"]:
            event["step"] += first - 1
          message = {**message, "body": json.dumps(reply).encode()}
        elif message["type"] == "http.response.start" and scope[
          "path"
        ].endswith("/events"):
          message = {
            **message,
            "headers": [
              h for h in message["headers"] if h[0].lower() != b"content-length"
            ],
          }
        await send(message)

      await self.app(scope, receive, shifted)

  with (
    World() as world,
    http_server.LoopbackServer(Shifted(world.service.asgi)) as front,
  ):
    workflow = world.workflow(
      gbox_mini_agent_base_url=front.url, make_recorder=lambda row: Recorder()
    )
    batch = await workflow.arun_episode(Engine(world.model), world.row)
    assert batch is not None, workflow.rejected
  assert turns == [
    ("start", 1),
    ("move", 1),
    ("end", 1),
    ("start", 2),
    ("terminate", 2),
    ("end", 2),
  ]
  assert ended["num_turns"] == 2


async def test_the_record_is_named_by_arguments_or_by_the_process(
  tmp_path, monkeypatch
):
  """The example's class, in one process and as in AReaL's rollout workers."""
  monkeypatch.syspath_prepend(documented_code.ROOT)
  from training_monitor.client import monitor_context
  from training_monitor.client import monitor_training_hooks

  from examples.cua_agent import cua_workflow as example

  make = example.CUAAgentWorkflow
  with pytest.raises(ValueError, match="monitor_base_url"):
    make(processor=Pixels(), monitor_base_url="moon")
  target = tmp_path / "monitor.db"
  monitor_databases.new_sqlite(target)
  with (
    monitor_server.MonitorServer(str(target), tmp_path / "files") as monitor,
    World() as world,
    ingest_client.IngestClient(
      monitor.url, timeout_seconds=10, spool_dir=tmp_path / "spool"
    ) as client,
  ):
    engine = Engine(world.model)
    training = client.post_training(run_name="x", status="running")
    name = monitor_training_hooks.step_name(training, 3)
    client.post_step({"training_id": training, "step": 3}, name)
    measured = client.post_eval(
      {"training_id": training, "step": 3, "model_path": "m"}, "e"
    )
    try:
      monitor_context.set_ingest_client(client)
      for options in (
        # As a rollout worker of AReaL's has them, without a context.
        {
          "training_id": training,
          "global_step": 3,
          "batch": 5,
          "group_size": 2,
        },
        {"training_id": training, "eval_id": measured},
      ):
        workflow = world.workflow(make, gbox_mini_agent_model="m", **options)
        for _ in range(2):
          assert await workflow.arun_episode(engine, world.row) is not None
      # The process's own step wins over arguments that are of an older one.
      monitor_context.set_training_id(training)
      monitor_context.set_step_id(
        client.post_step({"training_id": training, "step": 4}, "now")
      )
      workflow = world.workflow(make, gbox_mini_agent_model="m", step_id=name)
      assert await workflow.arun_episode(engine, world.row) is not None
    finally:
      monitor_context.clear_monitor_context()
    assert await asyncio.to_thread(client.drain, 20)
    steps = {row["id"]: row["step"] for row in monitor.rows("step")}
    rollouts = monitor.rows("rollout")
  places = [
    (r["source_type"], steps.get(r["step_id"]), r["batch"], r["env_index"])
    for r in rollouts
  ]
  assert sorted(places, key=str) == sorted([
      ("step", 3, 5, 0), ("step", 3, 5, 1), ("eval", None, None, 0),
      ("eval", None, None, 0), ("step", 4, None, 0),
  ], key=str)  # fmt: skip
