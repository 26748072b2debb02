"""The six HTTP services of this package on the loopback interface, for tests
that ask the same of each."""

import contextlib

from agent_services.rollout_buffer import buffer_app
from agent_services.rollout_buffer import service as buffer_service
from agent_services.run_service import app as run_app
from agent_services.serving import image_proxy
from agent_services.serving import media
from agent_services.serving import server as serving_server
from cua_gyms.gym_server import catalog
from cua_gyms.gym_server import gym_app
from training_monitor import app as monitor_app
from training_monitor.net import http_server as monitor_http
from training_monitor.schema import database
from training_monitor.server import access
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

NAMES = ("run", "gym", "buffer", "policy", "proxy", "monitor")


@contextlib.contextmanager
def serving(folder, token):
  """{name: (url, app)} of all six; the proxy's upstream is the policy server.

  Args:
    folder: For their files.
    token: That clients must present; "" for none.
  """
  with contextlib.ExitStack() as stack:
    apps = {
      "run": run_app.App(token=token),
      "gym": gym_app.App(
        (catalog.ServedGym(gym_id="desktop", gym="desktop"),), token=token
      ),
      "buffer": buffer_app.App(
        buffer_service.Service(folder / "buffer"), token=token
      ),
      "policy": _policy(stack, token),
      "monitor": _monitor(stack, folder, token),
    }
    running = {}
    for name, app in apps.items():
      lib = monitor_http if name == "monitor" else http_server
      server = stack.enter_context(lib.LoopbackServer(app.asgi))
      running[name] = server.url, app
    stack.callback(apps["monitor"].stop_streams)
    proxy = image_proxy.ImageProxy(
      running["policy"][0],
      media.MediaLimits(),
      token=token,
      upstream_token=token,
    )
    server = stack.enter_context(http_server.LoopbackServer(proxy.asgi))
    running["proxy"] = server.url, proxy
    yield running


def _policy(stack, token):
  """A policy server that samples nothing, so no program compiles."""
  policy = checkpoint.create_policy("nano", 0, screen=(32, 32))
  model, processor, _ = policy
  store = images.ImageStore()
  engine = engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(slots=2, context_length=256),
    image_sizes=((32, 32),),
    banned_token_ids=model.config.banned_token_ids,
  )
  stack.callback(engine.close)
  return serving_server.make_app("nano", engine, policy, store, token=token)


def _monitor(stack, folder, token):
  engine = database.connect(str(folder / "monitor.db"))
  stack.callback(engine.dispose)
  database.upgrade(engine)
  return monitor_app.MonitorApp(
    engine,
    folder / "files",
    access.Access(engine, token, open_to_all=not token),
  )
