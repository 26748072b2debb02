"""A run service's episodes are those of the collector in this process."""

import asyncio
import dataclasses
import json
import time

from agent_services.serving import image_proxy
from agent_services.serving import media
import gym_servers
import httpx
import pytest
import run_services
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.run import episodes as episodes_lib
import two_paths

Status = trajectory.TrajectoryStatus
pytestmark = pytest.mark.timeout(400)


class ByService(two_paths.Both):
  """Path A: the service plays; path B: the collector here."""

  def __init__(self, url, *overrides):
    super().__init__(
      "rollout.agent=run_service",
      f"run_service.base_url={url}",
      "run_service.poll_s=0.02",
      *overrides,
    )

  def collector(self, mode, connection):
    if connection is not None:
      return super().collector(mode, connection)
    through = self.config
    here = dataclasses.replace(through.rollout, agent="")
    self.config = dataclasses.replace(through, rollout=here)
    try:
      return super().collector(mode, None)
    finally:
      self.config = through


@pytest.mark.parametrize(
  "overrides",
  [
    (),
    pytest.param(("run_service.tokens=events",), marks=pytest.mark.slow),
    pytest.param(("agent.max_images=1",), marks=pytest.mark.slow),
  ],
  ids=["session", "events", "window"],
)
def test_both_paths_solve_the_same_tasks_with_equal_tokens(overrides):
  async def both(paths):
    for mode, members in (("greedy", 1), ("train", 4)):
      got = await paths.collect(mode, True)
      want = await paths.collect(mode, False)
      assert len(got) == len(want) == 4
      for one, other in zip(got, want):
        assert len(one) == len(other) == members
        for own, result in zip(one, other):
          two_paths.assert_equal(own, result)
        if mode == "train":  # Sampled, and each member by its own seed.
          assert len({e.steps[0].model_response for e in one}) > 1

  with run_services.serving() as (url, app):
    with ByService(url, *overrides) as paths:
      paths.run(both(paths))
      assert not len(paths.proxy.app._service.store), "sessions are left"
    assert not app.playing


@pytest.mark.slow
def test_after_an_update_a_service_is_answered_by_the_new_weights():
  """And each token of its runs records the version that sampled it."""

  async def play(paths):
    versions = []
    for version in (0, 3, 4):
      if version:
        future = paths.engine.update_weights(version, paths.policy.model)
        await asyncio.wrap_future(future)
      (group,) = await paths.collect("greedy", True, 1)
      for one in group.trajectories[0].sequences:
        versions.append(set(one.versions[one.loss_mask].tolist()))
    return versions

  for tokens in ("session", "events"):
    with (
      run_services.serving() as (url, _),
      ByService(url, f"run_service.tokens={tokens}") as paths,
    ):
      assert paths.run(play(paths)) == [{0}, {3}, {4}]


@pytest.mark.slow
def test_screenshots_as_addresses_are_fetched_once_each():
  """By an image proxy, of an episode that a gym server judges."""
  log, front = [], {}

  async def policy_front(scope, receive, send):
    await front["app"](scope, receive, send)

  async def both(paths):
    (want,) = await paths.collect("greedy", False, 1)
    log.clear()
    (got,) = await paths.collect("greedy", True, 1)
    for own, other in zip(got, want):
      two_paths.assert_equal(own, other)
    return got.trajectories[0]

  with (
    gym_servers.serving() as (gym, gym_app),
    http_server.LoopbackServer(
      run_services.Logged(run_services.app_lib.App().asgi, "service", log)
    ) as service,
    http_server.LoopbackServer(policy_front) as images,
    ByService(
      service.url,
      "gym=genv",
      f"gym.options={{base_url: '{gym}', gym_id: desktop}}",
      "task_source.source=gym",
      "run_service.images=url",
      f"rollout.public_url={images.url}",
    ) as paths,
  ):
    host = service.url.removeprefix("http://")
    passing_on = image_proxy.ImageProxy(
      paths.proxy._server.url,
      media.MediaLimits(
        allowed_hosts=(host,), private_hosts=(host,), allow_http=True
      ),
    )
    front["app"] = passing_on.asgi
    episode = paths.run(both(paths))
    assert gym_app.store.open == 0
  turns = len(episode.steps)
  # Each screenshot was fetched by its address, once.
  fetched = [path for _, _, path in log if "/images/" in path]
  assert len(fetched) == len(set(fetched)) == turns


# --- services that fail ------------------------------------------------------


def _misbehaving(kind):
  """Answers of a service that takes a run, and then does as `kind` says."""

  def answer(method, path, body):
    del body
    if kind == "garbage start":
      return 200, {"run": 1}
    if kind == "refuses":
      return 422, {"detail": "no such agent"}
    if method == "POST" and path == "/runs":
      return 200, {"runId": "r"}
    if path.endswith("/cancel"):
      return 200, {}
    if kind == "restarted":
      return 404, {"detail": "there is no such run", "code": "unknown_run"}
    if kind == "hangs":
      return asyncio.sleep(3, (200, {}))
    if kind == "never ends":
      if path.endswith("/events"):
        return 200, []
      return 200, {"status": "running"}
    if kind == "garbage":
      return 200, b"<html>"
    if kind == "failed":
      if path.endswith("/events"):
        return 200, {"events": []}
      return 200, {"status": "failed", "reason": "the box is gone"}
    if kind == "another model":
      if path.endswith("/events"):
        return 200, [
            {"type": "model_call", "ts": 1, "step": 1, "messages": []},
            {"type": "model_output", "ts": 2, "step": 1,
             "modelOutput": run_services.completion()},
            {"type": "run_end", "ts": 3, "step": 1, "ok": True,
             "reason": "finished", "evaluation": {"score": 1, "success": True}},
        ]  # fmt: skip
      return 200, {"status": "completed", "reason": "finished"}
    raise AssertionError(kind)

  return answer


@pytest.mark.parametrize("tokens", ["session", "events"])
def test_a_service_that_fails_ends_the_episode_in_time(tokens):
  """Hung, dead, garbage: no reward of 0, nothing left behind."""
  expected = {
    "hangs": (Status.MODEL_ERROR, "did not answer within 0.8 s"),
    "never ends": (Status.TIMEOUT, "longer than 1 s"),
    "garbage": (Status.MODEL_ERROR, "not JSON"),
    "garbage start": (Status.MODEL_ERROR, "without a runId"),
    "refuses": (Status.MODEL_ERROR, "no such agent"),
    "failed": (Status.MODEL_ERROR, "the box is gone"),
    "restarted": (Status.MODEL_ERROR, "there is no such run"),
    "another model": (Status.MODEL_ERROR, "no record"),
    "gone": (Status.MODEL_ERROR, "failed: ConnectError"),
  }
  if tokens == "events":
    # Then the events are what is trained on.
    del expected["another model"]

  async def play(paths):
    for kind, (status, words) in expected.items():
      if kind == "gone":
        server.__exit__(None, None, None)
      else:
        app.answer = _misbehaving(kind)
      started = time.monotonic()
      (group,) = await paths.collect("greedy", True, 1)
      spent = time.monotonic() - started
      (episode,) = group
      assert episode.status is status, (kind, episode.error)
      assert words in episode.error, (kind, episode.error)
      assert not group.valid and spent < 8, (kind, spent)
      assert not len(paths.proxy.app._service.store), kind

  server = run_services.scripted(None)
  url, app = server.__enter__()
  with ByService(
    url,
    f"run_service.tokens={tokens}",
    "collect.deadlines.model=1.0",
    "collect.deadlines.step=1.0",
    "collect.deadlines.turn=1.0",
    "collect.deadlines.episode=2.0",
    "run_service.timeout_s=0.8",
    "collect.deadlines.close=2.0",
  ) as paths:
    paths.run(play(paths))


def test_a_service_that_drops_tokens_is_refused_or_counted():
  """With tokens=events, nothing is made up that is not counted."""
  outcomes = {}

  def lose(event):
    if event["type"] == "model_output":
      del event["modelOutput"]["choices"][0]["token_ids"]

  with run_services.serving() as (_, app):
    lossy = run_services.Rewriting(app.asgi, event=lose)
    with http_server.LoopbackServer(lossy) as front:
      for mode in ("refuse", "fallback"):
        with ByService(
          front.url,
          "run_service.tokens=events",
          f"run_service.on_missing={mode}",
        ) as paths:
          (group,) = paths.run(paths.collect("greedy", True, 1))
          outcomes[mode] = group.trajectories[0]
  refused, counted = outcomes["refuse"], outcomes["fallback"]
  assert refused.status is Status.MODEL_ERROR
  assert "return_token_ids" in refused.error and not refused.sequences
  assert counted.status.is_policy_outcome
  assert counted.metrics["fallback_turns"] == len(counted.steps)
  (sequence,) = counted.sequences
  assert sequence.num_sampled and not sequence.logprobs.any()


def sample_colder(run):
  """The service's own parameter, in place of the run's."""
  run["model"]["sampling"] |= {"temperature": 0.5}


def name_no_parameters(event):
  if event["type"] == "model_call":
    call = event["modelSpecificInput"]
    event["modelSpecificInput"] = {"messages": call["messages"]}


@pytest.mark.parametrize(
    "overrides, silent, outcome",
    [
        (("run_service.tokens=events",), False, "masked"),
        pytest.param(
            ("run_service.tokens=events",), True, "masked",
            marks=pytest.mark.slow,
        ),
        pytest.param((), False, "masked", marks=pytest.mark.slow),
        pytest.param(
            ("run_service.tokens=events", "rollout.other_sampling=refuse"),
            False, "refused", marks=pytest.mark.slow,
        ),
        pytest.param(
            ("run_service.tokens=events", "rollout.other_sampling=train",
             "algorithm.importance=tis"),
            False, "trained", marks=pytest.mark.slow,
        ),
    ],
    ids=["events", "silent-events", "session", "refuse", "train"],
)  # fmt: skip
def test_a_service_s_own_sampling_is_not_trained_on_unseen(
  overrides, silent, outcome
):
  """Its turns are masked and counted, refused, or trained on."""
  with run_services.serving() as (_, app):
    front = run_services.Rewriting(
      app.asgi, sample_colder, name_no_parameters if silent else None
    )
    with http_server.LoopbackServer(front) as server:
      with ByService(server.url, *overrides) as paths:
        (group,) = paths.run(paths.collect("train", True, 1))
  (episode, *_) = group.trajectories
  if outcome == "refused":
    assert episode.status is Status.MODEL_ERROR
    # The server's words, which name the field, are in the service's log.
    assert "the answer has status 400" in episode.error
    return
  assert episode.status.is_policy_outcome and episode.steps
  if outcome == "trained":
    assert episode.num_sampled and not episode.untrained_tokens
    return
  assert episode.untrained_tokens > 0 and not episode.num_sampled
  assert episode.is_trainable  # Its reward counts in its group.
  for sequence in episode.sequences:
    assert not sequence.logprobs.any() and (sequence.versions == -1).all()


# --- settings ----------------------------------------------------------------


def test_the_old_names_mean_the_settings_of_today():
  old = {
    "gbox_mini_agent_base_url": ("http://a:1", "run_service.base_url"),
    "gbox_mini_agent_agent": ("mai-ui", "run_service.agent"),
    "gbox_mini_agent_model": ("m", "run_service.model"),
    "rollout_backend": ("gbox_mini_agent", "run_service.backend"),
    "max_turns": (5, "environment.max_turns"),
    "max_task_time_seconds": (900.0, "collect.deadlines.episode"),
    "max_turn_time_seconds": (300.0, "collect.deadlines.turn"),
    "max_concurrent_rollouts": (8, "collect.concurrency"),
    "group_size": (6, "collect.group_size"),
    "groups_per_batch": (3, "learner.groups_per_step"),
    "monitor_base_url": ("http://m:1", "monitor.url"),
  }
  config = config_lib.load_config([f"{k}={v}" for k, (v, _) in old.items()])
  for name, (value, path) in old.items():
    result = config
    for part in path.split("."):
      result = getattr(result, part)
    assert result == value, name
  config = config_lib.load_config(["gbox_mini_agent_env={boxType: linux}"])
  assert config.run_service.env == {"boxType": "linux"}
  assert config.collect.concurrency  # Never without a limit.
  with pytest.raises(config_lib.ConfigError, match="backend"):
    config_lib.load_config(["rollout_backend=telepathy"])


def test_an_environment_that_no_service_plays_is_refused():
  config = config_lib.load_config([
      "rollout.via=proxy", "rollout.agent=run_service", "environment=tool",
      "agent.parser=qwen", "agent.on_parse_error=answer", "tasks=[]",
      "environment.options.tools=[calculator]", "agent.system_prompt=tool",
  ])  # fmt: skip
  with pytest.raises(config_lib.ConfigError, match="environment.name=tool"):
    episodes_lib.EpisodeFactory(config, images_lib.ImageStore())
  with pytest.raises(config_lib.ConfigError, match="rollout.via=proxy"):
    config_lib.load_config(["rollout.agent=run_service"])


def test_the_service_gets_what_it_is_configured_with(monkeypatch):
  """A service of another make gets only the fields of the protocol."""
  requests = []

  def answer(method, path, body):
    if method == "POST" and path == "/runs":
      requests.append(json.loads(body))
    return 422, {"detail": "no"}

  with run_services.scripted(answer) as (url, _):
    other = ("rollout_backend=gbox_mini_agent", "run_service.key=field")
    monkeypatch.setenv("GBOX_MINI_AGENT_BASE_URL", url)
    for change in ((), other):
      with ByService(
        "",
        "run_service.agent=qwen3-vl",
        "run_service.model=mine",
        "run_service.env={boxType: linux}",
        "run_service.action_space=mobile",
        "rollout.public_url=http://trainer.lan:8100",
        *change,
      ) as paths:
        paths.run(paths.collect("greedy", True, 1))
  own, result = requests
  for body in requests:
    assert body["agent"] == "qwen3-vl"
    assert body["standardActionSpace"] == "mobile"
    assert body["env"]["boxType"] == "linux"
    assert body["maxRunTimeSec"] == 600.0 and body["maxStepTimeSec"] == 180.0
    assert body["model"]["name"] == "mine"
    assert body["model"]["provider"] == "openai"
    assert body["model"]["baseUrl"].startswith("http://trainer.lan:8100/")
    assert body["model"]["baseUrl"].endswith("/v1")
  assert set(result) == {
      "task", "agent", "maxSteps", "maxRunTimeSec", "maxStepTimeSec", "model",
      "env", "standardActionSpace",
  }  # fmt: skip
  assert result["model"]["apiKey"] not in result["model"]["baseUrl"]
  assert "apiKey" not in own["model"] and own["model"]["sampling"]


@pytest.mark.slow
def test_the_run_s_server_binds_another_address_when_told():
  config = config_lib.load_config(
    [
      "rollout.via=proxy",
      "rollout.host=0.0.0.0",
      "rollout.public_url=http://trainer.lan:8100",
    ]
  )
  assert config.rollout.host == "0.0.0.0"
  with pytest.raises(config_lib.ConfigError, match="rollout.public_url"):
    config_lib.load_config(["rollout.via=proxy", "rollout.host=0.0.0.0"])
  with pytest.raises(config_lib.ConfigError, match="public_url"):
    config_lib.load_config(["rollout.public_url=trainer"])
  with two_paths.Both(
    "rollout.host=0.0.0.0", "rollout.public_url=http://trainer.lan:8100"
  ) as paths:
    port = paths.proxy._server.port
    assert paths.proxy._server.url == f"http://0.0.0.0:{port}"
    (group,) = paths.run(paths.collect("greedy", True, 1))
    assert group.trajectories[0].status.is_policy_outcome
    # Wherever it listens, strangers get no sample.
    name = f"http://127.0.0.1:{port}"
    refused = httpx.get(f"{name}/v1/models")
    assert refused.status_code == 401
    started = paths.run(
      paths.proxy.connection.start("t", policy_client.SamplingParams())
    )
    key = started["api_key"]
    own = httpx.get(f"{name}/sessions/{key}/v1/models")
    assert own.status_code == 200
    for path in (
      f"sessions/{key}x/v1/models",
      f"sessions/{key[:-1]}/v1/models",
      f"sessions/{started['session_id']}/v1/models",
    ):
      assert httpx.get(f"{name}/{path}").status_code == 401, path
    # A key opens its session, and neither exports nor starts others.
    headers = {"authorization": f"Bearer {key}"}
    another = httpx.post(
      f"{name}/rl/start_session", json={"task_id": "u"}, headers=headers
    )
    assert another.status_code == 403
