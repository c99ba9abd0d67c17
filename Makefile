# make demo   the end-to-end gate's smoke protocol on Kokoro: speaks, transcribes, judges, prints a table
# make test   ruff, mypy, import-linter and all tests that need no GPU
# make lint   the first three of make test; make wheel, make clean
#
# Each makes its own environment first and says what it downloads. Variables: PYTHON, TORCH, TRITON, PIP_TORCH_ARGS
# (options for installing torch), VENV (the environment's folder, .venv).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help environment demo test lint wheel clean

VENV ?= .venv
export PYTHON TORCH TRITON PIP_TORCH_ARGS VENV
PYTHON_IN := "$(VENV)/bin/python"

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

environment:
	@scripts/environment.sh

demo: environment
	@echo "voxfuse: speaking and judging Kokoro on the CPU, about 5 minutes on 2 cores; nothing more is downloaded"
	@rm -rf .demo
	@$(PYTHON_IN) -m voxfuse gate --stack kokoro --device cpu --protocol smoke --out .demo/kokoro-smoke || { \
		status=$$?; [ $$status -eq 3 ] || exit $$status; \
		echo "voxfuse: nothing failed; what a CPU cannot decide (throughput) is not judged, hence status 3 of the gate"; }

test: lint
	@echo "voxfuse: all tests that need no GPU, about 20 minutes on 2 cores; nothing more is downloaded"
	OMP_NUM_THREADS=1 $(PYTHON_IN) -m pytest -q -m "not gpu" -n auto --maxprocesses 4 --dist loadfile

lint: environment
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) -m ruff format --check .
	$(PYTHON_IN) -m mypy
	"$(VENV)/bin/lint-imports"

wheel: environment
	$(PYTHON_IN) -m build --wheel

clean:
	rm -rf .venv .venv.lock .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache .benchmarks
	find voxfuse tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
