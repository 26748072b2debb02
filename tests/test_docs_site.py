"""The documentation as a site: every page in it, built without a warning."""

import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from tunix.rl.multi_turn import commands

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_every_page_is_in_the_site_s_navigation():
  text = (DOCS / "index.md").read_text(encoding="utf-8")
  trees = re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.M | re.S)
  named = [
      line
      for tree in trees
      for line in tree.splitlines()
      if line and not line.startswith(":")
  ]
  assert len(named) == len(set(named))
  for entry in set(named) - {"performance"}:  # It comes with its figures.
    assert (DOCS / f"{entry}.md").resolve().is_file(), entry
  assert {path.stem for path in PAGES} - {"index"} <= set(named)


def test_every_command_has_its_help_on_the_page():
  text = (DOCS / "commands.md").read_text(encoding="utf-8")
  shown = re.findall(r"^```\{command-help\} (\S+)$", text, re.M)
  assert len(shown) == len(set(shown))
  assert set(commands.COMMANDS) <= set(shown)
  for module in shown:
    assert f"`{module}`" in text
    assert importlib.util.find_spec(module), module


def test_every_name_of_the_api_page_is_there():
  text = (DOCS / "api.md").read_text(encoding="utf-8")
  named = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.M)
  assert len(named) > 15
  for name in named:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert found.__doc__, name


@functools.cache
def keys() -> set[str]:
  """Every setting of a run and of an evaluation."""
  text = (DOCS / "configuration.md").read_text(encoding="utf-8")
  return set(re.findall(r"^\| `([a-z_]+\.[a-z_.]+)` \|", text, re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_that_a_page_names_exist(page):
  sections = {key.partition(".")[0] for key in keys()}
  text = page.read_text(encoding="utf-8")
  for code in re.findall(r"`([^`\n]+)`", text):
    for key in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)=", code):
      if key.partition(".")[0] in sections:
        known = any(key == k or key.startswith(f"{k}.") for k in keys())
        assert known, f"{page.name} names the setting {key}"


def anchors(path: pathlib.Path) -> set[str]:
  """Anchors of a page's headings, as GitHub and the site make them."""
  text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
  found = set()
  for heading in re.findall(r"^#+ (.+)$", text, re.M):
    plain = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
    found.add(plain.strip().replace(" ", "-"))
  return found


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "README.md", ROOT / "examples" / "README.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_to_files_and_headings_that_exist(page):
  text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
  for target in re.findall(r"\]\(([^)\s]+)\)", text):
    if re.match(r"[a-z]+:", target):
      continue
    name, _, anchor = target.partition("#")
    path = (page.parent / name) if name else page
    assert path.exists(), f"{page.name} links to {target}"
    if anchor and path.suffix == ".md":
      assert anchor in anchors(path), f"{page.name} links to {target}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path):
  pytest.importorskip("myst_parser")
  built = subprocess.run(
      [
          sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b",
          "html", "-d", str(tmp_path / "trees"), "-c", "docs/site", ".",
          str(tmp_path / "site"),
      ],
      cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False,
      capture_output=True, text=True, timeout=800,
  )  # pyformat: disable
  assert built.returncode == 0, built.stderr
  site = tmp_path / "site"
  for page in PAGES:
    html = (site / "docs" / f"{page.stem}.html").read_text("utf-8")
    # Nothing is fetched from elsewhere.
    assert not re.findall(r'(?:src|<link[^>]* href)="https?:', html), page
  script = (site / "searchindex.js").read_text("utf-8")
  index = json.loads(re.search(r"\((\{.*\})\)", script)[1])
  places = index["docnames"]
  hits = index["terms"]["stale"]
  named = {places[i] for i in (hits if isinstance(hits, list) else [hits])}
  assert "docs/asynchrony" in named
  api = (site / "docs" / "api.html").read_text("utf-8")
  assert "tunix.rl.multi_turn.api.playing.play" in api
  help_page = (site / "docs" / "commands.html").read_text("utf-8")
  assert help_page.count("usage:") > 10
