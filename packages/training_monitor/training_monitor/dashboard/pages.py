"""Lists every page by its path."""

from __future__ import annotations

import sqlalchemy as sa

from training_monitor.dashboard import curves as curves_lib
from training_monitor.dashboard import measurements
from training_monitor.dashboard import page_request
from training_monitor.dashboard import rollout_list
from training_monitor.dashboard import task_comparison
from training_monitor.dashboard import token_text
from training_monitor.dashboard.views import attempts_page
from training_monitor.dashboard.views import configuration_page
from training_monitor.dashboard.views import health_page
from training_monitor.dashboard.views import log_page
from training_monitor.dashboard.views import rollout_page
from training_monitor.dashboard.views import run_pages
from training_monitor.dashboard.views import search_page
from training_monitor.dashboard.views import step_page
from training_monitor.dashboard.views import task_pages
from training_monitor.server import queries as queries_lib
from training_monitor.server import screenshots as screenshots_lib

PageRequest = page_request.PageRequest
File = page_request.File
Link = page_request.Link
Redirect = page_request.Redirect
PATHS: tuple[tuple[str, str], ...] = (
  ("/", "runs"),
  ("/compare", "compare"),
  ("/compare/tasks", "compare_tasks"),
  ("/runs/{id:int}", "run"),
  ("/runs/{id:int}/rollouts", "run_rollouts"),
  ("/runs/{id:int}/steps", "steps"),
  ("/runs/{id:int}/steps/{step:int}", "step"),
  ("/runs/{id:int}/evals", "evals"),
  ("/runs/{id:int}/tasks", "tasks"),
  ("/runs/{id:int}/tasks/{task:int}", "task"),
  ("/runs/{id:int}/health", "health"),
  ("/runs/{id:int}/search", "search"),
  ("/runs/{id:int}/log", "log"),
  ("/runs/{id:int}/config", "config"),
  ("/runs/{id:int}/{kind}/{measurement:int}", "measurement"),
  ("/rollouts", "rollouts"),
  ("/rollouts/{id:int}", "rollout"),
  ("/rollouts/{id:int}/beside", "beside"),
  ("/rollouts/{id:int}/export/{format}", "export"),
)
"""Path -> the method of `Pages` that renders it."""


class Pages:
  """Makes every page."""

  def __init__(
    self,
    engine: sa.Engine,
    queries: queries_lib.Queries,
    files: screenshots_lib.ScreenshotFiles,
    curves: curves_lib.Curves,
    texts: token_text.TokenTexts,
    timings: health_page.Timings,
    writer: object,
  ):
    """Args:

    engine: Engine of the upgraded database.
    queries: about it.
    files: Folder of the screenshots.
    curves: columns of runs, shared with the API.
    texts: tokens as text.
    timings: Timings of the server.
    writer: Writer of the server, for its counters.
    """
    runs = run_pages.RunPages(engine, queries, curves)
    sources = engine, queries, curves, runs.head
    steps = step_page.StepPages(*sources)
    rollouts = rollout_page.RolloutPages(*sources, files=files, texts=texts)
    lists = rollout_list.RolloutLists(*sources)
    tasks = task_pages.TaskPages(*sources)
    health = health_page.HealthPages(*sources, timings=timings, writer=writer)
    self.eval_points = runs.eval_points
    self.runs, self.compare, self.run = runs.runs, runs.compare, runs.run
    self.compare_tasks = task_comparison.TaskComparisonPage(engine).page
    self.steps = runs.steps
    self.config = configuration_page.ConfigurationPage(*sources).page
    self.step, self.measurement = steps.step, steps.measurement
    self.rollouts, self.run_rollouts = lists.of_all, lists.of_run
    self.rollout, self.export = rollouts.rollout, rollouts.export
    self.evals = measurements.MeasurementPages(*sources).evals
    self.tasks, self.task = tasks.tasks, tasks.task
    self.health = health.health
    self.beside = attempts_page.AttemptPages(*sources).beside
    self.search = search_page.SearchPages(*sources).search
    self.log = log_page.LogPages(*sources).log
