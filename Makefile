# `make run` needs only what serving needs; everything else installs the development set-up into the same environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := scripts/constraints.txt
# the checks of a file that a person wrote; generated folders stay out
SOURCES := zoo pipelines scripts tests

.PHONY: run test test-all lint bench clean

run: $(VENV)/.runtime
	$(BIN)/python scripts/first_run.py

test: $(VENV)/.development
	$(BIN)/python -m pytest

test-all: $(VENV)/.development
	$(BIN)/python -m pytest -m "slow or data or not slow"

lint: $(VENV)/.development
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

bench: $(VENV)/.development
	$(BIN)/python scripts/reproduce.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.development: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[train,test]"
	touch $@ $(VENV)/.runtime
