"""The Training Monitor: records runs in a database and shows them.

`schema` defines the database, `server` takes batches and answers queries,
`dashboard` renders pages, `app` serves both and `serve` is the command;
`client` sends a training's events. `settings` is the run's section `monitor`.
Imports point one way: `run` attaches the client as an observer; the collector
and the learner do not import it. No JAX here.
"""
