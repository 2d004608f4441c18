# make demo, test, test-versions, lint, docs, bench, fuzz, docs-tables: each creates the virtual environment and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c pins.txt

VERSIONS ?= 3.10 3.11 3.12 3.13

.PHONY: demo test test-versions lint docs bench fuzz docs-tables clean

demo: $(VENV)/.demo
	$(BIN)/snarenet demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(PYTEST)

# the same with every supported Python that is here, each in an environment of its own
test-versions:
	@for version in $(VERSIONS); do \
	  if ! python$$version --version 2> /dev/null; then echo "python$$version is not here: not tested"; continue; fi; \
	  $(MAKE) test PYTHON=python$$version VENV=build/python$$version || exit 1; \
	done

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config lab/pyproject.toml

# the site, into build/site: lessons run, two at a time with a thread each; warnings are errors
docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 docs build/site
	@echo build/site/index.html

bench: $(VENV)/.bench
	$(BIN)/snarenet bench repair --device cpu
	$(BIN)/snarenet bench robustness --device cpu

# FUZZ="--seed 1 --samples 1000000" for another search
fuzz: $(VENV)/.test
	$(BIN)/snarenet fuzz $(FUZZ)

# the tables of docs/, from docs/data and docs/results
docs-tables: $(VENV)/.test
	$(BIN)/python -m snarenet_lab.report docs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# what each of them needs of the library and of its lab; one stamp for each that has been installed
NEEDS.demo = -e '.[plots,solvers]'
NEEDS.test = -e '.[test]' -e ./lab
NEEDS.dev = -e '.[dev,test]' -e ./lab
NEEDS.docs = -e '.[docs]'
NEEDS.bench = -e . -e './lab[bench]'

$(VENV)/.%: pyproject.toml lab/pyproject.toml pins.txt | $(VENV)/bin/python
	$(PIP) $(NEEDS.$*)
	@touch $@

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .ruff_cache .hypothesis
