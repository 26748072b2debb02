"""A gym's settings that cannot be are refused, by the name of the setting."""

import pytest
from tunix.rl.multi_turn.environments import gyms

KEYS = {"type": "keys", "keys": {"a": 1}}


class Screen:
  """As much of a computer as is looked at before it is played."""

  def screenshot(self):
    pass

  def act(self, action):
    pass


REFUSED = {
  "gbox": [
    ({"kind": "windows"}, "kind='windows'"),
    ({"base_url": "gbox.ai"}, "base_url"),
    ({"call_s": 0}, "call_s"),
    ({"bx": {}}, "'bx'"),
  ],
  "android_world": [
    ({"machines": "localhost"}, "machines"),
    ({"call_s": 0}, "call_s"),
    ({"machine": "x"}, "'machine'"),
  ],
  "osworld": [
    ({}, "reset"),
    ({"reset": "no.module:f"}, "no.module"),
    ({"reset": "none", "machines": "localhost"}, "machines"),
    ({"reset": "none", "machines": ["http://a", "http://a/"]}, "twice"),
    ({"reset": "none", "call_s": 0}, "call_s"),
    ({"reset": "none", "machine": "x"}, "'machine'"),
  ],
  "computer": [
    ({}, "needs option 'computer'"),
    ({"computer": "nowhere"}, "nowhere"),
    ({"computer": "json:nothing"}, "nothing"),
    ({"computer": 5}, "computer=5"),
    ({"computer": Screen, "timeout_s": 0}, "timeout_s"),
    ({"computer": Screen, "time": 1}, "'time'"),
    ({"computer": Screen(), "options": {"a": 1}}, "options"),
  ],
  "genv": [
    ({"base_url": "localhost:5010"}, "base_url"),
    ({"gym_id": "a/b"}, "gym_id"),
    ({"timeouts": {"create": 0}}, "timeouts.create"),
    ({"timeouts": {"creat": 1}}, "creat"),
    ({"token_file": "/nowhere/x"}, "token_file"),
    ({"bas_url": "x"}, "bas_url"),
  ],
  "openenv": [
    ({"base_url": "localhost:8000"}, "base_url"),
    ({"actions": "clicks"}, "actions"),
    ({"actions": "no.module:f"}, "no.module"),
    ({"fields": {"picture": "x"}}, "picture"),
    ({"score": "best"}, "score"),
    ({"timeouts": {"step": 0}}, "timeouts.step"),
    ({"timeouts": {"stp": 1}}, "stp"),
    ({"bas_url": "x"}, "bas_url"),
  ],
  "gymnasium": [
    ({"adapter": KEYS}, "'env'"),
    ({"env": "x"}, "'adapter'"),
    ({"env": "x", "adapter": {"type": "mouse"}}, "keys, desktop"),
    ({"env": "x", "adapter": KEYS, "tineout": 3}, "tineout"),
    ({"env": "x", "adapter": KEYS, "timeout": 0}, "timeout"),
    ({"env": "x", "adapter": KEYS, "success_end": "won"}, "success_end"),
    ({"env": "x", "adapter": KEYS, "score": "sum"}, "score"),
    ({"env": "x", "adapter": KEYS, "size": [0, 5]}, "size"),
    ({"env": "x", "adapter": {"type": "keys", "keys": {}}}, "at least one"),
  ],
}


@pytest.mark.parametrize(
  "name, settings, words",
  [
    pytest.param(name, *case, id=f"{name}-{case[1]}")
    for name, cases in REFUSED.items()
    for case in cases
  ],
)
def test_settings_that_cannot_be_are_refused_by_name(name, settings, words):
  with pytest.raises(ValueError, match=words):
    gyms.make(name, **settings)
