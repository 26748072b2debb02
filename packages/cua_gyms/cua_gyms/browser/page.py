"""Drives one browser tab that shows a site: navigation, screenshots.

Promises:
* No window opens beside it: a window that a click opens is shown in this tab,
  one that a script opens by itself is closed.
* Dialogs are answered at once, downloads and file choosers are refused, and a
  link to a host that is not allowed does not change the page. `notes` returns
  a line for each.
* `settle` waits until an action's effects are over, up to its time limit.

Does not decide which hosts are allowed; knows no episodes.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from typing import Any, Mapping

import numpy as np
from PIL import Image

from cua_gyms.browser import hosts as hosts_lib
from cua_gyms.browser import socks
from cua_gyms.chromium import devtools
from cua_gyms.chromium import keys as keys_lib
from cua_gyms.chromium import tab as tab_lib

_NOTES = 5
_NOTE_CHARACTERS = 300
# Keys of one text that are pressed one by one, at about a millisecond each.
_MOST_AWAITED = 2 * keys_lib.MAX_TYPED
# Connections that a page keeps open, and what it sends when it is left.
_NOT_WAITED_FOR = frozenset({"WebSocket", "EventSource", "Ping", "Media"})
_TWO_FRAMES = (
  "new Promise(done => requestAnimationFrame(() =>"
  " requestAnimationFrame(() => done(document.readyState))))"
)


class PageUnreachable(devtools.DevToolsError):
  """The start page of an episode did not load."""


class WebTab(tab_lib.Tab):
  """A tab that shows a site; see the module docstring.

  Attributes:
    width, height: Size of the viewport in CSS pixels.
  """

  VIEW = (1280, 720)

  def __init__(self, *args: Any):
    """Use `open`."""
    super().__init__(*args)
    self.width, self.height = self.VIEW
    self._proxy: socks.FilteringProxy | None = None
    self._hosts = hosts_lib.Hosts()
    self._accept = True
    self._loading = False
    self._requests: dict[str, str] = {}  # request -> the document it is of
    self._changed = asyncio.Event()
    self._active_at = 0.0
    self._status: int | None = None
    self._notes: list[str] = []

  async def _prepare(
    self,
    width: int,
    height: int,
    scale: float,
    hosts: hosts_lib.Hosts,
    proxy: socks.FilteringProxy,
    accept_dialogs: bool,
  ) -> None:
    """Sets the tab up.

    Args:
      width, height: Size of the viewport in CSS pixels.
      scale: Pixels for each CSS pixel.
      hosts: Hosts that documents may be loaded from.
      proxy: Proxy that records the refused connections.
      accept_dialogs: Whether questions are answered with yes or no.
    """
    self.width, self.height = width, height
    self._hosts, self._proxy, self._accept = hosts, proxy, accept_dialogs
    for method, callback in (
      ("Network.requestWillBeSent", self._on_request),
      ("Network.responseReceived", self._on_response),
      ("Network.loadingFinished", self._on_request_end),
      ("Network.loadingFailed", self._on_request_end),
      ("Page.frameStartedLoading", self._on_loading),
      ("Page.frameStoppedLoading", self._on_loaded),
      ("Page.frameNavigated", self._on_navigated),
      ("Page.windowOpen", self._on_window),
      ("Page.downloadWillBegin", self._on_download),
      ("Page.fileChooserOpened", self._on_chooser),
      ("Fetch.requestPaused", self._on_document),
    ):
      self.listen(method, callback)
    await self.view(width, height, scale)
    await self.all(
      (
        ("Network.enable", {}),
        # Every document and redirect of one is looked at before it is loaded.
        ("Fetch.enable", {"patterns": [{"resourceType": "Document"}]}),
        ("Page.setInterceptFileChooserDialog", {"enabled": True}),
      )
    )

  # Events of the page.

  async def goto(self, url: str, limit_s: float) -> None:
    """Loads the page that an episode starts at.

    Raises:
      PageUnreachable: the page, or a host that it redirects to, does not load.
    """
    self._status, self._loading = None, True
    self._touch()
    try:
      async with asyncio.timeout(limit_s):
        result = await self.post("Page.navigate", {"url": url})
    except TimeoutError:
      raise PageUnreachable(f"{url}: no answer in {limit_s:g} s") from None
    if result.get("errorText"):
      refused = self.notes()
      raise PageUnreachable(
        f"{url}: {result['errorText']}{'; ' if refused else ''}"
        f"{'; '.join(refused)}"
      )
    self.url = url
    await self.settle(limit_s)
    if self._status is not None and self._status >= 400:
      raise PageUnreachable(f"{url}: HTTP status {self._status}")

  async def settle(self, limit_s: float, quiet_s: float = 0.05) -> bool:
    """Waits until the page is quiet: loaded, no request, two frames drawn.

    Args:
      limit_s: a page that is never quiet, e.g. by long polling, is waited for
        no longer.
      quiet_s: Seconds in which no request may begin or end.

    Returns:
      Whether it became quiet.

    Raises:
      CommandTimeout: the page's script does not come to an end.
    """
    end = time.monotonic() + limit_s
    drawn = False
    while True:
      self._raise_if_dead()
      now = time.monotonic()
      busy = self._loading or bool(self._requests)
      due = self._active_at + quiet_s
      if drawn and not busy and now >= due:
        return True
      if now >= end and drawn:
        return False
      if not drawn and (not busy or now >= end):
        drawn = await self._draw()
        continue
      self._changed.clear()
      wait = end if busy else min(due, end)
      try:
        async with asyncio.timeout(max(wait - now, 0.001)):
          await self._changed.wait()
        drawn = False  # The change is yet to be drawn.
      except TimeoutError:
        pass

  async def _draw(self) -> bool:
    try:
      await self.evaluate(_TWO_FRAMES)
    except devtools.CommandFailed:
      # The document was left meanwhile; the new one is drawn next.
      self._raise_if_dead()
      self._touch()
      await asyncio.sleep(0.01)
      return False
    return True

  async def screenshot(self) -> np.ndarray:
    """uint8[height * scale, width * scale, 3] of the viewport."""
    shot = await self.post(
      "Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True}
    )
    # A large picture takes milliseconds: in a thread, episodes run meanwhile.
    return await asyncio.to_thread(_decode, shot["data"])

  async def type_text(self, text: str) -> None:
    commands = keys_lib.text_events(text)
    if len(commands) > _MOST_AWAITED:
      await self.all(commands)
      return
    for command in commands:
      # A dialog that one opens swallows what comes before it is answered.
      await self.all((command,))

  async def back(self) -> str:
    history = await self.post("Page.getNavigationHistory")
    at = history["currentIndex"] - 1
    if at < 0 or history["entries"][at]["url"] == "about:blank":
      return "there is no page before this one"
    await self.post(
      "Page.navigateToHistoryEntry", {"entryId": history["entries"][at]["id"]}
    )
    return ""

  def notes(self) -> list[str]:
    """Events since the last call that no screenshot shows."""
    notes, self._notes = self._notes, []
    return notes

  # Events.

  def _note(self, text: str) -> None:
    if len(self._notes) < _NOTES:
      self._notes.append(text[:_NOTE_CHARACTERS])

  def _touch(self) -> None:
    self._active_at = time.monotonic()
    self._changed.set()

  def _on_request(self, params: Mapping[str, Any]) -> None:
    local = params["request"]["url"].startswith(("data:", "blob:"))
    if params.get("type") not in _NOT_WAITED_FOR and not local:
      self._requests[params["requestId"]] = params.get("loaderId", "")
      self._touch()

  def _on_response(self, params: Mapping[str, Any]) -> None:
    own = params.get("frameId") == self.target
    if own and params.get("type") == "Document":
      self._status = params["response"]["status"]

  def _on_request_end(self, params: Mapping[str, Any]) -> None:
    if self._requests.pop(params["requestId"], None) is not None:
      self._touch()

  def _on_loading(self, params: Mapping[str, Any]) -> None:
    if params["frameId"] == self.target:
      self._loading = True
      self._touch()

  def _on_loaded(self, params: Mapping[str, Any]) -> None:
    if params["frameId"] == self.target:
      self._loading = False
      self._touch()

  def _on_navigated(self, params: Mapping[str, Any]) -> None:
    frame = params["frame"]
    if frame["id"] == self.target:
      self.url = frame["url"]
      # Requests of the document that was left send no end event.
      self._requests = {
        request: document
        for request, document in self._requests.items()
        if document == frame["loaderId"]
      }
      self._touch()

  def _on_document(self, params: Mapping[str, Any]) -> None:
    url, request = params["request"]["url"], params["requestId"]
    if self._hosts.allow_url(url):
      self.send("Fetch.continueRequest", {"requestId": request})
      return
    self._note(f"blocked: {url} is on no host of this task")
    if self._proxy is not None:
      self._proxy.note(url[:_NOTE_CHARACTERS])
    # Aborted, and not blocked: the page that is shown stays.
    self.send(
      "Fetch.failRequest", {"requestId": request, "errorReason": "Aborted"}
    )

  def _on_window(self, params: Mapping[str, Any]) -> None:
    url = params["url"]
    if params.get("userGesture") and self._hosts.allow_url(url):
      self._loading = True
      self._touch()
      going = self.post("Page.navigate", {"url": url})
      going.add_done_callback(self._on_gone)
    else:
      self._note(f"closed: a window with {url or 'about:blank'}")

  def _on_gone(self, going: asyncio.Future) -> None:
    if not going.cancelled() and not going.exception():
      if going.result().get("errorText"):
        self._loading = False
        self._touch()

  def _on_download(self, params: Mapping[str, Any]) -> None:
    self._note(f"refused: download of {params.get('suggestedFilename', '')!r}")

  def _on_chooser(self, params: Mapping[str, Any]) -> None:
    del params
    self._note("closed: a file chooser; there are no files to choose from")

  def _on_dialog(self, params: Mapping[str, Any]) -> None:
    kind = params["type"]
    # A page cannot keep its user from leaving: its question is not shown.
    accept = kind in ("alert", "beforeunload") or self._accept
    answer: dict[str, Any] = {"accept": accept}
    if kind == "prompt":
      answer["promptText"] = params.get("defaultPrompt", "")
    self.send("Page.handleJavaScriptDialog", answer)
    if kind != "beforeunload":
      note = f"{kind}: {params['message']}"
      if kind != "alert":
        note += f" (answered {'yes' if accept else 'no'})"
      self._note(note)

  # The end.

  def _raise_if_dead(self) -> None:
    if self.dead is not None:
      raise self.dead

  def fail(self, error: devtools.DevToolsError) -> None:
    super().fail(error)
    self._changed.set()


def _decode(data: str) -> np.ndarray:
  picture = Image.open(io.BytesIO(base64.b64decode(data)))
  return np.array(picture.convert("RGB"))
