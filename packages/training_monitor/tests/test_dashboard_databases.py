"""Every page's questions on SQLite and on PostgreSQL."""

from urllib import parse

import monitor_server
from training_monitor.dashboard import rollout_list


def test_every_page_is_answered(server):
  sha, image = monitor_server.screenshot()
  server.http.put(f"/api/v1/screenshots/{sha}", content=image)
  members = [
      monitor_server.episode(
          f"r{n}", status="completed", reward=float(n % 2), group=0,
          env_index=n, task_success=bool(n % 2), temperature=1.0,
          **({"eval_id": "E"} if n == 2 else {"baseline_id": "B"}
             if n == 3 else {}),
      )
      for n in range(4)
  ]  # fmt: skip
  members[0]["observations"][0]["screenshot_uri"] = f"sha256:{sha}"
  body = monitor_server.base(status="running")
  body["steps"][0]["metrics_json"] = {"reward_mean": 0.5, "kl": 0.1}
  server.post(monitor_server.joined(body, *members))
  (training,) = server.rows("training")
  (evaluation,), (baseline,) = server.rows("eval"), server.rows("baseline")
  (task,) = server.rows("task")
  run = f"/runs/{training['id']}"
  rollouts = [r["id"] for r in server.rows("rollout")]
  for path in (
      "/", "/?q=ru%25n&state=running&tag=x", run, "/rollouts",
      f"{run}/rollouts?sort=reward&status=completed&error=any&q=open",
      f"{run}/steps",
      f"{run}/steps?after=9", f"{run}/steps/1", f"{run}/steps/1?by=learned",
      f"{run}/steps/1?sort=advantage&outcome=success", f"{run}/evals",
      f"{run}/evals?mode=sampled",
      f"{run}/eval/{evaluation['id']}", f"{run}/baseline/{baseline['id']}",
      f"{run}/tasks", f"{run}/tasks?q=open", f"{run}/tasks/{task['id']}",
      f"{run}/health", f"{run}/config", f"{run}/log",
      f"{run}/search?q=settings+50%25", f"{run}/search?q=a&outcome=failed",
      *(f"/rollouts/{r}/beside" for r in rollouts),
      f"/rollouts/{rollouts[0]}/beside?other={rollouts[2]}",
      *(f"{where}/rollouts?{parse.urlencode({name: word})}"
        for where in ("", run)
        for name, words in (("odd", rollout_list.ODD),
                            ("end", rollout_list.ENDS), ("group", (0,)))
        for word in words),
      f"/api/v1/trainings/{training['id']}/curves?names=kl,success_rate/",
      *(f"/rollouts/{r}" for r in rollouts),
      *(f"/rollouts/{rollouts[0]}/export/{f}"
        for f in ("json", "atif", "html", "webp")),
      f"/api/v1/screenshots/{sha}/thumbnail",
  ):  # fmt: skip
    answer = server.http.get(path)
    assert answer.status_code == 200, (path, answer.text[:500])


def test_an_evaluation_has_its_neighbours_however_many_there_are(server):
  body = monitor_server.base(status="running")
  run = body["training"]["client_id"]
  # More than the matrix of checkpoints has columns.
  body["evals"] = [
    {"client_id": f"{run}/e{n}", "step": n} for n in range(3, 1803, 3)
  ]
  body["baselines"] = [{"client_id": f"{run}/b", "status_message": "initial"}]
  server.post(body)
  (training,) = server.rows("training")
  (baseline,) = server.rows("baseline")
  ids = [row["id"] for row in server.rows("eval", order="step")]
  base = f"/runs/{training['id']}"
  first = f"{base}/baseline/{baseline['id']}"
  for path, before, after in (
    (first, None, f"{base}/eval/{ids[0]}"),
    (f"{base}/eval/{ids[0]}", first, f"{base}/eval/{ids[1]}"),
    (f"{base}/eval/{ids[1]}", f"{base}/eval/{ids[0]}", f"{base}/eval/{ids[2]}"),
    (f"{base}/eval/{ids[-1]}", f"{base}/eval/{ids[-2]}", None),
  ):
    answer = server.http.get(path)
    assert answer.status_code == 200, path
    for link in (before, after):
      assert link is None or f'href="{link}"' in answer.text, (path, link)
  assert "step 6" in server.http.get(f"{base}/eval/{ids[1]}").text
  assert server.http.get(f"{base}/eval/{ids[-1] + 9}").status_code == 404
