"""Plays episodes of one environment of the package `verifiers`.

    python worker.py < requests > answers

Runs in an environment of its own, which has verifiers 0.1 or 0.4 and the
environment's module, and not this package. Messages are JSON objects, one a
line. The first one it reads names the environment: `module`, `args` and `path`,
a directory to import it from. With 0.1, `args` are those of the module's
`load_environment`; with 0.4, `module` is a taskset, and `args` are settings of
its environment. It answers `{"ready": {"version", "train", "eval"}}`, or
`{"fatal": text}` and ends.

Then `{"id", "play": {…}}` is an episode, with `split`, `index`, `seed` and the
policy's `base_url`, `api_key`, `model`, `sampling` and `timeout_s` (of one
request); it answers `{"id", "result": {…}}` or `{"id", "error": text}`.
`{"cancel": id}` ends an episode; it answers `{"cancelled": id}`.

Promises: episodes run at once, in one event loop; a reward function that raised
is an error, where verifiers itself would log it and count 0; what the
environment prints goes to stderr. Ends when its stdin does.
"""

import asyncio
import contextlib
import contextvars
import functools
from importlib import metadata
import json
import logging
import math
import os
import random
import sys
import threading
import uuid

_HELD_OUT = 5  # One row in five, where no list is for evaluation.
_REWARD_ERRORS = contextvars.ContextVar[list]("_REWARD_ERRORS")


class _RewardErrors(logging.Handler):
  """Collects what verifiers logs of failed reward functions, by episode."""

  def emit(self, record):
    text = record.getMessage()
    texts = _REWARD_ERRORS.get(None)
    if texts is not None and "reward function" in text:
      texts.append(text)


class Rows:
  """The environment's rows, by split; `pick` draws as `ListedTasks` does."""

  def __init__(self, train, held_out=None):
    """`held_out`: rows for evaluation; None = every fifth one of `train`."""
    places = list(range(len(train)))
    if held_out is None:
      self._eval = [(train, i) for i in places[::_HELD_OUT]]
      places = [i for i in places if i % _HELD_OUT]
    else:
      self._eval = [(held_out, i) for i in range(len(held_out))]
    self._train = [(train, i) for i in places]
    self.sizes = {"train": len(self._train), "eval": len(self._eval)}
    if not all(self.sizes.values()):
      raise ValueError(f"its lists have {self.sizes} rows; each needs one")

  def pick(self, split, index, seed):
    rows = self._eval if split == "eval" else self._train
    epoch, place = divmod(index, len(rows))
    order = list(range(len(rows)))
    if split != "eval":
      random.Random(f"{seed}/{epoch}").shuffle(order)
    dataset, row = rows[order[place]]
    return dataset[row]


def load(vf, request):
  """Returns the environment that the first message names, and its rows."""
  env = vf.load_environment(request["module"], **request["args"])
  if not isinstance(env, vf.Environment):
    raise TypeError(
      f"load_environment returned {type(env).__name__}, not a"
      " verifiers.Environment"
    )
  if env.requires_group_rollouts:
    raise ValueError(
      "it has rewards of a whole group, and episodes are played one by one;"
      " use rewards of single rollouts"
    )
  logging.getLogger("verifiers").addHandler(_RewardErrors(logging.ERROR))
  held_out = None
  if env.build_eval_dataset() is not None:
    held_out = env.get_eval_dataset()
  return env, Rows(env.get_dataset(), held_out)


async def play(vf, env, rows, request):
  """Plays one episode; returns its reward and its record."""
  import openai

  failed: list[str] = []
  _REWARD_ERRORS.set(failed)
  row = dict(rows.pick(request["split"], request["index"], request["seed"]))
  async with openai.AsyncOpenAI(
    base_url=request["base_url"],
    api_key=request["api_key"],
    timeout=request["timeout_s"],
  ) as client:
    out = await env.run_rollout(
      row,
      vf.OpenAIChatCompletionsClient(client),
      request["model"],
      request["sampling"],
    )
  if out.get("error"):
    raise RuntimeError(f"the rollout failed: {_text(out['error'])}")
  if failed:
    raise RuntimeError("; ".join(failed))
  return {
    "reward": _finite(out["reward"]),
    "metrics": {k: float(v) for k, v in (out.get("metrics") or {}).items()},
    "completion": [_message(m) for m in out.get("completion") or ()],
    "stop_condition": out.get("stop_condition"),
    "truncated": bool(out.get("is_truncated")),
    "example_id": out.get("example_id"),
  }


class Tasksets:
  """Plays the tasks of a taskset of verifiers 0.4."""

  def __init__(self, request):
    from verifiers.v1.utils import loaders

    args = dict(request["args"])
    taskset = {**args.pop("taskset", {}), "id": request["module"]}
    # Without its own settings, the agent is a chat with the taskset's tools.
    # verifiers' default runs programs, in a sandbox of its vendor.
    args.setdefault(
      "agent", {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    )
    self._env = loaders.load_environment(
      loaders.resolve_env_config({**args, "taskset": taskset})
    )
    if not self._env.taskset.bounded:
      raise ValueError(
        "its taskset has no end, and tasks are drawn from a list; give it a"
        " size by args={taskset: {…}}"
      )
    self.rows = Rows(list(self._env.taskset))
    self._start = asyncio.Lock()
    self._stack = None

  async def _serve(self):
    """Starts what episodes share, once."""
    async with self._start:
      if self._stack is None:
        stack = contextlib.AsyncExitStack()
        try:
          # Not `serving`, whose interception keeps a client for each session.
          tools = await stack.enter_async_context(self._env.shared_tools())
          self._env._shared_tools = tools  # pylint: disable=protected-access
          stack.push_async_callback(self._env.stop)  # Of half a start, too.
          await self._env.start()
        except BaseException:
          await stack.aclose()
          raise
        self._stack = stack

  async def play(self, request):
    """Plays one episode; returns its reward and its record."""
    import verifiers.v1 as vf

    await self._serve()
    task = self.rows.pick(request["split"], request["index"], request["seed"])
    # A client reads its key from the environment, which programs of a harness
    # inherit without the names of this kind.
    variable = f"TUNIX_{uuid.uuid4().hex}_API_KEY"
    os.environ[variable] = request["api_key"]
    try:
      client = vf.EvalClientConfig(
        base_url=request["base_url"],
        api_key_var=variable,
        timeout={"read": request["timeout_s"]},
      )
      context = vf.ModelContext(
        request["model"], client, vf.SamplingConfig(**request["sampling"])
      )
      episode = await self._env.run_episode(task, context)
    finally:
      del os.environ[variable]
    if not episode.ok:
      errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
      texts = [f"{error.type}: {error.message}" for error in errors]
      raise RuntimeError(f"the rollout failed: {'; '.join(texts)}")
    if len(episode.traces) != 1:
      raise ValueError(
        f"its episode has {len(episode.traces)} agents, all of which would be"
        " trained on; take an environment of one agent"
      )
    (trace,) = episode.traces
    return {
      "reward": _finite(trace.reward),
      "metrics": {
        k: float(v) for k, v in trace.metrics.items() if v is not None
      },
      "completion": [
        node.message.model_dump(mode="json", exclude_none=True)
        for node in trace.nodes
      ],
      "stop_condition": trace.stop_condition,
      "truncated": bool(trace.is_truncated),
      "example_id": task.data.idx,
    }


def _finite(reward):
  """Returns the reward as a float.

  Raises:
    ValueError: It is not finite.
  """
  reward = float(reward)
  if not math.isfinite(reward):
    raise ValueError(f"its rubric returned the reward {reward}")
  return reward


def _message(message):
  """A message as JSON, whichever class the environment wrote it with."""
  return (
    message
    if isinstance(message, dict)
    else message.model_dump(mode="json", exclude_none=True)
  )


def _text(error):
  if isinstance(error, dict):
    return error.get("error_chain_str") or error.get("error") or str(error)
  return str(error)


class Server:
  """Reads requests in a thread, and plays them in the event loop."""

  def __init__(self, play, send):
    self._play = play
    self._send = send
    self._playing = {}

  async def run(self, lines):
    loop = asyncio.get_running_loop()
    threading.Thread(target=self._read, args=(lines, loop), daemon=True).start()
    await asyncio.Event().wait()  # `_read` ends the process.

  def _read(self, lines, loop):
    for line in lines:
      loop.call_soon_threadsafe(self._take, json.loads(line))
    os._exit(0)

  def _take(self, message):
    if "cancel" in message:
      asyncio.ensure_future(self._cancel(message["cancel"]))
      return
    task = asyncio.ensure_future(self._answer(message))
    self._playing[message["id"]] = task
    task.add_done_callback(lambda _: self._playing.pop(message["id"]))

  async def _cancel(self, number):
    self._send({"cancelled": number})
    if task := self._playing.get(number):
      task.cancel()

  async def _answer(self, message):
    try:
      answer = {"result": await self._play(message["play"])}
      json.dumps(answer)
    except Exception as error:  # Whatever the environment raises.
      answer = {"error": f"{type(error).__name__}: {error}"}
    self._send({"id": message["id"], **answer})


def serve(prepare):
  """Answers the lines of stdin on stdout; the exit status.

  Args:
    prepare: `(first message) -> (facts, play)`; `await play(request)` is the
      result. What it raises is the `fatal` answer.
  """
  out = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)  # Of print, and of what C writes.
  lock = threading.Lock()

  def send(message):
    with lock:
      out.write(json.dumps(message) + "\n")
      out.flush()

  try:
    facts, play_one = prepare(json.loads(sys.stdin.readline()))
  except (Exception, SystemExit) as error:
    send({"fatal": f"{type(error).__name__}: {error}"})
    return 1
  send({"ready": facts})
  asyncio.run(Server(play_one, send).run(sys.stdin))
  return 0


def prepare(request):
  version = "0.1."  # Of a source tree; or it is missing, and import says so.
  with contextlib.suppress(metadata.PackageNotFoundError):
    version = metadata.version("verifiers")
  if request.get("path"):
    sys.path.insert(0, request["path"])
  if version.startswith("0.4."):
    # Harnesses start programs by uv, which lies beside the interpreter, and
    # tools are processes that import the taskset's module.
    os.environ["PATH"] = os.pathsep.join(
      [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    )
    os.environ["PYTHONPATH"] = request.get("path") or ""
    tasksets = Tasksets(request)
    return {"version": version, **tasksets.rows.sizes}, tasksets.play
  if not version.startswith("0.1."):  # Some of them fail when imported.
    raise ImportError(
      f"verifiers {version} is not supported; install 'verifiers<0.2' (make"
      " verifiers) for modules with load_environment, or verifiers==0.4.0"
      " (make verifiers4) for tasksets"
    )
  import verifiers as vf

  env, rows = load(vf, request)
  facts = {"version": vf.__version__, **rows.sizes}
  return facts, functools.partial(play, vf, env, rows)


def main():
  own = os.path.dirname(os.path.abspath(__file__))
  sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != own]
  return serve(prepare)


if __name__ == "__main__":
  sys.exit(main())
