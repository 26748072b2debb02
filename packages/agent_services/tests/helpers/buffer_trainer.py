"""A trainer of the rollout buffer's protocol, and of nothing else.

Written from the protocol's facts; standard library only, nothing of this
project. `python buffer_trainer.py SETTINGS.json` makes rounds until there are
`rounds`, prints each as a line of JSON and keeps the finished instances in the
file `state`, from which a second start goes on.
"""

import json
import pathlib
import sys
import time
import urllib.request

REQUIRED = {"uid", "instance_id", "messages", "reward", "extra_info"}


def post(url, body):
  request = urllib.request.Request(
    url, json.dumps(body).encode(), {"content-type": "application/json"}
  )
  with urllib.request.urlopen(request, timeout=10) as answer:
    return json.load(answer)


def start(asked, finished):
  """POSTs /start_rollout; numbers are texts, as its trainers send them."""
  most = asked.get("max_tokens", 64)
  answer = post(
    asked["url"] + "/start_rollout",
    {
      "num_process": "4",
      "num_epoch": "1",
      "remote_engine_url": asked["engine"],
      "remote_buffer_url": asked["url"],
      "task_type": asked["task_type"],
      "input_file": asked["input_file"],
      "num_repeat_per_sample": str(asked["group_size"]),
      "max_tokens": str(most),
      "sampling_params": {"max_tokens": most, "temperature": 0.8, "top_p": 1.0},
      "tokenizer_path": "",
      "skip_instance_ids": [i for names in finished.values() for i in names],
      **asked.get("more", {}),
    },
  )
  assert answer == {"message": "Rollout started"}, answer


def read(url):
  """Polls /get_rollout_data until it is ready; (items, statistics)."""
  due = time.monotonic() + 60
  while True:
    answer = post(url + "/get_rollout_data", {})
    if answer["success"]:
      break
    assert time.monotonic() < due, answer
    time.sleep(0.05)
  items, meta = answer["data"]["data"], answer["data"]["meta_info"]
  for item in items:
    assert REQUIRED <= item.keys(), item
  return items, meta


def newest(groups):
  return sorted(
    groups.values(),
    key=lambda g: max(float(i["extra_info"]["timestamp"]) for i in g),
    reverse=True,
  )


def main(path):
  asked = json.loads(pathlib.Path(path).read_text())
  state = pathlib.Path(asked["state"])
  finished = json.loads(state.read_text()) if state.exists() else {}
  start(asked, finished)
  waiting = []
  for number in range(len(finished), asked["rounds"]):
    ids = []
    while len(waiting) < asked["groups"]:
      items, meta = read(asked["url"])
      assert {"total_samples", "avg_reward"} <= meta.keys(), meta
      ids += meta["finished_groups"]
      groups = {}
      for item in items:
        groups.setdefault(item["instance_id"], []).append(item)
      assert all(len(g) % asked["group_size"] == 0 for g in groups.values())
      waiting += newest(groups)
    taken = waiting[: asked["groups"]]
    del waiting[: asked["groups"]]
    finished[str(number)] = ids
    state.write_text(json.dumps(finished))
    print(json.dumps({"round": number, "items": sum(taken, [])}), flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
