"""The notebooks run from their first cell to their last, in a real kernel."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys
import sysconfig
import venv

import pytest
import small_runs
import trials

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
TOGETHER = (
  # The second reads what the first has made.
  ("01_first_agent", "05_read_a_run"),
  ("02_own_environment",),
  ("03_own_model",),
  ("04_black_box_agent",),
  ("06_tpu",),
)
NAMES = sorted(name for names in TOGETHER for name in names)


def cells_of(name: str) -> list[dict]:
  text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
  return [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]


def test_every_notebook_is_executed_here():
  assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == NAMES


def test_every_notebook_is_listed():
  index = (FOLDER.parent / "docs" / "index.md").read_text(encoding="utf-8")
  page = (FOLDER.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
  for name in NAMES:
    assert f"notebooks/{name}.ipynb" in index
    assert f"notebooks/{name}.ipynb" in page


@pytest.mark.parametrize("name", NAMES)
def test_a_notebooks_links_lead_somewhere(name):
  text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
  for target in re.findall(r"\]\(([^)\s:#]+)[^)]*\)", text):
    assert (FOLDER / target).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_output(name):
  for cell in cells_of(name):
    assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_begins_by_installing_what_is_absent(name):
  first = "".join(cells_of(name)[0]["source"])
  assert first == "".join(cells_of(NAMES[0])[0]["source"])
  assert first.count("%pip install") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_cell_installs_the_clone_in_a_bare_kernel(
  tmp_path, monkeypatch
):
  """In an environment with all packages but this one, without a restart."""
  import nbformat  # pylint: disable=g-import-not-at-top

  clone = tmp_path / "clone"
  (clone / "notebooks").mkdir(parents=True)
  root = FOLDER.parent
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(root / name, clone)
  shutil.copytree(root / "tunix_multi_turn", clone / "tunix_multi_turn")
  core = clone / "tunix/rl/multi_turn/core"
  core.mkdir(parents=True)
  for folder in (core, core.parent):
    (folder / "__init__.py").touch()
  venv.create(tmp_path / "bare", with_pip=True)
  first = "".join(cells_of("06_tpu")[0]["source"])
  book = nbformat.v4.new_notebook(
    cells=[
      nbformat.v4.new_code_cell(source)
      for source in (
        "import importlib.util\n"
        "print(importlib.util.find_spec('tunix_multi_turn'))",
        first,
        "import tunix_multi_turn\ntunix_multi_turn.light()\n"
        "from tunix.rl.multi_turn import core\n"
        "print(tunix_multi_turn.__file__, core.__file__)",
      )
    ]
  )
  packages = tmp_path / "packages"
  packages.mkdir()
  for path in pathlib.Path(sysconfig.get_paths()["purelib"]).iterdir():
    if "tunix_multi_turn" not in path.name:
      (packages / path.name).symlink_to(path)
  for key, value in {
    "PYTHONPATH": str(packages),
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
  }.items():
    monkeypatch.setenv(key, value)
  monkeypatch.delenv("TPU_NAME", raising=False)
  python = tmp_path / "bare/bin/python"
  execute(book, clone / "notebooks", tmp_path, monkeypatch, python)
  before, _, after = book.cells
  assert printed([before]).strip() == "None"
  assert printed([after]).split() == [
    str(clone / "tunix_multi_turn/__init__.py"),
    str(core / "__init__.py"),
  ]


def html_of(cell) -> str:
  return "".join(
    o["data"].get("text/html", "") for o in cell.outputs if "data" in o
  )


def execute(book, folder, directory, monkeypatch, python) -> None:
  """Executes a notebook in a real kernel of `python`, in `folder`."""
  import nbclient  # pylint: disable=g-import-not-at-top

  kernel = directory / "jupyter" / "kernels" / "this"
  kernel.mkdir(parents=True, exist_ok=True)
  start = [str(python), "-m", "ipykernel_launcher", "-f"]
  (kernel / "kernel.json").write_text(
    json.dumps(
      {
        "argv": [*start, "{connection_file}"],
        "display_name": "this",
        "language": "python",
      }
    )
  )
  monkeypatch.setenv("JUPYTER_PATH", str(directory / "jupyter"))
  monkeypatch.setenv("IPYTHONDIR", str(directory / "ipython"))
  client = nbclient.NotebookClient(
    book,
    timeout=900,
    kernel_name="this",
    resources={"metadata": {"path": str(folder)}},
  )
  client.execute()  # Raises at the first cell that fails.


def run(names, directory, monkeypatch) -> dict[str, list]:
  """Executes notebooks; their code cells after the first, with outputs."""
  import nbformat  # pylint: disable=g-import-not-at-top

  monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
  executed = {}
  for name in names:
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    try:
      execute(book, directory, directory, monkeypatch, sys.executable)
    finally:
      nbformat.write(book, directory / f"{name}.ipynb")
    first, *cells = [c for c in book.cells if c.cell_type == "code"]
    assert not first.outputs  # Everything is installed.
    for cell in cells:
      assert len(json.dumps(cell.outputs)) < 2_000_000
    executed[name] = cells
  return executed


def printed(cells) -> str:
  return "".join(
    str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", ""))
    for cell in cells
    for o in cell.outputs
  )


some_minutes = [
  pytest.mark.slow,
  pytest.mark.timeout(1800),
  pytest.mark.skipif(
    trials.share() < 1, reason="some minutes: make test-all runs it"
  ),
]


@pytest.mark.parametrize(
  "names", [pytest.param(n, id=n[0], marks=some_minutes) for n in TOGETHER]
)
def test_notebooks_run(names, tmp_path, monkeypatch):
  executed = run(names, tmp_path, monkeypatch)
  cells = executed[names[0]]
  shown = "".join(map(html_of, cells))
  output = printed(cells)
  match names[0]:
    case "01_first_agent":
      assert "data:image" in html_of(cells[1])  # The oracle's episode.
      assert "<progress" in html_of(cells[2])
      assert "Evaluation on held-out seeds" in html_of(cells[4])
      assert "<iframe srcdoc" in html_of(cells[-1])
      assert (tmp_path / "runs" / "quick" / "report.html").exists()
      assert "Run" in str(executed["05_read_a_run"][1].outputs)
    case "02_own_environment":
      assert "data:image" in shown and "False" in output  # The script's miss.
      figures = small_runs.summary_of(tmp_path / "runs" / "lamps")["eval"]
      before, after = (
        figures[name]["success_rate"] for name in ("initial", "final")
      )
      assert after > before
      assert small_runs.metrics_of(tmp_path / "runs" / "echo")
    case "03_own_model":
      assert "largest difference" in output and "adapter_config.json" in output
      for step in small_runs.metrics_of(tmp_path / "runs" / "own_model"):
        assert step["logprob_gap_max"] < 1e-3
    case "04_black_box_agent":
      for step in small_runs.metrics_of(tmp_path / "runs" / "black_box"):
        assert step["logprob_gap_max"] < 1e-3 and not step["fallback_turns"]
      assert "tokens were sampled" in output
    case "06_tpu":
      assert "fits" in output and "does not fit" in output
      assert "docker run" in output and "gcloud compute tpus" in output
      assert "learner" in output and ".pb" in output
    case other:
      raise AssertionError(f"nothing is checked of {other}")
