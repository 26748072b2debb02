"""The Training Monitor: what a run did, in a database that people can read.

`schema` is the database, `server` takes batches and answers questions about
them, `dashboard` is pages over it, `app` serves both and `serve` is the
command; `client` is what a training process holds. The arrows point one way:
`train` attaches the client as an observer; the collector and the learner know
nothing of it. No JAX here.
"""
