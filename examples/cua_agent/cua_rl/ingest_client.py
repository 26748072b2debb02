"""The client of the Training Monitor."""

from training_monitor.client.ingest_client import IngestClient

__all__ = ["IngestClient"]
