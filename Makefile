# Two commands are enough: `make run` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c "$(IS_NEW_ENOUGH)" 2>/dev/null && echo $$p && break; done)
INSTALLED := $(patsubst $(VENV)/.setup-%,%,$(firstword $(wildcard $(VENV)/.setup-*)))
EXTRA ?= $(or $(INSTALLED),$(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))
RUNS ?= results/runs
STAMP := $(VENV)/.setup-$(EXTRA)
UV := $(shell command -v uv || echo $(BIN)/uv)
CPU_TORCH := $(if $(PIP_FIND_LINKS),$(foreach place,$(PIP_FIND_LINKS),--find-links $(place)),--torch-backend cpu)
# kvpress goes in without its requirements, which are older than vLLM's; the two that it imports are an extra
KVPRESS := kvpress==0.5.5
OVERRIDES := .ci/overrides.txt $(if $(filter cpu,$(EXTRA)),.ci/cpu-overrides.txt)
OPTIONS := $(if $(filter cpu,$(EXTRA)),$(CPU_TORCH)) $(foreach file,$(OVERRIDES),--override $(file))

.PHONY: help setup run test parity report figures bench gpu-check setup-kvpress peer-check soak lint
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16
	@echo "  ARGS=\"policy=full\" passes arguments to run, EXTRA=cpu|gpu chooses the build of vLLM, PYTHON= the interpreter"

setup: $(STAMP) ## .venv with everything, and the embedded model; quick the second time

$(STAMP): pyproject.toml $(OVERRIDES)
	@"$(PYTHON)" -c "$(IS_NEW_ENOUGH)" 2>/dev/null || { \
		echo "error: Python 3.11 or newer was not found. Install it, or name it: make setup PYTHON=PATH" >&2; exit 1; }
	@[[ "$(EXTRA)" == cpu || "$(EXTRA)" == gpu ]] || { echo "error: EXTRA=$(EXTRA) is unknown. Use cpu or gpu." >&2; exit 1; }
	@for other in $(filter-out $(STAMP),$(wildcard $(VENV)/.setup-*)); do echo "removing $(VENV) of $$other"; rm -rf $(VENV); done
	@[[ -x $(BIN)/python ]] || if command -v uv >/dev/null; then uv venv --python "$(PYTHON)" $(VENV); else "$(PYTHON)" -m venv $(VENV); fi
	@[[ -x "$(UV)" ]] || $(BIN)/python -m pip install --quiet uv
	"$(UV)" pip install --compile-bytecode --python $(BIN)/python $(OPTIONS) -e ".[$(EXTRA),kvpress,dev]"
	"$(UV)" pip install --compile-bytecode --python $(BIN)/python --no-deps $(KVPRESS)
	$(BIN)/python -m harness.models
	@touch $@

PEER := .venv-kvpress
PEER_STAMP := $(PEER)/.setup-$(EXTRA)
PEER_PACKAGES := $(KVPRESS) transformers==5.2.0 torch==2.13.0

setup-kvpress: $(PEER_STAMP) ## .venv-kvpress, where engine=kvpress runs: kvpress needs an older transformers than vLLM

$(PEER_STAMP): | $(STAMP)
	@[[ -x $(PEER)/bin/python ]] || "$(UV)" venv --python $(BIN)/python $(PEER)
	"$(UV)" pip install --compile-bytecode --python $(PEER)/bin/python $(if $(filter cpu,$(EXTRA)),$(CPU_TORCH)) $(PEER_PACKAGES)
	@touch $@

peer-check: setup setup-kvpress ## kept positions against those of kvpress, a few minutes
	$(BIN)/python -m pytest -m peer tests/engines/kvpress -rs --durations=5

run: setup ## the main job on the embedded model: paged eviction on longbench_mini
	$(BIN)/python -m harness $(ARGS)

test: setup ## all tests, the fast ones first, two at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs --durations=10

parity: setup ## the long tests: published scores, every policy in every mode
	$(BIN)/python -m pytest -m parity -rs --durations=5

report: setup ## tables, figures and one HTML page from run folders, into results/report
	$(BIN)/python -m harness.report $(RUNS) $(ARGS)

figures: setup ## all figures from run folders alone, into results/report/figures
	$(BIN)/python -m harness.report $(RUNS) --figures results/report/figures $(ARGS)

bench: setup ## paged eviction against full cache under load, interleaved, on the embedded model
	$(BIN)/python -m harness.bench preset=cpu_curve overwrite=true $(ARGS)

gpu-check: setup ## the plugin on a CUDA device, as a table of verdicts
	$(BIN)/python -m harness.engines.vllm.gpu_check

soak: setup ## ten minutes of random load on every policy
	$(BIN)/python -m tests.engines.vllm.soak $(ARGS)

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
