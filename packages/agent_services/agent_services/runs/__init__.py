"""Runs that a service elsewhere plays: its client, their events and tokens."""
