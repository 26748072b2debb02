"""MiniWoB++ task families, keys, and the errors that need no browser."""

import json

from cua_gyms import miniwob
from cua_gyms.chromium import devtools
from cua_gyms.chromium import keys
from cua_gyms.miniwob import __main__ as command
from cua_gyms.miniwob import catalogue
from cua_gyms.miniwob import miniwob_tasks
import pytest
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.parser.tool_parser import keys as parser_keys

try:
  miniwob_tasks.pages_directory()
  WITHOUT_PAGES = ""
except miniwob_tasks.PagesNotFound as error:
  WITHOUT_PAGES = str(error)
needs_pages = pytest.mark.skipif(bool(WITHOUT_PAGES), reason=WITHOUT_PAGES)


@needs_pages
class TestTasks:
  def test_all_families_of_the_package_are_offered(self):
    assert len(miniwob.families()) == 130
    assert {"click-test", "book-flight", "use-slider"} <= set(
      miniwob.MiniWobTasks().families()
    )

  def test_a_task_says_what_it_is(self):
    task = miniwob.MiniWobTasks().task("click-dialog", 7)
    assert task.task_id == "miniwob/click-dialog/7"
    assert (task.family, task.seed, task.instruction) == ("click-dialog", 7, "")
    assert task.max_turns == 2
    assert miniwob.MiniWobTasks().task("email-inbox", 1).max_turns == 10

  def test_the_split_is_part_of_the_id(self):
    tasks = miniwob.MiniWobTasks(data_mode="test")
    task = tasks.task("click-test-transfer", 7)
    assert task.task_id == "miniwob/click-test-transfer/7/test"
    assert task.params == {"data_mode": "test"}

  def test_train_and_eval_seeds_never_overlap(self):
    tasks = miniwob.MiniWobTasks()
    for index in range(300):
      train = tasks.train_task("click-test", index, seed=index % 7)
      held_out = tasks.eval_task("click-test", index, seed=index % 7)
      assert 0 <= train.seed < miniwob_tasks.EVAL_SEEDS_FROM <= held_out.seed
      assert held_out.seed < 2 * miniwob_tasks.EVAL_SEEDS_FROM
    held_out = {tasks.eval_task("click-test", i).seed for i in range(300)}
    assert len(held_out) == 300
    once, again = (tasks.train_task("click-test", 3) for _ in range(2))
    assert once == again

  def test_an_unknown_family_gets_the_nearest_name(self):
    with pytest.raises(ValueError, match="did you mean 'click-dialog'"):
      miniwob.MiniWobTasks().task("click-dialogue", 0)
    with pytest.raises(ValueError, match="did you mean 'enter-text'"):
      miniwob.MiniWobTasks(families=["entertext"])

  @pytest.mark.parametrize("seed", [-1, 2 * miniwob_tasks.EVAL_SEEDS_FROM])
  def test_seeds_have_a_range(self, seed):
    with pytest.raises(ValueError, match="seed must be in"):
      miniwob.MiniWobTasks().task("click-test", seed)

  def test_settings_are_checked(self):
    with pytest.raises(ValueError, match="did you mean 'data_mode'"):
      gyms.get("miniwob").make_tasks((), {"datamode": "test"})
    with pytest.raises(ValueError, match="data_mode must be one of"):
      miniwob.MiniWobTasks(data_mode="eval")
    task_set = gyms.get("miniwob").make_tasks(["click-test"])
    assert task_set.families() == ("click-test",)

  def test_pictures_that_a_page_makes_later_are_known(self):
    names = {
      url.rsplit("/", 1)[1] for url in miniwob_tasks.images("tic-tac-toe")
    }
    assert names == {"x.png", "o.png"}
    assert miniwob_tasks.images("click-test") == ()


def test_missing_pages_say_what_to_install(monkeypatch, tmp_path):
  monkeypatch.setenv(miniwob_tasks.PAGES_VARIABLE, str(tmp_path))
  with pytest.raises(
    miniwob_tasks.PagesNotFound, match="has no click-test.html"
  ):
    miniwob.families()
  monkeypatch.delenv(miniwob_tasks.PAGES_VARIABLE)
  monkeypatch.setattr(miniwob_tasks.importlib.util, "find_spec", lambda _: None)
  miniwob_tasks._pages_in.cache_clear()
  try:
    with pytest.raises(miniwob_tasks.PagesNotFound, match="pip install"):
      miniwob.families()
  finally:
    miniwob_tasks._pages_in.cache_clear()


def test_a_missing_browser_is_one_line_that_says_what_to_do(monkeypatch):
  monkeypatch.setattr(devtools, "EXECUTABLES", ("chromium-none", "/opt/none"))
  monkeypatch.delenv(devtools.EXECUTABLE_VARIABLE, raising=False)
  with pytest.raises(devtools.BrowserNotFound, match="make browser") as caught:
    devtools.find_browser()
  assert "\n" not in str(caught.value)
  monkeypatch.setenv(devtools.EXECUTABLE_VARIABLE, "/opt/none")
  with pytest.raises(devtools.BrowserNotFound, match="names '/opt/none'"):
    devtools.find_browser()


class TestGymSettings:
  def test_bad_values_are_refused(self):
    with pytest.raises(ValueError, match="reward must be"):
      miniwob.MiniWobGym(reward="half")
    with pytest.raises(ValueError, match="needs time_limit=True"):
      miniwob.MiniWobGym(reward="timed")
    with pytest.raises(ValueError, match="seconds_per_action must be in"):
      miniwob.MiniWobGym(seconds_per_action=-1)
    with pytest.raises(ValueError, match=r"width=159 must be in \[160, 4096\]"):
      miniwob.MiniWobGym(width=159)
    with pytest.raises(ValueError, match="height=300 must be .* at scale=2"):
      miniwob.MiniWobGym(height=300, scale=2)
    with pytest.raises(ValueError, match="scale=9 must be in"):
      miniwob.MiniWobGym(scale=9)
    with pytest.raises(ValueError, match="'rewards'; did you mean 'reward'"):
      gyms.make("miniwob", rewards="raw")


@needs_pages
class TestList:
  def test_every_family_has_a_limit_and_words(self):
    for name in miniwob.families():
      info = miniwob_tasks.about(name)
      assert name in catalogue.MAX_TURNS and info.words, name
      assert 2 <= info.max_turns <= 30
      assert info.limit_s in (7, 10, 15, 20, 30)
    assert set(catalogue.MAX_TURNS) == set(miniwob.families())
    assert miniwob_tasks.about("email-inbox").limit_s == 30
    assert miniwob_tasks.about("click-test").limit_s == 10

  def test_a_person_can_read_it(self, capsys):
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines[1:131]]
    assert shown == list(miniwob.families())
    (line,) = [one for one in lines if one.startswith("click-button ")]
    assert line.split(maxsplit=6)[1:6] == ["3", "10", "s", "oracle", "quick"]
    assert max(map(len, lines)) < 160

  def test_a_program_can_read_it(self, capsys):
    assert command.main(["list", "email-inbox-r", "--json"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["family"] == "email-inbox-reply" and row["max_turns"] == 10

  def test_no_such_task(self, capsys):
    assert command.main(["list", "click-tset"]) == 2
    assert "did you mean 'click-test'" in capsys.readouterr().err


class TestKeys:
  def test_typing_gives_each_character_its_key(self):
    events = keys.text_events("aB \n")
    assert [e[1]["type"] for e in events] == ["keyDown", "keyUp"] * 4
    down = [e[1] for e in events[::2]]
    assert [e["text"] for e in down] == ["a", "B", " ", "\r"]
    assert [e["code"] for e in down] == ["KeyA", "KeyB", "Space", "Enter"]
    assert [e["modifiers"] for e in down] == [0, 8, 0, 0]

  def test_every_printable_ascii_character_has_a_key(self):
    text = "".join(map(chr, range(32, 127)))
    events = keys.text_events(text)
    assert {method for method, _ in events} == {"Input.dispatchKeyEvent"}
    assert "".join(e[1]["text"] for e in events[::2]) == text

  def test_what_no_key_makes_is_inserted(self):
    assert keys.text_events("é") == [("Input.insertText", {"text": "é"})]
    long = "x" * (keys.MAX_TYPED + 1)
    assert keys.text_events(long) == [("Input.insertText", {"text": long})]

  def test_new_lines_and_tabs_of_a_long_text_are_keys_too(self):
    long = "x" * keys.MAX_TYPED
    events = keys.text_events(f"{long}\r\nenter\thome\n")
    assert [e[1].get("key") or e[1]["text"] for e in events] == [
        long, "Enter", "Enter", "enter", "Tab", "Tab", "home", "Enter", "Enter",
    ]  # fmt: skip

  def test_a_shortcut_is_not_input_and_is_released_in_reverse(self):
    down, up = keys.key_events(("Control", "Shift", "a"))
    assert [e[1]["key"] for e in down] == ["Control", "Shift", "A"]
    assert [e[1]["modifiers"] for e in down] == [2, 10, 10]
    assert all("text" not in e[1] for e in down)
    assert [e[1]["key"] for e in up] == ["A", "Shift", "Control"]
    assert up[-1][1]["modifiers"] == 0

  def test_shift_changes_the_character(self):
    down, _ = keys.key_events(("shift", "1"))
    assert down[1][1]["text"] == "!"

  @pytest.mark.parametrize(
      "name, canonical",
      [
          ("Return", "enter"), ("ArrowDown", "down"), ("Page_Up", "pageup"),
          ("CTRL", "ctrl"), ("cmd", "meta"), ("F5", "f5"), (" ", "space"),
          ("A", "A"), ("pgdn", "pagedown"), ("leftarrow", "left"),
          ("KP_Enter", "enter"), ("back_space", "backspace"), ("plus", "+"),
          ("Super_L", "meta"), ("numpad7", "7"),
      ],
  )  # fmt: skip
  def test_names_have_dialects(self, name, canonical):
    assert keys.normalise(name) == canonical

  def test_every_key_of_a_grammar_is_a_key_here_or_refused(self):
    for name in sorted(parser_keys.NAMED_KEYS):
      try:
        assert keys.normalise(name) == name
      except keys.UnknownKey:
        assert name not in ("enter", "up", "f1", *parser_keys.MODIFIERS)

  @pytest.mark.parametrize("name", ["", " \t", "\n", "é"])
  def test_what_is_no_key_is_refused(self, name):
    with pytest.raises(keys.UnknownKey):
      keys.normalise(name)

  def test_an_unknown_key_is_named(self):
    with pytest.raises(keys.UnknownKey, match="no key 'hyper'"):
      keys.key_events(("hyper", "a"))
    with pytest.raises(keys.UnknownKey, match="cannot be held"):
      keys.modifier_bits(("a",))
