"""Declares the trainer's arguments of an agent rollout.

    parser = arguments.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args()

Names and defaults are those of the protocol's trainer.
"""

from __future__ import annotations

import argparse

from tunix.rl.multi_turn.trajectory_collector.agent_rollout import rollout

DEFAULT_FUNCTION = (
    "tunix.rl.multi_turn.trajectory_collector.agent_rollout"
    ".generate_agent_rollout"
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
  """Adds the arguments to a parser and returns it."""
  add = parser.add_argument
  add("--rollout-function-path", default=DEFAULT_FUNCTION, metavar="PATH",
      help="dotted path of the function that makes a rollout")
  add("--agent-rollout-buffer-url", "--rollout-buffer-url",
      default="http://127.0.0.1:8889", metavar="URL",
      help="of the rollout buffer (default: %(default)s)")
  add("--rollout-buffer-token", default="", metavar="TOKEN",
      help="its bearer token; also $TUNIX_BUFFER_TOKEN")
  add("--remote-engine-url", default="", metavar="URL",
      help="OpenAI-compatible server of the policy, as generators reach it")
  add("--rollout-task-type", default="math", metavar="TYPE",
      help="TASK_TYPE of the generator (default: %(default)s)")
  add("--prompt-data", metavar="FILE",
      help="jsonl of tasks with instance_id, as the buffer reaches it")
  add("--hf-checkpoint", metavar="DIR", help="policy whose tokenizer is used")
  add("--loss-mask-type", default="qwen", metavar="TYPE",
      help="of items of text only: qwen, qwen3, distill_qwen, a registered"
      " name or module:Class (default: %(default)s)")
  add("--num-rollout", type=_positive, default=1,
      help="rollouts in all (default: %(default)s)")
  add("--rollout-batch-size", type=_positive, default=16,
      help="groups of a rollout (default: %(default)s)")
  add("--n-samples-per-prompt", type=_positive, default=8,
      help="episodes of a group (default: %(default)s)")
  add("--rollout-max-response-len", type=_positive, default=8192,
      help="tokens of one response (default: %(default)s)")
  add("--rollout-temperature", type=float, default=1.0)
  add("--rollout-top-p", type=float, default=1.0)
  add("--num-epoch", type=_positive, default=3,
      help="passes of the generator over its tasks (default: %(default)s)")
  add("--rollout-num-process", type=_positive, default=100,
      help="episodes that the generator plays at a time (default: %(default)s)")
  add("--fetch-trajectory-retry-times", type=_retries, default=-1,
      help="errors after which a rollout fails; -1 = never")
  add("--fetch-interval-s", type=float, default=rollout.POLL_S,
      help="seconds between two reads (default: %(default)s)")
  add("--buffer-filter-path", metavar="PATH",
      help="dotted path of a function (args, rollout_id, buffer, num_samples)"
      " that takes samples out of the list `buffer`; first in, first out"
      " without")
  add("--disable-rewards-normalization", action="store_true",
      help="for a buffer that has normalised the rewards")
  add("--use-wandb", action="store_true",
      help="log rollout/* to the wandb run that is open")
  return parser  # pyformat: disable


def _positive(text: str) -> int:
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
  return value


def _retries(text: str) -> int:
  value = int(text)
  if value < -1 or value == 0:
    raise argparse.ArgumentTypeError(
        f"must be -1 (no limit) or >= 1, got {value}"
    )
  return value
