# Everything runs from .venv, which `make setup` makes with pip alone, so that your pip configuration counts.
# Another Python than python3:  make setup PYTHON=python3.12

PYTHON ?= python3
TORCH  := torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
KERNELS := $(VENV)/.compiled
OLDEST := .venv-oldest

# Bytecode is kept beside the modules: each of the tests' processes would compile hundreds of them anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup wheel demo gpu test test-all test-oldest lint typecheck checks clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) $(KERNELS)  ## make .venv with everything that the other targets need (once; again when pyproject.toml changes)

# PyTorch is the build that pip's configuration offers (CPU, CUDA).
# Python compiles a module when it is first imported; to compile all of them takes longer than to install them.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "setup: $(PYTHON) is missing or older than 3.11; choose another: make setup PYTHON=..." >&2; exit 1; }
	@echo "setup: installing $(TORCH) and the package into $(VENV) with $$($(PYTHON) --version); a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-compile $(TORCH) --editable '.[dev]'
	@touch $@

$(KERNELS): $(STAMP) $(wildcard src/rfa/ops/cpu/kernels/*)
	@$(BIN)/rfa doctor >/dev/null  # compiles the kernels, for which the first test or run would wait
	@touch $@

wheel: setup  ## build dist/: the source distribution, and a wheel with compiled kernels for this kind of machine
	@HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(BIN)/python -m build

demo: setup  ## train four small models, print perplexity over context length, draw the figure in demo-results/
	@$(BIN)/rfa demo --out demo-results --overwrite

# LIMIT=190 for the first three minutes; TINY=1 without a GPU.
gpu: setup  ## on a machine with a GPU: values, speed and training steps, nine and a half minutes (LIMIT, TINY)
	@$(BIN)/python benchmarks/gpu.py $(if $(LIMIT),--limit $(LIMIT)) $(if $(TINY),--tiny)

test: checks  ## lint, typecheck, then the tests of every change: four minutes of processor time
	@$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: checks  ## the same with every test and every combination of options, as a release runs it
	@RFA_TESTS=all $(BIN)/python -m pytest -n 2 --dist worksteal

# One thread: what darts loads has an OpenMP of its own, and two of them wait for each other.
# Without the kernels, which need a newer interpreter of triton, and the bench, whose peers differ by torch.
test-oldest:  ## the tests with the oldest versions of packaging/oldest.txt, in .venv-oldest; PYTHON must be 3.11
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "test-oldest: $(PYTHON) is no Python 3.11; choose one: make test-oldest PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install -qq --no-compile -r packaging/oldest.txt --editable '.[all,onnx,sktime,darts,stonesoup]'
	@OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest tests/rfa tests/lab tests/test_cli.py tests/test_import.py \
		--ignore tests/rfa/ops/triton --ignore tests/lab/test_bench.py

checks: $(STAMP)  # types are checked on one core while the other compiles the kernels
	@$(MAKE) --no-print-directory -j2 $(KERNELS) typecheck lint

lint: $(STAMP)  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

typecheck: $(STAMP)  ## mypy on src/
	@$(BIN)/mypy

clean:  ## remove caches and built files; runs, results and .venv stay
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
