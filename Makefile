# Two commands matter to a new user: `make demo` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
# Neither needs a GPU, and PyPI's torch for Linux brings gigabytes of CUDA. The address of PyTorch's own index for the CPU,
# given here, saves them; out of reach or not given: the torch that pip finds.
TORCH_INDEX ?=
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
VENV := .venv
BIN := $(VENV)/bin
TORCH_STAMP := $(VENV)/.torch
DEMO_STAMP := $(VENV)/.demo
STAMP := $(VENV)/.installed

.PHONY: demo test lint types contracts build clean

demo: $(DEMO_STAMP)
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
	cd .types && ../$(BIN)/python ../tests/arguments.py

contracts: $(STAMP)
	$(BIN)/lint-imports

build: $(STAMP)
	$(BIN)/python -m pip wheel --no-deps -w dist .

$(TORCH_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
ifneq ($(strip $(TORCH_INDEX)),)
	@$(BIN)/python -m pip install -qq --no-deps --retries 1 --index-url $(TORCH_INDEX) "$(TORCH)" \
		|| echo "No $(TORCH) from $(TORCH_INDEX): pip chooses torch, on Linux with gigabytes of CUDA."
endif
	$(BIN)/python -m pip install -q "$(TORCH)"
	@touch $@

$(DEMO_STAMP): $(TORCH_STAMP) setup.py
	$(BIN)/python -m pip install -q -e ".[serve]"
	@touch $@

$(STAMP): $(TORCH_STAMP) setup.py
	$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .types build dist *.egg-info demo-work
