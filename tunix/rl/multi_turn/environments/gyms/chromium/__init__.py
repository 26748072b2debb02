"""Headless Chromium: the process, its tabs, mouse and keyboard.

Shared by the gyms with web pages (`miniwob`, `browser`).
"""
