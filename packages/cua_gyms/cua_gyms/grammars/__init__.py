"""GUI grammars of published models and benchmarks, found by entry points."""
