"""Declares the settings that belong to the run itself, not to one component.

Does not load anything; imports no JAX.
"""

from __future__ import annotations

import os
from typing import Iterator, Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting
_LONGEST_NAME = 200  # 255 is a file system's; names are extended with suffixes.


@settings.settings
class RunConfig:
  """The run: where it writes, its seed, how long it may take."""

  name: str = setting(
    default="",
    doc='Name of the run\'s directory in run.dir, without slashes. "" = gym'
    " name, the time of start, and six random digits.",
  )
  dir: str = setting(default="runs", doc="Where run directories are made.")
  seed: int = setting(
    default=0,
    doc="Every random choice derives from it. Two synchronous runs with one"
    " seed are equal.",
    ge=0,
  )
  resume: str = setting(
    default="",
    doc="Run directory to continue from its last checkpoint; its"
    ' config.yaml is the base that overrides apply to. "" = a new run.',
  )
  time_budget_s: float = setting(
    default=0.0,
    doc="Training stops after the update in which this much time has passed,"
    " then evaluates and saves. 0 = no limit.",
    unit="s",
    ge=0,
  )
  preemption: Literal["auto", "gce", "off"] = setting(
    default="auto",
    doc="Whose notice that this machine will be taken away ends the run after"
    " the present step, with a checkpoint. gce: the metadata server of Google"
    " Compute Engine, at $GCE_METADATA_HOST where that is set. auto: gce on"
    " its machines. SIGTERM and SIGUSR1 do the same anywhere.",
  )
  compile_cache: str = setting(
    default="auto",
    doc="Directory of compiled programs, which the next start need not"
    " compile again. auto: $JAX_COMPILATION_CACHE_DIR, else one below the"
    " user's cache directory. off: none.",
  )
  imports: tuple[str, ...] = setting(
    default=(),
    doc="Python modules imported first, e.g. to register gyms, parsers,"
    " rewards or algorithms under short names. A setting that takes a name"
    " takes package.module:attribute as well, without this.",
  )
  dry_run: bool = setting(
    default=False,
    doc="Build everything, print the resolved configuration, shapes and"
    " memory, and exit. Same as --dry-run.",
  )

  def problems(self) -> Iterator[str]:
    name = self.name
    if name in (".", "..") or "/" in name or os.sep in name:
      yield (
        f"name={name} must be the name of a directory in run.dir, not a path;"
        f" set run.dir={os.path.dirname(name) or 'runs'} and"
        f" run.name={os.path.basename(name).strip('.') or 'mine'}"
      )
    elif not name.isprintable() or name != name.strip():
      yield (
        f"name={name!r} has spaces at an end or characters that cannot be"
        " printed; use letters, digits, - and _"
      )
    elif len(name.encode("utf-8", "surrogateescape")) > _LONGEST_NAME:
      yield (
        f"name={name[:20]}… has {len(name)} characters; a directory's name"
        f" takes {_LONGEST_NAME} bytes"
      )
    for field in ("dir", "resume"):
      if "\0" in getattr(self, field):
        yield f"{field}={getattr(self, field)!r} holds a null character"


@settings.settings
class ProcessesConfig:
  """Several processes that make one run, each on a host with devices.

  All are started with one command. A run directory keeps none of them.
  """

  coordinator: str = setting(
    default="",
    doc="host:port of process 0, which listens there. auto: as JAX finds it"
    ' out on TPU VMs, under SLURM, MPI and in Kubernetes\' JobSet. "" ='
    " $JAX_COORDINATOR_ADDRESS; without it, one process.",
  )
  count: int = setting(
    default=0, doc="Processes. 0 = $JAX_NUM_PROCESSES, or auto.", ge=0
  )
  index: int = setting(
    default=-1,
    doc="Number of this process. -1 = $JAX_PROCESS_ID, or auto.",
    ge=-1,
  )
  join_s: float = setting(
    default=300.0,
    doc="How long a process waits at the start for the others.",
    unit="s",
    gt=0,
  )
  step_s: float = setting(
    default=3600.0,
    doc="How long a process waits for the others' groups, or an evaluation"
    " of theirs.",
    unit="s",
    gt=0,
  )
  share_s: float = setting(
    default=600.0,
    doc="How long an update waits for a process's share of its groups; then"
    " the other processes' groups take their place, see metric dealt_groups."
    " 0 = without end.",
    unit="s",
    ge=0,
  )
  heartbeat_s: float = setting(
    default=100.0,
    doc="A process that has not been heard of for so long is dead, and ends"
    " the others; resume= continues from the newest checkpoint.",
    unit="s",
    ge=5,
  )

  def problems(self) -> Iterator[str]:
    coordinator = self.coordinator
    if coordinator not in ("", "auto"):
      host, colon, port = coordinator.rpartition(":")
      if not (host and colon and port.isdigit()):
        yield (
          f"coordinator={coordinator!r} must be host:port, e.g."
          " 10.0.0.1:8476, or auto"
        )
    if self.count and self.index >= self.count:
      yield f"index={self.index} must be below count={self.count}"


@settings.settings
class RolloutConfig:
  """Path by which episodes reach the engine."""

  via: Literal[
    "in_process", "proxy", "external", "hosts", "buffer", "offline"
  ] = setting(
    default="in_process",
    doc="in_process: as tokens. proxy: through an OpenAI-compatible server"
    " that the run opens on the loopback interface, as messages with"
    " screenshots; training uses the server's record. Needs the extras"
    " serve and client. external: the engine is vLLM or SGLang in another"
    " process, see external. hosts: processes that only roll out, with"
    " devices and gyms of their own, see docs/pods.md. buffer: a rollout"
    " buffer service collects them, see buffer. offline: they are recorded"
    " already, see offline.",
  )
  agent: str = setting(
    default="",
    doc="With via=proxy: module:function of a coroutine function that plays"
    " episodes in its own loop, with an openai client and a computer; see"
    " clients/agent_session.py. run_service: a service plays them, see"
    ' run_service. "" = agent.name plays them.',
  )
  host: str = setting(
    default="127.0.0.1",
    doc="With via=proxy, hosts or buffer: address that the run's server"
    " binds. Its token, or a session's key, is needed on any.",
  )
  port: int = setting(
    default=0, doc="Of that server. 0 = any free one.", ge=0, le=65535
  )
  other_sampling: Literal["mask", "refuse", "train"] = setting(
    default="mask",
    doc="With via=proxy, buffer or offline: a turn whose distribution is not"
    " the run's (temperature, top_p, top_k, min_p, a penalty, min_tokens or a"
    " grammar of its own), with which the learner's log-probs would disagree:"
    " an agent's request, a run service's event or the sampling_params of an"
    " item. mask: its tokens are not trained on, and counted as"
    " untrained_tokens. refuse: it is an error of that agent, episode or"
    " item. train: they are trained on with the log-probs of their own"
    " distribution, which algorithm.importance corrects for; greedy ones are"
    " masked. A field that is left out is the run's.",
  )
  public_url: str = setting(
    default="",
    doc="That server as an agent elsewhere reaches it, e.g."
    ' http://trainer.lan:8100. "" = http://host:port.',
  )

  silence_s: float = setting(
    default=30.0,
    doc="With via=hosts: groups of a host that has not been heard of for so"
    " long are collected by others.",
    unit="s",
    gt=0,
  )

  def problems(self) -> Iterator[str]:
    if self.agent and self.via != "proxy":
      yield (
        f"agent={self.agent} asks an OpenAI-compatible server, which"
        f" via={self.via} does not open; set rollout.via=proxy"
      )
    if self.host in ("0.0.0.0", "::") and not self.public_url:
      yield (
        f"host={self.host} is no address that an agent could call; set"
        " rollout.public_url"
      )
    if self.public_url and not self.public_url.startswith(
      ("http://", "https://")
    ):
      yield f"public_url={self.public_url!r}: give http://host:port"


@settings.settings
class FleetConfig:
  """Collectors: processes that play episodes, with gyms and without devices.

  They ask the run's engine over HTTP; see docs/fleet.md.
  """

  via: Literal["local", "ray", "join"] = setting(
    default="local",
    doc="local: episodes are played in this process. ray: by actors of a Ray"
    " cluster, which the run starts; needs the extra ray. join: by collectors"
    " that others start (commands.collect, Kubernetes). Collectors may join a"
    " run with ray, too.",
  )
  address: str = setting(
    default="",
    doc="With via=ray: of the cluster, as of ray.init: auto, host:port or"
    ' ray://host:port. "" = a cluster on this machine, for as long as the run'
    " lasts.",
  )
  collectors: int = setting(
    default=4, doc="With via=ray: actors that the run keeps alive.", ge=1
  )
  episodes: int = setting(
    default=0,
    doc="Episodes that a collector plays at a time, a group at least. 0 ="
    " its share of collect.concurrency; with via=join all of it.",
    ge=0,
  )
  cpus: float = setting(
    default=1.0, doc="With via=ray: CPUs of a node that an actor claims.", ge=0
  )
  memory: int = setting(
    default=0,
    doc="With via=ray: memory of a node that an actor claims. 0 = none.",
    unit="MiB",
    ge=0,
  )
  resources: dict[str, float] = setting(
    default={},
    doc="With via=ray: Ray's custom resources that an actor claims, e.g."
    " {android: 1}: it runs on a node that was started with them (ray start"
    " --resources), where the gyms are.",
  )
  placement: Literal["spread", "pack"] = setting(
    default="spread",
    doc="With via=ray: spread: actors over the nodes. pack: as few nodes as"
    " hold them.",
  )
  place_s: float = setting(
    default=600.0,
    doc="With via=ray: time in which the cluster has room for an actor. After"
    " it a warning names what the actor claims and what the cluster has; the"
    " run ends if no collector has begun by then.",
    unit="s",
    gt=0,
  )
  restarts: int = setting(
    default=10,
    doc="With via=ray: how often a collector is started again that ended"
    " without having delivered a group since its last start; then it is"
    " given up. The run ends when all are.",
    ge=0,
  )
  backoff_s: float = setting(
    default=1.0,
    doc="With via=ray: pause before a collector is started again; twice as"
    " long after each such end, a minute at most.",
    unit="s",
    gt=0,
  )

  @property
  def away(self) -> bool:
    """Whether episodes are played in other processes."""
    return self.via != "local"

  def problems(self) -> Iterator[str]:
    if self.via != "ray":
      for field in ("address", "resources"):
        if getattr(self, field):
          yield (
            f"{field}={getattr(self, field)} is of via=ray, and"
            f" via={self.via}; set fleet.via=ray, or leave it out"
          )
    if self.address not in ("", "auto"):
      host, colon, port = self.address.removeprefix("ray://").rpartition(":")
      if not (host and colon and port.isdigit()):
        yield (
          f"address={self.address!r} must be auto, host:port or ray://host:port"
        )
    for name, amount in self.resources.items():
      if not amount > 0:
        yield f"resources.{name}={amount:g} must be > 0"


@settings.settings
class WarmStartConfig:
  """Starting point of the policy, before GRPO."""

  source: Literal["none", "embedded", "path"] = setting(
    default="embedded",
    doc="embedded: the small checkpoint in this package. path:"
    " warm_start.path. none: random weights, or those that a policy's"
    " directory brings.",
  )
  path: str = setting(
    default="",
    doc="Directory of a saved policy, for source=path: e.g. runs/x/policy.",
  )
  steps: int = setting(
    default=0,
    doc="Updates of behaviour cloning on demonstrations by the oracle of the"
    " gym or environment, on top of the source. 0 = none.",
    ge=0,
  )
  recordings: str = setting(
    default="",
    doc="File of recorded episodes that are cloned instead of an oracle's,"
    " those that were solved; environments.play records them. Without a gym:"
    " a conversation a line, `messages` in OpenAI's form with the fields of"
    " the task.",
  )
  families: tuple[str, ...] = setting(
    default=(),
    doc="Families that the oracle demonstrates, e.g. half of those that GRPO"
    " trains on. [] = task_source.families.",
  )
  batch_size: int = setting(
    default=64, doc="Demonstrated episodes an update.", ge=1
  )
  learning_rate: float = setting(
    default=1e-3, doc="Peak of a cosine schedule.", gt=0
  )
  demonstrations: int = setting(
    default=4096, doc="Distinct demonstrated episodes, drawn in turn.", ge=1
  )

  def problems(self) -> Iterator[str]:
    if self.source == "path" and not self.path:
      yield ("source=path needs warm_start.path; give the checkpoint directory")
    if self.source != "path" and self.path:
      yield (
        f"path={self.path} is ignored by source={self.source}; set"
        " warm_start.source=path"
      )
    if self.recordings and not self.steps:
      yield (
        f"recordings={self.recordings} are not read with steps=0; set"
        " warm_start.steps"
      )
    if self.families and (self.recordings or not self.steps):
      yield (
        f"families={list(self.families)} are an oracle's; set"
        " warm_start.steps, and no warm_start.recordings"
      )


@settings.settings
class EvalConfig:
  """Success on held-out tasks."""

  on: Literal["auto", "true", "false"] = setting(
    default="auto",
    doc="Whether the run evaluates at all. auto: unless rollout.via is buffer"
    " or offline, which then need no gym.",
  )
  episodes_per_task: int = setting(
    default=50,
    doc="Tasks of each family, each played once a mode. 0 = every task of a"
    " list once (task_source.source).",
    ge=0,
    le=100_000,
  )
  families: tuple[str, ...] = setting(
    default=(),
    doc="Families that evaluations play, e.g. some that are never trained on."
    " [] = task_source.families.",
  )
  attempts: int = setting(
    default=1,
    doc="Attempts at each task in mode sampled, of which pass@k and pass^k"
    " are estimated. Mode greedy plays a task once.",
    ge=1,
    le=65536,
  )
  split: Literal["held_out", "all"] = setting(
    default="held_out",
    doc="Tasks of a list: those held out from training, or all. Of generated"
    " tasks there are held-out ones only.",
  )
  every: int = setting(
    default=0,
    doc="Evaluate every this many updates; no episode of training begins"
    " meanwhile, unless eval.beside. 0 = start and end.",
    ge=0,
  )
  beside: bool = setting(
    default=False,
    doc="Evaluations between updates are played by a second engine, which"
    " holds the weights of their update, while collecting and learning"
    " continue. Takes another copy of the weights and another KV cache. The"
    " update is saved as a checkpoint, kept until its evaluation has ended.",
  )
  slots: int = setting(
    default=0,
    doc="Slots of that second engine, and episodes that it plays at a time."
    " 0 = engine.slots and collect.concurrency.",
    ge=0,
  )
  modes: tuple[Literal["greedy", "sampled"], ...] = setting(
    default=("sampled", "greedy"),
    doc="sampled: as in training. greedy: the likeliest token. The first is"
    " the one reported as success_rate.",
  )
  seed: int = setting(
    default=1,
    doc="Chooses the held-out tasks; the same for every evaluation.",
    ge=0,
  )

  def problems(self) -> Iterator[str]:
    if self.on == "false" and self.every:
      yield (
        f"every={self.every} evaluates, and eval.on=false does not; leave one"
        " out"
      )
    if not self.modes:
      yield "modes is empty; keep greedy, sampled, or both"
    if len(set(self.modes)) != len(self.modes):
      yield f"modes={list(self.modes)} names a mode twice; name each once"
    if self.attempts > 1 and self.modes == ("greedy",):
      yield (
        f"attempts={self.attempts}: mode greedy gives the same episode each"
        " time; add sampled to eval.modes, or leave attempts at 1"
      )
    if self.beside and not self.every:
      yield "beside=true without eval.every evaluates nothing; set eval.every"
