"""The documentation: its code runs, its links and its tree exist."""

import pathlib
import re

import chat_families
import documented_code
import pytest
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import presets as agent_presets
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.run import tasks as run_tasks

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted(
  [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("packages/*/*.md"),
  ]
)


def test_the_code_in_extending_runs_from_top_to_bottom(capsys):
  namespace = documented_code.run(
    "docs/extending.md", {"__name__": "extending"}
  )
  assert namespace["episode"].num_turns == 1
  config = config_lib.load_config(["gym=lamps", "tasks=[lamps]"])
  source = run_tasks.make_tasks(config)
  families = config.task_source.families
  assert next(run_tasks.TrainTasks(source, families, 0)).seed == 0
  assert all(task.seed % 2 for task in run_tasks.eval_tasks(config, source))
  assert episodes_lib.make_gym(config, "lamps").start(
    run_tasks.eval_tasks(config, source)[0]
  ).screenshot.shape == (config.gym.height, config.gym.width, 3)
  assert "final: 0.93" in capsys.readouterr().out


def test_the_code_in_policies_runs(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  documented_code.run("docs/policies.md")
  assert "48 " in capsys.readouterr().out
  assert (tmp_path / "my_policy" / "preprocessor_config.json").is_file()


def test_the_page_of_grammars_names_every_one_and_its_code_runs():
  text = (ROOT / "docs" / "grammars.md").read_text(encoding="utf-8")
  rows = [line for line in text.splitlines() if line.startswith("| ")]
  words = {"relative": "0–", "unit": "0–1", "absolute": "pixels"}
  for name in tool_parser.tool_parser_names():
    cls = tool_parser.get_tool_parser(name)
    if not cls.__module__.startswith("tunix."):
      continue  # Of another test.
    (row,) = (r for r in rows if f"| `{name}` |" in r)
    if issubclass(cls, tool_parser.GuiActionParser):
      assert f"| {words[cls.coordinates]}" in row
      resizing = cls.resizing
      assert (
        (f"multiples of {resizing.factor}" in row)
        if resizing
        else ("| – |" in row)
      )
  for name, preset in agent_presets.PRESETS.items():
    (row,) = (r for r in rows if f"| `{name}` |" in r and "`" in r)
    assert f"| `{preset['agent.parser']}` |" in row
    images = preset["agent.max_images"]
    assert f"| {images} screenshot" in row if images else "| in full |" in row
    assert ("as a list" in row) == bool(preset.get("agent.list_dropped_turns"))
  try:
    documented_code.run("docs/grammars.md")
  finally:
    tool_parser.unregister_tool_parser("taps")


def renderer_rows():
  text = (ROOT / "docs" / "grammars.md").read_text(encoding="utf-8")
  table = text.partition("## Renderers")[2].partition("\n\n**")[0]
  rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
  return {
    cells[0]: cells[1:]
    for cells in (
      [c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows
    )
  }


def in_words(rewrites):
  """Returns what a template changes, as the table has it."""
  kinds = {}
  for one in rewrites:
    kind, _, before = one.removeprefix("the ").partition(" before a ")
    kinds.setdefault(kind, []).append(before.removesuffix(" message"))
  if not kinds:
    return "–"
  (before,) = {tuple(words) for words in kinds.values()}
  where = "any" if len(before) == 2 else f"a {before[0]}"
  return f"{' and '.join(kinds)} before {where} message"


RENDERERS = {
    "ChatML": None, "Qwen2.5": "qwen2_5", "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3": "qwen3", "Qwen3, thinking off": "qwen3_off",
    "Qwen3-VL": "qwen3_vl", "Qwen3-VL Thinking": "qwen3_vl_thinking",
    "Qwen3.5": "qwen3_5", "Qwen3-Coder": "qwen3_coder", "Llama 3": "llama3",
    "Mistral": "mistral", "Pixtral": "pixtral", "DeepSeek V3.1": "deepseek",
    "Gemma 3": "gemma_vl", "Gemma 3, text only": "gemma", "GLM-4.5V": "glm_v",
    "SmolVLM": "smolvlm", "Idefics3": "idefics3",
}  # fmt: skip


def test_the_table_of_renderers_is_what_they_do():
  rows = renderer_rows()
  assert rows.keys() == RENDERERS.keys()
  assert {f for f in RENDERERS.values() if f} == set(chat_families.FAMILIES)
  for name, family in RENDERERS.items():
    ending, rewrites, images, tools = rows[name]
    if family is None:
      base = chat_families.tokenizer(chat_families.FAMILIES["qwen3"])
      renderer = qwen.QwenRenderer(base, chat_families.image_tokens)
    else:
      renderer = chat_families.renderer(chat_families.FAMILIES[family])
    prompt = renderer.render([{"role": "user", "content": "x"}]).tokens
    shown = ending.strip("`").replace("\\n", "\n").replace("\\|", "|")
    assert renderer.decode(prompt).endswith(shown), name
    assert in_words(renderer.rewrites) == rewrites, name
    assert (images == "yes") == (renderer.image_token_id is not None), name
    reads = [
      parser
      for parser in ("qwen", "qwen_xml", "llama_json", "mistral", "deepseek")
      if renderer.shows_tools_of(tool_parser.make_tool_parser(parser))
    ]
    assert bool(reads) == (tools != "by the grammar"), (name, reads)


def test_every_grammar_names_a_renderer_of_the_table():
  renderers = {*RENDERERS, "any", "the server's", "the checkpoint's"}
  text = (ROOT / "docs" / "grammars.md").read_text(encoding="utf-8")
  for parser in tool_parser.tool_parser_names():
    matches = re.findall(rf"^\|[^|]+\| `{parser}` \|([^|]+)\|", text, re.M)
    if tool_parser.get_tool_parser(parser).__module__.startswith("tunix."):
      (cell,) = matches
      assert renderers.issuperset(cell.strip().split(", ")), parser


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
  text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
  for target in re.findall(r"\]\(([^)\s]+)\)", text):
    if re.match(r"[a-z]+:", target) or target.startswith("#"):
      continue
    path = page.parent / target.partition("#")[0]
    assert path.exists(), f"{page.name} links to {target}"


def test_the_annotated_tree_is_the_tree():
  text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
  block = re.search(r"^```text\n(tunix/.*?)^```", text, re.M | re.S).group(1)
  open_folders, named = [], set()
  for line in block.splitlines():
    depth = (len(line) - len(line.lstrip())) // 2
    name = line.split()[0]
    open_folders = [*open_folders[:depth], name]
    path = "".join(p if p.endswith("/") else f"{p}" for p in open_folders)
    for part in _alternatives(path):
      assert (ROOT / part).exists(), f"the tree names {part}"
      named.add(part.rstrip("/"))
  package = ROOT / "tunix" / "rl" / "multi_turn"
  for child in package.iterdir():
    if child.name.startswith("__") or child.suffix == ".part":
      continue
    inside = child.relative_to(ROOT).as_posix()
    assert inside in named, f"the tree does not name {inside}"


def _alternatives(path):
  """`a/{b,c}.py` as a/b.py and a/c.py."""
  match = re.search(r"\{([^}]*)\}", path)
  if not match:
    return [path]
  return [
    path[: match.start()] + choice + path[match.end() :]
    for choice in match.group(1).split(",")
  ]
