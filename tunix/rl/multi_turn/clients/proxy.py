"""Plays episodes through this package's OpenAI-compatible server.

A collector takes a `ProxyModel` in place of a `PolicyModel`. The agent's
messages reach the server through the `openai` package, screenshots as data
URLs; text comes back, as from any agent service. An episode is a session of the
server. When it ends, the tokens that the server recorded become the
trajectory's training sequences.

Promises: nothing is rendered or tokenised on this side; a repeated request
causes no second sample and no second session; every session is dropped at the
server after its episode, however that ends, and not before its tokens are here;
an episode whose tokens cannot be fetched is a model error, and not trained on.
(A session whose start lost every answer ends by the server's timeout.)

Does not sample, serve, or import JAX. Needs the `openai` package. Belongs to
one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from typing import Any, Iterable, Iterator, Mapping, Sequence
import uuid

from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import data_urls
from tunix.rl.multi_turn.trajectory_collector import model_calls
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

Message = trajectory.Message
_LOG = logging.getLogger(__name__)
_CLIENTS = 16
_CLOSE_S = 10.0


class ProxyConnection:
  """Connects agents to the server."""

  def __init__(
    self,
    url: str,
    model: str,
    image_store: images_lib.ImageStore,
    *,
    token: str = "none",
    timeout_s: float = 120.0,
    other_sampling: str = "mask",
  ):
    """Args:

      url: URL of the server, without /v1.
      model: The server's name of the model.
      image_store: Store of the agents' screenshots. Exported sequences name an
        image by the SHA-256 of its pixels, by which the learner finds it in
        this store.
      token: Token that the server requires before it opens a session.
      timeout_s: Deadline of a request, in seconds.
      other_sampling: The server's treatment of a request whose distribution is
        not the run's, see `rollout.other_sampling`.

    Raises:
      ImportError: the openai package is not installed.
      ValueError: naming the argument.
    """
    try:
      import openai  # pylint: disable=g-import-not-at-top
    except ImportError as error:
      raise ImportError(
        "rollout.via=proxy needs the openai package; pip install"
        " 'tunix-multi-turn[client]'"
      ) from error
    if not url.startswith(("http://", "https://")):
      raise ValueError(f"url={url!r} is not a URL; give http://host:port")
    if not timeout_s > 0:
      raise ValueError(f"timeout_s must be > 0 seconds, got {timeout_s}")
    self.url = url.rstrip("/").removesuffix("/v1")
    self.name = model
    self.openai = openai
    self.urls = data_urls.DataUrls(image_store)
    self.other_sampling = other_sampling
    # A client checks each of its idle connections at every request: with a
    # hundred episodes that would be most of a turn's cost here.
    self._clients = [
      openai.AsyncOpenAI(
        base_url=f"{self.url}/v1",
        api_key=token,
        timeout=timeout_s,
        # Reading certificates, which http does not ask for, takes longer
        # than many a request.
        http_client=openai.DefaultAsyncHttpxClient(
          verify=self.url.startswith("https:")
        ),
      )
      for _ in range(_CLIENTS)
    ]
    self._next = itertools.cycle(self._clients)
    self._dropping: set[asyncio.Future[Any]] = set()

  def model(self, sampling: policy_client.SamplingParams) -> ProxyModel:
    """Returns a model with that sampling. Stop tokens are the server's own, and
    a seed is the episode's."""
    return ProxyModel(self, sampling)

  @property
  def client(self) -> Any:
    """An `openai.AsyncOpenAI` with the server's token."""
    return next(self._next)

  async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = await self.client.post(self.url + path, body=body, cast_to=object)
    return answer if isinstance(answer, dict) else {}

  async def start(
    self, name: str, sampling: policy_client.SamplingParams
  ) -> dict[str, Any]:
    """Opens a session: its `session_id`, `api_key` and `base_url`.

    The session is dropped if the caller is cancelled.

    Args:
      name: The episode's name.
      sampling: The distribution that the session's tokens are trained under,
        and the one of requests that name no other.
    """
    body = {
      "task_id": name,
      "sampling": sampling_rule.fields_of(sampling),
      "other_sampling": self.other_sampling,
    }
    # Repeated because the answer was lost, the call returns the same session.
    name_of_request = {"Idempotency-Key": uuid.uuid4().hex}
    return await concurrency.create_or_rollback(
      self.client.post(
        f"{self.url}/rl/start_session",
        body=body,
        cast_to=object,
        options={"headers": name_of_request},
      ),
      lambda started: self._drop(started["session_id"]),
      self._dropping,
    )

  async def drop(self, session: str) -> None:
    """Drops a session at the server, also if the caller is cancelled. Unknown
    ids are fine."""
    dropping = asyncio.ensure_future(self._drop(session))
    self._dropping.add(dropping)
    dropping.add_done_callback(self._dropping.discard)
    await asyncio.shield(dropping)

  async def _drop(self, session: str) -> None:
    # The answer is not parsed: `release` has fetched the tokens.
    try:
      await self.client.post(
        f"{self.url}/export_trajectories",
        body={"session_id": session, "style": "concat", "drop": True},
        cast_to=str,
      )
    except self.openai.NotFoundError:
      pass

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    if self._dropping:
      await asyncio.wait(self._dropping, timeout=_CLOSE_S)
    self.urls.close()
    for client in self._clients:
      await client.close()


class ProxyModel:
  """The model of a collector whose policy is behind the server."""

  def __init__(
    self, connection: ProxyConnection, sampling: policy_client.SamplingParams
  ):
    self.connection = connection
    self.sampling = sampling

  def new_session(self, name: str, seed: int | None) -> ProxySession:
    return ProxySession(self, name, seed)


class ProxySession:
  """One episode; see `model_calls.make_session`."""

  def __init__(self, model: ProxyModel, name: str, seed: int | None):
    self._connection = model.connection
    self._sampling = model.sampling
    self._name = name
    self._seed = model.sampling.seed if seed is None else seed
    self._id = ""
    self._client: Any = None
    self._written: list[tuple[Message, Message]] = []
    self._answers = 0
    self._sequences: list[trajectory.TokenSequence] | None = None
    self._untrained: dict[str, str] = {}  # Reasons by id of the answer.
    self.untrained_tokens = 0
    self.render_seconds = 0.0

  @property
  def num_rewrites(self) -> int:
    """Times that a request did not extend the agent's earlier ones."""
    return max(0, len(self._sequences or ()) - 1)

  async def reply(
    self,
    messages: Sequence[Message],
    turn: int,
    call: Any,
    max_new_tokens: int | None = None,
  ) -> model_calls.Reply:
    """Returns the turn's reply; see `model_calls.TokenSession`.

    Raises:
      ContextLimitError: no room to sample.
    """
    return await call(self._reply, messages, turn, max_new_tokens, inline=True)

  async def _reply(
    self,
    messages: Sequence[Message],
    turn: int,
    max_new_tokens: int | None = None,
  ) -> model_calls.Reply:
    if self._client is None:
      await self._open()
    started = time.perf_counter()
    written = await self._write(messages)
    self.render_seconds = time.perf_counter() - started
    options = self._sampling_options()
    if max_new_tokens:
      options["max_tokens"] = max_new_tokens
    if self._seed is not None:
      options["seed"] = model_calls.derive_seed(self._seed, turn)
    with self._context_errors():
      answer = await self._client.chat.completions.create(
        model=self._connection.name, messages=written, **options
      )
    self._answers += 1
    choice = answer.choices[0]
    usage = answer.usage
    return model_calls.Reply(
      choice.message.content or "",
      truncated=choice.finish_reason == "length",
      cancelled=choice.finish_reason == "abort",
      prompt_tokens=usage.prompt_tokens if usage else 0,
      sampled_tokens=usage.completion_tokens if usage else 0,
    )

  def _sampling_options(self) -> dict[str, Any]:
    """Returns the run's sampling as arguments of a chat completion."""
    sampling = self._sampling
    extra: dict[str, Any] = {"top_k": sampling.top_k}
    if sampling.min_p:
      extra["min_p"] = sampling.min_p
    return {
      "max_tokens": sampling.max_new_tokens,
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "extra_body": extra,
    }

  @contextlib.contextmanager
  def _context_errors(self) -> Iterator[None]:
    """Turns the server's refusal of a long prompt into ContextLimitError."""
    try:
      yield
    except self._connection.openai.BadRequestError as error:
      if error.code != "context_length_exceeded":
        raise
      body = error.body if isinstance(error.body, dict) else {}
      message = body.get("message", error.message)
      raise policy_client.ContextLimitError(message) from error

  def build(self) -> list[trajectory.TokenSequence]:
    """Returns the server's training sequences, once `release` has fetched them.

    Raises:
      ValueError: they could not be fetched.
    """
    if self._sequences is None:
      if self._answers:
        raise ValueError(
          f"the server at {self._connection.url} did not return the tokens"
          f" of {self._answers} answers; look into its log for the export"
        )
      return []
    return list(self._sequences)

  def sessions(self) -> list[str]:
    return [self._id] if self._id else []

  async def release(self, session: str) -> None:
    """Fetches the episode's tokens, then drops its session at the server."""
    try:
      # The session is dropped by another request: this one may be repeated.
      answer = await self._connection.post(
        "/export_trajectories",
        {"session_id": session, "style": "concat", "arrays": "lists"},
      )
      exported = answer["interactions"].values()
      self._sequences = [sequence_of(entry) for entry in exported]
      self._untrained = _reasons(exported)
      self._report_untrained(
        sum(entry.get("untrained_tokens", 0) for entry in exported),
        self._untrained.values(),
      )
    finally:
      await self._connection.drop(session)

  def _report_untrained(self, tokens: int, reasons: Iterable[str]) -> None:
    self.untrained_tokens = tokens
    if tokens:
      _LOG.warning(
        "episode %r: %d tokens are not trained on, as their requests asked"
        " for another distribution than the run's: %s; let the agent leave"
        " these fields out",
        self._name,
        tokens,
        "; ".join(dict.fromkeys(reasons)),
      )

  async def _open(self) -> None:
    started = await self._connection.start(self._name, self._sampling)
    self._id = started["session_id"]
    self._client = self._connection.client.copy(
      base_url=started["base_url"], api_key=started["api_key"]
    )

  async def _write(self, messages: Sequence[Message]) -> list[Message]:
    """Returns the messages in OpenAI's form; earlier ones are written once."""
    prefix = 0
    for message, (old, _) in zip(messages, self._written):
      if message is not old:
        break
      prefix += 1
    del self._written[prefix:]
    for message in messages[prefix:]:
      written = await openai_message(message, self._connection.urls)
      self._written.append((message, written))
    return [written for _, written in self._written]


async def openai_message(
  message: Message, urls: data_urls.DataUrls
) -> dict[str, Any]:
  """Returns a message in OpenAI's form, its screenshots as data URLs."""

  async def write(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image":
      return dict(part)
    url = await urls.of(part["image"])
    return {"type": "image_url", "image_url": {"url": url}}

  content = message.get("content")
  if isinstance(content, list):
    content = await asyncio.gather(*map(write, content))
  written = {**message, "content": content}
  if message["role"] != "tool":
    # Agents mark outputs of tools with it; OpenAI has it for "tool" only.
    written.pop("tool_call_id", None)
  return written


def _reasons(exported: Iterable[Mapping[str, Any]]) -> dict[str, str]:
  """Why tokens of answers are not trained on, by id of the answer."""
  return {
    turn["interaction_id"]: turn["untrained"]
    for entry in exported
    for turn in entry["sampling"]
    if turn["untrained"]
  }


def sequence_of(exported: Mapping[str, Any]) -> trajectory.TokenSequence:
  """Returns the training sequence of an entry of `/export_trajectories`.

  Raises:
    ValueError, KeyError: malformed.
  """
  tensors = exported["tensor_dict"]
  return trajectory.TokenSequence(
    tokens=tensors["input_ids"][0],
    loss_mask=tensors["loss_mask"][0],
    logprobs=tensors["logprobs"][0],
    versions=tensors["versions"][0],
    turn_ids=exported["turn_ids"],
    images=tuple(
      trajectory.ImageSpan(
        trajectory.ImageRef(image["sha256"], image["width"], image["height"]),
        image["offset"],
        image["num_tokens"],
        image.get("row", 0),
      )
      for image in exported["images"]
    ),
    entropies=exported.get("entropies"),
  )
