"""Turns conversations from elsewhere into tokens and loss masks, file to file.

    python -m tunix.rl.multi_turn.commands.loss_mask chats.jsonl --show \\
        --tokenizer qwen3_vl_tiny --loss-mask-type qwen

A line of the file is an object with `messages` (OpenAI's) and, optionally,
`tools`; or the list of messages itself. One line is printed a conversation;
`--show` adds the text that is trained on. `--out FILE` writes each line's
object with `tokens`, `loss_mask` and `response_length` added.

Does not load a policy: a tokenizer's files suffice.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any, Iterator, Sequence

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.trajectory_collector import loss_mask


def parser() -> argparse.ArgumentParser:
  types = ", ".join(loss_mask.LOSS_MASK_TYPES)
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.commands.loss_mask",
    description="Turn conversations into tokens and loss masks.",
  )
  add = out.add_argument
  add("file", type=pathlib.Path, help="JSON lines: {messages, tools?}")
  add(
    "--tokenizer",
    required=True,
    metavar="NAME",
    help="a checkpoint's directory, or a policy that the package ships",
  )
  add(
    "--loss-mask-type",
    default="qwen",
    metavar="TYPE",
    help=f"{types}, or package.module:Class (default: qwen)",
  )
  add(
    "--imports",
    default="",
    metavar="A[,B]",
    help="modules that register further types",
  )
  add("--show", action="store_true", help="print the text trained on")
  add("--out", type=pathlib.Path, metavar="FILE", help="JSON lines to write")
  return out


def _records(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """(line, object) of each conversation.

  Raises:
    OSError: the file cannot be read.
    ValueError: naming the line.
  """
  for number, line in enumerate(
    file.read_text(encoding="utf-8").splitlines(), 1
  ):
    if not line.strip():
      continue
    try:
      record = json_text.parse(line)
    except ValueError as error:
      raise ValueError(f"{file}, line {number}: no JSON ({error})") from None
    if isinstance(record, list):
      record = {"messages": record}
    if not isinstance(record, dict) or "messages" not in record:
      raise ValueError(
        f"{file}, line {number}: expected an object with messages, got"
        f" {line[:80]!r}"
      )
    yield number, record


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  args = parser().parse_args(argv)
  try:
    for module in filter(None, args.imports.split(",")):
      registry.import_module(module.strip())
    # transformers' reads the chat template beside the tokenizer.
    policy_files.load_tokenizer(args.tokenizer)
    import transformers  # pylint: disable=g-import-not-at-top

    tokenizer = transformers.AutoTokenizer.from_pretrained(
      str(policy_files.resolve(args.tokenizer))
    )
    generator = loss_mask.make(args.loss_mask_type, tokenizer)
    lines = []
    for number, record in _records(args.file):
      try:
        masked = loss_mask.masked_tokens(
          generator, record["messages"], record.get("tools")
        )
      except ValueError as error:
        raise ValueError(f"{args.file}, line {number}: {error}") from None
      print(
        f"line {number}: {len(masked.token_ids)} tokens,"
        f" {sum(masked.loss_mask)} trained, response length"
        f" {masked.response_length}"
      )
      if args.show:
        ids = [t for t, m in zip(*masked) if m]
        print(f"  {tokenizer.decode(ids)!r}")
      lines.append(json.dumps({
          **record, "tokens": masked.token_ids, "loss_mask": masked.loss_mask,
          "response_length": masked.response_length,
      }, ensure_ascii=False))  # fmt: skip
    if args.out:
      args.out.write_text("".join(f"{x}\n" for x in lines), encoding="utf-8")
  except (OSError, ValueError, ImportError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
