"""How vLLM is started: the command for computer use, and what is wrong with
another one."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from tunix.rl.multi_turn.clients import vllm

Launch = vllm.VllmLaunch


def test_the_command_is_that_of_computer_use():
  launch = Launch("/models/my policy", allowed_media_domains=("a.b", "c.d"))
  assert launch.argv() == [
      "vllm", "serve", "/models/my policy",
      "--served-model-name", "/models/my policy",
      "--host", "127.0.0.1",
      "--port", "8000",
      "--max-model-len", "262144",
      "--limit-mm-per-prompt", '{"image":64}',
      "--allowed-media-domains", "a.b", "c.d",
      "--logprobs-mode", "processed_logprobs",
      "--generation-config", "vllm",
      "--dtype", "auto",
      "--tensor-parallel-size", "1",
  ]  # pyformat: disable
  assert vllm.check_command(launch.command()) == []


def test_json_and_blanks_survive_the_shell(tmp_path):
  key = tmp_path / "a key"
  key.write_text("it's secret\n")
  launch = Launch(
      "/models/it's $HOME", api_key_file=str(key), extra=("--seed", "1")
  )
  show = tmp_path / "vllm"
  show.write_text(
      f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps("
      "[sys.argv[1:], {k: os.environ.get(k) for k in ('VLLM_API_KEY',"
      " 'VLLM_SERVER_DEV_MODE', 'VLLM_MEDIA_URL_ALLOW_REDIRECTS')}]))\n"
  )
  show.chmod(0o755)
  said = subprocess.run(
      ["bash", "-c", launch.command()],
      env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/wrong"},
      capture_output=True,
      check=True,
      timeout=60,
  )
  words, environment = json.loads(said.stdout)
  assert words == launch.argv()[1:]
  assert environment == launch.environment()
  assert environment["VLLM_API_KEY"] == "it's secret"
  # Whoever reads the command does not read the key.
  assert "secret" not in launch.command()


def test_settings_come_from_the_environment():
  launch = Launch.from_environment({
      "TUNIX_VLLM_MODEL": "/m",
      "TUNIX_VLLM_MAX_MODEL_LEN": "32768",
      "TUNIX_VLLM_IMAGES": "8",
      "TUNIX_VLLM_ALLOWED_MEDIA_DOMAINS": "a.example,b.example c.example",
      "TUNIX_VLLM_RELOAD_WEIGHTS": "false",
      "PATH": "/bin",
  })
  assert launch.max_model_len == 32768 and launch.images == 8
  words = launch.argv()
  at = words.index("--allowed-media-domains")
  assert words[at + 1 : at + 4] == ["a.example", "b.example", "c.example"]
  assert '{"image":8}' in words
  assert "VLLM_SERVER_DEV_MODE" not in launch.environment()
  given = Launch.from_environment(
      {"TUNIX_VLLM_IMAGES": "8"}, model="/m", images=2
  )
  assert given.images == 2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": ""}, "names no policy"),
        ({"model": "--trust-remote-code"}, "read as an option"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"images": -1}, "images=-1"),
        ({"images": True}, "images=True"),
        ({"port": 70000}, "port=70000"),
        ({"logprobs_mode": "raw_logprobs"}, "use processed_logprobs"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"allowed_media_domains": "a.b"}, "must be a list"),
        ({"allowed_media_domains": ("a.b,c.d",)}, "comma"),
        ({"allowed_media_domains": ("*.b",)}, "exactly"),
        ({"allowed_media_domains": ("https://a.b",)}, "without scheme"),
        ({"host": "0.0.0.0"}, "api_key_file"),
        ({"host": "0.0.0.0", "api_key_file": "k"}, "reload_weights=False"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(change, words):
  with pytest.raises(ValueError, match=words.replace("*", r"\*")):
    Launch(**({"model": "/m"} | change))


@pytest.mark.parametrize(
    "variables, words",
    [
        ({}, "TUNIX_VLLM_MODEL"),
        ({"TUNIX_VLLM_MODEL": "m", "TUNIX_VLLM_IMAGE": "3"}, "VLLM_IMAGES"),
        ({"TUNIX_VLLM_MODEL": "m", "TUNIX_VLLM_PORT": "x"}, "an integer"),
    ],
)
def test_a_variable_that_cannot_be_is_refused(variables, words):
  with pytest.raises(ValueError, match=words):
    Launch.from_environment(variables)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("--max-model-len 262144", "", "--max-model-len is missing"),
        ("--max-model-len 262144", "--max-model-len long", "no number"),
        ("'{\"image\":64}'", '{"image":64}', "limits no images"),
        ("--limit-mm-per-prompt '{\"image\":64}'", "", "is missing"),
        ("--allowed-media-domains a.b c.d", "", "from any host"),
        ("a.b c.d", "a.b,c.d", "separate hosts by spaces"),
        ("a.b c.d", "'*.b'", "list each host"),
        ("--logprobs-mode processed_logprobs", "", "log-probs are not those"),
        ("processed_logprobs", "raw_logprobs", "raw_logprobs"),
        ("--generation-config vllm", "", "--generation-config"),
        ("VLLM_MEDIA_URL_ALLOW_REDIRECTS=0", "", "redirect"),
        ("'{\"image\":64}'", "'{\"image\":64}", "quotes"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(old, new, words):
  good = Launch("/m", allowed_media_domains=("a.b", "c.d")).command()
  assert old in good
  problems = vllm.check_command(good.replace(old, new))
  assert len(problems) == 1, problems
  assert words in problems[0]
  # Spelt otherwise, and just as right.
  assert not vllm.check_command(
      good.replace("--max-model-len 262144", "--max_model_len=262144")
  )


def test_the_model_is_asked_whether_it_can(tmp_path):
  def config(**found):
    (tmp_path / "config.json").write_text(json.dumps(found))

  launch = Launch(str(tmp_path))
  config(text_config={"max_position_embeddings": 32768}, vision_config={})
  with pytest.raises(ValueError, match="set max_model_len=32768"):
    launch.check_model()
  config(max_position_embeddings=262144)
  with pytest.raises(ValueError, match="images=64.*no vision_config"):
    launch.check_model()
  config(text_config={"max_position_embeddings": 262144}, vision_config={})
  launch.check_model()


def test_every_option_says_what_it_is(capsys):
  with pytest.raises(SystemExit):
    vllm.main(["--help"])
  said = capsys.readouterr().out
  told = {name.replace("_", "-") for name in vllm._HELP}
  for field in dataclasses.fields(Launch):
    option = field.name.replace("_", "-")
    assert option in told
    assert re.search(rf"\n  --{option} \S[^\n]*\n? +[a-z]", said), option


def test_the_module_prints_and_checks(capsys, monkeypatch, tmp_path):
  monkeypatch.setenv("TUNIX_VLLM_MAX_MODEL_LEN", "1024")
  assert vllm.main(["--model", "/m", "--images", "7"]) == 0
  said = capsys.readouterr().out
  assert "--max-model-len 1024" in said and '{"image":7}' in said
  assert vllm.main(["--check", said]) == 0
  assert vllm.main(["--check", "vllm serve /m"]) == 1
  assert "--limit-mm-per-prompt is missing" in capsys.readouterr().out
  assert vllm.main(["--model", "/m", "--images", "many"]) == 2
  assert "--images=many" in capsys.readouterr().err
  absent = str(tmp_path / "absent")
  assert vllm.main(["--model", "/m", "--api-key-file", absent]) == 2
  assert absent in capsys.readouterr().err
