# make setup   environment in .venv (installs missing Debian packages when root)
# make demo    a fabric on this machine, four faults, four verdicts (under 5 minutes)
# make test    lint, types, import rules, tests
# make test-vm tests of RDMA inside a virtual machine with Soft-RoCE (QEMU; no KVM needed)
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Python that makes the environment; empty: the first >= 3.11 that can, /usr/bin/python3 preferred.
PYTHON ?=

.PHONY: help setup demo test test-vm lint format lock clean

help:
	@sed -n '1,4s/^# //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock tools/setup.sh
	@tools/setup.sh "$(VENV)" "$(PYTHON)"
	@touch $@

demo: setup
	@$(BIN)/pingmesh lab demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest

# VM_TESTS="tests/vm/test_x.py -k name": only those.
test-vm: setup
	@tools/test-vm.sh "$(VENV)" $(VM_TESTS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins every dependency with hashes; run it after changing dependencies in pyproject.toml. Needs uv.
lock:
	uv pip compile pyproject.toml --extra controller --extra dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet $(UPGRADE) --output-file requirements.lock

clean:
	rm -rf $(VENV) build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
