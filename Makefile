# Each target does its own set-up, in .venv, once. Needs python3 (3.11 or newer), pip and make.
#   make demo       the noble gases through all four stages, into build/noble-gases.mill
#   make test       the test suite without what is marked slow; make test-all: with that
#   make parity     the whole table of models, ensembles, boxes and ranks against one rank; goes on where it stopped
#   make check      ruff (format and lint) and mypy
#   make bench      the benchmarks, as tables
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check -qq --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests
LINK   := build/mattermill

# A rank computes on one core; more threads per rank would only compete with the other ranks.
export OMP_NUM_THREADS = 1

.PHONY: demo test test-all parity check format bench wheel constraints clean distclean
.DEFAULT_GOAL := check

demo: $(VENV)/.stamp-plot
	rm -rf build/noble-gases.mill build/noble-gases.png
	$(BIN)/python recipes/noble_gases.py --out build/noble-gases.mill --png build/noble-gases.png

test: $(VENV)/.stamp-dev
	$(PYTEST) -m "not slow" tests

test-all: $(VENV)/.stamp-dev
	$(PYTEST) -m "not parity" tests

parity: $(VENV)/.stamp-dev
	mkdir -p build
	MATTERMILL_PARITY_LOG=$(CURDIR)/build/parity.log $(PYTEST) -m parity tests/parity

check: $(VENV)/.stamp-dev $(LINK)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=build $(BIN)/mypy -m mattermill -p mattermill.domain -p mattermill.stages -p mattermill.pipeline

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/lj_step.py
	$(BIN)/python benchmarks/runner_overhead.py
	$(BIN)/python benchmarks/batched_vs_solo.py
	$(BIN)/python benchmarks/neighbor_lists.py
	$(BIN)/python benchmarks/exchange.py

wheel: $(VENV)/.stamp-dev
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .

# The pins of this environment; torch without the local part of its version, which names one build of it.
constraints: $(VENV)/.stamp-dev
	grep '^#' constraints.txt > build/constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' >> build/constraints.txt
	mv build/constraints.txt constraints.txt

# mypy has to see the root folder as the package `mattermill`, whatever this clone is called.
$(LINK):
	mkdir -p build
	ln -sfn .. $(LINK)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mattermill needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-plot: pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) (once; a few minutes)"
	$(PIP) --editable '.[plot]'
	touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) (once; a few minutes)"
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.stamp-plot

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
