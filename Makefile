# Every target sets itself up: `make demo` and `make test` need Python 3.11 and nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
VENV_LEGACY := .venv-2.15
DATA ?= digits
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Tests that follow each other share what they export: each process takes one half of them.
WORKERS := -n 2 --dist worksteal

# TensorFlow's C++ side reports on every start that there is no GPU.
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help demo test test-slow test-legacy lint format clean

help:
	@echo "make demo         train, quantize, export and verify a small network (DATA=fashion-mnist)"
	@echo "make test         run the tests (PYTEST_ARGS='-k verify')"
	@echo "make test-slow    run the long sweeps: hundreds of random calls of each operator"
	@echo "make test-legacy  run the short part of them on TensorFlow 2.15"
	@echo "make lint         check style, formatting and types"
	@echo "make format       put style and formatting right"
	@echo "make clean        remove the virtual environments and caches"

demo: $(VENV)/.complete
	$(VENV)/bin/python tutorials/demo.py --data $(DATA) $(DEMO_ARGS)

test: $(VENV)/.complete
	$(VENV)/bin/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-slow: $(VENV)/.complete
	$(VENV)/bin/python -m pytest $(WORKERS) -m slow $(PYTEST_ARGS)

test-legacy: $(VENV_LEGACY)/.complete
	$(VENV_LEGACY)/bin/python -m pytest $(WORKERS) -m legacy $(PYTEST_ARGS)

lint: $(VENV)/.complete
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

format: $(VENV)/.complete
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

clean:
	rm -rf $(VENV) $(VENV_LEGACY) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# The stamp is written last and its directory made anew first, so an environment whose
# installation was cut short is never taken for a good one.
$(VENV)/.complete: pyproject.toml
	$(call make_venv,$(VENV),-e '.[dev]')

$(VENV_LEGACY)/.complete: pyproject.toml
	$(call make_venv,$(VENV_LEGACY),-e '.[test]' 'tensorflow==2.15.*')

define make_venv
	@test -n "$(PYTHON)" || { echo "No python3 found: install Python 3.11."; exit 1; }
	@echo "Setting up $(1) with $(PYTHON): this downloads TensorFlow and takes some minutes."
	@rm -rf $(1)
	@$(PYTHON) -m venv $(1) || { rm -rf $(1); echo "On Debian: apt-get install python3.11-venv"; exit 1; }
	@$(1)/bin/python -m pip install --quiet $(2)
	@touch $(1)/.complete
endef
