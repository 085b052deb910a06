# Everything runs inside .venv; the stamp in it says that the install of these very versions went through to its end.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow soak fuzz lint format bench clean
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
	@echo "  PYTHON=... chooses the interpreter that creates $(VENV) (now: $(PYTHON)); rm -r $(VENV) starts afresh."

demo: $(STAMP)  ## install into .venv, plan, train on pictures of characters, then take single steps at up to 65,536 pairs
	@mkdir -p runs
	$(BIN)/megabatch plan --overwrite --out runs/plan.toml
	$(BIN)/megabatch train --fresh runs/plan.toml 'evaluate.large=[4096, 16384, 65536]'

test: lint  ## what has to pass before a change is merged: lint, types, tests
	$(PYTEST) -m "not slow and not soak"

test-slow: $(STAMP)  ## the tests that take longer: signals, killed processes and full disks at many moments
	$(PYTEST) -m "slow and not soak"

soak: $(STAMP)  ## the same at every moment: 30 kills, a disk that is full at each single write; tens of minutes
	$(PYTEST) -m soak

# FUZZ_INPUTS=… FUZZ_SEED=… choose how many inputs and which; the same seed makes the same inputs.
FUZZ_INPUTS ?= 1000000
FUZZ_SEED ?= 0
fuzz: $(STAMP)  ## hostile input of every kind: a million of it, and a summary in benchmarks/results/fuzz.json
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --inputs $(FUZZ_INPUTS) --seed $(FUZZ_SEED) \
	  --out benchmarks/results/fuzz.json

lint: $(STAMP)  ## ruff and mypy, nothing is changed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## let ruff fix and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)  ## time and memory of the losses
	$(BIN)/python -m benchmarks.loss

clean:  ## remove caches and builds, not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# PIP_BUILD_CONSTRAINT holds hatchling to its tested version too; a pip that does not know it yet ignores it.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$$($(PYTHON) --version 2>&1) is too old: megabatch needs 3.10 or newer; name one: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv) and try again." >&2; exit 1; }
	@echo "Installing into $(VENV): some minutes the first time."
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	PIP_BUILD_CONSTRAINT=constraints.txt $(PIP_INSTALL) -c constraints.txt -e '.[dev,bench]'
	@touch $@
