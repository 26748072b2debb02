"""Accounts of a step's wall time: the metrics `time/…`, in seconds.

The time since the last update was reported is accounted for three times over:
by the learner's thread, by the engine's, and by what episodes wait for. Each
account sums to `time/step`.

Does not: measure anything (`learner.loop`, `engine` and `step_metrics`
do).
"""

LEARNER = ("wait", "learn", "publish", "save", "evaluate", "report", "other")
ENGINE = ("idle", "prefill", "decode", "vision", "host")
ROLLOUT = ("model", "env", "both", "none")

ACCOUNTS: dict[str, tuple[str, ...]] = {
  "Learner": LEARNER,
  "Engine": tuple(f"engine_{part}" for part in ENGINE),
  "Rollout": tuple(f"rollout_{part}" for part in ROLLOUT),
}
"""Whose account -> its names behind `time/`."""

TIME: dict[str, tuple[str, ...]] = {
  "time/step": (
    "Wall time since the last update was reported. The learner's"
    " seconds of wait, learn, publish, save, evaluate, report and"
    " other sum to it, and so do the engine's, and those of the"
    " rollout.",
  ),
  "time/wait": (
    "The learner waited for groups.",
    "Most of time/step: see seconds_wait; beside long episodes also"
    " queue.stale_policy=trim with collect.part_size.",
  ),
  "time/learn": ("The update: packing, scoring, gradients.",),
  "time/publish": ("Handing over weights until the engine has them.",),
  "time/save": (
    "Checkpoints: the part that the learner waits for.",
    "Not small: raise checkpoint.every.",
  ),
  "time/evaluate": ("Evaluations that held training up.", "Raise eval.every."),
  "time/report": (
    "Observers, counts and the watchdog, after the last update.",
    "Above a percent of time/step: a tracker is slow.",
  ),
  "time/other": ("The rest of the learner's time.", "Above 2 % is an error."),
  "time/engine_idle": (
    "The engine had nothing to sample.",
    "Much of time/step while the learner waits: environments are"
    " slow, or admission is shut; raise collect.concurrency or"
    " queue.max_staleness.",
  ),
  "time/engine_prefill": ("The engine computed prompts.",),
  "time/engine_decode": ("The engine sampled.",),
  "time/engine_vision": ("The engine encoded images.",),
  "time/engine_host": (
    "The engine's own work between device calls.",
    "Much: raise engine.decode_steps_per_call.",
  ),
  "time/rollout_model": (
    "Episodes waited for the policy and none for an environment.",
  ),
  "time/rollout_env": (
    "Environments worked and no episode waited for the policy.",
    "Much: raise collect.concurrency.",
  ),
  "time/rollout_both": (
    "Environments and the policy worked at once; see overlap.",
  ),
  "time/rollout_none": (
    "No training episode was in a turn.",
    "Much with queue.max_staleness > 0: admission is shut.",
  ),
}
"""Name -> its meaning and, where there is one, the action to take."""
