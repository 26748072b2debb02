"""A run directory made by the real observers from invented episodes."""

import pathlib

import numpy as np
from PIL import Image
from PIL import ImageDraw
from trainer_core import events
from trainer_core import images as images_lib
from trainer_core import success_rates
from trainer_core import trajectory as trajectory_lib

Status = trajectory_lib.TrajectoryStatus
FAMILIES = ("click-button", "enter-text", "drag-<b>file</b>")
W, H = 224, 160


def screen(seed: int, pressed: bool = False) -> np.ndarray:
  """A window with a button, uint8[160, 224, 3]."""
  rng = np.random.default_rng(seed)
  image = Image.new("RGB", (W, H), (222, 226, 233))
  pen = ImageDraw.Draw(image)
  pen.rectangle((20, 15, 205, 145), fill="white", outline=(90, 90, 110))
  pen.rectangle((20, 15, 205, 30), fill=(60, 90, 160))
  x, y = int(rng.integers(30, 150)), int(rng.integers(45, 120))
  fill = (120, 200, 140) if pressed else (205, 208, 215)
  pen.rectangle((x, y, x + 45, y + 16), fill=fill, outline=(80, 80, 80))
  pen.text((x + 6, y + 3), "Save", fill="black")
  return np.asarray(image)


def sequence(
  images: list[trajectory_lib.ImageRef], version: int
) -> trajectory_lib.TokenSequence:
  """One screenshot of four placeholders and three sampled tokens a turn."""
  tokens, mask, turns, spans = [], [], [], []
  for turn, image in enumerate(images):
    spans.append(trajectory_lib.ImageSpan(image, len(tokens) + 1, 4))
    tokens += [1, 9, 9, 9, 9, 5, 6, 2]
    mask += [False] * 5 + [True] * 3
    turns += [turn] * 8
  mask = np.array(mask)
  return trajectory_lib.TokenSequence(
    tokens=tokens,
    loss_mask=mask,
    logprobs=np.where(mask, -0.5, 0.0),
    versions=np.where(mask, version, -1),
    turn_ids=turns,
    images=tuple(spans),
  )


def showing(
  *images: trajectory_lib.ImageRef, number: int = 0
) -> trajectory_lib.Trajectory:
  """An episode of a step for each of these screenshots."""
  return trajectory_lib.Trajectory(
    steps=[
      trajectory_lib.Step(
        observation={"screenshot": ref}, done=ref is images[-1]
      )
      for ref in images
    ],
    reward=1.0,
    status=Status.SUCCEEDED,
    trajectory_id=f"s-{number}.0",
  )


def episode(
  store: images_lib.ImageStore,
  *,
  seed: int = 0,
  family: str = "click-button",
  success: bool = True,
  turns: int = 1,
  version: int = 0,
  status: Status | None = None,
  says: str = "",
) -> trajectory_lib.Trajectory:
  """A finished episode whose screenshots are in `store`."""
  status = status or (Status.SUCCEEDED if success else Status.FAILED)
  task = {
    "task_id": f"{family}/{seed}",
    "family": family,
    "instruction": f"Press “Save” in the {family} window.",
    "seed": seed,
  }
  seen = store.put(screen(seed))
  shown = [seen]
  messages = [
    {
      "role": "user",
      "content": [
        {"type": "text", "text": task["instruction"]},
        {"type": "image", "image": seen},
      ],
    }
  ]
  steps = []
  for turn in range(turns):
    last = turn == turns - 1
    action = {"kind": "click", "x": 40.0 + 20 * turn, "y": 60.0}
    if turn % 3 == 1:
      action = {"kind": "type", "text": "hello $x_1$"}
    elif turn % 3 == 2:
      action = {"kind": "drag", "x": 50.0, "y": 50.0, "x2": 150.0, "y2": 90.0}
    said = says or f'<tool_call>{{"action": "{action["kind"]}"}}</tool_call>'
    messages = [*messages, {"role": "assistant", "content": said}]
    after = store.put(screen(seed * 10 + turn, pressed=last and success))
    steps.append(
      trajectory_lib.Step(
        chat_completions=list(messages),
        model_response=said,
        observation={"screenshot": after},
        reward=float(success and last),
        done=last,
        info={"gui_actions": [action]},
      )
    )
    messages = [
      *messages,
      {"role": "user", "content": [{"type": "image", "image": after}]},
    ]
    if not last:
      shown.append(after)
  return trajectory_lib.Trajectory(
    task=task,
    steps=steps,
    reward=float(success),
    status=status,
    error=None if status.is_policy_outcome else "EnvStepError: gone",
    sequences=[sequence(shown, version)],
    metrics={
      "seconds": 0.5,
      "seconds_model": 0.3,
      "seconds_reset": 2e-6,
      "seconds_agent_init": 1e-6,
      "seconds_evaluate": 3e-6,
    },
  )


def finished(
  trajectory: trajectory_lib.Trajectory, split: str = "train"
) -> events.EpisodeFinished:
  return events.EpisodeFinished(
    trajectory, group_id="g", task_id=trajectory.task["task_id"], split=split
  )


def results(rate: float, n: int = 40) -> dict:
  """An evaluation in which `rate` of each family's episodes succeed."""
  out = []
  for shift, family in enumerate(FAMILIES):
    for mode in success_rates.MODES:
      wins = max(0, min(n, round(n * (rate - 0.08 * shift))))
      for i in range(n):
        status = Status.SUCCEEDED if i < wins else Status.FAILED
        out.append(
          success_rates.EpisodeResult(family, mode, status, i < wins, turns=2)
        )
  return success_rates.summarise(out)


def write(
  directory: pathlib.Path, *, steps: int = 60, limit: int = 60, says: str = ""
) -> None:
  """A whole run, told to the observers as `train` would."""
  from tunix.rl.multi_turn import reporting  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.reporting import metrics as metrics_lib  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.reporting import reporting_settings  # pylint: disable=g-import-not-at-top

  directory.mkdir(parents=True, exist_ok=True)
  store = images_lib.ImageStore()
  observers = events.Observers(
    [
      reporting.MetricsWriter(directory / "metrics.jsonl"),
      reporting.TrajectoryWriter(
        directory, store, reporting_settings.ReportConfig(episodes=limit)
      ),
      reporting.SummaryWriter(directory / "summary.json"),
    ]
  )
  (directory / "config.yaml").write_text("run:\n  name: <synthetic>\n")
  tell = observers.on_event
  rng = np.random.default_rng(0)
  tell(events.RunStarted(directory.name, {}))
  tell(events.EvalFinished("initial", results(0.05)))
  tell(events.EvalFinished("warm_start", results(0.5)))
  for step in range(1, steps + 1):
    rate = 0.45 + 0.5 * step / steps
    members = [
      episode(
        store,
        seed=step * 4 + i,
        family=FAMILIES[(step + i) % 3],
        success=bool(rng.random() < rate),
        turns=1 + (step + i) % 4,
        version=step - 1,
        says=says,
      )
      for i in range(4)
    ]
    if step % 7 == 0:
      members[0].status, members[0].error = Status.ENV_ERROR, "Boom: <x>"
      tell(events.Fault("step", "EnvStepError", "gone"))
    for member in members:
      tell(finished(member))
    group = trajectory_lib.TrajectoryGroup(f"g{step}", "t", tuple(members))
    tell(events.GroupFinished(group, "accepted"))
    readings = metrics_lib.group_metrics([group])
    readings |= {
      "entropy": 1.2 - 0.9 * step / steps + 0.1 * rng.random(),
      "grad_norm": 0.4 + 0.3 * rng.random(),
      "clip_fraction": 0.05 * rng.random(),
      "staleness_mean": 0.0,
      "rollout_tokens_per_second": 900 + 100 * rng.random(),
      "learner_tokens_per_second": 4000 + 500 * rng.random(),
    }
    tell(events.WeightsPublished(step, 0.01))
    tell(events.StepFinished(step, step, readings))
    if step == steps // 2:
      tell(events.EvalFinished(f"step_{step}", results(0.75)))
  tell(events.EvalFinished("final", results(0.95)))
  tell(events.RunFinished("completed"))
  assert not observers.failures, observers.failures
