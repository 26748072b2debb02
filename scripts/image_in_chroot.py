#!/usr/bin/env python3
"""Carries out docker/Dockerfile in a bare root file system, without an engine.

    debootstrap --variant=minbase bookworm /tmp/root
    python scripts/image_in_chroot.py /tmp/root -- doctor

Replaces FROM by a directory that holds a base system, then carries out ARG,
ENV, WORKDIR, COPY, RUN and USER one after the other, as an engine would: RUN
by `chroot` with nothing of this process's environment. Last it runs ENTRYPOINT
with the words after `--` (CMD without any), as USER in WORKDIR.

Promises: its mounts are in a namespace of their own and end with it, even when
it is killed, so that removing the root never reaches this machine's /dev. An
instruction that it does not know ends it with status 2 before anything is
changed; a RUN that fails ends it with that RUN's status. Prints the seconds of
each instruction.

Does not: make layers, isolate the network, or read a .dockerignore. Needs root
and util-linux. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
_MARK = "TUNIX_IMAGE_NAMESPACE"
KNOWN = (
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER",
    "WORKDIR",
)  # fmt: skip
RUN_S = 3600
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Refused(ValueError):
  """A Dockerfile, or an argument, that cannot be carried out."""


@dataclasses.dataclass(frozen=True)
class Step:
  """One instruction; `text` is what follows its word, lines joined."""

  word: str
  text: str
  line: int


def parse(text: str) -> list[Step]:
  """The instructions of a Dockerfile.

  Raises:
    Refused: one that is not known here, or a form of it that is not.
  """
  steps: list[Step] = []
  joined, first = "", 0
  for number, line in enumerate(text.splitlines(), 1):
    if not line.strip() or line.lstrip().startswith("#"):
      continue
    first = first or number
    if line.rstrip().endswith("\\"):
      joined += line.rstrip()[:-1] + " "
      continue
    word, _, arguments = (joined + line).strip().partition(" ")
    word, arguments = word.upper(), arguments.strip()
    if word not in KNOWN:
      raise Refused(f"line {first}: {word} is none of {', '.join(KNOWN)}")
    if arguments.startswith("--"):
      option = arguments.split()[0]
      raise Refused(f"line {first}: {word} with {option}: no options")
    steps.append(Step(word, arguments, first))
    joined, first = "", 0
  if joined:
    raise Refused(f"line {first}: the file ends within an instruction")
  return steps


def expand(text: str, values: Mapping[str, str]) -> str:
  """`$name`, `${name}`, `${name:-other}` and `${name:+other}` replaced."""

  def one(match: re.Match[str]) -> str:
    value = values.get(match[1] or match[4], "")
    if match[2] == "-":
      return value or match[3]
    if match[2] == "+":
      return match[3] if value else ""
    return value

  return _VARIABLE.sub(one, text)


def pairs(text: str) -> dict[str, str]:
  """`a=b c="d e"` of an ENV or ARG."""
  values = {}
  for name, quoted, plain in re.findall(r'(\w+)=(?:"([^"]*)"|(\S*))', text):
    values[name] = quoted or plain
  return values


@dataclasses.dataclass
class Image:
  """A root file system on its way to be the image.

  Attributes:
    root: Root directory of the file system.
    context: Directory that COPY reads.
    build_arguments: Values for ARG instructions, by name.
    outside: Environment of RUN that is not the image's, e.g. of pip.
  """

  root: pathlib.Path
  context: pathlib.Path
  build_arguments: Mapping[str, str]
  outside: Mapping[str, str]
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  arguments: dict[str, str] = dataclasses.field(default_factory=dict)
  directory: str = "/"
  user: str = "root"
  entrypoint: list[str] = dataclasses.field(default_factory=list)
  command: list[str] = dataclasses.field(default_factory=list)

  def carry_out(self, step: Step) -> None:
    """Raises subprocess.CalledProcessError where a RUN fails."""
    values = {**self.arguments, **self.environment}
    match step.word:
      case "ARG":
        name, _, default = step.text.partition("=")
        value = default.strip('"')
        self.arguments[name] = self.build_arguments.get(
          name, expand(value, values)
        )
      case "ENV":
        self.environment |= {
          name: expand(value, values)
          for name, value in pairs(step.text).items()
        }
      case "WORKDIR":
        self.directory = os.path.join(self.directory, expand(step.text, values))
        self.inside(self.directory).mkdir(parents=True, exist_ok=True)
      case "USER":
        self.user = expand(step.text, values)
      case "COPY":
        *sources, target = expand(step.text, values).split()
        for source in sources:
          self.copy(source, target, many=len(sources) > 1)
      case "RUN":
        self.call(["/bin/sh", "-c", step.text], self.arguments)
      case "ENTRYPOINT":
        self.entrypoint = json.loads(step.text)
      case "CMD":
        self.command = json.loads(step.text)
      case "FROM":
        pass

  def inside(self, path: str) -> pathlib.Path:
    return self.root / path.lstrip("/")

  def copy(self, source: str, target: str, many: bool) -> None:
    origin = self.context / source
    place = self.inside(os.path.join(self.directory, target))
    if origin.is_dir():
      shutil.copytree(
        origin,
        place,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.part"),
      )
    else:
      into = many or target.endswith("/") or place.is_dir()
      (place if into else place.parent).mkdir(parents=True, exist_ok=True)
      shutil.copy2(origin, place / origin.name if into else place)

  def call(
    self, command: Sequence[str], more: Mapping[str, str] | None = None
  ) -> None:
    environment = {
      "PATH": _PATH,
      "HOME": "/root",
      **(more or {}),
      **self.environment,
      **self.outside,
    }
    if self.user != "root":
      environment["HOME"] = f"/home/{self.user}"
    subprocess.run(
        ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env",
         "-C", self.directory, *command],
        env=environment, check=True, timeout=RUN_S,
    )  # fmt: skip


@contextlib.contextmanager
def bound(root: pathlib.Path, paths: Sequence[str]) -> Iterator[None]:
  """Directories of this machine within the root."""
  with contextlib.ExitStack() as stack:
    for path in paths:
      place = root / path.lstrip("/")
      place.mkdir(parents=True, exist_ok=True)
      subprocess.run(["mount", "--bind", path, str(place)], check=True)
      stack.callback(subprocess.run, ["umount", str(place)], check=True)
    yield


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  cut = argv.index("--") if "--" in argv else len(argv)
  parser = argparse.ArgumentParser(
    usage="%(prog)s [options] ROOT [-- WORD ...]",
    description=(__doc__ or "").partition("\n")[0],
  )
  add = parser.add_argument
  add("root", type=pathlib.Path, help="directory with a base system")
  add("--file", type=pathlib.Path, default=ROOT / "docker" / "Dockerfile")
  add("--build-arg", action="append", default=[], metavar="NAME=VALUE")
  add(
    "--env",
    action="append",
    default=[],
    metavar="NAME=VALUE",
    help="of every command, as a registry's certificate for pip",
  )
  add(
    "--bind",
    action="append",
    default=[],
    metavar="DIR",
    help="of this machine, at the same place within",
  )
  args = parser.parse_args(argv[:cut])
  try:
    steps = parse(args.file.read_text(encoding="utf-8"))
    if not (args.root / "bin" / "sh").exists():
      raise Refused(f"{args.root} holds no base system: no bin/sh in it")
  except (OSError, Refused) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  if not os.environ.get(_MARK):
    os.environ[_MARK] = "1"
    os.execvp("unshare", [
        "unshare", "--mount", "--propagation", "private", sys.executable,
        os.path.abspath(__file__), *argv,
    ])  # fmt: skip
  named = lambda texts: dict(text.partition("=")[::2] for text in texts)
  image = Image(args.root, ROOT, named(args.build_arg), named(args.env))
  # Host names resolve inside as they do outside.
  shutil.copy("/etc/resolv.conf", args.root / "etc" / "resolv.conf")
  begun = time.monotonic()
  try:
    with bound(args.root, ["/dev", "/proc", *args.bind]):
      for step in steps:
        start = time.monotonic()
        image.carry_out(step)
        took = time.monotonic() - start
        print(f"{took:7.1f} s  {step.word} {step.text[:60]}", flush=True)
      words = [*image.entrypoint, *(argv[cut + 1 :] or image.command)]
      start = time.monotonic()
      image.call(words)
      print(f"{time.monotonic() - start:7.1f} s  {' '.join(words)[:60]}")
  except subprocess.CalledProcessError as error:
    print(f"error: status {error.returncode}: {error.cmd}", file=sys.stderr)
    return error.returncode
  print(f"{time.monotonic() - begun:7.1f} s  in all")
  return 0


if __name__ == "__main__":
  sys.exit(main())
