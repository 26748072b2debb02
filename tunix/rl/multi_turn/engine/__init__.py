"""The in-process rollout engine: many episodes, one policy, one batch.

`RolloutEngine` imports JAX and is loaded on first use.
"""

__all__ = ["EngineError", "RolloutEngine"]


def __getattr__(name):
  if name in __all__:
    from tunix.rl.multi_turn.engine import engine  # pylint: disable=g-import-not-at-top

    return getattr(engine, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
