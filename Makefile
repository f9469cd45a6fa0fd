# SPDX-License-Identifier: Apache-2.0
# Every target does all the set-up it needs; nothing has to be installed first but Python 3.11-3.13
# (with venv), git and make. The set-up is done again only when a lock file, pyproject.toml or the
# set-up script changes.
#   make VENV=/path/to/env ...    another virtual environment
#   make PYTHON=python3.12 ...    another Python to make it with
VENV ?= .venv
N ?= 100000
READY := $(VENV)/.spexis-ready
READY_DEV := $(VENV)/.spexis-ready-dev
PY := $(VENV)/bin/python
SPEXIS := $(VENV)/bin/spexis

.PHONY: help setup model demo test test-all lint exact histories soak bench-cpu bench-memory bench-ladder \
  plan-check sim-check eval-drafter eval-length

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 - \2/p' $(MAKEFILE_LIST)

$(READY): requirements/cpu.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh "$(VENV)"
	@touch $@

# Tests, lint, training and the load benchmarks need a few packages more. On a fresh clone one run makes both.
$(READY_DEV): requirements/cpu.lock requirements/dev.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh "$(VENV)" dev
	@touch $(READY) $@

setup: $(READY_DEV) ## the virtual environment, from the lock files
model: $(READY) ## the demo model, converted into the user's cache
	@$(SPEXIS) model
demo: $(READY) ## the same prompts through stock vLLM and through Spexis, side by side
	@$(SPEXIS) demo
test: $(READY_DEV) ## unit tests, then engine tests on the CPU
	@$(PY) -m pytest tests
test-all: $(READY_DEV) ## the same and what takes minutes more
	@$(PY) -m pytest tests --run-slow
lint: $(READY_DEV) ## ruff: rules and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
exact: $(READY) ## greedy text equals stock vLLM at PP=1: prompts x stages x drafters, scenarios
	@$(PY) -m spexis.bench.exact
histories: $(READY_DEV) ## the verdict rules against N random histories (N=100000)
	@$(PY) -m spexis.bench.histories --n $(N)
soak: $(READY) ## 2,000 requests over HTTP with aborts, stops, disconnects and KV pressure
	@$(PY) -m spexis.bench.soak
bench-cpu: $(READY) ## Spexis against stock PP=2 and TP=2 at 1 to 16 streams
	@$(SPEXIS) bench --preset cpu
bench-memory: $(READY) ## look-ahead where KV memory is short: recomputed tokens, throughput, latency
	@$(PY) -m spexis.bench.memory
bench-ladder: $(READY_DEV) ## mode "auto" against stock PP=2 and Spexis at 1 to 64 streams, and load jumps
	@$(PY) -m spexis.bench.ladder
plan-check: $(READY) ## the planner's first choice against what was measured on two GPUs
	@$(PY) -m spexis.bench.plan_check
sim-check: $(READY) ## the simulator against the law, real engines, published rows; what selection gains
	@$(PY) -m spexis.bench.sim_check
eval-drafter: $(READY) ## the shipped drafter's accuracy by task, and its acceptance in the engine
	@$(SPEXIS) eval exit
eval-length: $(READY) ## the shipped length predictor: precision and recall by remaining tokens
	@$(SPEXIS) eval length
