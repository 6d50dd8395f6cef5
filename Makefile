# Needs make and Python >= 3.11 with the venv module; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Extra arguments for pytest: make test ARGS='tests/test_wheel.py -x'
ARGS ?=
# Test processes side by side; much of their time they wait. Each has servers of its own.
JOBS ?= 2
# Byte code is written at the first import: that halves the time of the installation.
PIP_FLAGS ?= --no-compile
# The temporary server of Prefect takes half a minute to start on a busy machine; Prefect's default gives it 20 seconds.
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 120

.DEFAULT_GOAL := help
.PHONY: help train test lint format types check constraints clean

help:  ## List the commands
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

train: $(VENV)/.train  ## Train the example model; checkpoints are uploaded while it trains
	$(BIN)/python flows/train.py

test: $(VENV)/.test  ## Run the tests (ARGS=... goes to pytest)
	$(BIN)/pytest --numprocesses=$(JOBS) --dist=worksteal $(ARGS)

lint: $(VENV)/.dev  ## Check style, formatting and import direction
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.dev  ## Check the types with mypy and pyright
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/api.py
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint types test  ## Everything that a change has to pass

constraints:  ## Resolve the newest versions of everything into constraints.txt
	rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --upgrade pip
	build/constraints/bin/python -m pip install --editable '.[train,test,dev]'
	sed -n '/^#/p' constraints.txt > build/constraints/header
	build/constraints/bin/python -m pip freeze --all --exclude-editable | sed 's/+.*//' \
		| cat build/constraints/header - > build/constraints/new && mv build/constraints/new constraints.txt

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# One environment, three stages of completeness; stamp files say which are installed.
extras_train = train
extras_test = train,test
extras_dev = train,test,dev
comma = ,

$(VENV)/.train $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[$(extras_$*)]'
	@touch $(patsubst %,$(VENV)/.%,$(subst $(comma), ,$(extras_$*)))

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "prefect-ckpt needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
		echo "Name another one: make $(or $(MAKECMDGOALS),test) PYTHON=python3.12"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	@# The pip that comes with Python 3.11 resolves this list three times slower.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
