# Every target sets itself up: `make demo` and `make test` need Python 3.11 and nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
VENV_LEGACY := .venv-2.15
# What `make test-version` takes; NUMPY may be 'numpy<2'.
TENSORFLOW ?= 2.19
NUMPY ?= numpy
PYTHON_VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV_VERSION = .venv-$(TENSORFLOW)-$(PYTHON_VERSION)-$(shell echo '$(NUMPY)' | tr -cs '[:alnum:].\n' -)
# Prints what the extra `docs` asks for, without the package and its dependencies.
DOCS_EXTRA = import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	print(*project['optional-dependencies']['docs'], sep='\n')
# What the environments hold. PINNED=1, as in CI, installs the versions in .ci/pinned, which have
# hashes. They are of Linux on x86-64 and Python 3.11: other systems get the newest versions.
DEV := .[dev]
LEGACY := .[test] tensorflow==2.15.*
TOSA := tosa-converter-for-tflite==2026.2.0 tosa-tools==2026.8.0
DIST := build twine uv cyclonedx-bom
PINNED ?=
CAN_PIN = $(filter Linux-x86_64-3.11,$(shell uname -sm | tr ' ' -)-$(PYTHON_VERSION))
PIN = .venv-dist/bin/uv pip compile --quiet --upgrade --generate-hashes --no-annotate - \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-package keras-qat \
	--custom-compile-command 'make pin' --output-file .ci/pinned
DATA ?= digits
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Tests that follow each other share what they export: each process takes one half of them.
WORKERS := -n 2 --dist worksteal --durations=10

# TensorFlow's C++ side reports on every start that there is no GPU.
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help demo test test-slow test-part test-legacy test-arm64 test-x86 emulator-arm64 emulator-x86 test-plans test-tosa test-gpu test-version lint format docs notebooks dist resolve pin clean

help:
	@echo "make demo         train, quantize, export and verify a small network (DATA=fashion-mnist)"
	@echo "make test         run the tests (PYTEST_ARGS='-k verify')"
	@echo "make test-slow    run the long sweeps: hundreds of random calls of each operator"
	@echo "make test-part    run what this commit's part of the slow checks has (PART=3: part 3)"
	@echo "make test-legacy  run the short part of them on TensorFlow 2.15"
	@echo "make test-arm64   run files as on phones, in LiteRT for 64-bit ARM, emulated (Debian, root)"
	@echo "make test-x86     run files on x86 processors without AVX-512, emulated (Debian, root)"
	@echo "make test-plans   compare the plan of every network with the recorded one"
	@echo "make test-tosa    compare files with Arm's TOSA, its converter and its reference model"
	@echo "make test-gpu     compare a GPU with the CPU, time steps on it, print a table"
	@echo "make test-version run it on another (TENSORFLOW=2.19 PYTHON=python3.12 NUMPY='numpy<2')"
	@echo "make lint         check style, formatting, types, sizes and language"
	@echo "make format       put style and formatting right"
	@echo "make dist         build the wheel, check it, use it in clean environments of Python 3.10 to 3.13"
	@echo "make resolve      resolve all extras on Python 3.10 to 3.13, newest and lowest versions (network)"
	@echo "make pin          write the newest versions and their hashes to .ci/pinned, for CI (network)"
	@echo "make docs         build the site in build/site, with warnings as errors"
	@echo "make notebooks    execute the tutorials, and write their notebooks anew"
	@echo "make clean        remove the virtual environments and caches"

demo: $(VENV)/.complete
	$(VENV)/bin/python tutorials/demo.py --data $(DATA) $(DEMO_ARGS)

test: $(VENV)/.complete
	$(VENV)/bin/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-slow: $(VENV)/.complete
	$(VENV)/bin/python -m pytest $(WORKERS) -m slow $(PYTEST_ARGS)

test-part: $(VENV)/.complete emulator-arm64 emulator-x86
	$(VENV)/bin/python -m benchmarks.rotation --run $(PART)

test-legacy: $(VENV_LEGACY)/.complete
	$(VENV_LEGACY)/bin/python -m pytest $(WORKERS) -m 'legacy and not slow' $(PYTEST_ARGS)

test-arm64: $(VENV)/.complete emulator-arm64
	$(VENV)/bin/python -m pytest tests/arm64 -m '' $(PYTEST_ARGS)

test-x86: $(VENV)/.complete emulator-x86
	$(VENV)/bin/python -m pytest tests/x86 -m '' $(PYTEST_ARGS)

emulator-arm64: $(VENV)/.complete
	@test -e build/arm64/.complete || PYTHON=$(CURDIR)/$(VENV)/bin/python timeout 300 tests/arm64/setup.sh build/arm64 || \
		echo "No emulator: that needs root, and apt of Debian 12. Tests that want it are skipped."

emulator-x86:
	@timeout 300 tests/install_qemu.sh qemu-x86_64 || \
		echo "No emulator: that needs root, and apt of Debian. Tests that want it are skipped."

test-plans: $(VENV)/.complete
	$(VENV)/bin/python -m benchmarks.oracle compare tests/networks/plans.txt $(ORACLE_ARGS)

test-tosa: $(VENV)/.complete $(VENV)-tosa/.complete
	$(VENV)/bin/python -m pytest tests/tosa -m '' $(PYTEST_ARGS)

test-gpu: $(VENV)/.complete
	$(VENV)/bin/python -m benchmarks.gpu

test-version:
	@test -e $(VENV_VERSION)/.complete || $(MAKE) --no-print-directory $(VENV_VERSION)
	$(VENV_VERSION)/bin/python -m pytest $(WORKERS) -m 'legacy and not slow' $(PYTEST_ARGS)

lint: $(VENV)/.complete
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m benchmarks.bars

format: $(VENV)/.complete
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

resolve: .venv-dist/.complete
	.venv-dist/bin/python .ci/resolve .venv-dist/bin/uv

# hatchling and editables build the package itself. uv ignores that backports-strenum 1.3 is for
# Python before 3.11.
pin: .venv-dist/.complete
	mkdir -p build .ci/pinned
	$(PYTHON) -c "$(DOCS_EXTRA)" | $(PIN)/docs.txt
	printf '%s\n' '$(DEV)' hatchling editables 'backports-strenum<1.3' | $(PIN)/dev.txt
	printf '%s\n' $(foreach it,$(LEGACY),'$(it)') hatchling editables | $(PIN)/legacy.txt
	printf '%s\n' $(TOSA) | $(PIN)/tosa.txt
	printf '%s\n' $(DIST) | $(PIN)/dist.txt

dist: .venv-dist/.complete
	.ci/dist .venv-dist/bin/python

# The site is made from the sources' text: that needs no TensorFlow.
docs: $(VENV)-docs/.complete
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict --quiet

notebooks: $(VENV)/.complete
	$(VENV)/bin/python -m pip install --quiet -e '.[notebooks]'
	$(VENV)/bin/python docs/notebooks.py

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# The stamp is written last and its directory made anew first, so an environment whose
# installation was cut short is never taken for a good one.
$(VENV)/.complete: pyproject.toml
	$(call make_venv,$(VENV),-e '$(DEV)',dev)

$(VENV_LEGACY)/.complete: pyproject.toml
	$(call make_venv,$(VENV_LEGACY),-e $(foreach it,$(LEGACY),'$(it)'),legacy)

# An environment of its own: the tools pin versions of what the package uses, too.
$(VENV)-tosa/.complete:
	$(call make_venv,$(VENV)-tosa,$(TOSA),tosa)

.venv-dist/.complete:
	$(call make_venv,.venv-dist,$(DIST),dist)

$(VENV)-docs/.complete: pyproject.toml
	@mkdir -p build
	@$(PYTHON) -c "$(DOCS_EXTRA)" > build/requirements-docs.txt
	$(call make_venv,$(VENV)-docs,-r build/requirements-docs.txt,docs)

# TensorFlow has the interpreter of 2.15 and 2.16 itself; kernels of 2.17 to 2.19 have faults.
.venv-%: FORCE
	$(call make_venv,$@,-e '.[test]' 'tensorflow==$(TENSORFLOW).*' 'tf-keras==$(TENSORFLOW).*' '$(NUMPY)' \
		$(if $(filter 2.15 2.16,$(TENSORFLOW)),,'ai-edge-litert>=2.0'))

FORCE:

define make_venv
	@test -n "$(PYTHON)" || { echo "No python3 found: install Python 3.11."; exit 1; }
	@test ! -e $(1) -o -e $(1)/.begun -o -e $(1)/.complete || \
		{ echo "$(1) would be removed, but is not of this Makefile: name another directory, VENV=..."; exit 1; }
	@echo "Setting up $(1) with $(PYTHON): this downloads TensorFlow and takes some minutes."
	@rm -rf $(1)
	@$(PYTHON) -m venv $(1) || { rm -rf $(1); echo "On Debian: apt-get install python3.11-venv"; exit 1; }
	@touch $(1)/.begun
	@$(if $(and $(PINNED),$(3),$(CAN_PIN)), \
		$(1)/bin/python -m pip install --quiet --require-hashes -r .ci/pinned/$(3).txt \
		$(if $(filter -e,$(2)),&& $(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .), \
		$(1)/bin/python -m pip install --quiet $(2))
	@touch $(1)/.complete
endef
