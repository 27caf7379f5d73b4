# Thin: each target runs from a fresh clone. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One OpenMP thread a process: the machine's cores are shared by the server and the client, and
# results do not depend on the number of cores.
ONE_THREAD := OMP_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env test test-slow test-gpu lint format demo demo-pd demo-emulated serve verify bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## build .venv, or reuse it when it is current
	@$(PYTHON) tools/setup_env.py

test: env ## lint and the quick tests (ARGS=... goes to pytest)
	@$(BIN)/ruff check .
	@$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: env ## the tests marked slow
	@$(PYTEST) -m "slow and not gpu" $(ARGS)

test-gpu: env ## the tests that need a GPU (the Triton kernels)
	@$(PYTEST) -m gpu $(ARGS)

lint: env ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: env ## ruff: fix and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

demo: env ## a vLLM server over NVFP4 caches answers, then stops (ARGS=...)
	@$(ONE_THREAD) $(BIN)/rocm-msa demo $(ARGS)

demo-pd: env ## prefill and decode engines behind a proxy (ARGS=...)
	@$(ONE_THREAD) $(BIN)/python examples/pd/demo.py $(ARGS)

demo-emulated: env ## vLLM on gfx950 kernels in the emulator, tokens compared (ARGS="--tp 2")
	@$(ONE_THREAD) $(BIN)/rocm-msa demo --emulated $(ARGS)

serve: env ## the same server, left running until Ctrl-C (ARGS=...)
	@$(ONE_THREAD) $(BIN)/rocm-msa demo --keep-serving $(ARGS)

verify: env ## check this machine's GPU (ARGS="--target emulator" without one)
	@$(ONE_THREAD) $(BIN)/rocm-msa verify $(ARGS)

bench: env ## the benchmarks that run on this machine
	@set -e; for bench in benchmarks/bench_*.py; do \
		if [ -e "$$bench" ]; then $(ONE_THREAD) $(BIN)/python "$$bench" $(ARGS); \
		else echo "no benchmarks yet"; fi; done

docs: env ## build the documentation site into build/site, all links checked
	@$(BIN)/mkdocs build --strict

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) .venv.lock build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
