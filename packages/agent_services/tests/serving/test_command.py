"""The command that serves a policy."""

import re
import signal
import socket
import subprocess
import sys

from agent_services.serving import __main__ as command
import openai
import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
  "argv, words",
  [
    (["no_such_policy"], ["no_such_policy", "tiny_vl"]),
    (["tiny_vl", "--host", "0.0.0.0"], ["--host=0.0.0.0", "--token-file"]),
    (["tiny_vl", "--screen", "big"], ["--screen=big", "1280x720"]),
    (
      ["tiny_vl", "--limit-mm-per-prompt", "64"],
      ["--limit-mm-per-prompt=64", '{"image": 64}'],
    ),
    (["tiny_vl", "--allowed-media-domains", "*"], ["*"]),
    (["tiny_vl", "--port", "99999"], ["--port=99999"]),
    (["tiny_vl", "--features", "magic"], ["--features=magic", "grammar"]),
    (["tiny_vl", "--slots", "0"], ["--slots=0: ", "equal to 1"]),
    (
      ["tiny_vl", "--cache-tokens", "10"],
      ["--cache-tokens=10 is below --max-model-len=2048", "raise"],
    ),
    (["tiny_vl", "--image-memory", "0"], ["--image-memory=0", "MiB"]),
    (["tiny_vl", "--weights", "int8"], ["int8", "TinyVL"]),
    (["tiny_vl", "--tool-parser", "telepathy"], ["telepathy", "qwen"]),
    (["tiny_vl", "--token-file", "/nonexistent"], ["/nonexistent"]),
  ],
)
def test_a_wrong_argument_is_named_with_what_to_do(
  argv, words, capsys, monkeypatch
):
  monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
  if "--screen" not in argv:
    argv = [*argv, "--screen=32x32"]
  if "--port" not in argv:
    argv = [*argv, "--port=0"]  # Another program may have the default one.
  assert command.main(argv) == 2
  stderr = capsys.readouterr().err
  assert stderr.startswith("error: ") and "Traceback" not in stderr
  for word in words:
    assert word in stderr


def test_a_screen_that_the_policy_cannot_take_is_named_as_the_option(capsys):
  argv = ["tiny_vl", "--port", "0", "--screen", "1280x720"]
  assert command.main(argv) == 2
  stderr = capsys.readouterr().err
  assert stderr.startswith("error: --screen=1280x720: ")
  assert "3600 cells" in stderr and "--screen 640x480" in stderr
  assert "gym" not in stderr and "max_cells" not in stderr


def test_all_wrong_arguments_are_named_at_once(capsys):
  argv = [
      "no_such_policy", "--screen", "big", "--slots", "0", "--seed", "-1",
      "--max-tokens", "0", "--tool-parser", "telepathy", "--host", "0.0.0.0",
      "--allowed-media-domains", "*", "--session-timeout", "nan",
      "--port", "99999", "--image-dir", __file__, "--features", "magic",
  ]  # fmt: skip
  assert command.main(argv) == 2
  lines = capsys.readouterr().err.splitlines()
  assert all(line.startswith("error: ") for line in lines)
  for word in (
      "no_such_policy", "--screen=big", "--seed=-1", "--max-tokens=0",
      "telepathy", "--token-file", "--allowed-media-domains", "99999",
      "--session-timeout=nan", "--image-dir", "--features=magic",
  ):  # fmt: skip
    assert any(word in line for line in lines), word


def test_what_the_policy_decides_is_checked_when_it_is_there(capsys):
  argv = ["tiny_vl", "--port", "0", "--screen", "32x32"]
  many = ["--slots", "60000", "--max-model-len", "9000000"]
  assert command.main([*argv, *many]) == 2
  assert "--slots=60000" in capsys.readouterr().err
  argv = ["tiny_vl", "--port", "0", "--screen", "640x480"]
  assert command.main([*argv, "--max-model-len", "64"]) == 2
  stderr = capsys.readouterr().err
  assert "--screen=640x480" in stderr and "--max-model-len=64" in stderr


@pytest.mark.parametrize(
  "policy, context, screen",
  [
    ("tiny_vl", 2048, (360, 640)),
    ("tiny_vl", 128, (128, 96)),
    ("tiny_vl", 8, None),
  ],
)
def test_the_default_screen_is_the_largest_usual_one_that_fits(
  policy, context, screen
):
  processor = command.checkpoint.load_policy(policy)[1]
  screens = command._usual_screens(processor, context)
  assert screens == ((screen,) if screen else ())


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys):
  with socket.socket() as bound:
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    port = bound.getsockname()[1]
    assert command.main(["tiny_vl", "--port", str(port)]) == 2
  assert f"--port={port}" in capsys.readouterr().err


def test_the_command_serves_and_ends_when_told_to():
  with subprocess.Popen(
      [
          sys.executable, "-m", "tunix.rl.multi_turn.serving",
          "tiny_vl", "--name", "mine", "--port", "0", "--screen", "32x32",
          "--slots", "2", "--max-model-len", "128",
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
  ) as process:  # fmt: skip
    try:
      line = process.stdout.readline()
      url = re.fullmatch(r"serving mine at (http://127\S+:\d+/v1)\n", line)
      assert url, line
      client = openai.OpenAI(base_url=url[1], api_key="none", timeout=60)
      answer = client.chat.completions.create(
        model="mine",
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=4,
      )
      assert answer.usage.completion_tokens >= 1
    finally:
      process.send_signal(signal.SIGINT)
      assert process.wait(30) in (0, -signal.SIGINT, 130)
