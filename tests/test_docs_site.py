"""The documentation as a site: every page in it, built without a warning."""

import functools
import html
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import chromium
import pytest
from tunix.rl.multi_turn import commands

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
READMES = [
  ROOT / "README.md",
  ROOT / "examples" / "README.md",
  *sorted(ROOT.glob("packages/*/README.md")),
]


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
  leading = {(DOCS / f"{entry}.md").resolve() for entry in named}
  assert set(READMES) <= leading


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
    object_ = getattr(importlib.import_module(module), attribute)
    assert object_.__doc__, name


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
        is_setting = any(key == k or key.startswith(f"{k}.") for k in keys())
        assert is_setting, f"{page.name} names the setting {key}"


def anchors(path: pathlib.Path) -> set[str]:
  """Anchors of a page's headings, as GitHub and the site make them."""
  text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
  collected = set()
  for heading in re.findall(r"^#+ (.+)$", text, re.M):
    plain = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
    collected.add(plain.strip().replace(" ", "-"))
  return collected


@pytest.mark.parametrize(
  "page", [*PAGES, *READMES], ids=lambda page: page.relative_to(ROOT).as_posix()
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """The pages, built without a warning."""
  pytest.importorskip("myst_parser")
  result = tmp_path_factory.mktemp("docs")
  built = subprocess.run(
      [
          sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b",
          "html", "-d", str(result / "trees"), "-c", "docs/site", ".",
          str(result / "site"),
      ],
      cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False,
      capture_output=True, text=True, timeout=800,
  )  # fmt: skip
  assert built.returncode == 0, built.stderr
  return result / "site"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_fetches_nothing_and_can_be_searched(site):
  for page in PAGES:
    shown = (site / "docs" / f"{page.stem}.html").read_text("utf-8")
    # Nothing is fetched from elsewhere.
    assert not re.findall(r'(?:src|<link[^>]* href)="https?:', shown), page
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_links_of_the_site_lead_to_pages_and_anchors(site):
  texts = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
  ids = {p: set(re.findall(r' id="([^"]+)"', t)) for p, t in texts.items()}
  dead = []
  for page, text in texts.items():
    for link in re.findall(r'<a [^>]*?href="([^"]*)"', text):
      if re.match(r"[a-z]+:", link):
        continue
      name, _, anchor = urllib.parse.unquote(html.unescape(link)).partition("#")
      path = (page.parent / name).resolve() if name else page
      if not path.exists() or (anchor and anchor not in ids.get(path, ())):
        dead.append((page.name, link))
  assert len(texts) > len(PAGES) and not dead


@pytest.fixture(scope="module")
def page():
  with chromium.browser() as browser:
    yield browser.new_page()


_OVERFLOWING = """() => {
  const room = document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll(".table-wrapper")]
    .filter((box) => box.scrollWidth > box.clientWidth + 1);
  const scrolls = (element) => {
    for (let box = element.parentElement; box; box = box.parentElement) {
      if (getComputedStyle(box).overflowX !== "visible") return true;
    }
  };
  const out = [...document.querySelectorAll("article *")].filter((element) =>
    element.getBoundingClientRect().right > room + 1 && !scrolls(element));
  const broken = [...document.images].filter((image) => !image.naturalWidth);
  return [...wide, ...out, ...broken].map((e) => e.outerHTML.slice(0, 200));
}"""


_NEXT_FRAME = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(done)))"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
def test_no_page_overflows_its_window(site, page):
  """Neither a desktop's nor a telephone's."""
  stacked = {1440: 0, 390: 0}
  for path in sorted(site.rglob("*.html")):
    page.goto(path.as_uri())
    for width in stacked:
      page.set_viewport_size({"width": width, "height": 900})
      page.evaluate(_NEXT_FRAME)  # Tables are fitted by then.
      assert not page.evaluate(_OVERFLOWING), (path.name, width)
      stacked[width] += page.locator("table.stacked").count()
  # Rows become blocks on a telephone only.
  assert stacked[1440] <= 20 < stacked[390]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  "query, named, among",
  [
    ("queue.max_staleness", "Configuration", 1),
    ("out of memory", "Troubleshooting", 3),
    ("staleness", "Concepts", 3),
  ],
)
def test_a_query_finds_the_page_that_answers_it(
  site, page, query, named, among
):
  page.set_viewport_size({"width": 1440, "height": 900})
  page.goto((site / "docs" / "index.html").as_uri())
  page.fill(".sidebar-search", query)
  page.press(".sidebar-search", "Enter")
  result = page.locator("ul.search li a")
  count = "document.querySelectorAll('ul.search li a').length"
  chromium.wait_for(page, f"{count} > 4")
  assert named in result.all_inner_texts()[:among]
