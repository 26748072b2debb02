"""Serves registered gyms over HTTP, in genv's and OpenEnv's protocols."""
