# Everything runs inside .venv. A stamp in it marks a finished install of the current versions: one of what the demo needs, one of all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-slow soak fuzz lint format bench clean
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
	@echo "  PYTHON=... chooses the interpreter that creates $(VENV) (now: $(PYTHON)); rm -r $(VENV) starts afresh."

demo: $(DEMO_STAMP)  ## install into .venv, plan, train a small CLIP, then take single steps at large batches
	@mkdir -p runs
	$(BIN)/megabatch plan --overwrite --out runs/plan.toml
	$(BIN)/megabatch train --fresh runs/plan.toml

# Side by side: mypy runs in one process.
test: $(STAMP)  ## linters, types and tests: what must pass before a change is merged
	@$(MAKE) --no-print-directory -j 2 lint test-quick

test-quick: $(STAMP)
	$(PYTEST) -m "not slow and not soak"

test-slow: $(STAMP)  ## the tests that take longer: signals, killed processes, full disks
	$(PYTEST) -m "slow and not soak"

soak: $(STAMP)  ## the same at every moment: 30 kills, a full disk at every write; tens of minutes
	$(PYTEST) -m soak

# The same FUZZ_SEED makes the same inputs.
FUZZ_INPUTS ?= 1000000
FUZZ_SEED ?= 0
fuzz: $(STAMP)  ## a million hostile inputs, and a summary in benchmarks/results/fuzz.json
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --inputs $(FUZZ_INPUTS) --seed $(FUZZ_SEED) \
	  --out benchmarks/results/fuzz.json

lint: $(STAMP)  ## ruff and mypy; changes nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## let ruff fix and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)  ## time and memory of the losses
	$(BIN)/python -m benchmarks.loss

clean:  ## remove caches and builds, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# PIP_BUILD_CONSTRAINT pins the build backend too; a pip that does not know the variable ignores it.
INSTALL := PIP_BUILD_CONSTRAINT=constraints.txt $(PIP_INSTALL) -c constraints.txt

$(STAMP): pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing into $(VENV): some minutes the first time."
	@rm -f $@ $(DEMO_STAMP)
	$(INSTALL) -e '.[dev,bench]'
	@touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing into $(VENV): some minutes the first time."
	@rm -f $@
	$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$$($(PYTHON) --version 2>&1) is too old: megabatch needs 3.10 or newer; name one: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv) and try again." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
