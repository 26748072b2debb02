"""`play` on web pages: a script plays a task of a file, and is recorded."""

import json

import browsers
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.environments.play import __main__ as play
import web_sites

pytestmark = browsers.needed(miniwob=False)


def test_a_script_plays_a_page_of_a_file(tmp_path, capsys):
  number = seeds.eval_seed("greet", 0, 0, 10**9)
  ears = web_sites.Ears()
  site = web_sites.Site(ears.port)
  pages, script = tmp_path / "pages.yaml", tmp_path / "script.jsonl"
  pages.write_text(f"greet: {{url: '{site.url}/?seed={{seed}}'}}\n")
  script.write_text(
    "\n".join(
      map(
        json.dumps,
        (
          {"kind": "click", "x": 60, "y": 22},
          {"kind": "type", "text": str(number)},
          {"kind": "click", "x": 60, "y": 62},
          {"kind": "terminate"},
        ),
      )
    )
  )
  out = tmp_path / "demos.jsonl"
  settings = (
    f"{{pages: {pages}, evaluator: 'web_sites:greeted', width: 400,"
    " height: 420}"
  )
  argv = [
      "browser", "greet", "--by", "script", "--script", str(script),
      "--split", "eval", "--settings", settings, "--out", str(out),
  ]  # fmt: skip
  try:
    assert play.main(argv) == 0
    output = capsys.readouterr().out
    assert f"Greet seed {number}. -> solved in 4 turns" in output
    assert "1 recorded" in output and out.exists()
    without = [
      "{evaluator: 'web_sites:greeted'}" if a == settings else a for a in argv
    ]
    assert play.main(without) == 2
    assert "needs pages: a YAML file" in capsys.readouterr().err
  finally:
    site.close()
    ears.close()
