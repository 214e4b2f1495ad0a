VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: serve test check setup clean

serve: setup
	$(BIN)/dovetail serve

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 --dist loadscope -q

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
