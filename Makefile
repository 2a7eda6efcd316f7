# Two commands matter to a new user: `make demo` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types contracts build clean

demo: $(STAMP)
	$(BIN)/duovolt demo

# Tests that start servers and send signals run alone: they mind what else is running.
test: $(STAMP) lint types contracts
	$(BIN)/python -m pytest -q -m "not slow and not gpu" -n 2 --dist loadfile --ignore tests/runtime --ignore tests/pipeline
	$(BIN)/python -m pytest -q -m "not slow and not gpu" tests/runtime tests/pipeline

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The repository root is the package, whatever folder it was cloned into: a link gives it its name for the checker.
types: $(STAMP)
	@mkdir -p .types && ln -sfn .. .types/duovolt
	cd .types && ../$(BIN)/mypy --config-file ../pyproject.toml -p duovolt

contracts: $(STAMP)
	$(BIN)/lint-imports

build: $(STAMP)
	$(BIN)/python -m pip wheel --no-deps -w dist .

$(STAMP): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .types build dist *.egg-info demo-work
