# make demo: install the core and compare samplers. make test: install and check everything that takes minutes.
# make test-more: also the rest of many like cases, as .ci/run does. make test-all: also the tests that take longer.
# make docs: serve the site. make release: the wheel, checked.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

unexport PYTHONDONTWRITEBYTECODE  # it would let every process of the tests compile everything again

.PHONY: demo test test-more test-all test-hard check docs site notebooks release clean

demo: .venv/.core
	$(BIN)/limpet compare --precision auto

.venv/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $@

.venv/.dev: .venv/.core
	$(PIP) --editable '.[dev]'
	touch $@

# SGLang's own classes drive limpet's in the tests: its wheel without most of what it depends on, in a folder of its own.
# There is a wheel for Linux on x86_64; elsewhere these tests are skipped.
ENGINES := sglang orjson gguf pybase64 msgspec apache-tvm-ffi partial-json-parser einops sentencepiece \
	compressed-tensors loguru

.venv/.engines: .venv/.core constraints.txt
ifeq ($(shell uname -sm),Linux x86_64)
	rm -rf .venv/engines
	$(PIP) --no-deps --target .venv/engines $(ENGINES)
endif
	touch $@

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/vocabulary.py
	$(BIN)/python tools/prose.py
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check .venv/.engines
	$(BIN)/pytest -n 2 --dist worksteal --durations=10

test-more: test
	$(BIN)/pytest -n 2 --dist worksteal -m 'more and not long' --durations=10

# One after the other, since some measure time, as a ratio within one run.
test-all: test-more
	$(BIN)/pytest -m long --durations=10

# Three times in a row beside busy loops, in the background, without HOME, in another locale and time zone.
test-hard: .venv/.dev .venv/.engines
	$(BIN)/python tools/hard_conditions.py

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

site: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: .venv/.dev
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

release: .venv/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/release.py dist

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
