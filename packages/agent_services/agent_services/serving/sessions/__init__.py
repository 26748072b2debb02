"""Sessions of the policy server: their turns, their caches."""
