"""The words of the database: statuses, phases, transitions, aliases.

The canonical words are the source document's. Clients' other words are
aliases: the server stores the canonical word, and the original beside it.

Does not know SQL or HTTP.
"""

from __future__ import annotations

import types
from typing import Mapping

STATUSES: Mapping[str, tuple[str, ...]] = types.MappingProxyType({
    "training": (
        "pending", "initializing", "running", "completed", "failed", "paused",
        "cancelled",
    ),
    "baseline": ("pending", "running", "completed", "failed", "cancelled"),
    "eval": ("pending", "running", "completed", "failed", "cancelled"),
    "step": (
        "pending", "rollout_collecting", "rollout_running", "training",
        "completed", "failed",
    ),
    "rollout": (
        "pending", "env_creation", "agent_init", "running", "completed",
        "failed", "cancelled",
    ),
    "environment": ("pending", "creating", "running", "terminated", "error"),
})  # fmt: skip
"""Table -> the values of its `status`. The first is the default."""

PHASES: Mapping[str, tuple[str, ...]] = types.MappingProxyType({
    "training": (
        "initialization", "rollout", "training", "evaluation", "checkpointing",
    ),
    "baseline": ("initialization", "rollout", "validation", "aggregation"),
    "eval": ("initialization", "rollout", "validation", "aggregation"),
    "step": (
        "rollout_collection", "rollout_execution", "training", "checkpointing",
    ),
    "rollout": (
        "env_creation", "agent_initialization", "task_execution", "validation",
        "cleanup",
    ),
})  # fmt: skip
"""Table -> the values of its `current_phase`."""

LONGEST_NOTE = 4000
"""Characters of a note."""

SOURCE_TYPES = ("step", "eval", "baseline")
"""Sources of a rollout: it has exactly one `<word>_id`."""

BOX_TYPES = ("android", "linux")

CHOICES: Mapping[tuple[str, str], tuple[str, ...]] = types.MappingProxyType(
  {
    ("training", "box_type"): BOX_TYPES,
    ("task", "difficulty"): ("easy", "medium", "hard"),
    ("task", "category"): ("system", "navigation", "settings", "app", "input"),
    ("task", "validation_type"): ("state", "screenshot", "api"),
    ("rollout", "source_type"): SOURCE_TYPES,
    ("obs", "obs_type"): ("screenshot", "text", "multimodal"),
    ("environment", "env_type"): BOX_TYPES,
    ("environment", "box_type"): BOX_TYPES,
    **{(table, "status"): values for table, values in STATUSES.items()},
    **{(table, "current_phase"): values for table, values in PHASES.items()},
  }
)
"""(table, column) -> the values it may have."""


def _forward(*order: str, ends: tuple[str, ...]) -> dict[str, set[str]]:
  """Maps each word of `order` to its later words and every end."""
  return {word: {*order[i + 1 :], *ends} for i, word in enumerate(order)} | {
    end: set() for end in ends
  }


def _training() -> dict[str, set[str]]:
  ends = ("completed", "failed", "cancelled")
  table = _forward("pending", "initializing", "running", "paused", ends=ends)
  table["paused"] |= {"initializing", "running"}
  # A run that ended can be taken up again (`resume=`). That begins with its
  # initialization: a late "running" does not bring a run back to life.
  table["completed"] = {"initializing"}
  table["failed"] = {"initializing"}
  return table


def _environment() -> dict[str, set[str]]:
  table = _forward(
    "pending", "creating", "running", ends=("terminated", "error")
  )
  table["error"] = {"terminated"}  # Its remains are cleared away.
  return table


_MEASURING = _forward(
  "pending", "running", ends=("completed", "failed", "cancelled")
)

TRANSITIONS: Mapping[str, Mapping[str, frozenset[str]]] = (
    types.MappingProxyType({
        name: types.MappingProxyType(
            {old: frozenset(new) for old, new in table.items()}
        )
        for name, table in {
            "training": _training(),
            "baseline": _MEASURING,
            "eval": _MEASURING,
            "step": _forward(
                "pending", "rollout_collecting", "rollout_running", "training",
                ends=("completed", "failed"),
            ),
            "rollout": _forward(
                "pending", "env_creation", "agent_init", "running",
                ends=("completed", "failed", "cancelled"),
            ),
            "environment": _environment(),
        }.items()
    })
)  # fmt: skip
"""Table -> status -> the statuses that may follow. To stay is no transition.

Words may be skipped, as a client need not send them all; none may be taken
back, and an end stays, except as the tables above say.
"""

FINISHED: Mapping[str, frozenset[str]] = types.MappingProxyType(
  {
    "training": frozenset({"completed", "failed", "cancelled"}),
    "baseline": frozenset({"completed", "failed", "cancelled"}),
    "eval": frozenset({"completed", "failed", "cancelled"}),
    "step": frozenset({"completed", "failed"}),
    "rollout": frozenset({"completed", "failed", "cancelled"}),
    "environment": frozenset({"terminated", "error"}),
  }
)

STATEFUL = tuple(STATUSES)
"""Tables with a status: those that `status_history` is about."""

_MEASURED_STATUSES = {
  "success": "completed",
  "done": "completed",
  "error": "failed",
  "canceled": "cancelled",
}
_MEASURED_PHASES = {
  "init": "initialization",
  "rollout_execution": "rollout",
  "evaluation": "validation",
}
_BOXES = {
  "mobile": "android",
  "pc": "linux",
  "desktop": "linux",
  "browser": "linux",
}
ALIASES: Mapping[tuple[str, str], Mapping[str, str]] = types.MappingProxyType({
    ("training", "status"): {
        "started": "running", "success": "completed", "succeeded": "completed",
        "done": "completed", "error": "failed", "interrupted": "paused",
        "canceled": "cancelled", "stopped": "cancelled",
    },
    ("training", "current_phase"): {
        "init": "initialization", "initializing": "initialization",
        "rollout_collection": "rollout", "rollout_execution": "rollout",
        "train": "training", "eval": "evaluation", "baseline": "evaluation",
        "checkpoint": "checkpointing",
    },
    ("step", "status"): {
        "running": "rollout_running", "rollout": "rollout_running",
        "collecting": "rollout_collecting", "train": "training",
        "success": "completed", "succeeded": "completed", "done": "completed",
        "error": "failed", "cancelled": "failed", "canceled": "failed",
    },
    ("step", "current_phase"): {
        "rollout": "rollout_execution", "collection": "rollout_collection",
        "train": "training", "checkpoint": "checkpointing",
    },
    ("baseline", "status"): _MEASURED_STATUSES,
    ("eval", "status"): _MEASURED_STATUSES,
    ("baseline", "current_phase"): _MEASURED_PHASES,
    ("eval", "current_phase"): _MEASURED_PHASES,
    ("rollout", "status"): {
        "created": "pending", "started": "running", "success": "completed",
        "succeeded": "completed", "done": "completed", "error": "failed",
        "timeout": "failed", "canceled": "cancelled",
    },
    ("rollout", "current_phase"): {
        "agent_init": "agent_initialization", "rollout": "task_execution",
        "execution": "task_execution", "running": "task_execution",
        "completed": "cleanup",
    },
    ("environment", "status"): {
        "created": "running", "started": "running", "ready": "running",
        "completed": "terminated", "stopped": "terminated",
        "failed": "error",
    },
    ("environment", "env_type"): {
        "gym": "linux", "genv": "android", "mobile": "android", "pc": "linux",
        "desktop": "linux", "browser": "linux", "web": "linux",
    },
    ("environment", "box_type"): _BOXES,
    ("training", "box_type"): _BOXES,
    ("obs", "obs_type"): {
        "screenshot_before": "screenshot", "screenshot_after": "screenshot",
        "image": "screenshot", "model_input": "multimodal", "txt": "text",
    },
    ("task", "validation_type"): {
        "genv_graphql": "api", "graphql": "api", "genv": "api",
        "image": "screenshot",
    },
    ("task", "difficulty"): {"simple": "easy", "difficult": "hard"},
})  # fmt: skip
"""(table, column) -> alias -> the word of the database."""


def canonical(table: str, column: str, value: str) -> str | None:
  """Returns the database's word for a client's; None if there is none."""
  choices = CHOICES[table, column]
  if value in choices:
    return value
  lowered = value.strip().lower()
  if lowered in choices:
    return lowered
  return ALIASES.get((table, column), {}).get(lowered)


def may_follow(table: str, old: str, new: str) -> bool:
  """Returns whether an entity of `table` may go from status `old` to `new`."""
  return old == new or new in TRANSITIONS[table][old]
