"""An OpenAI-compatible chat server on the loopback interface, by itself.

Speaks the part of the protocol that evaluations use, over real HTTP, and
refuses as OpenAI's and vLLM's servers do.
"""

import base64
import contextlib
import http.server
import io
import json
import re
import threading

from PIL import Image

_PROBLEM = re.compile(r"What is (\d+) \+ (\d+)\?")


class ChatServer:
  """Adds two numbers, wrongly where they are in `wrong`.

  Attributes:
    key: Key that requests need, "" for none.
    sees: whether the model takes images.
    refuses: fields that the model does not take -> the error's text.
    dies_after: answers, after which connections are closed without one.
  """

  def __init__(self, *, models=("adder",), key="", sees=True, lists=True):
    self.models, self.key, self.sees, self.lists = models, key, sees, lists
    self.refuses = {}
    self.wrong = lambda a, b, seed: False
    self.dies_after = None
    self.busy = 0  # Requests to be answered with 429 first.
    self.bodies = []
    self.screens = []
    self.answered = 0
    self.lock = threading.Lock()

  def complete(self, body):
    """(status, JSON) of /chat/completions."""
    if body["model"] not in self.models:
      return 404, _error(f"The model `{body['model']}` does not exist")
    for field, text in self.refuses.items():
      if field in body:
        return 400, _error(text, param=field, code="unsupported_parameter")
    texts = []
    for message in body["messages"]:
      content = message["content"]
      for part in content if isinstance(content, list) else ():
        if part["type"] == "text":
          texts.append(part["text"])
          continue
        if not self.sees:
          return 400, _error("adder is not a multimodal model")
        data = part["image_url"]["url"].partition("base64,")[2]
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        image.load()
        self.screens.append(image.size)
      if isinstance(content, str):
        texts.append(content)
    found = _PROBLEM.findall("\n".join(texts))
    text = "OK"
    if found:
      a, b = map(int, found[-1])
      wrong = self.wrong(a, b, body.get("seed"))
      text = str(a + b + wrong)
    message = {"role": "assistant", "content": text}
    return 200, {
      "choices": [{"message": message, "finish_reason": "stop", "index": 0}],
      "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }

  def respond(self, handler):
    size = int(handler.headers.get("content-length") or 0)
    raw = handler.rfile.read(size)
    given = handler.headers.get("authorization", "")
    if self.key and given != f"Bearer {self.key}":
      return 401, _error("Incorrect API key provided")
    if handler.path == "/v1/models":
      if not self.lists:
        return 404, {"detail": "Not Found"}
      return 200, {"object": "list", "data": [{"id": m} for m in self.models]}
    with self.lock:
      body = json.loads(raw)
      self.bodies.append(body)
      if self.busy:
        self.busy -= 1
        return 429, _error("Rate limit reached")
      self.answered += 1
      if self.dies_after is not None and self.answered > self.dies_after:
        return 0, None
    return self.complete(body)


def _error(message, **more):
  return {"error": {"message": message, "type": "invalid_request", **more}}


@contextlib.contextmanager
def serving(make=ChatServer, **options):
  """(address with /v1, server) of a running server, of ChatServer's kind."""
  server = make(**options)

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self):
      status, body = server.respond(self)
      if not status:
        self.close_connection = True
        return
      raw = json.dumps(body).encode()
      self.send_response(status)
      self.send_header("content-type", "application/json")
      self.send_header("content-length", str(len(raw)))
      self.end_headers()
      self.wfile.write(raw)

    def do_GET(self):
      with contextlib.suppress(OSError):
        self._answer()

    do_POST = do_GET

    def log_message(self, *args):
      pass

  site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  site.daemon_threads = True
  threading.Thread(target=site.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{site.server_address[1]}/v1", server
  finally:
    site.shutdown()
    site.server_close()
