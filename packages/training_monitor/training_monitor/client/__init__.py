"""The monitor's client: event log, uploader, spool, and `IngestClient`."""
