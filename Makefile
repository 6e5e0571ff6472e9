# `make demo` trains the embedded chain and shows the result; `make test` checks everything.
# Both need Python 3.11+ and make, and set up .venv on their own.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    ?= runs/quickstart

# The embedded models are small: more threads than this only wait for each other.
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layers unit bench report clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

setup: $(STAMP)  ## make .venv and install the project with its pinned constraints

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-input \
	  -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train the embedded chain, evaluate before and after, write a report (6 minutes)
	$(BIN)/workflow-rl train configs/quickstart.yaml output_dir=$(RUN) --overwrite
	$(BIN)/workflow-rl evaluate $(RUN)
	$(BIN)/workflow-rl report $(RUN)

test: lint types layers unit  ## format, lint, types, layers and the whole test suite

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# Files are shared out whole, so that each makes its checkpoints once; a thread for each process.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

bench: $(STAMP)  ## cost of one training iteration over the cost of its model calls
	$(BIN)/python -m benchmarks.iteration_cost

report: $(STAMP)  ## write the report of the run in RUN (default runs/quickstart)
	$(BIN)/workflow-rl report $(RUN)

clean:  ## remove .venv and caches, keep the runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
