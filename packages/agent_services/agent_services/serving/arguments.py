"""Declares the command line of the policy server.

Does not: import JAX, or check a value (`__main__` does).
"""

from __future__ import annotations

import argparse
import pathlib

from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy import compile_cache

TOKEN_VARIABLE = "TUNIX_ROLLOUT_TOKEN"


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.serving",
    description="Serve a policy to OpenAI clients.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add("policy", help="a directory, or a shipped policy such as tiny_vl")
  add("--name", default="", help="the model's name for clients (the policy)")
  add("--host", default="127.0.0.1")
  add("--port", type=int, default=8000)
  add(
    "--token-file",
    type=pathlib.Path,
    help=f"holds the token of clients; or set {TOKEN_VARIABLE}",
  )
  add(
    "--max-model-len",
    type=int,
    default=2048,
    metavar="TOKENS",
    help="context of a sequence, images included",
  )
  add(
    "--max-tokens",
    type=int,
    default=1024,
    help="cap of a completion, and its length unless asked for",
  )
  add("--slots", type=int, default=32, help="requests sampled at a time")
  add(
    "--cache-tokens",
    type=int,
    default=0,
    metavar="TOKENS",
    help="held by the KV cache; 0: --slots times --max-model-len",
  )
  add(
    "--screen",
    default="",
    metavar="WxH[,WxH]",
    help="sizes of screenshots, compiled before the first request; unless"
    " given the largest usual one that the policy takes",
  )
  add(
    "--limit-mm-per-prompt",
    default='{"image": 64}',
    metavar="JSON",
    help="images of a prompt",
  )
  add(
    "--allowed-media-domains",
    default="",
    metavar="HOST[,HOST]",
    help="https hosts that images are fetched from, matched exactly",
  )
  add(
    "--image-memory",
    type=int,
    default=1024,
    metavar="MIB",
    help="pixels of screenshots kept in memory",
  )
  add(
    "--image-dir",
    type=pathlib.Path,
    help="holds the screenshots beyond --image-memory; without it they are"
    " forgotten, and a request that needs one fails",
  )
  add(
    "--tool-parser",
    default="qwen",
    help="grammar of tool calls, a registered tool parser",
  )
  add(
    "--renderer",
    default="auto",
    choices=choice.KINDS,
    help="messages to tokens; auto: by the policy's own chat template, or"
    " ChatML where it has none; qwen: ChatML in any case",
  )
  add(
    "--default-chat-template-kwargs",
    default="{}",
    metavar="JSON",
    help='variables of the chat template, e.g. {"enable_thinking": false}',
  )
  add(
    "--dtype",
    default="float32",
    choices=("float32", "bfloat16"),
    help="of activations and KV cache",
  )
  add(
    "--features",
    default="",
    metavar="NAME[,NAME]",
    help="compiled before the first request: details (top_logprobs and raw"
    " log-probs), grammar (answers that follow a schema); others are compiled"
    " at the first request for them, while all wait",
  )
  add(
    "--weights",
    default="same",
    choices=("same", "int8"),
    help="int8 halves the matrices' memory (Qwen-VL)",
  )
  add(
    "--max-sessions",
    type=int,
    default=1024,
    help="held at a time; ended ones count until they are dropped",
  )
  add(
    "--session-timeout",
    type=float,
    default=3600.0,
    metavar="S",
    help="an idle session ends after this long",
  )
  add(
    "--export-arrays",
    choices=("lists", "tensors"),
    default="lists",
    help="how exports write arrays; tensors: as AReaL reads them",
  )
  add(
    "--sampling",
    default="{}",
    metavar="JSON",
    help="distribution that sessions' tokens are trained under, where the"
    ' start of a session names none, e.g. {"temperature": 0.7}; also that'
    " of a session's requests which leave these fields out",
  )
  add(
    "--other-sampling",
    choices=("mask", "refuse", "train"),
    default="mask",
    help="a session's request with another distribution is answered and not"
    " trained on (mask), an error (refuse), or trained on with its own"
    " log-probs, for a learner that corrects by importance (train)",
  )
  add("--seed", type=int, default=0)
  add(
    "--compile-cache",
    default=compile_cache.AUTO,
    metavar="DIR",
    help="of compiled programs; auto: the user's cache directory; off: none",
  )
  http_server.add_options(out)
  return out
