"""Makes folders for the Hugging Face Hub from a run directory, and pushes them.

    publishing.save(run_directory, "policy", folder)
    publishing.push(run_directory, "episodes", "me/desktop-episodes")

`policy` is the trained policy's files with a model card; `episodes` the kept
episodes as Parquet, screenshots inside, with a data set card. Nothing in the
run directory is changed.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from typing import Literal

from tunix.rl.multi_turn.reporting import run_data
from tunix.rl.multi_turn.reporting.publishing import episode_tables
from tunix.rl.multi_turn.reporting.publishing import hub
from tunix.rl.multi_turn.reporting.publishing import policy_folder
from tunix.rl.multi_turn.reporting.publishing import public

Content = Literal["policy", "episodes"]
Described = public.Described
PublishError = hub.PublishError
_MODULES = {"policy": policy_folder, "episodes": episode_tables}
CONTENTS = tuple(_MODULES)


def save(
  directory: str | pathlib.Path,
  content: Content,
  folder: str | pathlib.Path,
  described: Described = Described(),
) -> pathlib.Path:
  """Writes the folder that `push` would send.

  Args:
    directory: Directory of a run or an evaluation.
    content: policy or episodes.
    folder: Folder to write; absent or empty.
    described: Facts for the card.

  Returns:
    the folder.

  Raises:
    PublishError: the run has nothing of it, or the folder is in use.
    FileNotFoundError: `directory` is no run.
  """
  if content not in _MODULES:
    raise PublishError(_no_content(content))
  folder = pathlib.Path(folder)
  run = run_data.load(directory)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise PublishError(f"{folder} is not an empty folder; give another")
  if folder.resolve().is_relative_to((run.directory / "policy").resolve()):
    raise PublishError(f"{folder} lies in the run's policy; give another")
  is_new = not folder.exists()
  folder.mkdir(parents=True, exist_ok=True)
  try:
    _MODULES[content].write(run, folder, described)
  except BaseException:
    # It was empty: a second attempt finds it so.
    shutil.rmtree(folder, ignore_errors=True)
    if not is_new:
      folder.mkdir(exist_ok=True)
    raise
  return folder


def push(
  directory: str | pathlib.Path,
  content: Content,
  repo: str,
  described: Described = Described(),
  *,
  private: bool | None = None,
  token: str | None = None,
  message: str = "",
) -> str:
  """Pushes a run's policy or episodes; see `hub.push` and `save`.

  Returns:
    the address of the repository.

  Raises:
    PublishError: see `save`; or the Hub refuses or does not answer.
  """
  if content not in _MODULES:
    raise PublishError(_no_content(content))
  target = hub.Target(
    repo, "dataset" if content == "episodes" else "model", private, token
  )
  hub.check(target)  # Before a folder of gigabytes is made.
  run = run_data.load(directory)
  # Beside the policy, so that weights are linked and not copied.
  with tempfile.TemporaryDirectory(
    dir=run.directory, prefix=".publish-"
  ) as folder:
    save(directory, content, folder, described)
    return hub.push(
      folder,
      target,
      message or f"{content} of {run.name}",
      _MODULES[content].REPLACED,
    )


def _no_content(content: str) -> str:
  return f"content is {content!r}; take one of {', '.join(CONTENTS)}"
