"""Unmodified agent packages, each asking the server in its own way.

They live in environments of their own, made by `make agent-clients` and `make
browser-use`: what they ask for does not go together with what this project
pins. Skipped where there is none.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess

from agent_services.serving import answers
from agent_services.serving import app as app_lib
from agent_services.serving import grammars as grammars_lib
from agent_services.serving import media
from agent_services.serving import prompts
from agent_services.serving import service as service_lib
from agent_services.serving.sessions import session_store
import httpx
import numpy as np
import pytest
from tunix.rl.multi_turn.clients import scripted_client
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

_ROOT = pathlib.Path(__file__).parents[4]
_HELPERS = pathlib.Path(__file__).parents[1] / "helpers"
_WEB_SITES = _HELPERS.parents[2] / "cua_gyms" / "tests" / "helpers"
pytestmark = [
  pytest.mark.slow,  # Their imports take seconds each.
  pytest.mark.timeout(300),
]
CALL = '<tool_call>\n{"name": "click", "arguments": {"x": 3}}\n</tool_call>'
ANSWER = CALL.replace("click", "Answer").replace('"x": 3', '"text": "Done."')
# The first that the request's grammar allows.
BEFORE = (CALL, '{"x": 3}')
AFTER = ("Done.", '{"text": "Done."}', ANSWER)


def browser_actions(page):
  """An answer to browser-use, which describes a page."""
  index = {tag: int(i) for i, tag in re.findall(r"\[(\d+)\]<(\w+)", page)[::-1]}
  if "greeted?name" in page:
    actions = [
      {"done": {"text": "Done.", "success": True, "files_to_display": []}}
    ]
  else:
    actions = [
      {"input": {"index": index["input"], "text": "3", "clear": True}},
      {"click": {"index": index["button"]}},
    ]
  names = ("thinking", "evaluation_previous_goal", "memory", "next_goal")
  return json.dumps(
    {
      **dict.fromkeys(names, ""),
      "current_plan_item": None,
      "plan_update": None,
      "action": actions,
    }
  )


class Script(scripted_client.ScriptedClient):
  """Streams its tokens, and follows stop conditions, as an engine does.

  A token that a request's grammar does not allow is an error.

  Attributes:
    sampled: tokens of all completions.
  """

  grammar = None
  sampled = 0

  def allows(self, tokens):
    """Whether the tokens are a whole text of the request's grammar."""
    if self.grammar is None:
      return True
    return self.grammar._matcher.validate_tokens(tokens) == len(tokens)

  async def generate(
    self,
    prompt,
    sampling,
    *,
    session,
    on_tokens=None,
    stop_when=None,
    grammar=None,
  ):
    self.grammar = grammar
    answer = await super().generate(prompt, sampling, session=session)
    length = len(answer.tokens)
    for token in answer.tokens[:-1] if grammar is not None else ():
      grammar.advance(int(token))
    if stop_when is not None:
      lengths = (stop_when(answer.tokens[: i + 1]) for i in range(length))
      length = next((k for k in lengths if k is not None), length)
    self.sampled += length
    for start in range(0, length if on_tokens else 0, 3):
      on_tokens(answer.tokens[start : min(start + 3, length)])
    return dataclasses.replace(
      answer,
      tokens=answer.tokens[:length],
      logprobs=answer.logprobs[:length],
      versions=answer.versions[:length],
    )


@pytest.fixture(scope="module", name="served")
def _served():
  """A server's URL, and its policy, which calls first, and ends once it has
  clicked."""
  _, processor, tokenizer = checkpoint.create_policy("nano", screen=(32, 32))
  renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)

  def answer(prompt, session):
    del session
    text = tokenizer.decode(prompt.tokens)
    texts = AFTER if "clicked" in text else BEFORE
    if "</browser_state>" in text:
      texts = (browser_actions(text[text.rindex("<browser_state>") :]),)
    ways = [[*renderer.encode(t), renderer.end_of_turn_id] for t in texts]
    return next(tokens for tokens in ways if script.allows(tokens))

  script = Script(answer)
  decoder = answers.TokenDecoder(
    renderer.decode, tokenizer, renderer.end_of_turn_id
  )
  service = service_lib.Service(
    prompts.ServedPolicy(
      name="nano",
      client=script,
      renderer=renderer,
      parser=tool_parser.make_tool_parser("qwen"),
      decoder=decoder,
      grammars=grammars_lib.Grammars(
        decoder.bytes,
        renderer.encode,
        tokenizer.get_vocab_size(),
        decoder.special,
        renderer.stop_token_ids,
      ),
      context_length=1 << 16,
    ),
    session_store.SessionStore(renderer),
    media.MediaLoader(images_lib.ImageStore()),
  )
  with http_server.LoopbackServer(app_lib.OpenAIApp(service).asgi) as server:
    yield server.url, script


# Whether each turn extends the one before it, so that an episode is one
# sequence: the others write their history anew.
PACKAGES = {
  "openai": True,
  "anthropic": True,
  "litellm": True,
  "agents": True,
  "smolagents": False,
  "pydantic_ai": True,
  "langchain": True,
  "instructor": False,
  "dspy": False,
  "autogen": True,
  "ai_sdk": True,
  "browser_use": False,
}


def python_of(package):
  """The interpreter that has the package; skips where there is none."""
  target = "browser-use" if package == "browser_use" else "agent-clients"
  if target == "browser-use" and not any(
    map(shutil.which, ("chromium-headless-shell", "chromium"))
  ):
    pytest.skip("no Chromium: make browser")
  variable = target.upper().replace("-", "_") + "_PYTHON"
  python = os.environ.get(variable, _ROOT / f".venv-{target}/bin/python")
  if not pathlib.Path(python).exists():
    pytest.skip(f"no package {package}: make {target}")
  return python


@pytest.mark.parametrize(
  "package",
  [pytest.param(name, marks=pytest.mark.peer(name)) for name in PACKAGES],
)
def test_two_turns_with_a_tool_and_an_image(served, package):
  url, policy = served
  python = python_of(package)
  before = policy.sampled
  # Strict tools have a grammar, whose distribution is not the session's own.
  session = httpx.post(
    f"{url}/rl/start_session", json={"other_sampling": "train"}
  ).json()
  ran = subprocess.run(
      [python, _HELPERS / "agent_clients.py", package,
       f"{url}/v1", session["api_key"]],
      capture_output=True, text=True, timeout=240,
      env={**os.environ, "PYTHONPATH": str(_WEB_SITES)},
  )  # fmt: skip
  assert ran.returncode == 0, ran.stderr[-3000:]
  ways = json.loads(ran.stdout.splitlines()[-1])
  assert len(ways) >= 2
  for way, (arguments, final) in ways.items():
    assert arguments == {"x": 3} and final == "Done.", way
  exported = httpx.post(
    f"{url}/export_trajectories",
    json={"session_id": session["session_id"], "style": "concat"},
    timeout=60,
  ).json()["interactions"]
  assert all(one["images"] for one in exported.values())
  masks = [
    np.array(one["tensor_dict"]["loss_mask"]).ravel()
    for one in exported.values()
  ]
  # Every sampled token is trained on once.
  assert sum(mask.sum() for mask in masks) == policy.sampled - before
  if PACKAGES[package]:
    assert len(exported) == len(ways)  # An episode is one sequence.
    for mask in masks:
      runs = np.diff(np.r_[0, mask, 0]).clip(0).sum()
      assert runs == 2  # Two completions in it.
