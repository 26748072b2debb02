"""HTTP calls and servers, deadlines, worker threads and processes.

Imports `core` and libraries of HTTP; no other room and no JAX."""
