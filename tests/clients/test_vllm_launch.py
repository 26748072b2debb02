"""The command that starts vLLM for computer use, and wrong settings."""

import dataclasses
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint


def Launch(model="/m", **options):
  return vllm.VllmLaunch(model, **{"dtype": "float32", **options})


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
      "--enable-scale-out",
      "--generation-config", "vllm",
      "--dtype", "float32",
      "--tensor-parallel-size", "1",
  ]  # fmt: skip


def test_the_documented_command_is_the_printed_one():
  text = (pathlib.Path(__file__).parents[2] / "docs/serving.md").read_text()
  (shown,) = re.findall(r"^    VLLM_MEDIA(?:.*\\\n)*.*$", text, re.M)
  launch = Launch(
    "/models/policy",
    allowed_media_domains=("shots.example.com", "cdn.example.com"),
    dtype="bfloat16",
  )
  words = shlex.split(shown.replace("\\\n", ""))
  assert words == shlex.split(launch.command())


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
  printed = subprocess.run(
    ["bash", "-c", launch.command()],
    env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/wrong"},
    capture_output=True,
    check=True,
    timeout=60,
  )
  words, environment = json.loads(printed.stdout)
  assert words == launch.argv()[1:]
  assert environment == launch.environment()
  assert environment["VLLM_API_KEY"] == "it's secret"
  # The printed command does not show the key.
  assert "secret" not in launch.command()


def test_settings_come_from_the_environment():
  launch = vllm.VllmLaunch.from_environment(
    {
      "TUNIX_VLLM_MODEL": "/m",
      "TUNIX_VLLM_DTYPE": "bfloat16",
      "TUNIX_VLLM_MAX_MODEL_LEN": "32768",
      "TUNIX_VLLM_IMAGES": "8",
      "TUNIX_VLLM_ALLOWED_MEDIA_DOMAINS": "a.example,b.example c.example",
      "TUNIX_VLLM_RELOAD_WEIGHTS": "false",
      "PATH": "/bin",
    }
  )
  assert launch.max_model_len == 32768 and launch.images == 8
  words = launch.argv()
  at = words.index("--allowed-media-domains")
  assert words[at + 1 : at + 4] == ["a.example", "b.example", "c.example"]
  assert '{"image":8}' in words
  assert "VLLM_SERVER_DEV_MODE" not in launch.environment()
  fewer = vllm.VllmLaunch.from_environment(
    {"TUNIX_VLLM_IMAGES": "8"}, model="/m", images=2
  )
  assert fewer.images == 2


@pytest.mark.parametrize(
  "change, words",
  [
    ({"model": ""}, "names no policy"),
    ({"model": "--trust-remote-code"}, "read as an option"),
    ({"max_model_len": 0}, "max_model_len=0"),
    ({"images": -1}, "images=-1"),
    ({"images": True}, "images=True"),
    ({"port": 70000}, "port=70000"),
    ({"dtype": "int3"}, "dtype='int3'"),
    ({"dtype": "auto"}, "dtype='auto'"),
    ({"cpu_cache_gib": -1}, "cpu_cache_gib=-1"),
    ({"lora_rank": 8, "reload_weights": False}, "reload_weights=True"),
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
    vllm.VllmLaunch.from_environment(variables)


def test_a_cpu_gets_flags_that_its_build_needs():
  launch = Launch(max_model_len=2048, cpu_cache_gib=4)
  words = launch.argv()
  # What waits fits one step whole: a prompt is never read in two.
  at = words.index("--max-num-batched-tokens")
  assert words[at : at + 4] == [
    "--max-num-batched-tokens",
    "32768",
    "--max-num-seqs",
    "16",
  ]
  assert "--enforce-eager" in words
  for name, value in (
    ("VLLM_CPU_KVCACHE_SPACE", "4"),
    ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
  ):
    assert launch.environment()[name] == value
    assert f"{name}={value} " in launch.command()
  words = Launch(max_model_len=100_000, cpu_cache_gib=4).argv()
  assert words[-4:] == [
    "--max-num-batched-tokens",
    "100000",
    "--max-num-seqs",
    "1",
  ]
  assert not any("CPU" in name for name in Launch().environment())


POLICY = {
  "model_type": "qwen3_vl",
  "dtype": "float32",
  "vision_config": {},
  "text_config": {
    "max_position_embeddings": 262144,
    "head_dim": 128,
    "hidden_size": 9,
  },
}


@pytest.mark.parametrize(
    "config, change, words",
    [
        ({}, {}, None),
        ({"text_config": {"max_position_embeddings": 32768}}, {},
         "set max_model_len=32768"),
        ({"vision_config": None}, {}, "images=64.*no vision_config"),
        ({}, {"dtype": "bfloat16"}, "rounds the float32.*dtype=float32"),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}, "rounds the bfloat16"),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, None),
        ({"text_config": {"head_dim": 40}}, {}, None),
        ({"text_config": {"head_dim": 40}}, {"cpu_cache_gib": 1},
         "heads 40 wide.*32, 48, 64"),
        ({"text_config": {"hidden_size": 160, "num_attention_heads": 4}},
         {"cpu_cache_gib": 1}, "heads 40 wide"),
        ({"text_config": {"head_dim": 64}}, {"cpu_cache_gib": 1}, None),
        ({"model_type": "tunix_tiny_vl"}, {}, "tiny_vl, which vLLM does not"),
    ],
)  # fmt: skip
def test_the_model_is_asked_whether_it_can(tmp_path, config, change, words):
  config = {k: v for k, v in (POLICY | config).items() if v is not None}
  (tmp_path / "config.json").write_text(json.dumps(config))
  launch = Launch(str(tmp_path), **change)
  if words is None:
    launch.check_model()
  else:
    with pytest.raises(ValueError, match=words):
      launch.check_model()


def test_weights_are_served_in_the_type_of_their_files(tmp_path):
  launch = Launch(str(tmp_path), dtype="")
  with pytest.raises(ValueError, match="dtype='': no config.json.*bfloat16"):
    launch.argv()
  for config in (
    {"dtype": "float16"},
    {"torch_dtype": "float16"},
    {"text_config": {"dtype": "float16"}},
  ):
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = launch.argv()
    assert words[words.index("--dtype") + 1] == "float16"


@pytest.mark.parametrize("width, served", [(64, True), (40, False)])
def test_exported_policies_are_served_as_they_are(tmp_path, width, served):
  config = qwen_checkpoint.small_config("qwen3_vl_tiny")
  half = width // 2
  text = dataclasses.replace(
    config.text, head_dim=width, mrope_section=(half - 12, 6, 6)
  )
  checkpoint.save_policy(
    tmp_path,
    qwen_checkpoint.random_model(dataclasses.replace(config, text=text)),
  )
  launch = Launch(str(tmp_path), dtype="", cpu_cache_gib=1)
  if served:
    launch.check_model()
    assert "--dtype float32" in launch.command()
  else:
    with pytest.raises(ValueError, match="heads 40 wide"):
      launch.check_model()


def test_every_option_says_what_it_is(capsys):
  with pytest.raises(SystemExit):
    vllm.main(["--help"])
  printed = capsys.readouterr().out
  options = {name.replace("_", "-") for name in vllm._HELP}
  for field in dataclasses.fields(vllm.VllmLaunch):
    option = field.name.replace("_", "-")
    assert option in options
    assert re.search(rf"\n  --{option} \S[^\n]*\n? +[a-z]", printed), option


def test_the_module_prints_the_command(capsys, monkeypatch, tmp_path):
  monkeypatch.setenv("TUNIX_VLLM_MAX_MODEL_LEN", "1024")
  assert vllm.main(["--model", "/m"]) == 2
  assert "set dtype to one of" in capsys.readouterr().err
  monkeypatch.setenv("TUNIX_VLLM_DTYPE", "bfloat16")
  assert vllm.main(["--model", "/m", "--images", "7"]) == 0
  printed = capsys.readouterr().out
  assert "--max-model-len 1024" in printed and '{"image":7}' in printed
  assert vllm.main(["--model", "/m", "--images", "many"]) == 2
  assert "--images=many" in capsys.readouterr().err
  absent = str(tmp_path / "absent")
  assert vllm.main(["--model", "/m", "--api-key-file", absent]) == 2
  assert absent in capsys.readouterr().err
