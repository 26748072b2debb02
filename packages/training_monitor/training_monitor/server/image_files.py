"""Serves screenshots and videos as files.

GET /api/v1/screenshots/{sha256}, …/thumbnail, /api/screenshots/{sha256}
GET /api/rollouts/{name}/screenshot/{obs}, /api/videos
"""

from __future__ import annotations

import pathlib
from typing import Callable

from starlette import concurrency
from starlette import requests as starlette_requests
from starlette import responses

from training_monitor.server import access as access_lib
from training_monitor.server import errors
from training_monitor.server import http_io
from training_monitor.server import queries as queries_lib
from training_monitor.server import query as query_lib
from training_monitor.server import screenshots
from training_monitor.server import thumbnails as thumbnails_lib

_IMMUTABLE = {"cache-control": "private, max-age=31536000, immutable"}
_VIDEOS = {".mp4": "video/mp4", ".webm": "video/webm"}

Request = starlette_requests.Request
Response = responses.Response


class Images:
  """Handlers; `routes` adds `observed` and `video`."""

  def __init__(
    self,
    queries: queries_lib.Queries,
    files: screenshots.ScreenshotFiles,
    thumbnails: thumbnails_lib.Thumbnails,
    videos: pathlib.Path,
  ):
    self._queries = queries
    self._files = files
    self._thumbnails = thumbnails
    self._videos = videos

  def add_routes(self, add: Callable[..., None]) -> None:
    """Adds them by `add(method, path, name, summary, handler, ...)`."""
    sha = "/api/v1/screenshots/{sha256}"
    for path, name in (
      (sha, "screenshot"),
      ("/api/screenshots/{sha256}", "screenshot_0"),
    ):
      add("GET", path, name, "A screenshot.", self._screenshot, answer="image")
    add(
      "GET",
      f"{sha}/thumbnail",
      "thumbnail",
      "A screenshot, small and lossy.",
      self._thumbnail,
      answer="image",
    )

  async def _thumbnail(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del who
    sha = screenshots.check_sha(request.path_params["sha256"])
    row = await concurrency.run_in_threadpool(self._queries.screenshot, sha)
    if row is None:
      raise errors.ApiError(404, f"no screenshot {sha}")
    source = self._files.path(sha, row["media_type"])
    if max(row["width"], row["height"]) <= thumbnails_lib.SIZE:
      return await self._image(sha)
    try:
      path = await concurrency.run_in_threadpool(
        self._thumbnails.of, sha, source
      )
    except FileNotFoundError:
      raise errors.ApiError(
        404, f"the file of screenshot {sha} is gone"
      ) from None
    except OSError as error:
      raise errors.ApiError(
        503, f"the thumbnail cannot be made: {error}", retry_after_s=5
      ) from None
    return responses.FileResponse(
      path, media_type="image/webp", headers=_IMMUTABLE
    )

  async def _screenshot(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del who
    return await self._image(
      screenshots.check_sha(request.path_params["sha256"])
    )

  async def _image(self, sha: str) -> Response:
    row = await concurrency.run_in_threadpool(self._queries.screenshot, sha)
    if row is None:
      raise errors.ApiError(404, f"no screenshot {sha}")
    if not await concurrency.run_in_threadpool(
      self._files.path(sha, row["media_type"]).exists
    ):
      raise errors.ApiError(
        404, f"the file of screenshot {sha} is gone; run monitor doctor"
      )
    return responses.FileResponse(
      self._files.path(sha, row["media_type"]),
      media_type=row["media_type"],
      headers=_IMMUTABLE,
    )

  async def observed(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    row = await concurrency.run_in_threadpool(
      self._queries.observation,
      who.project,
      http_io.name_of(request),
      http_io.id_of(request, "obs"),
    )
    uri = row["screenshot_uri"] or ""
    sha = uri.removeprefix("sha256:")
    if not screenshots.SHA.fullmatch(sha):
      raise errors.ApiError(
        404, f"this observation's screenshot is not here but at {uri!r}"
      )
    return await self._image(sha)

  async def video(
    self, request: Request, who: access_lib.Principal
  ) -> Response:
    del who
    name = query_lib.VideoQuery.read(request.query_params).path
    folder = self._videos.resolve()

    def find() -> pathlib.Path | None:
      try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder) and path.is_file()
      except (OSError, ValueError):
        return None
      return path if inside and path.suffix in _VIDEOS else None

    path = await concurrency.run_in_threadpool(find)
    if path is None:
      raise errors.ApiError(404, f"no video {name[:100]!r}")
    return responses.FileResponse(path, media_type=_VIDEOS[path.suffix])
