"""Shared vocabulary of every room: trajectories, images, actions, events.

The ground floor: imports numpy and the standard library, no other room and
no JAX."""
