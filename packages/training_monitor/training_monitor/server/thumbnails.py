"""Makes small copies of screenshots on first use, and keeps them.

A page shows hundreds of screens at once; whole, they would be a hundred
megabytes. A copy is lossy, for display only, and may be deleted at any time.
"""

from __future__ import annotations

import os
import pathlib
import threading

from PIL import Image

FOLDER = "thumbnails"
"""Where they are, beside the screenshots."""
SIZE = 320
"""Pixels of the longer side; smaller screenshots are their own thumbnails."""


class Thumbnails:
  """A folder of them."""

  def __init__(self, folder: str | pathlib.Path):
    self._folder = pathlib.Path(folder)
    # Two at a time: a page of them must not take all of a machine.
    self._turn = threading.BoundedSemaphore(2)

  def path(self, sha: str) -> pathlib.Path:
    """Returns the file of a thumbnail, made or not."""
    return self._folder / sha[:2] / f"{sha}.webp"

  def of(self, sha: str, source: pathlib.Path) -> pathlib.Path:
    """Returns the file of a thumbnail, WebP. Blocks while it is made.

    Args:
      sha: Hash of the screenshot, checked.
      source: its file.

    Raises:
      OSError: it cannot be read or written.
    """
    path = self.path(sha)
    if path.exists():
      return path
    with self._turn:
      if path.exists():
        return path
      with Image.open(source) as image:
        small = image.convert("RGB")
      small.thumbnail((SIZE, SIZE), Image.Resampling.BOX)
      path.parent.mkdir(parents=True, exist_ok=True)
      part = path.with_name(f"{sha}.{os.getpid()}.{threading.get_ident()}.part")
      try:
        small.save(part, "WEBP", quality=82, method=2)
        part.replace(path)
      finally:
        part.unlink(missing_ok=True)
    return path
