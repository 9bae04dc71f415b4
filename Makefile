# Two commands do everything on a fresh machine:
#   make gate   build the kernels, audit them, check their evidence; ends with the table and the gate's exit code
#   make test   the tests that need no GPU
# Choose the interpreter with PYTHON=python3.12; it must be 3.11 or 3.12.

PYTHON ?= python3
VENV ?= .venv
# The version that the goldens were recorded with. Another one can be chosen (TORCH="torch>=2.11"); so can a CPU or
# a CUDA build, by pip's own configuration.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
# Python compiles what it imports; compiling all of torch beforehand takes longer than most runs.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
INSTALLED := $(VENV)/.installed
ROOMS := artifact audit fused_backend reference

.DEFAULT_GOAL := help
.PHONY: help env gate test lint typecheck clean

help: ## show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(INSTALLED) ## make the environment in .venv

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 11), (3, 12)) or sys.exit("make: Python %d.%d found, 3.11 or 3.12 needed: make PYTHON=python3.11 ..." % v)'
	@echo "== environment: $(VENV), $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== install: $(TORCH)"
	@$(PIP) "$(TORCH)"
	@echo "== install: k3-audit with its development tools"
	@$(PIP) -e '.[dev]'
	@touch $@

gate: $(INSTALLED) ## build, audit, check evidence
	@echo "== gate"
	@$(BIN)/k3-audit gate

test: $(INSTALLED) ## all tests that need no GPU, on two cores
	@echo "== test: unit tests, and the CPU forms of the longctx and sync tiers"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "unit or longctx or sync" -n 2 --dist worksteal

lint: $(INSTALLED) ## style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# The rooms install under one import name, `k3_audit`; mypy finds them through a folder that looks like that.
typecheck: $(INSTALLED) ## types
	@mkdir -p build/types/k3_audit
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/types/k3_audit/$$room; done
	@MYPYPATH=build/types $(BIN)/mypy --explicit-package-bases --cache-dir build/types/cache -p k3_audit

clean: ## remove what was built and measured here; the environment stays
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
