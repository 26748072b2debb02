"""One result of a check, and the table of all."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any, Literal, Sequence

Status = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
  """One result of a check.

  Attributes:
    check: its name.
    status: ok; warn: the run begins, and may go badly; fail: it cannot.
    found: State of this machine.
    fix: Advice, "" where nothing is wrong.
  """

  check: str
  status: Status
  found: str
  fix: str = ""

  def __post_init__(self):
    if (self.status == "ok") == bool(self.fix):
      raise ValueError(f"{self}: a fix is of what is not ok, and only of that")


def failed(findings: Sequence[Finding]) -> bool:
  return any(finding.status == "fail" for finding in findings)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
  """The findings for programs."""
  return {
    "ok": not failed(findings),
    "findings": [dataclasses.asdict(finding) for finding in findings],
  }


def text_of(findings: Sequence[Finding]) -> str:
  """The findings for people, 80 columns wide."""
  width = max((len(finding.check) for finding in findings), default=0)
  lines = []
  for finding in findings:
    head = f"{finding.status:4}  {finding.check.ljust(width)}  "
    lines += textwrap.wrap(
      finding.found,
      80,
      initial_indent=head,
      subsequent_indent=" " * len(head),
      break_long_words=False,
    )
    lines += textwrap.wrap(
      finding.fix,
      80,
      initial_indent=" " * len(head) + "-> ",
      subsequent_indent=" " * len(head) + "   ",
      break_long_words=False,
      break_on_hyphens=False,
    )
  counts = {s: sum(f.status == s for f in findings) for s in ("fail", "warn")}
  lines.append(
    f"{len(findings)} checks, {counts['fail']} failed,"
    f" {counts['warn']} with a warning"
  )
  return "\n".join(lines)
