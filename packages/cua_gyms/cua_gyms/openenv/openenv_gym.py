"""Plays an environment behind an OpenEnv server: `gym.name=openenv`.

An episode is a session, a WebSocket of its own: opened and reset by `start`,
stepped by `act`, closed by `close`. Promises: every message has a deadline and
is sent once; a message that the server refuses, loses or does not answer raises
the `OpenEnvError` subclass for its kind, so the episode is the environment's
failure and not a reward of 0; `start` waits for a full server.

A task's `params["openenv"]` are the arguments of its reset; without them
`{"seed": task.seed}`. The verdict is the `evaluation` that our own servers send
with the last observation; for other servers the setting `score` computes it,
and success is a score of `success_at` or more.

Needs no package of OpenEnv, only `websockets`. Does not start servers, and does
not serve environments whose actions are MCP tool calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from typing import Any, Mapping
import urllib.parse

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.environments import options as options_lib
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http

from cua_gyms import machines
from cua_gyms.genv import genv_gym
from cua_gyms.openenv import actions as openenv_actions

_LOG = logging.getLogger(__name__)
Kind = gui_action.GuiActionKind
DEFAULT_BASE_URL = "http://127.0.0.1:8000"
_MAX_MESSAGE = 256 << 20
_FIELDS = {
  "screenshot": "screenshot",
  "shape": "",
  "instruction": "instruction",
  "text": "text",
}
_SCORES = ("return", "last")
_ANSWERS = {"reset": "observation", "step": "observation", "state": "state"}


class OpenEnvError(http.CallError):
  """A request to an OpenEnv server failed.

  Attributes:
    code: the protocol's word for it, e.g. EXECUTION_ERROR; "" without one.
    cause: the server's own code, "" without one.
    server_text: The server's own text, "" without one.
  """

  server_text = ""

  def __init__(self, message: str, code: str = "", cause: str = ""):
    super().__init__(message)
    self.code = code
    self.cause = cause


class OpenEnvUnavailableError(OpenEnvError):
  """The server cannot be reached, or does not answer in time."""


class OpenEnvCapacityError(OpenEnvError):
  """The server had no session to give until the deadline."""

  full = True
  retry_after_s = 1.0


class OpenEnvSessionLostError(OpenEnvError):
  """The server closed the session before the episode ended."""


class OpenEnvRequestError(OpenEnvError):
  """The server refused a request."""


@dataclasses.dataclass(frozen=True)
class Timeouts:
  """Deadlines in seconds.

  Attributes:
    connect: Deadline of a connection.
    start: Deadline of a whole start, with the wait for a full server.
    step: Deadline of a step, and of a verdict.
    close: Deadline of a session's end.
  """

  connect: float = 20.0
  start: float = 600.0
  step: float = 120.0
  close: float = 5.0

  def __post_init__(self):
    options_lib.check_seconds(self)


class Session:
  """A WebSocket of an OpenEnv server: messages out, answers in."""

  def __init__(self, base_url: str, token: str = ""):
    """`base_url` is the environment's, without /ws."""
    url = str(base_url)
    if url.startswith(("ws://", "wss://")):
      url = "http" + url[2:]
    url = http.address(url, "base_url", DEFAULT_BASE_URL)
    self.url = "ws" + url[4:] + "/ws"
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    self._where = {"host": parts.hostname, "port": port}
    self._token = token
    self._socket: Any = None

  @property
  def open(self) -> bool:
    return self._socket is not None

  async def connect(self, seconds: float) -> None:
    """Raises:

    OpenEnvError: no session is to be had.
    ImportError: websockets is not installed.
    """
    client, exceptions = _websockets()
    headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
    try:
      self._socket = await client.connect(
        self.url,
        # Said beside the URL, so that a redirect leads nowhere else.
        **self._where,
        additional_headers=headers,
        open_timeout=seconds,
        max_size=_MAX_MESSAGE,
        # Screenshots are compressed already.
        compression=None,
        # Calls have deadlines of their own; a busy server is not a dead one.
        ping_timeout=None,
        # Gym servers are near: a proxy of the environment is for others.
        proxy=None,
      )
    except exceptions.InvalidStatus as error:
      raise _refused(self.url, error.response) from None
    except ValueError as error:
      raise OpenEnvRequestError(f"{self.url}: {error}") from None
    except (OSError, TimeoutError, exceptions.WebSocketException) as error:
      raise OpenEnvUnavailableError(
        f"{self.url} cannot be reached within {seconds:g} s:"
        f" {type(error).__name__}: {error}; is that an OpenEnv server?"
      ) from None

  async def ask(
    self, kind: str, data: Mapping[str, Any] | None, seconds: float
  ) -> dict[str, Any]:
    """Returns the answer's `data`; without an answer the session is over.

    Raises:
      OpenEnvError: the server answered with an error, or not at all.
    """
    _, exceptions = _websockets()
    if self._socket is None:
      raise OpenEnvSessionLostError(f"{self.url}: no session is open")
    message = {"type": kind} if data is None else {"type": kind, "data": data}
    try:
      text = json.dumps(message, allow_nan=False)
    except (ValueError, TypeError) as error:
      raise OpenEnvRequestError(
        f"{self.url}: {kind!r} cannot be sent: {error}"
      ) from None
    await self._none_left_over(kind)
    answered = False
    try:
      async with asyncio.timeout(seconds):
        try:
          await self._socket.send(text)
        except exceptions.ConnectionClosed:
          pass  # Why is in the message that came before the close, if any.
        raw = await self._socket.recv()
      answered = True
    except TimeoutError:
      raise OpenEnvUnavailableError(
        f"{self.url} did not answer {kind!r} within {seconds:g} s"
      ) from None
    except exceptions.ConnectionClosed as error:
      raise OpenEnvSessionLostError(
        f"{self.url} closed the session instead of answering {kind!r}: {error}"
      ) from None
    finally:
      if not answered:  # An answer that came later would be taken for another.
        self._drop()
    try:
      reply = await http.read(
        lambda: json_text.parse(raw), len(raw), seconds, "an answer"
      )
    except ValueError:
      reply = None
    return self._data_of(kind, reply, raw)

  async def _none_left_over(self, kind: str) -> None:
    """Checks that no unrequested message waits to be taken for the answer."""
    _, exceptions = _websockets()
    try:
      async with asyncio.timeout(0):
        raw = await self._socket.recv()
    except (TimeoutError, exceptions.ConnectionClosed):
      return  # For a closed one, `ask` raises.
    try:
      reply = json_text.parse(raw)
    except ValueError:
      reply = None
    if isinstance(reply, dict) and reply.get("type") == "error":
      self._data_of(kind, reply, raw)  # Why it is about to close the session.
    self._drop()
    raise OpenEnvError(
      f"{self.url} sent a message before {kind!r} was asked: {str(raw)[:200]!r}"
    )

  def _data_of(self, kind: str, reply: Any, raw: Any) -> dict[str, Any]:
    data = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(data, dict):
      raise OpenEnvError(
        f"{self.url} answered {kind!r} with no OpenEnv message:"
        f" {str(raw)[:200]!r}"
      )
    if reply.get("type") != "error":
      if reply.get("type") != _ANSWERS[kind]:
        self._drop()  # Its answers no longer match the requests.
        raise OpenEnvError(
          f"{self.url} answered {kind!r} with a message of type"
          f" {str(reply.get('type'))[:80]!r}, not {_ANSWERS[kind]!r}"
        )
      return data
    code, cause = str(data.get("code") or ""), str(data.get("cause") or "")
    details = data.get("errors")
    text = f"{self.url}: {kind}: {code}: {data.get('message')}"
    if details:
      text += f": {str(details)[:500]}"
    if code == "CAPACITY_REACHED":
      full = OpenEnvCapacityError(text, code, cause)
      after = data.get("retry_after_s")
      if isinstance(after, (int, float)) and 0 < after < 60:
        full.retry_after_s = float(after)
      raise full
    if code in ("VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"):
      refused = OpenEnvRequestError(text, code, cause)
      text = f"{data.get('message')} {details or ''}"
      refused.server_text = text.strip()[:500]
      raise refused
    if code in ("SESSION_ERROR", "FACTORY_ERROR"):
      raise OpenEnvSessionLostError(text, code, cause)
    raise OpenEnvError(text, code, cause)

  def _drop(self) -> None:
    socket, self._socket = self._socket, None
    if socket is not None:
      closing = asyncio.ensure_future(_close(socket, False, 10.0))
      _CLOSING.add(closing)  # Referenced, so that it is not dropped half-run.
      closing.add_done_callback(_CLOSING.discard)

  async def close(self, seconds: float) -> None:
    """Idempotent, and in time; the server ends the episode."""
    socket, self._socket = self._socket, None
    if socket is not None:
      # The session is closed even if the caller is cancelled.
      await concurrency.to_the_end(_close(socket, True, seconds))


_CLOSING: set[asyncio.Task[None]] = set()


async def _close(socket: Any, tell: bool, seconds: float) -> None:
  try:
    async with asyncio.timeout(seconds):
      if tell:
        await socket.send(json.dumps({"type": "close"}))
      await socket.close()
  except Exception as error:  # pylint: disable=broad-except
    # The server ends the session of a connection that is gone as well.
    _LOG.debug("closing a session of OpenEnv: %r", error)


def _refused(url: str, response: Any) -> OpenEnvError:
  """Maps an HTTP answer other than 101 to its error."""
  status = response.status_code
  body = bytes(response.body or b"").decode("utf-8", "replace")[:300]
  text = f"{url}: {status} {body}"
  if status in (429, 503):
    return OpenEnvCapacityError(text)
  if status in (401, 403):
    text += f"; is ${genv_gym.TOKEN_VARIABLE} or token_file right?"
  elif status == 404:
    text += (
      "; a gym server's environments are at /openenv/<gym>, others mostly at"
      " the address itself"
    )
  return OpenEnvRequestError(text)


class OpenEnvGym:
  """A gym behind an OpenEnv server; see the module docstring."""

  def __init__(
    self,
    base_url: str = DEFAULT_BASE_URL,
    *,
    token_file: str = "",
    width: int | None = None,
    height: int | None = None,
    actions: object = "gui",
    fields: Mapping[str, str] | None = None,
    reset: Mapping[str, Any] | None = None,
    score: str = "return",
    success_at: float = 1.0,
    timeouts: Mapping[str, float] | None = None,
  ):
    """Args:

      base_url: Address of the environment.
      token_file: File with a bearer token; without it $TUNIX_GYM_TOKEN.
      width, height: Size that screenshots must have; None takes any.
      actions: "gui" (GuiAction's JSON, what our servers take), "browsergym",
        or a function or its path `GuiAction -> a step's data`; a str from it
        is shown to the policy instead, None is not sent.
      fields: Dotted places in an observation: `screenshot` (a picture in
        base64, an object with `data`, or numbers), `shape` (of numbers without
        one), `instruction`, `text`; "" for none.
      reset: arguments of every reset.
      score: "return" is the sum of an episode's rewards, "last" the last one.
      success_at: the score from which an episode is solved.
      timeouts: deadlines by name, see `Timeouts`.

    Raises:
      ValueError: a setting that cannot be.
    """
    self._session = Session(base_url, genv_gym.read_token(token_file))
    self._size = (width, height)
    self._actions = openenv_actions.get(actions)
    self._own = actions == "gui"
    unknown = sorted(set(fields or {}) - set(_FIELDS))
    if unknown:
      raise ValueError(
        f"fields take no {unknown[0]!r}; known: {', '.join(_FIELDS)}"
      )
    self._fields = {**_FIELDS, **(fields or {})}
    self._reset = dict(reset or {})
    if score not in _SCORES:
      raise ValueError(f"score={score!r} must be one of {', '.join(_SCORES)}")
    self._score, self._success_at = score, float(success_at)
    names = {f.name for f in dataclasses.fields(Timeouts)}
    if not isinstance(timeouts or {}, Mapping) or set(timeouts or {}) - names:
      raise ValueError(
        f"timeouts={timeouts!r} must be an object with seconds for"
        f" {', '.join(sorted(names))}"
      )
    self._timeouts = Timeouts(**(timeouts or {}))
    self._seen: base.Observation | None = None
    self._rewards: list[float] = []
    self._evaluation: Mapping[str, Any] | None = None

  async def start(self, task: base.Task) -> base.Observation:
    arguments = task.params.get("openenv", {"seed": task.seed})
    if not isinstance(arguments, Mapping):
      raise ValueError(
        f"task {task.task_id}: params.openenv={arguments!r} must be an object"
        " with the arguments of a reset"
      )
    loop = asyncio.get_running_loop()
    deadline = loop.time() + self._timeouts.start
    full: OpenEnvCapacityError | None = None

    async def attempt() -> Any:
      nonlocal full
      await self.close()
      seconds = deadline - loop.time()
      try:
        seconds = min(self._timeouts.connect, max(seconds, 0.01))
        await self._session.connect(seconds)
        seconds = max(deadline - loop.time(), 0.01)
        return await self._session.ask(
          "reset", {**self._reset, **arguments}, seconds
        )
      except OpenEnvCapacityError as error:
        full = error
        raise

    try:
      data = await http.RetryPolicy().run(attempt, due=deadline)
    except OpenEnvUnavailableError:
      if full is not None:  # The time was spent on waiting for a place.
        raise full from None
      raise
    self._rewards, self._evaluation = [], None
    observation = await self._take(data, True)
    where = f"screen of {self._session.url}"
    machines.check_size(where, observation.size, self._size, OpenEnvError)
    return observation

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    if self._seen is None:
      raise RuntimeError("no episode is running; call start(task) first")
    data = self._actions(action)
    if data is None or isinstance(data, str):
      ends = action.kind in (Kind.ANSWER, Kind.TERMINATE)
      self._seen = dataclasses.replace(
        self._seen, text=data or "", done=self._seen.done or ends
      )
      return self._seen
    try:
      reply = await self._session.ask("step", data, self._timeouts.step)
    except OpenEnvRequestError as error:
      if error.code != "VALIDATION_ERROR":
        raise
      # Nothing was done. It is the policy's own fault, and no failure of the
      # environment that would let it out of a bad episode.
      return dataclasses.replace(
        self._seen, instruction="", text=f"Error: {error.server_text}"
      )
    return await self._take(reply, False)

  async def evaluate(self) -> base.Evaluation:
    if self._seen is None:
      raise RuntimeError("no episode to evaluate; call start(task) first")
    if self._own and self._evaluation is None and not self._seen.done:
      # The episode's turns are used: it is judged as it stands.
      end = {"kind": "terminate", "metadata": {"truncated": True}}
      await self._take(
        await self._session.ask("step", end, self._timeouts.step), False
      )
    if self._evaluation is not None:
      try:
        score, success = wire.reward_of(self._evaluation)
      except wire.WireError as error:
        raise OpenEnvError(f"{self._session.url}: {error}") from None
      details = self._evaluation.get("details")
      return base.Evaluation(
        score, success, details if isinstance(details, Mapping) else {}
      )
    if not self._rewards:
      raise OpenEnvError(
        f"{self._session.url} gave no reward in the whole episode: there is"
        " nothing to judge it by"
      )
    last = self._score == "last"
    score = self._rewards[-1] if last else float(sum(self._rewards))
    return base.Evaluation(
      score, score >= self._success_at, {"rewards": list(self._rewards)}
    )

  async def close(self) -> None:
    """Closes the session; idempotent."""
    self._seen = None
    await self._session.close(self._timeouts.close)

  # --- observations -----------------------------------------------------------

  async def _take(
    self, data: Mapping[str, Any], first: bool
  ) -> base.Observation:
    shown, where = data.get("observation"), self._session.url
    if not isinstance(shown, Mapping):
      raise OpenEnvError(f"{where}: an answer without an observation")
    reward = data.get("reward")
    if reward is not None:
      try:
        self._rewards.append(
          float(reward)
          if isinstance(reward, bool)
          else wire.number(reward, "reward")
        )
      except wire.WireError as error:
        raise OpenEnvError(f"{where}: {error}") from None
    for about in (data.get("metadata"), shown.get("metadata")):
      if isinstance(about, Mapping) and isinstance(
        about.get("evaluation"), Mapping
      ):
        self._evaluation = about["evaluation"]
    text = {}
    for name in ("instruction", "text"):
      value = _at(shown, self._fields[name])
      text[name] = value if isinstance(value, str) else ""
    info = shown.get("info")
    self._seen = base.Observation(
      await self._pixels(shown),
      instruction=text["instruction"] if first else "",
      text=text["text"],
      done=data.get("done") is True,
      info=info if isinstance(info, dict) else {},
    )
    return self._seen

  async def _pixels(self, shown: Mapping[str, Any]) -> np.ndarray:
    """uint8[H, W, 3] of an observation."""
    path, where = self._fields["screenshot"], self._session.url
    value = _at(shown, path)
    if value is None:
      raise OpenEnvError(
        f"{where}: the observation has no {path!r} to look at, only"
        f" {', '.join(map(str, shown)) or 'nothing'}; set"
        " gym.options.fields.screenshot, or serve an environment with"
        " pictures"
      )
    shape = self._fields["shape"] and _at(shown, self._fields["shape"])
    # A list of numbers takes longer to read than any picture of their size.
    size = len(value) if isinstance(value, str) else 1 << 20
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):
      size = len(value["data"])
    try:
      return await http.read(
        lambda: _picture(value, shape, f"observation.{path}"),
        size,
        self._timeouts.step,
        "a screenshot",
      )
    except wire.WireError as error:
      raise OpenEnvError(f"{where}: {error}") from None


def _picture(value: Any, shape: Any, what: str) -> np.ndarray:
  """uint8[H, W, 3] of an observation's picture.

  Raises:
    WireError: the value is not a picture.
  """
  if not isinstance(value, list):
    return wire.screenshot_from_json(value, what)
  try:
    pixels = np.asarray(value)
    if shape:
      pixels = pixels.reshape(shape)
    if pixels.ndim == 2:
      pixels = np.repeat(pixels[:, :, None], 3, 2)
  except (ValueError, TypeError, OverflowError) as error:
    raise wire.WireError(f"{what}: {error}") from None
  try:
    return wire.from_numbers(pixels, what)
  except wire.WireError as error:
    raise wire.WireError(
      f"{error}; flat ones need gym.options.fields.shape"
    ) from None


def _at(data: object, path: str) -> Any:
  """Returns the value at a dotted path; None when there is none."""
  if not path:
    return None
  for name in path.split("."):
    if not isinstance(data, Mapping):
      return None
    data = data.get(name)
  return data


def _websockets() -> Any:
  try:
    from websockets import exceptions  # pylint: disable=g-import-not-at-top
    from websockets.asyncio import client  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
      "talking to an OpenEnv server needs websockets; pip install"
      " 'tunix-multi-turn[client]'"
    ) from error
  return client, exceptions
