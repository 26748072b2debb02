"""The `gymnasium` gym: any `gymnasium.Env` that renders `rgb_array`."""
