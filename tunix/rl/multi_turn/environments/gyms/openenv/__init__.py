"""The `openenv` gym: an environment behind an OpenEnv server."""
