"""No password or token of a run is written anywhere.

Credentials in a setting are refused, masked in the message; those in the
variables and files that hold them instead leave no trace in the run directory,
the trackers' files, the monitor's database, or what the run prints.
"""

import logging
import typing

import gym_servers
import monitor_server
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.net import credentials

SECRET = "pLanTed-s3cret"
LEAVES = loader.leaves(train_config.TrainConfig)


def _takes_text(key):
  members = typing.get_args(LEAVES[key].type) or (LEAVES[key].type,)
  return (
    any(
      kind is str or typing.get_origin(kind) is dict or kind is Ellipsis
      for kind in members
    )
    or typing.get_origin(LEAVES[key].type) is dict
  )


@pytest.mark.parametrize(
  "address",
  [
    f"http://me:{SECRET}@host:5000",
    f"https://{SECRET}@host/path",
    f"postgresql+psycopg://me:{SECRET}@host/db",
    f"https://host/?a=1&access_token={SECRET}",
    f"https://host/#api_key={SECRET}",
  ],
)
def test_every_setting_of_text_refuses_an_address_with_credentials(address):
  keys = [key for key in LEAVES if _takes_text(key)]
  assert len(keys) > 25
  for key in keys:
    field = f"{key}.inner" if key.endswith("options") else key
    if key == "policy.config" or key == "environment.reward":
      continue  # Of them, names and numbers: other checks come first.
    with pytest.raises(config_lib.ConfigError) as refused:
      config_lib.load_config([f"{field}='{address}'"])
    assert SECRET not in str(refused.value), key
    assert key in str(refused.value), refused.value


@pytest.mark.parametrize(
  "key, place",
  [
    ("monitor.url", "$TUNIX_MONITOR_TOKEN"),
    ("external.url", "$VLLM_API_KEY"),
    ("tracking.mlflow", "$MLFLOW_TRACKING_PASSWORD"),
    ("gym.options.base_url", "$TUNIX_GYM_TOKEN"),
  ],
)
def test_the_message_names_the_place_for_it(key, place):
  with pytest.raises(config_lib.ConfigError) as refused:
    config_lib.load_config([f"{key}=http://me:{SECRET}@host"])
  assert place in str(refused.value) and "***" in str(refused.value)


@pytest.mark.parametrize(
  "name", ["token", "api_key", "apiKey", "password", "client_secret"]
)
@pytest.mark.parametrize("section", ["gym", "agent", "environment"])
def test_an_option_that_is_called_a_secret_is_refused(section, name):
  with pytest.raises(config_lib.ConfigError) as refused:
    config_lib.load_config([f"{section}.options.{name}={SECRET}"])
  assert SECRET not in str(refused.value)
  assert f"{section}.options.{name}=***" in str(refused.value)


def test_what_is_no_secret_is_accepted():
  for text in (
    "tracking.mlflow=http://host:5000",
    "monitor.url=http://host:8765",
    "tracking.mlflow=postgresql://me@host/db",
    "tracking.project=a@b",
    "run.dir=runs@home",
    "tracking.mlflow=sqlite:///a.db",
  ):
    config_lib.load_config([text])
  plain = {
    "max_tokens": "3",
    "tokenizer": "x",
    "token_file": "f",
    "author": "me",
    "url": "https://h/?page=2",
    "key_variable": "v",
  }
  assert not list(credentials.of_settings(plain))


@pytest.mark.parametrize(
  "text, shown",
  [
    (f"at http://a:{SECRET}@h/x?q=1, b", "at http://***@h/x?q=1, b"),
    (f"https://h/?token={SECRET}&a=1", "https://h/?token=***&a=1"),
    (f"a p@{SECRET}:x@h", f"a p@{SECRET}:x@h"),
    (f"mysql://a:p@{SECRET}@h/x", "mysql://***@h/x"),
    ("postgresql://user@host/name", "postgresql://user@host/name"),
  ],
)
def test_a_text_is_masked(text, shown):
  assert credentials.masked(text) == shown


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_leaves_no_trace_of_its_tokens(
  tmp_path, monkeypatch, capfd, caplog
):
  """A guarded gym server and monitor, three trackers, and a failed request."""
  caplog.set_level(logging.DEBUG)
  for variable in (
    "TUNIX_MONITOR_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "VLLM_API_KEY",
    "MLFLOW_TRACKING_TOKEN",
    "WANDB_API_KEY",
    "GBOX_API_KEY",
    "OSWORLD_CLIENT_PASSWORD",
    "TUNIX_ROLLOUT_TOKEN",
  ):
    monkeypatch.setenv(variable, SECRET)
  monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
  token_file = tmp_path / "outside" / "token"
  token_file.parent.mkdir()
  token_file.write_text(SECRET)
  runs = tmp_path / "runs"
  with (
    monitor_server.sqlite_server(tmp_path / "monitor", token=SECRET) as site,
    gym_servers.serving(
      gym_servers.desktop(families=("click-color", "enter-text")), token=SECRET
    ) as (url, _),
  ):
    status = small_runs.run_train(
        runs, small_runs.NANO, "warm_start.source=none", "name=a", "steps=1",
        "gym=genv", f"gym.options.base_url={url}",
        f"gym.options.token_file={token_file}", f"monitor.url={site.url}",
        "tracking.tensorboard=true", "tracking.wandb=offline",
        f"tracking.mlflow=sqlite:///{tmp_path}/mlflow.db",
        "eval.modes=[sampled]", "eval.episodes_per_task=1",
    )  # fmt: skip
    assert status == 0
    assert site.rows("training")
  assert (
    train.main(
      [f"run.dir={runs}", "name=b", f"monitor.url=http://me:{SECRET}@127.0.0.1"]
    )
    == 2
  )
  printed = capfd.readouterr()
  for text in (printed.out, printed.err, caplog.text):
    assert SECRET not in text
  files = [p for p in tmp_path.rglob("*") if p.is_file() and p != token_file]
  assert any(p.suffix == ".db" for p in files) and len(files) > 10
  for file in files:
    assert SECRET.encode() not in file.read_bytes(), file
