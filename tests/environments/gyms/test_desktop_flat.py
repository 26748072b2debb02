"""The desktop in arrays, and its ids in gymnasium's registry."""

import warnings

import gymnasium
from gymnasium.utils import env_checker
import numpy as np
import pytest
from tunix.rl.multi_turn.core.gui_action import GuiAction
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms.desktop import env as env_lib
from tunix.rl.multi_turn.environments.gyms.desktop import flat as flat_lib

from tunix_multi_turn import envs


def make(family="click-button", **kwargs):
  return gymnasium.make(f"TunixDesktopFlat/{family}-v0", **kwargs)


# --- the registry -------------------------------------------------------------


def test_the_light_list_of_families_is_the_gyms_own():
  assert envs.FAMILIES == desktop.families()
  for namespace in (env_lib.NAMESPACE, env_lib.FLAT_NAMESPACE):
    for family in desktop.families():
      spec = gymnasium.spec(f"{namespace}/{family}-v0")
      assert spec.kwargs == {"family": family}


def test_either_module_registers_the_same_ids(monkeypatch):
  registries = []
  for register in (envs.register, env_lib.register_envs):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", {})
    monkeypatch.setattr(
      gymnasium, "registry", gymnasium.envs.registration.registry
    )
    register()
    register()
    registry = dict(gymnasium.registry)
    kinds = {i: type(gymnasium.make(i)) for i in list(registry)[:1]}
    registries.append((set(registry), kinds))
  (light, light_ids), (own, also) = registries
  assert {i for i in light if i.startswith("TunixDesktop")} == own
  assert len(own) == 2 * len(desktop.families()) and light_ids == also


def test_made_by_the_light_module_and_id():
  env = gymnasium.make("tunix_multi_turn.envs:TunixDesktop/open-icon-v0")
  assert type(env.unwrapped) is env_lib.DesktopEnv
  assert envs.DesktopEnv is env_lib.DesktopEnv
  assert envs.FlatDesktop is desktop.FlatDesktop is flat_lib.FlatDesktop
  with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
    envs.Nothing  # pylint: disable=pointless-statement  # noqa: B018


# --- the flat spaces ----------------------------------------------------------


@pytest.mark.peer("gymnasium")
@pytest.mark.parametrize("clicks", (False, True))
def test_passes_gymnasiums_own_checker(clicks):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    # The checker warns about every wrapper.
    warnings.filterwarnings("ignore", ".*different from the unwrapped version")
    env_checker.check_env(
      flat_lib.make_flat(clicks=clicks), skip_render_check=True
    )


@pytest.mark.peer("sb3")
@pytest.mark.parametrize(
  "family, clicks",
  [("click-button", True), ("enter-text", False), ("set-slider", False)],
)
def test_passes_the_checker_of_stable_baselines3(family, clicks):
  pytest.importorskip("stable_baselines3")
  from stable_baselines3.common import env_checker as sb3  # pylint: disable=g-import-not-at-top

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    sb3.check_env(make(family, clicks=clicks))


@pytest.mark.peer("sb3")
def test_an_algorithm_of_stable_baselines3_trains_on_it():
  sb3 = pytest.importorskip("stable_baselines3")
  policy = sb3.PPO(
    "CnnPolicy",
    make(columns=8, rows=6),
    n_steps=8,
    batch_size=8,
    n_epochs=1,
    policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}},
    device="cpu",
  )
  policy.learn(16)
  assert policy.num_timesteps == 16


@pytest.mark.parametrize("family", desktop.families())
@pytest.mark.parametrize("size", ((128, 96), (224, 160)))
def test_oracle_solves_through_the_flat_space(family, size):
  env = make(family, split="eval", width=size[0], height=size[1])
  encode = env.get_wrapper_attr("encode")
  for seed in range(8):
    observation, info = env.reset(seed=seed)
    ended = cut = False
    while not (ended or cut):
      action = encode(desktop.oracle_action(env.unwrapped.gym))
      assert env.action_space.contains(action)
      observation, reward, ended, cut, info = env.step(action)
      assert env.observation_space.contains(observation)
    assert (ended, cut, reward, info["success"]) == (True, False, 1.0, True)


def test_a_click_alone_solves_a_button():
  env = make(clicks=True)
  env.reset(seed=0)
  action = desktop.oracle_action(env.unwrapped.gym)
  cell = int(action.y / 96 * 48) * 64 + int(action.x / 128 * 64)
  assert env.step(cell)[1:4] == (1.0, True, False)


def test_the_instruction_is_written_below_the_screenshot():
  flat, plain = make("enter-text"), gymnasium.make("TunixDesktop/enter-text-v0")
  bands = {}
  for seed in range(6):
    observation, info = flat.reset(seed=seed)
    own, _ = plain.reset(seed=seed)
    assert np.array_equal(observation[:96], own["screenshot"])
    assert observation.shape == (96 + 4 * 9 + 4, 128, 3)
    bands.setdefault(info["instruction"], observation[96:].tobytes())
    assert bands[info["instruction"]] == observation[96:].tobytes()
    # It stays while the screen changes.
    after, *_ = flat.step(np.zeros(6, np.int64))
    assert np.array_equal(after[96:], observation[96:])
  assert len(set(bands.values())) == len(bands) > 1


@pytest.mark.slow
def test_every_instruction_fits():
  for family in desktop.families():
    for difficulty in (0, 1, 2):
      tasks = desktop.DesktopTasks((family,), difficulty)
      env = make(family, difficulty=difficulty)
      written = env.get_wrapper_attr("_written")
      for index in range(40):
        written(tasks.train_task(family, index).instruction)


@pytest.mark.parametrize("columns, rows", ((64, 48), (7, 5), (1, 1)))
def test_every_action_of_the_space_is_one_of_the_desktops(columns, rows):
  env = make("login-form", columns=columns, rows=rows)
  env.reset(seed=0)
  own = env.unwrapped.action_space
  space, decode = env.action_space, env.get_wrapper_attr("decode")
  space.seed(0)
  ends = [np.zeros_like(space.nvec), space.nvec - 1]
  for action in [*ends, *(space.sample() for _ in range(300))]:
    assert own.contains(decode(action)), action
  flat_click = make(clicks=True, columns=columns, rows=rows)
  decode = flat_click.get_wrapper_attr("decode")
  for cell in (0, columns * rows - 1):
    assert own.contains(decode(cell))


def test_a_spec_makes_the_same_environment_again():
  env = make("open-icon", columns=16, rows=12, width=160)
  again = gymnasium.make(env.spec)
  assert again.action_space == env.action_space
  assert again.observation_space == env.observation_space
  for one, two in zip(env.reset(seed=3), again.reset(seed=3)):
    assert (
      np.array_equal(one, two) if isinstance(one, np.ndarray) else (one == two)
    )
  many = gymnasium.make_vec("TunixDesktopFlat/open-icon-v0", num_envs=2)
  observation, _ = many.reset(seed=[3, 4])
  assert observation.shape == (2, 136, 128, 3)


@pytest.mark.parametrize(
  "kwargs, message",
  (
    ({"columns": 0}, "columns=0"),
    ({"rows": -1}, "rows=-1"),
    ({"lines": 0}, "lines=0"),
    ({"family": "nope"}, "nope"),
  ),
)
def test_wrong_settings_are_named(kwargs, message):
  with pytest.raises(ValueError, match=message):
    flat_lib.make_flat(**kwargs)


def test_what_cannot_be_is_refused_with_the_remedy():
  env = flat_lib.make_flat("login-form", lines=1)
  with pytest.raises(ValueError, match="lines=1: the instruction .* more"):
    env.reset(seed=0)
  env = flat_lib.make_flat("enter-text")
  env.reset(seed=0)
  with pytest.raises(ValueError, match="no text 'elsewhere'"):
    env.encode(GuiAction("type", text="elsewhere"))
  with pytest.raises(ValueError, match="is not in MultiDiscrete"):
    env.step(np.full(6, 10_000))
  with pytest.raises(ValueError, match="clicks=False"):
    flat_lib.make_flat(clicks=True).encode(GuiAction("click", x=1, y=1))
  with pytest.raises(TypeError, match="wraps a DesktopEnv, got Frozen"):
    flat_lib.FlatDesktop(gymnasium.make("FrozenLake-v1"))
