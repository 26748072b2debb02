"""Compiles an engine's programs once a process, not once an engine."""

_COMPILED = {}


def warm_up(engine, *of):
  """`engine.warm_up()`, less what an engine of the same `of` compiled then.

  Args:
    engine: new.
    of: settings and facts that decide on the programs, e.g. the policy's name
      and the engine's settings; compared by `repr`.
  """
  programs = engine._programs._compiled  # pylint: disable=protected-access
  programs.update(_COMPILED.get(repr(of), {}))
  engine.warm_up()
  _COMPILED[repr(of)] = dict(programs)
