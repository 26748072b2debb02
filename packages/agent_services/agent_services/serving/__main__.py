"""Serves a policy to OpenAI clients.

    python -m tunix.rl.multi_turn.serving tiny_vl --port 8000

Answers chat completions, completions and responses with the ids, log-probs and
policy versions that training needs, and keeps sessions as trajectories (see
`app`). Binds the loopback interface; another address needs a token.

Promises: wrong arguments end the command with status 2, all of them named at
once; those that need the policy, once it is loaded. Defaults follow the policy.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import socket
import sys
from typing import Any, Callable, cast, Sequence, TypeVar

import pydantic
import tqdm
from tunix.rl.multi_turn.core import json_text

from agent_services.serving import arguments

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv[1:]):
  arguments.parser().parse_args()  # Before the seconds that JAX takes.

from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import connections
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import compile_cache
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy import memory_limits
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

from agent_services.serving import app as app_lib
from agent_services.serving import media
from agent_services.serving import requests
from agent_services.serving import server
from agent_services.serving.sessions import session_sampling

T = TypeVar("T")
TOKEN_VARIABLE = arguments.TOKEN_VARIABLE
USUAL_SCREENS = (
    (1920, 1080), (1280, 720), (1024, 768), (640, 480), (360, 640), (320, 240),
    (160, 210), (128, 96),
)  # fmt: skip
"""(width, height) in pixels, the first that fits is the default."""
_BACKLOG = 2048  # Connections that wait while the policy is compiled.


def _words(text: str) -> tuple[str, ...]:
  """Returns the words of a list that is separated by commas."""
  return tuple(word.strip() for word in text.split(",") if word.strip())


def _screens(text: str) -> tuple[tuple[int, int], ...]:
  """Returns sizes of screenshots; () for the policy's own default."""
  sizes = []
  for part in _words(text):
    width, _, height = part.lower().partition("x")
    if not all(side.isdigit() and int(side) for side in (width, height)):
      raise ValueError(f"--screen={text}: write WIDTHxHEIGHT, e.g. 1280x720")
    sizes.append((int(width), int(height)))
  return tuple(sizes)


def _template_options(text: str) -> dict[str, Any]:
  try:
    options = json_text.parse(text)
  except ValueError:
    options = None
  if not isinstance(options, dict):
    raise ValueError(
      f"--default-chat-template-kwargs={text}: write a JSON object such as"
      ' {"enable_thinking": false}'
    )
  return options


def _renderer(
  args: argparse.Namespace, policy: checkpoint.Loaded
) -> choice.AnyRenderer:
  """Raises ValueError by the option that does not go with the policy."""
  options = _template_options(args.default_chat_template_kwargs)
  try:
    renderer = choice.make_renderer(
      policy[2],
      base.layout_of(policy[1]),
      policy_files.chat_template(args.policy, options),
      args.renderer,
    )
  except ValueError as error:
    raise ValueError(f"--renderer={args.renderer}: {error}") from None
  if options and not choice.takes_options(renderer):
    raise ValueError(
      "--default-chat-template-kwargs="
      f"{args.default_chat_template_kwargs}: {args.policy} has no chat"
      " template with these variables; leave them out"
    )
  return renderer


def _usual_screens(processor: Any, context: int) -> tuple[tuple[int, int], ...]:
  """Returns the largest usual size that the policy takes and whose tokens fill
  at most half of the context; () for a text policy, or without such a size."""
  for size in USUAL_SCREENS if processor.patches_per_token else ():
    try:
      if 2 * processor.num_image_tokens(*size) <= context:
        return (size,)
    except ValueError:
      pass  # Larger than this policy takes.
  return ()


def _check_screens(
  text: str, sizes: Sequence[tuple[int, int]], processor: Any, context: int
) -> None:
  for size in sizes:
    fix = "name the sizes that clients send, none larger, e.g. --screen 640x480"
    try:
      tokens = processor.num_image_tokens(*size)
    except ValueError as error:
      why = str(error).partition(";")[0]
      raise ValueError(f"--screen={text}: {why}; {fix}") from None
    if tokens >= context:
      raise ValueError(
        f"--screen={text}: a screenshot has {tokens} tokens, as many as"
        f" --max-model-len={context} or more; raise that, or {fix}"
      )


def _features(text: str) -> tuple[engine_config.Feature, ...]:
  names = _words(text)
  if unknown := sorted(set(names) - set(engine_config.FEATURES)):
    raise ValueError(
      f"--features={text}: {unknown[0]!r} is none of"
      f" {', '.join(engine_config.FEATURES)}"
    )
  return tuple(f for name in names for f in engine_config.FEATURES if f == name)


def _engine_settings(args: argparse.Namespace) -> engine_config.EngineConfig:
  """Returns the engine's settings; a wrong one is named by its option."""
  features = _features(args.features)
  try:
    return engine_config.EngineConfig(
      slots=args.slots,
      cache_tokens=args.cache_tokens,
      context_length=args.max_model_len,
      weights=args.weights,
      features=features,
    )
  except pydantic.ValidationError as error:
    problems = []
    for detail in error.errors(include_url=False):
      text = str(detail.get("ctx", {}).get("error", detail["msg"]))
      if detail["loc"]:
        text = f"{detail['loc'][0]}={detail['input']}: {text}"
      for field, option in _OPTIONS.items():
        text = re.sub(rf"\b{field}\b", option, text)
      problems.append(text)
    raise ValueError("\n".join(problems)) from None


_OPTIONS = {
  "slots": "--slots",
  "cache_tokens": "--cache-tokens",
  "context_length": "--max-model-len",
}


def _images_limit(text: str) -> int:
  try:
    limit = json_text.parse(text)["image"]
  except (ValueError, KeyError, TypeError):
    limit = None
  if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
    raise ValueError(
      f"--limit-mm-per-prompt={text}: write a JSON object such as"
      ' {"image": 64}'
    )
  return limit


@dataclasses.dataclass(frozen=True)
class _Arguments:
  """The arguments, checked; `listening` is bound."""

  token: str
  screens: tuple[tuple[int, int], ...]
  settings: engine_config.EngineConfig
  images: int
  media_limits: media.MediaLimits
  connections: connections.ConnectionLimits
  listening: socket.socket


def _checked(args: argparse.Namespace) -> _Arguments:
  """Checks every argument that can be checked without the policy.

  Raises:
    ValueError: Arguments are wrong; the message has a line for each.
  """
  problems: list[str] = []

  def of(make: Callable[[], T]) -> T:
    try:
      return make()
    except (OSError, ValueError, ImportError) as error:
      problems.append(str(error))
      return cast(T, None)  # No caller sees it.

  of(lambda: _template_options(args.default_chat_template_kwargs))
  of(lambda: _check_numbers(args))
  of(lambda: _sampling(args))
  of(lambda: tool_parser.make_tool_parser(args.tool_parser, "operator"))
  of(lambda: policy_files.resolve(args.policy))
  if args.image_dir:
    of(lambda: _make_folder(args.image_dir))
  checked = _Arguments(
    of(lambda: http_server.token(args.token_file, args.host, TOKEN_VARIABLE)),
    of(lambda: _screens(args.screen)),
    of(lambda: _engine_settings(args)),
    of(lambda: _images_limit(args.limit_mm_per_prompt)),
    of(lambda: _media_limits(_words(args.allowed_media_domains))),
    of(lambda: http_server.limits_of(args)),
    of(lambda: http_server.listen(args.host, args.port, _BACKLOG)),
  )
  if problems:
    if checked.listening:
      checked.listening.close()
    raise ValueError("\n".join(problems))
  return checked


def _sampling(args: argparse.Namespace) -> session_sampling.SessionSampling:
  return sampling_rule.of_text(
    args.sampling, args.other_sampling, session_sampling.SessionSampling
  )


def _check_numbers(args: argparse.Namespace) -> None:
  wrong = [
    f"--{name.replace('_', '-')}={getattr(args, name)} must be {accepted}"
    for name, right, accepted in (
      ("max_tokens", args.max_tokens >= 1, "1 or more"),
      ("max_sessions", args.max_sessions >= 1, "1 or more"),
      (
        "session_timeout",
        0 < args.session_timeout < 1e9,
        "a number of seconds > 0",
      ),
      ("image_memory", args.image_memory >= 1, "1 or more; it is in MiB"),
      ("seed", 0 <= args.seed < 2**63, ">= 0 and < 2**63"),
    )
    if not right
  ]
  if wrong:
    raise ValueError("\n".join(wrong))


def _media_limits(hosts: tuple[str, ...]) -> media.MediaLimits:
  try:
    return media.MediaLimits(allowed_hosts=hosts)
  except ValueError as error:
    raise ValueError(f"--allowed-media-domains: {error}") from None


def _make_folder(folder: pathlib.Path) -> None:
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f"--image-dir={folder} cannot be made ({error.strerror}); give a folder"
      " that can be written"
    ) from None


def _check_memory(
  args: argparse.Namespace,
  policy: checkpoint.Loaded,
  settings: engine_config.EngineConfig,
  screens: tuple[tuple[int, int], ...],
) -> None:
  caches = cache_memory.of_engine(policy[0], policy[1], settings, screens)
  there, needed = memory_limits.device_bytes(), caches.kv + caches.vision
  if there is not None and needed > there:
    raise ValueError(
      f"--slots={args.slots} --max-model-len={args.max_model_len}: their"
      f" caches take {memory_limits.human(needed)}, and a device has"
      f" {memory_limits.human(there)}; lower one of them, or set"
      " --cache-tokens"
    )


def _make(
  args: argparse.Namespace, checked: _Arguments
) -> tuple[engine_lib.RolloutEngine, app_lib.OpenAIApp]:
  """Returns the engine and the application.

  Raises:
    ValueError, OSError: The policy cannot be loaded, or does not take an
      argument, which the message names.
  """
  largest = max(checked.screens, key=lambda s: s[0] * s[1], default=None)
  policy = checkpoint.load_policy(
    args.policy, screen=largest, compute_dtype=args.dtype
  )
  host_memory.settle(policy[0])
  renderer = _renderer(args, policy)
  context = args.max_model_len
  screens = checked.screens or _usual_screens(policy[1], context)
  if checked.screens and policy[1].patches_per_token:
    _check_screens(args.screen, screens, policy[1], context)
  _check_memory(args, policy, checked.settings, screens)
  store = images.ImageStore(args.image_dir, args.image_memory << 20)
  engine = engine_lib.RolloutEngine(
    policy[0],
    policy[1],
    store,
    checked.settings,
    image_sizes=screens,
    banned_token_ids=policy[0].config.banned_token_ids,
    seed=args.seed,
  )
  app = server.make_app(
    args.name or args.policy,
    engine,
    policy,
    store,
    parser=args.tool_parser,
    limits=requests.RequestLimits(
      max_new_tokens=args.max_tokens, images=checked.images
    ),
    media_limits=checked.media_limits,
    max_sessions=args.max_sessions,
    session_timeout_s=args.session_timeout,
    token=checked.token,
    renderer=renderer,
    export_arrays=args.export_arrays,
    sampling=_sampling(args),
  )
  return engine, app


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  import uvicorn  # pylint: disable=g-import-not-at-top

  args = arguments.parser().parse_args(argv)
  host_memory.tune()
  compile_cache.enable(args.compile_cache)
  connections.raise_open_files()
  listening = None
  try:
    checked = _checked(args)
    listening = checked.listening
    engine, app = _make(args, checked)
  except (OSError, ValueError) as error:
    if listening is not None:
      listening.close()
    for problem in str(error).splitlines():
      print(f"error: {problem}", file=sys.stderr)
    return 2
  with engine:
    with tqdm.tqdm(desc="compiling", unit="program") as bar:

      def progress(compiled: int, total: int, what: str) -> None:
        bar.total = total
        bar.set_postfix_str(what, refresh=False)
        bar.update(compiled - bar.n)

      engine.warm_up(progress)
    url = http_server.url_of(args.host, listening)
    print(f"serving {args.name or args.policy} at {url}/v1", flush=True)
    # Requests that run have a moment to end; sessions do not outlive it.
    config = http_server.config(app.asgi, checked.connections, backlog=_BACKLOG)
    uvicorn.Server(config).run(sockets=[listening])
  return 0


if __name__ == "__main__":
  sys.exit(main())
