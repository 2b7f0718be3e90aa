PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir .site
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: setup test test-all test-versions check demo bench docs clean

setup: $(VENV)/ready

# The program and what it needs, which is all that the demo is; `ready` adds what tests, types and docs need.
$(VENV)/program: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/ready: $(VENV)/program
	$(PIP) --editable '.[dev]'
	touch $@

test: check
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: check
	$(BIN)/python -m pytest $(PARALLEL)

# Each torch that is promised, in an environment of its own below .venvs: gigabytes, so before a release only.
# One alone: make test-versions TORCH=2.11; with another Python: make test-versions TORCH=2.13 PYTHON=python3.12
test-versions:
	$(PYTHON) tests/versions.py $(TORCH)

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(MKDOCS) --quiet

demo: $(VENV)/program
	$(BIN)/threepass compare --demo

bench: setup
	$(BIN)/threepass bench

docs: setup
	$(MKDOCS)

clean:
	rm -rf $(VENV) .venvs .site .pytest_cache .mypy_cache .ruff_cache runs
