"""Serves runs over HTTP.

    POST /runs                       starts one: `{runId}`
    GET  /runs/{id}                  `{runId, status, reason}`
    GET  /runs/{id}/events?from=&to= from inclusive, to exclusive
    GET  /runs/{id}/trajectory, /tokens, /steps, /steps/{index}
    POST /runs/{id}/cancel           ends it
    GET  /images/{name}              a screenshot, by its signed address
    GET  /health

Promises: every request is answered, failures as `{"detail", "code"}`; at most
`max_runs` play at a time, on screens of `max_megapixels` together, others get
429 and a time to retry; ended runs are kept for `keep_s`, the oldest go first
beyond `max_kept` and `record_memory`; without a token only requests to a
loopback host name are answered, and never a web page's; screens are drawn and
encoded in threads.

Does not play runs (`runs` does), or check where a model's URL leads: a client
that may start runs may let this process call that address.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import time
from typing import Any, Collection, Mapping

from cua_gyms import applications
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.environments.gyms import gym_registry
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import data_urls
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_answers
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.net import request_bodies

from agent_services import content_store
from agent_services.run_service import environments
from agent_services.run_service import runs as runs_lib
from agent_services.run_service import schemas

_LOG = logging.getLogger(__name__)
_MAX_BODY = 4 << 20
_CLOSE_S = 10.0
_LATEST_MS = 253_402_300_799_000  # The end of the year 9999.
_IMAGES = "/images/{name}"
_PUBLIC = ("/health", _IMAGES)
"""Routes without a token: an image's address carries its signature."""

Json = json_answers.Json
Request = applications.Request
Response = applications.Response
_Error = applications.ServiceError
_setting = settings_lib.setting


@settings_lib.settings
class RunLimits:
  """Bounds of a run service."""

  max_runs: int = _setting(
    default=64, doc="Runs that play at a time; others get 429.", ge=1, le=4096
  )
  max_megapixels: int = _setting(
    default=160,
    doc="Screens of all runs that play in this process, together; a run"
    " beyond it gets 429. A megapixel takes some 16 MB while it is drawn.",
    unit="megapixels",
    ge=1,
    le=65_536,
  )
  max_kept: int = _setting(
    default=512, doc="Ended runs that can still be read.", ge=1, le=65_536
  )
  record_memory: int = _setting(
    default=2048,
    doc="Events and steps of all runs. Beyond it the runs that ended first"
    " are forgotten, then a run that records more fails.",
    unit="MiB",
    ge=1,
  )
  keep_s: float = _setting(
    default=3600.0, doc="How long an ended run is kept.", unit="s", gt=0
  )
  image_memory: int = _setting(
    default=512, doc="Memory for screenshots.", unit="MiB", ge=1
  )
  url_lifetime: float = _setting(
    default=3600.0,
    doc="How long the address of a screenshot is valid.",
    unit="s",
    gt=0,
  )


class App(applications.Application):
  """The run service.

  Attributes:
    asgi: the ASGI application.
    urls: signs the addresses of screenshots; its `base_url` is this server's.
    runs: Runs by id, in order of creation.
  """

  _wrong_method = "not_found"

  def __init__(
    self,
    *,
    gyms: Collection[str] = ("desktop",),
    client_settings: Collection[str] = (),
    limits: RunLimits = RunLimits(),
    token: str = "",
    base_url: str = "",
  ):
    """Args:

      gyms: Names of gyms that runs with `env.type=gym` may play.
      client_settings: Gym options that a run may choose.
      limits: Limits of runs and screenshots.
      token: Token that clients must present; "" asks for none.
      base_url: Address of this server, for addresses of screenshots.

    Raises:
      ValueError: a gym that does not exist, or an option that is no client's.
    """
    for name in gyms:
      gym_registry.get(name, "operator").check_client_settings(
        client_settings, "--client-settings"
      )
    self._gyms = tuple(gyms)
    self._client_settings = tuple(client_settings)
    self._token = token
    self.limits = limits
    self._images = images_lib.ImageStore(
      capacity_bytes=limits.image_memory << 19
    )
    store = content_store.ContentStore(limits.image_memory << 19)
    self.urls = content_store.SignedUrls(
      base_url, lifetime_s=limits.url_lifetime
    )
    self._pictures = runs_lib.Pictures(
      data_urls.DataUrls(self._images), store, self.urls
    )
    self.runs: dict[str, runs_lib.Run] = {}
    self._tasks: dict[str, asyncio.Task[None]] = {}
    post, get = applications.POST, applications.GET
    self._serve(
      [
        ("/runs", self._create, post),
        ("/runs/{run}", self._status, get),
        ("/runs/{run}/events", self._events, get),
        ("/runs/{run}/trajectory", self._trajectory, get),
        ("/runs/{run}/tokens", self._tokens, get),
        ("/runs/{run}/steps", self._steps, get),
        ("/runs/{run}/steps/{index}", self._one_step, get),
        ("/runs/{run}/cancel", self._cancel, post),
        (_IMAGES, self._image, get),
        ("/health", self._health, get),
      ]
    )

  @property
  def playing(self) -> int:
    """Runs that have not ended."""
    return len(self._tasks)

  # --- around every request ---------------------------------------------------

  async def _close(self) -> None:
    tasks = list(self._tasks.values())
    for task in tasks:
      task.cancel()
    if tasks:
      await asyncio.wait(tasks, timeout=_CLOSE_S)
    self._pictures.data_urls.close()

  def _description(self, error: Exception) -> str:
    return repr(error)

  def _authorize(self, request: Request, route: str) -> None:
    applications.authorize(
      request.headers,
      http_server.bearer_of(request.headers),
      self._token,
      public=route in _PUBLIC,
      # The signature of an image's address holds at any name of this service.
      any_host=route == _IMAGES,
    )

  # --- runs -------------------------------------------------------------------

  async def _create(self, request: Request) -> Response:
    data = await request_bodies.read(request, _MAX_BODY)
    value = applications.parse_json(data)
    self._forget_old()
    if len(self._tasks) >= self.limits.max_runs:
      raise _Error(
        429,
        f"{len(self._tasks)} runs play, which is max_runs; ask again, or end"
        " one",
        "full",
        1.0,
      )
    try:
      body = json_models.validate(
        schemas.CreateBody, applications.check_object(value)
      )
      self._check_pixels(body)
      agent = schemas.make_agent(body)
      env = environments.make_environment(
        body.env,
        instruction=body.task,
        parser=agent.tool_parser,
        max_steps=body.maxSteps,
        on_parse_error=body.agentConfig.onParseError,
        images=self._images,
        allowed_gyms=self._gyms,
        client_settings=self._client_settings,
      )
      run = runs_lib.Run(
        body,
        agent,
        env,
        self._pictures,
        environments.judges_itself(body.env),
        self._make_room,
      )
    except (ValueError, ImportError) as error:
      raise _Error(422, str(error), "invalid_request") from None
    if not self.urls.base_url:
      self.urls.base_url = http_server.reached_at(request.scope)
    self.runs[run.id] = run
    task = asyncio.create_task(run.play())
    self._tasks[run.id] = task
    task.add_done_callback(lambda _: self._tasks.pop(run.id, None))
    return Json({"runId": run.id})

  def _check_pixels(self, body: schemas.CreateBody) -> None:
    """Refuses a run whose screen is too large beside those that play.

    Raises:
      ValueError: It is larger than all screens may be together.
      ServiceError: 429, until other runs have ended.
    """
    pixels = schemas.pixels(body)
    most = self.limits.max_megapixels
    if pixels > most * 1_000_000:
      raise ValueError(
        f"env.width={body.env['width']} and env.height={body.env['height']}"
        f" are {pixels} pixels, and all runs have max_megapixels={most}"
      )
    playing = sum(
      schemas.pixels(run.body)
      for run in self.runs.values()
      if run.ended is None
    )
    if playing + pixels > most * 1_000_000:
      raise _Error(
        429,
        f"the screens of runs that play have {playing} pixels, and {pixels}"
        f" more exceed max_megapixels={most}; ask again, or end one",
        "full",
        1.0,
      )

  def _make_room(self, run: runs_lib.Run, size: int) -> None:
    """Makes room for `size` more bytes of a run's records.

    Raises:
      RecordsFull: Even without ended runs there is none.
    """
    most = self.limits.record_memory << 20
    total = size + sum(r.size for r in self.runs.values())
    for old in [r for r in self.runs.values() if r.ended is not None]:
      if total <= most:
        break
      total -= old.size
      del self.runs[old.id]
    if total > most:
      raise runs_lib.RecordsFull(
        f"the events of this run take {(run.size + size) >> 20} MiB, and"
        f" those of all runs record_memory={self.limits.record_memory} MiB;"
        " set images=url, or play fewer or shorter runs"
      )

  def _forget_old(self) -> None:
    now = time.monotonic()
    ended = [r for r in self.runs.values() if r.ended is not None]
    for place, run in enumerate(reversed(ended)):
      too_old = now - (run.ended or now) > self.limits.keep_s
      if too_old or place >= self.limits.max_kept:
        del self.runs[run.id]

  def _run(self, request: Request) -> runs_lib.Run:
    run = self.runs.get(request.path_params["run"])
    if run is None:
      raise _Error(
        404, "there is no such run, or it is no longer kept", "unknown_run"
      )
    return run

  async def _status(self, request: Request) -> Response:
    run = self._run(request)
    return Json({"runId": run.id, "status": run.status, "reason": run.reason})

  async def _cancel(self, request: Request) -> Response:
    run = self._run(request)
    task = self._tasks.get(run.id)
    if task is not None:
      task.cancel()
      await asyncio.wait({task}, timeout=_CLOSE_S)
    return Json({"runId": run.id, "status": run.status, "reason": run.reason})

  # --- records ----------------------------------------------------------------

  async def _events(self, request: Request) -> Response:
    run = self._run(request)
    first = _time(request, "from", -math.inf)
    last = _time(request, "to", math.inf)
    events = [e for e in list(run.events) if first <= e["tsMs"] < last]
    return await _large({"events": events})

  async def _trajectory(self, request: Request) -> Response:
    run = self._run(request)
    return await _large(
      {
        "trajectory": [
          {"step": index, **step} for index, step in enumerate(run.steps)
        ]
      }
    )

  async def _tokens(self, request: Request) -> Response:
    run = self._run(request)
    rows = []
    for event in list(run.events):
      if event["type"] != "model_output":
        continue
      reply = event["modelOutput"]
      choice = reply["choices"][0] if reply.get("choices") else {}
      rows.append(
        {
          "step": event["step"],
          "prompt_token_ids": reply.get("prompt_token_ids"),
          "token_ids": choice.get("token_ids"),
          "logprobs": [
            entry.get("logprob")
            for entry in (choice.get("logprobs") or {}).get("content") or ()
          ],
        }
      )
    return await _large({"tokens": rows})

  async def _steps(self, request: Request) -> Response:
    return await _large({"steps": list(self._run(request).steps)})

  async def _one_step(self, request: Request) -> Response:
    run = self._run(request)
    try:
      index = bounds.whole(request.path_params["index"], "index")
    except ValueError as error:
      raise _Error(422, str(error), "invalid_request") from None
    if index >= len(run.steps):
      raise _Error(
        404,
        f"index={index}: the run has {len(run.steps)} steps, from 0",
        "unknown_step",
      )
    return await _large({"step": run.steps[index]})

  async def _image(self, request: Request) -> Response:
    name = request.path_params["name"]
    problem = self.urls.problem(name, request.query_params)
    if problem:
      raise _Error(403, problem, "bad_signature")
    picture = self._pictures.store.get(name)
    if picture is None:
      raise _Error(404, "the image is no longer kept", "unknown_image")
    return Response(
      picture[0],
      media_type=picture[1],
      headers={"x-content-type-options": "nosniff"},
    )

  async def _health(self, request: Request) -> Response:
    del request
    return Json({"status": "ok", "playing": len(self._tasks)})


def _time(request: Request, name: str, default: float) -> float:
  """Reads a parameter in ISO-8601, or in milliseconds, as milliseconds."""
  text = request.query_params.get(name, "")
  if not text:
    return default
  try:
    return float(bounds.whole(text, name, 0, _LATEST_MS))
  except ValueError:
    pass
  try:
    at = datetime.datetime.fromisoformat(text[:100].replace(" ", "+"))
    if at.tzinfo is None:
      at = at.replace(tzinfo=datetime.UTC)
    return round(at.timestamp() * 1000)
  except (ValueError, OverflowError):
    raise _Error(
      422,
      f"{name}={text[:40]!r} must be a time in ISO-8601, or milliseconds in"
      f" [0, {_LATEST_MS}]",
      "invalid_request",
    ) from None


async def _large(value: Mapping[str, Any]) -> Response:
  """Encodes a JSON answer in a thread, as it may hold screenshots."""
  return await concurrency.acall(lambda: Json(value), what="encoding an answer")
