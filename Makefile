# make demo: install and compare samplers. make test: install and check everything.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-long check venv clean

demo: $(STAMP)
	$(BIN)/limpet compare

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest -n 2 --durations=10

test-long: $(STAMP)
	$(BIN)/pytest -m long --durations=10

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
