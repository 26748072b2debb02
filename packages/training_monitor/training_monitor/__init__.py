"""The Training Monitor: records runs in a database and shows them.

`schema` defines the database, `server` takes batches and answers queries,
`dashboard` renders pages, `app` serves both and `serve` is the command;
`client` sends a training's events. `core` is the framework's ground floor
(event types, HTTP hardening, settings), a link in the repository and a copy in
the wheel, so that nothing of the framework is imported. No JAX here.
"""
