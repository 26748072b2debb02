"""Isolates programs of tools and desktops; `rooms` says how."""
