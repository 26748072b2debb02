"""The dashboard under untrusted texts, tokens and projects."""

import json

import chromium
import monitor_server
import pytest
from training_monitor.server import access

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


# --- untrusted content ------------------------------------------------------

XSS = (
  "<script>alert(1)</script>",
  "<img src=x onerror=alert(2)>",
  "'\"><svg onload=alert(3)>",
  "javascript:alert(4)",
  "{{7*7}}${7*7}<%= 7*7 %>",
  "</textarea></title></style><b onclick=alert(5)>",
  "]]><!--<iframe srcdoc='<script>alert(6)</script>'>",
  "&lt;script&gt;alert(7)&lt;/script&gt;",
  '" autofocus onfocus=alert(8) x="',
  "<a href='data:text/html,<script>alert(9)</script>'>x</a>",
  "user\u202egpj.exe \u2066x\u2069 zero\u200bwidth bell\x07 \u2028line",
)


def hostile_run(text):
  """A run with `text` in every field that takes any."""
  source = {"step_id": "S"}
  json_field = {"text": text, text: [text, {text: text}]}
  rollouts, turns, actions, observations, validations = [], [], [], [], []
  for name, where in (
    ("x", source),
    ("y", {"eval_id": "E"}),
    ("z", {"baseline_id": "B"}),
  ):
    rollouts.append(
      {
        "rollout_id": f"{text}-{name}",
        "task_id": text,
        "model_path": text,
        **where,
        "status": "completed",
        "task_success": name == "y",
        "reward": 0.5,
        "group": 1,
        "env_index": 0,
        "temperature": 1.0,
        "status_message": text,
        "error_message": text,
        "errors": [
          {"kind": text, "message": text, "turn": text, "stage": text},
          text,
        ],
        "summary_json": json_field,
        "parse_errors": 1,
        "runtime_errors": 1,
        "trajectory_path": text,
      }
    )
    turn = f"{name}:1"
    turns.append(
      {
        "client_id": turn,
        "rollout_id": f"{text}-{name}",
        "turn": 1,
        "turn_time": 1.0,
        "metrics_json": {
          "thought": text,
          "model_response": text,
          "info": json_field,
          "seconds": {text: 1.0, "model": text},
          text: text,
          "policy_versions": [[text, text]],
        },
      }
    )
    actions.append(
      {
        "client_id": f"{name}:a",
        "turn_id": turn,
        "action_type": text,
        "tool_name": text,
        "tool_args": {**json_field, "x": 1, "y": 2},
        "tokens": [1, 2, 99999999],
        "logprobs": [-1.0, -2.0, -3.0],
      }
    )
    actions.append(
      {
        "client_id": f"{name}:b",
        "turn_id": turn,
        "action_type": text,
        "tool_args": json.dumps([text, 1, None]),
      }
    )
    observations.append(
      {
        "client_id": f"{name}:o",
        "turn_id": turn,
        "obs_type": "screenshot",
        "screenshot_uri": text,
        "text_content": text,
        "model_input_json": [{"role": text, "content": text}],
      }
    )
    validations.append(
      {
        "client_id": f"{name}:v",
        "rollout_id": f"{text}-{name}",
        "success": False,
        "actual_result": text,
        "expected_result": text,
        "validation_query": text,
        "error_message": text,
        "details_json": json_field,
      }
    )
  return {
      "training": {
          "client_id": "T", "run_name": text, "log_path": text,
          "model_name": text, "status": "running", "status_message": text,
          "error_message": text, "renderer_name": text,
          "wandb_project": text, "wandb_name": text,
          "config_json": {**json_field, "algorithm": {"advantage": "grpo"}},
          "current_step": 1, "total_steps": 2,
          # Longer ones, and characters that are not seen, are refused.
          "tags": [t for t in XSS if len(t) <= 50 and t.isprintable()],
      },
      "tasks": [{
          "task_id": text, "name": text, "description": text,
          "app_name": text, "source_type": text, "tags": [text],
          "expected_result": text,
      }],
      "steps": [{
          "client_id": "S", "step": 1, "status": "completed",
          "status_message": text, "error_message": text, "model_path": text,
          "checkpoint_path": text, "reward_mean": 0.5,
          "metrics_json": {
              f"success_rate/{text}": 0.5, "reward_mean": 0.5, "loss": text,
              text: 1.0, "entropy": text, "seconds_total": text,
          },
      }],
      "evals": [{
          "client_id": "E", "step": 1, "model_path": text, "total_tasks": 1,
          "status_message": text, "error_message": text,
      }],
      "baselines": [{"client_id": "B", "model_path": text,
                     "status_message": text, "error_message": text}],
      "rollouts": rollouts, "turns": turns, "actions": actions,
      "observations": observations, "validations": validations,
      "environments": [{
          "client_id": "env", "rollout_id": f"{text}-x", "env_type": "linux",
          "gbox_id": text, "status_message": text, "error_message": text,
          "config_json": json_field,
      }],
      "delivery": {"spool": "evil", "first": 1, "last": 1,
                   "health": {text: text, "pending": text, "dropped": text}},
  }  # fmt: skip


@pytest.mark.slow
def test_hostile_text_is_text_on_every_page(context, tmp_path):
  with monitor_server.sqlite_server(tmp_path) as server:
    text = "\n".join(XSS)
    server.post(hostile_run(text))
    tab = chromium.Tab(context, server.url)
    (training,) = server.rows("training")
    run = f"/runs/{training['id']}"
    (evaluation,), (baseline,) = server.rows("eval"), server.rows("baseline")
    rollouts = server.rows("rollout")
    paths = [
        "/", "/?q=" + XSS[1], "/?tag=" + XSS[1], "/rollouts",
        f"{run}/rollouts?q={XSS[1]}", run, f"{run}?more=" + XSS[1],
        f"{run}/steps",
        f"{run}/steps/1", f"{run}/steps/1?sort=reward", f"{run}/evals",
        f"{run}/eval/{evaluation['id']}",
        f"{run}/baseline/{baseline['id']}", f"{run}/tasks",
        f"{run}/tasks?q=" + XSS[0],
        f"{run}/tasks/{rollouts[0]['task_id']}", f"{run}/health",
        f"{run}/config", *(f"/rollouts/{r['id']}" for r in rollouts),
        f"/rollouts/{rollouts[0]['id']}?heat={XSS[1]}",
    ]  # fmt: skip
    for path in paths:
      assert tab.go(path) == 200, path
      if path == run:
        chromium.ready(tab.page)
        tab.page.locator(".plot").first.press("ArrowRight")
      injected = tab.page.evaluate(
        "[...document.querySelectorAll('*')].flatMap((e) =>"
        " e.getAttributeNames().filter((n) => n.startsWith('on')).concat("
        "['IFRAME', 'OBJECT', 'EMBED'].includes(e.tagName) ? [e.tagName] :"
        " []))"
      )
      assert not injected, (path, injected)
      scripts = tab.page.locator("script:not([src]), a[href^='javascript:']")
      assert not scripts.count(), path
      shown = tab.page.locator("main").inner_text()
      assert "\u202e" not in shown and "\u200b" not in shown, path
      tab.check()
    rollout = f"/rollouts/{rollouts[0]['id']}"
    tab.go(rollout)
    assert "U+202E" in tab.page.locator("main").inner_text()
    assert XSS[0] in tab.page.locator("#turn pre").first.inner_text()
    for path in (
      f"{run}?x=1",
      f"{run}/steps/1?sort=" + XSS[0],
      "/nothing" + XSS[1],
      f"{run}/steps/99",
      f"/compare?run={XSS[1]}",
    ):
      assert tab.go(path) in (400, 404), path
      tab.check()
    for name in ("json", "atif", "html"):
      answer = server.http.get(f"{rollout}/export/{name}")
      assert answer.status_code == 200
      assert "sandbox" in answer.headers["content-security-policy"]
      json.dumps(answer.headers["content-disposition"])
    saved = tmp_path / "saved.html"
    saved.write_bytes(server.http.get(f"{rollout}/export/html").content)
    tab.page.goto(saved.as_uri())
    tab.page.wait_for_load_state()
    assert not [f for f in tab.faults if "dialog" in f]
    tab.page.close()


# --- who may look -----------------------------------------------------------


def test_a_token_is_asked_for_once_and_kept_from_scripts(context, tmp_path):
  with monitor_server.sqlite_server(tmp_path, token="tm_secret") as server:
    server.post(monitor_server.base())
    reading = access.make_token(server.engine, "default", ("read",))
    sending = access.make_token(server.engine, "default", ("ingest",))
    tab = chromium.Tab(context, server.url)
    page = tab.page
    tab.go("/runs/1?smooth=0.5")
    assert "/login" in page.url
    assert not chromium.faults_of(page)
    for wrong, says in (
      ("nonsense", "not known"),
      (sending, "scope read"),
      ("a b;c", "give a token"),
    ):
      page.fill("#token", wrong)
      page.keyboard.press("Enter")
      page.wait_for_selector("[role=alert]")
      assert says in page.locator("[role=alert]").inner_text()
    page.fill("#token", reading)
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/1?smooth=0.5")
    (cookie,) = [
      c for c in page.context.cookies(server.url) if c["name"] == access.COOKIE
    ]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    page.wait_for_selector(".live.on")  # The stream of events, by cookie.
    assert page.evaluate("document.cookie") == ""
    # A cookie opens reading only.
    status = page.evaluate(
      "fetch('/api/ingest/batch', {method: 'POST', body: '{}'}).then((r) =>"
      " r.status)"
    )
    assert status == 401
    page.click('button:has-text("Log out")')
    page.wait_for_url("**/login")
    tab.go("/")
    assert "/login" in page.url
    tab.check()
    page.close()
    login = server.http.post(
      "/login?next=//evil.example/x",
      data={"token": "tm_secret"},
      headers={"authorization": ""},
      follow_redirects=False,
    )
    assert login.status_code == 303 and login.headers["location"] == "/"
    foreign = server.http.post(
      "/login",
      data={"token": "tm_secret"},
      headers={"authorization": "", "origin": "http://evil.example"},
    )
    assert foreign.status_code == 403


@pytest.mark.slow
def test_a_project_sees_its_own_runs_only(tmp_path):
  with monitor_server.sqlite_server(tmp_path, token="tm_secret") as server:
    server.post(
      monitor_server.joined(monitor_server.base(), monitor_server.episode("r"))
    )
    other = access.make_token(server.engine, "other", ("read",))
    headers = {"authorization": "", "cookie": f"{access.COOKIE}={other}"}
    get = lambda path: server.http.get(path, headers=headers)
    assert "No run yet" in get("/").text
    for path in (
      "/runs/1",
      "/runs/1/steps/1",
      "/rollouts/1",
      "/rollouts/1/export/json",
      "/runs/1/health",
      "/api/v1/trainings/1/curves?names=loss",
    ):
      assert get(path).status_code == 404, path
