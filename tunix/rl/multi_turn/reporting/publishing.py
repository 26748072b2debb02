"""Makes folders for the Hugging Face Hub from a run directory, and pushes them.

    publishing.save(run_directory, "policy", folder)
    publishing.push(run_directory, "episodes", "me/desktop-episodes")

`policy` is the trained policy's files with a model card. `episodes` are the
kept episodes as Parquet, one a row, screenshots inside, with a data set card:
`datasets.load_dataset(folder)` reads them, and
`Trajectory.from_json` takes the parsed column `trajectory`.

Promises: nothing in the run directory is changed. Cards and rows hold neither
the run's settings nor the texts of errors, which may name places and secrets of
the machine; screens and texts that the policy saw and wrote are unchanged.
"""

from __future__ import annotations

import html
import json
import pathlib
import shutil
import tempfile
from typing import Any, Iterator, Literal

from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import yaml_text
from tunix.rl.multi_turn.net import credentials
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import run_data

Content = Literal["policy", "episodes"]
CONTENTS: tuple[Content, ...] = ("policy", "episodes")
_TAGS = ["computer-use", "gui-agent", "reinforcement-learning", "tunix"]
_SPLITS = ("train", "eval")
_REPLACED = ("model*.safetensors", "model.safetensors.index.json", "data/*")
"""Files that an earlier push may have left under other names."""


class PublishError(ValueError):
  """Something that cannot be published, and what to do about it."""


def save(
  directory: str | pathlib.Path,
  content: Content,
  folder: str | pathlib.Path,
  *,
  license: str = "",  # pylint: disable=redefined-builtin
  base_model: str = "",
) -> pathlib.Path:
  """Writes the folder that `push` would send.

  Args:
    directory: Directory of a run or an evaluation.
    content: policy or episodes.
    folder: Folder to write; absent or empty.
    license: License on the card, by the Hub's identifier.
    base_model: Trained model, for the card.

  Returns:
    The folder.

  Raises:
    PublishError: The run has nothing of it, or the folder is in use.
    FileNotFoundError: `directory` is no run.
  """
  if content not in CONTENTS:
    raise PublishError(
      f"content is {content!r}; take one of {', '.join(CONTENTS)}"
    )
  folder = pathlib.Path(folder)
  run = run_data.load(directory)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise PublishError(f"{folder} is not an empty folder; give another")
  folder.mkdir(parents=True, exist_ok=True)
  write = _write_policy if content == "policy" else _write_episodes
  about = {"license": license or None}
  try:
    write(run, folder, about | {"base_model": base_model or None})
  except BaseException:
    shutil.rmtree(folder, ignore_errors=True)
    raise
  return folder


def push(
  directory: str | pathlib.Path,
  content: Content,
  repo: str,
  *,
  private: bool | None = None,
  token: str | None = None,
  message: str = "",
  **about: str,
) -> str:
  """Pushes a run's policy or episodes in one commit.

  Args:
    directory: Directory of a run or an evaluation.
    content: policy or episodes.
    repo: owner/name; made where it is absent.
    private: Whether a new repository is; None: as the owner's default. True
      refuses one that exists and is public.
    token: None: HF_TOKEN's, or that of `hf auth login`.
    message: Message of the commit.
    **about: `license` and `base_model` of `save`.

  Returns:
    The address of the repository.

  Raises:
    PublishError: See `save`; or the Hub refuses or does not answer.
  """
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  if not (token or huggingface_hub.get_token()):
    raise PublishError(
      "there is no token for the Hub; set HF_TOKEN to one that may write, or"
      " run: hf auth login"
    )
  kind = "dataset" if content == "episodes" else "model"
  api = huggingface_hub.HfApi(token=token)
  run = run_data.load(directory)
  with tempfile.TemporaryDirectory(
    dir=run.directory, prefix=".publish-"
  ) as place:
    folder = save(directory, content, place, **about)
    try:
      url = api.create_repo(
        repo, repo_type=kind, private=private, exist_ok=True
      )
      if private and not api.repo_info(url.repo_id, repo_type=kind).private:
        raise PublishError(
          f"{repo} exists and is public; make it private there, give another"
          " name, or ask for no private one"
        )
      api.upload_folder(
        folder_path=str(folder),
        repo_id=url.repo_id,
        repo_type=kind,
        commit_message=message or f"{content} of {run.name}",
        delete_patterns=list(_REPLACED),
      )
    except PublishError:
      raise
    except Exception as error:  # pylint: disable=broad-except
      # The client's own kinds, those of httpx, and of the files.
      text = credentials.masked(" ".join(str(error).split()))
      raise PublishError(
        f"the Hub did not take {repo}: {text[:500]}; check the name and that"
        " the token (HF_TOKEN, or hf auth login) may write there, or write a"
        " folder instead"
      ) from error
  return credentials.masked(str(url))


# --- the policy ---------------------------------------------------------------


def _write_policy(
  run: run_data.RunDirectory, folder: pathlib.Path, about: dict[str, Any]
) -> None:
  source = run.directory / "policy"
  status = run.summary.get("status", "unfinished")
  if not (source / "config.json").is_file():
    raise PublishError(
      f"{run.directory} has no policy yet: it is {status}, and the policy is"
      " saved when training ends"
    )
  if status == "running":
    raise PublishError(
      f"{run.directory} is running, or was killed: its policy is not that of"
      " its evaluations; wait for its end, or resume it"
    )
  for path in sorted(source.iterdir()):
    if path.is_symlink():  # It may lead anywhere.
      raise PublishError(
        f"{path} is a symbolic link; put the file itself there, or delete it"
      )
    if path.is_file() and path.suffix != ".part" and path.name != "README.md":
      shutil.copyfile(path, folder / path.name)
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  config = json_text.read(source / "config.json")
  sees = any(key.startswith("vision") for key in config)
  data = huggingface_hub.ModelCardData(
    **about,
    library_name="transformers" if "architectures" in config else "tunix",
    pipeline_tag="image-text-to-text" if sees else "text-generation",
    tags=_TAGS,
    model_name=run.name,
    eval_results=_results(run) or None,
  )
  _write_card(
    folder,
    data,
    run.name,
    "An agent that uses a computer, trained in the gym"
    f" {_gym(run)} by multi-turn reinforcement learning with"
    f" `tunix.rl.multi_turn`, {run.summary.get('step', 0)} updates.",
    *_evaluation_table(run),
    "",
    "    tunix-mt evaluate FOLDER",
    "    tunix-mt train policy=FOLDER",
  )


def _gym(run: run_data.RunDirectory) -> str:
  """The name of the run's gym; of a user's own, without its module."""
  settings = yaml_text.parse(run.config) if run.config else None
  gym = settings.get("gym") if isinstance(settings, dict) else None
  name = gym.get("name") if isinstance(gym, dict) else None
  return str(name or "desktop").rpartition(":")[2]


def _results(run: run_data.RunDirectory) -> list[Any]:
  """The last evaluation in the Hub's own form."""
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  return [
    huggingface_hub.EvalResult(
      task_type="reinforcement-learning",
      task_name="computer use",
      dataset_type=_gym(run),
      dataset_name=_gym(run),
      metric_type="success_rate",
      metric_name=f"success rate ({name})",
      metric_value=round(float(figures["success_rate"]), 4),
    )
    for name, figures in list(run.evaluations.items())[-1:]
  ]


def _evaluation_table(run: run_data.RunDirectory) -> list[str]:
  """Lines of Markdown: success by evaluation; none without one."""
  if not run.evaluations:
    return []
  return ["", "| | success | episodes |", "|---|---|---|"] + [
    f"| {name} | {figures['success_rate']:.3f} | {figures.get('episodes')} |"
    for name, figures in run.evaluations.items()
  ]


def _write_card(
  folder: pathlib.Path, data: Any, title: str, *lines: str
) -> None:
  title = html.escape(" ".join(title.split()))
  text = ["---", data.to_yaml(), "---", "", f"# {title}", "", *lines, ""]
  (folder / "README.md").write_text("\n".join(text), encoding="utf-8")


# --- episodes -----------------------------------------------------------------


def _write_episodes(
  run: run_data.RunDirectory, folder: pathlib.Path, about: dict[str, Any]
) -> None:
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise PublishError(
      "publishing episodes needs the package datasets; pip install"
      " 'tunix-multi-turn[hub]'"
    ) from error
  import huggingface_hub  # pylint: disable=g-import-not-at-top

  text, number = datasets.Value("string"), datasets.Value("float64")
  names = ("episode_id", "mode", "family", "task_id", "instruction", "group_id",
           "status", "trajectory")  # fmt: skip
  features = datasets.Features(
    {name: text for name in names}
    | {
      "weights_version": datasets.Value("int64"),
      "reward": number,
      "success": datasets.Value("bool"),
      "turns": datasets.List(
        {
          "image": datasets.Value("int32"),
          "response": text,
          "actions": text,
          "reward": number,
        }
      ),
      "images": datasets.List(datasets.Image()),
    }
  )
  counts = {split: sum(1 for _ in _lines(run, split)) for split in _SPLITS}
  counts = {split: count for split, count in counts.items() if count}
  if not counts:
    raise PublishError(
      f"{run.directory} kept no episode; train with report.episodes above 0"
    )
  with tempfile.TemporaryDirectory() as cache:
    for split in counts:
      table = datasets.Dataset.from_generator(
        _rows,
        features=features,
        cache_dir=cache,
        gen_kwargs={"directory": str(run.directory), "split": split},
      )
      (folder / "data").mkdir(exist_ok=True)
      table.to_parquet(folder / "data" / f"{split}.parquet")
  about.pop("base_model")
  data = huggingface_hub.DatasetCardData(
    **about,
    task_categories=["reinforcement-learning", "image-text-to-text"],
    tags=_TAGS,
    pretty_name=f"Episodes of {run.name}",
    configs=[
      {
        "config_name": "default",
        "data_files": [
          {"split": split, "path": f"data/{split}.parquet"} for split in counts
        ],
      }
    ],
  )
  sizes = ", ".join(f"{count} of {split}" for split, count in counts.items())
  _write_card(
    folder,
    data,
    f"Episodes of {run.name}",
    f"Episodes that an agent played in the gym {_gym(run)} while"
    f" `tunix.rl.multi_turn` trained it: {sizes}, a sample spread over the run."
    " `images` holds each screenshot once; a turn's `image` is the place in it"
    " of the screen that the policy saw (-1: not kept), and its `actions` are"
    " JSON in pixels of that screen. `trajectory` is the whole episode with"
    " tokens and log-probs, for `Trajectory.from_json`.",
    *_evaluation_table(run),
  )


def _lines(
  run: run_data.RunDirectory, split: str
) -> Iterator[tuple[dict[str, Any], run_data.ShownEpisode]]:
  """The kept episodes of a split: what was written, and what is shown."""
  for line in files.read_lines(run.directory / "trajectories.jsonl"):
    try:
      shown = run_data.shown_episode(line)
    except (KeyError, TypeError, ValueError):
      continue  # Written by another version, or torn.
    if shown.split == split:
      yield line, shown


def _rows(directory: str, split: str) -> Iterator[dict[str, Any]]:
  run = run_data.load(directory)
  for line, shown in _lines(run, split):
    pixels: dict[str, bytes] = {}
    for frame in shown.frames:
      if frame.image is None:
        continue
      path = run.image_path(frame.image)
      if path.is_file() and not path.is_symlink():
        pixels[frame.image.sha256] = path.read_bytes()
    places = list(pixels)
    record = {k: v for k, v in line.items() if k not in run_data.BESIDE}
    yield {
      "episode_id": str(line.get("trajectory_id") or shown.index),
      "mode": str(line.get("mode") or ""),
      "family": shown.family,
      "task_id": shown.task_id,
      "instruction": shown.instruction,
      "group_id": str(line.get("group_id") or ""),
      "status": shown.status.value,
      "weights_version": shown.version,
      "reward": shown.reward,
      "success": shown.success,
      "turns": [
        {
          "image": places.index(frame.image.sha256)
          if frame.image is not None and frame.image.sha256 in pixels
          else -1,
          "response": frame.text,
          "actions": json.dumps(frame.actions, ensure_ascii=False),
          "reward": float(step.get("reward") or 0.0),
        }
        # After the turns comes the last screen.
        for frame, step in zip(shown.frames, line["steps"], strict=False)
      ],
      "images": [{"bytes": body, "path": None} for body in pixels.values()],
      "trajectory": json.dumps(record | {"error": None}, ensure_ascii=False),
    }
