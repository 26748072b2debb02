"""Stores the screenshots of a run's events, and encodes its turns.

`EventImages.of` gives the references of a request's screenshots, each fetched
once; `encode_turn` makes a turn's tokens with a renderer, for services that
report none.
"""

from __future__ import annotations

from typing import Any, Sequence

from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import concurrency

from agent_services import content_store
from agent_services.runs import client as client_lib
from agent_services.runs import conversion


class EventImages:
  """Stores the screenshots of events, each once."""

  def __init__(
    self,
    runs: client_lib.RunServiceClient,
    store: images_lib.ImageStore,
    loader: Any = None,
  ):
    """Args:

    runs: client of the service, whose own addresses are fetched.
    store: receives the pixels.
    loader: a `serving.media.MediaLoader` of that store, for addresses
      elsewhere; None refuses them.
    """
    self._runs = runs
    self._store = store
    self._loader = loader
    self._known: dict[str, trajectory.ImageRef] = {}

  async def of(self, turn: conversion.Turn) -> list[trajectory.ImageRef]:
    """References of a request's screenshots, in order.

    Raises:
      ValueError: one that is no image.
      RunServiceError: one that cannot be fetched.
    """
    return [await self._one(u) for u in conversion.image_urls(turn.messages)]

  async def _one(self, url: str) -> trajectory.ImageRef:
    name = url.partition("?")[0]
    if name not in self._known:
      embedded = content_store.read_data_url(url)
      if embedded is None and self._loader and not self._runs.owns(url):
        self._known[name] = await self._loader.load(url)
        return self._known[name]
      if embedded is None:
        content = await self._runs.fetch(url)
      else:
        content = embedded[0]
      pixels = await concurrency.acall(
        images_lib.decode, content, what="decoding a screenshot"
      )
      self._known[name] = self._store.put(pixels)
    return self._known[name]


def encode_turn(
  turn: conversion.Turn, images: Sequence[trajectory.ImageRef], renderer: Any
) -> tuple[Sequence[int], Sequence[int]]:
  """Returns (prompt ids, ids of the text), made by the renderer."""
  references = iter(images)
  messages = []
  for message in turn.messages:
    content = message.get("content")
    if isinstance(content, list):
      content = [
        {"type": "image", "image": next(references)}
        if part.get("type") == "image_url"
        else part
        for part in content
      ]
    messages.append({**message, "content": content})
  sampled = [*renderer.encode(turn.text).tolist(), renderer.end_of_turn_id]
  return renderer.render(messages).tokens.tolist(), sampled
