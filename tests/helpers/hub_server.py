"""A Hugging Face Hub on loopback, as far as its client's uploads ask it.

Routes and bodies are those that huggingface_hub 1.33 sends.
"""

import base64
import contextlib
import hashlib
import json
import threading

from starlette import applications
from starlette import responses
from starlette import routing
import uvicorn

TOKEN = "hf_" + "t" * 34


class HubServer:
  """Attributes:

  repos: (kind, name) -> {path: content}.
  private: (kind, name) -> as asked for.
  messages: Messages of the commits.
  uploads: contents that came by LFS.
  refuse: status that creation answers, 0 for none.
  """

  def __init__(self):
    self.repos, self.private = {}, {}
    self.messages, self.uploads = [], {}
    self.refuse = 0
    route = routing.Route
    self._app = applications.Starlette(routes=[
        route("/api/repos/create", self._create, methods=["POST"]),
        route("/api/validate-yaml", self._validate, methods=["POST"]),
        route("/api/{kind}s/{owner}/{name}", self._info),
        route("/api/{kind}s/{owner}/{name}/tree/main", self._tree),
        route("/api/{kind}s/{owner}/{name}/preupload/main", self._preupload,
              methods=["POST"]),
        route("/api/{kind}s/{owner}/{name}/commit/main", self._commit,
              methods=["POST"]),
        route("/{path:path}.git/info/lfs/objects/batch", self._batch,
              methods=["POST"]),
        route("/lfs/{oid}", self._put, methods=["PUT"]),
    ])  # fmt: skip

  @contextlib.contextmanager
  def serving(self):
    server = uvicorn.Server(
      uvicorn.Config(self._app, port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
      assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    self.url = f"http://127.0.0.1:{port}"
    try:
      yield self
    finally:
      server.should_exit = True
      thread.join(30)

  async def _create(self, request):
    if request.headers.get("authorization") != f"Bearer {TOKEN}":
      return responses.JSONResponse({"error": "Invalid credentials"}, 401)
    if self.refuse:
      return responses.JSONResponse({"error": "not yours"}, self.refuse)
    body = await request.json()
    owner = body.get("organization") or "me"
    name, kind = f"{owner}/{body['name']}", body.get("type", "model")
    prefix = "datasets/" if kind == "dataset" else ""
    content = {"url": f"{self.url}/{prefix}{name}"}
    if (kind, name) in self.repos:
      return responses.JSONResponse(content, 409)
    self.repos[kind, name] = {}
    self.private[kind, name] = body.get("private", body.get("visibility"))
    return responses.JSONResponse(content)

  async def _validate(self, request):
    text = (await request.json())["content"]
    good = text.startswith("---\n")
    return responses.JSONResponse(
      {"errors": [] if good else [{"message": "no metadata"}]},
      200 if good else 400,
    )

  def _repo(self, request):
    at = request.path_params
    return self.repos[at["kind"], f"{at['owner']}/{at['name']}"]

  async def _info(self, request):
    at = request.path_params
    name = f"{at['owner']}/{at['name']}"
    private = self.private[at["kind"], name] in (True, "private")
    return responses.JSONResponse(
      {"_id": "1", "id": name, "private": private, "siblings": []}
    )

  async def _tree(self, request):
    return responses.JSONResponse([
        {"type": "file", "path": path, "oid": _git_oid(content),
         "size": len(content)}
        for path, content in self._repo(request).items()
    ])  # fmt: skip

  async def _preupload(self, request):
    repo, found = self._repo(request), []
    for file in (await request.json())["files"]:
      path = file["path"]
      large = path.endswith((".safetensors", ".parquet"))
      found.append(
        {
          "path": path,
          "uploadMode": "lfs" if large else "regular",
          "shouldIgnore": False,
          "oid": _git_oid(repo[path]) if path in repo else None,
        }
      )
    return responses.JSONResponse({"files": found})

  async def _batch(self, request):
    objects = []
    for item in (await request.json())["objects"]:
      if item["oid"] not in self.uploads:
        href = f"{self.url}/lfs/{item['oid']}"
        item = {**item, "actions": {"upload": {"href": href}}}
      objects.append(item)
    return responses.JSONResponse({"transfer": "basic", "objects": objects})

  async def _put(self, request):
    body, oid = await request.body(), request.path_params["oid"]
    assert hashlib.sha256(body).hexdigest() == oid
    self.uploads[oid] = body
    return responses.Response()

  async def _commit(self, request):
    repo = self._repo(request)
    for line in (await request.body()).splitlines():
      item = json.loads(line)
      value = item["value"]
      if item["key"] == "header":
        self.messages.append(value["summary"])
      elif item["key"] == "file":
        repo[value["path"]] = base64.b64decode(value["content"])
      elif item["key"] == "deletedFile":
        del repo[value["path"]]
      elif item["key"] == "lfsFile":
        repo[value["path"]] = self.uploads[value["oid"]]
    at = request.path_params
    prefix = "datasets/" if at["kind"] == "dataset" else ""
    url = f"{self.url}/{prefix}{at['owner']}/{at['name']}/commit/{'0' * 40}"
    return responses.JSONResponse(
      {"commitUrl": url, "commitOid": "0" * 40, "success": True}
    )


def _git_oid(content):
  return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
