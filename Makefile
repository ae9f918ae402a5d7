# `make test` and `make demo` need nothing but Python: the first use of either builds .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: test lint unit demo bench clean

test: lint unit

lint: $(VENV)/ready
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy

unit: $(VENV)/ready
	$(RUN)/python -m pytest -q -n auto

demo: $(VENV)/ready
	$(RUN)/cadam demo

bench: $(VENV)/ready
	$(RUN)/cadam bench

$(VENV)/ready: pyproject.toml constraints.txt hatch_build.py $(wildcard src/cadam/kernels/build.py src/cadam/kernels/native/*)
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
