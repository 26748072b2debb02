"""Plays environments of the package verifiers; see `environment`."""
