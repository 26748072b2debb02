"""Maintains a monitor's database: export, import, prune, doctor.

Each is a module here and a command of `python -m training_monitor`;
they work on the database itself, beside a server that may be running.
"""
