VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# Without a GPU its thousands of tests are left out, where they would be collected by each worker and skipped one by one.
NO_GPU := $(if $(wildcard /dev/nvidia[0-9]*),,--ignore tests/gpu)

.PHONY: serve test lint check setup clean

serve: setup
	$(BIN)/dovetail serve

test: setup
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -q --ignore tests/triton $(NO_GPU)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -p no:schemathesis -q tests/triton

check: lint test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
