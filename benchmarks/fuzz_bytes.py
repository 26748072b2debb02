"""Fuzzes the parsers of bytes that others send or that lie in files.

    python benchmarks/fuzz_bytes.py [TARGET ...] [--seconds 60] [--folder DIR]

Each target runs in a process of its own, with the exceptions that it documents
and no other, 2 GiB of memory and 10 s an input. With atheris (`pip install
atheris`) inputs follow the parser's own branches; without it they are random
mutations of valid ones. Whatever breaks a rule is kept in the folder. Exits
with 1 if anything did.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
MEMORY_MIB = 2048
INPUT_S = 10
_ENDINGS = (b"{", b"[", b"\x00", b"\xff", b"9" * 30, b'"', b"NaN", b"\\ud800")


@dataclasses.dataclass(frozen=True)
class Target:
  """A parser under test.

  Attributes:
    parse: Reads an input.
    errors: What it may raise.
    seeds: Valid inputs.
  """

  parse: Callable[[bytes], Any]
  errors: tuple[type[Exception], ...]
  seeds: Sequence[bytes]


def _pictures() -> list[bytes]:
  import numpy as np  # pylint: disable=g-import-not-at-top
  from PIL import Image  # pylint: disable=g-import-not-at-top

  pixels = np.random.default_rng(0).integers(0, 256, (160, 160, 3), np.uint8)
  files = []
  for mode in ("RGB", "RGBA", "P", "L", "1", "LA"):
    for kind in ("PNG", "WEBP", "JPEG", "GIF"):
      image = Image.fromarray(pixels if kind == "PNG" else pixels[:9, :7])
      file = io.BytesIO()
      try:
        image.convert(mode).save(file, kind)
      except OSError:
        continue
      files.append(file.getvalue())
  return files


def _picture() -> Target:
  from agent_services.serving import pictures  # pylint: disable=g-import-not-at-top

  return Target(
    lambda data: pictures.decode(data, 1 << 18),
    (pictures.PictureError,),
    _pictures(),
  )


def _image() -> Target:
  from tunix.rl.multi_turn.core import images  # pylint: disable=g-import-not-at-top

  return Target(
    lambda data: images.decode(data, 1 << 18), (ValueError,), _pictures()
  )


def _requests() -> list[bytes]:
  sys.path.insert(0, str(ROOT / "tests" / "helpers"))
  import hostile_requests  # pylint: disable=g-import-not-at-top

  rng = random.Random(0)
  return [
    json.dumps(hostile_requests.valid_body(rng, *route, {}, {})).encode()
    for route in (
      ("policy", "/v1/chat/completions"),
      ("policy", "/v1/responses"),
      ("policy", "/v1/messages"),
      ("proxy", "/generate"),
      ("buffer", "/buffer/write"),
      ("monitor", "/api/ingest/batch"),
    )
  ] + [b'{"a": NaN, "b": "\\ud800", "c": 1e999}']


def _proxy() -> Target:
  from agent_services.serving import errors  # pylint: disable=g-import-not-at-top
  from agent_services.serving import image_addresses  # pylint: disable=g-import-not-at-top

  def parse(data: bytes) -> None:
    for path in ("/generate", "/other"):
      value, _ = image_addresses.examine(data, path)
      json.dumps(value)

  return Target(parse, (errors.ApiError,), _requests())


def _item() -> Target:
  from agent_services.rollout_buffer import items  # pylint: disable=g-import-not-at-top

  return Target(items.read, (items.ItemError,), _requests())


def _batch() -> Target:
  from training_monitor.server import errors  # pylint: disable=g-import-not-at-top
  from training_monitor.server.batches import items  # pylint: disable=g-import-not-at-top

  return Target(items.read, (errors.ApiError,), _requests())


def _chat() -> Target:
  from agent_services.serving import bodies  # pylint: disable=g-import-not-at-top
  from agent_services.serving import errors  # pylint: disable=g-import-not-at-top

  def parse(data: bytes) -> None:
    bodies.write_json(bodies.read_json(data, 1 << 20, 65536))

  return Target(parse, (errors.ApiError,), _requests())


def _events() -> Target:
  """A run's events, as the run service answers them."""
  from agent_services.runs import conversion  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.net import json_models  # pylint: disable=g-import-not-at-top

  output = {
      "id": "c", "prompt_token_ids": [1, 2, 9], "choices": [{
          "index": 0, "message": {"role": "assistant", "content": "x"},
          "token_ids": [5, 6],
          "logprobs": {"content": [{"token": "x", "logprob": -0.5},
                                   {"token": "y", "logprob": -0.5}]}}],
  }  # fmt: skip
  call = {"messages": [{"role": "user", "content": "hi"}]}
  events = [
    {"type": "model_call", "modelInput": call, "messages": call["messages"]},
    {"type": "model_output", "modelOutput": output},
  ]

  def parse(data: bytes) -> None:
    value = json_models.parse(data)
    if isinstance(value, list) and all(isinstance(v, dict) for v in value):
      turns = conversion.turns_of(value)
      conversion.sequences_of(turns, [()] * len(turns), None)

  return Target(parse, (ValueError,), [json.dumps(events).encode()])


def _in_file(name: str, read: Callable[[pathlib.Path], Any]) -> Any:
  folder = pathlib.Path(tempfile.mkdtemp(prefix="fuzz"))

  def parse(data: bytes) -> None:
    (folder / name).write_bytes(data)
    read(folder)

  return parse


def _tensors() -> Target:
  import numpy as np  # pylint: disable=g-import-not-at-top
  from safetensors import numpy as safetensors_numpy  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.policy.checkpoints import tensor_files  # pylint: disable=g-import-not-at-top

  def read(folder: pathlib.Path) -> None:
    reader = tensor_files.Reader(folder)
    for key, shape in reader.shapes.items():
      reader.read(key, tuple(slice(0, 2) for _ in shape))

  arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int8)}
  seeds = [safetensors_numpy.save(arrays)]
  return Target(_in_file("model.safetensors", read), (ValueError,), seeds)


def _recording() -> Target:
  from tunix.rl.multi_turn.environments import recordings  # pylint: disable=g-import-not-at-top

  line = {
    "version": recordings.VERSION,
    "gym": "desktop",
    "by": "p",
    "task": {"task_id": "a", "instruction": "b"},
    "actions": [{"kind": "click", "x": 1, "y": 2}],
    "targets": [None],
    "evaluation": {"score": 1.0, "success": True, "details": {}},
    "observations": [],
  }
  return Target(
    _in_file("r.jsonl", lambda f: recordings.read(f / "r.jsonl")),
    (ValueError,),
    [json.dumps(line).encode() + b"\n"],
  )


TARGETS: dict[str, Callable[[], Target]] = {
    "picture": _picture, "image": _image, "proxy": _proxy, "item": _item,
    "batch": _batch, "chat": _chat, "events": _events, "tensors": _tensors,
    "recording": _recording,
}  # fmt: skip


# --- one target, in its own process -------------------------------------------


def _fuzz(name: str, seconds: float, folder: pathlib.Path) -> None:
  """Runs until the time is over, or a rule is broken."""
  try:
    import atheris  # pylint: disable=g-import-not-at-top
  except ImportError:
    _mutate(name, seconds, folder)
    return
  import tunix.rl  # pylint: disable=g-import-not-at-top,unused-import  # noqa: F401

  # Not google-tunix, whose package this one's modules are in.
  with atheris.instrument_imports(include=["tunix.rl.multi_turn"]):
    target = TARGETS[name]()
  corpus = folder / f"{name}.corpus"
  corpus.mkdir(parents=True, exist_ok=True)
  for number, seed in enumerate(target.seeds):
    (corpus / f"seed{number}").write_bytes(seed)

  def once(data: bytes) -> None:
    try:
      target.parse(data)
    except target.errors:
      pass

  atheris.Setup(
      [sys.argv[0], str(corpus), f"-max_total_time={int(seconds)}",
       f"-rss_limit_mb={MEMORY_MIB}", f"-timeout={INPUT_S}",
       f"-artifact_prefix={folder}/{name}.", "-max_len=65536",
       "-print_final_stats=1"],
      once,
  )  # fmt: skip
  atheris.Fuzz()


def _mutate(name: str, seconds: float, folder: pathlib.Path) -> None:
  target = TARGETS[name]()
  rng = random.Random(name)
  until, count = time.monotonic() + seconds, 0

  def late(*_: Any) -> None:
    raise RuntimeError(f"an input took more than {INPUT_S} s")

  signal.signal(signal.SIGALRM, late)
  while time.monotonic() < until:
    data = bytearray(rng.choice(target.seeds))
    for _ in range(rng.randrange(1, 6)):
      at = rng.randrange(len(data) + 1)
      kind = rng.randrange(4)
      if kind == 0 and data:
        data[at % len(data)] = rng.randrange(256)
      elif kind == 1:
        del data[at : at + rng.randrange(1, 40)]
      elif kind == 2:
        data[at:at] = rng.choice(_ENDINGS)
      else:
        data[at:at] = data[at : at + rng.randrange(1, 400)]
    signal.alarm(INPUT_S)
    try:
      target.parse(bytes(data))
    except target.errors:
      pass
    except BaseException:
      (folder / f"{name}.crash").write_bytes(data)
      raise
    finally:
      signal.alarm(0)
    count += 1
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
  print(f"stat::number_of_executed_units: {count}")
  print(f"stat::peak_rss_mb: {peak}")
  if peak > MEMORY_MIB:
    raise MemoryError(f"{peak} MiB")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("targets", nargs="*", default=list(TARGETS))
  parser.add_argument("--seconds", type=float, default=60.0)
  parser.add_argument("--folder", type=pathlib.Path)
  parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  folder = args.folder or pathlib.Path(tempfile.mkdtemp(prefix="fuzz-bytes-"))
  folder.mkdir(parents=True, exist_ok=True)
  if args.child:
    _fuzz(args.targets[0], args.seconds, folder)
    return 0
  good = True
  for name in args.targets:
    child = subprocess.run(
        [sys.executable, __file__, name, "--child", "--seconds",
         str(args.seconds), "--folder", str(folder)],
        capture_output=True, text=True, errors="replace",
        timeout=args.seconds + 300,
    )  # fmt: skip
    output = child.stdout + child.stderr
    figures = [
      line.partition("::")[2]
      for line in output.splitlines()
      if line.startswith(("stat::number", "stat::peak"))
    ]
    print(
      f"{name:10} {'held' if not child.returncode else 'FAILED'}  "
      + ", ".join(figures),
      flush=True,
    )
    if child.returncode:
      good = False
      print(output[-3000:])
  print(f"inputs in {folder}")
  return 0 if good else 1


if __name__ == "__main__":
  sys.exit(main())
