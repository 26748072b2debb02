"""One click on a named thing: exact boxes, readings of misses, real layouts."""

import base64
import functools
import io
import json
import random
import re

import chat_server
from cua_gyms import grounding
from cua_gyms.grounding import accuracy
from cua_gyms.grounding import targets
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn import evaluate
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms.desktop import scenes
from tunix.rl.multi_turn.run.evaluations import evaluator
from tunix.rl.multi_turn.tools import screenshot


@functools.cache
def _drawn(size, seed):
  return targets.drawn(*targets.parse_size(size), "text", seed)


@pytest.mark.parametrize("kind", targets.KINDS)
@pytest.mark.parametrize("size", ("128x96", "640x480", "720x1280"))
def test_boxes_are_exact(size, kind):
  """A pixel belongs to the thing exactly where it lies in the box."""
  width, height = targets.parse_size(size)
  for seed in range(2):
    target = targets.drawn(width, height, kind, seed)
    assert target.screen == (width, height)
    again = targets.drawn(width, height, kind, seed)
    assert again.words == target.words and again.box == target.box
    np.testing.assert_array_equal(again.screenshot, target.screenshot)
    x1, y1, x2, y2 = map(int, target.box)
    scene = _scene_of(target, kind, seed)
    k = scene.k
    inside = scene.hit((x1 + x2) // 2 // k, (y1 + y2) // 2 // k)
    assert inside is not None and target.words in inside.phrases()
    for x, y in ((x1, y1), (x2 - 1, y2 - 1)):
      assert scene.hit(x // k, y // k) is inside
    for x, y in ((x1 - 1, y1), (x1, y1 - 1), (x2, y1), (x1, y2)):
      assert scene.hit(x // k, y // k) is not inside


def _scene_of(target, kind, seed):
  width, height = target.screen
  rng = random.Random(f"grounding/{kind}/{seed}/{width}x{height}")
  while True:
    scene = scenes.random_scene(width, height, rng.randrange(2**31))
    if np.array_equal(scene.screenshot(), target.screenshot):
      return scene


def test_tasks_are_500_a_screen_in_three_kinds():
  tasks = gyms.get("grounding").make_tasks().eval_tasks()
  assert set(tasks) == {"icon", "text", "widget"}
  by_size = {}
  for of_family in tasks.values():
    for task in of_family:
      by_size.setdefault(task.params["size"], []).append(task.task_id)
  assert {size: len(set(ids)) for size, ids in by_size.items()} == (
    dict.fromkeys(targets.SIZES, 500)
  )
  train = gyms.get("grounding").make_tasks().train_task("icon", 0, 0)
  assert train.task_id not in {t.task_id for t in tasks["icon"]}


# --- readings -----------------------------------------------------------------


def outcomes_of(mistake, count=40, sizes=("1280x720", "720x1280"), noise=0.0):
  """Outcomes of a policy that points at middles, spoiled by a mistake."""
  rng = np.random.default_rng(0)
  outcomes = []
  for size in sizes:
    for seed in range(count // len(sizes)):
      target = _drawn(size, seed)
      x1, y1, x2, y2 = target.box
      point = np.array([(x1 + x2) / 2, (y1 + y2) / 2])
      point = point + rng.normal(0, noise, 2)
      x, y = mistake(*point, *target.screen)
      outcomes.append({
          "valid": True, "success": target.holds(x, y),
          "details": {
              "point": [x, y], "box": list(target.box),
              "screen": list(target.screen), "kind": target.kind,
              "words": target.words, "source": target.source,
          },
      })  # fmt: skip
  return outcomes


def _other_factor(model, used):
  def spoil(x, y, width, height):
    sizes = [
      screenshot.fit_size(width, height, factor=f) for f in (model, used)
    ]
    return x * sizes[0][0] / sizes[1][0], y * sizes[0][1] / sizes[1][1]

  return spoil


MISTAKES = {
  "swapped": lambda x, y, w, h: (y / h * w, x / w * h),
  "thousandths": lambda x, y, w, h: (x / w * 1000, y / h * 1000),
  "pixels": lambda x, y, w, h: (x / 1000 * w, y / 1000 * h),
  "factor_28": _other_factor(28, 32),
  "factor_32": _other_factor(32, 28),
  "fit": lambda x, y, w, h: (x * 0.5 + 30, y * 0.5),
}


@pytest.mark.parametrize("noise", (0.0, 3.0))
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake, noise, tmp_path):
  data = accuracy.digest(outcomes_of(MISTAKES[mistake], noise=noise), tmp_path)
  assert data["readings"][0]["name"] == mistake
  assert data["readings"][0]["accuracy"] > 0.9
  assert any("so read" in line for line in data["lines"])
  if data["accuracy"] < 1:
    picture = np.asarray(Image.open(tmp_path / accuracy.PICTURE))
    assert (picture == (0, 170, 70)).all(-1).any()  # A box, on its screenshot.


def test_right_clicks_and_chance_name_no_mistake(tmp_path):
  right = accuracy.digest(outcomes_of(lambda x, y, w, h: (x, y)), tmp_path)
  assert right["accuracy"] == 1 and right["readings"] == []
  assert "pictures" not in right
  rng = np.random.default_rng(1)
  for guess in (
    lambda x, y, w, h: (rng.random() * w, rng.random() * h),
    lambda x, y, w, h: (w / 2, h / 2),
    lambda x, y, w, h: (0.0, 0.0),
  ):
    data = accuracy.digest(outcomes_of(guess), tmp_path)
    assert data["accuracy"] < 0.2 and data["readings"] == []


def test_groups_by_size_and_place():
  def details(box, screen=(1000, 1000)):
    return {"box": box, "screen": screen}

  assert accuracy.size_group(details((0, 0, 5, 5))).endswith("under 1%")
  assert accuracy.size_group(details((0, 0, 30, 30))).endswith("under 4%")
  assert accuracy.size_group(details((0, 0, 300, 90))).endswith("over")
  assert accuracy.place_group(details((0, 0, 10, 10))) == "top left"
  assert accuracy.place_group(details((400, 900, 500, 950))) == "bottom centre"


# --- files --------------------------------------------------------------------


def _save(path, size=(400, 300)):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.new("RGB", size, (20, 40, 60)).save(path)


def _v2(folder):
  _save(folder / "screenspotv2_image" / "pc_1.png")
  _save(folder / "screenspotv2_image" / "mobile_1.png", (180, 390))
  for platform, image, kind in (
    ("desktop", "pc_1.png", "text"),
    ("mobile", "mobile_1.png", "icon"),
  ):
    (folder / f"screenspot_{platform}_v2.json").write_text(json.dumps([{
        "img_filename": image, "bbox": [10, 20, 30, 40],
        "instruction": f"close the {platform}", "data_type": kind,
        "data_source": "windows",
    }]))  # fmt: skip


def _pro(folder):
  _save(folder / "images" / "vscode_macos" / "shot.png")
  (folder / "annotations").mkdir()
  (folder / "annotations" / "vscode_macos.json").write_text(json.dumps([{
      "img_filename": "vscode_macos/shot.png", "bbox": [10, 20, 40, 60],
      "instruction": "open settings", "instruction_cn": "x", "id": "v_0",
      "application": "vscode", "platform": "macos", "img_size": [400, 300],
      "ui_type": "icon", "group": "Dev",
  }]))  # fmt: skip


@pytest.mark.parametrize(
  "write, families",
  ((_v2, {"desktop": "text", "mobile": "icon"}), (_pro, {"Dev": "icon"})),
)
def test_a_local_copy_is_read(tmp_path, write, families):
  write(tmp_path)
  options = {"path": str(tmp_path), "width": 400, "height": 300}
  spec = gyms.get("grounding", "operator")
  assert not list(targets.screen_problems(options, 400, 300))
  tasks = spec.make_tasks(None, options).eval_tasks()
  assert set(tasks) == set(families)
  for family, (task,) in tasks.items():
    gym = grounding.GroundingGym(path=str(tmp_path))
    observation = gym.start(task)
    assert ("close the" in observation.instruction) != (write is _pro)
    # [x, y, width, height] in one, corners in the other: the same box here.
    assert gym.target.box == (10, 20, 40, 60)
    gym.act(grounding.oracle_action(gym))
    verdict = gym.evaluate()
    assert verdict.success and verdict.details["kind"] == families[family]
  (problem,) = targets.screen_problems(options, 200, 100)
  assert "set gym.width=400 gym.height=300" in problem


def test_wrong_files_are_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match="give the directory of a copy"):
    targets.read_files(str(tmp_path))
  _v2(tmp_path)
  (tmp_path / "screenspotv2_image" / "pc_1.png").unlink()
  with pytest.raises(ValueError, match="1 images are missing.*pc_1.png"):
    targets.read_files(str(tmp_path))
  file = tmp_path / "screenspot_web_v2.json"
  file.write_text(json.dumps([{"img_filename": "a.png"}]))
  with pytest.raises(ValueError, match="entry 0 of screenspot_web_v2.json"):
    targets.read_files(str(tmp_path))


# --- the command, with a server that points perfectly ------------------------


class PointingServer(chat_server.ChatServer):
  """Answers with the middle of the target, as its grammar writes it.

  Attributes:
    write: (x, y, width, height of the screenshot sent) -> coordinates.
  """

  def __init__(self, boxes, **options):
    super().__init__(models=("pointer",), **options)
    self._boxes = boxes
    self.write = lambda x, y, w, h: (x, y)

  def complete(self, body):
    text, size = "OK", None
    for message in body["messages"]:
      content = message["content"]
      for part in content if isinstance(content, list) else ():
        if part["type"] == "text":
          text += part["text"]
        else:
          data = part["image_url"]["url"].partition("base64,")[2]
          picture = Image.open(io.BytesIO(base64.b64decode(data)))
          size, pixels = picture.size, np.asarray(picture.convert("RGB"))
    answer = "OK"
    words = re.findall(r"Click on (.*)\.", text)
    if words and size:
      box, screen = self._boxes[words[-1], pixels.shape[1] > pixels.shape[0]]
      middle = [
        (box[0] + box[2]) / 2 / screen[0],
        (box[1] + box[3]) / 2 / screen[1],
      ]
      x, y = self.write(*middle, *size)
      call = {
        "name": "computer_use",
        "arguments": {
          "action": "left_click",
          "coordinate": [round(x), round(y)],
        },
      }
      answer = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    message = {"role": "assistant", "content": answer}
    return 200, {
      "choices": [{"message": message, "finish_reason": "stop", "index": 0}],
      "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }


def pointing(tasks):
  """{(words, wide): (box, screen)} of tasks, for `PointingServer`."""
  boxes = {}
  gym = grounding.GroundingGym()
  for task in tasks:
    gym.start(task)
    target = gym.target
    wide = target.screen[0] > target.screen[1]
    key = target.words, wide
    assert boxes.get(key, (target.box,))[0] == target.box, key
    boxes[key] = target.box, target.screen
  return boxes


SCREENS = ("320x240", "240x320")
COUNT = 12


def measured(tmp_path, name, server_write, *overrides):
  options = {"sizes": SCREENS, "count": COUNT}
  tasks = gyms.get("grounding").make_tasks(None, options).eval_tasks()
  boxes = pointing([task for some in tasks.values() for task in some])
  with chat_server.serving(make=functools.partial(PointingServer, boxes)) as (
    url,
    server,
  ):
    server.write = server_write
    assert evaluate.main([
        "grounding", f"server={url}", f"dir={tmp_path}", f"name={name}",
        "gym.width=320", "gym.height=240",
        f"gym.options.sizes=[{','.join(SCREENS)}]",
        f"gym.options.count={COUNT}", "report.progress=none", *overrides,
    ]) == 0  # fmt: skip
  return json.loads((tmp_path / name / evaluator.FILE).read_text())


def test_the_command_says_what_is_wrong(tmp_path, capsys):
  thousandths = lambda u, v, w, h: (u * 1000, v * 1000)
  right = measured(
    tmp_path, "right", thousandths, "agent=qwen3_vl_computer_use"
  )
  assert right["results"]["success_rate"] == 1.0
  assert right["digest"]["readings"] == [] and right["planned"] == 24
  assert set(right["digest"]["by_kind"]) == set(targets.KINDS)
  stdout = capsys.readouterr().out
  assert "24 targets hit" in stdout and "so read" not in stdout

  swapped = measured(
    tmp_path,
    "swapped",
    lambda u, v, w, h: (v * 1000, u * 1000),
    "agent=qwen3_vl_computer_use",
  )
  assert swapped["results"]["success_rate"] < 0.5
  assert swapped["digest"]["readings"][0]["name"] == "swapped"
  assert "the axes are swapped" in capsys.readouterr().out
  page = (tmp_path / "swapped" / "report.html").read_text()
  assert "the axes are swapped" in page and "alt='misses.png'" in page


def test_another_factor_shows_with_a_real_grammar(tmp_path):
  """Qwen2.5-VL's grammar resizes to 28; this model counts in 32."""

  def counts_in(factor):
    def write(u, v, w, h):
      size = (320, 240) if w > h else (240, 320)
      width, height = screenshot.fit_size(*size, factor=factor)
      return u * width, v * height

    return write

  agent = "agent=qwen2_5_vl_computer_use"
  right = measured(tmp_path, "f28", counts_in(28), agent)
  assert right["results"]["success_rate"] == 1.0
  assert right["digest"]["readings"] == []
  wrong = measured(tmp_path, "f32", counts_in(32), agent)
  assert wrong["digest"]["readings"][0]["name"] == "factor_32"
