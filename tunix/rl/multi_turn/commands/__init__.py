"""Commands around policies and runs.

    python -m tunix.rl.multi_turn.commands

lists them, with the commands of other rooms.
"""

_HERE = "tunix.rl.multi_turn"

COMMANDS = {
  f"{_HERE}.train": "Trains a policy.",
  f"{_HERE}.evaluate": "Measures a policy, or a server's model, on tasks.",
  f"{_HERE}.commands.rollout": (
    "Rolls out for a run whose learner is another process."
  ),
  f"{_HERE}.commands.collect": (
    "Collects for a run, with gyms of this machine and no devices."
  ),
  f"{_HERE}.plan": (
    "Plans a run on a TPU slice that is not here: memory, network, speed."
  ),
  f"{_HERE}.doctor": "Checks this machine for a run, and what to mend.",
  f"{_HERE}.environments.play": "Plays a gym by hand and records episodes.",
  f"{_HERE}.environments.gym_server": "Serves gyms over HTTP.",
  f"{_HERE}.environments.gyms.miniwob": "Lists and tries MiniWoB++'s tasks.",
  f"{_HERE}.agents.run_service": "Plays episodes for programs that ask.",
  f"{_HERE}.serving": "Serves a policy by OpenAI's protocol.",
  f"{_HERE}.serving.image_proxy": (
    "Fetches screenshots by address for a model server behind it."
  ),
  f"{_HERE}.clients.vllm": "Prints the command that starts vLLM for a run.",
  f"{_HERE}.monitor": "Stores and shows runs: the Training Monitor.",
  f"{_HERE}.reporting.report": "Writes report.html of a run directory.",
  f"{_HERE}.commands.publish": (
    "Puts a run's policy or episodes on the Hugging Face Hub."
  ),
  f"{_HERE}.commands.inspect_policy": (
    "Reports a policy's sizes, tokens and memory; runs it once."
  ),
}
"""Module of a user's command -> its purpose."""
