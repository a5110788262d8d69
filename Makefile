# `make run` needs only what serving needs; everything else installs the development set-up into the same environment.
PYTHON ?= python3
VENV := .venv
BIN = $(VENV)/bin
CONSTRAINTS := scripts/constraints.txt
# in the environment, and by its two names there, so that it also holds for what the native kernels are built with;
# of 25,000 modules those that are imported are compiled then
INSTALL = PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --no-compile
# what an installed copy is built from; Python files are used where they lie
BUILT := pyproject.toml $(CONSTRAINTS) pipelines/kernels/CMakeLists.txt $(shell find pipelines/kernels -name '*.cpp' -o -name '*.h')
# the checks of a file that a person wrote; generated folders stay out
SOURCES := zoo pipelines scripts tests docs/site

.PHONY: run test test-all fuzz lint stub docs bench wheel sanitize clean

run: $(VENV)/.runtime
	$(BIN)/python scripts/first_run.py

# Training in torch, and the toolkits that models are imported from, in a process of their own: with tensorflow and both engines in it,
# torch crashed there when it started another process.
TRAINING := tests/zoo/vision/training/test_train.py tests/zoo/vision/training/test_qat.py tests/zoo/vision/training/test_smaller.py $(wildcard tests/zoo/translation/importers/test_import_*.py) \
	tests/zoo/translation/training/test_train.py tests/zoo/translation/training/test_finetune_imported.py tests/zoo/translation/training/test_students.py tests/zoo/translation/training/test_pruning.py

# Processes read what others compiled: without bytecode, each of hundreds compiles all modules, and rewrites the tests' assertions, anew.
test test-all fuzz sanitize: export PYTHONDONTWRITEBYTECODE :=

# A file's tests stay in one process: they share what is slow to make.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile

# Trainings run beside the other tests, which leave cores idle where they wait; then come their lines, and one line of both results.
define pytest
@mkdir -p build; $(BIN)/python -m pytest $(1) $(TRAINING) > build/trainings.log 2>&1 & beside=$$!; \
	trap 'kill $$beside; exit 130' INT TERM; \
	$(BIN)/python -m pytest $(PARALLEL) $(1) $(TRAINING:%=--ignore=%); tests=$$?; \
	wait $$beside; trainings=$$?; cat build/trainings.log; \
	result() { if [ $$1 = 0 ]; then echo passed; else echo "FAILED (exit $$1)"; fi; }; \
	echo "make $@: tests $$(result $$tests), training in torch $$(result $$trainings)"; [ $$tests$$trainings = 00 ]
endef

test: $(VENV)/.development
	$(call pytest)

test-all: $(VENV)/.development
	$(call pytest,-m "slow or data or not slow" --hypothesis-profile=thorough)

# The tests of tests/faults with so many random examples each, other ones every time.
FUZZ ?= 3000
fuzz: $(VENV)/.development
	ZOO_FUZZ=$(FUZZ) $(BIN)/python -m pytest -m "slow or not slow" tests/faults

lint: $(VENV)/.development
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

# The types of the native kernels, by which mypy checks the calls into C++; tests/pipelines/kernels/test_stub.py says when it is stale.
stub: $(VENV)/.development
	$(INSTALL) nanobind
	$(BIN)/python -m nanobind.stubgen -q -m pipelines.kernels._native -o pipelines/kernels/_native.pyi

# The site: the pages, and the API reference from the docstrings. To read it: python -m http.server -d build/site
docs: $(VENV)/.development
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict -f docs/site/mkdocs.yml

bench: $(VENV)/.development
	$(INSTALL) -e ".[peers,ray]"
	$(BIN)/python scripts/reproduce.py

wheel: $(VENV)/bin/python
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist . ./deploy/weights

# The tests of the native kernels, and what the fault suite does to them, under AddressSanitizer and UndefinedBehaviorSanitizer, in an environment of their own; needs g++.
sanitize: VENV := build/sanitize
sanitize:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -C cmake.define.ZOO_SANITIZE=ON -C build-dir=$(VENV)/cmake -e ".[test]"
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest --capture=sys tests/pipelines/kernels tests/faults/test_fuzz.py tests/faults/test_calls.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BUILT) | $(VENV)/bin/python
	$(INSTALL) -C cmake.define.ZOO_THIS_CPU=ON -e ".[openvino]"
	touch $@

$(VENV)/.development: $(BUILT) | $(VENV)/bin/python
	$(INSTALL) -C cmake.define.ZOO_THIS_CPU=OFF -C cmake.define.ZOO_MODELS=ON -e ".[train,import,serve,test,docs]"
	touch $@ $(VENV)/.runtime
