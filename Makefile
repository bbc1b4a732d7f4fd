# Two commands: `make demo` shows the app on simulated GPUs, `make test` checks everything.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test check pytest install clean

demo: install
	$(BIN)/sae-tui --demo

test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j 2 check pytest

pytest: $(VENV)/.dev
# Three on two cores, since many tests wait for other processes.
	$(BIN)/pytest -n 3 --dist worksteal

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.app

# torch comes first and by its pinned version, since the newest build brings gigabytes of CUDA libraries.
$(VENV)/.app: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.app
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
