"""The notebooks run from their first cell to their last, in a real kernel."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import trials

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
IN_ORDER = ("01_first_agent", "05_read_a_run")
"""The second reads what the first has made."""


def cells_of(name: str) -> list[dict]:
  text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
  return [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]


def test_every_notebook_is_executed_here():
  assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == sorted(IN_ORDER)


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_notebook_is_kept_without_output(name):
  for cell in cells_of(name):
    assert cell["outputs"] == [] and cell["execution_count"] is None


def html_of(cell) -> str:
  return "".join(
      o["data"].get("text/html", "") for o in cell.outputs if "data" in o
  )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    trials.share() < 1, reason="some minutes: make test-all runs it"
)
def test_the_notebooks_run(tmp_path, monkeypatch):
  import nbclient  # pylint: disable=g-import-not-at-top
  import nbformat  # pylint: disable=g-import-not-at-top

  kernel = tmp_path / "jupyter" / "kernels" / "this"
  kernel.mkdir(parents=True)
  start = [sys.executable, "-m", "ipykernel_launcher", "-f"]
  (kernel / "kernel.json").write_text(
      json.dumps({
          "argv": [*start, "{connection_file}"],
          "display_name": "this",
          "language": "python",
      })
  )
  monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
  monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
  executed = {}
  for name in IN_ORDER:
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=900, kernel_name="this",
        resources={"metadata": {"path": str(tmp_path)}},
    )  # pyformat: disable
    try:
      client.execute()  # Raises at the first cell that fails.
    finally:
      nbformat.write(book, tmp_path / f"{name}.ipynb")
    executed[name] = [c for c in book.cells if c.cell_type == "code"]
  first, second = executed.values()
  assert "data:image" in html_of(first[1])  # The oracle's episode.
  assert "<progress" in html_of(first[2])
  assert "Evaluation on held-out seeds" in html_of(first[4])
  assert "<iframe srcdoc" in html_of(first[-1])
  for cells in executed.values():
    for cell in cells:
      assert len(json.dumps(cell.outputs)) < 2_000_000
  assert (tmp_path / "runs" / "quick" / "report.html").exists()
  assert "Run" in str(second[1].outputs)
