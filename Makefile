# make demo, make test, make lint, make bench: each creates the virtual environment and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c pins.txt

.PHONY: demo test lint bench clean

demo: $(VENV)/.plots $(VENV)/.solvers
	$(BIN)/snarenet demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(PYTEST)

lint: $(VENV)/.dev $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/snarenet bench repair --device cpu
	$(BIN)/python benchmarks/robustness.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# one stamp for each extra that has been installed
$(VENV)/.%: pyproject.toml pins.txt | $(VENV)/bin/python
	$(PIP) -e '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .ruff_cache .hypothesis
