"""A real vLLM, started by the command that its launcher prints.

It lies in an environment of its own (`make vllm`), without which its tests are
skipped. Around it a policy of the published architecture with random weights
and heads 64 wide, as our exporter writes it.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from flax import nnx
import httpx
import numpy as np
import rollout_references
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import reference
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint

BIN = pathlib.Path(__file__).parents[2] / ".venv-vllm" / "bin"
START_S = 480
"""Of a start on a busy machine whose Python has compiled nothing yet."""
NAME = "cua"
CONTEXT = 2048
GAP = 2e-5
"""Of log-probs in float32, of two implementations in another order."""
SIZE = (64, 48)
"""Of screenshots: 12 tokens each."""


class Policy:
  """The policy with what belongs to it, and a directory of its weights."""

  def __init__(self, directory: pathlib.Path):
    config = qwen_checkpoint.small_config("qwen3_vl_tiny")
    text = dataclasses.replace(
      config.text,
      hidden_size=64,
      intermediate_size=128,
      num_hidden_layers=2,
      num_attention_heads=2,
      num_key_value_heads=1,
      head_dim=64,
      mrope_section=(12, 10, 10),
    )
    vision = dataclasses.replace(
      config.vision,
      depth=2,
      hidden_size=64,
      intermediate_size=128,
      out_hidden_size=64,
      deepstack_visual_indexes=(0,),
    )
    self.model = qwen_checkpoint.random_model(
      dataclasses.replace(config, text=text, vision=vision)
    )
    rollout_references.randomise(self.model, 0)
    # Else most tokens are certain, and any log-prob would agree.
    table = self.model.language_model.embed_tokens.weight
    table[...] = table[...] * 0.6
    self.directory = checkpoint.save_policy(directory, self.model)
    _, self.processor, tokenizer = checkpoint.load_policy(directory)
    self.banned = self.model.config.banned_token_ids
    self.images = images_lib.ImageStore()
    self.renderer = qwen.QwenRenderer(
      tokenizer, self.processor.num_image_tokens
    )

  def prompt(self, *seeds, text="look", size=SIZE):
    """A rendered message with an image of noise for each seed."""
    parts = [
      {"type": "image", "image": self.images.put(noise(seed, size))}
      for seed in seeds
    ]
    parts.append({"type": "text", "text": text})
    return self.renderer.render([{"role": "user", "content": parts}])

  def sampling(self, **options):
    return policy_client.SamplingParams(
      **{
        "max_new_tokens": 16,
        "seed": 5,
        "stop_token_ids": self.renderer.stop_token_ids,
        **options,
      }
    )

  def client(self, server, **options):
    return openai_client.OpenAIClient(
      f"{server.url}/v1",
      NAME,
      self.images,
      **{
        "protocol": "vllm",
        "banned_token_ids": self.banned,
        "timeout_s": 100.0,
        "resize": self.processor.resize,
        **options,
      },
    )


def noise(seed, size=SIZE):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (size[1], size[0], 3), np.uint8)


def launch_of(directory, **options) -> vllm.VllmLaunch:
  return vllm.VllmLaunch(
    str(directory),
    **{
      "served_name": NAME,
      "port": free_port(),
      "max_model_len": CONTEXT,
      "cpu_cache_gib": 1,
      **options,
    },
  )


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def _end_with_parent():
  """Lets the kernel end this process when the test's process is killed."""
  ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG.


class Server:
  """Runs a launch's command in a shell until the context ends.

  Attributes:
    url: Its address.
    log: File of its output.
  """

  name = ""
  bin = pathlib.Path()

  def __init__(self, launch, log: pathlib.Path):
    launch.check_model()
    self.launch, self.log = launch, log
    self.url = f"http://127.0.0.1:{launch.port}"

  def __enter__(self):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
      "PATH": f"{self.bin}:{os.environ['PATH']}",
      "HF_HUB_OFFLINE": "1",
      "VLLM_NO_USAGE_STATS": "1",
      # Threads that wait for one another on processors that others use.
      "OMP_NUM_THREADS": "1",
      "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with self.log.open("w") as log:
      self._process = subprocess.Popen(
        ["bash", "-c", self.launch.command()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_end_with_parent,
      )
    try:
      self._wait()
    except BaseException:
      self.__exit__()
      raise
    return self

  def _wait(self):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
      if self._process.poll() is not None:
        raise RuntimeError(f"{self.name} ended at its start: {self.tail()}")
      try:
        if httpx.get(f"{self.url}/health", timeout=5).is_success:
          return
      except httpx.HTTPError:
        pass
      time.sleep(0.5)
    raise TimeoutError(
      f"{self.name} did not start in {START_S} s: {self.tail()}"
    )

  def tail(self) -> str:
    return self.log.read_text(errors="replace")[-3000:]

  def __exit__(self, *exc_info):
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
      try:
        os.killpg(self._process.pid, sign)
        self._process.wait(patience)
      except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


class VllmServer(Server):
  """Runs the command that the launcher prints."""

  name = "vLLM"
  bin = BIN

  def engine_pid(self) -> int:
    """Of the process that runs the model."""
    group = ["pgrep", "-f", "-g", str(self._process.pid), "EngineCore"]
    return int(subprocess.check_output(group))


def metric(server, name) -> float:
  """Sum of a metric of the server over its labels."""
  # httpx.get would read certificates first, a second on a busy machine.
  with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
    text = answer.read().decode()
  values = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.M)
  assert values, name
  return sum(map(float, values))


SLOW = """
import os, pathlib, signal, sys, time

core = int(sys.argv[1])

def ticks():
  stat = pathlib.Path(f"/proc/{core}/stat").read_text().rpartition(")")[2]
  return sum(map(int, stat.split()[11:13]))

while True:
  os.kill(core, signal.SIGSTOP)
  time.sleep(0.1)
  end = ticks() + 1
  os.kill(core, signal.SIGCONT)
  while ticks() < end:
    time.sleep(0.001)
"""


@contextlib.contextmanager
def slow_engine(server):
  """Stops the engine's process for 100 ms after each 10 ms of CPU time.

  Else it samples 800 tokens before the process that answers HTTP requests
  reports the first of them, and nothing can be cut short. A process of its own
  does it: a thread would wait while this process collects garbage.
  """
  core = server.engine_pid()
  throttle = subprocess.Popen(
    [sys.executable, "-S", "-c", SLOW, str(core)], preexec_fn=_end_with_parent
  )
  try:
    yield
    assert throttle.poll() is None
  finally:
    throttle.kill()
    throttle.wait()
    os.kill(core, signal.SIGCONT)


def other(policy, seed):
  """Weights that have nothing in common with the server's."""
  model = nnx.clone(policy.model)
  rollout_references.randomise(model, seed)
  table = model.language_model.embed_tokens.weight
  table[...] = table[...] * 0.4
  return model


def scorer_of(policy, model, temperature):
  return reference.Scorer(
    model,
    policy.processor,
    policy.images,
    row_length=512,
    temperature=temperature,
  )


def gap(score, model, prompt, completion, tokens=slice(None)):
  """Largest difference of the completion's log-probs to a model's."""
  return float(np.abs(gaps(score, model, prompt, completion))[tokens].max())


def gaps(score, model, prompt, completion):
  """float[S] difference of each token's log-prob to a model's."""
  sampled = len(completion.tokens)
  mask = np.arange(len(prompt) + sampled) >= len(prompt)
  sequence = trajectory.TokenSequence(
    np.concatenate([prompt.tokens, completion.tokens]),
    mask,
    np.concatenate([np.zeros(len(prompt)), completion.logprobs]),
    np.where(mask, 0, -1),
    np.zeros(len(mask)),
    prompt.images,
  )
  (scores,) = score(model, [sequence])
  return scores - completion.logprobs


class Scores:
  """Log-probs that our policy gives a completion, by one whole pass."""

  def __init__(self, policy, length=128):
    self.policy = policy
    self._recompute = rollout_references.Recompute(
      policy.model, policy.processor, policy.images, length, images=12
    )

  def logits(self, answers):
    """float32[T, V] of each [(prompt, sampling, completion)]."""
    return self._recompute.logits(
      [
        (np.concatenate([prompt.tokens, completion.tokens]), prompt.images)
        for prompt, _, completion in answers
      ]
    )

  def check(self, answers) -> float:
    """Largest gap of [(prompt, sampling, completion)]; few tokens are ties."""
    gaps, undecided, total = [], 0, 0
    for (prompt, sampling, completion), rows in zip(
      answers, self.logits(answers)
    ):
      tokens = completion.tokens
      before = rows[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
      want = rollout_references.distribution(
        before, sampling, self.policy.banned
      )
      logprobs = want.logprobs[np.arange(len(tokens)), tokens]
      if sampling.temperature == 0:
        np.testing.assert_array_equal(tokens, want.logprobs.argmax(-1))
      undecided += int((~want.clear).sum())
      total += len(tokens)
      assert not completion.fallback and completion.logprobs.dtype == np.float32
      gaps += list(np.abs(logprobs - completion.logprobs)[want.clear])
    assert undecided < total / 5
    return max(gaps)


async def answers_of(client, prompts, sampling):
  """[(prompt, sampling, completion)], all at a time."""
  completion = await asyncio.gather(
    *(
      client.generate(prompt, sampling, session=str(i))
      for i, prompt in enumerate(prompts)
    )
  )
  return [(p, sampling, d) for p, d in zip(prompts, completion)]
