"""Endpoints of the policy server, one a module."""
