"""Receives clients' batches of the ingest protocol, and their screenshots.

    POST /api/ingest/batch, /api/v1/ingest/batch
    POST /api/v1/screenshots/missing, /api/v1/screenshots
    PUT  /api/v1/screenshots/{sha256}

Promises: 200 means that it is on the disk; no request is larger than its limit.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime
import hashlib
import io
import re
from typing import Any, Callable

from PIL import Image
from starlette import concurrency
from starlette import requests as starlette_requests
from starlette import responses

from training_monitor.core import json_text
from training_monitor.schema import database
from training_monitor.server import access as access_lib
from training_monitor.server import errors
from training_monitor.server import http_io
from training_monitor.server import queries as queries_lib
from training_monitor.server import screenshots
from training_monitor.server import writer as writer_lib
from training_monitor.server.batches import items

_INLINE_BYTES = 512 << 10
_MOST_DECODING = 4
_DATA_URI = re.compile(r"data:image/[\w.+-]+(;[\w=-]+)*;base64,")
_AS_PNG = ("GIF", "BMP", "TIFF")
"""Formats of an image in a data URI that is stored as a PNG."""
_OLD = datetime.timedelta(minutes=15)
"""A prune may delete an unreferenced screenshot of this age."""

Request = starlette_requests.Request
Response = responses.Response


@dataclasses.dataclass(frozen=True)
class IngestLimits:
  """Limits of a request's body, in bytes."""

  batch: int = 16 << 20
  screenshot: int = 32 << 20
  other: int = 1 << 20


class Ingest:
  """Handlers of ingest requests."""

  def __init__(
    self,
    writer: writer_lib.Writer,
    queries: queries_lib.Queries,
    files: screenshots.ScreenshotFiles,
    limits: IngestLimits,
  ):
    self._writer = writer
    self._queries = queries
    self._files = files
    self._limits = limits
    self._decoding = asyncio.Semaphore(_MOST_DECODING)

  def add_routes(self, add: Callable[..., None]) -> None:
    """Adds them by `add(method, path, name, summary, handler, ...)`."""
    v1 = "/api/v1"
    for path, name in (
      ("/api/ingest/batch", "ingest"),
      (f"{v1}/ingest/batch", "ingest_v1"),
    ):
      add(
        "POST",
        path,
        name,
        "Stores a batch; 200 means that it is durable.",
        self._ingest,
        scope="ingest",
        body="batch",
      )
    add(
      "POST",
      f"{v1}/screenshots/missing",
      "missing_screenshots",
      "The hashes among these whose screenshots are missing.",
      self._missing,
      scope="ingest",
      body="hashes",
    )
    add(
      "POST",
      f"{v1}/screenshots",
      "post_screenshots",
      "Stores screenshots.",
      self._post_screenshots,
      scope="ingest",
      body="images",
    )
    add(
      "PUT",
      f"{v1}/screenshots/{{sha256}}",
      "put_screenshot",
      "Stores a screenshot.",
      self._put_screenshot,
      scope="ingest",
      body="image",
    )

  async def _ingest(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    body = await http_io.read_body(request, self._limits.batch)
    if len(body) > _INLINE_BYTES:
      batch = await concurrency.run_in_threadpool(_read, body)
    else:
      batch = _read(body)
    del body
    if isinstance(batch, errors.ApiError):
      raise batch
    await self._keep_inline(batch)
    answer = await writer_lib.durable(self._writer.submit(batch, who.project))
    return http_io.json_answer(answer)

  async def _keep_inline(self, batch: items.IngestBatch) -> None:
    """Stores screenshots that stand in a batch as data URIs, as files.

    One that cannot be read is left out and named.
    """
    files: dict[str, bytes] = {}
    shown: list[tuple[items.Item, str]] = []
    wrong: list[tuple[items.Item, str, str]] = []
    for item in batch.items.get("obs", ()):
      uri = item.values.get("screenshot_uri")
      if uri is None or not uri.startswith("data:"):
        continue
      match = _DATA_URI.match(uri)
      try:
        encoded = re.sub(r"\s+", "", uri[match.end() :])  # type: ignore[union-attr]
        data = base64.b64decode(encoded, validate=True)
      except (AttributeError, ValueError):
        wrong.append(
          (
            item,
            uri[:40],
            "give data:image/png;base64,… of an image, a URL,"
            " or sha256:<hash> of a screenshot that was sent",
          )
        )
        continue
      async with self._decoding:
        data = await concurrency.run_in_threadpool(_as_stored, data)
      sha = hashlib.sha256(data).hexdigest()
      files[sha] = data
      shown.append((item, sha))
    refused: dict[str, str] = {}
    if files:
      _, refused = await self._store(list(files.items()))
    for item, sha in shown:
      if sha in refused:
        wrong.append((item, "data:…", refused[sha]))
      else:
        item.values["screenshot_uri"] = f"sha256:{sha}"
    faults: list[dict[str, Any]] = []
    for item, value, why in wrong:
      fault = errors.fault(f"{item.path}.screenshot_uri", value, why)
      errors.add_refused(faults, "obs", item.client_id, fault)
      del item.values["screenshot_uri"]
    batch.ignored.extend(faults)

  async def _missing(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del who
    body = await http_io.read_body(request, self._limits.other)
    try:
      shas = json_text.parse(body)["sha256"]
      if not isinstance(shas, list) or len(shas) > 1000:
        raise ValueError
    except (ValueError, TypeError, KeyError):
      raise errors.ApiError(
        400, "give {sha256: [at most 1000 hashes]}"
      ) from None
    for sha in shas:
      screenshots.check_sha(str(sha))
    missing, old = await concurrency.run_in_threadpool(self._absent, shas)
    missing += await self._gone(old)
    return http_io.json_answer({"missing": missing})

  async def _gone(self, old: list[str]) -> list[str]:
    """Returns screenshots that a prune just deleted; protects the others.

    A client that asks for a screenshot or brings it is about to refer to it:
    the screenshot counts as young again.
    """
    if not old:
      return []
    time = writer_lib.now()
    refreshed = await writer_lib.durable(
      self._writer.run(lambda t: screenshots.renew(t.sql, old, time))
    )
    return [sha for sha in old if sha not in refreshed]

  def _absent(self, shas: list[str]) -> tuple[list[str], list[str]]:
    """Returns the hashes without a row or a file, and those stored long ago."""
    stored = self._queries.known_screenshots(shas)
    before = database.now() - _OLD
    absent: list[str] = []
    old: list[str] = []
    for sha in dict.fromkeys(shas):
      row = stored.get(sha)
      if row is None or not self._files.path(sha, row.media_type).exists():
        absent.append(sha)
      elif row.created_at < before:
        old.append(sha)
    return absent, old

  async def _put_screenshot(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del who
    sha = screenshots.check_sha(request.path_params["sha256"])
    body = await http_io.read_body(request, self._limits.screenshot)
    stored, refused = await self._store([(sha, body)])
    if refused:
      raise errors.ApiError(400, refused[sha])
    return http_io.json_answer({"sha256": sha, "stored": bool(stored)})

  async def _post_screenshots(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del who
    body = await http_io.read_body(request, self._limits.screenshot)
    stored, refused = await self._store(screenshots.unpack(body))
    return http_io.json_answer({"stored": stored, "refused": refused})

  async def _store(
    self, images: list[tuple[str, bytes]]
  ) -> tuple[list[str], dict[str, str]]:
    """Returns (hashes stored now, hash -> why it is refused)."""
    try:
      # Pixels take many times a file's memory: a few images at a time.
      async with self._decoding:
        absent, old = await concurrency.run_in_threadpool(
          self._absent, [sha for sha, _ in images]
        )
        absent += await self._gone(old)
        by_sha = dict(images)
        stored, refused = await concurrency.run_in_threadpool(
          self._files.store_all, [(sha, by_sha[sha]) for sha in absent]
        )
    except OSError as error:
      raise errors.ApiError(
        503, f"the screenshot cannot be written: {error}", retry_after_s=5
      ) from None
    if stored:
      rows = [(*image, writer_lib.now()) for image in stored]
      await writer_lib.durable(
        self._writer.run(lambda t: t.sql.many(screenshots.UPSERT, rows))
      )
    return [image.sha for image in stored], refused


def _as_stored(data: bytes) -> bytes:
  """Returns an image as a PNG if screenshots are not stored in its format.

  Anything else, and what is no image, stays; `ScreenshotFiles` names its fault.
  """
  try:
    with Image.open(io.BytesIO(data), formats=_AS_PNG) as image:
      if image.width * image.height > screenshots.MAX_PIXELS:
        return data
      file = io.BytesIO()
      image.convert("RGB").save(file, "PNG", compress_level=1)
      return file.getvalue()
  except Exception:  # pylint: disable=broad-except
    # Pillow raises nearly any error for a file that is not an image.
    return data


def _read(body: bytes) -> items.IngestBatch | errors.ApiError:
  """Returns the batch, or its fault without the frames that raised it.

  A thread keeps the last error that it raised, and the error these frames with
  the body: for each thread, one body that nothing counts.
  """
  try:
    return items.read(body)
  except errors.ApiError as error:
    error.__context__ = None
    return error.with_traceback(None)
