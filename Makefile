# Every target sets itself up: a virtual environment in .venv, installed once from constraints-cpu.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.bench
VENV_GPU := .venv-gpu
READY_GPU := $(VENV_GPU)/.ready
VENV_MEGATRON := .venv-megatron
READY_MEGATRON := $(VENV_MEGATRON)/.ready
PYTHON_312 := import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 12) <= v <= (3, 13) else f"This needs Python 3.12 or 3.13, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu quickstart quickstart-math test test-gpu test-megatron lint bench clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Beamline needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV): about 1.6 GB, most of it torch; a minute or two, or as long as the download takes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints-cpu.txt torch
	$(BIN)/pip install --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	@touch $@

setup: $(READY)  ## create .venv and install

quickstart: $(READY)  ## train the starter model on sums for 50 steps, in a new folder under runs/
quickstart-math: $(READY)  ## the same on problems worded like those of competitions
quickstart quickstart-math:
	@run=runs/$@; n=1; while [ -e $$run ]; do n=$$((n + 1)); run=runs/$@-$$n; done; \
	echo $(BIN)/beamline train recipes/$@.yaml output=$$run; \
	exec $(BIN)/beamline train recipes/$@.yaml output=$$run

test: $(READY)  ## check style and types, then run all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

$(READY_GPU): pyproject.toml constraints-gpu.txt
	@$(PYTHON) -c '$(PYTHON_312)'
	@echo "Setting up $(VENV_GPU): vLLM, Megatron-Core, torch for CUDA and what they bring, which is many gigabytes."
	$(PYTHON) -m venv $(VENV_GPU)
	$(VENV_GPU)/bin/pip install --disable-pip-version-check -c constraints-gpu.txt -e '.[dev,vllm,megatron]'
	@touch $@

setup-gpu: $(READY_GPU)  ## create .venv-gpu with vLLM and Megatron-Core, for a machine with an NVIDIA GPU (Python 3.12)

test-gpu: $(READY_GPU)  ## in .venv-gpu: the tests that need a GPU; results in benchmarks/results
	$(VENV_GPU)/bin/pytest tests/gpu

$(READY_MEGATRON): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c '$(PYTHON_312)'
	$(PYTHON) -m venv $(VENV_MEGATRON)
	$(VENV_MEGATRON)/bin/pip install --disable-pip-version-check -c constraints-cpu.txt torch
	$(VENV_MEGATRON)/bin/pip install --disable-pip-version-check -c constraints-cpu.txt -e '.[dev,megatron]'
	@touch $@

test-megatron: $(READY_MEGATRON)  ## in .venv-megatron (Python 3.12): the learner over Megatron-Core, its ranks as processes on the CPU
	$(VENV_MEGATRON)/bin/pytest tests/cluster

lint: $(READY)  ## check style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

$(PEERS): $(READY)
	$(BIN)/pip install --disable-pip-version-check -c constraints-cpu.txt -e '.[bench]'
	@touch $@

bench: $(PEERS)  ## measure against peers, then the quickstart; results in benchmarks/results
	$(BIN)/python -m benchmarks

clean:  ## remove .venv, .venv-gpu, .venv-megatron and build (runs stay)
	rm -rf $(VENV) $(VENV_GPU) $(VENV_MEGATRON) build
