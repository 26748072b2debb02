"""Batches of clients: read, checked, applied."""
